"""Start a command so that every Axolotl in its process tree is accelerated, and tell about it.

The environment carries it: a switch, and a folder in front of ``PYTHONPATH`` whose
``sitecustomize`` imports this package when ``axolotl`` is first looked for. It survives ``exec``,
``accelerate launch``, ``torchrun`` and spawned workers. It does not reach other machines, nor
interpreters that ignore ``PYTHONPATH``.

With an order to measure, a second switch makes what trains in there record itself; see
``measuring``. Watching the process tree from outside: ``supervising``.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from fast_axolotl.axolotl import RUN, SKIP, SWITCH, check
from fast_axolotl.errors import UsageError
from fast_axolotl.integrations.measuring import Order

if TYPE_CHECKING:
    from fast_axolotl.axolotl.patching import Patch

__all__ = [
    "axolotl_version",
    "find_program",
    "launch_environment",
    "status_line",
]

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
"""How a shell is told to set a variable for one command."""

_BOOT = Path(__file__).parents[1] / "boot"


def launch_environment(
    environment: Mapping[str, str],
    skip: Iterable[str] = (),
    *,
    order: Order | None = None,
    accelerate: bool = True,
) -> dict[str, str]:
    """The environment in which a command and its children find themselves accelerated, measured."""
    names = [*environment.get(SKIP, "").split(","), *skip]
    path = environment.get("PYTHONPATH")
    folders = path.split(os.pathsep) if path else []
    changed = dict(environment)
    changed[RUN] = "1"
    changed["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(_BOOT), *folders]))
    changed[SKIP] = ",".join(dict.fromkeys(filter(None, names)))
    if not accelerate:
        changed[SWITCH] = "0"
    return changed if order is None else {**changed, **order.variables()}


def find_program(name: str, environment: Mapping[str, str]) -> str:
    """The file of a command: on ``PATH``, or beside the Python that runs this package."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name, path=environment.get("PATH")) or shutil.which(name, path=beside)
    if found is None:
        raise UsageError(_why_not_found(name, beside))
    return found


def _why_not_found(name: str, beside: str) -> str:
    path = Path(name)
    if _ASSIGNMENT.match(name):
        return f"no shell runs the command, so {name!r} sets nothing: write env {name} COMMAND"
    if "/" in name and path.is_dir():
        return f"{name!r} is a folder, not a command"
    if "/" in name and path.is_file():
        return f"{name!r} is not executable: chmod +x it, or name its interpreter before it"
    return (
        f"there is no command {name!r} on PATH or in {beside}; "
        "activate the environment that has it, or give its full path"
    )


def status_line(environment: Mapping[str, str], patches: Iterable[Patch] | None = None) -> str:
    """One line: what is replaced in Axolotl, what is not, and why."""
    if environment.get(SWITCH) == "0":
        return f"Axolotl runs as it is: the environment has {SWITCH}=0"
    version = axolotl_version()
    if version is None:
        return "Axolotl is not installed beside this package: nothing to accelerate here"
    found = check() if patches is None else tuple(patches)
    parts = [f"Axolotl {version}"]
    fit = _names(found, "active", "waiting", "ready")
    parts.append(f"accelerated: {', '.join(fit)}" if fit else "nothing accelerated")
    off = _names(found, "off")
    if off:
        parts.append(f"switched off: {', '.join(off)}")
    left = [patch for patch in found if patch.state in ("skipped", "lost", "failed")]
    if left:
        # Without the module, which ``fast-axolotl status`` shows.
        reasons = [f"{item.name} ({item.reason.rpartition(':')[2].strip()})" for item in left]
        parts.append(f"left alone: {', '.join(dict.fromkeys(reasons))}")
    return "; ".join(parts)


def axolotl_version() -> str | None:
    """The version of the installed Axolotl."""
    try:
        return metadata.version("axolotl")
    except metadata.PackageNotFoundError:
        return None


def _names(patches: Iterable[Patch], *states: str) -> list[str]:
    """Switches with a replacement in one of the states, each once."""
    return list(dict.fromkeys(patch.name for patch in patches if patch.state in states))
