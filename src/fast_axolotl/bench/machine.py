"""Where a benchmark runs: processor, memory, system, versions. Nothing that names the machine."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from fast_axolotl.bench.matrix import Machine

__all__ = ["available_bytes", "describe_machine"]

_DISTRIBUTIONS = (
    "numpy",
    "numba",
    "pyarrow",
    "datasets",
    "polars",
    "duckdb",
    "torch",
    "transformers",
    "accelerate",
    "axolotl",
)


def describe_machine(proc: Path = Path("/proc")) -> Machine:
    """This machine, as far as it tells."""
    from fast_axolotl import __version__

    versions = {"fast-axolotl": __version__}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    memory = _value(proc / "meminfo", "MemTotal")
    return Machine(
        cpu=_value(proc / "cpuinfo", "model name"),
        cores=_cores(),
        memory_bytes=int(memory.split()[0]) * 1024 if memory else None,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        versions=versions,
        load_average=_load_average(proc / "loadavg"),
    )


def available_bytes(proc: Path = Path("/proc")) -> int | None:
    """Memory that can be had without swapping; ``None`` where the system does not say."""
    found = _value(proc / "meminfo", "MemAvailable")
    return None if found is None else int(found.split()[0]) * 1024


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _value(path: Path, key: str) -> str | None:
    """The value of the first ``key : value`` line."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == key), None)


def _load_average(path: Path) -> float | None:
    try:
        return float(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
