"""JSON documents of any size, cut into rows without parsing.

A document is one array of objects, or objects after each other. numpy finds quotes, brackets and
commas; strings are masked out, and the bracket depth tells where a row ends. There each row becomes
a line, without line ends of its own, and a block is read like one of JSON lines. Only a block of a
document is in memory at a time, plus one row where that is larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import Block, InputFile, Unit
from fast_axolotl.reading.json_lines import json_block
from fast_axolotl.reading.lines import BOM, Lines
from fast_axolotl.reading.storage import Supply

_COMMA = ord(",")
_STEP = np.zeros(256, dtype=np.int8)
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1
_IS_MARK = _STEP != 0
_IS_MARK[_COMMA] = True
_ONE_LINE = bytes.maketrans(b"\n", b"\t")
"""White space for white space; inside of a string both are an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonDocument(InputFile):
    """One JSON document, or several after each other."""

    def blocks(self, unit: Unit) -> Iterator[Block]:
        text = Supply(self.source, self.compression, self.options.block_bytes)
        text.drop(len(BOM) * text.held.startswith(BOM))
        text.drop(len(text.held) - len(text.held.lstrip()))
        is_array, row, is_closed = text.held.startswith(b"["), 1, False
        text.drop(int(is_array))
        while not is_closed:
            # Escapes are taken out of the way from left to right, as a parser would.
            held = text.held.translate(_ONE_LINE)
            raw = np.frombuffer(held.replace(rb"\\", b"--").replace(rb"\"", b"--"), dtype=np.uint8)
            marks = np.flatnonzero(_IS_MARK[raw])
            quotes = np.flatnonzero(raw == ord('"'))
            marks = marks[np.searchsorted(quotes, marks) % 2 == 0]
            kinds = raw[marks]
            depths = np.cumsum(_STEP[kinds], dtype=np.int64)
            ends = marks[depths < 0]
            is_closed = is_array and len(ends) > 0
            stop = int(ends[0]) if is_closed else len(raw)
            is_cut = (kinds == _COMMA) if is_array else (_STEP[kinds] < 0)
            cuts = marks[is_cut & (depths == 0) & (marks < stop)]
            if not is_closed:
                stop = int(cuts[-1]) + 1 if len(cuts) else 0
            if stop:
                data = np.frombuffer(held, dtype=np.uint8, count=stop).copy()
                if is_array:
                    data[cuts] = ord("\n")
                else:
                    data = np.insert(data, cuts + 1, ord("\n"))
                yield self._block(data.tobytes(), row)
                row += len(cuts)
                text.drop(stop)
            if not is_closed:
                text.advance(0)
                if text.ended:
                    break
        text.drop(int(is_closed))
        while not text.ended and not text.held.strip():
            text.advance(len(text.held))
        if text.held.strip() or is_array > is_closed:
            open_part = "array" if is_array else "last object"
            cause = f"the {open_part} is not closed: the file is truncated"
            if is_closed:
                cause = "there is text after the end of the array"
            message = f"{cause}; fix the file, or replace it with an intact copy"
            raise DataError(message, path=self.source.path, place=f"row {row}")

    def _block(self, data: bytes, row: int) -> Block:
        def place(at: int) -> tuple[str, str]:
            return self.source.path, f"row {row + data.count(10, 0, at)}"

        rows = Lines(data=data, stop=len(data), place=place)
        return json_block(len(data), lambda: rows, self.options)
