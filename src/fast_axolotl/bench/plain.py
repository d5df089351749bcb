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
    """Rows in order, each sequence followed by EOS and PAD; labels and masks from the full rows."""
    packed: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    separators = (eos_token_id, pad_token_id)

    def close(ids: list[int], ends: list[int]) -> None:
        missing = max_length - len(ids)
        labels, mask = ids[:], [1] * len(ids)
        for end in ends:
            labels[end] = label_pad_id
            mask[end] = 0
        packed["input_ids"].append(ids + [pad_token_id] * missing)
        packed["labels"].append(labels + [label_pad_id] * missing)
        packed["attention_mask"].append(mask + [0] * missing)

    ids: list[int] = []
    ends: list[int] = []
    for sequence in sequences:
        if len(ids) + len(sequence) + 2 > max_length:
            close(ids, ends)
            ids, ends = [], []
        ids += sequence
        ids += separators
        ends.append(len(ids) - 1)
    if ids:
        close(ids, ends)
    return packed


def pad(sequences: Sequence[list[int]], target_length: int, pad_value: int) -> list[list[int]]:
    """Every sequence with its padding behind it, which is made once for each length."""
    lengths = set(map(len, sequences))
    fillers = {length: [pad_value] * (target_length - length) for length in lengths}
    return [row + fillers[len(row)] for row in sequences]


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
