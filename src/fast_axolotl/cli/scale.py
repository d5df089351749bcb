"""``fast-axolotl scale``: one job on several numbers of GPUs, and what more of them bring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fast_axolotl.cli.options import ResultAsJson, examples, say
from fast_axolotl.cli.plan import parse_price

if TYPE_CHECKING:
    from fast_axolotl.plan.scale import Run, Scaling

SCALE_EXAMPLES = examples("scale runs/1-gpu runs/2-gpus --price 2.5/h", "scale protocols/sizes")
Runs = Annotated[
    list[Path],
    typer.Argument(help="Records, or a protocol made with --world-size.", metavar="RUN…"),
]
Price = Annotated[str | None, typer.Option(help="Dollars per GPU and hour, for example 2.5/h.")]


def scale(runs: Runs, price: Price = None, as_json: ResultAsJson = False) -> None:
    """Compare runs of one job on several numbers of GPUs: efficiency, and what reduces it.

    Several runs on the same number of GPUs count as repeats. Fitted curves show up to how many GPUs
    it pays to scale.
    """
    from fast_axolotl.measure.summary import summarise
    from fast_axolotl.plan.scale import make_scaling, read_scaling_run
    from fast_axolotl.protocol.statistics import compare_runs
    from fast_axolotl.record.codec import to_json
    from fast_axolotl.record.protocol_result import PROTOCOL_FILE, ProtocolResult
    from fast_axolotl.record.run_folders import read_training

    dollars = None if price is None else parse_price(price)
    pairs: dict[Path, str] = {}
    for path in {path.resolve(): path for path in runs}.values():
        if not (path / PROTOCOL_FILE).is_file():
            pairs[path] = ""
            continue
        for arm in ProtocolResult.read(path).arms:
            done = [run for run in arm.runs if run.pair >= 0 and run.status == "done"]
            pairs |= {path / run.folder: f"{path}:{run.pair}" for run in done}
            if not done:
                say(f"{path}: {arm.name} has no measured run and is left out")
    figures: list[Run] = []
    unit = ""
    for path, pair in pairs.items():
        summary = summarise(record := read_training(path))
        unit = unit or ("tokens" if summary.tokens_per_second else "samples")
        if summary.verdict.kind in ("inconclusive", "cpu"):
            say(f"{path}: {summary.verdict.headline}")
        figures.append(read_scaling_run(record, summary, pair, unit))
    found = make_scaling(figures, compare_runs, unit=unit, price=dollars)
    print(to_json(found)) if as_json else _print(found)


def _print(found: Scaling) -> None:
    from fast_axolotl.plan.scale import FAR
    from fast_axolotl.record.units import format_count, format_seconds, format_share
    from fast_axolotl.report.terminal import show_matrix

    unit, counts, rows, losses = found.unit, found.counts, [], []
    names = list(dict.fromkeys(name for one in counts for name in one.losses))
    names.sort(key="not explained".__eq__)
    for one in counts:
        ends = [format_count(one.rate_low), format_count(one.rate_high)]
        shares = [format_share(one.efficiency_low), format_share(one.efficiency_high)]
        row = [str(one.gpus), str(one.runs), format_count(one.rate), " to ".join(ends)]
        row += [format_count(one.rate_per_gpu), format_share(one.efficiency), " to ".join(shares)]
        row += [format_seconds(one.step_seconds), format_count(one.batch_per_gpu)]
        row += [format_share(one.added, decimals=0), format_count(one.dollars_per_million)]
        rows.append([cell.replace("– to –", "–") for cell in row])
        lost = [1 - one.efficiency, *(one.losses.get(name) for name in names)]
        losses.append([str(one.gpus), *map(format_share, lost)])
    header = ["GPUs", "runs", f"{unit}/s", "95 %", "per GPU", "efficiency", "95 %", "step p50"]
    header += ["batch per GPU", "gain of one more GPU", f"$ per M {unit}"]
    same = {"weak": "same batch per GPU", "strong": "same global batch"}
    kind = same.get(found.kind, "batch per GPU and global batch both change")
    show_matrix(f"Scaling, {found.kind}: {kind}", header, rows)
    show_matrix("Lost efficiency in points, by cause", ["GPUs", "lost", *names], losses[1:])
    rows = []
    for law, curve in (("Amdahl", found.amdahl), ("USL", found.usl)):
        if curve is not None:
            errors = (curve.error, curve.left_out_error, curve.largest_error)
            row = [law, f"{curve.sigma:.3g}", f"{curve.kappa:.3g}", *map(format_share, errors)]
            for gpus in (curve.peak_gpus, curve.worth_gpus):
                row.append(format_count(gpus) + " (far)" * ((gpus or 0) > FAR * counts[-1].gpus))
            rows.append(row)
    header = ["", "σ", "κ", "error", "left-out error", "largest", "peak at", "worth it up to"]
    notes = [f"! {warning}" for warning in found.warnings] + list(found.notes)
    show_matrix("Fitted curves", header, rows, notes)
