"""JSON documents of any length.

A document is one array of objects, one object, several objects after each other, or an object that
holds the array under a named field. Its elements are found without parsing: numpy locates quotes,
brackets and commas, strings are masked out, and the bracket depth says where an element ends. So
only a block of a document is in memory at a time, plus one element where that is larger.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import Block, ReadOptions, Unit
from fast_axolotl.reading.json_exact import JsonRows
from fast_axolotl.reading.json_lines import JsonBlock
from fast_axolotl.reading.lines import BOM, whole_file
from fast_axolotl.reading.storage import Source, Supply

_Ints = npt.NDArray[np.int64]

_WHITE = b" \t\r\n"
_SPACE, _QUOTE, _COMMA, _BACKSLASH = 32, 34, 44, 92

_STEP = np.zeros(256, dtype=np.int8)
_STEP[[ord("["), ord("{")]] = 1
_STEP[[ord("]"), ord("}")]] = -1


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
        cutter = _DocumentCutter(self.source, self.compression, self.options)
        for rows in cutter.run():
            yield JsonBlock(
                path=self.source.path,
                weight=len(rows.data),
                load=lambda rows=rows: rows,  # type: ignore[misc]
                options=self.options,
            )


class _Structure:
    """Where the brackets and commas of a text are, strings masked out, and how deep they lie."""

    def __init__(self, text: bytes) -> None:
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
        self.quotes: _Ints = quotes
        """Positions of the quotes that open or close a string."""
        marks = np.flatnonzero((_STEP[raw] != 0) | (raw == _COMMA))
        outside = np.searchsorted(self.quotes, marks) % 2 == 0
        self.marks: _Ints = marks[outside]
        """Positions of brackets and commas outside strings."""
        self.kinds = raw[self.marks]
        """The bytes at ``marks``."""
        self.steps = _STEP[self.kinds].astype(np.int64)
        """+1 for an opening bracket, -1 for a closing one."""
        self.depths: _Ints = np.cumsum(self.steps)
        """Depth after each mark."""

    def separators(self) -> _Ints:
        """Commas at depth 0."""
        found: _Ints = self.marks[(self.kinds == _COMMA) & (self.depths == 0)]
        return found

    def closings(self) -> _Ints:
        """Brackets that bring the depth back to 0."""
        found: _Ints = self.marks[(self.steps < 0) & (self.depths == 0)]
        return found

    def end(self) -> int | None:
        """The bracket that closes what was open before the text began."""
        below = np.flatnonzero(self.depths < 0)
        return int(self.marks[below[0]]) if len(below) else None


class _DocumentCutter:
    """Reads a document in growing steps and gives it back in blocks of whole elements."""

    def __init__(self, source: Source, compression: str | None, options: ReadOptions) -> None:
        self._path = source.path
        self._field = options.json_field
        self._supply = Supply(source, compression, options.block_bytes)
        self._line = 1

    @property
    def _text(self) -> bytes:
        return self._supply.held

    def run(self) -> Iterator[JsonRows]:
        if self._text.startswith(BOM):
            self._supply.drop(len(BOM))
        self._skip_white()
        if self._field is not None:
            self._drop_to_array(self._field)
            yield from self._elements()
            while _Structure(self._text).end() is None:
                if not self._more():
                    raise self._error("the document is not closed: the file is truncated")
            return
        if self._text.startswith(b"["):
            self._drop(1)
            yield from self._elements()
            self._skip_white()
            while not self._text and self._more():
                self._skip_white()
            if self._text:
                raise self._error("there is text after the end of the array")
            return
        has_more = True
        while has_more:  # objects with nothing but white space between them
            closings = _Structure(self._text).closings()
            if len(closings):
                yield from self._emit(closings[:-1] + 1, int(closings[-1]) + 1, last=False)
            has_more = self._more()
        if self._text.strip():
            raise self._error("the last object is not closed: the file is truncated")

    def _elements(self) -> Iterator[JsonRows]:
        """The elements of an array whose opening bracket has been dropped."""
        while True:
            structure = _Structure(self._text)
            end = structure.end()
            if end is not None:
                inside = structure.separators()
                yield from self._emit(inside[inside < end], end, last=True)
                self._drop(1)
                return
            separators = structure.separators()
            if len(separators):
                yield from self._emit(separators[:-1], int(separators[-1]), last=False)
                self._drop(1)
            if not self._more():
                raise self._error("the array is not closed: the file is truncated")

    def _emit(self, cuts: _Ints, stop: int, *, last: bool) -> Iterator[JsonRows]:
        """Rows up to ``stop``, which are dropped from the text; separators become spaces."""
        raw = np.frombuffer(self._text, dtype=np.uint8)[:stop].copy()
        raw[cuts[raw[cuts] == _COMMA]] = _SPACE
        edges = [0, *cuts.tolist(), stop]
        data, line = raw.tobytes(), self._line

        def spans() -> Iterator[tuple[int, int]]:
            for left, right in pairwise(edges):
                yield right - len(data[left:right].lstrip(_WHITE)), right

        if data.strip():
            yield JsonRows(
                data=data,
                stop=len(data),
                spans=spans,
                first_line=lambda: line,
                one_per_line=False,
                count=len(edges) - 1,
            )
        elif not last or len(cuts):
            raise self._error("a value is missing between two commas")
        self._drop(stop)

    def _drop_to_array(self, name: str) -> None:
        """Drops the text up to and with the bracket that opens the array of a top-level field."""
        key = json.dumps(name, ensure_ascii=False).encode()
        pattern = re.compile(re.escape(key) + rb"\s*:\s*\[")
        while True:
            structure = _Structure(self._text)
            for match in pattern.finditer(self._text):
                before = int(np.searchsorted(structure.marks, match.start())) - 1
                opens = int(np.searchsorted(structure.quotes, match.start())) % 2 == 0
                if opens and before >= 0 and structure.depths[before] == 1:
                    self._drop(match.end())
                    return
            if not self._more():
                raise self._error(
                    f"the document has no top-level field {name!r} that is an array; check "
                    "json_field"
                )

    def _more(self) -> bool:
        """Reads on; whether there was more."""
        self._supply.advance(0)
        return not self._supply.ended

    def _drop(self, length: int) -> None:
        self._line += self._text.count(b"\n", 0, length)
        self._supply.drop(length)

    def _skip_white(self) -> None:
        self._drop(len(self._text) - len(self._text.lstrip(_WHITE)))

    def _error(self, cause: str) -> DataError:
        place = f"line {self._line}"
        message = f"{cause}; fix the file, or replace it with an intact copy"
        return DataError(message, path=self._path, place=place)
