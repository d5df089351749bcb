"""Hash rows with SHA-256 and keep the first of each.

A row is a ``str``, hashed as UTF-8, or ``bytes``; the hex digests equal hashlib's. Cost: one
digest per row, and one 64-character string in memory for each row kept or already known.

It does not compare the rows themselves: equal digests count as equal rows. ``num_threads`` is
checked and otherwise unused so far, since hashing happens in the calling thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from fast_axolotl.errors import UsageError

__all__ = ["deduplicate_indices", "parallel_hash_rows"]


def parallel_hash_rows(rows: Iterable[str | bytes], num_threads: int = 0) -> list[str]:
    """The SHA-256 hex digest of every row, in order; ``num_threads=0`` chooses by itself."""
    if num_threads < 0:
        raise UsageError(f"num_threads must be 0 (automatic) or more, not {num_threads}")
    _require_many("rows", rows)
    return [sha256(_encode(index, row)).hexdigest() for index, row in enumerate(rows)]


def deduplicate_indices(
    rows: Iterable[str | bytes],
    existing_hashes: Iterable[str] | None = None,
    num_threads: int = 0,
) -> tuple[list[int], list[str]]:
    """The indices of the rows seen for the first time, and their hashes.

    ``existing_hashes`` holds digests as ``parallel_hash_rows`` gives them; rows with one of these
    are left out.
    """
    known = () if existing_hashes is None else existing_hashes
    _require_many("existing_hashes", known)
    seen = set(known)
    indices: list[int] = []
    hashes: list[str] = []
    for index, digest in enumerate(parallel_hash_rows(rows, num_threads)):
        if digest not in seen:
            seen.add(digest)
            indices.append(index)
            hashes.append(digest)
    return indices, hashes


def _encode(index: int, row: object) -> bytes:
    if isinstance(row, bytes):
        return row
    if not isinstance(row, str):
        raise TypeError(f"row {index} is of type {type(row).__name__}: rows must be str or bytes")
    try:
        return row.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"row {index} holds the lone surrogate {row[error.start]!r} at character "
            f"{error.start}, which UTF-8 cannot express: pass bytes, or encode the row with "
            "errors='surrogatepass'"
        ) from error


def _require_many(name: str, values: object) -> None:
    if isinstance(values, str | bytes):
        raise TypeError(f"{name} is one {type(values).__name__}: pass a list of them")
