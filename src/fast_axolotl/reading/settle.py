"""One schema for all batches: each block's rows brought to the types known so far.

Workers decode a block under whatever schema was known when they began; the consumer then joins and
casts in row order, so the types of a batch depend on the rows before it and never on thread timing.
Where the joined type needs the original text (a mixed array, JSON text, a CSV number that turned
out to be text), the block is decoded once more under the joined schema.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import Block, Decoded, ReadOptions, Rejection, decode_or_reject
from fast_axolotl.reading.schema import (
    MIXED,
    TypeClash,
    conform,
    is_json_text,
    join_schemas,
)

__all__ = ["Window", "is_joinable", "settle"]

_ATTEMPTS = 4
"""Each attempt widens at least one column for good, and a clash that remains is a true one."""


@dataclass(frozen=True, slots=True)
class Window:
    """Blocks whose rows are shuffled together."""

    blocks: tuple[Block, ...]
    seed: tuple[int, ...]
    options: ReadOptions
    num_rows: int | None = None

    @property
    def weight(self) -> int:
        return sum(block.weight for block in self.blocks)

    @property
    def text_wins(self) -> bool:
        return any(block.text_wins for block in self.blocks)

    def decode(self, schema: pa.Schema | None) -> Decoded:
        known = schema if schema is not None else pa.schema([])
        tables: list[pa.Table] = []
        rejections: list[Rejection] = []
        for block in self.blocks:
            decoded = decode_or_reject(block, known, self.options)
            decoded, known = settle(decoded, block, known, self.options)
            tables.append(decoded.table)
            rejections += decoded.rejections
        if any(not is_joinable(table, known) for table in tables):
            return self.decode(known)
        table = pa.concat_tables([conform(table, known) for table in tables])
        order = np.random.default_rng(self.seed).permutation(table.num_rows)
        return Decoded(_taken(table.combine_chunks(), pa.array(order)), tuple(rejections))


def settle(
    decoded: Decoded, block: Block, known: pa.Schema, options: ReadOptions
) -> tuple[Decoded, pa.Schema]:
    """The rows under the joined schema, and that schema."""
    for attempt in range(_ATTEMPTS):
        table = decoded.table
        if table.num_columns == 0 and table.num_rows == 0:
            return Decoded(known.empty_table(), decoded.rejections), known
        try:
            joined = join_schemas(known, table.schema, text_wins=block.text_wins)
            if attempt:
                table = _by_value(table, joined)
            if not _needs_source(table.schema, joined):
                return Decoded(conform(table, joined), decoded.rejections), joined
            known = joined
        except TypeClash as clash:
            if attempt:
                known, decoded = _resolve(clash, decoded, known, block, options)
                continue
        decoded = decode_or_reject(block, known, options)
    raise DataError("the types of this block keep changing; please report this file")


def is_joinable(table: pa.Table, schema: pa.Schema) -> bool:
    """Whether rows that were settled before ``schema`` was known can be brought to it by casts."""
    if _needs_source(table.schema, schema):
        return False
    try:
        conform(table, schema)
    except TypeClash:
        return False
    return True


def _taken(table: pa.Table, order: pa.Array) -> pa.Table:
    """``take``, for views by way of plain columns: pyarrow has no kernel for them."""
    plain = pa.schema([field.with_type(_without_views(field.type)) for field in table.schema])
    if plain.equals(table.schema):
        return table.take(order)
    return table.cast(plain).take(order).cast(table.schema)


def _without_views(kind: pa.DataType) -> pa.DataType:
    if kind.equals(pa.string_view()):
        return pa.large_string()
    if kind.equals(pa.binary_view()):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([inner.with_type(_without_views(inner.type)) for inner in kind])
    if pa.types.is_list(kind):
        return pa.list_(_without_views(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_without_views(kind.value_type))
    return kind


def _needs_source(found: pa.Schema, joined: pa.Schema) -> bool:
    """Whether a cast would not do: the joined type holds the text of the values."""
    return any(_is_text_of_source(joined.field(column.name), column) for column in found)


def _is_text_of_source(joined: pa.Field, found: pa.Field) -> bool:
    if joined.type == MIXED:
        return bool(found.type != MIXED)
    if is_json_text(joined):
        return not is_json_text(found)
    return bool(pa.types.is_string(joined.type) and _is_number(found.type))


def _by_value(table: pa.Table, joined: pa.Schema) -> pa.Table:
    """JSON text of the values, where a block has no text of its own: Parquet and Arrow."""
    for index, column in enumerate(table.schema):
        target = joined.field(column.name)
        if _is_text_of_source(target, column) and (target.type == MIXED or is_json_text(target)):
            text = _as_json_text(table.column(index))
            if target.type == MIXED:
                text = pa.ExtensionArray.from_storage(MIXED, text)
            table = table.set_column(index, target, text)
    return table


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _resolve(
    clash: TypeClash, decoded: Decoded, known: pa.Schema, block: Block, options: ReadOptions
) -> tuple[pa.Schema, Decoded]:
    """The last word on a clash that decoding again did not remove."""
    if options.on_conflict != "json":
        raise clash.error(getattr(block, "path", "") or getattr(block, "label", ""))
    marked = clash.as_json_text()
    table = decoded.table
    column = table.schema.get_field_index(clash.column)
    text = _as_json_text(table.column(column))
    table = table.set_column(column, marked, text)
    schema = known.set(known.get_field_index(clash.column), marked)
    return schema, Decoded(table, decoded.rejections)


def _as_json_text(column: pa.ChunkedArray) -> pa.Array:
    values: Sequence[object] = column.to_pylist()
    texts = [
        None if value is None else json.dumps(value, ensure_ascii=False, default=str)
        for value in values
    ]
    return pa.array(texts, type=pa.string())
