"""Run one kernel over slices of its rows on several processors.

Threads live for one call: nothing stays behind that a fork could break. Starting one costs some
50 µs, so small inputs stay in the calling thread.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from threading import Thread

__all__ = ["slices", "spread", "usable_processors"]

_MOST_THREADS = 256
"""Whatever is asked for: no machine gains from more, and each takes memory."""


def usable_processors(root: Path = Path("/")) -> int:
    """Processors that this process may use: its affinity and its cgroup's quota, v2 or v1.

    The quota is looked up once. ``root`` is where ``sys`` and ``proc`` are.
    """
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:
        count = os.cpu_count() or 1
    return max(1, min(count, _quota(root) or count))


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

    threads = min(num_threads, len(ranges), _MOST_THREADS)
    helpers = [Thread(target=take_turns) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    take_turns()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]


@cache
def _quota(root: Path) -> int | None:
    return min(_quotas(root), default=None)


def _quotas(root: Path) -> Iterator[int]:
    """Processors by the quota of this process's cgroup and of every one above it."""
    top = root / "sys/fs/cgroup"
    for own in _own_groups(root / "proc/self/cgroup"):
        for group in (top / own, *(top / own).parents):
            if group.is_relative_to(top):
                yield from _processors(_words(group / "cpu.max"))
                yield from _processors(
                    [
                        *_words(group / "cpu.cfs_quota_us"),
                        *_words(group / "cpu.cfs_period_us"),
                    ]
                )


def _own_groups(path: Path) -> set[str]:
    """Where this process's cgroups lie below the top, which is one of them inside a container."""
    lines = [line.split(":", 2) for line in _words(path) if line.count(":") >= 2]
    below = {(controllers, group.lstrip("/")) for _, controllers, group in lines}
    version_1 = {f"cpu/{group}" for controllers, group in below if "cpu" in controllers.split(",")}
    return {"", "cpu", *version_1, *(group for controllers, group in below if not controllers)}


def _processors(words: list[str]) -> Iterator[int]:
    """``200000 100000`` is two processors; ``max`` and -1 are no limit."""
    if len(words) >= 2 and all(word.isdigit() for word in words[:2]) and int(words[1]):
        yield max(1, round(int(words[0]) / int(words[1])))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
