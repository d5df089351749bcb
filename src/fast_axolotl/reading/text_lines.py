"""Plain text: a row per line, one column ``text``.

Lines end at ``\\n`` or ``\\r\\n``, which are removed; an empty line is an empty row; a last line
without an end counts. Built with a handful of numpy passes over the bytes, no Python per line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import Block, Decoded, ReadOptions, Rejection, Unit
from fast_axolotl.reading.lines import LineRange, Lines, cut_lines, line_at, line_units
from fast_axolotl.reading.storage import Source

__all__ = ["SCHEMA", "TextBlock", "TextFile"]

SCHEMA = pa.schema([("text", pa.string())])

_NEWLINE, _RETURN = 10, 13

_Bytes = npt.NDArray[np.uint8]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """A text file."""

    source: Source
    compression: str | None
    options: ReadOptions
    schema: pa.Schema = SCHEMA
    names: tuple[str, ...] = ("text",)

    def units(self, file: int) -> list[Unit]:
        return line_units(self.source, self.compression, file, self.options.unit_bytes)

    def blocks(self, unit: Unit) -> Iterator[Block]:
        if self.compression is None:
            yield self._block(unit.num_bytes, LineRange(self.source, unit.start, unit.stop).load)
            return
        for lines in cut_lines(self.source, self.compression, self.options.block_bytes):
            yield self._block(lines.stop - lines.start, lambda lines=lines: lines)  # type: ignore[misc]

    def _block(self, weight: int, load: Callable[[], Lines]) -> Block:
        return TextBlock(file=self, weight=weight, load=load)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBlock:
    """A block of lines."""

    file: TextFile
    weight: int
    load: Callable[[], Lines]
    text_wins: bool = False
    num_rows: int | None = None

    def decode(self, schema: pa.Schema | None) -> Decoded:
        lines = self.load()
        array = _split(lines)
        try:
            array.validate(full=True)
        except pa.ArrowInvalid:
            return self._without_bad_lines(array, lines.offset)
        return Decoded(pa.Table.from_arrays([array], schema=SCHEMA))

    def _without_bad_lines(self, array: pa.Array, offset: int) -> Decoded:
        kept: list[str] = []
        rejections: list[Rejection] = []
        first_line = line_at(self.file.source, self.file.compression, offset)
        for number, raw in enumerate(array.cast(pa.binary()).to_pylist(), first_line):
            try:
                kept.append(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                rejections.append(self._reject(number, error))
        return Decoded(pa.table({"text": kept}, schema=SCHEMA), tuple(rejections))

    def _reject(self, number: int, error: UnicodeDecodeError) -> Rejection:
        path, place = self.file.source.path, f"line {number}"
        cause = f"bytes that are not UTF-8 at byte {error.start} of the line"
        if self.file.options.on_error == "raise":
            cure = 'convert the file to UTF-8, or pass on_error="skip" to leave such lines out'
            raise DataError(f"{cause}; {cure}", path=path, place=place)
        return Rejection(path=path, place=place, reason=cause, num_rows=1)


def _split(lines: Lines) -> pa.Array:
    """A string array of the lines without their ends; not yet checked to be UTF-8."""
    data, start, stop, _ = lines
    is_open = stop > start and data[stop - 1] != _NEWLINE
    if is_open:
        data, start, stop = data[start:stop] + b"\n", 0, stop - start + 1
    raw = np.frombuffer(data, dtype=np.uint8)[start:stop]
    ends = np.flatnonzero(raw == _NEWLINE)
    with_ends = _string_array(np.concatenate([[0], ends + 1]), raw)
    if not len(ends) or not (raw[ends[ends > 0] - 1] == _RETURN).any():
        return pc.ascii_rtrim(with_ends, characters="\n")
    return _without_crlf(raw, ends, is_open)


def _without_crlf(raw: _Bytes, ends: _Ints, is_open: bool) -> pa.Array:
    """The same where lines end in ``\\r\\n``; the last one has no such end if it ``is_open``."""
    is_crlf = (ends > 0) & (raw[ends - 1] == _RETURN)
    is_crlf[-1] &= not is_open
    keep = raw != _NEWLINE
    keep[ends[is_crlf] - 1] = False
    removed = np.arange(1, len(ends) + 1) + np.cumsum(is_crlf)
    return _string_array(np.concatenate([[0], ends + 1 - removed]), raw[keep])


def _string_array(offsets: _Ints, data: _Bytes) -> pa.Array:
    small = len(data) < 2**31
    kind, width = (pa.string(), np.int32) if small else (pa.large_string(), np.int64)
    buffers = [None, pa.py_buffer(offsets.astype(width)), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers)
