"""Token sequences in whatever form they come, as Python lists or as flat arrays, and back.

Reading order: ``tokens`` says what a token is and what flat sequences are; ``given`` reads every
form of input; ``results`` gives lists, numpy or torch.

What Python holds stays in Python's lists, so that list in, list out never leaves them; arrays
become ``Flat``: all values end to end, and offsets. A token is an integer. A bool counts as 0 or 1,
in lists and arrays alike; floats, 1.0 included, are refused, and so is an integer that the output
cannot hold: nothing is rounded or cut. A slow pass looks for the culprit after something has
failed, never before.
"""

from fast_axolotl.sequences.given import read
from fast_axolotl.sequences.results import OUTPUTS, deliver, option, untracked, untracker
from fast_axolotl.sequences.tokens import (
    DTYPES,
    Array,
    Flat,
    Rows,
    flatten,
    integer,
    lengths_of,
    plain_rows,
    require_fit,
    require_threads,
)

__all__ = [
    "DTYPES",
    "OUTPUTS",
    "Array",
    "Flat",
    "Rows",
    "deliver",
    "flatten",
    "integer",
    "lengths_of",
    "option",
    "plain_rows",
    "read",
    "require_fit",
    "require_threads",
    "untracked",
    "untracker",
]
