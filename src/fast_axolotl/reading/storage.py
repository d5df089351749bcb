"""The bytes of a file: local or remote, plain or decompressed.

A ``Source`` is one file with a size and ``read_at(offset, length)``. Reading is stateless, so
threads share a source, forked workers inherit nothing, and a retry is the same call again. Local
files are opened per read and checked against the size they were planned with: a file that shrinks
or grows under the reader is an error, not a wrong row. They are never mapped into memory, because
a mapped file that shrinks kills the process. Remote reads go through ``remote``.

``open_arrow`` of a remote file reads ahead: what is known to be wanted together (the column chunks
of a row group, learned in a rehearsal) is one request, reads that follow each other grow, and the
end of a file, where indexes are, comes in one piece.

``open_chunks`` and ``Supply`` give the decompressed content as a stream. gzip, zstd, bz2 and lz4 go
through pyarrow (gzip through ``isal``, which is twice as fast, where there is a wheel), xz through
the standard library; concatenated members are one stream. Blocks of it are ``bytearray``s, which
must not be changed in place. pyarrow has no streaming snappy, so that one is refused with the cure.
Parquet and Arrow need random access: a compressed one is decompressed once into an unnamed
temporary file (``spool``), so that memory stays bounded whatever its size. A file that decompresses
to far more than is plausible is refused before it fills the disk, and so is a record past
``MOST_RECORD_BYTES`` before it fills the memory.
"""

from __future__ import annotations

import io
import lzma
import os
import re
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from fast_axolotl.errors import AccessError, DataError, MissingFileError
from fast_axolotl.reading.remote import Remote

MOST_RECORD_BYTES = 2**31 - 1
"""A line, or another record, may be so long: more than pyarrow puts into one value of text."""

_LEAST_PIECE_BYTES, _AHEAD_BYTES, _STREAM_AHEAD_BYTES = 64 * 1024, 512 * 1024, 8 * 1024 * 1024
"""What a file object reads at least, and at most unasked: of a stream, all will be wanted."""

_MOST_HELD_BYTES, _RUN_GAP_BYTES = 16 * 1024 * 1024, 1024 * 1024
"""What is wanted together is fetched at once up to this size, and across gaps up to this one."""

_SPOOL_CHUNK_BYTES = 4 * 1024 * 1024
_LEAST_STREAM_READ, _MOST_STREAM_READ = 64 * 1024, 256 * 1024
_MOST_EXPANSION = 16
"""Text that compresses better is rare, and comes in more blocks where the file is small."""
_MOST_START_BYTES = 1024 * 1024

_MOST_RATIO, _SURE_BYTES = 1000, 64 * 1024**3
"""A copy is refused that is larger than both: so many times the compressed file, and 64 GiB."""

_LEAST_FREE_SHARE, _ENOUGH_FREE_BYTES = 0.05, 4 * 1024**3
"""What a copy leaves free of its disk: a twentieth, of large disks 4 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file, local or remote, of a known size."""

    path: str
    """Local path or URI, as messages show it: without secrets."""
    num_bytes: int
    """Size when the reader was planned."""
    version: str = ""
    """Changes when the content does: the time of the last change, or the server's own tag."""
    remote: Remote | None = None
    """How a file is reached that is not on this machine."""

    @property
    def identity(self) -> str:
        """The path, of a remote file without query and fragment: the same for any signature."""
        return self.path if self.remote is None else re.split("[?#]", self.path)[0]

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly these bytes, fewer only where the file ends."""
        length = max(0, min(length, self.num_bytes - offset))
        if self.remote is not None:
            return self.remote.read(offset, length) if length else b""
        with translate_os_errors(self.path), Path(self.path).open("rb") as file:
            self._check_size(os.fstat(file.fileno()).st_size)
            file.seek(offset)
            data = file.read(length)
        if len(data) < length:  # it shrank after that
            self._check_size(offset + len(data))
        return data

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fills memory of pyarrow, which is used again where that of ``bytes`` is not."""
        if self.remote is not None:
            target[:] = self.read_at(offset, len(target))
            return
        with self.open_arrow() as file, translate_os_errors(self.path):
            file.seek(offset)
            length = file.readinto(target)
        if length < len(target):
            self._check_size(offset + length)

    def open_arrow(
        self,
        most_ahead: int = _AHEAD_BYTES,
        rehearsal: Callable[[pa.NativeFile], object] | None = None,
    ) -> pa.NativeFile:
        """A random-access file for pyarrow's own readers.

        ``rehearsal`` reads what will be read, first from a file of zeros on which it fails. What it
        asked for until then is later fetched together, at its first use, if it can all be held.
        """
        if self.remote is not None:
            file = _SourceFile(self, most_ahead)
            if rehearsal is not None:
                zeros = _Zeros(self, most_ahead)
                with suppress(pa.ArrowException, OSError):
                    rehearsal(pa.PythonFile(zeros, mode="r"))
                file.runs = zeros.ranges()
            return pa.PythonFile(file, mode="r")
        with translate_os_errors(self.path):
            file = pa.OSFile(self.path)
            self._check_size(file.size())
            return file

    def _check_size(self, size: int) -> None:
        if size != self.num_bytes:
            raise DataError(
                f"the file has {size:,} bytes now and had {self.num_bytes:,} when it was opened; "
                "read a finished copy that nothing writes to",
                path=self.path,
            )


class _SourceFile(io.RawIOBase):
    """A ``Source`` as a Python file object, for libraries that want one; reads ahead."""

    def __init__(self, source: Source, most_ahead: int) -> None:
        self._source = source
        self._most_ahead = most_ahead
        self._position = 0
        self._piece = (0, b"")
        """Where the last read outside the runs began, and what it gave."""
        self.runs: list[tuple[int, int]] = []
        """Byte ranges in order, each of which is fetched as a whole and held."""
        self._held: dict[int, bytes] = {}
        """The bytes of those runs that were fetched."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.num_bytes}
        self._position = base[whence] + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        remaining = self._source.num_bytes - self._position
        length = remaining if size is None or size < 0 else min(size, remaining)
        data = self._bytes_at(self._position, length)
        self._position += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _bytes_at(self, start: int, length: int) -> bytes:
        source, stop = self._source, start + length
        index = bisect_right(self.runs, (start, source.num_bytes)) - 1
        if index >= 0 and stop <= self.runs[index][1]:
            begin, end = self.runs[index]
            if index not in self._held:
                self._held[index] = source.read_at(begin, end - begin)
            return self._held[index][start - begin : stop - begin]
        begin, piece = self._piece
        if begin <= start and stop <= begin + len(piece):
            return piece[start - begin : stop - begin]
        head, size = b"", _LEAST_PIECE_BYTES
        if begin <= start <= begin + len(piece):  # goes on where the last read ended
            head = piece[start - begin :]
            size = max(size, min(2 * len(piece), self._most_ahead))
        elif start >= source.num_bytes - size:  # the end of the file, where the index is
            begin = max(0, source.num_bytes - size)
            self._piece = (begin, source.read_at(begin, size))
            return self._piece[1][start - begin : stop - begin]
        at = start + len(head)
        data = source.read_at(at, max(stop - at, size))
        self._piece = (at, data) if len(data) <= self._most_ahead else (stop, b"")
        return head + data[: stop - at]


class _Zeros(_SourceFile):
    """A file of zeros that notes what is asked of it.

    That is how the places of column chunks are learned. Asking pyarrow's metadata for them would
    end the process on some damaged footers; a decoder that meets one raises an error.
    """

    def __init__(self, source: Source, most_ahead: int) -> None:
        super().__init__(source, most_ahead)
        self._asked: list[tuple[int, int]] = []
        self._num_bytes = 0

    def _bytes_at(self, start: int, length: int) -> bytes:
        self._asked.append((start, start + length))
        self._num_bytes += length
        if self._num_bytes > _MOST_HELD_BYTES:
            raise OSError("too much to be held")
        return bytes(length)

    def ranges(self) -> list[tuple[int, int]]:
        """What was asked for, in order and across small gaps; nothing where it is too much.

        Of what cannot be held, whatever is fetched ahead would be fetched again.
        """
        runs: list[tuple[int, int]] = []
        for start, stop in sorted(self._asked):
            if runs and start - runs[-1][1] <= _RUN_GAP_BYTES:
                runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
            else:
                runs.append((start, stop))
        return runs if sum(stop - start for start, stop in runs) <= _MOST_HELD_BYTES else []


def open_chunks(
    source: Source, compression: str | None, size: int, start: int = 0
) -> Iterator[bytes]:
    """The content in chunks of ``size`` bytes, the last one shorter; ``start`` for plain files."""
    if compression is None:
        for offset in range(start, source.num_bytes, size):
            yield source.read_at(offset, size)
        return
    stream = _Stream(source, compression, size)
    while chunk := stream.read(size):
        yield chunk


class _Stream:
    """Decompressed content, put right where it is wanted: each byte is written once.

    Buffers of the usual size are used again as soon as nobody else refers to them, nor to a view of
    them. Fresh memory for every block would take half as long again as decompressing zstd.
    """

    def __init__(self, source: Source, compression: str, size: int) -> None:
        if compression == "snappy":
            raise DataError(
                "pyarrow cannot decompress snappy as a stream; recompress the file with zstd",
                path=source.path,
            )
        self._path = source.path
        self._compression = compression
        self._size = size
        self._buffers: list[bytearray] = []
        self._position = 0
        self._failure: DataError | None = None
        self._failures: tuple[type[Exception], ...] = (OSError, EOFError, pa.ArrowException)
        file = source.open_arrow(_STREAM_AHEAD_BYTES)
        self._stream: Any = None
        if compression == "xz":
            self._stream = lzma.LZMAFile(file)  # noqa: SIM115 - read here until its end
            self._failures += (lzma.LZMAError,)
        elif compression == "gzip":
            with suppress(ImportError):
                from isal import igzip

                self._stream = igzip.IGzipFile(fileobj=file)
                self._failures += (igzip.isal_zlib.error,)
        if self._stream is None:
            self._stream = pa.CompressedInputStream(file, compression)

    def read(self, size: int, head: bytes | memoryview = b"") -> bytes:
        """``head`` and what follows, ``size`` bytes in all; fewer only where the stream ends.

        Where it breaks off, first what arrived before that, then the error.
        """
        if self._failure is not None:
            raise self._failure
        buffer = self._buffer(size)
        num_bytes = len(head)
        buffer[:num_bytes] = head
        # Small reads, so that little is lost to an error that ends them early; but each one waits
        # for the interpreter's lock.
        piece = min(max(_LEAST_STREAM_READ, self._position // 16), _MOST_STREAM_READ)
        try:
            with memoryview(buffer) as view:
                while count := self._stream.readinto(view[num_bytes:][:piece]):
                    num_bytes += count
        except DataError as error:
            self._failure = error
        except self._failures as error:
            self._failure = DataError(
                f"the {self._compression} stream is corrupt or truncated ({error}); replace the "
                "file with an intact copy",
                path=self._path,
                place=f"decompressed byte {self._position + num_bytes - len(head)}",
            )
            self._failure.__cause__ = error
        self._position += num_bytes - len(head)
        if self._failure is not None and num_bytes == len(head):
            raise self._failure
        return cast("bytes", buffer if num_bytes == size else buffer[:num_bytes])

    def _buffer(self, size: int) -> bytearray:
        if size != self._size:  # for a record that is longer than a block
            return bytearray(size)
        for buffer in [bytearray()]:
            unused = sys.getrefcount(buffer)
        for buffer in self._buffers:
            if sys.getrefcount(buffer) == unused:
                return buffer
        self._buffers.append(bytearray(size))
        return self._buffers[-1]


class Supply:
    """The decompressed text from an offset on, for a cutter that decides how far it has come.

    Grows by at least what is held, so that looking for the end of a huge record stays linear. A
    plain file is read again at the offset, which saves copying all that is read once more.
    """

    def __init__(self, source: Source, compression: str | None, size: int) -> None:
        self._source = source
        self._size, self._stream = size, None
        if compression is not None:
            # A small file needs no large buffer.
            self._size = min(size, max(_MOST_EXPANSION * source.num_bytes, _LEAST_STREAM_READ))
            self._stream = _Stream(source, compression, self._size)
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
        self.offset += consumed
        left = len(self.held) - consumed
        check_record(left, self._source.path, self.offset)
        # Always the same length where possible: the pages are then at hand.
        length = self._size if 2 * left < self._size else left + max(left, self._size)
        if self._stream is None:
            self.held = self._source.read_at(self.offset, length)
        else:
            self.held = self._stream.read(length, memoryview(self.held)[consumed:])
        self.ended = len(self.held) == left

    def rest(self) -> Iterator[bytes]:
        """All that is left, in chunks."""
        while self.held:
            yield self.held
            self.advance(len(self.held))


def head_of(source: Source, compression: str | None, size: int) -> bytes:
    """The first ``size`` bytes of the decompressed content."""
    return next(open_chunks(source, compression, size), b"")


def start_of(data: bytes, compression: str) -> bytes:
    """What the first bytes of a compressed file hold, as far as they go, but no flood of it."""
    held = b""
    try:
        if compression == "xz":
            return lzma.LZMADecompressor().decompress(data, _MOST_START_BYTES)
        with pa.CompressedInputStream(pa.BufferReader(data), compression) as stream:
            while len(held) < _MOST_START_BYTES and (piece := stream.read(1024)):
                held += piece
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException):
        pass  # cut off, as expected
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


def spool(source: Source, compression: str) -> tuple[Source, Any]:
    """A decompressed copy on disk, and the handle that keeps it alive.

    The copy has no name, so nothing is left behind however the process ends; it is opened through
    its descriptor, in forked processes too.
    """
    most = max(_MOST_RATIO * source.num_bytes, _SURE_BYTES)
    folder = tempfile.gettempdir()
    with translate_os_errors(folder), tempfile.TemporaryFile() as copy:
        for chunk in open_chunks(source, compression, _SPOOL_CHUNK_BYTES):
            copy.write(chunk)
            disk, size = os.fstatvfs(copy.fileno()), copy.tell()
            spare = min(_LEAST_FREE_SHARE * disk.f_blocks * disk.f_frsize, _ENOUGH_FREE_BYTES)
            if size > most or disk.f_bavail * disk.f_frsize < spare:
                raise DataError(
                    f"the file has {source.num_bytes:,} bytes and decompresses to more than "
                    f"{size:,}, which is implausible or fills the disk of {folder}; check the "
                    "file, decompress it yourself, or free disk space",
                    path=source.path,
                )
        copy.flush()
        handle = _OpenFile(os.dup(copy.fileno()))
        return Source(path=f"/dev/fd/{handle.number}", num_bytes=copy.tell()), handle


class _OpenFile:
    """Keeps a descriptor open for as long as it lives."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)

    def __reduce__(self) -> str:
        raise TypeError("a decompressed copy cannot be sent to another process; open it there")


@contextmanager
def translate_os_errors(path: str) -> Iterator[None]:
    """Turns an OSError into the error that names the file."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise MissingFileError("no such file or folder; check the path", path=path) from None
    except PermissionError:
        raise AccessError("permission denied; make the file readable", path=path) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(
            f"reading failed: {reason}; check the disk, then try again", path=path
        ) from error
