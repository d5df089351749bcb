"""A peer in a process of its own, kept alive and asked by JSON lines.

The process runs in isolated mode: it sees neither our source folder nor ``PYTHONPATH``. Its start
is not timed, and what is timed is timed inside it.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

__all__ = ["PeerError", "PeerProcess"]

_CLOSE_SECONDS = 10
_Self = TypeVar("_Self", bound="PeerProcess")


class PeerError(Exception):
    """A peer cannot be run, or fails on the input; never leaves the benchmark."""


class PeerProcess:
    """A peer, ready to answer."""

    def __init__(self, python: str, worker: Path, folder: Path) -> None:
        """Starts ``worker`` with this interpreter, in a folder away from our source."""
        self._errors = (folder / f"{worker.stem}-stderr.txt").open("w")
        try:
            self._process = subprocess.Popen(
                [python, "-I", str(worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                cwd=folder,
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"its interpreter cannot be started: {error.strerror}") from None
        try:
            self.version: str = self._receive()["version"]
        except PeerError:
            self.close()
            raise

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except OSError:
            raise PeerError("its process has ended") from None
        return self._receive()

    def close(self) -> None:
        """Ends the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
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
            raise PeerError("its process ended without an answer; is the package installed there?")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply
