"""JSON documents of any size, cut into elements without parsing.

A document is one array of objects, one object, or several objects after each other. Its elements
are found without parsing: numpy locates quotes, brackets and commas, strings are masked out, and
the bracket depth says where an element ends. There each element becomes a line, without line ends
of its own, so that a block is read like one of JSON lines. Only a block of a document is in memory
at a time, plus one element where that is larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import Block, ReadOptions, Unit
from fast_axolotl.reading.json_lines import json_block
from fast_axolotl.reading.lines import BOM, Lines, line_at, whole_file
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
        for rows in self._rows():
            yield json_block(self.source.path, len(rows.data), lambda rows=rows: rows, self.options)  # type: ignore[misc]

    def _rows(self) -> Iterator[Lines]:
        """Reads the document in growing steps and gives it back in blocks of whole elements."""
        text = Supply(self.source, self.compression, self.options.block_bytes)
        if text.held.startswith(BOM):
            text.drop(len(BOM))
        _skip_white(text)
        is_array = text.held.startswith(b"[")
        text.drop(int(is_array))
        is_closed = False
        while not is_closed:
            marks, kinds, depths = _marks(text.held)
            breaks, ends = marks[kinds == _NEWLINE], marks[depths < 0]
            if is_array:
                is_closed = len(ends) > 0
                cuts = marks[(kinds == _COMMA) & (depths == 0)]
                cuts = np.append(cuts[cuts < ends[0]], ends[0]) if is_closed else cuts
            else:
                cuts = marks[(_STEP[kinds] < 0) & (depths == 0)] + 1
            if len(cuts):
                yield self._lines(text, breaks, cuts, is_array, is_closed)
            if not is_closed:
                text.advance(0)
                if text.ended:
                    break
        if is_array and not is_closed:
            raise self._error(text, "the array is not closed: the file is truncated")
        _skip_white(text)
        while is_array and not text.held and not text.ended:
            text.advance(0)
            _skip_white(text)
        if text.held:
            raise self._error(
                text,
                "there is text after the end of the array"
                if is_array
                else "the last object is not closed: the file is truncated",
            )

    def _lines(
        self, text: Supply, breaks: _Ints, cuts: _Ints, is_array: bool, is_last: bool
    ) -> Lines:
        """The elements up to the last cut, each as a line; they are dropped from the text."""
        original = text.held[: int(cuts[-1]) + is_array]
        raw = np.frombuffer(original, dtype=np.uint8).copy()
        raw[breaks[breaks < len(raw)]] = _SPACE
        if not is_array:
            cuts = cuts[:-1]
            if (raw[cuts] > _SPACE).any():
                raise self._error(text, "there is no white space between two objects")
        raw[cuts] = _NEWLINE
        if is_array:
            has_value = np.logical_or.reduceat(raw > _SPACE, np.append(0, cuts[:-1] + 1))
            if not has_value.all() and (len(cuts) > 1 or not is_last):
                raise self._error(text, "a value is missing between two commas")
        data, first_line = raw.tobytes(), self._line_at(text.offset)
        text.drop(len(original))
        return Lines(data=data, stop=len(data), first_line=first_line, original=original)

    def _line_at(self, offset: int) -> Callable[[], int]:
        return partial(line_at, self.source, self.compression, offset)

    def _error(self, text: Supply, cause: str) -> DataError:
        message = f"{cause}; fix the file, or replace it with an intact copy"
        place = f"line {self._line_at(text.offset)()}"
        return DataError(message, path=self.source.path, place=place)


def _skip_white(text: Supply) -> None:
    text.drop(len(text.held) - len(text.held.lstrip(_WHITE)))


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
