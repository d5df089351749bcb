"""The operations in plain Python, as a careful programmer writes them: what everybody has anyway.

Nothing here is slow on purpose. Each gives exactly what ours gives, which is checked before it is
timed. The shapes are those of the earlier package's benchmark: no sequence is longer than a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

__all__ = ["deduplicate", "first_fit", "hash_rows", "pack", "pad", "unique_rows"]


def hash_rows(rows: Iterable[str]) -> list[str]:
    """The loop of hashlib."""
    return [sha256(row.encode()).hexdigest() for row in rows]


def deduplicate(rows: Iterable[str]) -> tuple[list[int], list[str]]:
    """The indices of the first of each row, and their hashes."""
    seen: set[str] = set()
    indices: list[int] = []
    hashes: list[str] = []
    for index, row in enumerate(rows):
        digest = sha256(row.encode()).hexdigest()
        if digest not in seen:
            seen.add(digest)
            indices.append(index)
            hashes.append(digest)
    return indices, hashes


def unique_rows(table: Any) -> list[int]:
    """The loop of Axolotl over an Arrow table: every row as a dict, as text, as a hash."""
    seen: set[str] = set()
    indices: list[int] = []
    index = 0
    for batch in table.to_batches(max_chunksize=1000):
        for row in batch.to_pylist():
            digest = sha256(str(row).encode()).hexdigest()
            if digest not in seen:
                seen.add(digest)
                indices.append(index)
            index += 1
    return indices


def pack(
    sequences: Iterable[Sequence[int]],
    max_length: int,
    pad_token_id: int,
    eos_token_id: int,
    label_pad_id: int = -100,
) -> Mapping[str, list[list[int]]]:
    """Rows in order, each sequence followed by EOS and PAD."""
    packed: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    ids_end, labels_end = (eos_token_id, pad_token_id), (eos_token_id, label_pad_id)
    paddings = (pad_token_id, label_pad_id, 0)
    ids: list[int] = []
    labels: list[int] = []
    mask: list[int] = []
    for sequence in sequences:
        if len(ids) + len(sequence) + 2 > max_length:
            _close(packed, (ids, labels, mask), paddings, max_length)
            ids, labels, mask = [], [], []
        ids += sequence
        ids += ids_end
        labels += sequence
        labels += labels_end
        mask += [1] * (len(sequence) + 1)
        mask.append(0)
    if ids:
        _close(packed, (ids, labels, mask), paddings, max_length)
    return packed


def _close(
    packed: Mapping[str, list[list[int]]],
    row: Sequence[list[int]],
    paddings: Sequence[int],
    max_length: int,
) -> None:
    for rows, values, padding in zip(packed.values(), row, paddings, strict=True):
        values += [padding] * (max_length - len(values))
        rows.append(values)


def pad(sequences: Iterable[list[int]], target_length: int, pad_value: int) -> list[list[int]]:
    """Every sequence with its padding behind it."""
    return [row + [pad_value] * (target_length - len(row)) for row in sequences]


def first_fit(lengths: Iterable[int], capacity: int, max_rows: int) -> list[list[int]]:
    """Each length into the first pack that has room for it."""
    free: list[int] = []
    packs: list[list[int]] = []
    for index, length in enumerate(lengths):
        for place, room in enumerate(free):
            if room >= length and len(packs[place]) < max_rows:
                free[place] = room - length
                packs[place].append(index)
                break
        else:
            free.append(capacity - length)
            packs.append([index])
    return packs
