"""``fast-axolotl watch``: a run or a process, while it is running."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fast_axolotl.cli.options import AsJson, examples
from fast_axolotl.errors import DataError, UsageError

if TYPE_CHECKING:
    from fast_axolotl.measure.system_figures import Watched
    from fast_axolotl.record import SystemSample

WATCH_EXAMPLES = examples(
    "watch fast-axolotl-runs/20300131-120000-axolotl",
    "watch fast-axolotl-protocols/20300131-120000",
    "watch 4711",
    "watch 4711 --seconds 60 --data-path data/ --output runs/first",
    "watch 4711 --seconds 10 --json",
)

_TABLE = {
    "process": "{root_pid}  {command}",
    "watched": "{seconds}, until {ending}",
    "processes": "{most_processes} at most",
    "CPU": "{cpu_cores}; other programs use {other_cpu_share} of the cores",
    "CPU not given": "throttled {cpu_throttled_share}, taken by the host {cpu_steal_share}",
    "working set": "{working_set_bytes}, peak {working_set_peak_bytes}",
    "mapped files": "{mapped_file_bytes}",
    "resident (sum of RSS)": "{rss_bytes}: anonymous {anon_bytes}, files {file_bytes}, "
    "shared {shared_bytes}",
    "peak resident (upper bound)": "{hwm_bytes}, {spike_ratio} the resident size",
    "memory limit": "{limit_bytes}, up to {limit_share} used",
    "disk reads": "{read_bytes_per_second}",
    "file reads": "{read_chars_per_second}, page cache included",
    "disk speed": "{disk_bytes_per_second}, {disk_share} of it used",
    "disk request": "{disk_request_bytes} on average",
    "swap": "machine in {swap_in_bytes_per_second}, out {swap_out_bytes_per_second}; "
    "this process tree holds {process_swap_bytes}",
    "waited for": "CPU {psi_cpu_some}, memory {psi_memory_full}, disk {psi_io_full} of the time",
    "out-of-memory kills": "{oom_kills}",
    "GPU": "{gpu_utilization} busy, {gpu_memory_bytes} used, {gpu_free_bytes} free, "
    "{gpu_power_watts}, {gpu_clock_mhz} ({gpu_names})",
}
"""What is printed at the end; the last row where there is a GPU."""
_ELSEWHERE = (
    "Stall, rows/s, tokens/s and MFU cannot be seen from outside. To get them, start the command "
    "with\nfast-axolotl measure -- COMMAND"
)


def watch(
    target: Annotated[
        str,
        typer.Argument(
            help="A process id (child processes are included), or the folder of a run or protocol.",
            metavar="PID|RUN",
        ),
    ],
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Stop after this many seconds. Default: until it ends, q or Ctrl-C.", min=0.1
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
    shows what can be seen from outside: CPU, memory, disk, swap and GPU. For a protocol, it shows
    each run in turn and how many are left.

    In a terminal, press p to pause, r to start a new window and q to quit. Elsewhere, it prints one
    line per second. The watched process is not changed. To watch a folder whose name is a number,
    write ./4711.
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
    from fast_axolotl.measure.sampler import SystemSampler, check_process
    from fast_axolotl.measure.summary import summarise
    from fast_axolotl.measure.system_figures import Watched
    from fast_axolotl.record import LineWriter
    from fast_axolotl.report.live import LineDisplay, LiveView, SampledProcess, open_display

    check_process(pid)
    writer = None
    if output is not None:
        path = output / "system.jsonl"
        if path.exists():
            raise UsageError(f"{path} already exists: choose another --output")
        writer = LineWriter(path)
        if writer.failure:
            raise DataError(
                f"the record cannot be written: {writer.failure}; choose another --output"
            )
    watched, source = Watched(), SampledProcess(pid)
    file = sys.stderr if as_json else sys.stdout
    display = open_display(file)
    has_screen = not isinstance(display, LineDisplay)

    def take(sample: SystemSample) -> None:
        watched.add(sample)
        source.add(sample)
        if not has_screen:
            print(_line(watched), file=file, flush=True)

    sampler = SystemSampler(
        pid,
        writer,
        data_path=data_path,
        on_sample=take,
        exclude_pids=(os.getpid(),),
        source="watch",
    )
    ending = "Ctrl-C"
    reason: Literal["finished", "interrupted"] = "interrupted"
    try:
        if has_screen:
            sampler.start()
            start = sampler.begin()
            source.begin(start, sampler.disk)
            ending = LiveView(
                source,
                summarise,
                display,
                title=lambda: f"{source.record.path}  {' '.join(start.command)}".strip(),
                is_outside=True,
                ending=lambda: sampler.failure or ("" if sampler.is_alive else "the process ended"),
            ).run(seconds)
        else:
            sampler.run(seconds)
            ending = "the time was up" if sampler.is_alive else "the process ended"
        reason = "interrupted" if ending == "Ctrl-C" else "finished"
    except KeyboardInterrupt:
        # The usual way to end watching: the summary follows, as of vmstat or perf.
        pass
    finally:
        sampler.stop(reason)
    watched.disk = sampler.disk
    figures = {**watched.figures(sampler.begin()), "ending": ending}
    if as_json:
        print(json.dumps(figures, indent=2, ensure_ascii=False))
    else:
        _print_figures(figures)
    if writer is not None and writer.failure:
        raise DataError(
            f"the record ends early: {writer.failure}; free space or choose another folder"
        )


def _line(watched: Watched) -> str:
    """One sample, for a file or a pipe."""
    from fast_axolotl.record.units import format_bytes, format_share

    def rate(name: str) -> str:
        return f"{format_bytes(watched.rate(name))}/s"

    sample = watched.samples[-1]
    cores = watched.rate("cpu_seconds")
    parts = [
        f"{sample.t:6.0f} s",
        f"processes {sample.processes}",
        f"working set {format_bytes(watched.working_set_bytes)}",
        f"RSS {format_bytes(sample.rss_bytes)}",
        f"CPU {'–' if cores is None else f'{cores:.1f}'} cores",
        f"disk reads {rate('read_bytes')}",
        f"file reads {rate('read_chars')}",
    ]
    if watched.rate("swap_in_bytes") or watched.rate("swap_out_bytes"):
        parts += [f"swap in {rate('swap_in_bytes')}", f"out {rate('swap_out_bytes')}"]
    parts += [f"GPU {gpu.index} {format_share(gpu.utilization)}" for gpu in sample.gpus]
    return "  ".join(parts)


def _print_figures(figures: dict[str, Any]) -> None:
    from fast_axolotl.record.catalogue import FIGURES
    from fast_axolotl.record.units import format_seconds
    from fast_axolotl.report.terminal import show_pairs

    shown = {
        **figures,
        **{name: FIGURES[name].format(value) for name, value in figures.items() if name in FIGURES},
        "seconds": format_seconds(figures["seconds"]),
        "command": " ".join(figures["command"]),
        "gpu_names": ", ".join(figures["gpu_names"]),
    }
    rows = [(name, text.format_map(shown)) for name, text in _TABLE.items()]
    print()
    show_pairs("", rows if figures["gpu_names"] else rows[:-1])
    reasons: dict[str, list[str]] = {}
    for name, reason in figures["reasons"].items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        is_gpu = all(name.startswith("gpu_") for name in names)
        title = "GPU" if is_gpu else ", ".join(name.replace("_", " ") for name in names)
        print(f"– {title}: {reason}")
    print(_ELSEWHERE)
