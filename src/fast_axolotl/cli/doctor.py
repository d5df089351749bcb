"""``fast-axolotl doctor``: what is installed, accelerated and broken, and what cannot be measured.

Versions come from the metadata of installed packages and patches are checked against source files,
so neither torch nor Axolotl is imported. What is missing is listed with its cure and is no fault;
why a single figure is missing stands in each record. What is broken is a problem, and the exit code
is then 1: another package of this name, or a dependency that is missing. ``pip check`` compares
versions; ``warmup`` fails where compiled kernels cannot be kept.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from typer import Exit

from fast_axolotl import __version__
from fast_axolotl.cli.options import AsJson, print_result, summary_document
from fast_axolotl.system import PROC, describe

_REQUIRED = ("numpy", "psutil", "msgspec", "fsspec", "rich", "typer", "wrapt")
_OPTIONAL = {
    "numba": "dedupe, packing and accelerated Axolotl",
    "pyarrow": "reading data",
    "torch": "training loops and torch output",
    "transformers": "",
    "datasets": "",
    "axolotl": "the data path of Axolotl",
    "trl": "",
    "ray": "prepare --engine ray",
    "plotly": "the HTML report",
    "jinja2": "the HTML report",
    "nvidia-ml-py": "",
    "s3fs": "s3:// paths",
}
"""Distributions that this package can use, and what is missing without them where it is ours."""

_PACKAGE = Path(__file__).parents[1]


def doctor(as_json: AsJson = False) -> None:
    """Show what is installed, what is accelerated, and what cannot be measured here.

    Each gap is listed with what to do about it. The exit code is 1 if the installation is broken,
    otherwise 0.
    """
    from fast_axolotl.axolotl import status_line

    machine = describe()
    versions = {name: _version(name) for name in (*_REQUIRED, *_OPTIONAL)}
    problems = list(find_problems())
    found = {
        "fast-axolotl": __version__,
        "machine": {name: machine.get(name) for name in ("python", "system", "cpu", "cores")},
        "installed": {name: version for name, version in versions.items() if version},
        "accelerations": status_line(os.environ),
        "unavailable": list(find_gaps()),
        "problems": problems,
    }
    shown = summary_document({**found, "problems": problems or "none: nothing is broken"})
    print_result(found, shown, as_json=as_json)
    if problems:
        raise Exit(1)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def find_gaps(proc: Path = PROC) -> Iterator[str]:
    """What cannot be measured or used here: why, and what to do about it."""
    from fast_axolotl.measure.gpu import open_gpus

    what = "GPU utilisation, memory and power"
    if not (proc / "driver" / "nvidia" / "version").exists():
        yield f"{what}: no NVIDIA driver. Measure on the machine that has the GPU."
    elif _version("nvidia-ml-py") is None:
        yield f"{what}: nvidia-ml-py is not installed. pip install nvidia-ml-py."
    else:
        reader = open_gpus()
        reader.close()
        if reader.reason:
            cure = "If nvidia-smi fails, too, start the container with its GPUs"
            yield f"{what}: {reader.reason}. {cure}."
        if (_version("torch") or "").endswith("+cpu"):
            why = "this PyTorch is built without CUDA"
            yield f"training on the GPU: {why}. Install the CUDA build of torch."
    if not (proc / "self").exists():
        why = f"{sys.platform} has no /proc"
        yield f"memory, disk and processor figures: {why}. Measure on Linux."
    for name, what in _OPTIONAL.items():
        if what and _version(name) is None:
            yield f"{what}: {name} is not installed. pip install {name}."


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
