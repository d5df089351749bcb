"""Opened files as one dataset: its units, its tasks for the decode threads, its first schema."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.reading.batching import held_bytes
from fast_axolotl.reading.blocks import (
    Block,
    BrokenBlock,
    Decoded,
    FileFormat,
    ReadOptions,
    Unit,
    decode_or_reject,
)
from fast_axolotl.reading.files import InputFile
from fast_axolotl.reading.order import (
    Item,
    Order,
    Part,
    Position,
    apply_steps,
    fingerprint,
    make_groups,
    resumed,
)
from fast_axolotl.reading.prefetch import Prefetcher
from fast_axolotl.reading.schema import TypeClash, join_or_mark
from fast_axolotl.reading.settle import Window, settle

__all__ = ["Dataset", "Known", "Task", "base_schema", "decode_task", "make_tasks"]

_SCAN_BYTES = 32 * 1024 * 1024
"""CSV types, and columns that may clash, are settled by all of the data up to this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Opened files and how they are cut up."""

    inputs: tuple[InputFile, ...]
    formats: tuple[FileFormat, ...]
    options: ReadOptions
    window_bytes: int
    """How much is shuffled together."""

    @property
    def fingerprint(self) -> str:
        names = [PurePosixPath(item.source.path).name for item in self.inputs]
        files = zip(names, self.inputs, strict=True)
        return fingerprint([(name, item.source.num_bytes, item.format) for name, item in files])

    def units(self) -> list[Unit]:
        return [unit for index, file in enumerate(self.formats) for unit in file.units(index)]

    def order(self, seed: int | None, epoch: int) -> Order:
        return make_groups(
            self.units(),
            seed=seed,
            epoch=epoch,
            block_bytes=self.options.block_bytes,
            window_bytes=self.window_bytes,
        )

    def with_options(self, **changes: Any) -> Dataset:
        options = replace(self.options, **changes)
        formats = tuple(replace(file, options=options) for file in self.formats)  # type: ignore[type-var]
        return replace(self, options=options, formats=formats)

    def with_plan(self, *, block_bytes: int, unit_bytes: int, window_bytes: int) -> Dataset:
        """The same files cut up as they were when a state was taken."""
        dataset = self.with_options(block_bytes=block_bytes, unit_bytes=unit_bytes)
        return replace(dataset, window_bytes=window_bytes)

    def blocks(self, unit: Unit) -> Iterator[Block]:
        """A unit's blocks; where splitting fails, a block that says so in its place."""
        try:
            yield from self.formats[unit.file].blocks(unit)
        except DataError as error:
            yield BrokenBlock(error)


@dataclass(slots=True)
class Known:
    """The schema so far, shared with the decode threads as their hint."""

    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class Task:
    """An item and its place in the shard's sequence."""

    item: Item
    part: int = 0
    index: int = 0

    @property
    def weight(self) -> int:
        return int(self.item.content.weight)


def make_tasks(
    dataset: Dataset, order: Order, parts: Sequence[Part], start: Position
) -> Iterator[Task]:
    """A shard's items from a position on."""
    for offset, part in enumerate(resumed(parts, start)):
        first = start.item if offset == 0 else 0
        items = apply_steps(_contents(dataset, order, part.group), part.steps)
        for index, item in enumerate(items, first):
            yield Task(item, start.part + offset, index)


def decode_task(task: Task, known: Known, options: ReadOptions) -> tuple[Decoded, int]:
    """Runs on a decode thread."""
    decoded = decode_or_reject(task.item.content, known.schema, options)
    return decoded, held_bytes(decoded.table)


def base_schema(dataset: Dataset, *, scan: bool, num_threads: int, budget: int) -> pa.Schema:
    """Declared schemas joined; the rest inferred from a sample, or from everything."""
    schema = _declared(dataset)
    wanted = {index for index, file in enumerate(dataset.formats) if file.schema is None}
    units = [unit for unit in dataset.units() if unit.file in wanted]
    if units and (scan or _is_worth_a_scan(dataset)):
        schema = _scanned(dataset, units, schema, num_threads, budget)
    else:
        schema = _sampled(dataset, units, schema)
    if all(item.format == "csv" for item in dataset.inputs):
        schema = _empty_as_text(schema)
    columns = dataset.options.columns
    if columns is None:
        return schema
    missing = [name for name in columns if name not in schema.names]
    if missing:
        raise UsageError(
            f"no column {missing[0]!r}; there are: {', '.join(_all_names(dataset, units))}"
            + (' (infer="scan" also finds columns that appear late)' if wanted else "")
        )
    return pa.schema([schema.field(name) for name in columns])


def _all_names(dataset: Dataset, units: Sequence[Unit]) -> list[str]:
    """Every column, also those that were not asked for."""
    declared = [name for file in dataset.formats for name in getattr(file, "names", ())]
    whole = dataset.with_options(columns=None)
    inferred = _sampled(whole, units, pa.schema([]))
    return list(dict.fromkeys([*declared, *inferred.names]))


def _empty_as_text(schema: pa.Schema) -> pa.Schema:
    """CSV columns without any value: empty text, not null."""
    kinds = [pa.string() if pa.types.is_null(field.type) else field.type for field in schema]
    return pa.schema([field.with_type(kind) for field, kind in zip(schema, kinds, strict=True)])


def _declared(dataset: Dataset) -> pa.Schema:
    schema = pa.schema([])
    for item, file in zip(dataset.inputs, dataset.formats, strict=True):
        if file.schema is None:
            continue
        try:
            schema = join_or_mark(schema, file.schema, dataset.options.on_conflict)
        except TypeClash as clash:
            raise clash.error(item.source.path) from None
    return schema


def _is_worth_a_scan(dataset: Dataset) -> bool:
    """Whether types may change from block to block, and all of the data is soon read."""
    may_change = any(item.format == "csv" for item in dataset.inputs)
    may_change = may_change or dataset.options.on_conflict == "json"
    return may_change and sum(unit.num_bytes for unit in dataset.units()) <= _SCAN_BYTES


def _sampled(dataset: Dataset, units: Sequence[Unit], schema: pa.Schema) -> pa.Schema:
    """The types of the first block that has rows."""
    for unit in units:
        for block in dataset.blocks(unit):
            decoded = decode_or_reject(block, schema, dataset.options)
            decoded, schema = settle(decoded, block, schema, dataset.options)
            if decoded.table.num_rows:
                return schema
    return schema


def _scanned(
    dataset: Dataset, units: Sequence[Unit], schema: pa.Schema, num_threads: int, budget: int
) -> pa.Schema:
    """The types of everything."""
    known = Known(schema)
    tasks = (Task(Item(block)) for unit in units for block in dataset.blocks(unit))
    ahead: Prefetcher[Task, Decoded] = Prefetcher(
        tasks,
        lambda task: decode_task(task, known, dataset.options),
        num_threads=num_threads,
        budget=budget,
    )
    try:
        for task, decoded in ahead:
            _, known.schema = settle(decoded, task.item.content, known.schema, dataset.options)
    finally:
        ahead.close()
    return known.schema


def _contents(dataset: Dataset, order: Order, group: int) -> Iterator[Block | Window]:
    """The blocks of a group, or under a shuffle the windows of them."""
    units = [order.units[index] for index in order.groups[group]]
    blocks = (block for unit in units for block in dataset.blocks(unit))
    if order.seed is None:
        yield from blocks
        return
    held: list[Block] = []
    size = window = 0
    for block in blocks:
        held.append(block)
        size += block.weight
        if size >= dataset.window_bytes:
            yield Window(tuple(held), order.window_seed(group, window), dataset.options)
            held, size, window = [], 0, window + 1
    if held:
        yield Window(tuple(held), order.window_seed(group, window), dataset.options)
