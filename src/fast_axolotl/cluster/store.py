"""The work folder of a job, on a local disk, a shared disk or an object store.

A file appears under its name when it is complete. Two tasks that write the same file write the same
bytes, so the later one may replace the earlier.
"""

from __future__ import annotations

import errno
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from fast_axolotl.axolotl.tokenized_shards import take_lock
from fast_axolotl.dedupe.output import disk_errors
from fast_axolotl.errors import UsageError
from fast_axolotl.reading.remote import with_retries

_RETRY_SECONDS = 60.0
"""For so long, a request that fails is tried again; then its task is, on another node."""
_BEAT_SECONDS = 10.0


class Store:
    """Files by their names below a path or URL, with ``/`` between folders."""

    def __init__(self, url: str) -> None:
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root: str = root.rstrip("/")
        # A path becomes absolute, which other processes understand.
        self.url = self._root if self.is_local else url

    @property
    def is_local(self) -> bool:
        """Whether its files are files of this machine's file system, shared ones included."""
        return isinstance(self._fs, LocalFileSystem)

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
        """Nobody else works in the folder meanwhile."""
        mark, ended, is_free = f"{self._root}.lock", threading.Event(), True

        def show_life() -> None:
            """In an object store, which has no locks: every few seconds, as long as it works."""
            is_over = False
            while not is_over:
                self._ask("pipe_file", mark, str(time.time()).encode())
                is_over = ended.wait(_BEAT_SECONDS)
            self._fs.rm_file(mark)

        with ExitStack() as held:
            if self.is_local:
                Path(mark).parent.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context(Path(mark).open("ab"))
                is_free = take_lock(lock.fileno(), Path(mark)) is not False
            else:
                with suppress(FileNotFoundError):
                    last = float(self._ask("cat_file", mark))
                    is_free = time.time() - last > 3 * _BEAT_SECONDS
            if not is_free:
                raise UsageError(
                    f"another job is using {self.url}; wait until it ends, or pass another --work "
                    "and another --output"
                )
            if self.is_local:
                held.callback(Path(mark).unlink, missing_ok=True)
            else:
                held.enter_context(ThreadPoolExecutor(1)).submit(show_life)
                held.callback(ended.set)
            yield

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A local path to write to; what is there at the end gets the name."""
        target = Path(self.path(name))
        if self.is_local:
            target.parent.mkdir(parents=True, exist_ok=True)
        place = target.parent if self.is_local else None
        with tempfile.TemporaryDirectory(prefix=".fast-axolotl-", dir=place) as folder:
            beside = Path(folder, target.name)
            try:
                yield beside
                if self.is_local:
                    beside.replace(target)
            except (OSError, pa.ArrowNotImplementedError) as error:
                # A full disk, or a type that the format lacks; all else may be tried again.
                if getattr(error, "errno", errno.ENOSPC) not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                with disk_errors(place or Path(folder)):
                    raise
            if not self.is_local:
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
        return with_retries(call, str(arguments[-1]), _RETRY_SECONDS)
