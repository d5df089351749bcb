"""A batched map of a streamed Hugging Face dataset whose batches end at a number of bytes, too."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fast_axolotl.errors import MissingExtraError
from fast_axolotl.reading.prefetch import Prefetcher

try:
    from datasets import iterable_dataset as hf
except ImportError as error:
    raise MissingExtraError(
        "streaming into Hugging Face needs its package: pip install datasets"
    ) from error

__all__ = ["TOKEN_BYTES", "BoundedMap", "weigh"]

TOKEN_BYTES = 4
"""Bytes of text that make a token, by rule of thumb."""

_ROOM = 2
"""Batches that are there at a time: the one that is handed out, and the next."""


@dataclass(slots=True, kw_only=True)
class _Batch:
    key: Any
    """Of the first row."""
    columns: dict[str, list[Any]]
    """What the function is given, then what it has made of it, then nothing."""
    position: dict[str, Any] | None
    """Of the source, before the first row."""
    weight: int = 1
    """For ``Prefetcher``: batches are counted."""


class BoundedMap(hf.MappedExamplesIterable):  # type: ignore[misc]
    """A batched map over Python rows whose batches end at a number of rows or of bytes.

    In a worker of a loader the next batch is made in a thread while rows of this one are handed
    out, so that the worker's queue does not run dry at the end of every batch. There nothing else
    draws random numbers in Axolotl's streams, so a function that does draws the same ones. In the
    training process, where the model draws too, batches are made when they are asked for.
    """

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

    def _iter(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        state, skip = self._state_dict, 0
        is_ahead = _is_worker()
        if state:
            previous = state["previous_state"]
            if is_ahead:
                # What is read ahead moves a position of its own: ours is the one handed out.
                self.ex_iterable._init_state_dict()
            if previous:
                self.ex_iterable.load_state_dict(previous)
                skip = state["num_examples_since_previous_state"]
        for batch in self._made_ahead() if is_ahead else map(self._make, self._batches()):
            self._mark(batch.position)
            for example in hf._batch_to_examples(batch.columns):
                if state:
                    state["num_examples_since_previous_state"] += 1
                if skip:
                    skip -= 1
                else:
                    yield batch.key, example
            # Else it would be held while the next one is made.
            batch.columns.clear()
        self._mark(self._position())

    def _made_ahead(self) -> Iterator[_Batch]:
        """Batches, one of them made ahead."""

        def make(batch: _Batch) -> tuple[_Batch, int]:
            return self._make(batch), batch.weight

        ahead = Prefetcher(self._batches(), make, num_threads=1, budget=_ROOM)
        try:
            for _, batch in ahead:
                yield batch
        finally:
            ahead.close()

    def _make(self, batch: _Batch) -> _Batch:
        batch.columns = self._apply(batch.columns)
        return batch

    def _batches(self) -> Iterator[_Batch]:
        """The rows of every batch, and where they begin."""
        return iter(functools.partial(self._take, iter(self.ex_iterable)), None)

    def _take(self, rows: Iterator[Any]) -> _Batch | None:
        position = self._position()
        examples, size, first = [], 0, None
        for key, example in rows:
            first = key if first is None else first
            examples.append(example)
            size += weigh(example)
            if len(examples) == self.batch_size or size >= self.budget:
                break
        if not examples:
            return None
        return _Batch(key=first, columns=hf._examples_to_batch(examples), position=position)

    def _position(self) -> dict[str, Any] | None:
        return self.ex_iterable.state_dict() if self._state_dict else None

    def _mark(self, position: dict[str, Any] | None) -> None:
        if self._state_dict:
            self._state_dict["previous_state"] = position
            self._state_dict["num_examples_since_previous_state"] = 0

    def _apply(self, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        given = dict(columns)
        made = self.function(columns, **self.fn_kwargs)
        lengths = {name: len(made[name]) for name in made}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"Column lengths mismatch: {lengths}")
        for name in self.remove_columns or ():
            given.pop(name, None)
            if made is columns:
                made.pop(name, None)
        return {**given, **made}

    def shuffle_data_sources(self, generator: Any) -> BoundedMap:
        return self.around(super().shuffle_data_sources(generator), self.budget)

    def shard_data_sources(self, *args: Any, **kwargs: Any) -> BoundedMap:
        return self.around(super().shard_data_sources(*args, **kwargs), self.budget)

    def reshard_data_sources(self) -> BoundedMap:
        return self.around(super().reshard_data_sources(), self.budget)


def _is_worker() -> bool:
    """Whether this process is a worker of torch's loader."""
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data is not None and torch_data.get_worker_info() is not None


def weigh(value: Any) -> int:
    """About the bytes that a value takes; lists of numbers count as tokens of four."""
    if isinstance(value, str | bytes):
        return sys.getsizeof(value)
    if isinstance(value, dict):
        return sum(map(weigh, value.values()))
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], int | float):
            return TOKEN_BYTES * len(value)
        return sum(map(weigh, value))
    return TOKEN_BYTES
