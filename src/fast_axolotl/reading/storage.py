"""The bytes of a file: local or remote, plain or decompressed.

A ``Source`` is one file with a size and ``read_at(offset, length)``. Reading is stateless, so
threads share a source, forked workers inherit nothing, and a retry is the same call again. Local
files are opened per read and checked against the size they were planned with: a file that shrinks
or grows under the reader is an error, not a wrong row. They are never mapped into memory, because
a mapped file that shrinks kills the process. Remote reads are retried with exponential back-off;
what is still failing then is a ``DataError`` that says how often it was tried.

``open_chunks`` and ``Supply`` give the decompressed content as a stream. gzip, zstd, bz2 and lz4 go
through pyarrow, xz through the standard library; concatenated members are one stream. pyarrow has
no streaming snappy, so that one is refused with the cure. Parquet and Arrow need random access: a
compressed one is decompressed once into an unnamed temporary file (``spool``), so that memory stays
bounded whatever its size.
"""

from __future__ import annotations

import io
import lzma
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa

from fast_axolotl.errors import AccessError, DataError, MissingFileError

__all__ = [
    "Source",
    "Supply",
    "head_of",
    "open_chunks",
    "spool",
    "start_of",
    "translate_os_errors",
    "with_retries",
]

_Result = TypeVar("_Result")

RETRIES = 5
"""Attempts at one remote read; with the delays below, 3 s of a connection being down."""

FIRST_DELAY_SECONDS = 0.2
"""Doubles after each attempt: 0.2, 0.4, 0.8, 1.6."""

_SPOOL_CHUNK_BYTES = 4 * 1024 * 1024
_STREAM_PIECE_BYTES = 64 * 1024


def _pause(seconds: float) -> None:
    time.sleep(seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file, local or remote, of a known size."""

    path: str
    """Local path or full URI, as error messages show it."""
    num_bytes: int
    """Size when the reader was planned."""
    filesystem: Any = None
    """An fsspec file system, ``None`` for local files."""
    inner_path: str = ""
    """The path inside ``filesystem``."""
    version: str = ""
    """Changes when the content does: the time of the last change, or the server's own tag."""
    sleep: Callable[[float], None] = _pause
    """The seam through which tests skip the back-off."""

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly these bytes, fewer only where the file ends."""
        length = max(0, min(length, self.num_bytes - offset))
        if self.filesystem is not None:
            return self._fetch(offset, length) if length else b""
        with translate_os_errors(self.path):
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                self._check_size(os.fstat(descriptor).st_size)
                data = os.pread(descriptor, length, offset)
                while 0 < len(data) < length:
                    more = os.pread(descriptor, length - len(data), offset + len(data))
                    if not more:
                        break
                    data += more
            finally:
                os.close(descriptor)
        if len(data) < length:
            raise DataError(
                f"the file ended at byte {offset + len(data):,} though it had {self.num_bytes:,} "
                "when reading began; it is being written or was replaced: read a finished copy",
                path=self.path,
            )
        return data

    def open_arrow(self) -> pa.NativeFile:
        """A random-access file for pyarrow's own readers."""
        if self.filesystem is not None:
            return pa.PythonFile(_SourceFile(self), mode="r")
        with translate_os_errors(self.path):
            file = pa.OSFile(self.path)
            self._check_size(file.size())
            return file

    def _check_size(self, size: int) -> None:
        if size != self.num_bytes:
            raise DataError(
                f"the file has {size:,} bytes though it had {self.num_bytes:,} when reading began; "
                "it is being written or was replaced: read a finished copy",
                path=self.path,
            )

    def _fetch(self, offset: int, length: int) -> bytes:
        from pyarrow import fs  # 10 ms that local files can do without

        native = getattr(self.filesystem, "fs", None)

        def attempt() -> bytes:
            if isinstance(native, fs.FileSystem):
                # fsspec's wrapper around a pyarrow file system gives the whole file for any range.
                with native.open_input_file(self.inner_path) as file:
                    data = bytes(file.read_at(length, offset))
            else:
                end = offset + length
                data = bytes(self.filesystem.cat_file(self.inner_path, start=offset, end=end))
            if len(data) != length:
                raise EOFError(f"{len(data):,} of {length:,} bytes arrived at byte {offset:,}")
            return data

        return with_retries(attempt, self.path, self.sleep)


class _SourceFile(io.RawIOBase):
    """A ``Source`` as a Python file object, for libraries that want one."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._position = 0

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

    def size(self) -> int:
        return self._source.num_bytes

    def read(self, size: int | None = -1) -> bytes:
        remaining = self._source.num_bytes - self._position
        length = remaining if size is None or size < 0 else min(size, remaining)
        data = self._source.read_at(self._position, length)
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def open_chunks(
    source: Source, compression: str | None, size: int, start: int = 0
) -> Iterator[bytes]:
    """The content in chunks of ``size`` bytes, the last one shorter; ``start`` for plain files."""
    if compression is None:
        for offset in range(start, source.num_bytes, size):
            yield source.read_at(offset, size)
        return
    if compression == "snappy":
        raise DataError(
            "pyarrow cannot decompress snappy as a stream; recompress the file with zstd",
            path=source.path,
        )
    if compression == "xz":
        stream: Any = lzma.LZMAFile(io.BufferedReader(_SourceFile(source)))  # noqa: SIM115 - below
    else:
        stream = pa.CompressedInputStream(source.open_arrow(), compression)
    position = 0
    with stream:
        failure: Exception | None = None
        while failure is None:
            pieces: list[bytes] = []
            room = size
            try:
                # Small reads, so that little is lost to an error that ends them early.
                while room > 0 and (piece := stream.read(min(room, _STREAM_PIECE_BYTES))):
                    pieces.append(piece)
                    room -= len(piece)
            except (OSError, EOFError, lzma.LZMAError, pa.ArrowException, DataError) as error:
                failure = error
            if chunk := b"".join(pieces):
                position += len(chunk)
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
            if self._failure is not None:
                raise self._failure
            taken = [self.held[consumed:]]
            try:
                while grow > 0 and (chunk := next(self._chunks, b"")):
                    taken.append(chunk)
                    grow -= len(chunk)
            except DataError as error:
                if len(taken) == 1:
                    raise
                self._failure = error  # first what arrived before the stream broke off
            self.held = b"".join(taken)
        self.ended = len(self.held) == left

    def rest(self) -> Iterator[bytes]:
        """All that is left, in chunks."""
        if self._chunks is None:
            yield from open_chunks(self._source, None, self._size, self.offset)
            return
        yield self.held
        if self._failure is not None:
            raise self._failure
        yield from self._chunks


def head_of(source: Source, compression: str | None, size: int) -> bytes:
    """The first ``size`` bytes of the decompressed content."""
    return next(open_chunks(source, compression, size), b"")


def start_of(data: bytes, compression: str) -> bytes:
    """What the first bytes of a compressed file hold, as far as they go."""
    held = b""
    try:
        if compression == "xz":
            return lzma.LZMADecompressor().decompress(data)
        with pa.CompressedInputStream(pa.BufferReader(data), compression) as stream:
            while piece := stream.read(1024):
                held += piece
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException):
        pass  # cut off, as expected
    return held


def spool(source: Source, compression: str) -> tuple[Source, Any]:
    """A decompressed copy on disk, and the handle that keeps it alive."""
    copy = tempfile.NamedTemporaryFile(prefix="fast-axolotl-")  # noqa: SIM115 - outlives the call
    for chunk in open_chunks(source, compression, _SPOOL_CHUNK_BYTES):
        copy.write(chunk)
    copy.flush()
    return Source(path=copy.name, num_bytes=copy.tell()), copy


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
        raise AccessError("permission denied; make it readable for this user", path=path) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(
            f"reading failed: {reason}; check the disk, then read it again", path=path
        ) from error


def with_retries(
    call: Callable[[], _Result], path: str, sleep: Callable[[float], None] = _pause
) -> _Result:
    """Remote libraries share no base class, so any error but these few counts as transient."""
    delay = FIRST_DELAY_SECONDS
    for attempt in range(1, RETRIES + 1):
        try:
            return call()
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001 - see above
            cause: BaseException = error
            if path.startswith("http") and isinstance(error, FileNotFoundError):
                # fsspec's HTTP file system calls any failure to learn a size a missing file.
                cause = error.__cause__ or error
            status, name = getattr(cause, "status", None), type(cause).__name__
            if isinstance(cause, FileNotFoundError) or status in (404, 410):
                raise MissingFileError(
                    "no such file or folder; check the address", path=path
                ) from None
            if isinstance(cause, PermissionError) or status in (401, 403) or "Credential" in name:
                raise AccessError(
                    f"access denied ({name}); check the credentials", path=path
                ) from None
            if attempt == RETRIES:
                raise DataError(
                    f"the connection failed {RETRIES} times, last with {name}: {cause}; check the "
                    "network and run again, resuming from the last saved state",
                    path=path,
                ) from cause
        sleep(delay)
        delay *= 2
    raise AssertionError("the last attempt returns or raises")
