"""Who does the tasks of a job: processes of this machine, or the nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fast_axolotl.cluster.tasks import Answer, Engine, Heard, Task, perform
from fast_axolotl.system import node_name

__all__ = ["open_engine"]


def open_engine(
    kind: str,
    *,
    address: str = "auto",
    workers: int = 0,
    memory: int = 0,
    preload: Sequence[str] = (),
) -> Engine:
    """The engine called ``kind``: local or ray."""
    return _Inline()


class _Inline:
    num_workers = 1

    def run(self, url: str, tasks: Sequence[Task], heard: Heard) -> Iterator[tuple[Task, Answer]]:
        for task in tasks:
            yield task, perform(url, task)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"name": node_name()}]

    def close(self) -> None:
        pass
