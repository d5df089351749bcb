"""``fast-axolotl doctor``: what is installed, what is accelerated, what cannot be measured here.

Versions come from the metadata of installed packages and patches are checked against source files,
so neither torch nor Axolotl is imported. What is missing is listed with its cure and is no fault.
What is broken is a problem, and the exit code is then 1: another package of this name, a dependency
that is missing or too old, or no folder for compiled kernels.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import typer

from fast_axolotl import __version__
from fast_axolotl.cli.options import ResultAsJson, examples
from fast_axolotl.system import CGROUP, PROC, describe, find_memory_cgroup

DOCTOR_EXAMPLES = examples("doctor", "doctor --json")

_OPTIONAL = {
    "torch": "training loops and torch output",
    "transformers": "",
    "datasets": "",
    "axolotl": "accelerated Axolotl",
    "trl": "",
    "ray": "prepare --engine ray",
    "plotly": "the HTML report",
    "jinja2": "the HTML report",
    "nvidia-ml-py": "",
    "s3fs": "s3:// paths",
}
"""Distributions that this package can use, and what is missing without them where it is ours."""

_PACKAGE = Path(__file__).parents[1]


class _Gap(NamedTuple):
    """Something that does not work here, and is no fault of the installation."""

    what: str
    why: str
    cure: str


def doctor(as_json: ResultAsJson = False) -> None:
    """Show what is installed, what is accelerated, and what cannot be measured here.

    Every gap comes with its reason and its cure.

    The exit code is 1 if the installation is broken, and 0 otherwise.
    """
    from fast_axolotl.axolotl import status_line
    from fast_axolotl.report.terminal import show_pairs

    machine = describe()
    required = [name for name, _, is_extra in _requirements() if not is_extra]
    versions = {name: _version(name) for name in (*required, *_OPTIONAL)}
    installed = {name: version for name, version in versions.items() if version}
    accelerated = status_line(os.environ)
    gaps, problems = list(_gaps()), list(_problems())
    if as_json:
        found = {
            "fast-axolotl": __version__,
            "machine": {name: machine.get(name) for name in ("python", "system", "cpu", "cores")},
            "installed": installed,
            "accelerations": accelerated,
            "unavailable": [gap._asdict() for gap in gaps],
            "problems": problems,
        }
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        lines = [
            ("fast-axolotl", f"{__version__}, Python {machine['python']}, {machine['system']}"),
            ("installed", ", ".join(f"{name} {text}" for name, text in installed.items())),
            ("not installed", ", ".join(name for name in versions if name not in installed)),
            ("accelerated", accelerated),
        ]
        show_pairs("", [(name, text or "–") for name, text in lines])
        print("\nNot available here:" if gaps else "\nEverything can be measured here.")
        for gap in gaps:
            print(f"  {gap.what}: {gap.why}. {gap.cure}.")
        print("\nBroken:" if problems else "\nNothing is broken.")
        for problem in problems:
            print(f"  {problem}")
    if problems:
        raise typer.Exit(1)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> Iterator[tuple[str, str, bool]]:
    """Name, least version, and whether an extra asks for it; none where this runs from source."""
    try:
        lines = metadata.requires("fast-axolotl") or []
    except metadata.PackageNotFoundError:
        return
    for line in lines:
        if found := re.match(r"([\w.-]+)[^;>]*>=([\d.]+)", line):
            yield found[1], found[2], "extra ==" in line


def _gaps(proc: Path = PROC, cgroup_root: Path = CGROUP) -> Iterator[_Gap]:
    """What cannot be measured or used, why, and what to do about it."""
    from fast_axolotl.measure.processes import read_io, read_pss, read_run_delay

    yield from _gpu_gaps(proc)
    if not (proc / "self").exists():
        why = f"{sys.platform} has no /proc"
        yield _Gap("memory, disk and processor figures", why, "Measure on Linux")
    else:
        if read_pss("self", proc=proc) is None:
            why = "/proc/PID/smaps_rollup cannot be read"
            cure = "Use Linux 4.14 or newer, and a container that does not hide it"
            yield _Gap("memory that counts shared pages once (PSS)", why, cure)
        if read_io("self", proc=proc) is None:
            why = "/proc/PID/io cannot be read"
            yield _Gap("bytes read per process", why, "Measure as the user who owns the run")
        if read_run_delay("self", proc=proc) is None:
            why = "/proc/PID/schedstat has no counts"
            yield _Gap("time spent waiting for a processor", why, "Use a kernel with SCHED_INFO")
        if not (proc / "pressure" / "memory").exists():
            cure = "Boot with psi=1, or use a kernel with CONFIG_PSI"
            yield _Gap("time lost to memory and disk pressure (PSI)", "no /proc/pressure", cure)
        if find_memory_cgroup(proc=proc, root=cgroup_root) is None:
            cure = f"Mount {CGROUP} in the container; on a plain machine, nothing is lost"
            yield _Gap("memory limit and kills of a container", "no memory cgroup", cure)
    if not hasattr(os, "O_DIRECT"):
        yield _Gap("disk speed", "this system has no O_DIRECT", "Measure on Linux")
    for name, what in _OPTIONAL.items():
        if what and _version(name) is None:
            yield _Gap(what, f"{name} is not installed", f"pip install {name}")


def _gpu_gaps(proc: Path) -> Iterator[_Gap]:
    from fast_axolotl.measure.gpu import open_gpus

    what = "GPU utilisation, memory and power"
    if not (proc / "driver" / "nvidia" / "version").exists():
        yield _Gap(what, "no NVIDIA driver", "Measure on the machine that has the GPU")
        return
    reader = open_gpus()
    reader.close()
    if _version("nvidia-ml-py") is None:
        yield _Gap(what, "nvidia-ml-py is not installed", "pip install nvidia-ml-py")
    elif reader.reason:
        cure = "If nvidia-smi fails, too, start the container with its GPUs"
        yield _Gap(what, reader.reason, cure)
    if (_version("torch") or "").endswith("+cpu"):
        why = "this PyTorch is built without CUDA"
        yield _Gap("training on the GPU", why, "Install the CUDA build of torch")


def _problems() -> Iterator[str]:
    """What is broken, each with its cure."""
    for found in metadata.distributions(name="fast-axolotl"):
        if found.version != __version__:
            yield (
                f"fast-axolotl {found.version} is installed, but {__version__} is running. "
                "Another package has the same name: pip uninstall fast-axolotl, then install this "
                "one again."
            )
    if any(_PACKAGE.glob("*.so")):
        yield (
            "Files of another package with the same name lie in this one: pip uninstall "
            "fast-axolotl until nothing is left, then install this one again."
        )
    for name, least, is_extra in dict.fromkeys(_requirements()):
        version = _version(name)
        if version is None and not is_extra:
            yield f"{name} is missing: pip install '{name}>={least}'."
        elif version is not None and _numbers(version) < _numbers(least):
            yield f"{name} {version} is too old: pip install '{name}>={least}'."
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    asked = os.environ.get("NUMBA_CACHE_DIR")
    folders = [*([Path(asked)] if asked else []), _PACKAGE / "kernels", user_cache]
    if not any(_is_writeable(folder) for folder in folders):
        yield (
            "Compiled kernels cannot be kept, so every process compiles them again: set "
            "NUMBA_CACHE_DIR to a folder that you can write."
        )


def _numbers(version: str) -> list[int]:
    """The release of a version, to compare: ``2.13.0+cpu`` is [2, 13]."""
    numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[^\d.]", version)[0])]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def _is_writeable(folder: Path) -> bool:
    """Whether the folder, or the nearest one above it that exists, can be written."""
    # Path.exists raises where a folder above may not be entered.
    paths = (folder, *folder.absolute().parents)
    there = next(path for path in paths if os.access(path, os.F_OK))
    return os.access(there, os.W_OK | os.X_OK)
