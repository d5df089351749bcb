"""Tasks of a job, run once each, whoever runs them and however often the job is begun again.

A task names a function of this package and what it is given. The function writes its files into the
store and returns a small dict; ``perform`` keeps that beside them as the last thing it does. So a
task whose answer is there is done, and one that was lost half way is done again from the start.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, Protocol

from fast_axolotl.cluster.store import Store
from fast_axolotl.system import node_name

Answer = dict[str, Any]
"""What a task found, and under ``ran``: node, seconds and peak memory of its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of a stage."""

    stage: str
    name: str
    function: str
    """``module:function``; called with the store and the arguments."""
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def answer_name(self) -> str:
        return f"{self.stage}/{self.name}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a progress display hears."""

    kind: Literal["stage", "started", "done", "retried"]
    stage: str
    total: int = 0
    """Of a stage: its tasks, those done earlier included."""
    task: Task | None = None
    answer: Answer | None = None
    is_earlier: bool = False
    """Whether it was done by an earlier run."""
    reason: str = ""
    """Why it is tried again."""


Heard = Callable[[Event], None]


class Engine(Protocol):
    """Who does the work."""

    @property
    def num_workers(self) -> int: ...

    def run(self, url: str, tasks: Sequence[Task], heard: Heard) -> Iterator[tuple[Task, Answer]]:
        """Answers as they come, in any order; raises what a task raised on purpose."""
        ...

    def close(self) -> None: ...


def perform(url: str, task: Task) -> Answer:
    """Does one task, in whatever process this is called."""
    store = Store(url)
    module, _, name = task.function.partition(":")
    begin = time.perf_counter()
    answer: Answer = getattr(import_module(module), name)(store, **task.arguments)
    answer["ran"] = {
        "node": node_name(),
        "seconds": time.perf_counter() - begin,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    store.write_json(task.answer_name, answer)
    return answer


def run_stage(
    engine: Engine, store: Store, stage: str, tasks: Sequence[Task], heard: Heard
) -> dict[str, Answer]:
    """The answers of all tasks, by their names; those of an earlier run are not done again."""
    heard(Event(kind="stage", stage=stage, total=len(tasks)))
    done = store.names(stage)
    answers: dict[str, Answer] = {}
    left = []
    for task in tasks:
        if f"{task.name}.json" in done:
            answers[task.name] = store.read_json(task.answer_name)
            answer = answers[task.name]
            heard(Event(kind="done", stage=stage, task=task, answer=answer, is_earlier=True))
        else:
            left.append(task)
    for task, answer in engine.run(store.url, left, heard):
        answers[task.name] = answer
        heard(Event(kind="done", stage=stage, task=task, answer=answer))
    return {task.name: answers[task.name] for task in tasks}
