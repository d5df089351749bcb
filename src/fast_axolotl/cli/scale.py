"""``fast-axolotl scale``: one job on several numbers of GPUs, and what more of them bring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fast_axolotl.cli.options import ResultAsJson, examples, say

if TYPE_CHECKING:
    from fast_axolotl.plan.scale import Run, Scaling
    from fast_axolotl.report.document import Document

SCALE_EXAMPLES = examples("scale runs/1-gpu runs/2-gpus", "scale protocols/sizes")
Runs = Annotated[
    list[Path],
    typer.Argument(help="Records, or a protocol made with --world-size.", metavar="RUN…"),
]


def scale(runs: Runs, as_json: ResultAsJson = False) -> None:
    """Compare runs of one job on several numbers of GPUs: efficiency, and what reduces it.

    Several runs on the same number of GPUs count as repeats. For numbers that were not measured,
    use fast-axolotl plan.
    """
    from fast_axolotl.measure.summary import summarise
    from fast_axolotl.plan.scale import make_scaling, read_scaling_run
    from fast_axolotl.protocol.statistics import compare_runs
    from fast_axolotl.record.codec import to_json
    from fast_axolotl.record.protocol_result import PROTOCOL_FILE, ProtocolResult
    from fast_axolotl.record.run_folders import read_training
    from fast_axolotl.report.terminal import print_document

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
    found = make_scaling(figures, compare_runs, unit=unit)
    print(to_json(found)) if as_json else print_document(scale_document(found))


def scale_document(found: Scaling) -> Document:
    """Every number of GPUs, where efficiency goes, and what to know."""
    from fast_axolotl.record.units import format_count, format_seconds, format_share
    from fast_axolotl.report.document import (
        Block,
        Bullets,
        Document,
        Paragraph,
        Row,
        Section,
        Table,
    )

    rows: list[Row] = []
    losses: list[Row] = []
    names = list(dict.fromkeys(name for one in found.counts for name in one.losses))
    names.sort(key="not explained".__eq__)
    for one in found.counts:
        row = [str(one.gpus), str(one.runs), format_count(one.rate)]
        row += [f"{format_count(one.rate_low)} to {format_count(one.rate_high)}"]
        row += [format_count(one.rate_per_gpu), format_share(one.efficiency)]
        row += [f"{format_share(one.efficiency_low)} to {format_share(one.efficiency_high)}"]
        row += [format_seconds(one.step_seconds), format_count(one.batch_per_gpu)]
        row += [format_share(one.added, decimals=0)]
        rows.append([cell.replace("– to –", "–") for cell in row])
        lost = [1 - one.efficiency, *(one.losses.get(name) for name in names)]
        losses.append([str(one.gpus), *map(format_share, lost)])
    header = ["GPUs", "runs", f"{found.unit}/s", "95 %", "per GPU", "efficiency", "95 %"]
    header += ["step p50", "batch per GPU", "gain of one more GPU"]
    same = {"weak": "same batch per GPU", "strong": "same global batch"}
    kind = same.get(found.kind, "batch per GPU and global batch both change")
    title = "Lost efficiency in points, by cause"
    blocks: list[Block] = [
        Table(header=header, rows=rows),
        Section(title=title, blocks=[Table(header=["GPUs", "lost", *names], rows=losses[1:])]),
        *(Paragraph(warning, "warning") for warning in found.warnings),
        Bullets(found.notes, is_muted=True),
    ]
    return Document(title=f"Scaling, {found.kind}: {kind}", blocks=blocks)
