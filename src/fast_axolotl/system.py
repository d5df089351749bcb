"""Cores and memory that this process may use, and a description of the machine.

A container sees all cores and all memory of its host; what it may use is set by the affinity of the
process and by the limits of its cgroup and of every cgroup above it. Version 2 of cgroups is read
where it has the controller, else version 1. Inside a container the path that ``/proc/PID/cgroup``
names may be the host's, which does not exist there; the mount's root is then the container's own.

Every function takes the roots of procfs and of the cgroups, so that a test can lay them out in a
folder. A file that is not there or may not be read counts as "not known"; nothing here raises.
Versions come from the metadata of installed packages: nothing is imported for them.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")

MEASURE = "FAST_AXOLOTL_MEASURE"
"""Environment variable that names the folder of the measured run that a process is part of. Who
started it, ``run`` or ``protocol``, samples the process tree from outside."""

_CHUNK_BYTES = 1 << 20
_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes "no limit" as the largest whole number of pages."""

_DISTRIBUTIONS = (
    "fast-axolotl",
    "axolotl",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "trl",
    "bitsandbytes",
    "deepspeed",
    "flash-attn",
    "lightning",
    "torchdata",
    "numpy",
    "numba",
    "pyarrow",
    "nvidia-ml-py",
)


def usable_cores(proc: Path = PROC, cgroup_root: Path = CGROUP) -> int:
    """Cores this process may use: the fewest of its affinity and its cgroups' CPU quotas.

    The affinity is asked for at every call, the quota once. Half a core counts as one.
    """
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:
        count = os.cpu_count() or 1
    quota = _own_quota(proc=proc, root=cgroup_root)
    return max(1, min(count, count if quota is None else round(quota.cores)))


def node_name() -> str:
    """What records call this machine: its host name, unless ``FAST_AXOLOTL_NODE`` names it.

    The variable is for machines that share a name, and for tests that play several on one.
    """
    return os.environ.get("FAST_AXOLOTL_NODE") or platform.node()


def pid_namespace(proc: Path = PROC) -> str:
    """Where process numbers mean the same: the machine since it booted, and the container.

    Empty where the system does not say.
    """
    boot = (read_bytes_of(proc / "sys/kernel/random/boot_id") or b"").decode().strip()
    try:
        return f"{boot} {(proc / 'self/ns/pid').readlink()}"
    except OSError:
        return boot


def memory_bytes(proc: Path = PROC) -> int:
    """Memory of the machine."""
    known = _read_kilobytes(proc / "meminfo", "MemTotal")
    if known is None:
        import psutil

        known = int(psutil.virtual_memory().total)
    return known


def peak_memory_bytes(proc: Path = PROC) -> int | None:
    """The most resident memory that this process has had; ``None`` where there is no procfs."""
    return _read_kilobytes(proc / "self/status", "VmHWM")


def describe(proc: Path = PROC, cgroup_root: Path = CGROUP) -> dict[str, Any]:
    """This machine and what is installed on it; facts it does not offer are left out."""
    from importlib import metadata  # 10 ms that a reader, which only asks for the cores, can save

    versions = {}
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    try:
        # Prefetched batches of loader workers lie there.
        mount = os.statvfs("/dev/shm")
        shared_memory_bytes = mount.f_frsize * mount.f_blocks
    except (OSError, AttributeError):
        shared_memory_bytes = None
    cgroup = find_memory_cgroup(proc=proc, root=cgroup_root)
    driver = (read_bytes_of(proc / "driver/nvidia/version") or b"").decode(errors="replace").split()
    facts = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": _read_value(proc / "cpuinfo", "model name") or platform.processor() or None,
        "cores": usable_cores(proc, cgroup_root),
        "memory_bytes": memory_bytes(proc),
        "available_bytes": _read_kilobytes(proc / "meminfo", "MemAvailable"),
        "page_cache_bytes": _read_kilobytes(proc / "meminfo", "Cached"),
        "swap_bytes": _read_kilobytes(proc / "meminfo", "SwapTotal"),
        "limit_bytes": None if cgroup is None else cgroup.limit_bytes(),
        "has_pressure": (proc / "pressure" / "memory").exists(),
        "shared_memory_bytes": shared_memory_bytes,
        "gpu_driver": next((word for word in driver if "." in word and word[0].isdigit()), None),
        "versions": versions,
    }
    return {name: value for name, value in facts.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCgroup:
    """A memory cgroup and those above it."""

    version: Literal[1, 2]
    folders: tuple[Path, ...]
    """The process's own first, the mount last."""

    def limit_bytes(self) -> int | None:
        """The least limit of all of them; ``None`` where nobody sets one."""
        names = ("memory.max", "memory.high") if self.version == 2 else ("memory.limit_in_bytes",)
        texts = [read_bytes_of(folder / name) for folder in self.folders for name in names]
        limits = [int(text) for text in texts if text and text.strip().isdigit()]
        return min((limit for limit in limits if limit < _UNLIMITED_BYTES), default=None)

    def oom_kills(self) -> int | None:
        """Counter: its processes that the kernel killed for want of memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        return _read_counters(self.folders[0] / name).get("oom_kill")

    def pressure_file(self, name: Literal["memory", "io"]) -> Path | None:
        """The PSI file of this cgroup; ``None`` where it has none of its own."""
        path = self.folders[0] / f"{name}.pressure"
        return path if self.version == 2 and path.exists() else None


def find_memory_cgroup(
    pid: int | str = "self", *, proc: Path = PROC, root: Path = CGROUP
) -> MemoryCgroup | None:
    """The memory cgroup of a process; ``None`` where there are no cgroups."""
    paths = _cgroup_paths(pid, proc)
    version: Literal[1, 2] = 1 if "memory" in paths else 2
    mount = root if (root / "cgroup.controllers").exists() else root / "unified"
    mount, path = (root / "memory", paths["memory"]) if version == 1 else (mount, paths.get(""))
    folders = () if path is None else _folders_upwards(mount, path)
    return MemoryCgroup(version=version, folders=folders) if folders else None


def read_bytes_of(path: str | Path) -> bytes | None:
    """A small file whole, without the layers of ``open``: a sample reads hundreds of them."""
    try:
        opened = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(opened, _CHUNK_BYTES):
            parts.append(part)
        return b"".join(parts)
    except OSError:
        return None
    finally:
        os.close(opened)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuQuota:
    """How much processor time a cgroup may take."""

    cores: float
    folder: Path
    """Of the cgroup that sets it."""

    def throttled_seconds(self) -> float | None:
        """Counter: time in which tasks were ready and the quota was used up, over processors."""
        counters = _read_counters(self.folder / "cpu.stat")
        if "throttled_usec" in counters:
            return counters["throttled_usec"] / 1e6
        return counters["throttled_time"] / 1e9 if "throttled_time" in counters else None


def find_cpu_quota(
    pid: int | str = "self", *, proc: Path = PROC, root: Path = CGROUP
) -> CpuQuota | None:
    """The least CPU quota of a process's cgroups; ``None`` where none is set.

    ``200000 100000`` are two cores: 200 ms of CPU time every 100 ms; ``max`` and -1 are no limit.
    """
    paths = _cgroup_paths(pid, proc)
    folders = [
        *_folders_upwards(root, paths.get("", "/")),
        *_folders_upwards(root / "cpu", paths.get("cpu", "/")),
    ]
    quotas = []
    for folder in folders:
        version_1 = (read_bytes_of(folder / f"cpu.cfs_{n}_us") or b"" for n in ("quota", "period"))
        for text in (read_bytes_of(folder / "cpu.max") or b"", b" ".join(version_1)):
            words = text.split()
            if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
                quotas.append(CpuQuota(cores=int(words[0]) / int(words[1]), folder=folder))
    return min(quotas, key=lambda quota: quota.cores, default=None)


_own_quota = cache(find_cpu_quota)


def _cgroup_paths(pid: int | str, proc: Path) -> dict[str, str]:
    """Controller → path of a process's cgroups; version 2 names no controller."""
    paths = {}
    for line in (read_bytes_of(f"{proc}/{pid}/cgroup") or b"").decode(errors="replace").split("\n"):
        _, first_colon, rest = line.partition(":")
        controllers, second_colon, path = rest.partition(":")
        if first_colon and second_colon:
            paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _folders_upwards(mount: Path, path: str) -> tuple[Path, ...]:
    """A cgroup's folder and those above it, as far as this process can see them."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    folders = (mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))
    visible = tuple(folder for folder in folders if folder.is_dir())
    # Where its own folder is not there, the path is the host's, and parents that happen to have
    # its names are others: the mount is the container's own.
    return visible if len(visible) > len(parts) else visible[-1:]


def _read_kilobytes(path: Path, key: str) -> int | None:
    """The bytes that a ``key : number kB`` line of procfs says."""
    words = (_read_value(path, key) or "").split()
    return int(words[0]) * 1024 if words and words[0].isdigit() else None


def _read_value(path: Path, key: str) -> str | None:
    """The value of the first ``key : value`` line."""
    lines = (read_bytes_of(path) or b"").decode(errors="replace").splitlines()
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == key), None)


def _read_counters(path: Path) -> dict[str, int]:
    """The lines ``name number`` of a file."""
    lines = (line.split() for line in (read_bytes_of(path) or b"").decode().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
