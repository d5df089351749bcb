"""The earlier package in a process of its own environment, kept alive and asked by JSON lines.

It has the import name of ours, so the two can never share an interpreter. The process runs in
isolated mode: it sees neither our source folder nor ``PYTHONPATH``. Its start is not timed.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

from fast_axolotl.bench import fingerprint as fingerprint_module
from fast_axolotl.bench.fingerprint import Fingerprint

__all__ = ["EarlierPackage", "PeerError"]

_WORKER = Path(__file__).with_name("earlier_worker.py")
_CLOSE_SECONDS = 10


class PeerError(Exception):
    """The earlier package cannot be run, or cannot read the input; never leaves the benchmark."""


class EarlierPackage:
    """The earlier package, ready to read."""

    def __init__(self, python: str, folder: Path) -> None:
        """Starts it with the interpreter of its environment, in a folder away from our source."""
        self._errors = (folder / "earlier-stderr.txt").open("w")
        command = [python, "-I", str(_WORKER), str(fingerprint_module.__file__)]
        try:
            self._process = subprocess.Popen(
                command,
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

    def __enter__(self) -> EarlierPackage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def fingerprint(self, path: Path, format: str) -> Fingerprint:
        reply = self._ask(task="fingerprint", path=str(path), format=format)
        return Fingerprint(reply["rows"], reply["columns"], reply["first"])

    def seconds(self, path: Path, format: str) -> float:
        """The time of one pass, measured inside its process."""
        return float(self._ask(task="time", path=str(path), format=format)["seconds"])

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

    def _ask(self, **request: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except OSError:
            raise PeerError("its process has ended") from None
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError("its process ended without an answer; is the package installed there?")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerError(reply["error"])
        return reply
