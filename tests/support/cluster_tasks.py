"""Tasks for the tests of engines: they succeed, fail, die or wait, as their arguments say."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from fast_axolotl.cluster.engines import Local, Task, run_tasks
from fast_axolotl.cluster.store import Store
from fast_axolotl.errors import MissingFileError
from fast_axolotl.system import node_name


def task(function: str, name: str = "", /, **arguments: Any) -> Task:
    called = f"{__name__}:{function}"
    return Task(stage="toy", name=name or function, function=called, arguments=arguments)


def squares(count: int, seconds: float = 0, stuck_on: str = "") -> list[Task]:
    told: dict[str, Any] = {"seconds": seconds, "stuck_on": stuck_on}
    return [task("square", f"{n:02d}", number=n, **told) for n in range(count)]


def square(store: Store, number: int, seconds: float, stuck_on: str) -> dict[str, Any]:
    if node_name() == stuck_on:
        hold(store, stuck_on)
    time.sleep(seconds)
    return {"square": number**2, "pid": os.getpid()}


def die(store: Store, times: int, signal_number: int = signal.SIGKILL) -> dict[str, Any]:
    """Ends its process in as many first attempts, leaving a file for each."""
    attempts = len(store.sizes("attempts"))
    if attempts < times:
        store.write_json(f"attempts/{attempts}.json", 0)
        os.kill(os.getpid(), signal_number)
    return {"attempts": attempts}


def hang(store: Store, times: int) -> dict[str, Any]:
    """Does not end in as many first attempts."""
    attempts = len(store.sizes("attempts"))
    store.write_json(f"attempts/{attempts}.json", 0)
    time.sleep(600 if attempts < times else 0)
    return {}


def complain(store: Store) -> dict[str, Any]:
    raise MissingFileError("there is no such file", path="rows.jsonl", place="line 7")


def divide(store: Store) -> dict[str, Any]:
    return {"quotient": 1 / 0}


def fail(store: Store, error: list[Any]) -> dict[str, Any]:
    with store.writing("a"):
        raise OSError(*error)


def read(store: Store, name: str) -> dict[str, Any]:
    return {"value": store.read_json(name)}


def environment(store: Store, name: str) -> dict[str, Any]:
    return {"value": os.environ.get(name)}


def hold(store: Store, name: str) -> dict[str, Any]:
    """Writes a file without end."""
    with store.writing(f"held/{name}") as path:
        path.write_text("half")
        Path(store.path(f"{name}.pid")).write_text(str(os.getpid()))
        time.sleep(600)
    return {}


def main(url: str) -> None:
    """The program of a process that is to be interrupted: two workers, both busy for long."""
    engine = Local(workers=2)
    list(run_tasks(engine, url, [task("hold", name, name=name) for name in "ab"], print))
