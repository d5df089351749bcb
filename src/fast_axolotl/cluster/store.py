"""The work folder of a job, on a local disk, a shared disk or an object store.

A file appears under its name when it is complete. Two tasks that write the same file write the same
bytes, so the later one may replace the earlier.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from fast_axolotl.axolotl.self_check import take_lock
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.reading.remote import with_retries

_RETRY_SECONDS = 60.0
"""For so long, a request that fails is tried again; then its task is, on another node."""


@dataclass(slots=True)
class Store:
    """Files by their names below a path or URL, with ``/`` between folders."""

    url: str
    _fs: Any = field(init=False, repr=False)
    _root: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._fs, root = fsspec.core.url_to_fs(self.url)
        self._root = root.rstrip("/")
        if self.is_local:
            self.url = self._root  # absolute, which other processes understand

    @property
    def is_local(self) -> bool:
        """Whether its files are files of this machine's file system, shared ones included."""
        protocols = self._fs.protocol
        return "file" in ((protocols,) if isinstance(protocols, str) else protocols)

    def path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def exists(self, name: str) -> bool:
        return bool(self._ask("exists", self.path(name)))

    def is_there(self) -> bool:
        """Whether anything lies below its path, or a file at it."""
        self._fs.invalidate_cache()
        return bool(self._ask("find", self._root))

    def sizes(self, folder: str) -> dict[str, int]:
        """The files in a folder, by their names in it, and how large they are."""
        self._fs.invalidate_cache()
        try:
            found = self._ask("ls", self.path(folder), detail=True)
        except FileNotFoundError:
            return {}
        sizes = {item["name"].rstrip("/").rpartition("/")[2]: item["size"] for item in found}
        return {name: size for name, size in sizes.items() if not name.startswith(".")}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else works in the folder meanwhile. An object store has no locks."""
        if not self.is_local:
            yield
            return
        mark = Path(f"{self._root}.lock")
        mark.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(mark, os.O_RDWR | os.O_CREAT)
        try:
            if take_lock(lock, mark) is False:
                raise UsageError(
                    f"another job is using {self.url}; wait until it ends, or pass another --work "
                    "and another --output"
                )
            try:
                yield
            finally:
                mark.unlink(missing_ok=True)
        finally:
            os.close(lock)

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A local path to write to; what is there at the end gets the name."""
        target = Path(self.path(name))
        with ExitStack() as held:
            if self.is_local:
                target.parent.mkdir(parents=True, exist_ok=True)
                beside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
                held.callback(beside.unlink, missing_ok=True)
            else:
                folder = tempfile.TemporaryDirectory(prefix="fast-axolotl-")
                beside = Path(held.enter_context(folder), target.name)
            try:
                yield beside
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise DataError(
                    "the disk is full; free space, or pass --work and --output on a larger disk. "
                    "Finished work is kept; run the same command again to continue",
                    path=str(beside.parent),
                ) from None
            if self.is_local:
                beside.replace(target)
            else:
                self._ask("put_file", str(beside), self.path(name))

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """A file, or some bytes of it."""
        data: bytes = self._ask("cat_file", self.path(name), start=start, end=stop)
        return data

    def write_array(self, name: str, array: Any) -> None:
        """The plain bytes of an array; whoever reads it knows its type."""
        with self.writing(name) as path:
            path.write_bytes(array.data)

    def read_array(self, name: str, kind: str, start: int = 0, stop: int | None = None) -> Any:
        """An array that was written, or a range of it."""
        size = np.dtype(kind).itemsize
        # Of an empty file, an object store has no range.
        return np.frombuffer(self.read(name, start * size or None, stop and stop * size), kind)

    def write_json(self, name: str, value: Any) -> None:
        with self.writing(name) as path:
            path.write_text(json.dumps(value), encoding="utf-8")

    def read_json(self, name: str) -> Any:
        return json.loads(self.read(name))

    def remove(self, folder: str = "") -> None:
        """Removes a folder with all it holds; of the whole job, first what says that it is one."""
        for name in [folder] if folder else ["job.json", ""]:
            with suppress(OSError):
                self._fs.rm(self.path(name), recursive=True)

    def _ask(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Calls a function of the file system, again where an error may pass."""
        call = partial(getattr(self._fs, name), *arguments, **options)
        return with_retries(call, self.url, _RETRY_SECONDS)
