"""Ranks that wait for each other, and look at each other, without a collective.

A collective ends the training when one rank comes later than its time-out (``ddp_timeout``, half an
hour) allows. Axolotl's ranks load their datasets one after the other, behind a lock. The first one
through goes on to a collective, and waits there for all that the others still do: to deduplicate
once per rank, or to tokenise on a node where nothing is prepared. Here every rank that has its
dataset waits for the others first, by asking the store of torch's launcher, which has no time-out.
One line on stderr says who is waited for, at growing intervals.

The store has two counters of a load, of ranks that have begun and of those that have ended, and a
third that ranks at work push on. Ranks that run without this package count nothing, so a wait is
over when all that have begun have ended, or when nobody has pushed for a minute: then the
collective decides, as in stock. Without a store (``WORLD_SIZE`` of 1, or another launcher before
the process group is there) nothing is waited for.

The same store tells, when the training begins, which ranks run without this package.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from fast_axolotl._version import __version__
from fast_axolotl.axolotl.patching import Final, NotAsked

__all__ = ["compare_ranks", "load_in_turn"]

_FIRST_LINE_SECONDS = 10.0
"""Until the first line; each comes twice as late as the one before."""
_LATE_SECONDS = 30.0
"""For which ranks that have not begun are waited for, or a quarter of the time-out."""
_COMPARE_SECONDS = 5.0
_PUSH_SECONDS = 5.0
_SILENT_SECONDS = 60.0
_POLL_SECONDS = 0.2

_LOADS = itertools.count()


def load_in_turn(self: Any, load_fn: Callable[[], Any]) -> Any:
    """For ``axolotl.utils.data.lock.FileLockLoader.load``."""
    from axolotl.utils.data import lock as theirs

    if _world_size() < 2:
        raise NotAsked
    board, path = _Board(f"load-{next(_LOADS)}"), self.lock_file_path
    lock = theirs.FileLock(str(path))
    with board.at_work():
        _acquire(lock, board, path)
        try:
            board.write(_holder_key(path), str(_rank()))
            self._increment_counter()
            is_first = not self.ready_flag_path.exists()
            result = load_fn()
            if is_first:
                self.ready_flag_path.touch()
        except Exception as error:
            raise Final(error) from error
        finally:
            lock.release()
    _wait_for_the_others(board)
    return result


def compare_ranks(*_: Any, **__: Any) -> NoReturn:
    """Before ``axolotl.train.execute_training``: which ranks run without this package."""
    if _world_size() < 2:
        raise NotAsked
    board, ranks, end = _Board("train"), range(_world_size()), time.monotonic() + _COMPARE_SECONDS
    board.write(f"version-{_rank()}", __version__)
    board.count("here", 1)
    while 0 < board.count("here") < len(ranks) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    versions = {rank: board.read(f"version-{rank}") for rank in ranks}
    lacking = [rank for rank in ranks if versions[rank] is None]
    others = [rank for rank in ranks if versions[rank] not in (None, __version__)]
    is_first = _rank() == min(set(ranks) - set(lacking), default=None)
    if is_first and lacking and not board.is_lost:
        _say(
            f"not active on {_names(lacking)} of {len(ranks)}, or not yet: Axolotl runs as it is "
            "there, and the other ranks wait for it. Have the launcher pass on PYTHONPATH and "
            "FAST_AXOLOTL_RUN, or name the plugin in the YAML"
        )
    if is_first and others:
        _say(f"{_names(others)}: version {versions[others[0]]}, here {__version__}")
    raise NotAsked


def _world_size() -> int:
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdecimal() else 1


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


class _Board:
    """What ranks write down for each other; nothing, once its store cannot be reached."""

    def __init__(self, name: str) -> None:
        self._store: Any = None
        self.is_lost = False
        """Whether nothing can be read, so that nothing is to be waited for."""
        self._try(self._open, name)
        self.is_lost = self._store is None

    def _open(self, name: str) -> None:
        """In the store of the launcher, or in that of the process group where it is there."""
        import torch.distributed as dist

        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            limit = timedelta(seconds=_COMPARE_SECONDS)
            store: Any = dist.TCPStore(address, port, is_master=False, timeout=limit)
        elif dist.is_available() and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
        else:
            return
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"fast_axolotl/{attempt}/{name}", store)

    def count(self, name: str, more: int = 0) -> int:
        """A counter that all ranks add to."""
        return self._try(lambda: int(self._store.add(name, more))) or 0

    def write(self, name: str, text: str) -> None:
        self._try(lambda: self._store.set(name, text))

    def read(self, name: str) -> str | None:
        """What was written; ``None``: nothing. Does not wait."""
        there = self._try(lambda: self._store.check([name]))
        return self._try(lambda: str(self._store.get(name).decode())) if there else None

    def _try(self, action: Callable[..., Any], *arguments: Any) -> Any:
        if self.is_lost:
            return None
        try:
            return action(*arguments)
        except Exception as error:  # noqa: BLE001
            # Only for the time that ranks wait: no reason to end a training.
            self.is_lost = True
            _say(f"rank {_rank()} does not wait for others: their store fails: {error}")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Count a rank as begun, push on the counter while it works, and count it as ended."""
        is_over = threading.Event()

        def push() -> None:
            while not self.is_lost and not is_over.wait(_PUSH_SECONDS):
                self.count("pushes", 1)

        self.count("begun", 1)
        threading.Thread(target=push, name="fast-axolotl-at-work", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()
            self.write(f"ended-{_rank()}", "")
            self.count("ended", 1)


def _acquire(lock: Any, board: _Board, path: Path) -> None:
    """Take Axolotl's lock, however long it takes; one rank of a node says so meanwhile."""
    from filelock import Timeout

    begin, pause = time.monotonic(), _FIRST_LINE_SECONDS
    local = int(os.environ.get("LOCAL_RANK", "0"))
    while True:
        try:
            lock.acquire(timeout=pause)
            return
        except Timeout:
            pause *= 2
            holder = board.read(_holder_key(path))
            if local == 0 or (local == 1 and holder in (None, str(_rank() - 1))):
                _say_wait("another rank" if holder is None else f"rank {holder}", begin)


def _holder_key(path: Path) -> str:
    """Nodes without a common disk have a file of that name each, and a holder each."""
    return f"holder-{path.stat().st_ino if path.exists() else 0}"


def _wait_for_the_others(board: _Board) -> None:
    """Until all ranks that load have ended, or those at work are silent."""
    limit = float(os.environ.get("AXOLOTL_NCCL_TIMEOUT", "1800"))
    begin = heard = time.monotonic()
    pushes, pause = -1, _FIRST_LINE_SECONDS
    late, next_line = begin + min(_LATE_SECONDS, limit / 4), begin + pause
    while (ended := board.count("ended")) < _world_size() and not board.is_lost:
        now, before, pushes = time.monotonic(), pushes, board.count("pushes")
        heard = now if pushes != before else heard
        is_begun = ended < board.count("begun")
        if (not is_begun and now > late) or now > heard + _SILENT_SECONDS:
            return
        if now > next_line:
            pause *= 2
            next_line = now + pause
            ranks = range(_world_size())
            at_work = [rank for rank in ranks if board.read(f"ended-{rank}") is None]
            if _rank() == min(set(ranks) - set(at_work), default=None):
                _say_wait(_names(at_work), begin)
        time.sleep(_POLL_SECONDS)


def _say_wait(whom: str, begin: float) -> None:
    seconds = time.monotonic() - begin
    _say(f"rank {_rank()} waits for {whom} to prepare the dataset ({seconds:.0f} s so far)")


def _names(ranks: list[int]) -> str:
    """At most eight by number."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {shown}{more}"


def _say(line: str) -> None:
    print(f"fast-axolotl: {line}", file=sys.stderr, flush=True)
