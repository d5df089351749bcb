"""``fast-axolotl trace``: where a step's time goes on many GPUs, from profiler traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fast_axolotl.cli.options import AsJson, examples
from fast_axolotl.errors import MissingFileError, UsageError

if TYPE_CHECKING:
    from fast_axolotl.plan.trace import CollectiveRow, StepParts, TraceSummary

TRACE_EXAMPLES = examples(
    "trace traces/", "trace rank0.json.gz rank1.json.gz --link 50", "trace traces/ --steps 3:8"
)

_MOST_STEPS = 24
_MOST_COLLECTIVES = 12
_MOST_KERNELS = 5
_PARTS = ("step time", "compute", "overlapped", "exposed", "waiting", "copies", "idle")


def trace(
    traces: Annotated[
        list[str],
        typer.Argument(help="Traces of torch.profiler, one per rank.", metavar="TRACE…"),
    ],
    as_json: AsJson = False,
    link: Annotated[
        float | None,
        typer.Option(help="Bandwidth of the link between GPUs in GB/s, to compare with."),
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Only these steps of the profiler: 3:8 means 3 to 7.")
    ] = None,
) -> None:
    """Split step time into compute, communication and idle time, from torch.profiler traces.

    Pass files, folders or globs, one trace per rank. With several ranks, it separates waiting for
    other ranks from transfer and names the straggler. Traces of some ranks are enough; what needs
    the others stays empty.
    """
    from fast_axolotl.plan.trace import summarise_traces
    from fast_axolotl.record.codec import to_json

    if link is not None and not link > 0:
        raise UsageError(f"--link is {link:g}; pass the bandwidth of the link in GB/s")
    summary = summarise_traces(
        _find_traces(traces),
        steps=None if steps is None else _parse_steps(steps),
        link_bytes_per_second=None if link is None else link * 1e9,
    )
    print(to_json(summary)) if as_json else _print_summary(summary)


def _parse_steps(text: str) -> range:
    first, colon, end = text.partition(":")
    try:
        found = range(int(first or 0), int(end or 2**62))
    except ValueError:
        found = range(0)
    if not (colon and found):
        raise UsageError(f"cannot read {text!r} as steps; write 3:8 for 3 to 7, or 3: for the rest")
    return found


def _find_traces(inputs: Sequence[str]) -> list[Path]:
    """Files, globs, and what folders hold: ``*.pt.trace.json`` where there are any."""
    found: list[Path] = []
    for text in inputs:
        path = Path(text)
        files = [path] if path.exists() else sorted(Path(path.anchor).glob(text.lstrip("/")))
        if path.is_dir():
            every = sorted((*path.rglob("*.json"), *path.rglob("*.json.gz")))
            files = [file for file in every if ".pt.trace.json" in file.name] or every
        if not files:
            raise MissingFileError("no trace (.json or .json.gz) found here", path=text)
        found += files
    return list(dict.fromkeys(found))


def _print_summary(summary: TraceSummary) -> None:
    from fast_axolotl.record.units import format_seconds
    from fast_axolotl.report.terminal import show_matrix

    counts = [sum(step.rank == mean.rank for step in summary.steps) for mean in summary.ranks]
    rows = [
        [str(mean.rank), f"{count:,}", *_step_cells(mean)]
        for mean, count in zip(summary.ranks, counts, strict=True)
    ]
    notes = list(summary.notes)
    if len(rows) > 1:
        rank = "none" if summary.straggler is None else f"rank {summary.straggler}"
        notes.insert(0, f"Straggler: {rank}. {summary.straggler_reason}")
    show_matrix("Mean step of each rank", ("rank", "steps", *_PARTS), rows, notes)
    if len(rows) < len(summary.steps) <= _MOST_STEPS:
        cells = [[f"{step.rank}, {step.step}", *_step_cells(step)] for step in summary.steps]
        show_matrix("Every step", ("rank, step", *_PARTS), cells)
    if summary.collectives:
        header = ["collective", "group", "ranks", "message", "count", "time", "waiting"]
        left_out = len(summary.collectives) - _MOST_COLLECTIVES
        show_matrix(
            "Communication, all ranks together",
            [*header, "bus bandwidth", "of the link"],
            [_collective_cells(row) for row in summary.collectives[:_MOST_COLLECTIVES]],
            [f"{left_out} more with less time: see --json."] if left_out > 0 else [],
        )
    if summary.slowdown is not None:
        show_matrix(
            f"Kernels take {summary.slowdown:.2f} times as long while communication runs",
            ("kernel", "alone", "median", "with communication", "median", "ratio"),
            [
                (
                    row.name[:60],
                    f"{row.alone:,}",
                    format_seconds(row.alone_seconds),
                    f"{row.beside:,}",
                    format_seconds(row.beside_seconds),
                    f"{row.ratio:.2f}",
                )
                for row in summary.slowdowns[:_MOST_KERNELS]
            ],
        )


def _step_cells(step: StepParts) -> list[str]:
    """The time of a step, and the parts' shares of it."""
    from fast_axolotl.record.units import format_seconds, format_share

    parts = (step.compute_seconds, step.overlapped_seconds, step.exposed_seconds)
    rest = (step.waiting_seconds, step.copy_seconds, step.idle_seconds)
    shares = [None if part is None else part / (step.seconds or 1) for part in (*parts, *rest)]
    return [format_seconds(step.seconds), *map(format_share, shares)]


def _collective_cells(row: CollectiveRow) -> list[str]:
    from fast_axolotl.record.units import format_bytes, format_seconds, format_share

    speed = row.bus_bytes_per_second
    bound = "" if row.matched else "≥ "
    return [
        row.kind,
        "–" if row.group is None else row.group[:24] or "not named",
        str(row.group_size or "–"),
        format_bytes(row.num_bytes),
        f"{row.count:,}",
        format_seconds(row.seconds),
        format_seconds(row.waiting_seconds),
        "–" if speed is None else f"{bound}{format_bytes(speed)}/s",
        format_share(row.link_share),
    ]
