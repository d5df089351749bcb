"""A job: run its stages, remember finished tasks, and publish the output at the end.

The output is written beside its place and renamed at the end; in an object store its last file says
that it is complete. The file ``_fast-axolotl`` in it names the job that wrote it, and before the
job ends it compares every file with what its task reported.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fast_axolotl.cluster.engines import Answer, Local, Nodes, Task, run_tasks, versions
from fast_axolotl.cluster.store import Store
from fast_axolotl.dedupe.output import disk_errors
from fast_axolotl.dedupe.spill import Spill
from fast_axolotl.errors import DataError, UsageError

_MARK = "_fast-axolotl"
"""The file of an output that names its job. Readers of Parquet folders skip it."""


@dataclass(slots=True, kw_only=True)
class Stage:
    """How far a stage is, and what it was in the end."""

    name: str
    tasks: int = 0
    done: int = 0
    done_before: int = 0
    """Of the tasks done, those by an earlier run that was interrupted."""
    retried: int = 0
    rows: int = 0
    """Of the tasks done."""
    seconds: float = 0.0


Heard = Callable[[Stage, str], None]
"""Hears of a stage and what happened: that it starts, that a task is tried again and why, that the
last one is done; of any other task that is done, nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """What was read, dropped and written."""

    outputs: tuple[str, ...]
    rows_in: int
    dropped: Mapping[str, int]
    """Rows by the reason they were dropped for, duplicates not counted."""
    duplicates: int
    rows_out: int
    tokens: int | None
    """Of the rows written; ``None`` where rows are no tokens yet, as with preference data."""
    bytes_in: int
    bytes_out: int
    seconds: float
    stages: tuple[Stage, ...]
    peak_bytes: int
    """The most that one working process held."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Job:
    """Runs stages, and adds up what became of their tasks."""

    def __init__(
        self,
        heard: Heard,
        *,
        engine: str = "local",
        address: str = "auto",
        workers: int = 0,
        memory: int = 0,
        preload: Sequence[str] = (),
    ) -> None:
        """Opens an engine, ``local`` or ``ray``, which ``close`` ends.

        ``workers`` tasks run at a time; 0 takes all cores. A Ray task takes ``memory`` bytes of its
        node. Local processes find the modules of ``preload`` imported.
        """
        if engine not in ("local", "ray"):
            raise UsageError(f"unknown engine {engine!r}; use local or ray")
        is_local = engine == "local"
        self._engine = Local(workers, preload) if is_local else Nodes(address, workers, memory)
        self.close = self._engine.close
        self._heard = heard
        self._begin = time.perf_counter()
        self._stages: dict[str, Stage] = {}
        self.totals: dict[str, Counter[str]] = defaultdict(Counter)
        """Of every stage, the sums of the numbers that its tasks answered."""
        self._peak_bytes = 0

    def run(
        self, store: Store, function: Callable[..., Answer], tasks: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Answer]:
        """The answers of a function's tasks, by the names of these, from their arguments.

        The stage has the function's name. What an earlier run has done is not done again.
        """
        name = function.__name__
        stage = self._stages.setdefault(name, Stage(name=name))
        totals = self.totals[name]
        stage.tasks += len(tasks)
        self._heard(stage, "starting")
        answers: dict[str, Answer] = {}
        begin, before = time.perf_counter(), stage.seconds

        def retried(reason: str) -> None:
            stage.retried += 1
            self._heard(stage, f"a task is tried again, since {reason}")

        called, there = f"{function.__module__}:{name}", store.sizes(name)
        all_tasks = [
            Task(stage=name, name=task, function=called, arguments=arguments)
            for task, arguments in tasks.items()
        ]
        done = [task for task in all_tasks if f"{task.name}.json" in there]
        left = [task for task in all_tasks if f"{task.name}.json" not in there]
        stage.done_before += len(done)
        earlier = ((task, store.read_json(f"{name}/{task.name}.json")) for task in done)
        for task, answer in chain(earlier, run_tasks(self._engine, store.url, left, retried)):
            answers[task.name] = answer
            totals.update({key: n for key, n in answer.items() if isinstance(n, int)})
            stage.done += 1
            stage.rows = totals["rows"]
            stage.seconds = before + time.perf_counter() - begin
            self._peak_bytes = max(self._peak_bytes, answer["ran"]["peak_bytes"])
            self._heard(stage, "done" if stage.done == stage.tasks else "")
        return {task: answers[task] for task in tasks}

    def summary(self, **figures: Any) -> JobSummary:
        """What was done, with what only the caller knows."""
        last = self.totals["write"]
        return JobSummary(
            **figures,
            rows_out=last["rows"],
            tokens=last["tokens"] or None,
            bytes_out=last["bytes_out"],
            seconds=time.perf_counter() - self._begin,
            stages=tuple(self._stages.values()),
            peak_bytes=self._peak_bytes,
        )


def find_repeated(
    store: Store, numbers: Iterable[tuple[str, Any]], num_rows: int, memory: int
) -> Any:
    """For each of ``num_rows`` numbers, whether its row repeats one with a smaller number.

    ``numbers`` are those of the rows of a file below ``digests/``, which has two words for each. It
    is done here, not in tasks, at some 10 million rows per second. Memory is bounded; on disk it
    takes 24 bytes a row, and 16 for each repeated one.
    """
    folder = Path(store.path("")) if store.is_local else Path(tempfile.gettempdir())
    is_repeated = np.zeros(num_rows, bool)
    with disk_errors(folder), closing(Spill(folder, limit=memory // 2)) as spill:
        for name, rows in numbers:
            spill.add(store.read_array(f"digests/{name}", "<u8"), rows)
        spill.resolve()
        for repeated, _ in spill.pairs:
            is_repeated[repeated] = True
    return is_repeated


class Output:
    """The folder that a job writes, and its work folder, from the first look until it is there."""

    def __init__(self, final: Store, work: Store, *, is_ours: bool) -> None:
        """What ``is_ours`` may be replaced, whoever wrote it: nobody else takes such a name."""
        self.final, self.work, self._is_ours, self._id = final, work, is_ours, ""
        self.secret: list[int] = []
        """The key of the digests. It follows from all that the job depends on, so that two who run
        one job in an object store, whose lock is not exact, make the same digests."""
        self.parts = Store(f"{final.url}.parts") if final.is_local else final
        """Where the files are written."""

    def claim(
        self,
        held: ExitStack,
        description: Mapping[str, Any],
        *,
        restart: bool,
        overwrite: bool = False,
    ) -> None:
        """Locks output and work folder for as long as ``held`` is, and refuses those of others.

        Keeps what the job is, or compares it with what an earlier run has kept.
        """
        held.enter_context(self.work.locked())
        held.enter_context(self.final.locked())
        is_new = restart or not self.work.exists("job.json")
        found = {} if is_new else self.work.read_json("job.json")
        self._id = found.get("id") or uuid.uuid4().hex
        if not self._is_ours:  # nobody else may have written there
            if self.work.sizes("") and not self.work.exists("job.json"):
                raise UsageError(
                    f"{self.work.url} is not the work folder of a job; pass another --work"
                )
            for place, may_replace in ((self.final, overwrite), (self.parts, is_new or overwrite)):
                owner = _job_of(place)
                if owner == "":
                    raise UsageError(
                        f"output {place.url} already exists and was not written by such a job, so "
                        "it is not replaced; choose another name, or remove it yourself"
                    )
                if owner not in (None, self._id) and not may_replace:
                    raise UsageError(
                        f"output {place.url} already exists; pass overwrite=True (--overwrite) to "
                        "replace it, or choose another name"
                    )

        def plain(value: Any) -> Any:
            return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)

        about = {**description, "versions": versions(), "work": self.work.url}
        wanted = json.loads(text := json.dumps(about, default=plain))
        key = hashlib.sha256(text.encode()).digest()
        self.secret = [word | 1 for word in np.frombuffer(key, "<u8").tolist()]
        wanted["id"] = self._id
        if is_new:
            self.work.remove()
            self.work.write_json("job.json", wanted)
        elif other := [key for key in {*wanted, *found} if wanted.get(key) != found.get(key)]:
            raise UsageError(
                f"{self.work.url} has an unfinished job with other {', '.join(sorted(other))}; "
                "pass --restart to remove it and start over, or pass another --work"
            )

    def forget_missing(self, parts: Iterable[str]) -> None:
        """No answer of a task of ``write`` outlives the file that it wrote, which has its name."""
        if _job_of(self.parts) != self._id:
            self.parts.remove()
        self.parts.write_json(_MARK, {"job": self._id, "work": self.work.url})
        written = self.parts.sizes("")
        for part in parts:
            if part not in written:
                self.work.remove(f"write/{part}.json")

    def publish(self, answers: Mapping[str, Answer], last: Mapping[str, str]) -> None:
        """The output is there after this, with the files that tasks have written.

        ``last`` are the texts of files that say it is complete.
        """
        there, wanted = self.parts.sizes(""), {name: answers[name]["bytes_out"] for name in answers}
        wrong = [] if _job_of(self.parts) == self._id else [_MARK]
        names = {*there, *wanted} - {_MARK, *last}
        wrong += [name for name in names if there.get(name) != wanted.get(name)]
        if wrong:
            raise DataError(
                f"{min(wrong)} is not what its task wrote ({len(wrong)} of {len(answers)} files); "
                "something else changed this folder: run again with restart=True (--restart)",
                path=self.parts.url,
            )
        for name, text in last.items():
            with self.parts.writing(name) as path:
                path.write_text(text, encoding="utf-8")
        if self.final.is_local:
            folder, target = Path(self.parts.path("")), Path(self.final.path(""))
            for path in folder.glob(".*"):
                shutil.rmtree(path, ignore_errors=True)  # what a killed task had begun
            if target.exists():
                shutil.rmtree(target)
            folder.rename(target)


def _job_of(place: Store) -> str | None:
    """The job that wrote a folder; empty where that is unknown, ``None`` where nothing is there."""
    if place.exists(_MARK):
        return str(place.read_json(_MARK)["job"])
    return "" if place.is_there() else None
