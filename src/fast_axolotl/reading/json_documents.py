"""JSON documents of any length.

A document is one array of objects, one object, or several objects after each other. Its elements
are found without parsing: numpy locates quotes, brackets and commas, strings are masked out, and
the bracket depth says where an element ends. So only a block of a document is in memory at a time,
plus one element where that is larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import Block, ReadOptions, Unit
from fast_axolotl.reading.json_lines import json_block
from fast_axolotl.reading.lines import BOM, Lines, whole_file
from fast_axolotl.reading.storage import Source, Supply

_Ints = npt.NDArray[np.int64]

_WHITE = b" \t\r\n"
_NEWLINE, _SPACE, _QUOTE, _COMMA, _BACKSLASH = 10, 32, 34, 44, 92

_STEP = np.zeros(256, dtype=np.int8)
_STEP[[ord("["), ord("{")]] = 1
_STEP[[ord("]"), ord("}")]] = -1

_IS_MARK = _STEP != 0
_IS_MARK[[_NEWLINE, _COMMA]] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonDocument:
    """One JSON document, or several after each other."""

    source: Source
    compression: str | None
    options: ReadOptions
    schema: pa.Schema | None = None

    def units(self, file: int) -> list[Unit]:
        return whole_file(self.source, self.compression, file)

    def blocks(self, unit: Unit) -> Iterator[Block]:
        cutter = _DocumentCutter(self.source, self.compression, self.options.block_bytes)
        for rows in cutter.run():
            yield json_block(self.source.path, len(rows.data), lambda rows=rows: rows, self.options)  # type: ignore[misc]


def _marks(text: bytes) -> tuple[_Ints, npt.NDArray[np.uint8], _Ints]:
    """Where brackets, commas and line ends outside of strings are, which they are, and the depth
    behind them."""
    raw = np.frombuffer(text, dtype=np.uint8)
    quotes = np.flatnonzero(raw == _QUOTE)
    suspects = quotes[(quotes > 0) & (raw[quotes - 1] == _BACKSLASH)]
    if len(suspects):
        # A quote is escaped when an odd number of backslashes stands right before it.
        slashes = np.flatnonzero(raw == _BACKSLASH)
        starts_run = np.concatenate([[True], np.diff(slashes) > 1])
        run_start = np.maximum.accumulate(np.where(starts_run, slashes, 0))
        length = suspects - run_start[np.searchsorted(slashes, suspects - 1)]
        escaped = suspects[length % 2 == 1]
        quotes = quotes[~np.isin(quotes, escaped, assume_unique=True)]
    marks = np.flatnonzero(_IS_MARK[raw])
    marks = marks[np.searchsorted(quotes, marks) % 2 == 0]
    return marks, raw[marks], np.cumsum(_STEP[raw[marks]], dtype=np.int64)


class _DocumentCutter:
    """Reads a document in growing steps and gives it back in blocks of whole elements."""

    def __init__(self, source: Source, compression: str | None, block_bytes: int) -> None:
        self._path = source.path
        self._text = Supply(source, compression, block_bytes)
        self._line = 1

    def run(self) -> Iterator[Lines]:
        if self._text.held.startswith(BOM):
            self._text.drop(len(BOM))
        self._skip_white()
        is_array = self._text.held.startswith(b"[")
        self._drop(int(is_array))
        while True:
            marks, kinds, depths = _marks(self._text.held)
            breaks = marks[kinds == _NEWLINE]
            if is_array:
                cuts, ends = marks[(kinds == _COMMA) & (depths == 0)], marks[depths < 0]
                if len(ends):
                    cuts = cuts[cuts < ends[0]]
                    yield from self._emit(breaks, cuts, int(ends[0]), is_array=True, is_last=True)
                    break
            else:
                cuts = marks[(_STEP[kinds] < 0) & (depths == 0)] + 1
            if len(cuts):
                yield from self._emit(breaks, cuts[:-1], int(cuts[-1]), is_array=is_array)
            self._text.advance(0)
            if self._text.ended:
                if is_array:
                    raise self._error("the array is not closed: the file is truncated")
                break
        self._skip_white()
        while is_array and not self._text.held and not self._text.ended:
            self._text.advance(0)
            self._skip_white()
        if self._text.held:
            raise self._error(
                "there is text after the end of the array"
                if is_array
                else "the last object is not closed: the file is truncated"
            )

    def _emit(
        self, breaks: _Ints, cuts: _Ints, stop: int, *, is_array: bool, is_last: bool = False
    ) -> Iterator[Lines]:
        """Rows up to ``stop``, which are dropped from the text, as a line each."""
        original, line = self._text.held[: stop + is_array], self._line
        raw = np.frombuffer(original, dtype=np.uint8).copy()
        raw[breaks[breaks < stop]] = _SPACE
        if is_array:
            raw[cuts] = raw[stop] = _NEWLINE
            has_value = np.logical_or.reduceat(raw > _SPACE, np.append(0, cuts + 1))
            if not has_value.all() and (len(cuts) or not is_last):
                raise self._error("a value is missing between two commas")
        elif (raw[cuts] > _SPACE).any():
            raise self._error("there is no white space between two objects")
        raw[cuts] = _NEWLINE
        data = raw.tobytes()
        yield Lines(data=data, stop=len(data), first_line=lambda: line, original=original)
        self._drop(len(original))

    def _drop(self, length: int) -> None:
        self._line += self._text.held.count(b"\n", 0, length)
        self._text.drop(length)

    def _skip_white(self) -> None:
        self._drop(len(self._text.held) - len(self._text.held.lstrip(_WHITE)))

    def _error(self, cause: str) -> DataError:
        place = f"line {self._line}"
        message = f"{cause}; fix the file, or replace it with an intact copy"
        return DataError(message, path=self._path, place=place)
