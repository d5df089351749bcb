"""How far a protocol is, on stderr: a bar in a terminal, else one line for every run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

__all__ = ["protocol_progress"]

Update = Callable[[str, int, int, float, "float | None"], None]
"""What runs, runs done, runs in all, seconds of this run, seconds left."""


@contextmanager
def protocol_progress() -> Iterator[Update]:
    """Shows what it is told, until it is left."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _plain_lines()
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[runs]}", markup=False),
        TextColumn("{task.fields[left]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, runs="", left="")

        def update(text: str, done: int, total: int, seconds: float, left: float | None) -> None:
            bar.update(
                task,
                description=f"{text}, {seconds:.0f} s",
                completed=done,
                total=total or None,
                runs=f"{done}/{total} runs" if total else "",
                left=_left(left),
            )

        yield update


def _plain_lines() -> Update:
    told = ("", -1)

    def update(text: str, done: int, total: int, seconds: float, left: float | None) -> None:
        nonlocal told
        if (text, done) != told:
            told = text, done
            run = [f"run {done + 1} of {total}"] if done < total else []
            line = ": ".join(["fast-axolotl", *run, text])
            rest = f"; {_left(left)}" if left is not None else ""
            print(f"{line}{rest}", file=sys.stderr, flush=True)

    return update


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"about {seconds:.0f} s left" if seconds < 90 else f"about {seconds / 60:.0f} min left"
