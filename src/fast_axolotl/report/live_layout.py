"""A frame of the live view as lines of text that fit a terminal, however small.

Every line is cut or folded to the width here, so nothing wraps on the screen. Where the height does
not hold all of it, whole sections go, those that are missed least first.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rich.console import Console
from rich.text import Text

from fast_axolotl.report.figures import DATA_STALL, FREE_STALL
from fast_axolotl.report.live_frame import Frame, RankLine
from fast_axolotl.report.live_wording import (
    clock_time,
    describe_state,
    describe_verdict,
    disk_parts,
    gpu_parts,
    memory_parts,
    outside_parts,
    queue_parts,
    rate_parts,
    stall_parts,
    step_parts,
    swap_parts,
)
from fast_axolotl.report.marks import draw_bar, find_ceiling, mark_of
from fast_axolotl.report.show import VERDICT_STYLES, verdict_title
from fast_axolotl.report.terminal import format_seconds, format_share
from fast_axolotl.report.values import format_count

__all__ = ["Keys", "ViewState", "lay_out"]

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
_MOST_ACTION_LINES = 4
_MOST_LOG_LINES = 8
Keys = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewState:
    """What the view itself is doing."""

    paused_seconds: float | None = None
    """Since it was paused; ``None`` where it is not."""
    ending: str = ""
    """Why it shows nothing newer any more."""
    keys: Keys = ()
    """Keys that do something, and what."""


@dataclass(slots=True, eq=False)
class _Section:
    lines: list[Text]
    rank: int
    """Sections of a high rank go first where there is no room."""


def lay_out(frame: Frame, state: ViewState, *, width: int, height: int | None = None) -> list[Text]:
    """The lines of a frame, each at most ``width`` wide, at most ``height`` of them."""
    width = max(width, _LEAST_WIDTH)
    for most_ranks in _rank_numbers(height):
        ranks = _Section(_ranks(frame, width, most_ranks), 8)
        kept = _fit(_make_sections(frame, state, ranks, width, height), height)
        if ranks in kept:
            break
    lines = [line for section in kept for line in section.lines]
    return lines if height is None else lines[: max(1, height)]


def _make_sections(
    frame: Frame, state: ViewState, ranks: _Section, width: int, height: int | None
) -> list[_Section]:
    return [
        _Section(_header(frame, state, width), 0),
        _Section(_row(Text(""), frame.stage, width), 2),
        _Section(_verdict(frame, width), 1),
        _Section(_action(frame, width), 9),
        _Section([Text("")], 14),
        *_figures(frame, width),
        _Section([Text("")] if ranks.lines else [], 13),
        ranks,
        _Section(_log(frame, width, height), 12),
        _Section([Text("")], 15),
        _Section(_footer(state, width), 2),
    ]


def _rank_numbers(height: int | None) -> list[int]:
    """How many ranks to try to show, the most first."""
    if height is None:
        return [_MOST_RANKS]
    return [max(2, height // 3), 6, 4, 2]


def _fit(sections: Sequence[_Section], height: int | None) -> list[_Section]:
    kept = [section for section in sections if section.lines]
    while height is not None and sum(len(one.lines) for one in kept) > height and len(kept) > 1:
        kept.remove(max(kept, key=lambda one: one.rank))
    return kept


def _header(frame: Frame, state: ViewState, width: int) -> list[Text]:
    summary = frame.summary
    parts = [clock_time(summary.duration_seconds)]
    if frame.step is not None:
        parts.append(f"step {frame.step:,}")
    if frame.loss is not None:
        parts.append(f"loss {frame.loss:.4g}")
    if len(frame.ranks) > 1 or summary.world_size > 1:
        parts.append(f"{len(frame.ranks)} of {summary.world_size} ranks")
    told, style = describe_state(frame, state.paused_seconds, state.ending)
    facts = Text(" · ".join(parts))
    facts.append(" · ", style="dim")
    facts.append(told, style=style)
    name = Text.assemble(("fast-axolotl ", "bold cyan"))
    room = width - name.cell_len
    one_line = width - name.cell_len - facts.cell_len - 2
    if one_line >= min(24, len(frame.title)):
        name.append(_shorten(frame.title, one_line), style="bold")
        name.append("  ")
        name.append(facts)
        return [name]
    name.append(_shorten(frame.title, room), style="bold")
    return [_cut(name, width), *_fold(facts, width, most=2)]


def _verdict(frame: Frame, width: int) -> list[Text]:
    verdict = frame.summary.verdict
    found = describe_verdict(frame)
    title = f" {found.title or verdict_title(verdict)} "
    line = Text.assemble((title, VERDICT_STYLES[verdict.kind]))
    if not frame.is_over and not found.title:
        line.append(" so far", style="dim")
    if width < _NARROW:
        return [_cut(line, width), *_fold(Text(found.headline, style="bold"), width, most=3)]
    line.append(" ")
    line.append(found.headline, style="bold")
    return _fold(line, width, most=3)


def _action(frame: Frame, width: int) -> list[Text]:
    action = describe_verdict(frame).action
    if not action:
        return []
    folded = _fold(Text(action), width - 2, most=_MOST_ACTION_LINES)
    arrow = [Text.assemble(("→ ", "cyan")), *[Text("  ")] * (len(folded) - 1)]
    return [first + rest for first, rest in zip(arrow, folded, strict=True)]


def _figures(frame: Frame, width: int) -> list[_Section]:
    if not frame.has_begun:
        return []
    is_narrow = width < _NARROW
    rows: list[tuple[int, str, str, float | None, list[str]]] = []
    if frame.is_training:
        rows += [
            (4, "rows/s", "rows/s", None, rate_parts(frame, "rows")),
            (4, "tokens/s", "tokens/s", None, rate_parts(frame, "tokens")),
            (7, "step", "step", None, step_parts(frame)),
            (10, "ready queue", "queue", None, queue_parts(frame)),
        ]
    else:
        rows.append((7, "processes", "tree", None, outside_parts(frame)))
    share = _share(frame.working_set_bytes, frame.summary.limit_bytes)
    disk = _share(frame.read_now, frame.summary.disk_bytes_per_second)
    rows += [
        (5, "working set", "memory", share, memory_parts(frame)),
        (6, "disk", "disk", disk, disk_parts(frame)),
        (6, "swap", "swap", None, swap_parts(frame)),
        (7, "GPU", "GPU", None, gpu_parts(frame)),
    ]
    stall = _stall(frame, width) if frame.is_training else []
    found = [_Section(stall, 3)]
    for rank, wide, narrow, part, parts in rows:
        label = _label(narrow if is_narrow else wide, width)
        bar = None if is_narrow or part is None else part
        found.append(_Section(_row(label, parts, width, bar=bar), rank))
    return found


def _label(name: str, width: int) -> Text:
    return Text.assemble((f"{name:<{_label_width(width)}}", "cyan"))


def _label_width(width: int) -> int:
    return 9 if width < _NARROW else 13


def _row(label: Text, parts: Sequence[str], width: int, *, bar: float | None = None) -> list[Text]:
    """A label, a bar where there is one, and as many parts a line as fit."""
    if not parts:
        return []
    lines: list[Text] = []
    line = label.copy()
    if bar is not None:
        line.append(draw_bar(bar, 20), style=_fullness_style(bar))
        line.append("  ")
    indent = line.cell_len
    is_empty = True
    for part in parts:
        piece = Text(part) if is_empty else Text(f" · {part}")
        if not is_empty and line.cell_len + piece.cell_len > width:
            lines.append(line)
            line = Text(" " * indent)
            piece = Text(part)
        line.append(piece)
        is_empty = False
    return [_cut(one, width) for one in [*lines, line]]


def _stall(frame: Frame, width: int) -> list[Text]:
    label = _label("stall", width)
    ceiling = find_ceiling(one.share for one in frame.marks)
    parts = stall_parts(frame, ceiling, is_narrow=width < _NARROW)
    if not frame.marks:
        return _row(label, parts, width)
    line = label.copy()
    for one in frame.marks[-max(1, width - label.cell_len) :]:
        style = "dim" if one.is_warmup else _stall_style(one.share)
        line.append(mark_of(one.share, ceiling), style=style)
    return [_cut(line, width), *_row(Text(" " * label.cell_len), parts, width)]


def _ranks(frame: Frame, width: int, most: int) -> list[Text]:
    if len(frame.ranks) < 2:
        return []
    shown = list(frame.ranks)
    if len(shown) > most:
        worst = sorted(shown, key=lambda one: (one.state in ("", "finished"), -(one.stall or 0.0)))
        shown = sorted(worst[: most - 1], key=lambda one: one.rank)
    columns = _RANK_COLUMNS[:4] if width < _NARROW else _RANK_COLUMNS
    lines = [Text("".join(f"{name:>{size}}" for name, size in columns), style="cyan")]
    lines += [_rank_line(one, [size for _, size in columns]) for one in shown]
    left = [one for one in frame.ranks if one not in shown]
    if left:
        stalls = [one.stall for one in left if one.stall is not None]
        told = (
            f": stall {format_share(min(stalls))} to {format_share(max(stalls))}" if stalls else ""
        )
        lines.append(Text(f"   … {len(left)} more{told}", style="dim"))
    return [_cut(line, width) for line in lines]


def _rank_line(one: RankLine, widths: Sequence[int]) -> Text:
    cells = (
        (str(one.rank), ""),
        (format_share(one.stall), _stall_style(one.stall)),
        (format_share(one.stall_now), _stall_style(one.stall_now)),
        (format_seconds(one.step_seconds), ""),
        (format_count(one.samples_per_second), ""),
        (format_count(one.tokens_per_second), ""),
    )
    line = Text()
    for (text, style), size in zip(cells, widths, strict=False):
        line.append(" " * max(1, size - len(text)))
        line.append(text, style=style)
    if one.state:
        line.append(f"  {one.state}", style="dim")
    return line


def _log(frame: Frame, width: int, height: int | None) -> list[Text]:
    if not frame.log:
        return []
    most = _MOST_LOG_LINES if height is None else max(1, min(_MOST_LOG_LINES, height // 4))
    lines = [Text("─" * width, style="dim")]
    return lines + [_cut(Text(line, style="dim"), width) for line in frame.log[-most:]]


def _footer(state: ViewState, width: int) -> list[Text]:
    if state.ending or not state.keys:
        return []
    line = Text()
    for key, what in state.keys:
        line.append(f" {key} ", style="reverse")
        line.append(f" {what}  ")
    return [_cut(line, width)]


def _share(used: float | None, limit: float | None) -> float | None:
    return used / limit if used is not None and limit else None


def _stall_style(share: float | None) -> str:
    if share is None or not math.isfinite(share):
        return ""
    return "green" if share < FREE_STALL else "yellow" if share < DATA_STALL else "red"


def _fullness_style(share: float) -> str:
    return "green" if share < _FULL[0] else "yellow" if share < _FULL[1] else "red"


def _fold(text: Text, width: int, *, most: int) -> list[Text]:
    """Lines of words, the last of them cut where there are too many."""
    lines = list(text.wrap(_console(), max(1, width)))
    if len(lines) > most:
        last = lines[most - 1]
        last.append("…")
        lines = [*lines[: most - 1], last]
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


def _shorten(path: str, width: int) -> str:
    """The end of a path says most."""
    return path if len(path) <= width else f"…{path[-(max(1, width) - 1) :]}"
