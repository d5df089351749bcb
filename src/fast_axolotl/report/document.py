"""A document as data: sections, tables, bullets and charts.

``terminal``, ``markdown`` and ``page`` each draw the same blocks in their own way. Charts are for
the page; the other two leave them out, because every figure also stands in a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Tone = Literal["", "good", "warn", "bad", "plain"]
"""What something means: fine, to be noted, wrong, not decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A value of a table that means something, or that the page draws."""

    text: str
    tone: Tone = ""
    interval: tuple[float, float, float] | None = None
    """A ratio between its lower and its upper end; the page draws it."""
    share: float | None = None
    """Of a whole; the page draws it as a bar."""


Row = Sequence[str | Cell]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A sentence or more."""

    text: str
    style: Literal["", "lead", "alarm", "warning", "muted", "log"] = ""
    """``lead`` is the answer. An alarm has to be read before anything else. A log is lines that a
    program has printed."""


@dataclass(frozen=True, slots=True)
class Bullets:
    """Lines, one for each fact; muted ones explain what is missing."""

    lines: Sequence[str]
    is_muted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A verdict or an answer: what limits a run, why, and what to do next."""

    name: str = ""
    """Of the run; empty where it is the only one."""
    badges: Sequence[tuple[Tone, str]] = ()
    headline: str
    text: str = ""
    """What belongs to the headline."""
    evidence: Sequence[str] = ()
    action: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of a label and its values."""

    rows: Sequence[Row]
    header: Sequence[str] = ()
    """Empty: pairs of a label and one value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Legend:
    """What a colour of a chart stands for."""

    role: str
    label: str
    shape: Literal["line", "dashed", "area"] = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One figure of a chart."""

    name: str = ""
    """The run's; empty where the figure shows all of them."""
    text: str
    """What there is to see, in words."""
    figure: Mapping[str, Any] | None = None
    """``traces``, ``layout`` and ``height``, see ``charts``; ``None`` where there is nothing to
    draw, and the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A question and the panels that answer it."""

    name: str
    title: str
    text: str
    """How to read it."""
    legend: Sequence[Legend] = ()
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Blocks under a heading."""

    title: str
    blocks: Sequence[Block]
    is_open: bool = True
    """Whether the page shows it unfolded."""
    layout: Literal["", "answer", "cards", "groups"] = ""
    """How the page arranges the blocks: below each other, or side by side."""


Block = Paragraph | Bullets | Card | Table | Chart | Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Everything that one answer consists of."""

    title: str
    subtitle: str = ""
    blocks: Sequence[Block]
    footnotes: Sequence[str] = ()
    """What was left out, one sentence each."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The figures behind it as plain data, which the page embeds and offers to download.
    It says ``made``, in seconds since 1970, and ``version``, of this package."""
    reload_seconds: float = 0.0
    """After which an open page loads itself again; 0 for what changes no more."""
