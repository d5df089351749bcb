"""The memory cgroup a process lives in: its limit, its use, and its pressure.

Version 2 where the memory controller is there, else version 1. In a container the path that
``/proc/PID/cgroup`` names may be the host's, which does not exist inside; then the mount's own root
is the container's cgroup.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fast_axolotl.measure.procfs import PROC, read_bytes_of

__all__ = ["CGROUP", "MemoryCgroup", "find_memory_cgroup"]

CGROUP = Path("/sys/fs/cgroup")

_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as the largest whole number of pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCgroup:
    """A cgroup and those above it."""

    version: Literal[1, 2]
    folders: tuple[Path, ...]
    """The process's own first, the mount last."""

    def limit_bytes(self) -> int | None:
        """The least limit of all of them; ``None`` where nobody sets one."""
        names = ("memory.max", "memory.high") if self.version == 2 else ("memory.limit_in_bytes",)
        found = (_number(folder / name) for folder in self.folders for name in names)
        return min(
            (value for value in found if value is not None and value < _UNLIMITED), default=None
        )

    def used_bytes(self) -> int | None:
        """What the cgroup holds, less the file pages nobody has touched lately.

        Those are dropped before anything is refused or killed; with them, every process that reads
        a large file would seem to stand at the limit.
        """
        name = "memory.current" if self.version == 2 else "memory.usage_in_bytes"
        used = _number(self.folders[0] / name)
        if used is None:
            return None
        key = b"inactive_file" if self.version == 2 else b"total_inactive_file"
        return max(0, used - (_stat_value(self.folders[0] / "memory.stat", key) or 0))

    def pressure_file(self, name: Literal["memory", "io"]) -> Path | None:
        """The PSI file of this cgroup; ``None`` where it has none of its own."""
        path = self.folders[0] / f"{name}.pressure"
        return path if self.version == 2 and path.exists() else None


def find_memory_cgroup(
    pid: int | str = "self", *, proc: Path = PROC, root: Path = CGROUP
) -> MemoryCgroup | None:
    """The memory cgroup of a process; ``None`` where there are no cgroups."""
    text = read_bytes_of(f"{proc}/{pid}/cgroup")
    if not text:
        return None
    paths = _parse(text.decode(errors="replace").splitlines())
    if "memory" in paths:
        return _climb(1, root / "memory", paths["memory"])
    if "" in paths:
        is_unified = (root / "cgroup.controllers").exists()
        return _climb(2, root if is_unified else root / "unified", paths[""])
    return None


def _parse(lines: Iterable[str]) -> dict[str, str]:
    """Controller to path; version 2 has no controller's name."""
    paths = {}
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _climb(version: Literal[1, 2], mount: Path, path: str) -> MemoryCgroup | None:
    if not mount.is_dir():
        return None
    parts = [part for part in path.split("/") if part not in ("", "..")]
    folders = [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return MemoryCgroup(
        version=version, folders=tuple(folders) if folders[0].is_dir() else (mount,)
    )


def _number(path: Path) -> int | None:
    text = (read_bytes_of(path) or b"").strip()
    return int(text) if text.isdigit() else None


def _stat_value(path: Path, key: bytes) -> int | None:
    for line in (read_bytes_of(path) or b"").splitlines():
        name, _, value = line.partition(b" ")
        if name == key and value.isdigit():
            return int(value)
    return None
