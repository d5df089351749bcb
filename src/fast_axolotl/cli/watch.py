"""``fast-axolotl watch``: a run or a process, looked at while it goes on."""

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

__all__ = ["WATCH_EXAMPLES", "watch"]

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
    "CPU": "{cpu_cores}; other programs {other_cpu_share} of the processors",
    "CPU refused": "throttled {cpu_throttled_share}, stolen {cpu_steal_share}",
    "working set": "{working_set_bytes}, peak {working_set_peak_bytes}",
    "mapped files": "{mapped_file_bytes}",
    "resident (ΣRSS)": "{rss_bytes}: anonymous {anon_bytes}, files {file_bytes}, "
    "shared {shared_bytes}",
    "high-water mark": "{hwm_bytes}, {spike_ratio} resident",
    "memory limit": "{limit_bytes}, peak {limit_share} of it",
    "device reads": "{read_bytes_per_second}",
    "read calls": "{read_chars_per_second}, cached ones included",
    "device capacity": "{disk_bytes_per_second}, {disk_share} of it used",
    "read request": "{disk_request_bytes} on average",
    "swap": "in {swap_in_bytes_per_second}, out {swap_out_bytes_per_second} of the machine; "
    "{process_swap_bytes} of the process",
    "pressure": "CPU {psi_cpu_some}, memory {psi_memory_full}, I/O {psi_io_full} of the time",
    "killed for memory": "{oom_kills}",
    "GPU": "{gpu_utilization} busy, {gpu_memory_bytes} used, {gpu_free_bytes} free, "
    "{gpu_power_watts}, {gpu_clock_mhz} ({gpu_names})",
}
"""What is printed at the end; the last row where there is a GPU."""
_ELSEWHERE = (
    "Stall, rows, tokens, steps and MFU are not visible from outside. To get them, start the "
    "command with\nfast-axolotl measure -- COMMAND"
)


def watch(
    target: Annotated[
        str,
        typer.Argument(
            help="A process, whose descendants are included; or the folder of a run or protocol.",
            metavar="PID|RUN",
        ),
    ],
    seconds: Annotated[
        float | None,
        typer.Option(help="Watch for so long; else until it ends, q, or Ctrl-C.", min=0.1),
    ] = None,
    data_path: Annotated[
        str | None,
        typer.Option(help="Of a PID. The data: how fast its device can be read is measured first."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Of a PID. Keep the samples in this folder, for show."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Watch a run as it goes on: what bounds it so far, throughput, memory, disk, swap.

    Of a RUN, which records itself, all figures; of any other PID what is seen from outside. Of a
    protocol its runs, one after the other, and how many of them are left.

    In a terminal: p pauses, r begins a new window, q quits. Elsewhere: one line a second.

    Nothing is changed in what is watched. A folder whose name is a number: ./4711.
    """
    if target.isdecimal():
        _watch_process(int(target), seconds, data_path, output, as_json=as_json)
        return
    if data_path or output:
        raise UsageError("--data-path and --output are for a PID: a record has its own")
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
            raise UsageError(f"{path} is there already: choose another --output")
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
        f"device reads {rate('read_bytes')}",
        f"read calls {rate('read_chars')}",
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
