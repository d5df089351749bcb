"""Ranks that wait for each other, and look at each other, without a collective.

A collective ends the training when one rank comes later than its time-out (``ddp_timeout``) allows.
Axolotl's ranks load their datasets one after the other, behind a lock. The first one through goes
on to a collective, and waits there for all that the others still do: to deduplicate once per rank,
or to tokenise on a node where nothing is prepared. Here it waits for the others first, by asking
the store of torch's launcher, which has no time-out. A line on stderr says who is waited for.

Ranks count themselves when they begin to load and when they have ended, and push a third counter
while they work. Those without this package count nothing, so a wait is over when all that have
begun have ended, or when nobody has pushed for a minute: then the collective decides, as in stock.
Without a store (another launcher, before the process group is there) nobody waits here.
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
from typing import Any, NoReturn

from fast_axolotl import __version__
from fast_axolotl.axolotl.patching import Final, NotAsked
from fast_axolotl.system import node_name

_FIRST_LINE_SECONDS = 10.0
"""Until the first line; each takes twice as long as the one before, ten minutes at most."""
_LATE_SECONDS = 30.0
"""For which ranks that have not begun are waited for; at most a quarter of the time-out."""
_COMPARE_SECONDS = 5.0
_PUSH_SECONDS = 5.0
_SILENT_SECONDS = 60.0
_POLL_SECONDS = 0.2
_LOADS = itertools.count()


def load_in_turn(self: Any, load_fn: Callable[[], Any]) -> Any:
    """For ``axolotl.utils.data.lock.FileLockLoader.load``."""
    if _number("WORLD_SIZE", 1) < 2:
        raise NotAsked
    from axolotl.utils.data import lock as theirs

    board, lock = _Board(f"load-{next(_LOADS)}"), theirs.FileLock(str(self.lock_file_path))
    own, holder = _number("RANK"), f"holder on {node_name()}"
    with board.at_work():
        begin, pauses = time.monotonic(), _pauses()
        while True:
            try:
                lock.acquire(timeout=next(pauses))
                break
            except TimeoutError:
                busy, local = board.count(holder) - 1, _number("LOCAL_RANK")
                # One rank of a node says it.
                if local == 0 or (local == 1 and busy in (-1, own - 1)):
                    _say_wait("another rank" if busy < 0 else f"rank {busy}", begin)
        board.count(holder, own + 1)
        try:
            self._increment_counter()
            is_first = not self.ready_flag_path.exists()
            result = load_fn()
            if is_first:
                self.ready_flag_path.touch()
        except Exception as error:
            raise Final(error) from error
        finally:
            board.count(holder, -own - 1)
            lock.release()
    _wait_for_the_others(board)
    return result


def compare_ranks(cfg: Any, trainer: Any, resume_from_checkpoint: Any) -> NoReturn:
    """Before ``axolotl.train.execute_training``: which ranks run without this package."""
    ranks, end = range(_number("WORLD_SIZE", 1)), time.monotonic() + _COMPARE_SECONDS
    board = _Board("train") if len(ranks) > 1 else None
    if board is None or not board.count(f"{__version__} on {_number('RANK')}", 1):
        raise NotAsked
    board.count("all", 1)
    while 0 < board.count("all") < len(ranks) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    here = [rank for rank in ranks if board.count(f"{__version__} on {rank}")]
    if len(here) < len(ranks) and here[:1] == [_number("RANK")]:
        _say(
            f"version {__version__} is not (yet) active on {_names(set(ranks) - set(here))} of "
            f"{len(ranks)}, and the other ranks wait for these; make the launcher pass PYTHONPATH "
            "and FAST_AXOLOTL_RUN on, or list the plugin in the YAML"
        )
    raise NotAsked


class _Board:
    """Counters that all ranks add to; all are 0 where their store cannot be reached."""

    def __init__(self, name: str) -> None:
        self.store: Any = None
        self._guarded(lambda: self._open(name))

    def _open(self, name: str) -> None:
        """In the store of the launcher, or in that of the process group where it is there."""
        import torch.distributed as dist

        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            address, limit = os.environ["MASTER_ADDR"], timedelta(seconds=10)
            store = dist.TCPStore(address, _number("MASTER_PORT"), timeout=limit)
        elif dist.is_available() and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
        else:
            return
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = dist.PrefixStore(f"fast_axolotl/{attempt}/{name}", store)

    def count(self, name: str, more: int = 0) -> int:
        """A counter, after adding to it."""
        store = self.store
        return 0 if store is None else self._guarded(lambda: int(store.add(name, more))) or 0

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # noqa: BLE001
            # Ranks that do not hear of each other go on as in stock.
            self.store = None
            _say(f"rank {_number('RANK')} does not wait for other ranks: the store failed: {error}")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Count this rank as begun, push while it works, and count it as ended."""
        is_over = threading.Event()

        def push() -> None:
            while self.store is not None and not is_over.wait(_PUSH_SECONDS):
                self.count("pushes", 1)

        self.count("begun", 1)
        threading.Thread(target=push, name="fast-axolotl-at-work", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()
            self.count(f"ended {_number('RANK')}", 1)
            self.count("ended", 1)


def _wait_for_the_others(board: _Board) -> None:
    """Until all ranks that load have ended, or those at work are silent."""
    ranks, pauses, pushes = range(_number("WORLD_SIZE", 1)), _pauses(), -1
    begin = heard = time.monotonic()
    late = begin + min(_LATE_SECONDS, _number("AXOLOTL_NCCL_TIMEOUT", 1800) / 4)
    next_line = begin + next(pauses)
    while (ended := board.count("ended")) < len(ranks) and board.store is not None:
        now, before, pushes = time.monotonic(), pushes, board.count("pushes")
        heard = now if pushes != before else heard
        is_begun = ended < board.count("begun")
        if (not is_begun and now > late) or now > heard + _SILENT_SECONDS:
            return
        if now > next_line:
            next_line = now + next(pauses)
            done = [rank for rank in ranks if board.count(f"ended {rank}")]
            if done[:1] == [_number("RANK")]:
                others = _names(set(ranks) - set(done))
                without = ", unless fast-axolotl is not active there," * (not is_begun)
                _say_wait(f"{others}{without}", begin)
        time.sleep(_POLL_SECONDS)


def _pauses() -> Iterator[float]:
    return (min(_FIRST_LINE_SECONDS * 2**turn, 600.0) for turn in itertools.count())


def _number(name: str, otherwise: int = 0) -> int:
    """A variable that launchers set."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else otherwise


def _names(ranks: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return f"rank{'s' * (len(ranks) > 1)} {shown}{', …' * (len(ranks) > 8)}"


def _say_wait(whom: str, begin: float) -> None:
    seconds, own = time.monotonic() - begin, _number("RANK")
    _say(f"rank {own} waits for {whom} to prepare the dataset ({seconds:.0f} s so far)")


def _say(line: str) -> None:
    print(f"fast-axolotl: {line}", file=sys.stderr, flush=True)
