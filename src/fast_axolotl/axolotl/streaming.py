"""Axolotl's streamed datasets through our reader, with buffers bounded by bytes.

With ``dataset_use_rust_streaming: true`` the two functions that load streamed files let Axolotl
load them as ever, and exchange what reads the files (``huggingface.through_reader``). What Axolotl
does with the dataset then (skip, shuffle, map, format) is its own code, unchanged. It meets a
``BoundedDataset``, whose shuffle and batched map end a buffer at a number of rows, as Hugging
Face's do, or at a number of bytes, whichever comes first. So as long as no buffer reaches its
bytes, rows, batches and the use of random numbers are the same; beyond, memory is bounded, and
batches are smaller than the rows asked for.

State: a batched map starts its last batch again and leaves out the rows it had given, as Hugging
Face's does; where the function draws random numbers (``encode_packed_streaming`` shuffles), the
batch is made under the random state that it was made under before. The shuffle keeps which rows
it holds, by number, and reads them again from the oldest on: nothing is lost or doubled.

Without the switch, below its thresholds, or for files that ``huggingface`` refuses: ``Unfamiliar``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fast_axolotl.axolotl.huggingface import locate, shard_sources, through_reader
from fast_axolotl.axolotl.patching import Final, NotAsked, Unfamiliar
from fast_axolotl.errors import DataError, MissingExtraError, UsageError
from fast_axolotl.reading.files import find_files
from fast_axolotl.streaming import STREAMING_FILE_BYTES, STREAMING_SEQUENCE_LENGTH

try:
    from datasets import IterableDataset, IterableDatasetDict, interleave_datasets
    from datasets import iterable_dataset as hf
except ImportError as error:
    raise MissingExtraError(
        "streaming into Axolotl needs its packages: pip install axolotl"
    ) from error

MIB = 1024 * 1024

MEMORY_BUDGET = 64 * MIB
"""Of one process that reads. Less than the reader's own default: each worker has one."""

BUFFER_BYTES = 64 * MIB
"""Of text as Python holds it. 10,000 web pages of 4 KB, Axolotl's default buffer, stay below it;
tokenised, so much text takes ten to twenty times its size for a moment."""

_MARK_ROWS = 1000
"""A shuffle notes its source's position every so many rows."""

_DRAWN_TOGETHER = 1000
"""Hugging Face draws the places of a shuffle in blocks of this many."""

_TOKEN_BYTES = 4
"""Bytes of text that make a token, by rule of thumb."""

_DECIDING = (
    *("sequence_len", "sample_packing", "micro_batch_size", "streaming_multipack_buffer_size"),
    *("shuffle_merged_datasets", "shuffle_before_merging_datasets", "seed", "base_model"),
    *("sample_packing_bin_size", "pretrain_multipack_attn", "pretraining_sample_concatenation"),
    *("fast_axolotl_weights", "fast_axolotl_buffer_bytes", "fast_axolotl_buffer_tokens"),
)
"""Keys of the configuration that decide which rows and packs a stream gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """What a configuration asks of streaming."""

    force: bool = False
    """Whatever the size of the files and of a sequence."""
    keep_in_memory: bool = False
    """The configuration wants datasets in memory."""
    sequence_len: int = 0
    """Of the configuration."""
    min_file_bytes: int = STREAMING_FILE_BYTES
    """Together, the files must be as large."""
    min_sequence_len: int = STREAMING_SEQUENCE_LENGTH
    """A sequence must be as long."""
    memory_budget: int = MEMORY_BUDGET
    """Bytes that the reader of one process may hold."""
    buffer_bytes: int = BUFFER_BYTES
    """Bytes at which a buffer of rows is full."""

    def require_wanted(self) -> None:
        """``Unfamiliar`` where the configuration is below its own thresholds."""
        if self.force:
            return
        if self.keep_in_memory:
            raise _below_threshold("dataset_keep_in_memory is set")
        if self.sequence_len < self.min_sequence_len:
            raise _below_threshold(
                f"sequence_len is below {self.min_sequence_len}",
                f"fast_axolotl_streaming_min_sequence_len: {self.sequence_len}",
            )


def stream_settings(cfg: Any) -> StreamSettings | None:
    """The settings of a configuration; ``None`` where it does not ask for our reader."""
    if not cfg.get("dataset_use_rust_streaming"):
        return None

    def number(key: str, default: int) -> int:
        value = cfg.get(key)
        return default if value is None else int(value)

    tokens = cfg.get("fast_axolotl_buffer_tokens")
    by_tokens = BUFFER_BYTES if tokens is None else int(tokens) * _TOKEN_BYTES
    by_bytes = number("fast_axolotl_buffer_bytes", by_tokens)
    return StreamSettings(
        force=bool(cfg.get("fast_axolotl_streaming_force")),
        keep_in_memory=bool(cfg.get("dataset_keep_in_memory")),
        sequence_len=number("sequence_len", 0),
        min_file_bytes=number("fast_axolotl_streaming_min_bytes", STREAMING_FILE_BYTES),
        min_sequence_len=number(
            "fast_axolotl_streaming_min_sequence_len", STREAMING_SEQUENCE_LENGTH
        ),
        memory_budget=number("fast_axolotl_memory_budget", MEMORY_BUDGET),
        buffer_bytes=by_bytes if tokens is None else min(by_bytes, by_tokens),
    )


def load_streaming_dataset(pretraining_config: Any, cfg: Any, tokenizer: Any) -> Any:
    """Axolotl's ``_load_streaming_dataset``: load, skip, wrap, format.

    Of several entries of ``pretraining_dataset`` Axolotl is given the first, and forgets the
    others. Here their texts are mixed, each by its weight.
    """
    from axolotl.utils.data import sft

    listed = cfg.pretraining_dataset if isinstance(cfg.pretraining_dataset, list) else []
    others = (type(cfg)({"pretraining_dataset": [entry]}) for entry in listed[1:])
    sources = [pretraining_config, *map(sft._extract_pretraining_config, others)]
    wrapper = functools.partial(
        sft.get_dataset_wrapper,
        dataset_config=pretraining_config,
        tokenizer=tokenizer,
        cfg=cfg,
        dataset_base_type=pretraining_config["type"],
    )
    batch_size = cfg.micro_batch_size
    try:
        settings = _wanted(cfg)
        if cfg.accelerator_config and cfg.accelerator_config.dispatch_batches:
            raise Unfamiliar("dispatch_batches is set")
        weights = _weights(cfg, len(sources))
        is_sized = len(sources) > 1 and not weights
        datasets = [_load_source(source, cfg, settings, is_sized) for source in sources]
        dataset = datasets[0] if len(datasets) == 1 else _mixed(datasets, weights, cfg)
        wrapped = sft.wrap_streaming_dataset(dataset, tokenizer, cfg, wrapper)
        return wrapped.with_format("torch")
    except Exception as error:
        # Wrapping sets it to 1; Axolotl's own function is about to start from the beginning.
        cfg.micro_batch_size = batch_size
        if len(sources) > 1 and not isinstance(error, NotAsked | Final):
            _warn_once(
                f"fast-axolotl cannot mix the {len(sources)} entries of pretraining_dataset, so "
                f"Axolotl reads only the first: {error}"
            )
        raise


def _load_source(source: Any, cfg: Any, settings: StreamSettings, is_sized: bool) -> BoundedDataset:
    """One entry of the configuration, without the rows that it skips."""
    from axolotl.utils.data import sft

    loaded = sft.load_dataset(
        source["path"],
        streaming=True,
        split=source["split"],
        name=source["name"],
        data_files=source["data_files"],
    )
    dataset, skip = _exchanged(loaded, settings, cfg, is_sized=is_sized), source["skip"]
    if not skip:
        return dataset
    if loaded.features is not None:
        # datasets 4.8 skips wrongly past its first table: it skips tables and not rows.
        first = next(iter(loaded._ex_iterable.iter_arrow()), None)
        if first is None or skip >= len(first[1]):
            raise Unfamiliar("stock datasets skips the wrong rows after its first table")
    sft.LOG.info(f"Skipping {skip} samples from the dataset")
    skipped: BoundedDataset = dataset.skip(skip)
    return skipped


def _weights(cfg: Any, count: int) -> list[float]:
    """What the configuration gives, as shares of one; nothing where it gives none."""
    weights = [float(weight) for weight in cfg.get("fast_axolotl_weights") or ()]
    if weights and (len(weights) != count or min(weights) <= 0):
        raise Final(
            UsageError(
                f"fast_axolotl_weights is {weights}, but pretraining_dataset has {count} "
                "entries; set one number above 0 per entry"
            )
        )
    return [weight / sum(weights) for weight in weights]


def _mixed(datasets: list[BoundedDataset], weights: list[float], cfg: Any) -> BoundedDataset:
    """The texts of all entries, drawn at random in proportion to their weights.

    With weights an entry that ends starts again until each has been read once, so that the
    proportions hold. Without, they are the sizes of the files, and every text comes once.
    """
    from axolotl.utils.data import sft

    columns = [entry.get("text_column") or "text" for entry in cfg.pretraining_dataset]
    texts = [
        dataset.select_columns([name]) for dataset, name in zip(datasets, columns, strict=True)
    ]
    for number, name in enumerate(columns):
        if name != columns[0]:
            texts[number] = texts[number].rename_column(name, columns[0])
    sizes = [dataset.identity["num_bytes"] for dataset in datasets]
    shares = weights or [size / sum(sizes) for size in sizes]
    by = "fast_axolotl_weights" if weights else "file size"
    sft.LOG.info(
        f"fast-axolotl: mixing the {len(datasets)} entries of pretraining_dataset by {by}: "
        f"{', '.join(f'{share:.3f}' for share in shares)}. Stock Axolotl reads only the first."
    )
    mixed = interleave_datasets(
        texts,
        probabilities=shares,
        seed=cfg.seed or 0,
        stopping_strategy="all_exhausted" if weights else "all_exhausted_without_replacement",
    )
    return bounded(mixed, datasets[0].buffer_bytes, _joint_identity(datasets))


def merge_datasets(datasets: list[Any], cfg: Any) -> BoundedDataset:
    """Axolotl's ``merge_datasets`` for streams of ours: one after the other, then shuffled."""
    if len(datasets) < 2 or not all(isinstance(item, BoundedDataset) for item in datasets):
        raise NotAsked
    from axolotl.utils.data import shared

    if cfg.shuffle_before_merging_datasets:
        shared.LOG.info("Shuffling each dataset individually before merging...")
        datasets = [dataset.shuffle(seed=cfg.seed) for dataset in datasets]
    shared.LOG.info("Merging datasets...")
    merged = shared.concatenate_datasets(datasets)
    merged = bounded(merged, datasets[0].buffer_bytes, _joint_identity(datasets))
    if not cfg.shuffle_merged_datasets:
        return merged
    if cfg.curriculum_sampling:
        shared.LOG.warning(
            "Shuffling merged datasets with curriculum sampling is not recommended. "
            "This will randomize the order of samples."
        )
    shuffled: BoundedDataset = merged.shuffle(seed=cfg.seed)
    return shuffled


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
    if not streaming:
        raise NotAsked
    settings = _wanted(cfg)
    if dataset_config.type == "_synthetic" or dataset_config.shards:
        raise Unfamiliar("the dataset is synthetic, or one of several shards")

    from axolotl.utils.data import sft

    dataset = sft.load_dataset_with_config(
        dataset_config, cfg.hf_use_auth_token, streaming=streaming
    )
    if isinstance(dataset, IterableDatasetDict):
        wanted = dataset_config.split if dataset_config.split in dataset else split
        if wanted not in dataset:
            raise Unfamiliar(f"there is no split {wanted!r}")
        dataset = dataset[wanted]
    base_type, prompt_style = sft._parse_dataset_type(dataset_config.type)
    wrapped, prompter = sft.get_dataset_wrapper(
        dataset_config=dataset_config,
        tokenizer=tokenizer,
        cfg=cfg,
        dataset_base_type=base_type,
        dataset=_exchanged(dataset, settings, cfg),
        dataset_prompt_style=prompt_style,
        processor=processor,
    )
    return wrapped, prompter


def _keeps_bound(name: str) -> Callable[..., Any]:
    """The method of Hugging Face's dataset, for one that stays bounded."""
    method = getattr(IterableDataset, name)

    @functools.wraps(method)
    def call(self: BoundedDataset, *args: Any, **kwargs: Any) -> BoundedDataset:
        return bounded(method(self, *args, **kwargs), self.buffer_bytes, self.identity)

    return call


class BoundedDataset(IterableDataset):  # type: ignore[misc]
    """A stream whose shuffle and batched map also count bytes, whatever else is made of it."""

    buffer_bytes: int
    identity: dict[str, Any]
    """What decides about its rows: the files, and settings of the configuration."""

    def shuffle(self, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's; the buffer is also full at ``buffer_bytes``."""
        shuffled = super().shuffle(*args, **kwargs)
        shuffled._ex_iterable = BoundedShuffle.around(shuffled._ex_iterable, self.buffer_bytes)
        return bounded(shuffled, self.buffer_bytes, self.identity)

    def map(self, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's; a batch also ends at ``buffer_bytes``."""
        mapped = super().map(*args, **kwargs)
        if BoundedMap.can_be(mapped._ex_iterable):
            mapped._ex_iterable = BoundedMap.around(mapped._ex_iterable, self.buffer_bytes)
        return bounded(mapped, self.buffer_bytes, self.identity)

    def filter(self, *args: Any, **kwargs: Any) -> Any:
        """As Hugging Face's; its state counts rows, where theirs counts tables and loses rows."""
        filtered = super().filter(*args, **kwargs)
        typed = filtered._ex_iterable.ex_iterable
        usual = type(typed) is hf.FormattedExamplesIterable and not typed.formatting
        if usual and typed.ex_iterable.is_typed:
            filtered._ex_iterable.ex_iterable = typed.ex_iterable
        return bounded(filtered, self.buffer_bytes, self.identity)

    skip = _keeps_bound("skip")
    take = _keeps_bound("take")
    shard = _keeps_bound("shard")
    with_format = _keeps_bound("with_format")
    select_columns = _keeps_bound("select_columns")
    remove_columns = _keeps_bound("remove_columns")
    rename_column = _keeps_bound("rename_column")
    rename_columns = _keeps_bound("rename_columns")
    cast = _keeps_bound("cast")
    cast_column = _keeps_bound("cast_column")


def bounded(
    dataset: Any, buffer_bytes: int, identity: dict[str, Any] | None = None
) -> BoundedDataset:
    """The same dataset, whose shuffle and map come out bounded."""
    result = BoundedDataset(
        dataset._ex_iterable,
        info=dataset._info.copy(),
        split=dataset._split,
        formatting=dataset._formatting,
        distributed=dataset._distributed,
        token_per_repo_id=dataset._token_per_repo_id,
    )
    result.buffer_bytes, result.identity = buffer_bytes, identity or {}
    return result


class BoundedShuffle(hf.BufferShuffledExamplesIterable):  # type: ignore[misc]
    """Hugging Face's shuffle buffer, full at a number of rows or of bytes, that can be resumed."""

    def __init__(self, ex_iterable: Any, buffer_size: int, generator: Any, budget: int) -> None:
        super().__init__(ex_iterable, buffer_size, generator)
        self.budget = budget

    @classmethod
    def around(cls, shuffled: Any, budget: int) -> BoundedShuffle:
        """The same shuffle, with a budget; rows come one by one, not as tables of one row."""
        source = shuffled.ex_iterable
        if type(source) is hf.RebatchedArrowExamplesIterable:
            source = source.ex_iterable
        return cls(source, shuffled.buffer_size, shuffled.generator, budget)

    @property
    def iter_arrow(self) -> None:
        return None

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
        state: dict[str, Any] = self._state_dict or _nothing_held()
        rng, resumed_at = deepcopy(self.generator), state["next"]
        draws = _Draws(rng, self.buffer_size, state)
        buffer = _Buffer(state)
        for number, row in self._numbered(state):
            if number < resumed_at:
                buffer.refill(number, row)
                continue
            size = _weigh(row[1])
            while buffer.is_full(size, self.buffer_size, self.budget):
                place = draws.next() % len(buffer.rows)
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

    def shift_rngs(self, value: int) -> BoundedShuffle:
        return self.around(super().shift_rngs(value), self.budget)

    def shuffle_data_sources(self, generator: Any) -> BoundedShuffle:
        return self.around(super().shuffle_data_sources(generator), self.budget)

    def shard_data_sources(self, *args: Any, **kwargs: Any) -> BoundedShuffle:
        return self.around(super().shard_data_sources(*args, **kwargs), self.budget)

    def reshard_data_sources(self) -> BoundedShuffle:
        return self.around(super().reshard_data_sources(), self.budget)


def _nothing_held() -> dict[str, Any]:
    """No lists: Hugging Face merges a loaded state into this one, lists item by item."""
    return {"held": None, "marks": None, "next": 0, "drained": 0, "block": None, "drawn": 0}


class _Draws:
    """Random places, drawn in blocks as Hugging Face does; the state tells block and place."""

    def __init__(self, rng: Any, bound: int, state: dict[str, Any]) -> None:
        self._rng, self._bound, self._state = rng, bound, state
        self._values: list[int] = []
        if state["block"]:
            rng.bit_generator.state = state["block"]
            self._values = self._block()

    def next(self) -> int:
        if not self._values or self._state["drawn"] == _DRAWN_TOGETHER:
            self._state["block"], self._state["drawn"] = self._rng.bit_generator.state, 0
            self._values = self._block()
        place: int = self._values[self._state["drawn"]]
        self._state["drawn"] += 1
        return place

    def _block(self) -> list[int]:
        drawn: list[int] = self._rng.integers(0, self._bound, size=_DRAWN_TOGETHER).tolist()
        return drawn


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

    def is_full(self, size: int, most_rows: int, budget: int) -> bool:
        """Whether a row has to leave before one of this size may enter."""
        return bool(self.rows) and (len(self.rows) == most_rows or self.size + size > budget)

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

    def drop(self, place: int) -> None:
        """Takes a row out; the last one moves up."""
        self.size -= self.sizes[place]
        for column in (self.rows, self.held, self.sizes):
            last = column.pop()
            if place < len(column):
                column[place] = last


class BoundedMap(hf.MappedExamplesIterable):  # type: ignore[misc]
    """A batched map over Python rows whose batches end at a number of rows or of bytes."""

    budget: int

    @staticmethod
    def can_be(mapped: Any) -> bool:
        """Whether it is a map of the kind that Axolotl makes of text."""
        usual = type(mapped) is hf.MappedExamplesIterable and mapped.batched
        usual = usual and not mapped.formatting and not mapped.with_indices
        usual = usual and mapped.input_columns is None and not mapped.drop_last_batch
        return bool(usual and (mapped.batch_size or 0) > 0)

    @classmethod
    def around(cls, mapped: Any, budget: int) -> BoundedMap:
        """The same map, with a budget."""
        result = cls.__new__(cls)
        result.__dict__.update(mapped.__dict__, budget=budget)
        return result

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

    def shuffle_data_sources(self, generator: Any) -> BoundedMap:
        return self.around(super().shuffle_data_sources(generator), self.budget)

    def shard_data_sources(self, *args: Any, **kwargs: Any) -> BoundedMap:
        return self.around(super().shard_data_sources(*args, **kwargs), self.budget)

    def reshard_data_sources(self) -> BoundedMap:
        return self.around(super().reshard_data_sources(), self.budget)


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


def worker_id() -> int | None:
    """Of the worker of torch's loader that this process is."""
    torch_data = sys.modules.get("torch.utils.data")
    worker = torch_data.get_worker_info() if torch_data is not None else None
    return None if worker is None else int(worker.id)


def _weigh(value: Any) -> int:
    """About the bytes that a value takes; lists of numbers count as tokens of four."""
    if isinstance(value, str | bytes):
        return sys.getsizeof(value)
    if isinstance(value, dict):
        return sum(map(_weigh, value.values()))
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], int | float):
            return _TOKEN_BYTES * len(value)
        return sum(map(_weigh, value))
    return _TOKEN_BYTES


def _wanted(cfg: Any) -> StreamSettings:
    settings = stream_settings(cfg)
    if settings is None:
        raise NotAsked
    settings.require_wanted()
    return settings


@functools.cache
def _warn_once(message: str) -> None:
    """On the first rank alone: the logger is Axolotl's, which sees to that."""
    from axolotl.utils.data import sft

    sft.LOG.warning(message)


def _below_threshold(reason: str, cure: str = "") -> Unfamiliar:
    ways = " or ".join(filter(None, ("fast_axolotl_streaming_force: true", cure)))
    _warn_once(
        f"fast-axolotl: dataset_use_rust_streaming has no effect because {reason}. Stock Axolotl "
        f"reads the files, and a resumed run replays them. To use the reader, set {ways}."
    )
    return Unfamiliar(reason)


def _exchanged(
    loaded: Any, settings: StreamSettings, cfg: Any, *, is_sized: bool = False
) -> BoundedDataset:
    """A dataset that Hugging Face loaded, with our reader and our buffers."""
    paths = shard_sources(loaded)
    builder = loaded._ex_iterable.generate_tables_fn.__self__
    num_bytes = 0
    for path in paths if is_sized or not settings.force else ():
        try:
            address, options = locate(path, builder)
            sources, _ = find_files(address, storage_options=options)
        except DataError:
            num_bytes += settings.min_file_bytes  # a file that hides its size counts as large
        else:
            num_bytes += sum(source.num_bytes for source in sources)
        if num_bytes >= settings.min_file_bytes and not is_sized:
            break
    if not settings.force and num_bytes < settings.min_file_bytes:
        raise _below_threshold(
            f"the files are smaller than {settings.min_file_bytes:,} bytes",
            f"fast_axolotl_streaming_min_bytes: {num_bytes}",
        )
    # A copy of a file on another machine has another date; what is remote has a version.
    files = [(Path(path).name, Path(path).stat().st_size) for path in paths if "://" not in path]
    remote = [item.origin_metadata for item in builder.config.data_files.values() if not files]
    stamp = hashlib.sha256(repr((files or paths, remote)).encode()).hexdigest()[:16]
    identity = {key: cfg.get(key) for key in _DECIDING} | {"files": stamp, "num_bytes": num_bytes}
    dataset = through_reader(loaded, memory_budget=settings.memory_budget)
    return bounded(dataset, settings.buffer_bytes, identity)


def _joint_identity(datasets: list[BoundedDataset]) -> dict[str, Any]:
    files = " ".join(dataset.identity["files"] for dataset in datasets)
    num_bytes = sum(dataset.identity["num_bytes"] for dataset in datasets)
    return {**datasets[0].identity, "files": files, "num_bytes": num_bytes}
