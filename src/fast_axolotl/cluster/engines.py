"""Run the tasks of a job in processes on this machine or on the nodes of a Ray cluster.

A task names a function of this package and its arguments. The function writes its files into the
store and returns a small dict, which ``perform`` keeps beside them as the last thing it does: a
task whose answer is there is done. One that fails is tried again, up to four times, unless what it
says is about data or options. Ray's own retries, of which nobody would hear, are off.
"""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

from fast_axolotl import system
from fast_axolotl._version import __version__
from fast_axolotl.cluster.store import Store
from fast_axolotl.errors import DataError, FastAxolotlError, UsageError

_ATTEMPTS = 4
"""Of one task."""
_LATE_TIMES, _LATE_SECONDS = 10, 300.0
"""A task has hung that takes so many times as long as the slowest that is done, and so long."""
_FIRST_SECONDS = 3600.0
"""The same as long as none is done."""
_MOMENT_SECONDS = 5.0
_HEAD_SECONDS = "15"
_PACKAGES = ("axolotl", "transformers", "tokenizers", "datasets", "pyarrow", "numpy")

Answer = dict[str, Any]
"""What a task found, and under ``ran``: node and peak memory of its process."""

Outcome = tuple[str, Any]
"""done, an answer; meant, an error; lost, a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One piece of a stage."""

    stage: str
    name: str
    function: str
    """``module:function``; called with the store and the arguments."""
    arguments: Mapping[str, Any]


def run_tasks(
    engine: Engine, url: str, tasks: Sequence[Task], retried: Callable[[str], None]
) -> Iterator[tuple[Task, Answer]]:
    """Answers as they come, in any order; raises what a task raised on purpose.

    ``retried`` hears why a task is tried again. One that seems to hang is started once more on
    another worker; the first answer counts, and what the other writes is the same.
    """
    waiting = deque(tasks)
    running: dict[Any, tuple[Task, float]] = {}
    late: dict[Any, str] = {}
    left = {task.name for task in tasks}
    losses: Counter[str] = Counter()
    slowest = 0.0
    try:
        while left:
            # Who is late leaves room for another.
            room = engine.num_slots - len(running) + len(late)
            for _ in range(min(room, len(waiting))):
                task = waiting.popleft()
                if task.name in left:
                    running[engine.start(url, task)] = task, time.monotonic()
            for key, (kind, value) in engine.wait(running.keys()):
                task, begin = running.pop(key)
                late.pop(key, None)
                if task.name not in left:
                    continue
                if kind == "done":
                    left.remove(task.name)
                    slowest = max(slowest, time.monotonic() - begin)
                    yield task, value
                    continue
                if kind == "meant":
                    raise value
                losses[task.name] += 1
                if losses[task.name] >= _ATTEMPTS:
                    raise DataError(
                        f"task {task.stage}/{task.name} failed {_ATTEMPTS} times. Finished work is "
                        "kept; run the same command again to continue. If the machine ran out of "
                        "memory, use a lower --memory or fewer --workers. The last time: "
                        f"{value}"
                    )
                retried(value.partition("\n")[0])
                waiting.append(task)
            limit = max(_LATE_TIMES * slowest, _LATE_SECONDS) if slowest else _FIRST_SECONDS
            for key, (task, begin) in running.items():
                is_late = time.monotonic() - begin > limit and task.name in left
                if is_late and task.name not in late.values():
                    late[key] = task.name
                    retried(f"it has not answered for {limit:,.0f} s")
                    waiting.appendleft(task)
    finally:
        engine.abandon(running)


def perform(url: str, task: Task) -> Answer:
    """Does one task, in whatever process this is called."""
    store = Store(url)
    module, _, name = task.function.partition(":")
    answer: Answer = getattr(import_module(module), name)(store, **task.arguments)
    answer["ran"] = {
        "node": system.node_name(),
        "peak_bytes": system.peak_memory_bytes() or 0,
    }
    store.write_json(f"{task.stage}/{task.name}.json", answer)
    return answer


class Local:
    """Processes of this machine, ``workers`` at a time or as many as it has cores.

    They find the modules of ``preload`` imported. ``start`` gives the key under which ``wait``
    tells of a task; ``abandon`` ends what was started and not waited for.
    """

    def __init__(self, workers: int, preload: Sequence[str] = ()) -> None:
        self.num_slots = workers or system.usable_cores()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._idle: dict[Any, Any] = {}
        self._busy: dict[Any, Any] = {}

    def start(self, url: str, task: Task) -> Any:
        if self._idle:
            pipe, process = self._idle.popitem()
        else:
            pipe, theirs = self._context.Pipe()
            arguments = (theirs, dict(os.environ))
            process = self._context.Process(target=_work, args=arguments, daemon=True)
            try:
                process.start()
            except EOFError:
                raise DataError("the fork server was killed; is the memory full?") from None
            theirs.close()
        self._busy[pipe] = process
        with suppress(OSError):  # one that died while it was idle is seen below
            pipe.send((url, task))
        return pipe

    def wait(self, keys: Collection[Any]) -> Iterator[tuple[Any, Outcome]]:
        # Who has died need not have closed its pipe, where children of its own live on.
        both = [*keys, *(self._busy[pipe].sentinel for pipe in keys)]
        ready = set(wait(both, _MOMENT_SECONDS))
        for pipe in [p for p in keys if p in ready or self._busy[p].sentinel in ready]:
            process = self._busy.pop(pipe)
            outcome: Outcome | None = None
            with suppress(EOFError, OSError):
                outcome = pipe.recv() if pipe.poll() else None
            if outcome is not None:
                self._idle[pipe] = process
            else:
                _end({pipe: process})
                code = process.exitcode
                name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                outcome = "lost", f"its process ended with {name}"
            yield pipe, outcome

    def abandon(self, keys: Collection[Any]) -> None:
        _end({pipe: self._busy.pop(pipe) for pipe in keys})

    def close(self) -> None:
        _end(self._idle)


class Nodes:
    """The nodes of a Ray cluster; a task takes ``memory`` bytes of its node."""

    def __init__(self, address: str, workers: int = 0, memory: int = 0) -> None:
        try:
            import ray
        except ImportError:
            raise UsageError("the engine ray needs Ray: pip install 'ray>=2.52.1'") from None

        at = (os.environ.get("RAY_ADDRESS") or address) if address == "auto" else address
        problem = f"no Ray cluster at {at} (HOST:PORT or auto); start one with `ray start --head`"
        self._ray: Any = ray
        # Ray ends this process where its head does not answer for so long.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", _HEAD_SECONDS)
        try:
            if at != "auto":  # Ray itself would try for minutes
                host, _, port = at.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), _MOMENT_SECONDS).close()
            ray.init(at, log_to_driver=False, logging_level="error", ignore_reinit_error=True)
        except (OSError, ValueError, OverflowError, ray.exceptions.AuthenticationError) as error:
            raise UsageError(f"{problem} ({error})") from None
        self._workers = workers
        self._need = {"CPU": 1, **({"memory": memory} if memory else {})}
        self._attempt = ray.remote(num_cpus=1, memory=memory or None, max_retries=0)(_attempt)
        if not self._room():
            problem = f"no node at {at} has a CPU and {memory:,} bytes of memory yet"
            print(f"{problem}; the job waits for one: lower --memory?", file=sys.stderr)

    @property
    def num_slots(self) -> int:
        """So that no node waits for its next task, and that a cluster can see that it should grow,
        as many again wait unless a number of workers is set."""
        return self._workers or 2 * max(1, self._room())

    def start(self, url: str, task: Task) -> Any:
        return self._attempt.remote(url, task, versions())

    def wait(self, keys: Collection[Any]) -> Iterator[tuple[Any, Outcome]]:
        for key in self._ray.wait(list(keys), timeout=_MOMENT_SECONDS)[0]:
            try:
                outcome: Outcome = self._ray.get(key)
            except self._ray.exceptions.RayError as error:
                outcome = "lost", str(error).strip()
            yield key, outcome

    def abandon(self, keys: Collection[Any]) -> None:
        for key in keys:
            self._ray.cancel(key, force=True)

    def close(self) -> None:
        self._ray.shutdown()

    def _room(self) -> int:
        """How many tasks have room on the nodes there are now."""
        need = self._need.items()
        return sum(
            int(min(node["Resources"].get(name, 0) // least for name, least in need))
            for node in self._ray.nodes()
            if node["Alive"]
        )


Engine = Local | Nodes


@cache
def versions() -> dict[str, str]:
    """Those that all nodes must have, and a job as long as it goes on."""
    code = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        code.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    found = {"python": platform.python_version().rpartition(".")[0]}
    found["fast-axolotl"] = f"{__version__} (code {code.hexdigest()[:8]})"
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


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


def _attempt(url: str, task: Task, wanted: Mapping[str, str] | None = None) -> Outcome:
    """A task in a working process; ``wanted``: the versions of who sent it to another node."""
    where = f" (on node {system.node_name()})" if wanted else ""
    for name, version in (wanted or {}).items():
        if (own := versions().get(name, "not installed")) != version:
            problem = f"nodes differ: {name} {own}{where}, {version} where the job was started"
            return "meant", UsageError(f"{problem}; install the same versions on all")
    try:
        return "done", perform(url, task)
    except Exception as error:  # noqa: BLE001  whoever sent the task decides
        # What pyarrow says of corrupt data has no number.
        last, is_ours = (None, errno.ENOSPC, errno.EDQUOT), isinstance(error, FastAxolotlError)
        causes = [e for e in (error.__context__, error.__cause__) if isinstance(e, OSError)]
        may_pass = any(isinstance(e, TimeoutError) or e.errno not in last for e in causes)
        if is_ours and not may_pass:
            make, (message, *rest) = cast(Any, error.__reduce__())[:2]
            return "meant", make(f"{message}{where}", *rest)
        time.sleep(_MOMENT_SECONDS)
        reason = f"{type(error).__name__}: {error}{where}"
        return "lost", reason if is_ours else f"{reason}\n{traceback.format_exc()}"


def _end(workers: dict[Any, Any]) -> None:
    for pipe, process in workers.items():
        pipe.close()
        process.terminate()
    for process in workers.values():
        process.join(_MOMENT_SECONDS)
        process.kill()
        process.join()
    workers.clear()
