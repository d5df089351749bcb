"""``fast-axolotl watch``: a run or a process, while it is running."""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from fast_axolotl.cli.options import AsJson, examples
from fast_axolotl.errors import DataError, UsageError

WATCH_EXAMPLES = examples(
    "watch fast-axolotl-runs/20300131-120000-axolotl",
    "watch 4711",
    "watch 4711 --seconds 60 --data-path data/ --output runs/first",
    "watch 4711 --seconds 10 --json",
)

_GROUPS = ("Memory of all processes", "CPU", "Disk and swap", "GPU")
"""Of figures, those that can be seen from outside."""
_ELSEWHERE = (
    "Stall, rows/s, tokens/s and MFU cannot be seen from outside. To get them, start the command "
    "with\nfast-axolotl measure -- COMMAND"
)


def watch(
    target: Annotated[
        str,
        typer.Argument(
            help="A process id (child processes are included), or the folder of a run.",
            metavar="PID|RUN",
        ),
    ],
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Stop after this many seconds. Default: until it ends, or Ctrl-C.", min=0.1
        ),
    ] = None,
    data_path: Annotated[
        str | None,
        typer.Option(
            help="For a PID: the training data, to measure the read speed of its disk first."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="For a PID: save the samples in this folder, for fast-axolotl show.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Watch a run live: what limits it so far, throughput, memory, disk and swap.

    For the folder of a run that is being measured, it shows all figures. For any other process, it
    shows what can be seen from outside: CPU, memory, disk, swap and GPU.

    Ctrl-C quits. Without a terminal, it prints one line per second. The watched process is not
    changed. To watch a folder whose name is a number, write ./4711.
    """
    if target.isdecimal():
        _watch_process(int(target), seconds, data_path, output, as_json=as_json)
        return
    if data_path or output:
        raise UsageError("--data-path and --output need a PID; the folder of a run has both")
    from fast_axolotl.cli.live import watch_record

    watch_record(Path(target), seconds, as_json=as_json)


def _watch_process(
    pid: int, seconds: float | None, data_path: str | None, output: Path | None, *, as_json: bool
) -> None:
    """Sample a process into a record, and show that as it grows."""
    from fast_axolotl.cli.live import watch_folder
    from fast_axolotl.cli.report import read_report_run
    from fast_axolotl.measure.sampler import SystemSampler, check_process
    from fast_axolotl.record import LineWriter
    from fast_axolotl.record.catalogue import GROUPS
    from fast_axolotl.record.codec import to_json, to_plain
    from fast_axolotl.report.document import Document
    from fast_axolotl.report.runs import figure_group
    from fast_axolotl.report.terminal import print_document

    check_process(pid)
    if output is not None and (output / "system.jsonl").exists():
        raise UsageError(f"{output / 'system.jsonl'} already exists: choose another --output")
    made = tempfile.TemporaryDirectory(prefix="fast-axolotl-watch-")
    with made if output is None else nullcontext(output) as name:
        folder = Path(name)
        writer = LineWriter(folder / "system.jsonl")
        sampler = SystemSampler(
            pid, writer, data_path=data_path, exclude_pids=(os.getpid(),), source="watch"
        )
        if writer.failure:
            raise DataError(
                f"the record cannot be written: {writer.failure}; choose another --output"
            )
        why = ""
        try:
            sampler.start()
            start = sampler.begin()
            title = f"process {pid}  {' '.join(start.command)}"
            why = watch_folder(
                folder,
                seconds,
                lambda _: sampler.failure or ("" if sampler.is_alive else "the process ended"),
                title=title,
                as_json=as_json,
            )
        finally:
            sampler.stop("interrupted" if why in ("", "Ctrl-C") else "finished")
        run = read_report_run(folder, "")
        if writer.failure:
            raise DataError(
                f"the record ends early: {writer.failure}; free space or choose another folder"
            )
    if as_json:
        samples = run.record.system.samples if run.record.system is not None else []
        processes = max((sample.processes for sample in samples), default=0)
        found = {"root_pid": pid, "command": start.command, "most_processes": processes}
        print(to_json({**found, "ending": why, **to_plain(run.summary)}))
        return
    groups = [figure_group(group, GROUPS[group], [run]) for group in _GROUPS]
    print_document(Document(title=f"\n{title}, watched until {why}", blocks=groups))
    print(_ELSEWHERE)
