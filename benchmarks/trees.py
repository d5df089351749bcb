"""This source tree against an earlier one: is anything slower than it was?

``python -m benchmarks.trees EARLIER``, where ``EARLIER`` is another checkout of the repository.
Every case runs in child processes, the trees in alternating order, A B B A; what counts is
processor time, which a busy machine disturbs less. A ratio above 1 is slower than before. Cases
use public names alone, so that any tree can run them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROWS = 40_000


def _texts(rows: int = ROWS) -> list[str]:
    return [f"row {number} " * 20 for number in range(rows)]


def _tokens() -> list[list[int]]:
    return [list(range(10 + number * 37 % 390)) for number in range(8000)]


def write_table(folder: Path, suffix: str, rows: int = ROWS) -> Path:
    """The same rows in each format; text is a column alone."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.feather
    import pyarrow.parquet

    path = folder / f"rows.{suffix}"
    table = pa.table({"id": range(rows), "text": _texts(rows)})
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=4000)
    elif suffix == "arrow":
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=4000)
    elif suffix == "csv":
        pyarrow.csv.write_csv(table, path)
    elif suffix == "txt":
        path.write_text("".join(f"{text}\n" for text in _texts(rows)))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return path


def reader(folder: Path, suffix: str) -> Callable[[], Any]:
    """A pass over a generated file, with one thread."""
    from fast_axolotl import open_dataset

    path = str(write_table(folder, suffix))
    return lambda: sum(len(batch) for batch in open_dataset(path, num_threads=1))


def operation(folder: Path, name: str) -> Callable[[], Any]:
    """A public function on rows in memory, and ``dedupe_files``."""
    import numpy as np
    import pyarrow as pa

    import fast_axolotl as ours

    texts, tokens = _texts(), _tokens()
    table = pa.table({"text": texts, "half": [number // 2 for number in range(ROWS)]})
    lengths = np.random.default_rng(0).integers(10, 2000, 500_000)
    if name == "dedupe":
        source, target = write_table(folder, "parquet"), str(folder / "unique.parquet")
        return lambda: ours.dedupe_files([str(source)] * 2, target, overwrite=True)
    return {
        "hash": lambda: ours.parallel_hash_rows(texts, 1),
        "unique": lambda: ours.unique_rows(table),
        "plan": lambda: ours.plan_packs(lengths, 4096),
        "pack": lambda: ours.pack_sequences(tokens, 2048, 0, 2),
        "pad": lambda: ours.pad_sequences(tokens),
    }[name]


def meter(folder: Path) -> Callable[[], Any]:
    """Fetches of a loop that does nothing else."""
    import numpy as np

    from fast_axolotl import measure

    batch = {name: np.ones((8, 512), np.int64) for name in ("input_ids", "attention_mask")}

    def run() -> None:
        with measure(tempfile.mkdtemp(dir=folder), sample_system=False) as meter:
            for _ in meter.watch([batch] * 20_000):
                pass

    return run


READERS = ("parquet", "arrow", "jsonl", "csv", "txt")
CASES: dict[str, Callable[[Path], Callable[[], Any]]] = {
    **{name: partial(reader, suffix=name) for name in READERS},
    **{
        name: partial(operation, name=name)
        for name in ("hash", "unique", "dedupe", "plan", "pack", "pad")
    },
    "meter": meter,
}


def time_case(name: str, passes: int = 5) -> float:
    """In a child: the least processor time of several passes, after one that compiles."""
    with tempfile.TemporaryDirectory() as folder:
        run = CASES[name](Path(folder))
        run()
        return min(_processor_seconds(run) for _ in range(passes))


def _processor_seconds(run: Callable[[], Any]) -> float:
    begun = time.process_time()
    run()
    return time.process_time() - begun


def main() -> None:
    """Print the ratio of every case, and of a bare import."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("earlier", type=Path, help="the root of another checkout")
    parser.add_argument("--cases", default=",".join(["import", *CASES]))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the raw repeats")
    options = parser.parse_args()
    trees = {"earlier": options.earlier.absolute(), "now": Path(__file__).parents[1]}
    seconds: dict[str, dict[str, list[float]]] = {}
    for case in options.cases.split(","):
        seconds[case] = {"earlier": [], "now": []}
        for repeat in range(options.repeats):
            for tree in list(trees)[:: 1 if repeat % 2 == 0 else -1]:
                # Numba keys what it keeps by the path of a file, so trees do not share it.
                env = {**os.environ, "PYTHONPATH": str(trees[tree] / "src")}
                program = "import fast_axolotl" if case == "import" else _CHILD.format(case=case)
                before = os.times()
                done = subprocess.run(
                    [sys.executable, "-c", program],
                    env=env | {"FAST_AXOLOTL_TREES": str(Path(__file__))},
                    capture_output=True,
                    text=True,
                    check=True,
                )
                after = os.times()
                spent = after.children_user + after.children_system
                spent -= before.children_user + before.children_system
                seconds[case][tree].append(spent if case == "import" else float(done.stdout))
        earlier, now = (median(seconds[case][tree]) for tree in trees)
        print(f"{case:8} {1e3 * earlier:9.2f} ms → {1e3 * now:9.2f} ms  {now / earlier:.3f}×")
    if options.json:
        print(json.dumps(seconds, indent=1))


_CHILD = (
    "import os, runpy\n"
    "names = runpy.run_path(os.environ['FAST_AXOLOTL_TREES'])\n"
    "print(names['time_case']({case!r}))"
)

if __name__ == "__main__":
    main()
