"""Who does the tasks of a job: processes of this machine, or the nodes of a Ray cluster.

A process that dies costs nothing but its task, which is tried again; a task that ends its process
every time ends the job. Ray's own retries, of which nobody would hear, are off. Where the head of a
Ray cluster is gone, Ray ends this process after a minute; finished work is kept all the same.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import socket
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from multiprocessing.connection import wait
from typing import Any, cast

from fast_axolotl import system
from fast_axolotl._version import __version__
from fast_axolotl.cluster.tasks import Answer, Engine, Event, Heard, Task, perform
from fast_axolotl.errors import DataError, FastAxolotlError, UsageError

_ATTEMPTS = 4
"""Of one task: processes that ended while they were at it, with whole nodes or alone."""

_MOMENT_SECONDS = 5.0
_PACKAGES = ("axolotl", "transformers", "tokenizers", "datasets", "pyarrow", "numpy")
_Outcome = tuple[str, Any]
"""done, an answer; meant, an error; broke, a traceback."""


def open_engine(
    kind: str,
    *,
    address: str = "auto",
    workers: int = 0,
    memory: int = 0,
    preload: Sequence[str] = (),
) -> Engine:
    """The engine called ``kind``: local or ray.

    A Ray task takes ``memory`` bytes of its node; local ones find ``preload``'s modules imported.
    """
    if kind == "local":
        return _Local(workers, preload)
    if kind == "ray":
        return _Ray(address, workers, memory)
    raise UsageError(f"unknown engine {kind!r}; use local or ray")


class _Local:
    def __init__(self, workers: int, preload: Sequence[str]) -> None:
        self.num_workers = workers or system.usable_cores()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._idle: dict[Any, Any] = {}

    def run(self, url: str, tasks: Sequence[Task], heard: Heard) -> Iterator[tuple[Task, Answer]]:
        waiting = deque(tasks)
        deaths: Counter[str] = Counter()
        busy: dict[Any, tuple[Any, Task]] = {}
        try:
            while waiting or busy:
                while waiting and len(busy) < self.num_workers:
                    pipe, process = self._idle.popitem() if self._idle else self._start()
                    task = waiting.popleft()
                    busy[pipe] = process, task
                    heard(Event(kind="started", stage=task.stage, task=task))
                    with suppress(OSError):  # one that died while it was idle is seen below
                        pipe.send((url, task))
                # Who has died need not have closed its pipe, where children of its own live on.
                ready = set(wait([*busy, *(process.sentinel for process, _ in busy.values())]))
                for pipe in [p for p in busy if p in ready or busy[p][0].sentinel in ready]:
                    process, task = busy.pop(pipe)
                    outcome: _Outcome | None = None
                    with suppress(EOFError, OSError):
                        outcome = pipe.recv() if pipe.poll() else None
                    if outcome is not None:
                        self._idle[pipe] = process
                        yield task, _answer(task, *outcome)
                        continue
                    _end({pipe: process})
                    code = process.exitcode
                    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    reason = f"its process ended with {name}"
                    deaths[task.name] += 1
                    if deaths[task.name] >= _ATTEMPTS:
                        raise _hopeless(task, reason)
                    heard(Event(kind="retried", stage=task.stage, task=task, reason=reason))
                    waiting.append(task)
        finally:
            _end({pipe: process for pipe, (process, _) in busy.items()})

    def close(self) -> None:
        _end(self._idle)
        self._idle.clear()

    def _start(self) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, dict(os.environ)), daemon=True)
        process.start()
        theirs.close()
        return ours, process


class _Ray:
    def __init__(self, address: str, workers: int, memory: int) -> None:
        try:
            import ray
        except ImportError:
            raise UsageError("the engine ray needs Ray: pip install 'ray>=2.52.1'") from None

        at = (os.environ.get("RAY_ADDRESS") or address) if address == "auto" else address
        problem = f"no Ray cluster at {at} (HOST:PORT or auto); start one with `ray start --head`"
        if at != "auto" and not _is_open(at):  # Ray itself would try for minutes
            raise UsageError(problem)
        self._ray: Any = ray
        try:
            ray.init(at, log_to_driver=False, logging_level="error", ignore_reinit_error=True)
        except (ConnectionError, ray.exceptions.AuthenticationError) as error:
            if "AuthToken" in f"{error} {error.__cause__}":
                problem = f"the Ray cluster at {at} needs a token; set RAY_AUTH_MODE=token and "
                problem += "copy ~/.ray/auth_token from its head node"
            raise UsageError(problem) from None
        self._workers = workers
        self._need = {"CPU": 1, **({"memory": memory} if memory else {})}
        self._options: dict[str, Any] = {"num_cpus": 1, "memory": memory or None, "max_retries": 0}
        if not self._slots():
            self.close()
            raise UsageError(
                f"no node at {at} has a CPU and {memory:,} bytes; add nodes or lower --memory"
            )

    @property
    def num_workers(self) -> int:
        return self._workers or max(1, self._slots())

    def run(self, url: str, tasks: Sequence[Task], heard: Heard) -> Iterator[tuple[Task, Answer]]:
        ray = self._ray
        function = ray.remote(_attempt).options(**self._options)
        waiting = deque(tasks)
        sent: dict[Any, Task] = {}
        losses: Counter[str] = Counter()
        while waiting or sent:
            room = 2 * self.num_workers - len(sent) if waiting else 0
            for _ in range(min(room, len(waiting))):
                task = waiting.popleft()
                sent[function.remote(url, task, _versions())] = task
                heard(Event(kind="started", stage=task.stage, task=task))
            ray.wait(list(sent), timeout=_MOMENT_SECONDS)
            for reference in ray.wait(list(sent), num_returns=len(sent), timeout=0)[0]:
                task = sent.pop(reference)
                try:
                    outcome = ray.get(reference)
                except ray.exceptions.RayError as error:
                    reason = str(error).strip()
                    losses[task.name] += 1
                    if losses[task.name] >= _ATTEMPTS:
                        raise _hopeless(task, reason) from None
                    heard(Event(kind="retried", stage=task.stage, task=task, reason=reason))
                    waiting.append(task)
                else:
                    yield task, _answer(task, *outcome)

    def close(self) -> None:
        self._ray.shutdown()

    def _slots(self) -> int:
        """How many tasks have room on the nodes there are now."""
        return sum(
            int(min(node["Resources"].get(name, 0) // need for name, need in self._need.items()))
            for node in self._ray.nodes()
            if node["Alive"]
        )


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version().rpartition(".")[0], "fast-axolotl": __version__}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError, OverflowError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=_MOMENT_SECONDS).close()
        return True
    return False


def _work(pipe: Any, environment: dict[str, str]) -> None:
    """A local process: tasks from a pipe, until it or the process behind it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unfinished files are removed
    os.environ.clear()  # the fork server's is as old as itself
    os.environ.update(environment)

    def follow(parent: Any) -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, args=(multiprocessing.parent_process(),), daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            pipe.send(_attempt(*pipe.recv()))


def _attempt(url: str, task: Task, versions: Mapping[str, str] | None = None) -> _Outcome:
    """A task in a working process; ``versions`` are those of the process that sent it to a node."""
    where = f" (on node {system.node_name()})" if versions else ""
    for name, version in (versions or {}).items():
        if (own := _versions().get(name, "not installed")) != version:
            problem = f"nodes differ: {name} {own}{where}, {version} where the job was started"
            return "meant", UsageError(f"{problem}; install the same versions on all")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # every core has a process already
    try:
        return "done", perform(url, task)
    except FastAxolotlError as error:
        make, (message, *rest) = cast(Any, error.__reduce__())[:2]
        return "meant", make(f"{message}{where}", *rest)
    except Exception as error:  # noqa: BLE001  whoever sent the task raises it
        return "broke", f"{type(error).__name__}: {error}{where}\n{traceback.format_exc()}"


def _answer(task: Task, outcome: str, value: Any) -> Answer:
    if outcome == "meant":
        raise value
    if outcome == "broke":
        raise DataError(f"task {task.stage}/{task.name} failed: {value}")
    return dict(value)


def _hopeless(task: Task, reason: str) -> DataError:
    return DataError(
        f"task {task.stage}/{task.name} failed {_ATTEMPTS} times, last because {reason}. If the "
        "machine ran out of memory, use a lower --memory or fewer --workers. Finished work is "
        "kept; run the same command again to continue."
    )


def _end(workers: Mapping[Any, Any]) -> None:
    for pipe, process in workers.items():
        pipe.close()
        process.terminate()
    for process in workers.values():
        process.join(_MOMENT_SECONDS)
        process.kill()
        process.join()
