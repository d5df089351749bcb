"""The earlier package in a process of its own: ``python -I peer.py RACE.py``.

It has our import name, so this process never imports our package. It is started by path, in
isolated mode, and takes digests and pipes from the files of ours that need the standard library
alone. An input is loaded once; then ``run`` and ``digest`` are asked as often as it takes.
"""

from __future__ import annotations

import gc
import importlib
import json
import runpy
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Request = dict[str, Any]
_PAD_ROWS = 64
"""Rows padded together, as ``bench`` does."""


def main(race: str) -> None:
    """Answers until there are no more requests."""
    shared = runpy.run_path(race) | runpy.run_path(str(Path(__file__).with_name("worker.py")))
    answers = shared["take_stdout"]()
    package: Any = importlib.import_module("fast_axolotl")
    prepared: list[Callable[[], Any]] = []
    held: list[Any] = []

    def load(request: Request) -> Request:
        prepared[:] = _prepare(package, shared, request)
        gc.freeze()
        return {}

    def run(_: Request) -> Request:
        held.append(prepared[0]())
        return {}

    tasks = {"load": load, "run": run, "digest": lambda _: {"digest": prepared[1]()}}
    # What a pass gave is freed after it was answered.
    shared["serve"](answers, {"version": package.__version__}, tasks, held.clear)


def _prepare(
    package: Any, shared: dict[str, Any], request: Request
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What makes a pass, and what makes the digest of one."""
    operation, path, settings = request["operation"], request["path"], request["settings"]
    function, digest = getattr(package, operation), shared["digest"]
    if operation == "streaming_dataset_reader":
        read = partial(function, path, batch_size=1000, num_threads=4, **settings)
        return lambda: deque(read(), maxlen=0), lambda: digest(shared["columns"](read(), "python"))
    with Path(path).open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    batches = [rows[start : start + _PAD_ROWS] for start in range(0, len(rows), _PAD_ROWS)]

    def run() -> Any:
        if operation == "pad_sequences":
            return [function(batch, max(map(len, batch)), 0) for batch in batches]
        return function(rows, **settings)

    return run, lambda: digest(run())


if __name__ == "__main__":
    main(*sys.argv[1:])
