"""Byte ranges of files that are not on this machine: fetched, retried, kept.

A failing request is repeated with exponential back-off and full jitter until ``retry_seconds`` have
passed; what cannot get better (no such file, no access, a request that is refused) is an error at
once. Over HTTP and S3 every answer is held against the file's tag (ETag) and size, so a file that
is replaced in the middle of a run is an error and never a wrong row; other file systems are asked
for their tag only when a dataset is opened. A connection that sends nothing for ``STALL_SECONDS``
counts as failed over HTTP; S3 and the others have time-outs of their own (s3fs: 15 s).

With a ``BlockCache``, whole blocks of ``BLOCK_BYTES`` are fetched and kept in a folder that several
processes share. Where one block of a range is missing, the range is one request. The least recently
used blocks go first. A file without a tag or date is not kept: a change of it would not be seen.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from fast_axolotl.errors import AccessError, DataError, MissingFileError, mask_secrets

_Result = TypeVar("_Result")

_log = logging.getLogger("fast_axolotl.reading")

FIRST_DELAY_SECONDS, MOST_DELAY_SECONDS = 0.5, 30.0
"""Bounds of the first and of the longest wait; each is drawn between zero and its bound, so that
many ranks that failed together do not come back together."""

STALL_SECONDS = 60.0
"""A connection that sends no byte for so long has failed."""

BLOCK_BYTES = 256 * 1024
"""What is kept together. Larger blocks would make a shard fetch more of its neighbours' bytes."""

_NEVER_BETTER = (TypeError, AttributeError, NotImplementedError, ImportError, ValueError)
_MAY_GET_BETTER = {408, 425, 429}
_TAGS = ("ETag", "etag", "blob_id")
_DATES = ("Last-Modified", "LastModified", "last_modified", "updated", "mtime", "created")
"""What fsspec's file systems call the tag of a file, and the time of its last change."""

_CHANGED = "the file changed while it was read; read a copy that nothing writes to"


clock = time.monotonic
"""A seam for tests, like ``pause``."""


def pause(seconds: float) -> None:
    """Waits, but not past the end of the program."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and threading.main_thread().is_alive():
        time.sleep(max(0.0, min(0.5, end - time.monotonic())))


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
            if path.startswith("http") and isinstance(error, FileNotFoundError):
                # fsspec's HTTP file system calls any failure to learn a size a missing file.
                cause = error.__cause__ or error
            status, wait = _answer_in(cause)
            name, text = type(cause).__name__, " ".join(str(cause).split())
            # A traceback would show the cause as it is, with the secrets in its address.
            shown = cause if mask_secrets(text) == text else None
            if isinstance(cause, FileNotFoundError) or status in (404, 410):
                text = "no such file or folder; check the address"
                raise MissingFileError(text, path=path) from None
            if isinstance(cause, PermissionError) or status in (401, 403) or "Credential" in name:
                text = f"access denied ({name}); check the credentials"
                raise AccessError(text, path=path) from None
            if status in (412, 416) or name == "FileExpired":
                raise DataError(_CHANGED, path=path) from None
            is_final = isinstance(cause, _NEVER_BETTER) and name != "JSONDecodeError"
            if is_final or (status and 400 <= status < 500 and status not in _MAY_GET_BETTER):
                text = f"the request failed with {name}: {text}; check address and storage_options"
                raise DataError(text, path=path) from shown
            most = min(MOST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(attempt - 1, 30))
            delay = max(random.uniform(0, most), wait or 0.0)
            spent = clock() - began
            if spent + delay > seconds or not threading.main_thread().is_alive():
                asked = f" (the server asked to wait {wait:,.0f} s)" if wait else ""
                raise DataError(
                    f"the connection failed {attempt} times in {spent:,.0f} s, last with {name}: "
                    f"{text}{asked}; check the network and resume from the last saved state, or "
                    "pass a larger retry_seconds",
                    path=path,
                ) from shown
            if attempt == 3:
                text = mask_secrets(f"{path}: the connection failed ({text or name})")
                _log.warning("%s; retrying for up to %.0f s", text, seconds)
        pause(delay)


def _answer_in(error: BaseException | None) -> tuple[int | None, float | None]:
    """The HTTP status that an exception of any library shows, and the seconds to wait."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):  # botocore
            answer = response.get("ResponseMetadata", {})
            status, headers = answer.get("HTTPStatusCode"), answer.get("HTTPHeaders")
        else:
            names = ("status", "status_code")
            values = [getattr(item, name, None) for item in (error, response) for name in names]
            status = next((value for value in values if isinstance(value, int)), None)
            headers = getattr(error, "headers", None) or getattr(response, "headers", None)
        if status is not None:
            wait = str((headers or {}).get("retry-after", ""))
            return status, float(wait) if re.fullmatch(r"\d+(\.\d+)?", wait) else None
        error = error.__cause__
    return None, None


def version_of(details: dict[str, Any]) -> str:
    """What changes with the content, of fsspec's details; empty where there is nothing such."""
    values = (details.get(key) for key in _TAGS + _DATES)
    return next((str(value) for value in values if value not in (None, "")), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A file that is reached through fsspec."""

    path: str
    """The address as it may be shown."""
    filesystem: Any
    inner_path: str = field(repr=False)
    """The path inside ``filesystem``."""
    num_bytes: int
    version: str = ""
    retry_seconds: float = 300.0
    cache: BlockCache | None = None

    def read(self, offset: int, length: int) -> bytes:
        """These bytes, all of which lie inside the file."""
        if self.cache is None or not self.version:
            return self._fetch(offset, length)
        # Of a signed address only a tag can say that another signature means the same file.
        has_tag = self.version.startswith(('"', "W/"))
        name = re.split(r"[?#]", self.inner_path)[0] if has_tag else self.inner_path
        text = f"{name}\n{self.num_bytes}\n{self.version}"
        key = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]
        first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
        begin, stop = first * BLOCK_BYTES, min((last + 1) * BLOCK_BYTES, self.num_bytes)
        starts = range(begin, stop, BLOCK_BYTES)
        names = [f"{key}-{index}" for index in range(first, last + 1)]
        sizes = [min(BLOCK_BYTES, stop - start) for start in starts]
        kept = [self.cache.read(name, size) for name, size in zip(names, sizes, strict=True)]
        if None not in kept:
            whole = b"".join(kept)  # type: ignore[arg-type]
        else:
            whole = self._fetch(begin, stop - begin)
            for name, start in zip(names, starts, strict=True):
                self.cache.write(name, whole[start - begin :][:BLOCK_BYTES])
        return whole[offset - begin :][:length]

    def _fetch(self, offset: int, length: int) -> bytes:
        def attempt() -> bytes:
            data = self._request(offset, length)
            if len(data) != length:
                raise EOFError(
                    f"{len(data):,} instead of {length:,} bytes came from byte {offset:,}"
                )
            return data

        try:
            return with_retries(attempt, self.path, self.retry_seconds)
        except AccessError as error:
            if "?" not in self.inner_path:
                raise
            raise AccessError(
                "access is denied now, though it worked when the file was opened: the signed URL "
                "has expired; open a new signed URL and load the last saved state",
                path=self.path,
            ) from error

    def _request(self, offset: int, length: int) -> bytes:
        filesystem = self.filesystem
        if getattr(filesystem, "_pid", os.getpid()) != os.getpid():
            # Its event loop stayed behind in the process that forked this one.
            filesystem = type(filesystem)(*filesystem.storage_args, **filesystem.storage_options)
        if hasattr(filesystem, "set_session") and self.inner_path.startswith("http"):
            from fsspec.asyn import sync

            return bytes(sync(filesystem.loop, self._request_http, filesystem, offset, length))
        if "s3" in filesystem.protocol and self.version.startswith('"'):
            with filesystem.open(self.inner_path, size=self.num_bytes, cache_type="none") as file:
                file.req_kw = {**file.req_kw, "IfMatch": self.version}
                file.seek(offset)
                return bytes(file.read(length))
        return bytes(filesystem.cat_file(self.inner_path, start=offset, end=offset + length))

    async def _request_http(self, filesystem: Any, offset: int, length: int) -> bytes:
        """fsspec's own request hides the headers of the answer, which tell what was sent."""
        import aiohttp

        headers = {
            **filesystem.kwargs.get("headers", {}),
            "Range": f"bytes={offset}-{offset + length - 1}",
            "Accept-Encoding": "identity",
        }
        session = await filesystem.set_session()
        url = filesystem.encode_url(self.inner_path)
        limit = aiohttp.ClientTimeout(sock_connect=STALL_SECONDS, sock_read=STALL_SECONDS)
        options = {**filesystem.kwargs, "headers": headers, "timeout": limit}
        async with session.get(url, **options) as response:
            response.raise_for_status()
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            name = "ETag" if self.version.startswith(('"', "W/")) else "Last-Modified"
            # A server that compresses as it goes calls a tag weak, or says so in it.
            tags = [
                tag.removeprefix("W/").replace("-gzip", "")
                for tag in (self.version, response.headers.get(name))
                if tag
            ]
            if (total.isdigit() and int(total) != self.num_bytes) or len(set(tags)) > 1:
                raise DataError(_CHANGED, path=self.path)
            if response.status == 200 and length < self.num_bytes:
                raise DataError(
                    "the server does not support range requests; download the file first",
                    path=self.path,
                )
            return bytes(await response.read())


_unseen_bytes: dict[str, float] = {}
"""What this process has written to each folder since it last looked; infinite if that fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCache:
    """Blocks in a folder, shared by threads and processes.

    A block is a file with a checksum at its end, written beside and renamed. A process that has
    written a hundredth of ``num_bytes`` since it last looked removes the least recently read blocks
    where all of them have more than ``num_bytes``. Reading and writing take no lock.
    """

    folder: str
    num_bytes: int

    def read(self, name: str, length: int | None = None) -> bytes | None:
        """A block, if it is there and whole."""
        path = Path(self.folder, name[:2], name)
        with suppress(OSError):
            data = path.read_bytes()
            has_length = length is None or len(data) == length + 4
            if has_length and _checksum(data[:-4]) == data[-4:]:
                os.utime(path)
                return data[:-4]
            path.unlink()
        return None

    def write(self, name: str, data: bytes) -> None:
        """Keeps a block; a disk that refuses ends the keeping, not the run."""
        unseen = _unseen_bytes.get(self.folder, self.num_bytes) + len(data)
        if unseen == math.inf:
            return
        path = Path(self.folder, name[:2], name)
        part = path.with_name(f"{name}.{os.getpid()}-{threading.get_ident()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data + _checksum(data))
            if unseen > self.num_bytes // 100:
                self._make_room(len(data))
                unseen = 0
            part.replace(path)
            _unseen_bytes[self.folder] = unseen
        except OSError as error:
            _unseen_bytes[self.folder] = math.inf
            _log.warning("%s: reading without this cache folder: %s", self.folder, error)
            with suppress(OSError):
                part.unlink()

    def _make_room(self, size: int) -> None:
        """Removes what was read longest ago until a tenth is free, if more than that is held."""
        found: list[tuple[float, int, Path]] = []
        for path in Path(self.folder).glob("??/*"):
            with suppress(OSError):
                facts = path.stat()
                if path.suffix != ".part":
                    found.append((facts.st_mtime, facts.st_size, path))
                elif facts.st_mtime < time.time() - 3600:
                    path.unlink()  # of a process that was killed
        total = sum(held for _, held, _ in found) + size
        if total > self.num_bytes:
            for _, held, path in sorted(found):
                path.unlink(missing_ok=True)
                total -= held
                if total <= self.num_bytes * 9 // 10:
                    break


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")
