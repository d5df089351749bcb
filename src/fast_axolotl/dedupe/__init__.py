"""Hash rows and keep the first of each: lists of text, Arrow tables, whole datasets.

Reading order: ``hashing`` is SHA-256 over lists and Arrow columns.
"""

from fast_axolotl.dedupe.hashing import deduplicate_indices, parallel_hash_rows

__all__ = ["deduplicate_indices", "parallel_hash_rows"]
