"""The reader as a torch ``IterableDataset``: every row once, for any number of ranks and workers.

Every DataLoader worker of every rank reads its own shard, so ``rank * num_workers + worker`` of
``world * num_workers``. Ranks of one tensor or context parallel group read the same. The dataset
holds only its arguments: files and threads come to life in the process that iterates it, which
makes it safe to fork and to pickle.

A loader that accelerate prepared, as the HF Trainer's are, deals out rows itself, and registers
before a pass. Where rank 0 dispatches, its first worker reads everything and no other anything.
Where each rank keeps every n-th batch, each reads everything. What would come out wrong is refused
on every rank.

State lives on the dataset, as torchdata's ``StatefulDataLoader`` wants it. To continue on the same
number of ranks and workers, give the loader its state back. To continue on another number, give the
states of all ranks to ``TorchDataset.load_state_dict`` and make a new loader: every row not yet
delivered comes exactly once.

Batches are made by the reader: use ``DataLoader(dataset, batch_size=None)``, or ``rows=True``. Of
several sources with weights, each process opens its share of every one and mixes them; with
``rows=True`` row by row, 40 us each, so that every row has a state. Does not see another library
that deals out rows; there, pass ``shard=(0, 1)``.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pyarrow import types

from fast_axolotl.errors import MissingExtraError, ResumeError, UsageError
from fast_axolotl.integrations.parallelism import find_data_rank, rank_in_mesh
from fast_axolotl.reading import OUTPUTS, Reader, convert, open_dataset
from fast_axolotl.reading.mixing import MixedReader, mix_datasets
from fast_axolotl.reading.order import check_shard, find_states
from fast_axolotl.reading.reader import DEFAULT_MEMORY_BUDGET, LEAST_MEMORY_BUDGET, usable_threads

try:
    import torch
    from torch.utils.data import Dataset, IterableDataset, default_convert, get_worker_info
except ImportError:
    raise MissingExtraError("the torch dataset needs PyTorch: pip install torch") from None

_EPOCH, _PASS, _PASS_EPOCH, _USED_BY, _HAS_WARNED = range(5)
"""Cells of the memory that a dataset shares with its workers: the next epoch; a number for the pass
of the workers, and its epoch; the pass that used a loaded state; whether ranks were warned."""

_CURE = "do not pass the loader to accelerator.prepare(), so that each rank reads its own shard"

_MIX_OPTIONS = ("stop", "source_column")
_MIXED_ROWS = 100
"""Rows that a source of a mix reads at a time: few, as they are not cut by bytes with ``even``."""

_Layout = tuple[int, int, bool]
"""Rank and number of ranks; with True, rank 0 reads everything for all."""

_Paths = str | Path | Sequence[str | Path]


class TorchDataset(IterableDataset[Any]):
    """Batches of files for a ``DataLoader(dataset, batch_size=None)``.

    Args:
        paths: As for ``open_dataset``; or, for a mix, ``{name: (paths, weight), ...}`` or a list of
            ``(paths, weight)``, as ``mix_datasets`` mixes them.
        output: ``torch``, ``numpy``, ``python`` or ``arrow``.
        rows: Yield single rows, for a loader with its own ``batch_size`` and ``collate_fn``, such
            as that of the HF Trainer; the dataset's ``batch_size`` then only sets how many rows are
            converted at a time.
        shard: This rank's ``(index, count)``; by default from accelerate, ``torch.distributed`` or
            the variables ``RANK`` and ``WORLD_SIZE``, else ``(0, 1)``. Workers divide it further.
        device_mesh: The ``DeviceMesh`` of the training, instead of ``shard``: ranks along the
            dimensions ``tp``, ``cp``, ``sp`` and ``pp`` read the same rows.
        epoch: Changes the shuffle; see ``set_epoch``.
        num_workers: Workers of the loader; used only by ``len()``, which needs ``even``.
        num_threads: Decode threads per worker; 0 divides the CPU cores among the workers.
        options: The other keywords of ``open_dataset``; for a mix also ``stop`` and
            ``source_column``. The memory budget is that of one worker; the sources of a mix share
            it and the threads.
    """

    def __init__(
        self,
        paths: _Paths | Mapping[str, tuple[_Paths, float]] | Sequence[tuple[_Paths, float]],
        *,
        output: str = "torch",
        rows: bool = False,
        shard: tuple[int, int] | None = None,
        device_mesh: Any = None,
        epoch: int = 0,
        num_workers: int = 0,
        num_threads: int = 0,
        **options: Any,
    ) -> None:
        if output not in OUTPUTS:
            raise UsageError(f"output must be one of {', '.join(OUTPUTS)}, not {output!r}")
        if rows and output == "arrow":
            raise UsageError('rows=True yields dicts; pass output="python", "numpy" or "torch"')
        if shard is not None and device_mesh is not None:
            raise UsageError("shard and device_mesh both set the shard; pass only one of them")
        self._paths: Any = paths
        self._sources = _find_sources(paths)
        known = [*inspect.signature(open_dataset).parameters, *_MIX_OPTIONS * bool(self._sources)]
        if unknown := sorted(set(options) - set(known)):
            raise UsageError(f"open_dataset has no option {unknown[0]!r}")
        self._output = output
        self._rows = rows
        self._shard = None if shard is None else check_shard(shard)
        if device_mesh is not None:
            self._shard = rank_in_mesh(device_mesh)
        self._num_workers = num_workers
        self._num_threads = num_threads
        self._options = options
        # The same for every process that is forked or spawned from here.
        self._shared = torch.tensor([epoch, 0, 0, 0, 0]).share_memory_()
        self._passes = 0  # begun by this copy
        self._state: list[dict[str, Any]] | None = None
        self._reader: Reader | MixedReader | None = None
        self._taken: list[int] = []
        """With ``rows``: how many rows of the reader's last batch were given, and nothing else."""
        self._home: tuple[int, _Layout] | None = None
        """The process that started this one, and the layout there."""

    def __iter__(self) -> Iterator[Any]:
        (rank, _, is_dispatched), worker = self._layout(), get_worker_info()
        state, epoch = self._begin_pass()
        if is_dispatched and (rank or (worker and worker.id)):
            return iter(()) if worker else _refuse_to_read()
        self._reader, self._taken = self._open(state, epoch), []
        return self._read(self._reader, self._taken, is_dispatched, epoch)

    def __len__(self) -> int:
        """With ``even``: the batches of this rank in a pass, or its rows with ``rows``."""
        state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
        is_open = state is not None and state._shared_state.get("num_processes", 1) > 1
        if not self._options.get("even") or (is_open and self._shard is None):
            raise TypeError(
                "a TorchDataset has a length only with even; with accelerate, also pass shard, "
                "which is (0, 1) for a prepared loader"
            )
        rank, world, _ = self._layout()
        size = max(1, self._num_workers)
        reader = self._open_shard(self._num_threads, shard=(rank * size, world * size), epoch=0)
        return size * -(-reader.num_rows // (1 if self._rows else reader.batch_size))

    def __bool__(self) -> bool:
        return True

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, also in persistent workers; each full pass adds one.

        A pass that ended early is repeated. A loaded state is valid in its own epoch; in other
        epochs a pass starts at the beginning.
        """
        loader = _find_loader(self)
        is_asked = loader is not None and get_worker_info() is None
        if is_asked and (problem := self._find_problem(loader, epoch)):
            raise UsageError(f"{problem}, or {_CURE}")
        self._shared[_EPOCH] = epoch

    def state_dict(self) -> dict[str, Any]:
        """The position of this process's next batch. With workers, save the loader's state."""
        loader = _find_loader(self)
        if loader is not None and not loader.use_stateful_dataloader:
            raise UsageError(
                "accelerate's loader reads ahead, so this state would lose batches; save the state "
                "of a loader with DataLoaderConfiguration(dispatch_batches=False, "
                f"use_stateful_dataloader=True), or {_CURE}"
            )
        if self._reader is not None:
            state = self._reader.state_dict(*self._taken)
            # A worker speaks of its pass, which another one may have ended.
            if get_worker_info() or state["epoch"] == int(self._shared[_EPOCH]):
                return state
        return self._open(self._state, int(self._shared[_EPOCH])).state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Any]) -> None:
        """Resume the next pass from ``state``; later passes start at the beginning.

        Takes what ``Reader.load_state_dict`` takes: one state if the numbers of ranks and workers
        are unchanged, and otherwise an object that contains the states of all of them. A mix
        continues only on unchanged numbers.
        """
        states = find_states(state, "fast_axolotl_mix") if self._sources else find_states(state)
        if not states:
            raise ResumeError("no state of a TorchDataset; pass the return value of state_dict()")
        # Of torchdata's loaders: batches delivered since the states in there were taken.
        late = "_steps_since_snapshot"
        if any(item[late] for item in find_states(state, late)):
            raise ResumeError(
                "the loader's state is older than its last batch; use "
                "StatefulDataLoader(snapshot_every_n_steps=1)"
            )
        # Ranks of one tensor parallel group give the same state.
        self._state = [item for i, item in enumerate(states) if item not in states[:i]]
        self._reader = None
        self._shared[:_HAS_WARNED] = torch.tensor([states[0]["epoch"], 0, 0, 0])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "_home": (os.getpid(), self._layout())}

    def _open(self, states: Any, epoch: int) -> Reader | MixedReader:
        """What this process reads, from ``states`` on."""
        rank, world, is_dispatched = self._layout()
        worker, share = get_worker_info(), 0
        if is_dispatched:
            rank, world = 0, 1
        elif worker is not None:
            rank, world = rank * worker.num_workers + worker.id, world * worker.num_workers
            share = max(1, usable_threads() // worker.num_workers)
        reader = self._open_shard(self._num_threads or share, shard=(rank, world), epoch=epoch)
        if states is not None:
            reader.load_state_dict(states)
        return reader

    def _open_shard(self, num_threads: int, **place: Any) -> Reader | MixedReader:
        options = {**self._options, **place}
        if self._sources is None:
            return open_dataset(self._paths, num_threads=num_threads, **options)
        mixing = {key: options.pop(key) for key in (*_MIX_OPTIONS, "epoch") if key in options}
        mixing["batch_size"] = 1 if self._rows else options.get("batch_size", 1000)
        count, budget = len(self._sources), options.get("memory_budget", DEFAULT_MEMORY_BUDGET)
        options["num_threads"] = max(1, (num_threads or usable_threads()) // count)
        options["memory_budget"] = max(budget // count, min(budget, LEAST_MEMORY_BUDGET))
        options["batch_size"] = _MIXED_ROWS
        pairs = {
            name: (open_dataset(paths, **options), weight)
            for name, (paths, weight) in self._sources.items()
        }
        return mix_datasets(pairs, seed=options.get("shuffle") or 0, **mixing)

    def _begin_pass(self) -> tuple[Any, int]:
        """The loaded state, for one pass only, and the epoch.

        A loader copies the dataset into new workers for each pass, or keeps its workers and seed.
        One worker may begin when another has ended the pass.
        """
        epoch, worker, number = int(self._shared[_EPOCH]), get_worker_info(), 0
        self._passes += 1
        if worker is not None:
            number = worker.seed - worker.id + self._passes
            if int(self._shared[_PASS]) != number:
                self._shared[_PASS_EPOCH], self._shared[_PASS] = epoch, number
            epoch = int(self._shared[_PASS_EPOCH])
        state, self._state = self._state, None
        used_by = int(self._shared[_USED_BY])
        if state is None or state[0]["epoch"] != epoch or (number and used_by not in (0, number)):
            return None, epoch
        self._shared[_USED_BY] = number
        return state, epoch

    def _read(
        self, reader: Reader | MixedReader, taken: list[int], is_dispatched: bool, epoch: int
    ) -> Iterator[Any]:
        is_short = False
        for batch in reader:
            if is_dispatched and is_short and not self._rows:
                raise UsageError(
                    "accelerate's dispatcher loses rows after a short batch, and large rows make "
                    "batches short here; pass a smaller batch_size, or even"
                )
            is_short = batch.num_rows < reader.batch_size
            columns = convert(batch, self._output)
            if not self._rows:
                yield columns
                continue
            rows = zip(*map(_row_values, columns.values()), strict=True)
            for number, row in enumerate(rows, 1):
                # Each row of a mix is a batch.
                taken[:] = [number] if isinstance(reader, Reader) else []
                yield dict(zip(columns, row, strict=True))
        if int(self._shared[_EPOCH]) == epoch:  # nobody has set another
            self._shared[_EPOCH] = epoch + 1
        if get_worker_info() is None:
            self._reader = None

    def _layout(self) -> _Layout:
        """What this process reads; a spawned worker is told by the process that started it."""
        worker, parent = get_worker_info(), multiprocessing.parent_process()
        if worker and _is_wrapper(worker.dataset) and self in _parts(worker.dataset):
            return 0, 1, False
        if worker and self._home and parent and self._home[0] == parent.pid:
            return self._home[1]
        loader = _find_loader(self)
        if _is_dispatcher(loader):
            return loader.state.process_index, loader.state.num_processes, True
        if loader is not None and _is_wrapper(loader.dataset):
            return 0, 1, False
        shard = self._shard or (find_data_rank() if loader is None else (0, 1))
        if shard is None:
            rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
            try:
                shard = check_shard((int(rank), int(world)))
            except ValueError:
                raise UsageError(
                    f"RANK={rank!r} and WORLD_SIZE={world!r} do not fit together; set both, or "
                    "pass shard=(rank, world_size)"
                ) from None
        elif shard[0] == 0 < shard[1] - 1 and not (
            self._shard or self._options.get("even") or self._shared[_HAS_WARNED]
        ):
            self._shared[_HAS_WARNED] = 1
            warnings.warn(
                f"{shard[1]} ranks may get different numbers of batches, and DDP and FSDP hang if "
                'one rank has fewer; pass even="drop" or even="pad"',
                stacklevel=2,
            )
        return *shard, False

    def _find_problem(self, loader: Any, epoch: int) -> str | None:
        """What would come out wrong in a pass through accelerate's loader, and a cure."""
        loaded = self._state[0]["epoch"] if self._state and not self._shared[_USED_BY] else epoch
        if loaded != epoch:
            return f"accelerate starts epoch {epoch}; call the loader's set_epoch({loaded})"
        is_dispatcher = _is_dispatcher(loader)
        if not is_dispatcher and not _is_wrapper(loader.dataset):
            return None
        if self._shard not in (None, (0, 1)):
            return f"accelerate already shards the rows; remove shard={self._shard}"
        if not is_dispatcher:
            has_size = loader.dataset.batch_size is not None
            return None if has_size else "accelerate shards only a loader with a batch_size; set it"
        mesh = loader.torch_device_mesh
        right = 1 if mesh and "tp" in mesh.mesh_dim_names else loader.state.num_processes
        if loader.use_stateful_dataloader or (mesh and rank_in_mesh(mesh)[1] != right):
            return (
                "accelerate's dispatcher loses rows on resume, and gives wrong rows to ranks of a "
                "mesh; use DataLoaderConfiguration(dispatch_batches=False) with a batch_size"
            )
        if loader.batch_size is None and loader.collate_fn is default_convert:
            is_cut = not self._rows and self._output in ("numpy", "torch")
            for field in self._open(None, epoch).schema:
                if not is_cut or not types.is_primitive(field.type):
                    return (
                        f"accelerate's dispatcher cannot split {field.name!r} of {field.type} "
                        "between ranks; pass a collate_fn that makes tensors of equal length"
                    )
        return None


def _find_sources(paths: Any) -> dict[str, tuple[Any, float]] | None:
    """The paths and weights of a mix by name; none where these are paths alone."""
    if isinstance(paths, (list, tuple)) and any(isinstance(one, (list, tuple)) for one in paths):
        paths = dict(enumerate(paths))
    if not isinstance(paths, Mapping):
        return None
    try:
        sources = {str(name): (files, float(weight)) for name, (files, weight) in paths.items()}
    except (TypeError, ValueError):
        sources = {}
    if not sources:
        raise UsageError("pass a mix as {name: (paths, weight), ...} or a list of (paths, weight)")
    return sources


def _find_loader(dataset: TorchDataset) -> Any:
    """The loader of accelerate that a dataset is read through just now, if there is one."""
    module = sys.modules.get("accelerate.state")
    if module is None or not module.GradientState._shared_state:
        return None
    loaders = [item for item in module.GradientState().dataloader_references if item is not None]
    for loader in reversed(loaders):
        if dataset in _parts(loader.dataset):
            # What skips batches of a loader that was not prepared deals out nothing.
            return None if type(loader).__name__ == "SkipDataLoader" else loader
    if loaders and dataset._shard is None:
        inner = loaders[-1].dataset
        if (_is_dispatcher(loaders[-1]) or _is_wrapper(inner)) and not any(
            isinstance(part, TorchDataset) for part in _parts(inner)
        ):
            raise UsageError(
                f"accelerate shards a {type(inner).__name__}, and it is unknown whether that reads "
                "this dataset; pass shard=(0, 1) if it does, and otherwise "
                "shard=(rank, world_size)"
            )
    return None


def _is_dispatcher(loader: Any) -> bool:
    """Whether rank 0 reads for all."""
    return hasattr(loader, "slice_fn") and loader.state.num_processes > 1


def _is_wrapper(dataset: Any) -> bool:
    """Whether this is an ``IterableDatasetShard``."""
    return hasattr(dataset, "process_index") and hasattr(dataset, "num_processes")


def _parts(dataset: Any, depth: int = 5) -> list[Any]:
    """A dataset and those that it holds, for example because it changes their rows."""
    found = [dataset]
    for value in getattr(dataset, "__dict__", {}).values() if depth else ():
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Dataset):
                found += _parts(item, depth - 1)
    return found


def _refuse_to_read() -> Iterator[Any]:
    yield from ()  # accelerate makes an iterator on every rank
    raise UsageError(
        "accelerate's dispatcher reads on rank 0 only; end its pass, or use another TorchDataset"
    )


def _row_values(column: Any) -> Any:
    """The values of a column row by row."""
    if not isinstance(column, dict):
        return column
    values = _row_values(column["values"])
    return [values[start:stop] for start, stop in pairwise(column["offsets"].tolist())]
