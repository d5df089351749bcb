"""Run a kernel in several threads, each on a slice of the rows.

Threads live for one call: nothing stays behind that a fork could break. Starting one costs some
50 µs, so small inputs stay in the calling thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from threading import Thread


def slices(total: int, count: int) -> list[tuple[int, int]]:
    """``total`` things in ``count`` runs of nearly equal length, as (start, stop); none empty."""
    count = max(1, min(count, total))
    edges = [total * index // count for index in range(count + 1)]
    return [(start, stop) for start, stop in pairwise(edges) if stop > start]


def spread(
    work: Callable[[int, int], object], ranges: Sequence[tuple[int, int]], num_threads: int
) -> None:
    """Calls ``work(start, stop)`` for every range, on so many threads; raises the first error.

    The calling thread is one of them, and each takes the next range as it becomes free: where the
    others are slow to start, the caller does their share.
    """
    waiting = deque(ranges)
    errors: list[BaseException] = []

    def take_turns() -> None:
        with suppress(IndexError):
            while not errors:
                edges = waiting.popleft()
                try:
                    work(*edges)
                except BaseException as error:  # noqa: BLE001 - raised again in the caller
                    errors.append(error)

    helpers = [Thread(target=take_turns) for _ in range(min(num_threads, len(ranges)) - 1)]
    for helper in helpers:
        helper.start()
    take_turns()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
