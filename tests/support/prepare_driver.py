"""A process that prepares datasets in tiny units, and breaks where it is told to.

Without arguments it takes a line of JSON for each preparation and answers with one; with arguments
it is ``fast-axolotl`` itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from fast_axolotl.cluster import engines
from fast_axolotl.cluster import prepare as module
from fast_axolotl.cluster.store import Store
from fast_axolotl.cluster.tasks import Answer, Engine, Event, Heard, Task
from fast_axolotl.errors import FastAxolotlError


def hurt(
    store: Store, *, function: str, arguments: dict[str, Any], fault: dict[str, Any]
) -> dict[str, Any]:
    """A task that ends badly the first time, when its first file is written and has no name."""
    with suppress(FileExistsError):
        os.close(os.open(fault["mark"], os.O_CREAT | os.O_EXCL))
        plain = Store.writing

        @contextmanager
        def deadly(self: Store, name: str) -> Iterator[Path]:
            with plain(self, name) as path:
                yield path
                if fault["what"] == "node":
                    for process in psutil.Process(os.getppid()).children(recursive=True):
                        if process.pid != os.getpid():
                            process.kill()
                    os.kill(os.getppid(), signal.SIGKILL)
                if fault["what"] in ("node", "worker"):
                    os.kill(os.getpid(), signal.SIGKILL)
                for pid in fault["pids"]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.Signals[fault["what"]])
                time.sleep(60)

        Store.writing = deadly  # type: ignore[method-assign]
    module_name, _, name = function.partition(":")
    answer: dict[str, Any] = getattr(import_module(module_name), name)(store, **arguments)
    return answer


class Hurting:
    """An engine that gives the middle task of some stages a fault."""

    def __init__(self, engine: Engine, faults: list[dict[str, Any]]) -> None:
        self._engine = engine
        self._faults = {it["stage"]: {"pids": [os.getpid()], **it} for it in faults}
        self.num_workers, self.close = engine.num_workers, engine.close

    def run(self, url: str, tasks: Sequence[Task], heard: Heard) -> Iterator[tuple[Task, Answer]]:
        given = list(tasks)
        if given and (fault := self._faults.get(given[0].stage)):
            task = given[len(given) // 2]
            what = {"function": task.function, "arguments": task.arguments, "fault": fault}
            function = "support.prepare_driver:hurt"
            given[len(given) // 2] = replace(task, function=function, arguments=what)
        return self._engine.run(url, given, heard)


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    events: Counter[str] = Counter()
    begin = time.perf_counter()

    def heard(event: Event) -> None:
        if event.kind != "stage":
            events[f"{event.stage} {event.kind}{' earlier' * event.is_earlier}"] += 1

    workers = 2 if order["engine"] == "local" else 0
    usual = {"overrides": {}, "address": "auto", "workers": workers, "work": None}
    answer: dict[str, Any] = {}
    try:
        answer["summary"] = module.prepare(**usual | order, memory=320_000, heard=heard).to_json()
    except FastAxolotlError as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    return {**answer, "events": events, "seconds": time.perf_counter() - begin}


def _begin(faults: list[dict[str, Any]]) -> None:
    def open_engine(kind: str, **options: Any) -> Engine:
        return Hurting(engines.open_engine(kind, **options), faults)

    module.open_engine = open_engine  # type: ignore[attr-defined]


def main() -> None:
    module._LEAST_ROOM, module._HOST_BYTES = 0, 0
    module._CHUNK_BYTES, module.MIB = 20_000, 100_000
    if sys.argv[1:]:
        from fast_axolotl.cli import main as run

        _begin(json.loads(os.environ["FAULTS"]))
        run()
    engines._MOMENT_SECONDS = 0.5
    engines._Ray.close = lambda _: None  # type: ignore[method-assign]  # its workers stay warm
    for line in sys.stdin:
        order = json.loads(line)
        _begin(order.pop("faults", []))
        print("ANSWER", json.dumps(_answer(order)), flush=True)


if __name__ == "__main__":
    main()
