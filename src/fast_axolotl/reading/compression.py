"""Compressed files as a stream of plain chunks, or spooled to disk where seeking is needed.

gzip, zstd, bz2 and lz4 go through pyarrow, xz through the standard library; concatenated members
are one stream. pyarrow has no streaming snappy, so that one is refused with the cure. Parquet and
Arrow need random access: a compressed one is decompressed once into an unnamed temporary file, so
that memory stays bounded whatever its size.
"""

from __future__ import annotations

import io
import lzma
import tempfile
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from fast_axolotl.errors import DataError
from fast_axolotl.reading.storage import Source, SourceFile, read_chunks

__all__ = ["Supply", "head_of", "open_chunks", "spool"]

_SPOOL_CHUNK_BYTES = 4 * 1024 * 1024
_STREAM_PIECE_BYTES = 64 * 1024


def open_chunks(source: Source, compression: str | None, size: int) -> Iterator[bytes]:
    """The decompressed content in chunks of ``size`` bytes, the last one shorter."""
    if compression is None:
        yield from read_chunks(source, size)
        return
    position = 0
    with _open_stream(source, compression) as stream:
        failure: Exception | None = None
        while failure is None:
            chunk, failure = _read_on(stream, size)
            position += len(chunk)
            if chunk:
                yield chunk
            elif failure is None:
                return
    if isinstance(failure, DataError):
        raise failure
    raise DataError(
        f"the {compression} stream is damaged or cut off after {position:,} decompressed bytes "
        f"({failure}); fetch or compress the file again",
        path=source.path,
    ) from failure


def _read_on(stream: Any, size: int) -> tuple[bytes, Exception | None]:
    """The next bytes, and the error that ended them early; small reads lose little to it."""
    pieces: list[bytes] = []
    try:
        while size > 0 and (piece := stream.read(min(size, _STREAM_PIECE_BYTES))):
            pieces.append(piece)
            size -= len(piece)
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException, DataError) as error:
        return b"".join(pieces), error
    return b"".join(pieces), None


class Supply:
    """The decompressed text from an offset on, for a cutter that decides how far it has come.

    Grows by at least what is held, so that looking for the end of a huge record stays linear. A
    plain file is read again at the offset, which saves copying all that is read once more.
    """

    def __init__(self, source: Source, compression: str | None, size: int) -> None:
        self._source = source
        self._size = size
        self._chunks = None if compression is None else open_chunks(source, compression, size)
        self._failure: DataError | None = None
        self.offset = 0
        """Where ``held`` begins."""
        self.held = b""
        """What has been read and not yet consumed."""
        self.ended = False
        """Whether ``held`` is all that is left."""
        self.advance(0)

    def drop(self, consumed: int) -> None:
        """Moves on without reading."""
        self.offset += consumed
        self.held = self.held[consumed:]

    def advance(self, consumed: int) -> None:
        """Drops what was consumed and reads on."""
        left = len(self.held) - consumed
        self.offset += consumed
        grow = max(left, self._size)
        if self._chunks is None:
            self.held = self._source.read_at(self.offset, left + grow)
        else:
            self.held = b"".join([self.held[consumed:], *self._next_chunks(self._chunks, grow)])
        self.ended = len(self.held) == left

    def _next_chunks(self, chunks: Iterator[bytes], size: int) -> list[bytes]:
        """At least so many bytes; where the stream breaks off, first what arrived before."""
        if self._failure is not None:
            raise self._failure
        taken: list[bytes] = []
        try:
            while size > 0 and (chunk := next(chunks, b"")):
                taken.append(chunk)
                size -= len(chunk)
        except DataError as error:
            if not taken:
                raise
            self._failure = error
        return taken

    def rest(self) -> Iterator[bytes]:
        """All that is left, in chunks."""
        if self._chunks is None:
            yield from read_chunks(self._source, self._size, self.offset)
            return
        yield self.held
        if self._failure is not None:
            raise self._failure
        yield from self._chunks


def head_of(source: Source, compression: str | None, size: int) -> bytes:
    """The first ``size`` bytes of the decompressed content."""
    return next(open_chunks(source, compression, size), b"")


def spool(source: Source, compression: str) -> tuple[Source, Any]:
    """A decompressed copy on disk, and the handle that keeps it alive."""
    copy = tempfile.NamedTemporaryFile(prefix="fast-axolotl-")  # noqa: SIM115 - outlives the call
    for chunk in open_chunks(source, compression, _SPOOL_CHUNK_BYTES):
        copy.write(chunk)
    copy.flush()
    return Source(path=copy.name, num_bytes=copy.tell()), copy


def _open_stream(source: Source, compression: str) -> Any:
    if compression == "snappy":
        raise DataError(
            "pyarrow cannot decompress snappy as a stream; recompress the file with zstd",
            path=source.path,
        )
    if compression == "xz":
        return lzma.LZMAFile(io.BufferedReader(SourceFile(source)))
    return pa.CompressedInputStream(source.open_arrow(), compression)
