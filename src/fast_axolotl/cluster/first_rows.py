"""Which rows repeat an earlier one, found in tasks: see ``dedupe.spill`` for the runs they write.

Stage ``split`` takes the rows of consecutive parts, as many as fit in memory, and writes a run of
them, without those that repeat one among them: a value that is half of all rows is one record in
each run. Stage ``unique`` reads one bucket out of every run and finds the first of each value. A
row is its 128-bit digest, which the caller made with a secret of its own.

Tasks are named by how many rows they may hold: with other memory, a job does these stages again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fast_axolotl.cluster.store import Store
from fast_axolotl.cluster.tasks import Answer, Engine, Heard, Task, run_stage
from fast_axolotl.dedupe.spill import (
    RECORD,
    ROW_BYTES,
    find_repeats,
    make_records,
    repeats_in,
    write_buckets,
)

_MOST_BUCKETS = 4096
"""Beyond so many, buckets are read several times instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows whose digests are in ``digests/NAME.npy``: two uint64 a row."""

    name: str
    num_rows: int
    first_place: int | None
    """The place of its first row among all rows, the others following; ``None`` where every row has
    a place of its own, in ``places/NAME.npy``: one int64 a row."""


def find_repeated(
    engine: Engine, store: Store, parts: Sequence[Part], *, memory: int, heard: Heard
) -> Any:
    """The places of all rows that repeat a row of an earlier place, as a sorted int64 array."""
    limit = max(1024, memory // 2 // ROW_BYTES)
    groups = {f"{limit}-{number:05d}": group for number, group in enumerate(_groups(parts, limit))}
    # A quarter is left free: buckets are not all of the same size.
    needed = sum(part.num_rows for part in parts) * 4 // (limit * 3)
    bits = min(needed.bit_length(), _MOST_BUCKETS.bit_length() - 1)
    stages: dict[str, dict[str, dict[str, Any]]] = {
        "split": {name: {"pieces": group} for name, group in groups.items()},
        "unique": {
            f"{limit}-{bucket:05d}": {"bucket": bucket, "files": list(groups), "limit": limit}
            for bucket in range(1 << bits if groups else 0)
        },
    }
    counts: dict[str, int] = {}
    for stage, given in stages.items():
        tasks = [
            Task(
                stage=stage,
                name=name,
                function=f"{__name__}:{stage}",
                arguments={"name": name, "bits": bits, **arguments},
            )
            for name, arguments in given.items()
        ]
        for name, answer in run_stage(engine, store, stage, tasks, heard).items():
            counts[f"repeated/{stage}-{name}.npy"] = answer["repeated"]
    places = np.empty(sum(counts.values()), np.int64)
    end = 0
    for name, count in counts.items():
        places[end : end + count] = load_array(store, name)
        end += count
    places.sort()
    return places


def split(store: Store, *, name: str, pieces: list[list[Any]], bits: int) -> Answer:
    """Deals the rows of some parts to buckets, without those that repeat one among them."""
    parts = [np.empty(0, RECORD)]
    for part, start, stop, first_place in pieces:
        digests = read_array(store, f"digests/{part}.npy", np.dtype(("<u8", (2,))), start, stop)
        if first_place is None:
            places = read_array(store, f"places/{part}.npy", np.dtype("<i8"), start, stop)
        else:
            places = np.arange(first_place + start, first_place + stop)
        parts.append(make_records(digests, places))
    records = np.concatenate(parts)
    del parts
    repeated, _ = find_repeats(records)
    write_array(store, f"repeated/split-{name}.npy", repeated)
    kept = records[~np.isin(records["number"], repeated, kind="sort")]
    with store.writing(f"buckets/{name}") as path:
        write_buckets(path, kept, bits)
    return {"rows": len(records), "repeated": len(repeated), "bytes_out": kept.nbytes}


def unique(
    store: Store, *, name: str, files: list[str], bucket: int, bits: int, limit: int
) -> Answer:
    """Finds the rows of one bucket that repeat another one."""
    runs = [partial(store.read_range, f"buckets/{source}") for source in files]
    repeated = np.concatenate([places for places, _ in repeats_in(runs, bucket, bits, limit)])
    write_array(store, f"repeated/unique-{name}.npy", repeated)
    return {"repeated": len(repeated), "bytes_out": repeated.nbytes}


def _groups(parts: Sequence[Part], limit: int) -> Iterator[list[list[Any]]]:
    """At most ``limit`` rows each: the name of a part, a range of its rows, its first place."""
    group, left = list[list[Any]](), limit
    for part in parts:
        start = 0
        while start < part.num_rows:
            stop = min(part.num_rows, start + left)
            group.append([part.name, start, stop, part.first_place])
            left -= stop - start
            start = stop
            if not left:
                yield group
                group, left = [], limit
    if group:
        yield group


def write_array(store: Store, name: str, array: Any) -> None:
    with store.writing(name) as path, path.open("wb") as file:
        np.save(file, array)


def load_array(store: Store, name: str) -> Any:
    with store.reading(name) as path:
        return np.load(path)


def read_array(store: Store, name: str, kind: Any, start: int, stop: int) -> Any:
    """Some rows of an array that ``np.save`` wrote."""
    head = 10 + int.from_bytes(store.read_range(name, 8, 10), "little")
    data = store.read_range(name, head + start * kind.itemsize, head + stop * kind.itemsize)
    return np.frombuffer(data, kind)
