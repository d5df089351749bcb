"""Hash rows and keep the first of each: lists of text, Arrow tables, whole datasets.

Reading order: ``hashing`` is SHA-256 over lists and Arrow columns. ``row_bytes`` turns a column
into the bytes that are compared, ``seen`` is the set of rows met so far, in memory and on disk, and
``rows`` finds the new ones of a table. ``files`` does the same for datasets of any size, with
``output`` for the result.
"""

from fast_axolotl.dedupe.files import DedupeSummary, dedupe_files
from fast_axolotl.dedupe.hashing import deduplicate_indices, parallel_hash_rows
from fast_axolotl.dedupe.rows import unique_rows
from fast_axolotl.dedupe.seen import SeenRows

__all__ = [
    "DedupeSummary",
    "SeenRows",
    "dedupe_files",
    "deduplicate_indices",
    "parallel_hash_rows",
    "unique_rows",
]
