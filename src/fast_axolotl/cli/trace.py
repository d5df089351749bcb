"""``fast-axolotl trace``: where a step's time goes on many GPUs, from profiler traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fast_axolotl.cli.options import AsJson, examples
from fast_axolotl.errors import MissingFileError, UsageError

if TYPE_CHECKING:
    from fast_axolotl.plan.trace import TraceSummary
    from fast_axolotl.report.document import Document

TRACE_EXAMPLES = examples(
    "trace traces/", "trace rank0.json.gz rank1.json.gz", "trace traces/ --steps 3:8"
)
_MOST_STEPS = 24
_MOST_COLLECTIVES = 12
_MOST_KERNELS = 5


def trace(
    traces: Annotated[
        list[str],
        typer.Argument(help="Traces of torch.profiler, one per rank.", metavar="TRACE…"),
    ],
    as_json: AsJson = False,
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
    from fast_axolotl.report.terminal import print_document

    chosen = None
    if steps is not None:
        first, colon, end = steps.partition(":")
        if colon and f"{first}{end}0".isdecimal():
            chosen = range(int(first or 0), int(end or 2**62))
        if not chosen:
            raise UsageError(
                f"cannot read {steps!r} as steps; write 3:8 for 3 to 7, or 3: for the rest"
            )
    files: list[Path] = []
    for text in traces:
        path = Path(text)
        found = [path] if path.exists() else sorted(Path(path.anchor).glob(text.lstrip("/")))
        if path.is_dir():
            every = sorted((*path.rglob("*.json"), *path.rglob("*.json.gz")))
            found = [file for file in every if ".pt.trace.json" in file.name] or every
        if not found:
            raise MissingFileError("no trace (.json or .json.gz) found here", path=text)
        files += found
    summary = summarise_traces(list(dict.fromkeys(files)), steps=chosen)
    print(to_json(summary)) if as_json else print_document(trace_document(summary))


def trace_document(summary: TraceSummary) -> Document:
    """The mean step of each rank, every step where there are few, communication, slow kernels."""
    from fast_axolotl.record.units import format_bytes, format_seconds, format_share
    from fast_axolotl.report.document import Block, Bullets, Document, Row, Section, Table

    parts = ["step time", "compute", "overlapped", "exposed", "waiting", "copies", "idle"]
    means: list[Row] = []
    every: list[Row] = []
    for one in (*summary.ranks, *summary.steps):
        shares = (one.compute_seconds, one.overlapped_seconds, one.exposed_seconds)
        rest = (one.waiting_seconds, one.copy_seconds, one.idle_seconds)
        whole = one.seconds or 1
        cells = [format_share(None if part is None else part / whole) for part in (*shares, *rest)]
        cells.insert(0, format_seconds(one.seconds))
        if len(means) < len(summary.ranks):
            count = sum(step.rank == one.rank for step in summary.steps)
            means.append([str(one.rank), f"{count:,}", *cells])
        else:
            every.append([f"{one.rank}, {one.step}", *cells])
    notes = list(summary.notes)
    if len(means) > 1:
        rank = "none" if summary.straggler is None else f"rank {summary.straggler}"
        notes.insert(0, f"Straggler: {rank}. {summary.straggler_reason}")
    blocks: list[Block] = [Table(header=["rank", "steps", *parts], rows=means)]
    blocks.append(Bullets(notes, is_muted=True))

    def add(title: str, header: list[str], rows: list[Row]) -> None:
        blocks.append(Section(title=title, blocks=[Table(header=header, rows=rows)]))

    if len(means) < len(every) <= _MOST_STEPS:
        add("Every step", ["rank, step", *parts], every)
    if summary.collectives:
        title = "Communication, all ranks together"
        if len(summary.collectives) > _MOST_COLLECTIVES:
            title += f" (the {_MOST_COLLECTIVES} with the most time; --json has all)"
        header = ["collective", "group", "ranks", "message", "count", "time", "waiting"]
        rows: list[Row] = []
        for row in summary.collectives[:_MOST_COLLECTIVES]:
            speed, bound = row.bus_bytes_per_second, "" if row.matched else "≥ "
            group = "–" if row.group is None else row.group[:24] or "not named"
            cells = [row.kind, group, str(row.group_size or "–"), format_bytes(row.num_bytes)]
            cells += [f"{row.count:,}", format_seconds(row.seconds)]
            cells.append(format_seconds(row.waiting_seconds))
            rows.append([*cells, "–" if speed is None else f"{bound}{format_bytes(speed)}/s"])
        add(title, [*header, "bus bandwidth"], rows)
    if summary.slowdown is not None:
        title = f"Kernels take {summary.slowdown:.2f} times as long while communication runs"
        rows = []
        for kernel in summary.slowdowns[:_MOST_KERNELS]:
            alone, beside = kernel.alone_seconds, kernel.beside_seconds
            cells = [kernel.name[:60], f"{kernel.alone:,}", format_seconds(alone)]
            cells += [f"{kernel.beside:,}", format_seconds(beside), f"{kernel.ratio:.2f}"]
            rows.append(cells)
        add(title, ["kernel", "alone", "median", "with communication", "median", "ratio"], rows)
    return Document(title="Mean step of each rank", blocks=blocks)
