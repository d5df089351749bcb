"""Read the settings and the queue of a loader, and count the samples, tokens and bytes of a batch.

Neither torch nor numpy is imported. Loaders are torch's ``DataLoader``, its iterators (whose
attributes begin with an underscore) and the wrappers around both that pass attributes on or hold
the loader. What one does not tell is left out, and whatever its properties raise is "not told".

Tensors, arrays and record batches are known by what they can do. Of a dictionary of tensors:

    padded     all positions of ``input_ids``
    real       positions where ``attention_mask`` is not 0 (ids of packed sequences included)
    trainable  positions where ``labels`` is not −100
    rows       real positions where ``position_ids`` do not grow: there a packed row begins

Sequence lengths inside packed rows are looked at in every 16th batch: places where
``position_ids`` do not grow, else whole rows.
Cost: one pass over the mask and one over the labels, and as much again over position ids; some
50 µs for 4 × 512 positions and 70 for 8 × 2048, in a loop that leaves the caches cold. A tensor on
a device is never read, since that would wait for the device: its shape is all there is.

A batch may be anything. One that cannot be counted (nested, sparse, of a type never seen) has no
count and a reason, and the next one is counted again.
"""

from __future__ import annotations

import itertools
import math
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_LOOK_EVERY = 16
_IGNORED_LABEL = -100
_COLUMNS = ("input_ids", "attention_mask", "labels", "position_ids")
"""What tokens are counted by."""
_MOST_WAITING = 8

_MOST_PARTS = 9
"""A longer list holds rows."""
_ITEMS = 99
_MOST_ERROR_TEXT = 160

_TOKEN_RATES = ("tokens_per_second", "trainable_tokens_per_second")

_TELL = "report the number with meter.tokens(...)"
_ON_DEVICE = (
    "the batches are on the GPU when they reach the meter, and reading them would block the CPU: "
    f"{_TELL}"
)
_UNCLEAR = "the arrays of a batch may be one row as well as several, and no batch_size is known"
_NO_INPUT_IDS = f"the batches hold no input_ids that can be counted: {_TELL}"
_NO_LABELS = "the batches hold no labels of the same shape as input_ids"
_PACKED_WITHOUT_MASK = (
    "packed batches have no attention mask, and the padding token is not known: set it with "
    "meter.settings(pad_token_id=…)"
)
_NO_MASK = (
    "the batches hold no attention_mask of the same shape as input_ids: every position counts "
    "as real"
)

_ITERABLE = 1
"""``_DatasetKind.Iterable`` of torch: rows come from a stream, and have no numbers."""
_WRAPPED = ("dataloader", "base_dataloader", "loader", "iterable")
"""Where accelerate, Lightning and tqdm hold a loader."""
_MOST_WRAPPERS = 8


def read_loader(loader: Any) -> dict[str, Any]:
    """The settings of a loader, or of its iterator; empty where it is none of torch's kind."""
    for _ in range(_MOST_WRAPPERS):
        if isinstance(workers := _ask(loader, "num_workers"), int):
            break
        # Never by its truth: the length of a loader may be worth a whole plan of packs.
        held = (_ask(loader, name) for name in _WRAPPED)
        loader = next((inner for inner in held if inner is not None), None)
    else:
        return {}
    size = _ask(loader, "batch_size")
    settings = {
        "num_workers": workers,
        "prefetch_factor": _ask(loader, "prefetch_factor") if workers else None,
        "batch_size": _ask(_ask(loader, "index_sampler"), "batch_size") if size is None else size,
        "pin_memory": bool(_ask(loader, "pin_memory")),
        "persistent_workers": bool(_ask(loader, "persistent_workers")),
        "streaming": _ask(loader, "dataset_kind") == _ITERABLE,
    }
    dataset = _ask(loader, "dataset") if settings["streaming"] else None
    for _ in range(_MOST_WRAPPERS):
        if isinstance(count := _ask(dataset, "num_shards"), int):
            settings["num_shards"] = count
            break
        # What adapters hold: accelerate's, torch's ``Subset``, streams that map.
        inner = _ask(dataset, "dataset")
        dataset = _ask(dataset, "ex_iterable") if inner is None else inner
    return settings


def ready_batches(iterator: Any) -> int | None:
    """Batches that wait in an iterator's queues; ``None`` where it has no workers, or cannot tell.

    ``_task_info`` holds what was asked for and not yet handed out, ``_tasks_outstanding`` what the
    workers still owe; the difference arrived out of turn. Where less was asked for than the queue
    holds, the sampler is exhausted: the queue empties because the epoch ends, which says nothing
    about the workers. Reads three counters, about 3 µs.
    """
    queue = getattr(iterator, "_data_queue", None)
    if queue is None:
        return None
    try:
        if len(iterator._task_info) < iterator._num_workers * iterator._prefetch_factor:
            return None
        ready = queue.qsize()
        results = iterator._worker_result_queue
        if results is not queue:
            ready += results.qsize()
        return int(ready + max(0, len(iterator._task_info) - iterator._tasks_outstanding))
    except (NotImplementedError, AttributeError, OSError, TypeError, ValueError):
        # macOS cannot count, other releases may name things differently, a closed queue is gone.
        return None


def _ask(thing: Any, name: str) -> Any:
    with suppress(Exception):  # a property of anybody's object may raise anything
        return getattr(thing, name, None) if hasattr(thing, name) else getattr(thing, f"_{name}")
    return None


@dataclass(slots=True, kw_only=True)
class BatchCount:
    """What was counted in one batch, or in several together; ``None`` could not be counted."""

    samples: int = 0
    rows: int | None = None
    """Source rows inside the samples, where positions or the mask tell them apart."""
    real_tokens: int | None = None
    trainable_tokens: int | None = None
    padded_tokens: int | None = None
    num_bytes: int | None = None
    sequence_tokens: int = 0
    """Of the sequences whose lengths were looked at: of every 16th batch only."""
    sequence_squares: int = 0

    def __add__(self, other: BatchCount) -> BatchCount:
        sums = dict[str, Any]()
        for name in self.__slots__:  # a step each, written for speed
            first, second = getattr(self, name), getattr(other, name)
            sums[name] = None if first is None or second is None else first + second
        return BatchCount(**sums)


class BatchCounter:
    """Counts batches, and remembers why something could not be counted."""

    def __init__(self, on_reason: Callable[[str, str], None] | None = None) -> None:
        self.pad_token_id: int | None = None
        """What rows are filled up with, where batches come without a mask (Axolotl's packs)."""
        self.batch_size: int | None = 0
        """The loader's; 0 where it is not known, ``None`` where it makes no batches."""
        self.reasons: dict[str, str] = {}
        """Why something is missing, by the name of the figure."""
        self._on_reason = on_reason
        self._waiting: list[tuple[dict[str, Any], BatchCount, bool]] = []
        """What counting needs of a batch, where counts go, whether to look closer."""
        self._num_batches = 0

    def count(self, batch: Any, *, is_patient: bool = False) -> BatchCount:
        """Count one batch; its tokens later, together with others', if the caller is patient.

        Between two steps of a device the host's caches are cold, and to count one batch costs twice
        as much as one of several. At most eight wait, of which ids, mask and labels are held.
        """
        is_looked_at = self._num_batches % _LOOK_EVERY == 0
        self._num_batches += 1
        found = BatchCount()
        try:
            if isinstance(batch, UserDict):  # a tokenizer's, slow to ask
                batch = batch.data
            ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
            shape: Any = getattr(ids, "shape", None) or ()
            samples = shape[0] if len(shape) > 1 else self._count_samples(batch)
            found = BatchCount(samples=samples, num_bytes=_count_bytes(batch))
            if not shape:
                self._note(_NO_INPUT_IDS, "tokens_per_second")
                return found
            found.padded_tokens = math.prod(shape)
            if not _is_on_host(ids):
                self._note(_ON_DEVICE, *_TOKEN_RATES)
                return found
            held = {name: batch[name] for name in _COLUMNS if name in batch}
            self._waiting.append((held, found, is_looked_at))
            if not is_patient or len(self._waiting) >= _MOST_WAITING:
                self.settle()
        except Exception as error:  # noqa: BLE001
            # What an unknown array raises must not end the timing; so below.
            self._note_failure(error)
        return found

    def settle(self) -> None:
        """Count the tokens of the batches that wait for it."""
        waiting, self._waiting = self._waiting, []
        for held, found, is_looked_at in waiting:
            try:
                self._count_arrays(held, found, is_looked_at)
            except Exception as error:  # noqa: BLE001
                self._note_failure(error)
                found.real_tokens = found.trainable_tokens = found.padded_tokens = None

    def _note_failure(self, error: Exception) -> None:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:_MOST_ERROR_TEXT]
        self._note(f"a batch could not be counted ({text}): {_TELL}", *_TOKEN_RATES)

    def _count_samples(self, batch: Any) -> int:
        """Items along the first dimension of a batch's parts; one for an item that is no batch;
        none where what there is may be a row as well."""
        if isinstance(getattr(batch, "num_rows", None), int):
            return int(batch.num_rows)
        sizes, wanted = list(_find_sizes(batch, self.batch_size)), self.batch_size
        firsts = [first for first, _ in sizes]
        if not sizes:
            return 1
        if wanted and (wanted in firsts or firsts[0] < wanted):
            return wanted if wanted in firsts else firsts[0]  # the last of an epoch
        is_even = len(sizes) > 1 and len(set(firsts)) == 1
        # A loader that makes no batches may hand on those of its dataset.
        least = _ITEMS if wanted is None and not is_even else 2
        found = next((first for first, dimensions in sizes if dimensions >= least), 0)
        if not found and any(firsts):
            self._note(_UNCLEAR, "samples")
        return found

    def _note(self, sentence: str, *figures: str) -> None:
        """Remember why figures are missing: the first sentence for each counts."""
        for figure in figures:
            if figure not in self.reasons:
                self.reasons[figure] = sentence
                if self._on_reason is not None:
                    self._on_reason(figure, sentence)

    def _count_arrays(self, batch: dict[str, Any], found: BatchCount, is_looked_at: bool) -> None:
        shape = batch["input_ids"].shape
        labels = _column(batch, "labels", shape)
        if labels is None:
            self._note(_NO_LABELS, "trainable_tokens_per_second")
        else:
            found.trainable_tokens = int((labels != _IGNORED_LABEL).sum())
        mask = _column(batch, "attention_mask", shape)
        positions = _column(batch, "position_ids", shape)
        if mask is None and self.pad_token_id is not None:
            mask = _flag_before_padding(_view(batch["input_ids"]), self.pad_token_id)
        elif mask is None and positions is None:
            # A model that is given no mask attends to every position.
            self._note(_NO_MASK, "real_tokens")
            found.real_tokens = found.padded_tokens
        elif mask is None:
            self._note(_PACKED_WITHOUT_MASK, "tokens_per_second")
            if "rows_per_second" not in self.reasons and _count_starts(positions, None) > shape[0]:
                self._note(_PACKED_WITHOUT_MASK, "rows_per_second")
        if mask is not None:
            found.real_tokens = int((mask != 0).sum())
        is_full = mask is None or found.real_tokens == found.padded_tokens
        if positions is not None and found.real_tokens is not None:
            found.rows = _count_starts(positions, None if is_full else mask)
        if is_looked_at and found.padded_tokens:
            lengths = _find_lengths(positions, mask, shape, is_full=is_full)
            found.sequence_tokens = sum(lengths)
            found.sequence_squares = sum(length * length for length in lengths)


def _find_sizes(part: Any, batch_size: int | None, depth: int = 3) -> Iterator[tuple[int, int]]:
    """The length of every array and list, and the number of its dimensions: of a list, whose items
    are no numbers, more than any array has."""
    if hasattr(part, "shape"):
        if len(part.shape):
            yield int(part.shape[0]), len(part.shape)
    elif isinstance(part, list | tuple):
        seen = part if depth and len(part) < _MOST_PARTS and len(part) != batch_size else ()
        if isinstance(part, list) and all(isinstance(one, list | tuple) for one in part):
            seen = ()  # of rows
        inner = [size for one in seen for size in _find_sizes(one, batch_size, depth - 1)]
        is_flat = bool(part) and isinstance(part[0], int | float)
        yield from inner or [(len(part), 1 if is_flat else _ITEMS)]
    elif depth:
        names = getattr(part, "__dataclass_fields__", None) or getattr(part, "__dict__", {})
        is_table = isinstance(part, Mapping)
        for one in part.values() if is_table else [getattr(part, name) for name in names]:
            yield from _find_sizes(one, batch_size, depth - 1)


def _count_bytes(batch: Any) -> int | None:
    """Bytes of the arrays; ``None`` where there are none."""
    parts: Any = (batch,)
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple) and batch and not isinstance(batch[0], str | int | float):
        parts = batch
    sizes = [size for part in parts if isinstance(size := getattr(part, "nbytes", None), int)]
    return sum(sizes) if sizes else None


def _flag_before_padding(ids: Any, pad_token_id: int) -> Any:
    """Which positions come no later than the last one of their row that is no padding.

    Where a text ends in the very token that rows are padded with, that one token is not counted.
    """
    flags = ids != pad_token_id
    for row in flags.reshape(-1, ids.shape[-1]):
        row[: len(row) - int(row[::-1].argmax()) if row.any() else 0] = True
    return flags


def _count_starts(positions: Any, mask: Any) -> int:
    """Sequences that begin: where positions do not grow, or padding (mask 0) ends."""
    flat = positions.reshape(-1)
    starts = flat[1:] <= flat[:-1]
    if mask is None:
        return min(len(flat), 1) + int(starts.sum())
    is_real = mask.reshape(-1) != 0
    return int(is_real[0]) + int((is_real[1:] & (starts | ~is_real[:-1])).sum())


def _is_on_host(array: Any) -> bool:
    if hasattr(array, "is_cpu"):  # of a tensor: ten times as fast as its device
        return bool(array.is_cpu)
    device = getattr(array, "device", None)
    return device is None or getattr(device, "type", device) == "cpu"


def _column(batch: Mapping[str, Any], name: str, shape: Any) -> Any:
    """A column of the same shape on the host, as an array of numpy; or ``None``."""
    array = batch.get(name)
    if array is None or getattr(array, "shape", None) != shape or not _is_on_host(array):
        return None
    return _view(array)


def _find_lengths(positions: Any, mask: Any, shape: Any, *, is_full: bool) -> list[int]:
    """Lengths of the sequences in a batch, padding left out."""
    if positions is not None:
        flat = positions.reshape(-1) if is_full else positions[mask != 0]
        starts = (flat[1:] <= flat[:-1]).nonzero()[0].tolist()
        edges = [0, *(place + 1 for place in starts), len(flat)]
        return [last - first for first, last in itertools.pairwise(edges) if last > first]
    if mask is None:
        width = int(shape[-1])
        return [width] * (math.prod(shape) // width if width else 0)
    rows = (mask != 0).sum(-1).reshape(-1).tolist()
    return [length for length in rows if length]


def _view(array: Any) -> Any:
    """A tensor as an array of numpy, over the same memory where numpy has its type."""
    if not hasattr(array, "numpy"):
        return array
    try:
        return array.numpy()
    except TypeError:
        return array.float().numpy()
