"""Where a run takes place: system, processor, memory, limits, versions.

Versions come from the installed packages' metadata: nothing is imported for them.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from fast_axolotl.measure.cgroup import CGROUP, find_memory_cgroup
from fast_axolotl.measure.procfs import PROC, read_bytes_of

__all__ = ["describe", "limit_bytes", "memory_bytes"]

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


def describe(proc: Path = PROC, cgroup_root: Path = CGROUP) -> dict[str, Any]:
    """This machine and what is installed on it; what it does not tell is left out."""
    found = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": _value(proc / "cpuinfo", "model name") or platform.processor() or None,
        "cores": _cores(),
        "memory_bytes": memory_bytes(proc),
        "available_bytes": _meminfo_bytes(proc, "MemAvailable"),
        "page_cache_bytes": _meminfo_bytes(proc, "Cached"),
        "swap_bytes": _meminfo_bytes(proc, "SwapTotal"),
        "limit_bytes": limit_bytes(proc, cgroup_root),
        "has_pressure": (proc / "pressure" / "memory").exists(),
        "shared_memory_bytes": _size_of_mount(Path("/dev/shm")),
        "gpu_driver": _gpu_driver(proc),
        "versions": _versions(),
    }
    return {name: value for name, value in found.items() if value is not None}


def memory_bytes(proc: Path = PROC) -> int | None:
    """Memory of the machine."""
    return _meminfo_bytes(proc, "MemTotal") or int(psutil.virtual_memory().total)


def limit_bytes(
    proc: Path = PROC, cgroup_root: Path = CGROUP, pid: int | str = "self"
) -> int | None:
    """The least memory limit of the cgroups above a process; ``None`` where there is none."""
    cgroup = find_memory_cgroup(pid, proc=proc, root=cgroup_root)
    return None if cgroup is None else cgroup.limit_bytes()


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cores() -> int:
    """What this process may run on, which can be less than what is there."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _meminfo_bytes(proc: Path, key: str) -> int | None:
    found = _value(proc / "meminfo", key)
    return None if found is None else int(found.split()[0]) * 1024


def _size_of_mount(path: Path) -> int | None:
    """Size of ``/dev/shm``: prefetched batches of loader workers lie there."""
    try:
        found = os.statvfs(path)
    except (OSError, AttributeError):
        return None
    return found.f_frsize * found.f_blocks


def _gpu_driver(proc: Path) -> str | None:
    text = read_bytes_of(proc / "driver" / "nvidia" / "version")
    if not text:
        return None
    words = text.decode(errors="replace").split()
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), None)


def _value(path: Path, key: str) -> str | None:
    """The value of the first ``key : value`` line."""
    lines = (read_bytes_of(path) or b"").decode(errors="replace").splitlines()
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == key), None)
