"""The reader as a torch ``IterableDataset``: rank and worker from the environment, exact resume.

Every DataLoader worker of every rank reads its own shard, so ``rank * num_workers + worker`` of
``world * num_workers``. The dataset holds only its arguments: files and threads come to life in the
process that iterates it, which makes it safe to fork and to pickle.

State lives on the dataset, as torchdata's ``StatefulDataLoader`` wants it. To continue on the same
number of ranks and workers, give the loader its state back. To continue on another number, give the
states of all ranks to ``TorchDataset.load_state_dict`` and make a new loader: every row not yet
delivered comes exactly once.

Batches are made by the reader: use ``DataLoader(dataset, batch_size=None)``. Does not work beside a
library that deals out batches itself (accelerate does, unless told otherwise); there, pass
``shard=(0, 1)``.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fast_axolotl.errors import MissingExtraError, ResumeError, UsageError
from fast_axolotl.reading import OUTPUTS, Reader, convert, find_states, open_dataset
from fast_axolotl.reading.order import check_shard
from fast_axolotl.reading.reader import usable_threads

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError:
    raise MissingExtraError(
        "the torch dataset needs PyTorch: pip install 'fast-axolotl[torch]'"
    ) from None

__all__ = ["TorchDataset"]

_EPOCH, _USED_BY = 0, 1
"""Cells of the memory that a dataset shares with its loader's workers."""


class TorchDataset(IterableDataset[Any]):
    """Batches of files for a ``DataLoader(dataset, batch_size=None)``.

    Args:
        paths: As for ``open_dataset``.
        output: ``torch``, ``numpy``, ``python`` or ``arrow``.
        shard: This rank's ``(index, count)``; by default from ``torch.distributed``, else from the
            variables ``RANK`` and ``WORLD_SIZE``, else ``(0, 1)``. Workers divide it further.
        epoch: Changes the shuffle; see ``set_epoch``.
        num_threads: Decode threads of a worker; 0 divides the processors among the workers.
        options: The other keywords of ``open_dataset``. The memory budget is that of one worker.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        output: str = "torch",
        shard: tuple[int, int] | None = None,
        epoch: int = 0,
        num_threads: int = 0,
        **options: Any,
    ) -> None:
        if output not in OUTPUTS:
            raise UsageError(f"output must be one of {', '.join(OUTPUTS)}, not {output!r}")
        unknown = sorted(set(options) - set(inspect.signature(open_dataset).parameters))
        if unknown:
            raise UsageError(f"open_dataset takes no {unknown[0]!r}")
        self._paths = paths
        self._output = output
        self._shard = None if shard is None else check_shard(shard)
        self._num_threads = num_threads
        self._options = options
        # The same for every process that is forked or spawned from here.
        self._shared = torch.tensor([epoch, 0]).share_memory_()
        """The epoch, and the pass that the loaded state was used in (see ``_take_state``)."""
        self._state: Any = None
        self._reader: Reader | None = None
        self._home: tuple[int, tuple[int, int]] | None = None
        """The process that started this one, and the rank layout there."""

    def __iter__(self) -> Iterator[Any]:
        self._reader = reader = self._open(self._take_state())
        return (convert(batch, self._output) for batch in reader)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the passes to come, in persistent workers too.

        A loaded state belongs to its own epoch: in any other a pass starts at the beginning.
        """
        self._shared[_EPOCH] = epoch

    def state_dict(self) -> dict[str, Any]:
        """Where this process's next batch begins; under workers, ask the loader instead."""
        if self._reader is not None:
            state = self._reader.state_dict()
            if state["epoch"] == int(self._shared[_EPOCH]):
                return state
        return self._open(self._state).state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Any]) -> None:
        """The next pass continues where ``state`` was taken; passes after it start anew.

        Takes what ``Reader.load_state_dict`` takes: one state where the ranks and workers are the
        same, and anything that holds the states of all of them where they are not.
        """
        states = find_states(state)
        if not states:
            raise ResumeError("no state of a reader in what was given; pass what state_dict gave")
        if _holds_late_snapshot(state):
            raise ResumeError(
                "the loader's state is older than its last batch; take it with "
                "StatefulDataLoader(snapshot_every_n_steps=1)"
            )
        self._state, self._reader = state, None
        self._shared[_EPOCH], self._shared[_USED_BY] = states[0]["epoch"], 0

    def __getstate__(self) -> dict[str, Any]:
        home = os.getpid(), self._layout()
        return {**self.__dict__, "_reader": None, "_home": home}

    def _open(self, state: Any) -> Reader:
        rank, world = self._layout()
        worker, share = get_worker_info(), 0
        if worker is not None:
            rank, world = rank * worker.num_workers + worker.id, world * worker.num_workers
            share = max(1, usable_threads() // worker.num_workers)
        reader = open_dataset(
            self._paths,
            shard=(rank, world),
            epoch=int(self._shared[_EPOCH]),
            num_threads=self._num_threads or share,
            **self._options,
        )
        if state is not None:
            reader.load_state_dict(state)
        return reader

    def _take_state(self) -> Any:
        """The loaded state, for one pass only.

        A loader copies the dataset into new workers for each pass, and the copies cannot tell the
        first pass from the next. So the first leaves its mark, the loader's seed, in shared memory.
        """
        state, self._state = self._state, None
        worker = get_worker_info()
        if state is None or find_states(state)[0]["epoch"] != int(self._shared[_EPOCH]):
            return None
        if worker is None:
            return state
        used_by, this_pass = int(self._shared[_USED_BY]), worker.seed - worker.id
        if used_by not in (0, this_pass):
            return None
        self._shared[_USED_BY] = this_pass
        return state

    def _layout(self) -> tuple[int, int]:
        """Rank and world size; a spawned worker is told by the process that started it."""
        parent = multiprocessing.parent_process()
        if get_worker_info() and self._home and parent and self._home[0] == parent.pid:
            return self._home[1]
        if self._shard is not None:
            return self._shard
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        try:
            return check_shard((int(rank), int(world)))
        except ValueError:
            raise UsageError(
                f"RANK={rank!r} and WORLD_SIZE={world!r} are no rank of a world; set both, or pass "
                "shard=(rank, world_size)"
            ) from None


def _holds_late_snapshot(state: Any) -> bool:
    """Whether batches were delivered after the states inside a loader's state were taken."""
    if isinstance(state, Mapping):
        late = state.get("_steps_since_snapshot", 0)
        return bool(late) or any(_holds_late_snapshot(item) for item in state.values())
    return isinstance(state, (list, tuple)) and any(map(_holds_late_snapshot, state))
