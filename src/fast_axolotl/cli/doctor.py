"""``fast-axolotl doctor``: what is installed, what is accelerated, what cannot be measured here.

Versions come from the metadata of installed packages and patches are checked against source files,
so neither torch nor Axolotl is imported. What is missing is listed with its cure and is no fault;
why a single figure is missing stands in each record. What is broken is a problem, and the exit code
is then 1: another package of this name, a dependency that is missing, or no folder for compiled
kernels. ``pip check`` compares versions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from typer import Exit

from fast_axolotl import __version__
from fast_axolotl.cli.options import ResultAsJson, print_result
from fast_axolotl.report.document import Block, Bullets, Document, Section, Table
from fast_axolotl.system import PROC, describe

_REQUIRED = ("numba", "numpy", "pyarrow", "psutil", "msgspec", "fsspec", "rich", "typer", "wrapt")
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


def doctor(as_json: ResultAsJson = False) -> None:
    """Show what is installed, what is accelerated, and what cannot be measured here.

    Every gap comes with its reason and its cure.

    The exit code is 1 if the installation is broken, and 0 otherwise.
    """
    from fast_axolotl.axolotl import status_line

    machine = describe()
    versions = {name: _version(name) for name in (*_REQUIRED, *_OPTIONAL)}
    found = {
        "fast-axolotl": __version__,
        "machine": {name: machine.get(name) for name in ("python", "system", "cpu", "cores")},
        "installed": {name: version for name, version in versions.items() if version},
        "accelerations": status_line(os.environ),
        "unavailable": [
            {"what": what, "why": why, "cure": cure} for what, (why, cure) in find_gaps().items()
        ],
        "problems": list(find_problems()),
    }
    print_result(found, _document(found), as_json=as_json)
    if found["problems"]:
        raise Exit(1)


def _document(found: dict[str, Any]) -> Document:
    """Versions, then what is missing with its cure, then what is broken."""
    machine, installed, gaps = found["machine"], found["installed"], found["unavailable"]
    missing = [name for name in _OPTIONAL if name not in installed]
    rows = [
        ("fast-axolotl", f"{__version__}, Python {machine['python']}, {machine['system']}"),
        ("installed", ", ".join(f"{name} {text}" for name, text in installed.items()) or "–"),
        ("not installed", ", ".join(missing) or "–"),
        ("accelerated", found["accelerations"]),
    ]
    lines = [f"{gap['what']}: {gap['why']}. {gap['cure']}." for gap in gaps]
    gaps_title = "Not available here:" if gaps else "Everything can be measured here."
    title = "Broken:" if found["problems"] else "Nothing is broken."
    blocks: list[Block] = [
        Table(rows=rows),
        Section(title=gaps_title, blocks=[Bullets(lines)]),
        Section(title=title, blocks=[Bullets(found["problems"])]),
    ]
    return Document(title="", blocks=blocks)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def find_gaps(proc: Path = PROC) -> dict[str, tuple[str, str]]:
    """What cannot be measured or used here: why, and what to do about it."""
    from fast_axolotl.measure.gpu import open_gpus

    gaps: dict[str, tuple[str, str]] = {}
    what = "GPU utilisation, memory and power"
    if not (proc / "driver" / "nvidia" / "version").exists():
        gaps[what] = "no NVIDIA driver", "Measure on the machine that has the GPU"
    elif _version("nvidia-ml-py") is None:
        gaps[what] = "nvidia-ml-py is not installed", "pip install nvidia-ml-py"
    else:
        reader = open_gpus()
        reader.close()
        if reader.reason:
            cure = "If nvidia-smi fails, too, start the container with its GPUs"
            gaps[what] = reader.reason, cure
        if (_version("torch") or "").endswith("+cpu"):
            why = "this PyTorch is built without CUDA"
            gaps["training on the GPU"] = why, "Install the CUDA build of torch"
    if not (proc / "self").exists():
        why = f"{sys.platform} has no /proc"
        gaps["memory, disk and processor figures"] = why, "Measure on Linux"
    for name, what in _OPTIONAL.items():
        if what and _version(name) is None:
            gaps[what] = f"{name} is not installed", f"pip install {name}"
    return gaps


def find_problems() -> Iterator[str]:
    """What is broken, each with its cure."""
    others = [found.version for found in metadata.distributions(name="fast-axolotl")]
    if any(version != __version__ for version in others) or any(_PACKAGE.glob("*.so")):
        yield (
            f"Another package has the same name: {__version__} is running, and its files lie "
            f"beside those of {' and '.join(others)}. pip uninstall fast-axolotl until nothing is "
            "left, then install this one again."
        )
    for name in _REQUIRED:
        if _version(name) is None:
            yield f"{name} is missing: pip install {name}."
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    asked = os.environ.get("NUMBA_CACHE_DIR")
    folders = [*([Path(asked)] if asked else []), _PACKAGE / "kernels", user_cache]
    if not any(_is_writeable(folder) for folder in folders):
        yield (
            "Compiled kernels cannot be kept, so every process compiles them again: set "
            "NUMBA_CACHE_DIR to a folder that you can write."
        )


def _is_writeable(folder: Path) -> bool:
    """Whether the folder, or the nearest one above it that exists, can be written."""
    # Path.exists raises where a folder above may not be entered.
    paths = (folder, *folder.absolute().parents)
    there = next(path for path in paths if os.access(path, os.F_OK))
    return os.access(there, os.W_OK | os.X_OK)
