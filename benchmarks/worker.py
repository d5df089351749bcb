"""A process that is kept alive and asked over its pipes, a JSON line each: both ends of it.

This file needs the standard library alone, so that a process of another environment can run it.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

_CLOSE_SECONDS = 10


class WorkerError(Exception):
    """A process cannot be run, or fails on its input; never leaves a race."""


def one_line(error: BaseException) -> str:
    """Why somebody takes no part."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, NotImplementedError | WorkerError):
        return text
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error.name}"
    return f"{type(error).__name__}: {text}"


def take_stdout() -> TextIO:
    """Where answers go; whatever else is printed from now on goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(
    answers: TextIO,
    hello: Mapping[str, Any],
    tasks: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]],
    forget: Callable[[], None] = lambda: None,
) -> None:
    """Answers requests, a JSON line each, until there are no more; failures are answers, too.

    Garbage is collected after an answer, when nobody's clock runs, and ``forget`` is called.
    """
    gc.freeze()
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = tasks[request["task"]](request)
        except BaseException as error:  # noqa: BLE001 - panics are BaseExceptions; all are reported
            reply = {"error": one_line(error)}
        print(json.dumps(reply), file=answers, flush=True)
        forget()
        gc.collect()


class Worker:
    """A process that ``serve`` answers in, kept alive and asked by JSON lines."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        self._errors = log.open("w")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                cwd=log.parent,
            )
        except OSError as error:
            self._errors.close()
            raise WorkerError(f"its interpreter cannot be started: {error.strerror}") from None
        try:
            self.hello = self._receive()
        except WorkerError:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, task: str, **request: Any) -> dict[str, Any]:
        """The answer to one request."""
        assert self._process.stdin is not None
        try:
            print(json.dumps({"task": task, **request}), file=self._process.stdin, flush=True)
        except OSError:
            raise WorkerError("its process has ended") from None
        return self._receive()

    def close(self) -> None:
        """Ends the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                # A process that has died leaves what was not sent to it.
                with suppress(OSError):
                    stream.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise WorkerError(f"its process ended without an answer{': '.join(['', *said])}"[:300])
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply
