"""Tables and progress in the terminal, by rich.

Tables go to stdout and progress to stderr, so that a pipe receives results only. Without a terminal
tables keep their natural width, and progress is silent, or a line for every run of a protocol.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

_PIPE_WIDTH = 160

Update = Callable[[str, int, int, float, "float | None"], None]
"""What runs, runs done, runs in all, seconds of this run, seconds left."""


def print_parts(parts: Iterable[RenderableType], width: int, file: IO[str] | None) -> None:
    """Print to stdout, or a file: in colours on a terminal, else as plain text so wide."""
    console = Console(file=file, highlight=False, markup=False)
    if console.is_terminal:
        console.print(Group(*parts))
        return
    text = io.StringIO()
    Console(file=text, highlight=False, markup=False, width=width).print(Group(*parts))
    console.file.write("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))


def show_pairs(title: str, pairs: Sequence[tuple[str, str]]) -> None:
    """Two columns: a name and its value."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in pairs:
        table.add_row(name, value)
    _console().print(table)


def show_matrix(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> None:
    """A table with text in the first column and figures in the others, and notes below."""
    console = _console()
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note, style="dim")


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of words: every column to the left, long ones folded."""
    table = Table()
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


@contextmanager
def phase_progress(unit: str = "rows") -> Iterator[Callable[[str, int, int, int], None]]:
    """A bar for work in several phases; the callable takes the phase, done, total and a count."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn(f"{{task.fields[count]:,}} {unit}"),
        TimeRemainingColumn(),
    )
    if not console.is_terminal:
        yield lambda phase, done, total, count: None
        return
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def update(phase: str, done: int, total: int, count: int) -> None:
            if phase not in tasks:
                for task in tasks.values():
                    bar.remove_task(task)
                tasks.clear()
                tasks[phase] = bar.add_task(phase, count=0, total=total or None)
            bar.update(tasks[phase], completed=done, count=count)

        yield update


@contextmanager
def protocol_progress() -> Iterator[Update]:
    """How far a protocol is: a bar in a terminal, else one line for every run."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        printed = ("", -1)

        def write(text: str, done: int, total: int, seconds: float, left: float | None) -> None:
            nonlocal printed
            if (text, done) != printed:
                printed = text, done
                run = [f"run {done + 1} of {total}"] if done < total else []
                rest = f"; {describe_left(left)}" if left is not None else ""
                line = ": ".join(["fast-axolotl", *run, text])
                print(f"{line}{rest}", file=sys.stderr, flush=True)

        yield write
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[runs]}", markup=False),
        TextColumn("{task.fields[left]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, runs="", left="")

        def draw(text: str, done: int, total: int, seconds: float, left: float | None) -> None:
            bar.update(
                task,
                description=f"{text}, {seconds:.0f} s",
                completed=done,
                total=total or None,
                runs=f"{done}/{total} runs" if total else "",
                left="" if left is None else describe_left(left),
            )

        yield draw


def describe_left(seconds: float) -> str:
    """An estimate, as exact as one can be: ``about 12 min left``."""
    if seconds < 90:
        return f"about {max(1.0, seconds):.0f} s left"
    if seconds < 90 * 60:
        return f"about {seconds / 60:.0f} min left"
    return f"about {seconds / 3600:.1f} h left"


def _console() -> Console:
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(width=width, markup=False, highlight=False)
