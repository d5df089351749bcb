"""The loop that ``bench protocol`` compares with itself: ``python -m … STEPS SLOWER``.

A reader makes rows of plain Python objects; a step sums over them and then waits as for a device.
``SLOWER`` is the share of its own time that every step then spends doing nothing: 0.1 makes the
loop 10 % slower, whatever the machine. Measured by the meter into the folder that ``fast-axolotl
run --measure`` names. The standard library and the meter, nothing else.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

__all__ = ["main"]

_BATCH_ROWS = 8
_ROW_NUMBERS = 300
_ROUNDS = 10
"""Sums over a batch in one step: with the reader some 1 ms of one core."""
_DEVICE_SECONDS = 0.002


def main(steps: str, slower: str) -> None:
    """So many steps, each this share slower."""
    from fast_axolotl.measure import measure

    share = float(slower)
    with measure(os.environ["FAST_AXOLOTL_MEASURE"]) as meter:
        begin = time.perf_counter()
        for batch in meter.watch(_read(int(steps))):
            _step(batch)
            now = time.perf_counter()
            _spin_until(now + share * (now - begin))
            begin = time.perf_counter()


def _read(steps: int) -> Iterator[list[list[int]]]:
    for step in range(steps):
        yield [list(range(step, step + _ROW_NUMBERS)) for _ in range(_BATCH_ROWS)]


def _step(batch: list[list[int]]) -> None:
    for _ in range(_ROUNDS):
        for row in batch:
            sum(row)
    time.sleep(_DEVICE_SECONDS)


def _spin_until(moment: float) -> None:
    """Exact to a microsecond, where a sleep would be late by some fifty."""
    while time.perf_counter() < moment:
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
