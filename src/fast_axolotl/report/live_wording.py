"""The words and numbers of the live view: parts of its rows, its verdict, its plain lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fast_axolotl.record.follower import ProtocolStage
from fast_axolotl.report.live_frame import Frame
from fast_axolotl.report.show import verdict_title
from fast_axolotl.report.terminal import format_bytes, format_seconds, format_share
from fast_axolotl.report.values import count_words, format_count

__all__ = [
    "VerdictWords",
    "clock_time",
    "describe_run",
    "describe_state",
    "describe_verdict",
    "disk_parts",
    "format_line",
    "gpu_parts",
    "memory_parts",
    "outside_parts",
    "queue_parts",
    "rate_parts",
    "stage_parts",
    "stall_parts",
    "step_parts",
    "swap_parts",
]

_LONG_WITHOUT_STEP = 10.0
"""Seconds without news of a step, and at least so many times a step, before it is worth a word."""
_MANY_STEPS = 5.0
_MOST_RANKS = 8
_WORST_RANKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictWords:
    """A verdict as told while the run goes on."""

    title: str = ""
    """Where it is not the verdict's own."""
    headline: str
    action: str


def describe_verdict(frame: Frame) -> VerdictWords:
    """The verdict so far: one that needs more time is no verdict on a run that has ended."""
    verdict = frame.summary.verdict
    own = VerdictWords(headline=verdict.headline, action=verdict.action)
    if verdict.kind != "inconclusive" or frame.is_over:
        return own
    if frame.is_outside:
        return VerdictWords(
            title="From outside",
            headline="Memory, disk, swap and GPU; nobody sees stall, rows or tokens from here.",
            action="For these, start the command with fast-axolotl run --measure -- COMMAND",
        )
    if not frame.has_blocks:
        return VerdictWords(title="Waiting", headline=_waiting_headline(frame), action="")
    more = verdict.seconds_needed
    action = own.action if more is None else f"A verdict in about {clock_time(max(1.0, more))}."
    if verdict.subtype == "warming":
        steps = frame.summary.warmup_steps
        left = "it is" if steps == 1 else "they are"
        return VerdictWords(
            title="Warming up",
            headline=f"{count_words(steps, 'step')} so far; {left} left out of the figures.",
            action=action,
        )
    if verdict.subtype == "short":
        return VerdictWords(title="Too early", headline=_short_headline(frame), action=action)
    return VerdictWords(headline=own.headline, action=own.action)


def _waiting_headline(frame: Frame) -> str:
    if not frame.has_begun:
        return "Nothing has been recorded yet."
    if frame.window_seconds is not None:
        return "No step has ended since the reset."
    return "No step has ended yet." if frame.is_training else "No training step has been seen yet."


def _short_headline(frame: Frame) -> str:
    one = frame.summary
    return f"{count_words(one.fetches, 'fetch')} in {format_seconds(one.measured_seconds)} so far."


def describe_state(frame: Frame, paused_seconds: float | None, ending: str) -> tuple[str, str]:
    """What goes on, in a few words, and how they are coloured."""
    if ending:
        return ending, "bold"
    if paused_seconds is not None:
        return f"paused for {clock_time(paused_seconds)}", "bold yellow"
    is_whole = 0 < len(frame.ranks) >= frame.summary.world_size
    if is_whole and all(rank.state for rank in frame.ranks):
        return _how_training_ended(frame), "bold"
    quiet = frame.stepless_seconds
    step = frame.summary.step_p50_seconds or 0.0
    if quiet is not None and quiet > max(_LONG_WITHOUT_STEP, _MANY_STEPS * step):
        return f"no step for {clock_time(quiet)}", "bold yellow"
    return "running", "green"


def _how_training_ended(frame: Frame) -> str:
    """Of a run whose ranks have ended; its command may still save, or another run follow."""
    states = {rank.state for rank in frame.ranks}
    if "exception" in states:
        return "training failed"
    return "training was interrupted" if "interrupted" in states else "training has ended"


def stage_parts(stage: ProtocolStage | None) -> list[str]:
    """Which run of a protocol this is, of which arm and pair, and how long the rest takes."""
    if stage is None:
        return []
    of = f" of {stage.planned_runs:,}" if stage.planned_runs else ""
    if not stage.run:
        return [f"run 1{of} has not begun"]
    parts = [f"run {stage.run:,}{of}", stage.arm]
    if stage.pair is not None:
        is_warmup = stage.pair < 0
        parts.append("warm-up" if is_warmup else f"pair {stage.pair + 1} of {stage.planned_pairs}")
    if stage.seconds_left is not None:
        parts.append(f"about {_rough_time(stage.seconds_left)} left")
    return [part for part in parts if part]


def _rough_time(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def describe_run(frame: Frame, *, is_new: bool) -> str:
    """The line before the first of a run of a protocol; ``is_new`` where its begin was seen."""
    run, *rest = frame.stage
    begin = f"{run} begins" if is_new else f"watching {run}"
    return f"fast-axolotl: {begin}: {', '.join([*rest, frame.title])}"


def stall_parts(
    frame: Frame, ceiling: float | None = None, *, is_narrow: bool = False
) -> list[str]:
    """The stall now and of the window, the host's where it differs, and how to read the marks.

    ``ceiling`` is what the highest mark stands for; ``None``: that is not told.
    """
    one = frame.summary
    parts = [f"{format_share(frame.stall_now)} {_now(frame)}"]
    if one.stall_fraction is not None:
        parts.append(f"{format_share(one.stall_fraction)} {_since(frame)}")
    if one.stall_source == "device" and one.host_stall_fraction is not None:
        parts.append(f"host {format_share(one.host_stall_fraction)}")
    if frame.marks and ceiling is not None:
        mark = "" if is_narrow else f"a mark is {frame.mark_seconds:.0f} s, the "
        parts.append(f"{mark}top {100 * ceiling:.0f} %")
    return parts


def rate_parts(frame: Frame, what: Literal["rows", "tokens"]) -> list[str]:
    """Rows or tokens a second; where they are not counted, why."""
    is_rows = what == "rows"
    now = frame.rows_now if is_rows else frame.tokens_now
    name = "rows_per_second" if is_rows else "tokens_per_second"
    overall = getattr(frame.summary, name)
    if now is None and overall is None:
        reason = frame.summary.reasons.get(name, "") if frame.summary.fetches else ""
        return [f"– {reason}".rstrip()]
    parts = [f"{format_count(now)} {_now(frame)}"]
    if overall is not None:
        parts.append(f"{format_count(overall)} {_since(frame)}")
    return parts


def step_parts(frame: Frame) -> list[str]:
    """Times of a step."""
    one = frame.summary
    if one.step_p50_seconds is None:
        return []
    parts = [f"p50 {format_seconds(one.step_p50_seconds)}"]
    parts.append(f"p95 {format_seconds(one.step_p95_seconds)}")
    if one.steps_per_second is not None:
        parts.append(f"{format_count(one.steps_per_second)} steps/s")
    if one.mfu is not None:
        parts.append(f"MFU {format_share(one.mfu)}")
    return parts


def queue_parts(frame: Frame) -> list[str]:
    """How many batches are ready when one is asked for."""
    one = frame.summary
    if one.queue_depth is None:
        return []
    of = "" if one.queue_capacity is None else f" of {one.queue_capacity:,}"
    drift = one.queue_drift_per_step
    falling = [f"{drift:+.2g} a step"] if drift is not None and abs(drift) >= 0.01 else []
    return [f"{one.queue_depth:,.1f}{of} batches ready", *falling]


def outside_parts(frame: Frame) -> list[str]:
    """What is seen of a process tree besides memory and disk."""
    if frame.processes is None:
        return []
    cores = [] if frame.cpu_cores is None else [f"{frame.cpu_cores:.2f} cores busy"]
    return [f"{frame.processes:,}", *cores]


def memory_parts(frame: Frame) -> list[str]:
    """The working set against its limit."""
    if frame.working_set_bytes is None:
        return [f"– {frame.summary.reasons.get('working_set_bytes', '')}".strip()]
    limit = frame.summary.limit_bytes
    used = format_bytes(frame.working_set_bytes)
    if not limit:
        return [used, "no limit known"]
    parts = [f"{used} of {format_bytes(limit)}", format_share(frame.working_set_bytes / limit)]
    peak = frame.summary.working_set_peak_bytes
    return parts if peak is None else [*parts, f"peak {format_bytes(peak)}"]


def disk_parts(frame: Frame) -> list[str]:
    """Reads from the device against what it can give."""
    if frame.read_now is None:
        return []
    capacity = frame.summary.disk_bytes_per_second
    read = f"{format_bytes(frame.read_now)}/s"
    if not capacity:
        return [f"{read} from the device", "its capacity is not known"]
    return [f"{read} of {format_bytes(capacity)}/s", format_share(frame.read_now / capacity)]


def swap_parts(frame: Frame) -> list[str]:
    """Paging of the machine."""
    if frame.swap_in_now is None and frame.swap_out_now is None:
        return []
    if not frame.swap_in_now and not frame.swap_out_now:
        return ["none"]
    into, out = format_bytes(frame.swap_in_now), format_bytes(frame.swap_out_now)
    return [f"in {into}/s", f"out {out}/s"]


def gpu_parts(frame: Frame) -> list[str]:
    """Every GPU in a few words."""
    return [
        f"{gpu.index}: {format_share(gpu.utilization)} {format_bytes(gpu.memory_bytes)}"
        for gpu in frame.gpus
    ]


def format_line(frame: Frame, *, ending: str = "") -> str:
    """Everything in one line, for a file or a pipe."""
    one = frame.summary
    words = describe_verdict(frame)
    state, _ = describe_state(frame, None, ending)
    parts = [" · ".join(frame.stage)] if frame.stage else []
    parts += [f"{one.duration_seconds:6.0f} s", words.title or verdict_title(one.verdict)]
    if state != "running":
        parts.append(state)
    if frame.step is not None:
        parts.append(f"step {frame.step:,}")
    if frame.is_training:
        overall = [f"{format_share(one.stall_fraction)} {_since(frame)}"]
        stall = overall if one.stall_fraction is not None else []
        parts.append(" ".join(["stall", f"{format_share(frame.stall_now)} {_now(frame)}", *stall]))
        parts.append(f"{format_count(frame.rows_now)} rows/s")
        parts.append(f"{format_count(frame.tokens_now)} tokens/s")
    if frame.has_begun:
        parts.append(f"working set {memory_parts(frame)[0]}")
    parts += [f"disk {', '.join(disk_parts(frame)[-1:])}"] if one.disk_bytes_per_second else []
    if frame.swap_in_now or frame.swap_out_now:
        parts.append(f"swap {', '.join(swap_parts(frame))}")
    parts += [f"GPU {part}" for part in gpu_parts(frame)]
    if len(frame.ranks) > 1:
        parts.append(f"stall by rank {_stall_by_rank(frame)}")
    return "  ".join(parts)


def _stall_by_rank(frame: Frame) -> str:
    """Of many ranks, those that stall most."""
    ranks = list(frame.ranks)
    if len(ranks) > _MOST_RANKS:
        ranks = sorted(ranks, key=lambda one: -(one.stall_now or 0.0))[:_WORST_RANKS]
    told = [f"{rank.rank} {format_share(rank.stall_now)}" for rank in ranks]
    left = len(frame.ranks) - len(ranks)
    return ", ".join([*told, *([f"{left} others less"] if left else [])])


def clock_time(seconds: float) -> str:
    """``0:42``, ``1:02:03``."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    if hours:
        return f"{hours}:{minutes:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"


def _now(frame: Frame) -> str:
    return "at the end" if frame.is_over else "now"


def _since(frame: Frame) -> str:
    return "overall" if frame.window_seconds is None else "since reset"
