"""Lines and CSV records found and copied 64 bytes at a time.

One vector comparison gives a word whose bits say where a byte stands among 64. The rest is
arithmetic on such words: the prefix xor of the quotes' bits has a bit for every byte inside quotes,
so line ends and delimiters that count are an ``and`` away, and the check that every quote opens or
closes a field is a shift. See Langdale and Lemire, "Parsing gigabytes of JSON per second", 2019.

Data has at least ``PADDING`` bytes, and every output as many to spare (see ``vectors``).

Cost on one core with AVX2: 10 GB/s to cut records, 3 to 6 GB/s to copy fields or lines.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from fast_axolotl.kernels.jit import (
    BYTES,
    INT32,
    MUTABLE_BYTES,
    MUTABLE_INT32,
    MUTABLE_INT64,
    inlined,
    kernel,
)
from fast_axolotl.kernels.vectors import (
    PADDING,
    bits,
    compare,
    copy_block,
    count_bits,
    first_bit,
    first_bits,
    leading_zeros,
)

_NEWLINE, _RETURN = ord("\n"), ord("\r")
_ZERO, _ONE, _LAST = np.uint64(0), np.uint64(1), np.uint64(63)
_DOUBLINGS = tuple(np.uint64(1 << power) for power in range(6))


@kernel(types.int64(BYTES, types.int64, types.int64, types.int64))
def count_byte(data: Any, start: int, stop: int, byte: int) -> int:
    """How often a byte occurs in ``data[start:stop]``."""
    total = 0
    for base in range(start, stop, PADDING):
        total += count_bits(bits(data, base, byte) & first_bits(stop - base))
    return total


@kernel(types.int64(BYTES, types.int64, types.int64, MUTABLE_BYTES, MUTABLE_INT32))
def copy_lines(data: Any, start: int, stop: int, out: Any, offsets: Any) -> int:
    """Copies the lines of ``data[start:stop]`` without their ends, and gives their number.

    Line ``i`` becomes ``out[offsets[i]:offsets[i + 1]]``. A line ends at ``\\n`` or ``\\r\\n``; a
    last one without an end is kept as it is.
    """
    at, to, row, line = start, 0, 0, start
    offsets[0] = 0
    while at < stop:
        is_whole = at + PADDING <= data.size and to + PADDING <= out.size
        length, is_end = 1, data[at] == _NEWLINE
        if is_whole:
            copy_block(out, to, data, at)
            length = min(PADDING, stop - at)
            found = compare(data, at, _NEWLINE) & first_bits(length)
            is_end = found != 0
            length = first_bit(found) if is_end else length
        elif is_end:
            length = 0
        else:
            out[to] = data[at]
        at, to = at + length, to + length
        if is_end:
            if at > line and data[at - 1] == _RETURN:
                to -= 1
            at += 1
            line = at
            row += 1
            offsets[row] = to
    if line < stop:
        row += 1
        offsets[row] = to
    return row


@kernel(
    types.UniTuple(types.int64, 3)(
        BYTES,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        MUTABLE_INT64,
    )
)
def cut_records(
    data: Any, start: int, stop: int, quote: int, delimiter: int, target: int, step: int, edges: Any
) -> tuple[int, int, int]:
    """Cuts ``data[start:stop]``, which begins with a record, behind its last line end.

    Gives the end of the last whole record, or -1 where a quote neither opens nor closes a field;
    whether a quote is open at ``stop``; and the number of edges. An edge is where the first record
    begins of which the line before ends at ``target`` or later; the next one is looked for ``step``
    bytes behind it.
    """
    end, num_edges = start, 0
    is_open, is_pending, was_beside, irregular = _ZERO, _ZERO, _ONE, _ZERO
    for base in range(start, stop, PADDING):
        valid = first_bits(stop - base)
        quotes, delimiters = bits(data, base, quote) & valid, bits(data, base, delimiter)
        newlines, returns = bits(data, base, _NEWLINE), bits(data, base, _RETURN)
        inside = _inside(quotes, is_open)
        beside = quotes | delimiters | newlines | returns
        closing = quotes & ~inside
        irregular |= quotes & inside & ~((beside << _ONE) | was_beside)
        irregular |= ((closing << _ONE) | is_pending) & ~beside & valid
        is_open, is_pending, was_beside = inside >> _LAST, closing >> _LAST, beside >> _LAST
        newlines &= valid & ~inside
        if newlines == 0:
            continue
        end = base + 64 - leading_zeros(newlines)
        while target < end and num_edges < edges.size:
            later = newlines
            if target > base:
                later &= ~first_bits(target - base)
            edges[num_edges] = base + first_bit(later) + 1
            target = edges[num_edges] + step
            num_edges += 1
    return -1 if irregular else end, np.int64(is_open), num_edges


@kernel(
    types.int64(
        BYTES,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        MUTABLE_INT32,
        MUTABLE_INT32,
        MUTABLE_INT64,
    )
)
def find_fields(
    data: Any,
    start: int,
    stop: int,
    quote: int,
    delimiter: int,
    num_columns: int,
    starts: Any,
    ends: Any,
    sizes: Any,
) -> int:
    """Where the fields of ``data[start:stop]`` are, row by row, and the number of rows.

    Quotes around a field are left out, and so are empty lines. ``sizes`` receives the bytes of each
    column. Gives -1 where anything is unusual: a quote out of place, a ``\\r`` that ends a line by
    itself, another number of fields than columns, an open quote at the end.
    """
    index, column, begin = 0, 0, start
    is_open, is_pending, was_beside, was_return = _ZERO, _ZERO, _ONE, _ZERO
    irregular = _ZERO
    for base in range(start, stop, PADDING):
        valid = first_bits(stop - base)
        quotes, delimiters = bits(data, base, quote) & valid, bits(data, base, delimiter)
        newlines, returns = bits(data, base, _NEWLINE), bits(data, base, _RETURN)
        inside = _inside(quotes, is_open)
        outside = valid & ~inside
        beside = quotes | delimiters | newlines | returns
        closing = quotes & ~inside
        returns &= outside
        irregular |= quotes & inside & ~((beside << _ONE) | was_beside)
        irregular |= ((closing << _ONE) | is_pending) & ~beside & valid
        irregular |= ((returns << _ONE) | was_return) & ~newlines & valid
        is_open, is_pending, was_beside = inside >> _LAST, closing >> _LAST, beside >> _LAST
        was_return = returns >> _LAST
        found = (newlines | delimiters) & outside
        while found:
            at = base + first_bit(found)
            is_line_end = data[at] == _NEWLINE
            found &= found - _ONE
            end = at
            if is_line_end and end > begin and data[end - 1] == _RETURN:
                end -= 1
            if is_line_end and column == 0 and end == begin:
                begin = at + 1
                continue
            if is_line_end != (column == num_columns - 1) or index >= starts.size:
                return -1
            if not _put_field(data, begin, end, quote, index, column, starts, ends, sizes):
                return -1
            index += 1
            column = 0 if is_line_end else column + 1
            begin = at + 1
    if irregular | is_open or (stop > start and data[stop - 1] == _RETURN):
        return -1
    if begin < stop or column:
        if column != num_columns - 1 or index >= starts.size:
            return -1
        if not _put_field(data, begin, stop, quote, index, column, starts, ends, sizes):
            return -1
        index += 1
    return index // num_columns


@kernel(
    types.void(
        BYTES,
        INT32,
        INT32,
        types.int64,
        types.int64,
        types.int64,
        types.int64,
        MUTABLE_BYTES,
        MUTABLE_INT32,
    )
)
def copy_fields(
    data: Any,
    starts: Any,
    ends: Any,
    column: int,
    num_columns: int,
    num_rows: int,
    quote: int,
    out: Any,
    offsets: Any,
) -> None:
    """Copies one column of the fields found by ``find_fields``; two quotes become one."""
    to = 0
    offsets[0] = 0
    for row in range(num_rows):
        index = row * num_columns + column
        at, end = np.int64(starts[index]), np.int64(ends[index])
        is_quoted = at > 0 and data[at - 1] == quote
        is_open = _ONE
        if end + PADDING <= data.size and to + end - at + PADDING <= out.size:
            while at < end:
                stop = min(at + PADDING, end)
                if is_quoted:
                    quotes = compare(data, at, quote) & first_bits(stop - at)
                    inside = _inside(quotes, is_open)
                    is_open = inside >> _LAST
                    dropped, base = quotes & inside, at  # the second of each two
                    while dropped:
                        length = base + first_bit(dropped) - at
                        copy_block(out, to, data, at)
                        at, to = at + length + 1, to + length
                        dropped &= dropped - _ONE
                copy_block(out, to, data, at)
                at, to = stop, to + stop - at
        while at < end:
            is_second = is_quoted and data[at] == quote
            out[to] = data[at]
            at, to = at + 1 + is_second, to + 1
        offsets[row + 1] = to


@inlined
def _put_field(
    data: Any,
    begin: int,
    end: int,
    quote: int,
    index: int,
    column: int,
    starts: Any,
    ends: Any,
    sizes: Any,
) -> bool:
    """Notes a field without its quotes; false where it has but one."""
    if begin < end and data[begin] == quote:
        if end - begin < 2 or data[end - 1] != quote:
            return False
        begin, end = begin + 1, end - 1
    starts[index], ends[index] = begin, end
    sizes[column] += end - begin
    return True


@inlined
def _inside(quotes: Any, is_open: Any) -> Any:
    """Bits from each opening quote up to the byte before its closing one."""
    found = quotes
    for shift in _DOUBLINGS:
        found ^= found << shift
    return found ^ (_ZERO - is_open)
