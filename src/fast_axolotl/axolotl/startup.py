"""Start ``axolotl preprocess`` a second faster.

``begin`` runs in that command only, when ``axolotl`` is first looked for, and does two things.
``FAST_AXOLOTL_SKIP=imports`` leaves them out.

- The garbage collector looks at young objects every 100,000 of them, not every 700: while 6,000
  modules are imported, it runs 1,900 times and finds little. What waits is at most some megabytes.
- transformers and TRL both ask which distribution every installed package is of, reading all of
  their file lists. The answer is remembered.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Sequence
from functools import cache

SWITCH_NAME = "imports"
"""By which ``FAST_AXOLOTL_SKIP`` and ``--skip`` know all of this."""

_THRESHOLDS = (100_000, 20, 100)
_COMMAND = re.compile(
    r"(?:^|[\0/])(?:axolotl[./]cli[./]preprocess(?:\.py)?|"
    r"(?:axolotl|axolotl[./]cli[./]main(?:\.py)?)\0preprocess)(?:\0|$)"
)


def begin() -> bool:
    """Prepares the start of a preprocess; ``False`` where this process is none."""
    if not is_preprocess(sys.orig_argv):
        return False
    import importlib.metadata

    if gc.isenabled() and gc.get_threshold()[0] < _THRESHOLDS[0]:
        gc.set_threshold(*_THRESHOLDS)
    ask = cache(importlib.metadata.packages_distributions)
    importlib.metadata.packages_distributions = lambda: {
        name: list(found) for name, found in ask().items()
    }
    return True


def is_preprocess(arguments: Sequence[str]) -> bool:
    """Whether a command line is Axolotl's preprocess, started in any of its ways."""
    return _COMMAND.search("\0".join(arguments)) is not None
