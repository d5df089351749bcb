"""Numbers in CSV: only where every value of a column is a plain one.

A plain integer prints back as it was written; a plain decimal has no leading zero. So "08123" is
text, and its column with it. Empty fields are null in a number column, and stay empty text in a
text column. Nothing else is guessed: dates, booleans and "NA" are text.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["typed"]

_DECIMAL = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_LONG_INTEGER = r"^-?[0-9]{16,}$"
"""Integers that a float might round."""


def typed(table: pa.Table, schema: pa.Schema | None) -> pa.Table:
    """Text columns turned into numbers where the values, and what is known so far, allow it."""
    columns = []
    for name, column in zip(table.column_names, table.columns, strict=True):
        known = schema.field(name).type if schema is not None and name in schema.names else None
        is_text = known is not None and pa.types.is_string(known)
        columns.append(column if is_text else _as_numbers(column, known))
    return pa.Table.from_arrays(columns, names=table.column_names)


def _as_numbers(column: pa.ChunkedArray, known: pa.DataType | None) -> pa.ChunkedArray:
    if len(column) == 0:
        return pa.chunked_array([], type=known or pa.null())
    filled = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
    if filled.null_count == len(filled):
        return pa.chunked_array([pa.nulls(len(column), known or pa.null())])
    integers = None if known is not None and pa.types.is_floating(known) else _as_integers(filled)
    if integers is not None:
        return integers
    decimals = _as_decimals(filled)
    return column if decimals is None else decimals


def _as_integers(values: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Plain integers: those that print back as they were written."""
    try:
        integers = values.cast(pa.int64())
    except pa.ArrowException:
        return None
    return integers if integers.cast(pa.string()).equals(values) else None


def _as_decimals(values: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Plain decimals, unless one is an integer that a float cannot hold."""
    if not pc.all(pc.match_substring_regex(values, _DECIMAL)).as_py():
        return None
    if pc.any(pc.match_substring_regex(values, _LONG_INTEGER)).as_py():
        return None
    try:
        decimals = values.cast(pa.float64())
    except pa.ArrowException:
        return None
    return decimals if pc.all(pc.is_finite(decimals)).as_py() else None
