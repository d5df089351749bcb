"""``fast-axolotl watch``: a run or a process, looked at while it goes on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_axolotl.errors import DataError, UsageError

if TYPE_CHECKING:
    from fast_axolotl.measure.sampler import SystemSampler
    from fast_axolotl.measure.system_figures import Watched
    from fast_axolotl.record import LineWriter, SystemSample

__all__ = ["WATCH_EXAMPLES", "watch"]

WATCH_EXAMPLES = (
    "Examples:\n\n  fast-axolotl watch fast-axolotl-runs/20300131-120000-axolotl\n\n"
    "  fast-axolotl watch fast-axolotl-protocols/20300131-120000\n\n"
    "  fast-axolotl watch 4711\n\n"
    "  fast-axolotl watch 4711 --seconds 60 --data-path data/ --output runs/first\n\n"
    "  fast-axolotl watch 4711 --seconds 10 --json"
)

_ELSEWHERE = (
    "From outside nobody sees stall, rows, tokens, steps or MFU. For these, start the command "
    "with\nfast-axolotl run --measure -- COMMAND"
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
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
    from fast_axolotl.cli.live import show_process
    from fast_axolotl.measure.sampler import SystemSampler, check_process
    from fast_axolotl.measure.system_figures import Watched
    from fast_axolotl.report.live import SampledProcess
    from fast_axolotl.report.live_screen import LineDisplay, open_display

    check_process(pid)
    writer = None if output is None else _open_record(output)
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
    if has_screen:
        ending = show_process(sampler, source, display, seconds)
    else:
        ending = _watch_to_the_end(sampler, seconds)
    figures = {**watched.figures(sampler.begin()), "ending": ending}
    if as_json:
        print(json.dumps(figures, indent=2, ensure_ascii=False))
    else:
        _print_figures(figures)
    if writer is not None and writer.failure:
        raise DataError(
            f"the record ends early: {writer.failure}; free space or choose another folder"
        )


def _open_record(output: Path) -> LineWriter:
    from fast_axolotl.record import LineWriter

    path = output / "system.jsonl"
    if path.exists():
        raise UsageError(f"{path} is there already: choose another --output")
    writer = LineWriter(path)
    if writer.failure:
        raise DataError(f"the record cannot be written: {writer.failure}; choose another --output")
    return writer


def _watch_to_the_end(sampler: SystemSampler, seconds: float | None) -> str:
    """Samples until there is nothing more to see; why it ended."""
    is_interrupted = True
    try:
        sampler.run(seconds)
        is_interrupted = False
    except KeyboardInterrupt:
        # The usual way to end watching: the summary follows, as of vmstat or perf.
        return "Ctrl-C"
    finally:
        sampler.stop("interrupted" if is_interrupted else "finished")
    return "the time was up" if sampler.is_alive else "the process ended"


def _line(watched: Watched) -> str:
    from fast_axolotl.report.terminal import format_bytes, format_share

    sample = watched.samples[-1]
    cores = watched.rate("cpu_seconds")
    parts = [
        f"{sample.t:6.0f} s",
        f"processes {sample.processes}",
        f"working set {format_bytes(watched.pss_bytes)}",
        f"RSS {format_bytes(sample.rss_bytes)}",
        f"CPU {'–' if cores is None else f'{cores:.1f}'} cores",
        f"device reads {format_bytes(watched.rate('read_bytes'))}/s",
        f"read calls {format_bytes(watched.rate('read_chars'))}/s",
    ]
    if watched.rate("swap_in_bytes") or watched.rate("swap_out_bytes"):
        parts.append(f"swap in {format_bytes(watched.rate('swap_in_bytes'))}/s")
        parts.append(f"out {format_bytes(watched.rate('swap_out_bytes'))}/s")
    parts += [f"GPU {gpu.index} {format_share(gpu.utilization)}" for gpu in sample.gpus]
    return "  ".join(parts)


def _print_figures(figures: dict[str, Any]) -> None:
    from fast_axolotl.report.terminal import show_pairs

    print()
    show_pairs("", _pairs(figures))
    reasons: dict[str, list[str]] = {}
    for name, reason in figures["reasons"].items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        print(f"– {_title(names)}: {reason}")
    print(_ELSEWHERE)


def _title(names: list[str]) -> str:
    is_gpu = all(name.startswith("gpu_") for name in names)
    return "GPU" if is_gpu else ", ".join(name.replace("_", " ") for name in names)


def _pairs(figures: dict[str, Any]) -> list[tuple[str, str]]:
    from fast_axolotl.report.terminal import format_bytes, format_seconds, format_share

    def size(name: str) -> str:
        return format_bytes(figures[name])

    pairs = [
        ("process", f"{figures['root_pid']}  {' '.join(figures['command'])}"),
        ("watched", f"{format_seconds(figures['seconds'])}, until {figures['ending']}"),
        ("processes", f"{figures['most_processes']} at most"),
        ("CPU", f"{_number(figures['cpu_cores'], '.2f')} cores"),
        (
            "working set (ΣPSS)",
            f"{size('working_set_bytes')}, peak {size('working_set_peak_bytes')}",
        ),
        (
            "resident (ΣRSS)",
            f"{size('rss_bytes')}: anonymous {size('anon_bytes')}, files {size('file_bytes')}, "
            f"shared {size('shared_bytes')}",
        ),
        (
            "high-water mark",
            f"{size('hwm_bytes')}, {_number(figures['spike_ratio'], '.2f')} × resident",
        ),
        (
            "memory limit",
            f"{size('limit_bytes')}, peak {format_share(figures['limit_share'])} of it",
        ),
        ("device reads", f"{size('read_bytes_per_second')}/s"),
        ("read calls", f"{size('read_chars_per_second')}/s, cached ones included"),
        (
            "device capacity",
            f"{size('disk_bytes_per_second')}/s, {format_share(figures['disk_share'])} of it used",
        ),
        (
            "swap of the machine",
            f"in {size('swap_in_bytes_per_second')}/s, out {size('swap_out_bytes_per_second')}/s",
        ),
        (
            "pressure",
            f"memory {format_share(figures['psi_memory_full'])}, "
            f"I/O {format_share(figures['psi_io_full'])} of the time",
        ),
    ]
    if figures["gpu_names"]:
        pairs.append(("GPU", _describe_gpus(figures)))
    return pairs


def _describe_gpus(figures: dict[str, Any]) -> str:
    from fast_axolotl.report.terminal import format_bytes, format_share

    return (
        f"{format_share(figures['gpu_utilization'])} busy, "
        f"{format_bytes(figures['gpu_memory_bytes'])}, "
        f"{_number(figures['gpu_power_watts'], '.0f')} W, "
        f"{_number(figures['gpu_clock_mhz'], '.0f')} MHz ({', '.join(figures['gpu_names'])})"
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
