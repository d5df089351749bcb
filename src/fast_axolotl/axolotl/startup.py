"""Start ``axolotl preprocess`` and ``axolotl train`` sooner.

``begin`` runs in these commands only, when ``axolotl`` is first looked for.
``FAST_AXOLOTL_SKIP=imports`` leaves all of it out.

- Where numba's cache does not have the kernels that the configuration asks for, a process of its
  own compiles them while this one imports Axolotl. It costs 2 s of another processor, once.
- Garbage is looked for among young objects every 100,000 of them, not every 700: while 6,000
  modules are imported, it runs 1,900 times and finds little. What waits is some megabytes. A
  training has Python's own setting again before its trainer is built.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from fast_axolotl import kernels

SWITCH_NAME = "imports"
"""By which ``FAST_AXOLOTL_SKIP`` and ``--skip`` know all of this."""

_THRESHOLDS = (100_000, 20, 100)
_COMMAND = re.compile(
    r"(?:^|[\0/])(?:axolotl[./]cli[./](preprocess|train)(?:\.py)?|"
    r"(?:axolotl|axolotl[./]cli[./]main(?:\.py)?)\0(preprocess|train))(?:\0|$)"
)

_LAST_IMPORT = "axolotl.core.builders"
"""What a training imports last: after the data are there, before the trainer is."""

_KERNELS = {
    "dataset_exact_deduplication": ("rowhash.absorb", "digests.insert"),
    "sample_packing": ("binpack.first_fit", "binpack.collect"),
}
"""Key of the configuration to the kernels behind it."""

_COMPILE = """
import os
if os.fork():
    os._exit(0)
import importlib, sys
for name in sys.argv[1:]:
    module, _, kernel = name.partition(".")
    getattr(importlib.import_module("fast_axolotl.kernels." + module), kernel).compile()
"""
"""Nobody waits for it, and nobody is left with a child that it did not start."""


def begin() -> bool:
    """Prepares the start of a preprocess or a training; ``False`` where this process is none."""
    name = command(sys.orig_argv)
    if not name:
        return False
    if missing := kernels_to_compile(sys.orig_argv, os.environ):
        import subprocess

        environment = {**os.environ, "FAST_AXOLOTL": "0"}
        quiet = subprocess.DEVNULL
        line = [sys.executable, "-c", _COMPILE, *missing]
        with suppress(OSError):
            subprocess.run(line, env=environment, stdout=quiet, stderr=quiet, check=False)
    import wrapt

    before = gc.get_threshold()
    if gc.isenabled() and before[0] < _THRESHOLDS[0]:
        gc.set_threshold(*_THRESHOLDS)
        if name == "train":
            wrapt.register_post_import_hook(lambda _: gc.set_threshold(*before), _LAST_IMPORT)
    return True


def command(arguments: Sequence[str]) -> str:
    """``preprocess`` or ``train`` where a command line is that, in any of Axolotl's ways."""
    found = _COMMAND.search("\0".join(arguments))
    return "" if found is None else found[1] or found[2]


def kernels_to_compile(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Kernels that a command needs by its configuration and that numba's cache does not have."""
    from pathlib import Path

    rank = environment.get("RANK", environment.get("LOCAL_RANK", "0"))
    text = ""
    with suppress(OSError, UnicodeDecodeError):
        paths = [Path(item) for item in arguments if item.endswith((".yml", ".yaml"))]
        text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    needed = [name for key, names in _KERNELS.items() if key in text for name in names]
    cached = environment.get("NUMBA_CACHE_DIR")
    home = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folders = (Path(cached),) if cached else (Path(kernels.__path__[0]), Path(home, "numba"))
    return [
        name
        for name in needed
        if rank == "0" and not any(any(path.glob(f"*/{name}-*.nbi")) for path in folders)
    ]
