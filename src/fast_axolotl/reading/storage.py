"""Where bytes come from: local files, and anything fsspec or pyarrow can reach.

A ``Source`` is one file with a size and ``read_at(offset, length)``. Reading is stateless, so
threads share a source, forked workers inherit nothing, and a retry is the same call again. Local
files are opened per read and checked against the size they were planned with: a file that shrinks
or grows under the reader is an error, not a wrong row. They are never mapped into memory, because
a mapped file that shrinks kills the process.

Remote reads are retried with exponential back-off; what is still failing then is a ``DataError``
that says how often it was tried.
"""

from __future__ import annotations

import glob
import io
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import fsspec
import pyarrow as pa

from fast_axolotl.errors import AccessError, DataError, MissingExtraError, MissingFileError

__all__ = ["Source", "SourceFile", "expand", "is_remote", "read_chunks", "translate_os_errors"]

_Result = TypeVar("_Result")

RETRIES = 5
"""Attempts at one remote read; with the delays below, 3 s of a connection being down."""

FIRST_DELAY_SECONDS = 0.2
"""Doubles after each attempt: 0.2, 0.4, 0.8, 1.6."""


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
    sleep: Callable[[float], None] = _pause
    """The seam through which tests skip the back-off."""

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly these bytes, fewer only where the file ends."""
        length = max(0, min(length, self.num_bytes - offset))
        read = self._read_local if self.filesystem is None else self._fetch
        data = read(offset, length)
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
            return pa.PythonFile(SourceFile(self), mode="r")
        with translate_os_errors(self.path):
            file = pa.OSFile(self.path)
            self._check_size(file.size())
            return file

    def _read_local(self, offset: int, length: int) -> bytes:
        with translate_os_errors(self.path):
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                self._check_size(os.fstat(descriptor).st_size)
                return _read_fully(descriptor, offset, length)
            finally:
                os.close(descriptor)

    def _check_size(self, size: int) -> None:
        if size != self.num_bytes:
            raise DataError(
                f"the file has {size:,} bytes though it had {self.num_bytes:,} when reading began; "
                "it is being written or was replaced: read a finished copy",
                path=self.path,
            )

    def _fetch(self, offset: int, length: int) -> bytes:
        def attempt() -> bytes:
            data = _read_range(self.filesystem, self.inner_path, offset, length)
            if len(data) != length:
                raise EOFError(f"{len(data):,} of {length:,} bytes arrived at byte {offset:,}")
            return data

        return _with_retries(attempt, self.path, self.sleep) if length else b""


class SourceFile(io.RawIOBase):
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


def read_chunks(source: Source, size: int, start: int = 0) -> Iterator[bytes]:
    """The file from ``start`` in pieces of ``size`` bytes."""
    for offset in range(start, source.num_bytes, size):
        yield source.read_at(offset, size)


def _read_range(filesystem: Any, path: str, offset: int, length: int) -> bytes:
    """fsspec's wrapper around a pyarrow file system gives the whole file for any range."""
    from pyarrow import fs

    native = getattr(filesystem, "fs", None)
    if isinstance(native, fs.FileSystem):
        with native.open_input_file(path) as file:
            return bytes(file.read_at(length, offset))
    return bytes(filesystem.cat_file(path, start=offset, end=offset + length))


def is_remote(path: str) -> bool:
    """Whether a path is a URI that is not plainly a local file."""
    return "://" in path and not path.startswith("file://")


def expand(path: str, storage_options: dict[str, Any] | None) -> tuple[list[Source], str]:
    """Every file that a path, glob, folder or URI means, sorted, and the folder they are under."""
    if not is_remote(path):
        is_uri = path.startswith("file://")
        return _expand_local(unquote(path.removeprefix("file://")) if is_uri else path)
    return _expand_remote(path, storage_options or {})


class translate_os_errors:
    """``with translate_os_errors(path):`` turns an OSError into the error that names the file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, OSError) or isinstance(error, DataError):
            return
        if isinstance(error, FileNotFoundError):
            raise MissingFileError(
                "no such file or folder; check the path", path=self._path
            ) from None
        if isinstance(error, PermissionError):
            raise AccessError(
                "permission denied; make it readable for this user", path=self._path
            ) from None
        reason = error.strerror or str(error)
        raise DataError(
            f"reading failed: {reason}; check the disk, then read it again", path=self._path
        ) from error


def _read_fully(descriptor: int, offset: int, length: int) -> bytes:
    data = os.pread(descriptor, length, offset)
    if len(data) == length or not data:
        return data
    pieces = [data]
    while data and (missing := length - sum(map(len, pieces))):
        data = os.pread(descriptor, missing, offset + length - missing)
        pieces.append(data)
    return b"".join(pieces)


def _expand_local(path: str) -> tuple[list[Source], str]:
    target = Path(path).expanduser()
    with translate_os_errors(path):
        if target.is_dir():
            return [_local_source(item) for item in _walk(target)], str(target)
        if not target.exists() and _is_glob(path):
            files = [item for item in _glob(path) if item.is_file()]
            if not files:
                raise MissingFileError("no file matches this pattern; check it", path=path)
            return [_local_source(item) for item in files], os.path.commonpath(
                [item.parent for item in files]
            )
        return [_local_source(target)], str(target.parent)


def _walk(folder: Path) -> list[Path]:
    """All files below a folder; what cannot be listed is an error, and so is a dangling link."""

    def refuse(error: OSError) -> None:
        raise error

    listed = os.walk(folder, onerror=refuse)
    files = [Path(root, name) for root, _, names in listed for name in names]
    return sorted(
        item
        for item in files
        if item.is_file() or (item.is_symlink() and not item.name.startswith("."))
    )


def _glob(pattern: str) -> list[Path]:
    expanded = str(Path(pattern).expanduser())
    return sorted(map(Path, glob.glob(expanded, recursive=True)))  # noqa: PTH207 - absolute too


def _is_glob(path: str) -> bool:
    return any(mark in path for mark in "*?[")


def _local_source(path: Path) -> Source:
    text = str(path)
    with translate_os_errors(text):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return Source(path=text, num_bytes=os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)


def _expand_remote(uri: str, options: dict[str, Any]) -> tuple[list[Source], str]:
    scheme = uri.split("://", 1)[0]
    filesystem, inner = _open_filesystem(uri, scheme, options)

    def listed() -> list[dict[str, Any]]:
        if _is_glob(inner):
            return list(filesystem.glob(inner, detail=True).values())
        details = filesystem.info(inner)
        if details["type"] == "directory":
            return list(filesystem.find(inner, detail=True).values())
        return [details]

    details = _with_retries(listed, uri)
    files = [item for item in details if item["type"] == "file"]
    if not files:
        raise MissingFileError("nothing is there; check the address", path=uri)
    files.sort(key=lambda item: str(item["name"]))
    return [_remote_source(item, scheme, filesystem) for item in files], uri


def _remote_source(details: dict[str, Any], scheme: str, filesystem: Any) -> Source:
    name = str(details["name"])
    size = details.get("size")
    path = name if "://" in name else f"{scheme}://{name.lstrip('/')}"
    if size is None:
        raise DataError("the server does not tell the size; download the file first", path=path)
    return Source(path=path, num_bytes=int(size), filesystem=filesystem, inner_path=name)


def _open_filesystem(uri: str, scheme: str, options: dict[str, Any]) -> tuple[Any, str]:
    """fsspec's file system for a URI, or pyarrow's own where fsspec lacks the package."""
    try:
        filesystem, inner = fsspec.core.url_to_fs(uri, **options)
        return filesystem, inner
    except ImportError as missing:
        return _open_with_pyarrow(uri, scheme, options, missing)
    except ValueError as error:
        raise DataError(f"this address cannot be read: {error}", path=uri) from None


def _open_with_pyarrow(
    uri: str, scheme: str, options: dict[str, Any], missing: ImportError
) -> tuple[Any, str]:
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow import fs

    try:
        if options:
            raise pa.ArrowInvalid("storage options need the fsspec package")
        native, inner = fs.FileSystem.from_uri(uri)
    except (pa.ArrowException, OSError):
        raise MissingExtraError(
            f"{uri}: reading {scheme}:// needs a package that is not installed ({missing}); "
            f"for S3: pip install 'fast-axolotl[s3]'"
        ) from None
    return ArrowFSWrapper(native), inner


def _with_retries(
    call: Callable[[], _Result], path: str, sleep: Callable[[float], None] = _pause
) -> _Result:
    delay = FIRST_DELAY_SECONDS
    for attempt in range(1, RETRIES + 1):
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - see _raise_if_final
            _raise_if_final(_unwrapped(error, path), path, attempt)
        sleep(delay)
        delay *= 2
    raise AssertionError("the last attempt returns or raises")


def _unwrapped(error: Exception, path: str) -> Exception:
    """fsspec's HTTP file system calls any failure to learn a size a missing file."""
    cause = error.__cause__
    is_wrapped = isinstance(error, FileNotFoundError) and isinstance(cause, Exception)
    return cause if is_wrapped and path.startswith("http") else error  # type: ignore[return-value]


def _is_refusal(error: Exception) -> bool:
    return getattr(error, "status", None) in (401, 403) or "Credential" in type(error).__name__


def _raise_if_final(error: Exception, path: str, attempt: int) -> None:
    """Remote libraries share no base class, so any error but these few counts as transient."""
    if isinstance(error, DataError):
        raise error
    if isinstance(error, FileNotFoundError) or getattr(error, "status", None) in (404, 410):
        raise MissingFileError("no such file or folder; check the address", path=path) from None
    if isinstance(error, PermissionError) or _is_refusal(error):
        raise AccessError(
            f"access denied ({type(error).__name__}); check the credentials", path=path
        ) from None
    if attempt == RETRIES:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(
            f"the connection failed {RETRIES} times, last with {reason}; check the network and "
            "run again, resuming from the last saved state",
            path=path,
        ) from error
