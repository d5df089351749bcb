"""A peer's process: JSON lines in, JSON lines out, and operations that are loaded once and timed.

This file runs where our package must not be imported: it needs the standard library alone.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

__all__ = ["operation_tasks", "serve", "take_stdout"]

Request = dict[str, Any]
Task = Callable[[Request], Request]
Prepare = Callable[[Request], tuple[Callable[[], Any], Callable[[Any], Mapping[str, Any]]]]
"""Gives what runs the operation, and what makes columns of its answer."""


def take_stdout() -> TextIO:
    """Where answers go; whatever else is printed from now on goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO, version: str, tasks: Mapping[str, Task]) -> None:
    """Answers requests until there are no more; failures are answers too."""
    gc.freeze()
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        gc.collect()
        request = json.loads(line)
        try:
            reply = tasks[request["task"]](request)
        except BaseException as error:  # noqa: BLE001 - panics are BaseExceptions; all are told
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


def operation_tasks(prepare: Prepare, digest_columns: Callable[..., Any]) -> dict[str, Task]:
    """``load`` an input, then its ``answer`` and the ``seconds`` of a pass; ``forget`` it."""
    held: list[Any] = []

    def forget(_: Request) -> Request:
        held.clear()
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        return {}

    def load(request: Request) -> Request:
        forget(request)
        held.extend(prepare(request))
        gc.freeze()
        return {}

    def answer(_: Request) -> Request:
        run, columns = held
        digests, first = digest_columns(columns(run()))
        return {"columns": digests, "first": first}

    def seconds(_: Request) -> Request:
        start = time.perf_counter()
        result = held[0]()
        taken = time.perf_counter() - start
        del result
        return {"seconds": taken}

    return {"load": load, "answer": answer, "seconds": seconds, "forget": forget}
