"""Read the bytes of a file: local or remote, plain or compressed.

A ``Source`` is one file with a size and ``read_at(offset, length)``. Reading is stateless, so
threads share a source, forked workers inherit nothing, and a retry is the same call again. Local
files are opened per read and checked against the size they were planned with: a file that shrinks
or grows under the reader is an error, not a wrong row. (``columnar`` maps local Arrow files, which
cannot be checked so.) ``remote`` has the source of a file that is not on this machine.

``open_chunks`` and ``Supply`` give the decompressed content as a stream. gzip, zstd, bz2 and lz4 go
through pyarrow (gzip through ``isal``, which is twice as fast, where there is a wheel), xz through
the standard library. Parquet and Arrow need random access: a compressed one is decompressed once
into an unnamed temporary file (``spool``), so that memory stays bounded whatever its size.
"""

from __future__ import annotations

import lzma
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa

from fast_axolotl.errors import AccessError, DataError, MissingFileError

MOST_RECORD_BYTES = 2**31 - 1
"""A line, or another record, may be so long: more than pyarrow puts into one value of text."""

_MOST_AHEAD_BYTES = 8 * 1024 * 1024
"""What a remote file is read ahead at most where it is decompressed."""

_SPOOL_CHUNK_BYTES = 4 * 1024 * 1024
_STREAM_READ_BYTES = 128 * 1024
_START_READ_BYTES = 1024
_MOST_START_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file of a known size."""

    path: str
    """Local path or URI, as messages show it: without secrets."""
    num_bytes: int
    """Size when the reader was planned."""
    version: str = ""
    """Changes when the content does: the time of the last change, or the server's own tag."""
    keys: tuple[tuple[str, pa.Scalar], ...] = ()
    """Columns of one value that the folders it is in tell: ``lang=en``."""
    content: pa.Buffer | None = None
    """A decompressed copy, which is read in place of the file."""
    is_local: ClassVar[bool] = True

    @property
    def identity(self) -> str:
        """The path, of a remote file without query and fragment: the same for any signature."""
        return self.path

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly these bytes, fewer only where the file ends."""
        length = max(0, min(length, self.num_bytes - offset))
        if self.content is not None:
            return bytes(self.content[offset : offset + length])
        # A third less time than with ``open``, which counts where small files are thousands.
        with translate_os_errors(self.path):
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._check_size(os.fstat(file).st_size)
                data = os.pread(file, length, offset)
                while len(data) < length and (
                    more := os.pread(file, length - len(data), offset + len(data))
                ):
                    data += more
            finally:
                os.close(file)
        if len(data) < length:  # it shrank after that
            self._check_size(offset + len(data))
        return data

    def open_arrow(self, ahead: int = 0, *, is_mapped: bool = False) -> pa.NativeFile:
        """A random-access file for pyarrow's own readers; a remote one reads so much at a time.

        A mapped one ends the process if it is cut off meanwhile.
        """
        if self.content is not None:
            return pa.BufferReader(self.content)
        with translate_os_errors(self.path):
            file = pa.memory_map(self.path) if is_mapped else pa.OSFile(self.path)
            self._check_size(file.size())
            return file

    def _check_size(self, size: int) -> None:
        if size != self.num_bytes:
            raise DataError(
                f"the file has {size:,} bytes now and had {self.num_bytes:,} when it was opened; "
                "read a finished copy that nothing writes to",
                path=self.path,
            )


def open_chunks(source: Source, compression: str | None, size: int) -> Iterator[bytes]:
    """The content in pieces of at most ``size`` bytes, small ones where it is decompressed.

    Where a compressed stream breaks off, first what arrived before that, then the error.
    """
    if compression is None:
        for offset in range(0, source.num_bytes, size):
            yield source.read_at(offset, size)
        return
    failures: tuple[type[Exception], ...] = (OSError, EOFError, pa.ArrowException, lzma.LZMAError)
    file = source.open_arrow(ahead=min(size, _MOST_AHEAD_BYTES))
    position, stream = 0, None
    try:
        if compression == "xz":
            stream = lzma.LZMAFile(file)  # noqa: SIM115 - read here until its end
        elif compression == "gzip" and size > _START_READ_BYTES:  # it reads much at once
            with suppress(ImportError):
                from isal import igzip

                stream = igzip.IGzipFile(fileobj=file)
                failures += (igzip.isal_zlib.error,)
        stream = stream or pa.CompressedInputStream(file, compression)
        # Small reads, so that little is lost to an error that ends them early.
        while piece := stream.read(min(_STREAM_READ_BYTES, size)):
            yield piece
            position += len(piece)
    except DataError:
        raise
    except failures as error:
        raise DataError(
            f"the {compression} stream cannot be decompressed ({error}); if it is corrupt or "
            "truncated, replace it with an intact copy; else recompress it with zstd",
            path=source.path,
            place=f"decompressed byte {position}",
        ) from error


class Supply:
    """The decompressed text from an offset on, for a cutter that decides how far it has come.

    Grows by at least what is held, so that looking for the end of a huge record stays linear.
    """

    def __init__(self, source: Source, compression: str | None, size: int) -> None:
        self._source, self._size = source, size
        self._chunks = open_chunks(source, compression, size) if compression else None
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
        self.drop(consumed)
        left = len(self.held)
        check_record(left, self._source.path, self.offset)
        wanted = max(self._size, left)
        if self._chunks is None:
            # What is left is read again: it is little, and to put it before the rest is a copy. One
            # length as long as that does: an allocator keeps no pages for ever larger ones.
            length = self._size if 2 * left <= self._size else left + wanted
            self.held = self._source.read_at(self.offset, length)
        else:
            pieces = [self.held]
            try:
                while wanted > 0 and (piece := next(self._chunks, b"")):
                    pieces.append(piece)
                    wanted -= len(piece)
            except DataError as error:
                self._failure = error
            self.held = b"".join(pieces)
        self.ended = len(self.held) == left
        if self.ended and self._failure is not None:
            raise self._failure


def start_of(data: bytes, compression: str) -> bytes:
    """What the first bytes of a compressed file hold, as far as they go, but no flood of it."""
    source, held = Source(path="", num_bytes=len(data), content=pa.py_buffer(data)), b""
    with suppress(DataError):  # cut off, as expected
        for piece in open_chunks(source, compression, _START_READ_BYTES):
            held += piece
            if len(held) >= _MOST_START_BYTES:
                break
    return held


def check_record(num_bytes: int, path: str, offset: int) -> None:
    """Refuses a record that does not end."""
    if num_bytes > MOST_RECORD_BYTES:
        raise DataError(
            f"one row has more than {MOST_RECORD_BYTES:,} bytes; check that the file is text with "
            "one row per line",
            path=path,
            place=f"byte {offset}",
        )


def spool(source: Source, compression: str) -> Source:
    """The same file with a decompressed copy on disk.

    The copy has no name, so nothing is left behind however the process ends; it is mapped, in
    forked processes too.
    """
    with translate_os_errors(tempfile.gettempdir()), tempfile.TemporaryFile() as file:
        for chunk in open_chunks(source, compression, _SPOOL_CHUNK_BYTES):
            file.write(chunk)
        file.flush()
        with pa.memory_map(f"/dev/fd/{file.fileno()}") as copy:
            return Source(path=source.path, num_bytes=file.tell(), content=copy.read_buffer())


@contextmanager
def translate_os_errors(path: str) -> Iterator[None]:
    """Turns an OSError into the error that names the file: its own, or else this path."""
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        path = str(error.filename or path)
        if isinstance(error, FileNotFoundError):
            raise MissingFileError("no such file or folder; check the path", path=path) from None
        if isinstance(error, PermissionError):
            raise AccessError("permission denied; make the file readable", path=path) from None
        reason = error.strerror or str(error)
        raise DataError(
            f"reading failed: {reason}; check the disk, then try again", path=path
        ) from error
