"""A frame of the live view in words: lines that fit a terminal, however small, or one plain line.

Every line is cut or folded to the width here, so nothing wraps on the screen. Where the height does
not hold all of it, whole sections go, those that are missed least first.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter

from rich.console import Console
from rich.text import Text

from fast_axolotl.record.arithmetic import finite, ratio
from fast_axolotl.record.follower import ProtocolStage
from fast_axolotl.record.thresholds import DATA_STALL, FREE_STALL
from fast_axolotl.record.units import (
    count_words,
    format_bytes,
    format_count,
    format_seconds,
    format_share,
)
from fast_axolotl.report.live_frame import Frame, RankLine
from fast_axolotl.report.runs import describe_regimes, verdict_badge
from fast_axolotl.report.terminal import BADGES, describe_left

_NARROW = 60
"""Columns below which labels are short and bars are left out."""
_LEAST_WIDTH = 10
_MOST_RANKS = 64
_RANK_COLUMNS = (
    ("rank", 5),
    ("stall", 9),
    ("now", 9),
    ("step", 10),
    ("samples/s", 12),
    ("tokens/s", 12),
)
"""Of the table of ranks, with their widths; a narrow terminal shows the first four."""
_FULL = (0.7, 0.9)
_BAR_WIDTH = 20
_LEVELS = "▁▂▃▄▅▆▇█"
_CEILINGS = (0.1, 0.25, 0.5, 1.0)
"""What the highest mark may stand for."""
_MOST_ACTION_LINES = 4
_MOST_LOG_LINES = 8
_MOST_RANKS_OF_LINE = 8
_WORST_RANKS = 3
_LONG_WITHOUT_STEP = 10.0
"""Seconds without news of a step, and at least so many times a step, before it is worth a word."""
_MANY_STEPS = 5.0

Keys = tuple[tuple[str, str], ...]

Section = tuple[int, list[Text]]
"""Lines, and their rank before them: sections of a high rank go first where there is no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewState:
    """What the view itself is doing."""

    paused_seconds: float | None = None
    """Since it was paused; ``None`` where it is not."""
    ending: str = ""
    """Why it shows nothing newer any more."""
    keys: Keys = ()
    """Keys that do something, and what."""


def lay_out(frame: Frame, state: ViewState, *, width: int, height: int | None = None) -> list[Text]:
    """The lines of a frame, each at most ``width`` wide, at most ``height`` of them."""
    width = max(width, _LEAST_WIDTH)
    summary = frame.summary
    parts = [_clock_time(summary.duration_seconds)]
    if frame.step is not None:
        parts.append(f"step {frame.step:,}")
    if frame.loss is not None:
        parts.append(f"loss {frame.loss:.4g}")
    if len(frame.ranks) > 1 or summary.world_size > 1:
        nodes = f" on {len(summary.nodes)} nodes" if len(summary.nodes) > 1 else ""
        parts.append(f"{len(frame.ranks)} of {summary.world_size} ranks{nodes}")
    facts = Text.assemble(" · ".join(parts), (" · ", "dim"), describe_state(frame, state))
    name = Text.assemble(("fast-axolotl ", "bold cyan"))
    room = width - name.cell_len
    is_one_line = room - facts.cell_len - 2 >= min(24, len(frame.title))
    room -= facts.cell_len + 2 if is_one_line else 0
    # The end of a path says most.
    title = frame.title if len(frame.title) <= room else f"…{frame.title[-(max(1, room) - 1) :]}"
    name.append(title, style="bold")
    header = [_cut(name, width), *_fold(facts, width, most=2)]
    if is_one_line:
        header = [name.append("  ").append(facts)]
    keys = Text()
    for key, what in state.keys:
        keys.append(f" {key} ", style="reverse")
        keys.append(f" {what}  ")
    # How many ranks to try to show, the most first.
    for most_ranks in [_MOST_RANKS] if height is None else [max(2, height // 3), 6, 4, 2]:
        ranks = _ranks(frame, width, most_ranks)
        sections: list[Section] = [
            (0, header),
            (2, _row(Text(""), frame.stage, width)),
            *_verdict(frame, width),
            (14, [Text("")]),
            *_figures(frame, width),
            (13, [Text("")] if ranks else []),
            (8, ranks),
            (12, _log(frame, width, height)),
            (15, [Text("")]),
            (2, [_cut(keys.copy(), width)] if keys and not state.ending else []),
        ]
        kept = [(rank, lines) for rank, lines in sections if lines]
        while height is not None and sum(len(lines) for _, lines in kept) > height and kept[1:]:
            kept.remove(max(kept, key=itemgetter(0)))
        if (8, ranks) in kept:
            break
    lines = [line for _, section in kept for line in section]
    return lines if height is None else lines[: max(1, height)]


def describe_state(frame: Frame, state: ViewState) -> tuple[str, str]:
    """What goes on, in a few words, and how they are coloured."""
    if state.ending:
        return state.ending, "bold"
    if state.paused_seconds is not None:
        return f"paused for {_clock_time(state.paused_seconds)}", "bold yellow"
    states = {rank.state for rank in frame.ranks}
    if "" not in states and 0 < len(frame.ranks) >= frame.summary.world_size:
        # The command may still save, or another run follow.
        if "exception" in states:
            return "training failed", "bold"
        is_interrupted = "interrupted" in states
        return "training was interrupted" if is_interrupted else "training has ended", "bold"
    quiet = frame.stepless_seconds
    step = frame.summary.step_p50_seconds or 0.0
    if quiet is not None and quiet > max(_LONG_WITHOUT_STEP, _MANY_STEPS * step):
        return f"no step for {_clock_time(quiet)}", "bold yellow"
    return "running", "green"


def _describe_verdict(frame: Frame) -> tuple[str, str, str]:
    """Title, where it is not the verdict's own, headline and action.

    One that needs more time is no verdict on a run that has ended.
    """
    summary, verdict = frame.summary, frame.summary.verdict
    if verdict.kind != "inconclusive" or frame.is_over:
        return "", verdict.headline, verdict.action
    if frame.is_outside:
        return (
            "From outside",
            "Memory, disk, swap and GPU. Stall, rows/s and tokens/s cannot be seen from outside.",
            "To get them, start the command with fast-axolotl measure -- COMMAND",
        )
    if not frame.has_blocks:
        headline = "No step has ended yet."
        if not frame.has_begun:
            headline = "Nothing has been recorded yet."
        elif frame.window_seconds is not None:
            headline = "No step has ended since the reset."
        elif not frame.ranks:
            headline = "No training step has been seen yet."
        return "Waiting", headline, ""
    more = verdict.seconds_needed
    action = verdict.action
    if more is not None:
        action = f"A verdict in about {_clock_time(max(1.0, more))}."
    if verdict.subtype == "warming":
        left = "it is" if summary.warmup_steps == 1 else "they are"
        steps = count_words(summary.warmup_steps, "step")
        return "Warming up", f"{steps} so far; {left} not part of the figures.", action
    if verdict.subtype == "short":
        fetches, seconds = count_words(summary.fetches, "fetch"), summary.measured_seconds
        return "Too early", f"{fetches} in {format_seconds(seconds)} so far.", action
    return "", verdict.headline, verdict.action


def _verdict(frame: Frame, width: int) -> list[Section]:
    """The verdict, and what to do."""
    title, headline, action = _describe_verdict(frame)
    verdict = frame.summary.verdict
    tone, known = verdict_badge(verdict.kind, verdict.subtype)
    line = Text.assemble((f" {title or known} ", BADGES[tone]))
    if not frame.is_over and not title:
        line.append(" so far", style="dim")
    if width < _NARROW:
        lines = [_cut(line, width), *_fold(Text(headline, style="bold"), width, most=3)]
    else:
        lines = _fold(line.append(" ").append(headline, style="bold"), width, most=3)
    folded = _fold(Text(action), width - 2, most=_MOST_ACTION_LINES) if action else []
    arrows = [Text.assemble(("→ ", "cyan")), *[Text("  ")] * (len(folded) - 1)]
    actions = [arrow + rest for arrow, rest in zip(arrows, folded, strict=False)]
    return [(1, lines), (9, actions)]


def _figures(frame: Frame, width: int) -> list[Section]:
    if not frame.has_begun:
        return []
    summary, is_narrow = frame.summary, width < _NARROW
    rows: list[tuple[int, str, str, list[str]]] = []
    sections: list[Section] = []
    if frame.ranks:
        step = []
        if summary.step_p50_seconds is not None:
            step.append(f"p50 {format_seconds(summary.step_p50_seconds)}")
            step.append(f"p95 {format_seconds(summary.step_p95_seconds)}")
            if summary.steps_per_second is not None:
                step.append(f"{format_count(summary.steps_per_second)} steps/s")
            if summary.mfu is not None:
                step.append(f"MFU {format_share(summary.mfu)}")
        queue = []
        if summary.queue_depth is not None:
            of = "" if summary.queue_capacity is None else f" of {summary.queue_capacity:,}"
            queue.append(f"{summary.queue_depth:,.1f}{of} batches ready")
            drift = summary.queue_drift_per_step
            queue += [f"{drift:+.2g} per step"] if drift is not None and abs(drift) >= 0.01 else []
        sections.append((3, _stall(frame, width)))
        regimes = describe_regimes(summary)
        rows += [
            (3, "since", "since", list(regimes[-1]) if regimes else []),
            (6, "before", "before", list(regimes[-2]) if regimes else []),
            (4, "rows/s", "rows/s", _rate_parts(frame, frame.rows_now, "rows_per_second")),
            (4, "tokens/s", "tokens/s", _rate_parts(frame, frame.tokens_now, "tokens_per_second")),
            (7, "step", "step", step),
            (10, "ready queue", "queue", queue),
        ]
    elif frame.processes is not None:
        cores = [] if frame.cpu_cores is None else [f"{frame.cpu_cores:.2f} cores busy"]
        rows.append((7, "processes", "tree", [f"{frame.processes:,}", *cores]))
    rows += [
        (5, "working set", "memory", _memory_parts(frame)),
        (6, "disk", "disk", _disk_parts(frame)),
        (6, "swap", "swap", _swap_parts(frame)),
        (7, "GPU", "GPU", _gpu_parts(frame)),
    ]
    bars = {
        "memory": ratio(frame.working_set_bytes, summary.limit_bytes),
        "disk": ratio(frame.read_now, summary.disk_bytes_per_second),
    }
    for rank, wide, narrow, parts in rows:
        label = _label(narrow if is_narrow else wide, width)
        bar = None if is_narrow else bars.get(narrow)
        sections.append((rank, _row(label, parts, width, bar=bar)))
    return sections


def _label(name: str, width: int) -> Text:
    return Text.assemble((f"{name:<{9 if width < _NARROW else 13}}", "cyan"))


def _row(label: Text, parts: Sequence[str], width: int, *, bar: float | None = None) -> list[Text]:
    """A label, a bar where there is one, and as many parts a line as fit."""
    if not parts:
        return []
    lines: list[Text] = []
    line = label.copy()
    if bar is not None:
        filled = round(min(max(bar, 0.0), 1.0) * _BAR_WIDTH)
        style = "green" if bar < _FULL[0] else "yellow" if bar < _FULL[1] else "red"
        line.append("█" * filled + "░" * (_BAR_WIDTH - filled), style=style)
        line.append("  ")
    indent = line.cell_len
    for number, part in enumerate(parts):
        piece = Text(f" · {part}" if number else part)
        if number and line.cell_len + piece.cell_len > width:
            lines.append(line)
            line, piece = Text(" " * indent), Text(part)
        line.append(piece)
    return [_cut(one, width) for one in [*lines, line]]


def _stall(frame: Frame, width: int) -> list[Text]:
    """Marks over time; below them the stall now and of the window, and how to read the marks."""
    summary, label = frame.summary, _label("stall", width)
    parts = [f"{format_share(frame.stall_now)} {_now(frame)}"]
    if summary.stall_fraction is not None:
        parts.append(f"{format_share(summary.stall_fraction)} {_since(frame)}")
    if summary.stall_source == "device" and summary.host_stall_fraction is not None:
        parts.append(f"CPU-side {format_share(summary.host_stall_fraction)}")
    if summary.exposed_communication_fraction is not None:
        parts.append(f"communication {format_share(summary.exposed_communication_fraction)}")
    if not frame.marks:
        return _row(label, parts, width)
    known = [share for mark in frame.marks if (share := finite(mark.share)) is not None]
    ceiling = next((one for one in _CEILINGS if max(known, default=0.0) <= one), 1.0)
    scale = "" if width < _NARROW else f"one mark is {frame.mark_seconds:.0f} s, "
    parts.append(f"{scale}full height {100 * ceiling:.0f} %")
    line = label.copy()
    for mark in frame.marks[-max(1, width - label.cell_len) :]:
        style = "dim" if mark.is_warmup else _stall_style(mark.share)
        share = finite(mark.share)
        level = math.ceil((share or 0.0) / ceiling * len(_LEVELS)) - 1
        sign = _LEVELS[min(max(level, 0), len(_LEVELS) - 1)]
        line.append(" " if share is None else sign, style=style)
    return [_cut(line, width), *_row(Text(" " * label.cell_len), parts, width)]


def _stall_style(share: float | None) -> str:
    if finite(share) is None or share is None:
        return ""
    return "green" if share < FREE_STALL else "yellow" if share < DATA_STALL else "red"


def _rate_parts(frame: Frame, now: float | None, name: str) -> list[str]:
    """Rows or tokens per second; why, if they are not counted."""
    overall = getattr(frame.summary, name)
    if now is None and overall is None:
        reason = frame.summary.reasons.get(name, "") if frame.summary.fetches else ""
        return [f"– {reason}".rstrip()]
    parts = [f"{format_count(now)} {_now(frame)}"]
    return parts if overall is None else [*parts, f"{format_count(overall)} {_since(frame)}"]


def _memory_parts(frame: Frame) -> list[str]:
    """The working set against its limit."""
    if frame.working_set_bytes is None:
        return [f"– {frame.summary.reasons.get('working_set_bytes', '')}".strip()]
    limit = frame.summary.limit_bytes
    used = format_bytes(frame.working_set_bytes)
    if len(frame.summary.nodes) > 1:
        used = f"{frame.summary.node}: {used}"
    if not limit:
        return [used, "limit unknown"]
    parts = [f"{used} of {format_bytes(limit)}", format_share(frame.working_set_bytes / limit)]
    peak = frame.summary.working_set_peak_bytes
    return parts if peak is None else [*parts, f"peak {format_bytes(peak)}"]


def _disk_parts(frame: Frame) -> list[str]:
    """Reads from the device against what it can give."""
    if frame.read_now is None:
        return []
    capacity = frame.summary.disk_bytes_per_second
    read = f"{format_bytes(frame.read_now)}/s"
    if not capacity:
        return [f"{read} from disk", "disk speed unknown"]
    return [f"{read} of {format_bytes(capacity)}/s", format_share(frame.read_now / capacity)]


def _swap_parts(frame: Frame) -> list[str]:
    """Paging of the machine."""
    if frame.swap_in_now is None and frame.swap_out_now is None:
        return []
    if not frame.swap_in_now and not frame.swap_out_now:
        return ["none"]
    into, out = format_bytes(frame.swap_in_now), format_bytes(frame.swap_out_now)
    return [f"in {into}/s", f"out {out}/s"]


def _gpu_parts(frame: Frame) -> list[str]:
    return [
        f"{gpu.index}: {format_share(gpu.utilization)} {format_bytes(gpu.memory_bytes)}"
        for gpu in frame.gpus
    ]


def _ranks(frame: Frame, width: int, most: int) -> list[Text]:
    if len(frame.ranks) < 2:
        return []
    shown = list(frame.ranks)
    if len(shown) > most:
        worst = sorted(shown, key=lambda one: (one.state in ("", "finished"), -(one.stall or 0.0)))
        shown = sorted(worst[: most - 1], key=lambda one: one.rank)
    columns = _RANK_COLUMNS[:4] if width < _NARROW else _RANK_COLUMNS
    lines = [Text("".join(f"{name:>{size}}" for name, size in columns), style="cyan")]
    for rank in shown:
        cells = (
            (str(rank.rank), ""),
            (format_share(rank.stall), _stall_style(rank.stall)),
            (format_share(rank.stall_now), _stall_style(rank.stall_now)),
            (format_seconds(rank.step_seconds), ""),
            (format_count(rank.samples_per_second), ""),
            (format_count(rank.tokens_per_second), ""),
        )
        line = Text()
        for (text, style), (_, size) in zip(cells, columns, strict=False):
            line.append(" " * max(1, size - len(text)))
            line.append(text, style=style)
        lines.append(line.append(f"  {rank.state}" if rank.state else "", style="dim"))
    left = [rank for rank in frame.ranks if rank not in shown]
    if left:
        stalls = [rank.stall for rank in left if rank.stall is not None]
        ends = f"{format_share(min(stalls))} to {format_share(max(stalls))}" if stalls else ""
        more = f": stall {ends}" if ends else ""
        lines.append(Text(f"   … {len(left)} more{more}", style="dim"))
    return [_cut(line, width) for line in lines]


def _log(frame: Frame, width: int, height: int | None) -> list[Text]:
    if not frame.log:
        return []
    most = _MOST_LOG_LINES if height is None else max(1, min(_MOST_LOG_LINES, height // 4))
    lines = [Text("─" * width, style="dim")]
    return lines + [_cut(Text(line, style="dim"), width) for line in frame.log[-most:]]


def format_line(frame: Frame, *, ending: str = "") -> str:
    """Everything in one line, for a file or a pipe."""
    summary = frame.summary
    title, _, _ = _describe_verdict(frame)
    state, _ = describe_state(frame, ViewState(ending=ending))
    parts = [" · ".join(frame.stage)] if frame.stage else []
    verdict = title or verdict_badge(summary.verdict.kind, summary.verdict.subtype)[1]
    if summary.regimes[1:] and not title:
        verdict += f" since step {summary.regimes[-1].first_step:,}"
    parts += [f"{summary.duration_seconds:6.0f} s", verdict]
    if state != "running":
        parts.append(state)
    if frame.step is not None:
        parts.append(f"step {frame.step:,}")
    if frame.ranks:
        stall = f"stall {format_share(frame.stall_now)} {_now(frame)}"
        if summary.stall_fraction is not None:
            stall += f" {format_share(summary.stall_fraction)} {_since(frame)}"
        parts.append(stall)
        parts.append(f"{format_count(frame.rows_now)} rows/s")
        parts.append(f"{format_count(frame.tokens_now)} tokens/s")
    if frame.has_begun:
        parts.append(f"working set {_memory_parts(frame)[0]}")
    if summary.disk_bytes_per_second:
        parts.append(f"disk {', '.join(_disk_parts(frame)[-1:])}")
    if frame.swap_in_now or frame.swap_out_now:
        parts.append(f"swap {', '.join(_swap_parts(frame))}")
    parts += [f"GPU {part}" for part in _gpu_parts(frame)]
    if len(frame.ranks) > 1:
        # Of many ranks, those that stall most.
        ranks: Sequence[RankLine] = frame.ranks
        if len(ranks) > _MOST_RANKS_OF_LINE:
            ranks = sorted(ranks, key=lambda one: -(one.stall_now or 0.0))[:_WORST_RANKS]
        shares = [f"{rank.rank} {format_share(rank.stall_now)}" for rank in ranks]
        left = len(frame.ranks) - len(ranks)
        shares += [f"{left} others less"] if left else []
        parts.append(f"stall by rank {', '.join(shares)}")
    return "  ".join(parts)


def stage_parts(stage: ProtocolStage | None) -> list[str]:
    """Which run of a protocol this is, of which arm and pair, and how long the rest takes."""
    if stage is None:
        return []
    of = f" of {stage.planned_runs:,}" if stage.planned_runs else ""
    if not stage.run:
        return [f"run 1{of} has not started"]
    parts = [f"run {stage.run:,}{of}", stage.arm]
    if stage.pair is not None:
        is_warmup = stage.pair < 0
        parts.append("warm-up" if is_warmup else f"pair {stage.pair + 1} of {stage.planned_pairs}")
    if stage.seconds_left is not None:
        parts.append(describe_left(stage.seconds_left))
    return [part for part in parts if part]


def _clock_time(seconds: float) -> str:
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


def _fold(text: Text, width: int, *, most: int) -> list[Text]:
    """Lines of words, the last of them cut where there are too many."""
    lines = list(text.wrap(_console(), max(1, width)))
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1].append("…")]
    for line in lines:
        line.rstrip()
    return [_cut(line, width) for line in lines]


@cache
def _console() -> Console:
    """What rich asks for to fold a text; nothing is printed to it."""
    return Console(file=io.StringIO())


def _cut(text: Text, width: int) -> Text:
    text.truncate(max(1, width), overflow="ellipsis")
    return text
