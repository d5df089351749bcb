"""Read byte ranges of remote files, with retries.

A failing request is repeated with exponential back-off and full jitter until ``retry_seconds`` have
passed; what cannot get better (no such file, no access, a request that is refused) is an error at
once. HTTP and S3 servers are asked for the file with the tag (ETag) that it had when the dataset
was opened, so a file that is replaced in the middle of a run is an error and never a wrong row;
other file systems are asked for their tag only when a dataset is opened. Keeps nothing on this
machine: fsspec's ``blockcache::`` and ``filecache::`` do.
"""

from __future__ import annotations

import io
import logging
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import pyarrow as pa

from fast_axolotl.errors import (
    AccessError,
    DataError,
    MissingExtraError,
    MissingFileError,
    mask_secrets,
)
from fast_axolotl.reading.storage import Source

_Result = TypeVar("_Result")

_log = logging.getLogger("fast_axolotl.reading")

FIRST_DELAY_SECONDS, MOST_DELAY_SECONDS = 0.5, 30.0
"""Bounds of the first and of the longest wait; each is drawn between zero and its bound, so that
many ranks that failed together do not come back together."""

STALL_SECONDS = 60.0
"""An HTTP connection that sends no byte for so long has failed; others have their own time-outs."""

_LEAST_REQUEST_BYTES = 64 * 1024
"""What a file object reads at least."""

_NEVER_BETTER = (TypeError, AttributeError, NotImplementedError, ImportError, ValueError)
_MAY_GET_BETTER = {408, 425, 429}
_VERSIONS = (
    *("ETag", "etag", "blob_id"),
    *("Last-Modified", "LastModified", "last_modified", "updated", "mtime", "created"),
)
"""What fsspec's file systems call the tag of a file, and the time of its last change."""

clock, pause = time.monotonic, time.sleep
"""Seams for tests."""


def with_retries(call: Callable[[], _Result], path: str, seconds: float) -> _Result:
    """Remote libraries share no base class, so any error but those that are known is transient."""
    began, attempt = clock(), 0
    while True:
        attempt += 1
        try:
            return call()
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001 - see above
            cause: BaseException = error
        if path.startswith("http") and isinstance(cause, FileNotFoundError):
            # fsspec's HTTP file system calls any failure to learn a size a missing file.
            cause = cause.__cause__ or cause
        status, kind, reason = _status_in(cause), DataError, None
        name, text = type(cause).__name__, mask_secrets(" ".join(str(cause).split()))
        is_refused = status and 400 <= status < 500 and status not in _MAY_GET_BETTER
        most = min(MOST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(attempt - 1, 30))
        delay, spent = random.uniform(0, most), clock() - began
        if isinstance(cause, FileNotFoundError) or status in (404, 410):
            kind, text = MissingFileError, "no such file or folder; check the address"
        elif isinstance(cause, PermissionError) or status in (401, 403) or "Credential" in name:
            kind = AccessError
            text = (
                f"access denied ({name}); check the credentials; where a signed URL has expired, "
                "open a new signed URL and load the last saved state"
            )
        elif status in (412, 416) or name == "FileExpired":
            text = "the file changed while it was read; read a copy that nothing writes to"
        elif is_refused or (isinstance(cause, _NEVER_BETTER) and name != "JSONDecodeError"):
            text = f"the request failed with {name}: {text}; check address and storage_options"
        elif spent + delay > seconds:
            reason = TimeoutError()  # it may succeed later, or on another machine
            text = (
                f"the connection failed {attempt} times in {spent:,.0f} s, last with {name}: "
                f"{text}; check the network and resume from the last saved state, or pass a "
                "larger retry_seconds"
            )
        else:
            if attempt == 3:
                text = f"{mask_secrets(path)}: the connection failed ({text or name})"
                _log.warning("%s; retrying for up to %.0f s", text, seconds)
            pause(delay)
            continue
        # Without its cause: a traceback would show the secrets in an address.
        raise kind(text, path=path) from reason


def _status_in(error: BaseException | None) -> int | None:
    """The HTTP status that an exception of any library shows."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):  # botocore
            of_bucket: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return of_bucket
        for item in (error, response):
            for name in ("status", "status_code"):
                if isinstance(status := getattr(item, name, None), int):
                    return status
        error = error.__cause__
    return None


def folder_of_pattern(path: str) -> str | None:
    """The folder above the first wildcard; ``None`` where the path has none."""
    if path.startswith(("http://", "https://")):
        path = path.partition("?")[0]
    above, *rest = re.split(r"[*?\[]", path, maxsplit=1)
    return above.rpartition("/")[0] if rest else None


def remote_files(
    uri: str, options: dict[str, Any] | None, retry_seconds: float
) -> tuple[list[Source], str | None]:
    """Every file that a URI means, sorted; its own address, unless it is one file."""
    import fsspec  # here, not above: local files need none of it, and it takes 40 ms

    scheme, settings = uri.split("://", 1)[0], dict[str, Any]()
    try:
        if scheme in ("http", "https"):
            import aiohttp  # what fsspec needs for HTTP

            timeout = aiohttp.ClientTimeout(sock_connect=STALL_SECONDS, sock_read=STALL_SECONDS)
            settings["timeout"] = timeout
        filesystem, inner = fsspec.core.url_to_fs(uri, **settings | (options or {}))
    except ImportError as missing:
        raise MissingExtraError(
            f"{mask_secrets(uri)}: reading {scheme}:// needs a package that is not installed "
            f"({missing}); for S3: pip install s3fs"
        ) from None
    except ValueError as error:
        raise DataError(f"this address cannot be opened: {error}", path=uri) from None

    # A file system that keeps files (filecache::) cannot list what a web server has.
    original = getattr(filesystem, "fs", filesystem) if "::" in uri else filesystem
    is_pattern = folder_of_pattern(inner) is not None

    def listed() -> tuple[list[dict[str, Any]], bool]:
        if is_pattern:
            return list(original.glob(inner, detail=True).values()), False
        details = original.info(inner)
        if details["type"] == "directory":
            return list(original.find(inner, detail=True).values()), False
        return [details], True

    sources = list[Source]()
    items, is_one = with_retries(listed, uri, retry_seconds)
    for details in sorted(items, key=lambda item: str(item["name"])):
        name, size = str(details["name"]), details.get("size")
        if details["type"] != "file":
            continue
        path = mask_secrets(name if "://" in name else f"{scheme}://{name.lstrip('/')}")
        if size is None:
            raise DataError("the server reports no file size; download the file first", path=path)
        source = RemoteSource(
            path=path,
            num_bytes=int(size),
            version=next((str(details[key]) for key in _VERSIONS if details.get(key)), ""),
            filesystem=filesystem,
            inner_path=name,
            retry_seconds=retry_seconds,
        )
        sources.append(source)
    if not sources:
        raise MissingFileError("no file at this address; check the address", path=uri)
    root = folder_of_pattern(uri) or uri
    return sources, None if is_one else mask_secrets(root)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSource(Source):
    """A file that is reached through fsspec."""

    filesystem: Any
    inner_path: str = field(repr=False)
    """The path inside ``filesystem``."""
    retry_seconds: float
    is_local: ClassVar[bool] = False

    @property
    def identity(self) -> str:
        return re.split("[?#]", self.path)[0]

    def read_at(self, offset: int, length: int) -> bytes:
        length = max(0, min(length, self.num_bytes - offset))
        request = partial(self._request, offset, length)
        return with_retries(request, self.path, self.retry_seconds) if length else b""

    def open_arrow(self, ahead: int = 0, *, is_mapped: bool = False) -> pa.NativeFile:
        size = min(max(_LEAST_REQUEST_BYTES, ahead), self.num_bytes + 1)
        return pa.PythonFile(io.BufferedReader(SourceFile(self), size), mode="r")

    def _request(self, offset: int, length: int) -> bytes:
        filesystem = self.filesystem
        if getattr(filesystem, "_pid", os.getpid()) != os.getpid():
            # Its event loop stayed behind in the process that forked this one.
            filesystem = type(filesystem)(*filesystem.storage_args, **filesystem.storage_options)
        has_tag, protocols = self.version.startswith('"'), filesystem.protocol
        if "s3" in protocols and has_tag:
            with filesystem.open(self.inner_path, size=self.num_bytes, cache_type="none") as file:
                file.req_kw = {**file.req_kw, "IfMatch": self.version}
                file.seek(offset)
                data = bytes(file.read(length))
        else:
            settings = dict[str, Any]()
            if "http" in protocols:
                headers = {**filesystem.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
                if has_tag or self.version.endswith("GMT"):
                    headers["If-Match" if has_tag else "If-Unmodified-Since"] = self.version
                settings["headers"] = headers
            end = offset + length
            data = bytes(filesystem.cat_file(self.inner_path, start=offset, end=end, **settings))
        if len(data) == self.num_bytes > length:
            raise DataError(
                "the server does not support range requests; download the file first",
                path=self.path,
            )
        if len(data) != length:
            raise EOFError(f"{len(data):,} instead of {length:,} bytes came from byte {offset:,}")
        return data


class SourceFile(io.RawIOBase):
    """A ``Source`` as a Python file object; each read is a request."""

    def __init__(self, source: Source) -> None:
        self._source, self._position = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.num_bytes}
        self._position = base[whence] + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._source.read_at(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
