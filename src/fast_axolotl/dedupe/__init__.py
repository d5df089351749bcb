"""Hash rows and keep the first of each: lists of text, Arrow tables, whole datasets.

Reading order: ``hashing`` is SHA-256 over lists and Arrow columns. ``parts`` turns a column into
the bytes that are compared, ``seen`` is the set of rows met so far, ``rows`` finds the new ones of
a table, and ``select`` takes them out.
"""

from fast_axolotl.dedupe.hashing import deduplicate_indices, parallel_hash_rows
from fast_axolotl.dedupe.rows import unique_rows
from fast_axolotl.dedupe.seen import SeenRows

__all__ = ["SeenRows", "deduplicate_indices", "parallel_hash_rows", "unique_rows"]
