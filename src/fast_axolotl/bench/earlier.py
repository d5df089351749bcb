"""The earlier package, in a process of its own environment.

It has the import name of ours, so the two can never share an interpreter.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from fast_axolotl.bench.fingerprint import Fingerprint
from fast_axolotl.bench.matrix import LeftOut
from fast_axolotl.bench.peer_process import PeerError, PeerProcess

__all__ = ["EARLIER", "EarlierPackage", "PeerError", "start_earlier"]

EARLIER = "earlier package"
_WORKER = Path(__file__).with_name("earlier_worker.py")


class EarlierPackage(PeerProcess):
    """The earlier package, ready to read."""

    def __init__(self, python: str, folder: Path) -> None:
        """Starts it with the interpreter of its environment, in a folder away from our source."""
        super().__init__(python, _WORKER, folder)

    def fingerprint(self, path: Path, format: str) -> Fingerprint:
        reply = self.ask(task="fingerprint", path=str(path), format=format)
        return Fingerprint(reply["rows"], reply["columns"], reply["first"])

    def seconds(self, path: Path, format: str) -> float:
        """The time of one pass, measured inside its process."""
        return float(self.ask(task="time", path=str(path), format=format)["seconds"])


def start_earlier(
    peer_python: str | None, folder: Path, stack: ExitStack
) -> EarlierPackage | LeftOut:
    """Starts it, to be ended by ``stack``; or says why not."""
    if peer_python is None:
        return LeftOut(name=EARLIER, reason="no interpreter of its environment was given")
    try:
        return stack.enter_context(EarlierPackage(peer_python, folder))
    except PeerError as error:
        return LeftOut(name=EARLIER, reason=str(error))
