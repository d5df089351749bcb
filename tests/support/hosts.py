"""What tests of the hosts share: a meter that takes down what it is told, and sums of a record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fast_axolotl.record import ProfileWindow, RankRecord, read_run


def total(rank: RankRecord, field: str) -> float:
    """A sum over the blocks of a rank; what was not measured counts as nothing."""
    return sum(getattr(block, field) or 0 for block in rank.blocks)


def spans_of(rank: RankRecord) -> dict[str, float]:
    """Seconds of each kind of span."""
    found: dict[str, float] = {}
    for block in rank.blocks:
        for name, seconds in block.spans.items():
            found[name] = found.get(name, 0.0) + seconds
    return found


def end_of(folder: Path) -> tuple[str, str]:
    """How the record of rank 0 ends: the reason and the error."""
    end = read_run(folder).ranks[0].end
    assert end is not None
    return end.reason, end.error


def break_down(*_: Any, **__: Any) -> None:
    """A fault of ours, which a training must not see."""
    raise ZeroDivisionError("ours")


class FakeMeter:
    """Takes down what hooks tell a meter."""

    world_size = 1

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.known: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}
        self.windows: list[ProfileWindow] = []

        self.wait_begin = lambda: None
        self.fetch_begin = lambda queue_depth=None: self.told.append("begin")
        self.fetch_end = lambda batch: self.told.append(len(batch))
        self.fetch_failed = lambda error=None: self.told.append(type(error).__name__)
        self.worker_start = lambda original: original
        self.exhausted = partial(self.told.append, "exhausted")
        self.step = partial(self.told.append, "step")
        self.settings = self.known.update
        self.reason = self.reasons.__setitem__
        self.window = self.windows.append

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        self.told.append(name)
        yield
        self.told.append(f"end {name}")
