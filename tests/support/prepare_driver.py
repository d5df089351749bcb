"""A process that prepares datasets in tiny units, and breaks where it is told to.

It takes a line of JSON for each preparation and answers with one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from fast_axolotl.cluster import engines, job
from fast_axolotl.cluster import prepare as module
from fast_axolotl.cluster.engines import Answer, Engine, Task
from fast_axolotl.cluster.store import Store
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
                os.kill(os.getpid(), signal.SIGKILL)

        Store.writing = deadly  # type: ignore[method-assign]
    module_name, _, name = function.partition(":")
    answer: dict[str, Any] = getattr(import_module(module_name), name)(store, **arguments)
    return answer


def _hurting(faults: list[dict[str, Any]]) -> Any:
    """``run_tasks``, with a fault for the middle task of some stages."""
    by_stage = {fault["stage"]: fault for fault in faults}

    def run_tasks(
        engine: Engine, url: str, tasks: Sequence[Task], retried: Any
    ) -> Iterator[tuple[Task, Answer]]:
        given = list(tasks)
        if given and (fault := by_stage.get(given[0].stage)):
            task = given[len(given) // 2]
            what = {"function": task.function, "arguments": task.arguments, "fault": fault}
            function = "support.prepare_driver:hurt"
            given[len(given) // 2] = replace(task, function=function, arguments=what)
        return engines.run_tasks(engine, url, given, retried)

    return run_tasks


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    job.run_tasks = _hurting(order.pop("faults", []))  # type: ignore[attr-defined]
    last = order.pop("stop", "")
    module._ROW_BYTES = order.pop("row_bytes", 32)
    usual = {"engine": "local", "address": "auto", "workers": 2, "work": None}
    usual["memory"] = 320_000

    def hear(stage: job.Stage, _: str) -> None:
        if stage.name == last and stage.done:
            raise KeyboardInterrupt

    try:
        done = module.prepare(**usual | order, heard=hear).to_json()
        return {"summary": done, "stages": {stage["name"]: stage for stage in done["stages"]}}
    except KeyboardInterrupt:
        return {"error": "stopped"}
    except FastAxolotlError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    module._LEAST_ROOM, module._HOST_BYTES, module._PROBED_ROWS = 0, 0, 100
    module.MIB = 100_000
    for line in sys.stdin:
        print("ANSWER", json.dumps(_answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
