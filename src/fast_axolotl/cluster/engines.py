"""Who does the tasks of a job: processes of this machine, or the nodes of a Ray cluster.

Both hand a task to a process and hear what came of it: an answer, an error that was raised on
purpose, or the text of one that was not. A process that dies costs nothing but its task, which is
tried again; a task that ends its process every time ends the job. Rows pass through files alone: a
task and its answer are all that is sent.

Ray has retries of its own, which nobody would hear of, and ends a process that cannot reach the
cluster's head for 60 seconds. So its retries are off, and the head is asked every few seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from multiprocessing.connection import wait
from typing import Any

from fast_axolotl import system
from fast_axolotl._version import __version__
from fast_axolotl.cluster.tasks import Answer, Engine, Event, Heard, Task, perform
from fast_axolotl.errors import DataError, FastAxolotlError, UsageError

__all__ = ["find_skew", "open_engine"]

_ATTEMPTS = 3
"""A task that has ended its process so often would do it again."""
_MOST_LOSSES = 20
"""Of one task, those with its node included, which are nobody's fault."""
_END_SECONDS = 5.0
"""For a process to remove its unfinished files."""
_LOOK_SECONDS = 5.0
_HEAD_SECONDS = 30.0
_NO_NODES_SECONDS = 600.0
"""For nodes to come back, as they do where an autoscaler replaces them."""
_PROBE_SECONDS = 120.0
_PACKAGES = ("axolotl", "transformers", "tokenizers", "datasets", "pyarrow", "numpy")
"""Another version of these may make other rows."""

_Outcome = tuple[str, Any]
"""done, an answer; meant, an error; broke, a traceback; skewed, a node's id and why."""


def open_engine(
    kind: str,
    *,
    address: str = "auto",
    workers: int = 0,
    memory: int = 0,
    preload: Sequence[str] = (),
) -> Engine:
    """The engine called ``kind``: local or ray.

    Args:
        kind: ``local`` or ``ray``.
        address: Of the Ray cluster: ``auto`` or ``HOST:PORT``.
        workers: Tasks at a time; 0 takes all cores of this machine or of the cluster.
        memory: Bytes of its node that a Ray task takes; 0 does not say.
        preload: Modules that local processes find imported.
    """
    if workers < 0:
        raise UsageError(f"workers must be 0 or more, not {workers}")
    if kind == "local":
        return _Local(workers, preload)
    if kind == "ray":
        return _Ray(address, workers, memory)
    raise UsageError(f"unknown engine {kind!r}: use local or ray")


class _Local:
    """Processes that a fork server starts, each at the other end of a pipe."""

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
                    reason = f"its process {_cause_of_death(process.exitcode)}"
                    deaths[task.name] += 1
                    if deaths[task.name] >= _ATTEMPTS:
                        raise _hopeless(task, reason, _ATTEMPTS)
                    heard(Event(kind="retried", stage=task.stage, task=task, reason=reason))
                    waiting.append(task)
        finally:
            _end({pipe: process for pipe, (process, _) in busy.items()})

    def nodes(self) -> list[dict[str, Any]]:
        return [_probe()]

    def close(self) -> None:
        _end(self._idle)
        self._idle.clear()

    def _start(self) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, dict(os.environ))
        process = self._context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return ours, process


class _Ray:
    """Tasks of Ray Core on whatever nodes the cluster has at the moment."""

    def __init__(self, address: str, workers: int, memory: int) -> None:
        try:
            import ray
        except ImportError:
            cure = "pip install 'ray>=2.52.1'"
            raise UsageError(f"the engine ray needs Ray, which is not installed: {cure}") from None

        known = os.environ.get("RAY_ADDRESS") or address if address == "auto" else address
        host, _, port = known.rpartition(":")
        if known != "auto" and not (host and port.isdigit() and "/" not in host):
            raise UsageError(f"the address of a Ray cluster is auto or HOST:PORT, not {known!r}")
        nobody = f"found no Ray cluster at {known}: start one with `ray start --head`"
        # Ray itself would try for minutes.
        if known != "auto" and not _is_open(known):
            raise UsageError(f"{nobody}, or see that its port can be reached from this machine")
        self._ray: Any = ray
        self._is_ours = not ray.is_initialized()
        try:
            ray.init(address, log_to_driver=False, logging_level="error", ignore_reinit_error=True)
        except (ConnectionError, ray.exceptions.AuthenticationError) as error:
            if "AuthToken" in f"{error} {error.__cause__}":
                nobody = f"the Ray cluster at {known} did not accept this machine's token: set "
                nobody += "RAY_AUTH_MODE=token, with the cluster's token in ~/.ray/auth_token"
            raise UsageError(nobody) from None
        self._head: str = ray.get_runtime_context().gcs_address
        self._workers = workers
        self._memory = {"memory": memory} if memory else {}
        self._avoided: set[str] = set()
        self._seen_head = self._seen_nodes = time.monotonic()
        try:
            self._look()
            if not self._slots:
                need = f" and {memory:,} bytes of memory" if memory else ""
                raise UsageError(
                    f"no node of the Ray cluster at {known} offers a CPU{need} to a task: "
                    "add nodes, or use a lower --memory"
                )
            if differences := find_skew(_versions(), self.nodes()):
                raise UsageError(
                    "nodes would make other rows, since other versions are installed there:\n  "
                    + "\n  ".join(differences)
                    + "\nInstall the same versions on all nodes, and start these again."
                )
        except BaseException:
            self.close()
            raise

    def run(self, url: str, tasks: Sequence[Task], heard: Heard) -> Iterator[tuple[Task, Answer]]:
        ray = self._ray
        function = ray.remote(_attempt_on_node)
        waiting = deque(tasks)
        sent: dict[Any, tuple[Task, frozenset[str]]] = {}
        losses: dict[str, list[frozenset[str]]] = defaultdict(list)
        try:
            while waiting or sent:
                if time.monotonic() > self._looked + _LOOK_SECONDS:
                    self._look()
                while waiting and len(sent) < 2 * self.num_workers:
                    task = waiting.popleft()
                    options: dict[str, Any] = {"num_cpus": 1, "max_retries": 0, **self._memory}
                    if self._avoided:
                        names = ",".join(sorted(self._avoided))
                        options["label_selector"] = {"ray.io/node-id": f"!in({names})"}
                    reference = function.options(**options).remote(url, task, _versions())
                    sent[reference] = task, frozenset(self._slots)
                    heard(Event(kind="started", stage=task.stage, task=task))
                ready, _ = ray.wait(list(sent), timeout=_LOOK_SECONDS)
                if ready:
                    ready, _ = ray.wait(list(sent), num_returns=len(sent), timeout=0)
                for reference in ready:
                    task, nodes = sent.pop(reference)
                    try:
                        outcome, value = ray.get(reference)
                    except ray.exceptions.RayError as error:
                        outcome, reason = "lost", str(error).strip()
                        self._look()
                        losses[task.name].append(nodes)
                        # Where a node has gone since, it may have taken the task with it.
                        deaths = sum(nodes <= set(self._slots) for nodes in losses[task.name])
                        if deaths >= _ATTEMPTS or len(losses[task.name]) >= _MOST_LOSSES:
                            raise _hopeless(task, reason, len(losses[task.name])) from None
                    if outcome == "skewed":
                        node, reason = value
                        self._avoided.add(node)
                    if outcome in ("lost", "skewed"):
                        heard(Event(kind="retried", stage=task.stage, task=task, reason=reason))
                        waiting.append(task)
                    else:
                        yield task, _answer(task, outcome, value)
        finally:
            for reference in sent:
                with suppress(ray.exceptions.RayError):
                    ray.cancel(reference, force=True)

    def nodes(self) -> list[dict[str, Any]]:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        errors = self._ray.exceptions
        probe = self._ray.remote(_probe)
        asked = []
        for node in self._slots:
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            asked.append((node, probe.options(num_cpus=0, scheduling_strategy=place).remote()))
        found = []
        for node, reference in asked:
            try:
                found.append(self._ray.get(reference, timeout=_PROBE_SECONDS))
            except (errors.TaskUnschedulableError, errors.NodeDiedError):
                continue
            except errors.RayError as error:
                raise UsageError(
                    f"node {self._addresses[node]} cannot run fast-axolotl {__version__}: install "
                    f"it there, and start the node again.\n{error}"
                ) from None
        return found

    def close(self) -> None:
        if self._is_ours:
            self._ray.shutdown()

    def _look(self) -> None:
        """Who could work now; an error where nobody could for too long."""
        self._looked = time.monotonic()
        if _is_open(self._head):
            self._seen_head = self._looked
            alive = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"]}
            self._addresses = {key: node["NodeManagerAddress"] for key, node in alive.items()}
            self._slots = {}
            for key in alive.keys() - self._avoided:
                has, need = alive[key]["Resources"], {"CPU": 1, **self._memory}
                if slots := int(min(has.get(name, 0) // need[name] for name in need)):
                    self._slots[key] = slots
            self.num_workers = self._workers or max(1, sum(self._slots.values()))
            if self._slots:
                self._seen_nodes = self._looked
        lost = ""
        if self._looked - self._seen_head > _HEAD_SECONDS:
            lost = f"the head of the Ray cluster at {self._head} does not answer any more"
        elif self._looked - self._seen_nodes > _NO_NODES_SECONDS:
            lost = f"the Ray cluster at {self._head} has no node left that can work"
        if lost:
            raise DataError(
                f"{lost}. What is finished is kept: once the cluster is back, the same command "
                "continues where it was."
            )


def find_skew(versions: Mapping[str, str], nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where nodes have other versions than these, a line for each node and package."""
    return [
        f"node {node['name']}: {name} {node['versions'].get(name, 'not installed')}, here {version}"
        for node in nodes
        for name, version in versions.items()
        if node["versions"].get(name) != version
    ]


def _probe() -> dict[str, Any]:
    """This machine, as ``Engine.nodes`` tells of it."""
    free = system.meminfo_bytes(system.PROC, "MemAvailable") or system.memory_bytes()
    return {
        "name": system.node_name(),
        "cores": system.usable_cores(),
        "memory_bytes": min(free, system.limit_bytes() or free),
        "versions": _versions(),
    }


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version().rpartition(".")[0], "fast-axolotl": __version__}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _is_open(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_SECONDS).close()
    except (OSError, OverflowError):
        return False
    return True


# In working processes.


def _work(pipe: Any, environment: dict[str, str]) -> None:
    """Tasks from a pipe, until it or the process behind it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # The fork server's is as old as itself.
    os.environ.clear()
    os.environ.update(environment)

    def follow_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_END_SECONDS)
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            pipe.send(_attempt(*pipe.recv()))


def _attempt(url: str, task: Task) -> _Outcome:
    # Every core has a process already.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return "done", perform(url, task)
    except FastAxolotlError as error:
        return "meant", error
    except Exception:  # noqa: BLE001  whoever sent the task raises it
        return "broke", traceback.format_exc()


def _attempt_on_node(url: str, task: Task, versions: Mapping[str, str]) -> _Outcome:
    """The same on a node, which may have joined after the others were asked for their versions."""
    import ray

    name = system.node_name()
    if differences := find_skew(versions, [{"name": name, "versions": _versions()}]):
        return "skewed", (ray.get_runtime_context().get_node_id(), "; ".join(differences))
    outcome, value = _attempt(url, task)
    if outcome == "meant":
        make, (message, *rest), *_ = value.__reduce__()
        return outcome, make(f"{message} (on node {name})", *rest)
    return outcome, f"on node {name}\n{value}" if outcome == "broke" else value


# What came of a task.


def _answer(task: Task, outcome: str, value: Any) -> Answer:
    if outcome == "meant":
        raise value
    if outcome == "broke":
        last = value.strip().rpartition("\n")[2]
        raise DataError(f"task {task.stage}/{task.name} failed: {last}\n{value.strip()}")
    answer: Answer = value
    return answer


def _hopeless(task: Task, reason: str, times: int) -> DataError:
    return DataError(
        f"task {task.stage}/{task.name} was lost {times} times, most recently because {reason}. "
        "If the machine ran out of memory, use a lower --memory or fewer --workers; what is "
        "finished is kept, and the same command continues where it was."
    )


def _cause_of_death(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    is_kill = exit_code == -signal.SIGKILL
    return f"was ended by {name}" + (", as by a system out of memory" if is_kill else "")


def _end(workers: Mapping[Any, Any]) -> None:
    """Ends processes, by their pipes; they have a moment to remove their unfinished files."""
    for pipe, process in workers.items():
        pipe.close()
        process.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for process in workers.values():
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
