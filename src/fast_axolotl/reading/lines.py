"""Text files, cut into units and blocks that end with a line.

A line belongs to the byte range in which it starts, so ranges can be read in any order and on any
rank, and together they give every line once. A range costs one read of its bytes plus the rest of
its last line; a line longer than a range leaves the ranges inside it empty. So ranges are several
times as long as the longest of the first lines. Compressed files have no random access: one unit,
cut as it is decompressed.

Plain text is a row per line, in one column ``text``. Lines end at ``\\n`` or ``\\r\\n``, which are
removed; an empty line is an empty row; a last line without an end counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pyarrow as pa

from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import Block, Decoded, InputFile, ReadOptions, Rejection, Unit
from fast_axolotl.reading.storage import Source, Supply, check_record, open_chunks

BOM = b"\xef\xbb\xbf"

_LINES_IN_UNIT = 16
"""A unit is so many times as long as the longest of the file's first lines."""

MOST_BLOCK_BYTES = 3 * 1024 * 1024
"""A tenth faster than 1 MiB, since fewer batches join two blocks. With 4 MiB, the allocator gives
back the pages of a file of two blocks after each pass."""

_CACHED_BYTES = 256 * 1024
"""What passes over all bytes take at a time, so that it stays in the processor's cache."""

_FEW_PLACES = _CACHED_BYTES // 256

_LEAST_PROBE_BYTES = 4 * 1024
_COUNT_CHUNK_BYTES = 4 * 1024 * 1024

_TEXT_SCHEMA = pa.schema([("text", pa.string())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Rows of text: ``data[start:stop]``; slicing it would copy it."""

    data: bytes
    start: int = 0
    stop: int
    place: Callable[[int], tuple[str, str]]
    """The file, and where in it, of an offset in ``data``; found only when it is asked for."""
    rejections: tuple[Rejection, ...] = ()
    """What had to be left out of them."""

    def spans(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each line begins, and where it ends: at its line feed, or where the text does."""
        ends = places(self.data, b"\n", self.start, self.stop)
        if self.stop > self.start and self.data[self.stop - 1] != ord("\n"):
            ends = np.append(ends, self.stop)
        return np.append(self.start, ends[:-1] + 1)[: len(ends)], ends


@dataclass(slots=True)
class BadRows:
    """Rows of a block that cannot be read: rejected where they are to be skipped, else an error."""

    path: str
    options: ReadOptions
    cure: str = "fix the row"
    rejections: list[Rejection] = field(default_factory=list)

    def add(self, place: str, cause: str) -> None:
        if self.options.on_error == "raise":
            cure = f'{self.cure}, or pass on_error="skip" to skip and count such rows'
            raise DataError(f"{cause}; {cure}", path=self.path, place=place) from None
        self.rejections.append(Rejection(path=self.path, place=place, reason=cause, num_rows=1))


def line_at(source: Source, compression: str | None, offset: int) -> int:
    """The number of the line at an offset of the decompressed file, from 1.

    Reads the file up to there, so it is only asked for when there is an error to place.
    """
    count = 1
    for chunk in open_chunks(source, compression, _COUNT_CHUNK_BYTES):
        count += count_byte(chunk, b"\n", 0, min(offset, len(chunk)))
        offset -= len(chunk)
        if offset <= 0:
            break
    return count


def count_byte(data: bytes, byte: bytes, start: int, stop: int) -> int:
    """Several times faster than ``bytes.count``, where there are many."""
    return sum(int(np.count_nonzero(piece)) for _, piece in _equal(data, byte, start, stop))


def places(data: bytes, byte: bytes, start: int, stop: int) -> np.ndarray:
    """Where a byte stands in a part of the data."""
    found = [np.zeros(0, dtype=np.int64)]
    for at, is_here in _equal(data, byte, start, stop):
        count = np.count_nonzero(is_here)
        if count == 0:
            continue
        if count < _FEW_PLACES and len(is_here) == _CACHED_BYTES:
            # Twice as fast: only words of 64 bits that are not zero.
            words = np.flatnonzero(np.packbits(is_here).view(np.uint64))
            bits = np.flatnonzero(is_here.reshape(-1, 64)[words])
            found.append(at + 64 * words[bits // 64] + bits % 64)
        else:
            found.append(at + np.flatnonzero(is_here))
    return np.concatenate(found)


def _equal(data: bytes, byte: bytes, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
    """Which bytes are equal to one, a part after the other, and where the parts begin."""
    raw = np.frombuffer(data, dtype=np.uint8)[:stop]
    for at in range(start, stop, _CACHED_BYTES):
        yield at, raw[at : at + _CACHED_BYTES] == ord(byte)


def least_unit_bytes(head: bytes) -> int:
    """How long the units of a file should be at least, by its first lines."""
    return _LINES_IN_UNIT * max(map(len, head.split(b"\n")))


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFile(InputFile):
    """A file whose rows are lines."""

    least_unit_bytes: int = 0
    """Units are at least as long; see the function of this name."""

    def units(self, file: int) -> list[Unit]:
        """Byte ranges of a plain file, or the whole of a compressed one."""
        if self.compression is not None:
            return InputFile.units(self, file)
        num_bytes, step = self.source.num_bytes, max(self.options.unit_bytes, self.least_unit_bytes)
        return [
            Unit(file=file, start=start, stop=stop, num_bytes=stop - start)
            for start, stop in pairwise([*range(0, num_bytes, step), num_bytes])
        ]

    def lines(self, unit: Unit) -> Iterator[tuple[int, Callable[[], Lines]]]:
        """Each block's weight, and its lines: those of a plain file are read when they are asked
        for."""
        size = min(self.options.block_bytes, MOST_BLOCK_BYTES)
        if self.compression is None:
            for start in range(unit.start, unit.stop, size):
                stop = min(start + size, unit.stop)
                yield stop - start, partial(self._read, start, stop)
            return
        text = Supply(self.source, self.compression, size)
        while data := text.held:
            stop = len(data) if text.ended else data.rfind(b"\n") + 1
            if stop:
                yield stop, partial(self._lines, data, 0, stop, text.offset)
            text.advance(stop)

    def _lines(self, data: bytes, start: int, stop: int, offset: int) -> Lines:
        """Some lines of data that begins at an offset of the file."""
        if start == offset == 0 and stop and data.startswith(BOM):
            start = len(BOM)
        first_line = cache(partial(line_at, self.source, self.compression, offset))

        def place(at: int) -> tuple[str, str]:
            return self.source.path, f"line {first_line() + data.count(10, 0, at)}"

        return Lines(data=data, start=start, stop=stop, place=place)

    def _read(self, start: int, stop: int) -> Lines:
        """The lines that start in these bytes of a plain file."""
        source, begin = self.source, max(0, start - 1)
        # The last line ends behind the range: about as far as the first lines are long.
        longest, size = self.least_unit_bytes // _LINES_IN_UNIT, stop - start
        probe = min(max(longest, size // 64), size // 4)
        data = source.read_at(begin, stop - begin + probe)
        first = 0 if start == 0 else data.find(b"\n", 0, stop - begin) + 1
        if (start > 0 and first == 0) or begin + first >= stop:
            return self._lines(data, 0, 0, begin)
        end = data.find(b"\n", stop - begin - 1) + 1
        if not end:
            pieces, position, size = [data], begin + len(data), max(probe, _LEAST_PROBE_BYTES)
            while position < source.num_bytes and not pieces[-1].endswith(b"\n"):
                piece = source.read_at(position, size)
                pieces.append(piece[: piece.find(b"\n") + 1 or None])
                position += len(piece)
                check_record(position - stop, source.path, stop)
                size = min(size * 2, _COUNT_CHUNK_BYTES)
            data = b"".join(pieces)
        return self._lines(data, first, end or len(data), begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile(LineFile):
    schema: pa.Schema | None = _TEXT_SCHEMA
    names: tuple[str, ...] = ("text",)

    def blocks(self, unit: Unit) -> Iterator[Block]:
        for weight, load in self.lines(unit):
            yield Block(
                decode=partial(self._decode, load),
                weight=weight,
                count=lambda load=load: len(load().spans()[0]),  # type: ignore[misc]
                is_text=True,
            )

    def _decode(self, load: Callable[[], Lines], schema: pa.Schema | None) -> Decoded:
        from pyarrow import compute  # 20 ms that only text files need

        lines = load()
        text = pa.py_buffer(lines.data).slice(lines.start, lines.stop - lines.start)
        if lines.data.find(b"\r", lines.start, lines.stop) >= 0:
            text = pa.py_buffer(text.to_pybytes().replace(b"\r\n", b"\n"))
        size = len(text) - lines.data.endswith(b"\n", lines.start, lines.stop)
        edges = pa.py_buffer(np.array([0, size], dtype=np.int32))
        whole = pa.Array.from_buffers(pa.string(), 1, [None, edges, text])
        array = compute.split_pattern(whole, "\n").flatten()[: None if len(text) else 0]
        try:
            array.validate(full=True)
            return Decoded(pa.Table.from_arrays([array], schema=_TEXT_SCHEMA))
        except pa.ArrowInvalid:
            pass
        kept: list[str] = []
        bad = BadRows(self.source.path, self.options, "convert the file to UTF-8")
        for start, raw in zip(lines.spans()[0], array.cast(pa.binary()).to_pylist(), strict=True):
            try:
                kept.append(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                cause = f"invalid UTF-8 at byte {error.start} of the line"
                bad.add(lines.place(start)[1], cause)
        return Decoded(pa.table({"text": kept}, schema=_TEXT_SCHEMA), tuple(bad.rejections))
