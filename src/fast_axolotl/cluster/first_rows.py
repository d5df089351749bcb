"""Which rows repeat an earlier one, found in tasks: see ``dedupe.spill`` for the runs they write.

Tasks that have the digests of some rows write runs of them (``Runs``), without those that repeat
one of the same run: a value that is half of all rows is one record in each. Stage ``unique`` reads
some buckets out of every run and finds the first row of each value. A row is its 128-bit digest,
which the caller made with a secret of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from fast_axolotl.cluster.engines import Answer
from fast_axolotl.cluster.job import Job
from fast_axolotl.cluster.store import Store
from fast_axolotl.dedupe.spill import (
    NUM_BUCKETS,
    ROW_BYTES,
    Records,
    find_repeats,
    repeats_in,
    write_buckets,
)


def most_rows(memory: int) -> int:
    """How many rows are looked at together."""
    return max(1024, memory // 2 // ROW_BYTES)


class Runs:
    """Writes the digests that one task has, and the numbers of rows that repeat one of a run."""

    def __init__(self, store: Store, name: str, memory: int) -> None:
        self._store, self._name = store, name
        self._records = Records(most_rows(memory), self._write)
        self.add = self._records.add
        self._runs: list[str] = []
        self._repeated: list[Any] = [np.empty(0, np.int64)]

    def finish(self) -> Answer:
        """What ``find_repeated`` needs of the task's answer."""
        self._records.flush()
        repeated = np.concatenate(self._repeated)
        self._store.write_array(f"repeated/{self._name}", repeated)
        return {"runs": self._runs, "repeated": len(repeated)}

    def _write(self, records: Any) -> None:
        repeated, _ = find_repeats(records)
        kept = records[~np.isin(records["number"], repeated, kind="sort")]
        self._runs.append(f"buckets/{self._name}-{len(self._runs)}")
        with self._store.writing(self._runs[-1]) as path:
            write_buckets(path, kept)
        self._repeated.append(repeated)


def find_repeated(
    job: Job, store: Store, written: Mapping[str, Answer], *, num_rows: int, memory: int
) -> Any:
    """The numbers of all rows that repeat a row of a smaller number, as a sorted int64 array.

    ``written`` are the answers of tasks that wrote ``Runs``, by the names of these.
    """
    runs = [run for answer in written.values() for run in answer["runs"]]
    limit = most_rows(memory)
    # A quarter is left free: buckets are not all of the same size.
    step = min(NUM_BUCKETS, max(1, NUM_BUCKETS * limit * 3 // 4 // max(1, num_rows)))
    edges = [(first, min(first + step, NUM_BUCKETS)) for first in range(0, NUM_BUCKETS, step)]
    tasks = {
        f"{first}-{last}": {"first": first, "last": last, "runs": runs, "limit": limit}
        for first, last in (edges if num_rows else ())
    }
    counts = {name: answer["repeated"] for name, answer in written.items()}
    for name, answer in job.run(store, unique, tasks).items():
        counts[f"unique-{name}"] = answer["repeated"]
    numbers = np.empty(sum(counts.values()), np.int64)
    end = 0
    for name, count in counts.items():
        numbers[end : end + count] = store.read_array(f"repeated/{name}", "<i8")
        end += count
    numbers.sort()
    return numbers


def unique(store: Store, *, first: int, last: int, runs: Sequence[str], limit: int) -> Answer:
    """Finds the rows of some buckets that repeat another one."""
    readers = [partial(store.read, run) for run in runs]
    found = [numbers for numbers, _ in repeats_in(readers, first, last, limit)]
    repeated = np.concatenate(found)
    store.write_array(f"repeated/unique-{first}-{last}", repeated)
    return {"repeated": len(repeated), "bytes_out": repeated.nbytes}
