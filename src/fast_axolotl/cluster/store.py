"""The folder of a job: on a local disk, on a shared one, or in an object store.

A file appears under its name when it is complete. Two tasks that write the same file write the same
bytes, so the later one may replace the earlier.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec


@dataclass(slots=True)
class Store:
    """Files by their names below a path or URL, with ``/`` between folders."""

    url: str
    _fs: Any = field(init=False, repr=False)
    _root: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._fs, root = fsspec.core.url_to_fs(self.url)
        self._root = root.rstrip("/")

    @property
    def is_local(self) -> bool:
        """Whether its files are files of this machine's file system, shared ones included."""
        protocols = self._fs.protocol
        return "file" in ((protocols,) if isinstance(protocols, str) else protocols)

    def path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def anchored(self) -> Store:
        """The same with an absolute path, which other processes understand."""
        return Store(self._root) if self.is_local else self

    def exists(self, name: str) -> bool:
        return bool(self._fs.exists(self.path(name)))

    def is_there(self) -> bool:
        """Whether anything lies below its path, or a file at it."""
        if not self.is_local:
            return bool(self.names(""))
        place = Path(self._root)
        return any(place.iterdir()) if place.is_dir() else place.exists()

    def open(self, name: str) -> Any:
        """A file to read from, by ranges where it is remote."""
        return self._fs.open(self.path(name))

    def names(self, folder: str) -> set[str]:
        """The names of the files in a folder, without it."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self.path(folder), detail=False)
        except FileNotFoundError:
            return set()
        names = {path.rstrip("/").rsplit("/", 1)[-1] for path in found}
        return {name for name in names if not name.startswith(".")}

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A local path to write to; what is there at the end gets the name."""
        target = Path(self.path(name))
        if self.is_local:
            target.parent.mkdir(parents=True, exist_ok=True)
            beside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
            try:
                yield beside
                beside.replace(target)
            finally:
                beside.unlink(missing_ok=True)
            return
        with tempfile.TemporaryDirectory(prefix="fast-axolotl-") as folder:
            beside = Path(folder, target.name)
            yield beside
            self._fs.put_file(str(beside), self.path(name))

    @contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """A local path to read from: the file itself, or a copy for as long as it is used."""
        if self.is_local:
            yield Path(self.path(name))
            return
        with tempfile.TemporaryDirectory(prefix="fast-axolotl-") as folder:
            copy = Path(folder, name.rsplit("/", 1)[-1])
            self._fs.get_file(self.path(name), str(copy))
            yield copy

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Some bytes of a file."""
        if self.is_local:
            with Path(self.path(name)).open("rb") as file:
                file.seek(start)
                return file.read(stop - start)
        data: bytes = self._fs.cat_file(self.path(name), start=start, end=stop)
        return data

    def write_json(self, name: str, value: Any) -> None:
        with self.writing(name) as path:
            path.write_text(json.dumps(value), encoding="utf-8")

    def read_json(self, name: str) -> Any:
        return json.loads(self._fs.cat_file(self.path(name)))

    def free_bytes(self) -> int | None:
        """What the disk has left; ``None`` where nobody counts."""
        if not self.is_local:
            return None
        folder = Path(self._root)
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def remove(self, folder: str = "") -> None:
        """Removes a folder with all it holds; of the whole job, first what says that it is one."""
        for name in [folder] if folder else ["job.json", ""]:
            with suppress(OSError):
                self._fs.rm(self.path(name), recursive=True)
