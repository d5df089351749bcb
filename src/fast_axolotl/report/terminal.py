"""Print a document in the terminal, and show progress.

Documents go to stdout and progress to stderr, so that a pipe receives results only. Colours are for
terminals; a pipe gets plain text of a fixed width. Without a terminal progress is silent, or a line
for every run of a protocol.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table as RichTable
from rich.text import Text

from fast_axolotl.record.units import format_duration
from fast_axolotl.report.document import (
    Block,
    Bullets,
    Card,
    Cell,
    Chart,
    Document,
    Paragraph,
    Row,
    Section,
    Table,
)

PIPE_WIDTH = 160
BADGES = {
    "good": "bold white on green4",
    "warn": "bold white on dark_orange3",
    "bad": "bold white on red",
    "plain": "bold white on grey35",
}
"""Style of a verdict's title by its tone."""
_TONES = {"good": "green", "warn": "yellow", "bad": "bold red"}
_STYLES = {"alarm": "bold white on red", "warning": "bold yellow", "muted": "dim", "log": "dim"}

Update = Callable[[str, int, int, float, "float | None"], None]
"""What runs, runs done, runs in all, seconds of this run, seconds left."""


def print_document(
    document: Document, *, file: IO[str] | None = None, width: int = PIPE_WIDTH
) -> None:
    """Print to stdout or a file; ``width`` is that of lines that no terminal shows."""
    parts: list[RenderableType] = [Text(document.title, "bold")] if document.title else []
    parts += _parts(document.blocks, is_first=not parts)
    console = Console(file=file, highlight=False, markup=False)
    if console.is_terminal:
        console.print(Group(*parts))
        return
    text = io.StringIO()
    Console(file=text, highlight=False, markup=False, width=width).print(Group(*parts))
    console.file.write("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))


def _parts(blocks: Iterable[Block], *, is_first: bool = True) -> Iterator[RenderableType]:
    """What rich prints, with an empty line before each new thought."""
    for block in blocks:
        if isinstance(block, Chart):
            continue
        is_lead = isinstance(block, Paragraph) and block.style == "lead"
        # The first block stands directly below its heading.
        if not is_first and (is_lead or isinstance(block, Card | Table | Section)):
            yield Text()
        is_first = False
        if isinstance(block, Paragraph):
            yield Text(block.text, _STYLES.get(block.style, ""))
        elif isinstance(block, Bullets):
            style, mark = ("dim", "–") if block.is_muted else ("", "•")
            yield from (label_grid([(mark, line)], style, text_style=style) for line in block.lines)
        elif isinstance(block, Card):
            yield from _card(block)
        elif isinstance(block, Table):
            yield _table(block)
        else:
            yield Text(block.title, "bold")
            yield Padding(Group(*_parts(block.blocks)), (0, 0, 0, 2), expand=False)


def _card(card: Card) -> Iterator[RenderableType]:
    head = Text.assemble((f"{card.name}: ", "bold") if card.name else "")
    for tone, title in card.badges:
        head.append(f" {title} ", BADGES.get(tone, "bold")).append(" ")
    yield head.append(card.headline, "bold")
    if card.text:
        yield Text(card.text)
    mark = "• " if len(card.evidence) > 1 else ""
    rows = [("" if at else "Why", f"{mark}{line}") for at, line in enumerate(card.evidence)]
    rows += [("Next", card.action)] if card.action else []
    if rows:
        yield label_grid(rows, "bold", width=11)
    yield from (Text(note, "dim") for note in card.notes)


def _table(table: Table) -> RenderableType:
    if not table.header:
        width = max([11, *(_styled(label).cell_len for label, _ in table.rows)])
        return label_grid(table.rows, "cyan", width=width)
    drawn = RichTable()
    for number, name in enumerate(table.header):
        column = [row[number] for row in table.rows]
        # Words begin at the left, figures end at the right.
        is_figure = number > 0 and all(
            isinstance(cell, str) and cell[:1] in "0123456789–+−$.<" for cell in column
        )
        drawn.add_column(Text(name), justify="right" if is_figure else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(_styled, row))
    return drawn


def label_grid(
    rows: Sequence[Row], style: str, *, width: int | None = None, text_style: str = ""
) -> RenderableType:
    """Labels of a width, and what stands beside them."""
    grid = RichTable.grid(padding=(0, 1))
    grid.add_column(width=width, no_wrap=True, style=style)
    grid.add_column(overflow="fold", style=text_style)
    for row in rows:
        grid.add_row(*map(_styled, row))
    return grid


def _styled(cell: str | Cell) -> Text:
    return Text(cell) if isinstance(cell, str) else Text(cell.text, _TONES.get(cell.tone, ""))


@contextmanager
def phase_progress(unit: str = "rows") -> Iterator[Callable[[str, int, int, int], None]]:
    """A bar for work in several phases; the callable takes the phase, done, total and a count."""
    with _bar(TaskProgressColumn(), TimeRemainingColumn()) as draw:
        yield lambda phase, done, total, count: draw(phase, done, total, f"{count:,} {unit}")


@contextmanager
def protocol_progress() -> Iterator[Update]:
    """How far a protocol is: a bar in a terminal, else one line for every run."""
    printed, is_terminal = ("", -1), Console(stderr=True).is_terminal
    with _bar() as draw:

        def update(text: str, done: int, total: int, seconds: float, left: float | None) -> None:
            nonlocal printed
            rest = [] if left is None else [f"up to {format_duration(max(1.0, left))} left"]
            runs = [f"{done}/{total} runs"] if total else []
            draw(f"{text}, {seconds:.0f} s", done, total, "  ".join([*runs, *rest]))
            if not is_terminal and (text, done) != printed:
                printed = text, done
                run = [f"run {done + 1} of {total}"] if done < total else []
                line = "; ".join([": ".join(["fast-axolotl", *run, text]), *rest])
                print(line, file=sys.stderr, flush=True)

        yield update


@contextmanager
def _bar(*columns: ProgressColumn) -> Iterator[Callable[[str, int, int, str], None]]:
    """Draws a bar on stderr with these columns behind it; nothing where that is no terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text, done, total, more: None
        return
    text = TextColumn("{task.description}", markup=False)
    more = TextColumn("{task.fields[more]}", markup=False)
    with Progress(text, BarColumn(), *columns, more, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, more="")

        def draw(text: str, done: int, total: int, more: str) -> None:
            # By ``update`` a total cannot become unknown again.
            bar.tasks[0].total = total or None
            bar.update(task, description=text, completed=done, more=more)

        yield draw
