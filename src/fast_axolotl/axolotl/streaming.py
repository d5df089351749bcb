"""Axolotl's streamed datasets, with buffers limited in bytes and states that lose no row.

With ``dataset_use_rust_streaming: true`` (the name is that of the earlier package's key) the
functions that load streamed files let Axolotl and Hugging Face load and read them as ever. What
Axolotl does with the dataset then (skip, shuffle, map, format) is its own code, unchanged. It meets
a ``BoundedDataset``, whose shuffle and batched map end a buffer at a number of rows, as Hugging
Face's do, or at a number of bytes, whichever comes first. So as long as no buffer reaches its
bytes, rows, batches and the use of random numbers are the same; beyond, memory is bounded, and
batches are smaller than the rows asked for.

State: files are read row by row (``FileRows``), since Hugging Face counts tables otherwise and
forgets the rest of one. A batched map starts its last batch again and leaves out the rows it had
given; where the function draws random numbers (``encode_packed_streaming`` shuffles), the batch is
made under the random state that it was made under before. The shuffle keeps which rows it holds, by
number, and reads them again from the oldest on: nothing is lost or doubled. A resume reads the file
it stopped in from its beginning and drops the rows before; earlier files are not opened.

Releases of datasets whose source is unknown are first compared with, on the files in hand: see
``_require_equal``. Without the switch, and for datasets that are not plainly files: ``Unfamiliar``.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

from fast_axolotl.axolotl.fingerprints import mismatch
from fast_axolotl.axolotl.patches import KNOWN, STREAMS
from fast_axolotl.axolotl.patching import Final, NotAsked, Unfamiliar, worker_id
from fast_axolotl.axolotl.self_check import Different
from fast_axolotl.errors import MissingExtraError

try:
    from datasets import IterableDataset, IterableDatasetDict, concatenate_datasets
    from datasets import iterable_dataset as hf
except ImportError as error:
    raise MissingExtraError(
        "streaming into Axolotl needs its packages: pip install axolotl"
    ) from error

BUFFER_BYTES = 64 * 1024 * 1024
"""Of text as Python holds it. 10,000 web pages of 4 KB, Axolotl's default buffer, stay below it;
tokenised, so much text takes ten to twenty times its size for a moment."""

_PLAIN = {"Value", "List", "LargeList", "Sequence", "ClassLabel", "dict", "list"}
"""Kinds of features whose values are what they are stored as."""

_PROVEN_ROWS = 48
"""Rows that are compared where the source of Hugging Face's streams is unknown."""

_MARK_ROWS = 1000
"""A shuffle notes its source's position every so many rows."""

_DRAWN_TOGETHER = 1000
"""Hugging Face draws the places of a shuffle in blocks of this many."""

_DRAWS_HALVES = "permutation" in hf.BufferShuffledExamplesIterable.__iter__.__code__.co_names
"""How this release of datasets shuffles."""

_CHUNKS = 10
"""That Hugging Face fills a buffer with, where it is permuted."""

_NUMBER_BYTES = 4

_DECIDING = (
    *("sequence_len", "sample_packing", "micro_batch_size", "streaming_multipack_buffer_size"),
    *("shuffle_merged_datasets", "shuffle_before_merging_datasets", "seed", "base_model"),
    *("sample_packing_bin_size", "pretrain_multipack_attn", "pretraining_sample_concatenation"),
    "fast_axolotl_buffer_bytes",
)
"""Keys of the configuration that decide which rows and packs a stream gives."""


def load_streaming_dataset(pretraining_config: Any, cfg: Any, tokenizer: Any) -> Any:
    """Axolotl's ``_load_streaming_dataset`` over a bounded stream."""
    from axolotl.utils.data import sft

    if not cfg.get("dataset_use_rust_streaming"):
        raise NotAsked
    if cfg.accelerator_config and cfg.accelerator_config.dispatch_batches:
        raise Unfamiliar("dispatch_batches is set")
    if pretraining_config["skip"]:
        raise Unfamiliar("rows are skipped")
    batch_size = cfg.micro_batch_size
    try:
        with _results("load_dataset", of=sft, become=functools.partial(bounded_files, cfg=cfg)):
            return inspect.unwrap(sft._load_streaming_dataset)(pretraining_config, cfg, tokenizer)
    except Exception:
        # Wrapping sets it to 1; Axolotl's own function is about to start from the beginning.
        cfg.micro_batch_size = batch_size
        raise


def merge_datasets(datasets: list[Any], cfg: Any) -> BoundedDataset:
    """Axolotl's ``merge_datasets`` for streams of ours: one after the other, then shuffled."""
    if len(datasets) < 2 or not all(isinstance(item, BoundedDataset) for item in datasets):
        raise NotAsked
    from axolotl.utils.data import shared

    def become(merged: Any) -> BoundedDataset:
        files = " ".join(dataset.identity["files"] for dataset in datasets)
        identity = {**datasets[0].identity, "files": files}
        return bounded(merged, merged._ex_iterable, datasets[0].buffer_bytes, identity)

    with _results("concatenate_datasets", of=shared, become=become):
        merged: BoundedDataset = inspect.unwrap(shared.merge_datasets)(datasets, cfg)
        return merged


def load_and_process_single_dataset(
    dataset_config: Any,
    cfg: Any,
    tokenizer: Any,
    split: str,
    seed: int,
    processor: Any | None = None,
    streaming: bool = False,
) -> tuple[Any, Any]:
    """Axolotl's ``_load_and_process_single_dataset``, for streamed datasets alone."""
    if not (streaming and cfg.get("dataset_use_rust_streaming")):
        raise NotAsked
    if dataset_config.type == "_synthetic" or dataset_config.shards:
        raise Unfamiliar("the dataset is synthetic, or one of several shards")

    from axolotl.utils.data import sft

    def become(loaded: Any) -> Any:
        if not isinstance(loaded, IterableDatasetDict):
            return bounded_files(loaded, cfg)
        return IterableDatasetDict(
            {name: bounded_files(dataset, cfg) for name, dataset in loaded.items()}
        )

    with _results("load_dataset_with_config", of=sft, become=become):
        made: tuple[Any, Any] = inspect.unwrap(sft._load_and_process_single_dataset)(
            dataset_config, cfg, tokenizer, split, seed, processor, streaming
        )
        return made


@contextmanager
def _results(name: str, *, of: Any, become: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, Axolotl's own functions get ours from a loader that their module imported by name.

    Their errors are the caller's; ours, and what ours refuses, are not.
    """
    original = getattr(of, name)
    own: list[Exception] = []

    def load(*args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        try:
            return become(loaded)
        except Exception as error:
            own.append(error)
            raise

    setattr(of, name, load)
    try:
        yield
    except Exception as error:
        if error in own or isinstance(error, Unfamiliar):
            raise
        raise Final(error) from error
    finally:
        setattr(of, name, original)


def bounded_files(loaded: Any, cfg: Any) -> BoundedDataset:
    """A dataset of files that Hugging Face loaded, row by row, with our buffers."""
    examples: Any = getattr(loaded, "_ex_iterable", None)
    if type(loaded) is not IterableDataset or type(examples) is not hf.ArrowExamplesIterable:
        raise Unfamiliar("the dataset is not a plain stream of files")
    if loaded._formatting or loaded._distributed:
        raise Unfamiliar("the dataset already has a format or is split across ranks")
    builder: Any = getattr(examples.generate_tables_fn, "__self__", None)
    if not type(builder).__module__.startswith("datasets.packaged_modules."):
        raise Unfamiliar(f"datasets reads it with {type(builder).__name__}, which is custom code")
    for column, feature in (builder.info.features or {}).items():
        inner: list[Any] = []
        hf._visit(feature, inner.append)
        # Others are stored as something else than they are, such as JSON or a matrix.
        if hf.require_decoding(feature) or {type(item).__name__ for item in inner} - _PLAIN:
            raise Unfamiliar(f"column {column!r} is decoded when it is read")
    given = builder.config.data_files
    paths = [str(path) for found in given.values() for path in found]
    # A copy of a file on another machine has another date; what is remote has a version.
    files = [(Path(path).name, Path(path).stat().st_size) for path in paths if "://" not in path]
    remote = [] if files else [found.origin_metadata for found in given.values()]
    stamp = hashlib.sha256(repr((files or paths, remote)).encode()).hexdigest()[:16]
    identity = {**{key: cfg.get(key) for key in _DECIDING}, "files": stamp}
    buffer_bytes = cfg.get("fast_axolotl_buffer_bytes") or BUFFER_BYTES
    rows = FileRows.like(examples)
    if mismatch(STREAMS, KNOWN):
        _require_equal(loaded, bounded(loaded, rows, sys.maxsize, identity))
    return bounded(loaded, rows, buffer_bytes, identity)


def _require_equal(theirs: Any, ours: BoundedDataset) -> None:
    """``Different`` where the first rows of Axolotl's pipelines differ, or after a resume."""

    def mapped(dataset: Any) -> Any:
        return dataset.map(lambda rows: rows, batched=True, batch_size=7)

    def shuffled(dataset: Any) -> Any:
        return mapped(dataset.shuffle(seed=1, buffer_size=2 * _CHUNKS))

    def merged(dataset: Any) -> Any:
        both = concatenate_datasets([mapped(dataset), mapped(dataset)])
        if dataset is ours:
            both = bounded(both, both._ex_iterable, ours.buffer_bytes, ours.identity)
        return both.shuffle(seed=1, buffer_size=2 * _CHUNKS)

    is_refused = _DRAWS_HALVES and ours.num_shards > 1
    for make in (mapped, merged, *[shuffled] * (not is_refused)):
        wanted, found, resumed = make(theirs), make(ours), make(ours)
        rows = list(islice(found, _PROVEN_ROWS // 2))
        resumed.load_state_dict(json.loads(json.dumps(found.state_dict())))
        rows += islice(resumed, _PROVEN_ROWS - len(rows))
        if repr(rows) != repr(list(islice(wanted, _PROVEN_ROWS))):
            raise Different("the first rows of a stream, shuffled, mapped and resumed")


def _keeps_bound(name: str) -> Callable[..., Any]:
    """The method of Hugging Face's dataset, for one that stays bounded."""
    method = getattr(IterableDataset, name)

    @functools.wraps(method)
    def call(self: BoundedDataset, *args: Any, **kwargs: Any) -> BoundedDataset:
        result = method(self, *args, **kwargs)
        return bounded(result, result._ex_iterable, self.buffer_bytes, self.identity)

    return call


class BoundedDataset(IterableDataset):  # type: ignore[misc]
    """A stream whose shuffle and batched map also count bytes, whatever else is made of it."""

    buffer_bytes: int
    identity: dict[str, Any]
    """What decides about its rows: the files, and settings of the configuration."""

    def shuffle(self, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's; the buffer is also full at ``buffer_bytes``."""
        shuffled = super().shuffle(*args, **kwargs)
        if _DRAWS_HALVES and type(self._ex_iterable) is FileRows:
            rows = shuffled._ex_iterable.buffer_size
            if self.num_shards > 1 or rows % max(1, rows // _CHUNKS):
                raise Unfamiliar("datasets 5 shuffles several files in chunks")
        examples = BoundedShuffle.like(shuffled._ex_iterable, self.buffer_bytes)
        return bounded(shuffled, examples, self.buffer_bytes, self.identity)


# accelerate divides the files of ranks by ``shard``.
for _name in (
    *("map", "filter", "skip", "take", "shard", "with_format"),
    *("select_columns", "remove_columns", "rename_column"),
):
    setattr(BoundedDataset, _name, _keeps_bound(_name))


def bounded(
    dataset: Any, examples: Any, buffer_bytes: int, identity: dict[str, Any]
) -> BoundedDataset:
    """The same dataset over these examples, whose shuffle and map come out bounded."""
    if BoundedMap.can_be(examples):
        examples = BoundedMap.like(examples, buffer_bytes)
    result = BoundedDataset(
        examples,
        info=dataset._info.copy(),
        split=dataset._split,
        formatting=dataset._formatting,
        distributed=dataset._distributed,
        token_per_repo_id=dataset._token_per_repo_id,
    )
    result.buffer_bytes, result.identity = buffer_bytes, identity
    return result


class _Kept(hf._BaseExamplesIterable):  # type: ignore[misc]
    """Gives rows, never tables, and stays of its kind for an epoch, a rank or a worker."""

    budget: int
    """Bytes of a full buffer."""

    @property
    def iter_arrow(self) -> None:
        return None

    @classmethod
    def like(cls, other: Any, budget: int = 0) -> Any:
        """The same as Hugging Face's, of this kind."""
        result = cls.__new__(cls)
        result.__dict__.update(vars(other), budget=budget)
        return result

    def shuffle_data_sources(self, *args: Any, **kwargs: Any) -> Any:
        return self.like(super().shuffle_data_sources(*args, **kwargs), self.budget)

    def shard_data_sources(self, *args: Any, **kwargs: Any) -> Any:
        return self.like(super().shard_data_sources(*args, **kwargs), self.budget)

    def reshard_data_sources(self, *args: Any, **kwargs: Any) -> Any:
        return self.like(super().reshard_data_sources(*args, **kwargs), self.budget)


class FileRows(_Kept, hf.ArrowExamplesIterable):  # type: ignore[misc]
    """Files as Hugging Face reads them, row by row, where its positions are exact."""

    @property
    def is_typed(self) -> bool:
        return self.features is not None

    @property
    def features(self) -> Any:
        """Tables have been cast to them."""
        return self.generate_tables_fn.__self__.info.features


class BoundedShuffle(_Kept, hf.BufferShuffledExamplesIterable):  # type: ignore[misc]
    """Hugging Face's shuffle buffer, full at a number of rows or of bytes, that can be resumed."""

    def _init_state_dict(self) -> dict[str, Any]:
        self._state_dict: dict[str, Any] = {
            "examples_iterable": self.ex_iterable._init_state_dict(),
            **_nothing_held(),
            "type": type(self).__name__,
        }
        return self._state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        # A map loads a state from before the one that was merged in with its own.
        if self._state_dict:
            self._state_dict.update(_nothing_held())
        return hf._BaseExamplesIterable.load_state_dict(self, state_dict)

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        return self._halves() if _DRAWS_HALVES else self._singles()

    def _singles(self) -> Iterator[Any]:
        """Until datasets 5: each row that enters takes the place of a random one, which leaves."""
        state: dict[str, Any] = self._state_dict or _nothing_held()
        rng, resumed_at = deepcopy(self.generator), state["next"]
        buffer, places = _Buffer(state), list[int]()
        # The state tells the block that places are taken from, and how many were.
        draw = functools.partial(rng.integers, 0, self.buffer_size, size=_DRAWN_TOGETHER)
        if state["block"]:
            rng.bit_generator.state = state["block"]
            places = draw().tolist()
        for number, row in self._numbered(state):
            if number < resumed_at:
                buffer.refill(number, row)
                continue
            size = _weigh(row[1])
            while buffer.rows and (
                len(buffer.rows) == self.buffer_size or buffer.size + size > self.budget
            ):
                if not places or state["drawn"] == _DRAWN_TOGETHER:
                    state.update(block=rng.bit_generator.state, drawn=0)
                    places = draw().tolist()
                place = places[state["drawn"]] % len(buffer.rows)
                state["drawn"] += 1
                leaving = buffer.rows[place]
                if buffer.size - buffer.sizes[place] + size <= self.budget:
                    buffer.put(number, row, size, place)
                    yield leaving
                    break
                buffer.drop(place)
                yield leaving
            else:
                buffer.put(number, row, size, len(buffer.rows))
        rng.shuffle(buffer.rows)
        for row in buffer.rows[state["drained"] :]:
            state["drained"] += 1
            yield row

    def _halves(self) -> Iterator[Any]:
        """From datasets 5 on: a full buffer is permuted, and its first half leaves."""
        state: dict[str, Any] = self._state_dict or _nothing_held()
        rng, resumed_at = deepcopy(self.generator), state["next"]
        if state["block"]:
            rng.bit_generator.state = state["block"]
        buffer = _Buffer(state)

        def leave() -> Iterator[Any]:
            order = rng.permutation(len(buffer.rows)).tolist()
            for place in order[state["drained"] : len(order) - state["kept"]]:
                state["drained"] += 1
                yield buffer.rows[place]
            buffer.keep(order[len(order) - state["kept"] :])
            state.update(block=rng.bit_generator.state, kept=None, drained=0)

        for number, row in self._numbered(state):
            if number < resumed_at:
                buffer.refill(number, row)
                continue
            if state["kept"] is not None:
                yield from leave()
            buffer.put(number, row, _weigh(row[1]), len(buffer.rows))
            count = len(buffer.rows)
            if count >= self.buffer_size or buffer.size >= self.budget:
                state.update(block=rng.bit_generator.state, kept=min(count, self.buffer_size) // 2)
                yield from leave()
        if state["kept"] is not None:
            yield from leave()
        if buffer.rows:
            state.update(block=rng.bit_generator.state, kept=0)
            yield from leave()

    def _numbered(self, state: dict[str, Any]) -> Iterator[tuple[int, Any]]:
        """Rows and their numbers, from the oldest mark on; marks the source's positions."""
        keeps = self._state_dict is not None
        if state["marks"]:
            state["marks"] = [list(mark) for mark in state["marks"]]
            number, position = state["marks"][0]
            self.ex_iterable.load_state_dict(position)
        else:
            number, state["marks"] = 0, [[0, self.ex_iterable.state_dict()]] if keeps else []
        for row in self.ex_iterable:
            yield number, row
            number += 1
            if keeps and number % _MARK_ROWS == 0 and number > state["marks"][-1][0]:
                state["marks"].append([number, self.ex_iterable.state_dict()])
                oldest = min(state["held"], default=number)
                while len(state["marks"]) > 1 and state["marks"][1][0] <= oldest:
                    del state["marks"][0]

    def shift_rngs(self, value: int) -> Any:
        return self.like(super().shift_rngs(value), self.budget)


def _nothing_held() -> dict[str, Any]:
    """No lists: Hugging Face merges a loaded state into this one, lists item by item."""
    counts = {"next": 0, "drained": 0, "drawn": 0}
    return {"held": None, "marks": None, "block": None, "kept": None, **counts}


class _Buffer:
    """Rows of a shuffle, their numbers and their bytes; the state holds the numbers."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state
        self.held: list[int] = list(state["held"] or ())
        self.rows: list[Any] = [None] * len(self.held)
        self.sizes = [0] * len(self.held)
        self.size = 0
        self._awaited = {number: place for place, number in enumerate(self.held)}
        state["held"] = self.held

    def refill(self, number: int, row: Any) -> None:
        """Puts a row where it was when the state was taken, if it was still there."""
        place = self._awaited.pop(number, None)
        if place is not None:
            self.rows[place], self.sizes[place] = row, _weigh(row[1])
            self.size += self.sizes[place]

    def put(self, number: int, row: Any, size: int, place: int) -> None:
        """Enters a row, in place of another or at the end."""
        if place == len(self.rows):
            self.rows.append(row)
            self.held.append(number)
            self.sizes.append(size)
        else:
            self.size -= self.sizes[place]
            self.rows[place], self.held[place], self.sizes[place] = row, number, size
        self.size += size
        self._state["next"] = number + 1

    def keep(self, places: list[int]) -> None:
        """Takes all others out, and brings these into this order."""
        for column in (self.rows, self.held, self.sizes):
            column[:] = [column[place] for place in places]
        self.size = sum(self.sizes)

    def drop(self, place: int) -> None:
        """Takes a row out; the last one moves up."""
        self.size -= self.sizes[place]
        for column in (self.rows, self.held, self.sizes):
            last = column.pop()
            if place < len(column):
                column[place] = last


class BoundedMap(_Kept, hf.MappedExamplesIterable):  # type: ignore[misc]
    """A batched map over Python rows whose batches end at a number of rows or of bytes."""

    @staticmethod
    def can_be(mapped: Any) -> bool:
        """Whether it is a map of the kind that Axolotl makes of text."""
        usual = type(mapped) is hf.MappedExamplesIterable and mapped.batched
        usual = usual and not mapped.formatting and not mapped.with_indices
        usual = usual and mapped.input_columns is None and not mapped.drop_last_batch
        return bool(usual and (mapped.batch_size or 0) > 0)

    def _init_state_dict(self) -> dict[str, Any]:
        # The position at the last batch, as text, is all that counts: a state is taken often.
        self._state_dict = {**super()._init_state_dict(), "examples_iterable": {}, "random": None}
        return self._state_dict

    def _iter(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        state, skip, replayed = self._state_dict, 0, None
        if state and state["previous_state"]:
            self.ex_iterable.load_state_dict(json.loads(state["previous_state"]))
            skip, replayed = state["num_examples_since_previous_state"], state["random"]
        rows = iter(self.ex_iterable)
        while True:
            position = json.dumps(self.ex_iterable._state_dict) if state else None
            random = replayed or random_state()
            key, examples = self._take(rows)
            if state:
                state.update(previous_state=position, num_examples_since_previous_state=0)
                state["random"] = random if examples else None
            if not examples:
                return
            # A worker goes on from there; in the training process the model draws as well.
            with drawn_from(replayed, is_left=worker_id() is not None):
                columns = self._call(hf._examples_to_batch(examples))
            replayed = None
            del examples
            for example in hf._batch_to_examples(columns):
                if state:
                    state["num_examples_since_previous_state"] += 1
                if skip:
                    skip -= 1
                else:
                    yield key, example
            # Else it would be held while the next one is made.
            columns.clear()

    def _take(self, rows: Iterator[Any]) -> tuple[Any, list[Any]]:
        """The rows of the next batch, and the key of the first; none at the end."""
        examples: list[Any] = []
        first, size = None, 0
        for key, example in rows:
            first = first if examples else key
            examples.append(example)
            size += _weigh(example)
            if len(examples) == self.batch_size or size >= self.budget:
                break
        return first, examples

    def _call(self, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        kept = dict(columns)
        made = self.function(columns, **self.fn_kwargs)
        lengths = {name: len(made[name]) for name in made}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"Column lengths mismatch: {lengths}")
        for name in self.remove_columns or ():
            kept.pop(name, None)
            if made is columns:
                made.pop(name, None)
        return {**kept, **made}


def random_state() -> str | None:
    """State of torch's generator for the processor, as text; ``None`` where torch is not loaded.

    Axolotl's streams draw from no other one.
    """
    torch = sys.modules.get("torch")
    return b64encode(torch.get_rng_state().numpy().tobytes()).decode() if torch else None


@contextmanager
def drawn_from(state: str | None, *, is_left: bool = False) -> Iterator[None]:
    """Draws from torch's generator as it was, and puts it back, unless the state is to be left."""
    if state is None:
        yield
        return
    import torch

    now = torch.get_rng_state()
    torch.set_rng_state(torch.frombuffer(bytearray(b64decode(state)), dtype=torch.uint8))
    try:
        yield
    finally:
        if not is_left:
            torch.set_rng_state(now)


def _weigh(value: Any) -> int:
    """About the bytes that a value takes; numbers count as four."""
    if isinstance(value, str | bytes):
        return sys.getsizeof(value)
    if isinstance(value, dict):
        return sum(map(_weigh, value.values()))
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], int | float):
            return _NUMBER_BYTES * len(value)
        return sum(map(_weigh, value))
    return _NUMBER_BYTES
