"""Memory is bounded by what rows take decoded, not by what they take on disk.

Every shape is read in a process of its own, which reports the most that it held above what it held
after its imports and a first small read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from fast_axolotl import open_dataset
from fast_axolotl.errors import DataError
from fast_axolotl.reading.blocks import ReadOptions, Unit
from fast_axolotl.reading.columnar import MappedFile, open_arrow
from fast_axolotl.reading.storage import Source

MIB = 1024 * 1024
ROOM = 100_000_000
"""What a reader may take above its budget."""


def sizes_of(rows: pa.RecordBatch | pa.Table) -> Counter[str]:
    """For the first columns the sum of their numbers or of their lengths."""
    sizes = Counter(rows=len(rows))
    for name in rows.schema.names[:3]:
        values, kind = rows[name], rows.schema.field(name).type
        if not pa.types.is_integer(kind):
            text = pa.types.is_string(kind)
            values = pc.binary_length(values) if text else pc.list_value_length(values)
        sizes[name] = pc.sum(values).as_py() or 0
    return sizes


def held() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def read(path: str, **options: Any) -> Counter[str]:
    total: Counter[str] = Counter()
    for batch in open_dataset(path, **options):
        total.update(sizes_of(batch))
    return total


def in_the_child(path: str, tiny: str, options: dict[str, Any]) -> None:
    read(tiny, **options)
    start = peak = held()
    is_done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.wait(0.002):
            peak = max(peak, held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    sizes = read(path, **options)
    is_done.set()
    watcher.join()
    print(json.dumps([max(peak, held()) - start, sizes]))


def measured(path: Path, **options: Any) -> tuple[int, dict[str, int]]:
    """Peak above start, and the ``sizes_of`` what was read."""
    tiny = path.with_name(f"tiny{path.suffix}")
    rows = [{"a": 1, "b": "text"}] * 3
    WRITERS[path.name.split("-")[0]](tiny, pa.Table.from_pylist(rows))
    command = [sys.executable, __file__, str(path), str(tiny), json.dumps(options)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, child.stderr
    peak, sizes = json.loads(child.stdout)
    return peak, sizes


def repeated(values: list[str], count: int) -> pa.Array:
    """Text that Parquet keeps as a dictionary, without ever making all of it."""
    indices = pa.array(np.arange(count, dtype=np.int32) % len(values))
    return pa.DictionaryArray.from_arrays(indices, pa.array(values))


def lists(lengths: Iterable[int], make: Callable[[int], np.ndarray[Any, Any]]) -> pa.Array:
    sizes = list(lengths)
    values = np.concatenate([make(size).astype(np.int32) for size in sizes])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def noise(size: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(size).integers(0, 2**30, size)


def write_parquet(path: Path, table: pa.Table, group: int | None = None) -> None:
    pq.write_table(table, path, row_group_size=group or len(table), store_schema=False)


def write_arrow(path: Path, table: pa.Table, batch: int = 1000, **options: Any) -> None:
    make = pa.ipc.new_file if "file" in path.name else pa.ipc.new_stream
    with make(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, batch)


def write_lines(path: Path, rows: Iterable[dict[str, Any]] | pa.Table) -> None:
    rows = rows.to_pylist() if isinstance(rows, pa.Table) else rows
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


WRITERS: dict[str, Callable[..., None]] = {
    "parquet": write_parquet,
    "arrow": write_arrow,
    "jsonl": write_lines,
    "csv": lambda path, table: pacsv.write_csv(table, path),
}

TINY_THEN_LARGE = [3] * 10_000 + [250_000] * 60
ONE_LARGE = [3] * 3000 + [12_500_000] + [2] * 3000
NUMBERS = [f"{number}" * 50_000 for number in range(5)]
WIDE = {f"k{number}": number for number in range(3000)}

SHAPES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "parquet-constant": (lambda: pa.table({"a": repeated(["x" * 5000], 70_000)}), {}),
    "parquet-dictionary": (lambda: pa.table({"a": repeated(NUMBERS, 4000)}), {"group": 1000}),
    "parquet-runs": (lambda: pa.table({"a": np.ones(12_000_000, dtype=np.int64)}), {}),
    "parquet-uneven": (lambda: pa.table({"a": lists(TINY_THEN_LARGE, noise)}), {}),
    "arrow-file-uneven": (lambda: pa.table({"a": lists(ONE_LARGE, np.ones)}), {}),
    "arrow-stream-one-batch": (
        lambda: pa.table({"a": lists([1000] * 20_000, np.ones)}),
        {"batch": 20_000},
    ),
    "jsonl-sparse": (lambda: [{"a": 1, f"k{i * 7919 % 3000}": i} for i in range(5000)], {}),
    "jsonl-wide-then-narrow": (lambda: [WIDE] * 3 + [{"a": 1}] * 8000, {}),
}


SHUFFLED = ["parquet-constant", "jsonl-sparse"]


@pytest.mark.parametrize(
    ("name", "shuffle"), [*((name, None) for name in SHAPES), *((name, 1) for name in SHUFFLED)]
)
def test_memory_stays_within_the_budget_whatever_rows_take_decoded(
    tmp_path: Path, name: str, shuffle: int | None
) -> None:
    make, how = SHAPES[name]
    kind = name.split("-")[0]
    path, rows = tmp_path / f"{name}.{kind}", make()
    WRITERS[kind](path, rows, **how)
    budget = 16 * MIB if len(name) % 2 else 32 * MIB
    peak, sizes = measured(path, memory_budget=budget, num_threads=8, shuffle=shuffle)
    assert sizes["rows"] == len(rows)
    if isinstance(rows, pa.Table) and not pa.types.is_dictionary(rows.schema.types[0]):
        assert sizes == sizes_of(rows)
    assert peak <= budget + ROOM, f"{peak / 1e6:.0f} MB above start"


def test_a_row_larger_than_the_budget_passes_and_is_copied_a_few_times(tmp_path: Path) -> None:
    path, size = tmp_path / "jsonl-line.jsonl", 100_000_000
    path.write_bytes(b'{"a": "' + b"x" * size + b'"}\n{"a": "y"}\n')
    peak, sizes = measured(path, memory_budget=16 * MIB, num_threads=2)
    assert sizes == {"rows": 2, "a": size + 1}
    assert peak <= 5 * size, f"{peak / size:.1f} times the line"


def test_where_a_row_group_is_cut_does_not_depend_on_what_was_read_before(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    groups = [repeated(["x" * size], 2000) for size in (10, 8000, 10, 300, 8000)]
    table = pa.table({"a": pa.chunked_array([group.cast(pa.string()) for group in groups])})
    write_parquet(path, table, 2000)
    readers = [open_dataset(path, memory_budget=16 * MIB, num_threads=n) for n in (1, 2, 2)]
    first, second, third = ([len(batch) for batch in reader] for reader in readers)
    assert first == second == third == [len(batch) for batch in readers[2]]
    assert sum(first) == 10_000


def opened(path: Path, **options: Any) -> Any:
    source = Source(path=str(path), num_bytes=path.stat().st_size)
    return open_arrow(source, source=source, format="arrow", options=ReadOptions(**options))


@pytest.mark.parametrize(
    ("name", "batch", "unit"), [("arrow-stream", 100, MIB), ("arrow-file", 20_000, 4 * MIB)]
)
def test_a_mapped_file_is_cut_into_ranges_of_rows_without_a_copy(
    tmp_path: Path, name: str, batch: int, unit: int
) -> None:
    path = tmp_path / f"{name}.arrow"
    values = noise(10_000_000).astype(np.int32).reshape(20_000, 500)
    table = pa.table({"a": pa.FixedSizeListArray.from_arrays(values.ravel(), 500)})
    table = table.append_column("b", pa.array(np.arange(20_000)))
    write_arrow(path, table, batch)
    before = pa.total_allocated_bytes()
    file = opened(path, unit_bytes=MIB)
    units = file.units(0)
    assert sum(item.num_rows for item in units) == 20_000
    assert all(0.9 * unit < item.num_bytes < 1.3 * unit for item in units[:-1])
    first, last = units[3], units[5]
    span = Unit(file=0, start=first.start, stop=last.stop, num_bytes=1)
    tables = [block.decode(None).table for block in file.blocks(span)]
    assert pa.total_allocated_bytes() == before
    rows = [value for part in tables for value in part["b"].to_pylist()]
    assert rows == list(range(first.start, last.stop))


@pytest.mark.parametrize("what", ["compressed", "dictionary", "legacy", "cut", "header", "length"])
def test_a_stream_that_cannot_be_mapped_is_one_unit(tmp_path: Path, what: str) -> None:
    path = tmp_path / "stream.arrow"
    text = repeated(["a", "b"], 5000)
    table = pa.table({"a": text if what == "dictionary" else text.cast(pa.string())})
    compression = "zstd" if what == "compressed" else None
    write_arrow(path, table, 1000, use_legacy_format=what == "legacy", compression=compression)
    data = bytearray(path.read_bytes())
    if what == "cut":
        data = data[:-8]
    elif what in ("header", "length"):
        place = data.rindex(b"\xff\xff\xff\xff", 0, len(data) - 8)
        data[place + 4 + 4 * (what == "header")] = 0xFE
    path.write_bytes(data)
    is_mapped, is_whole = what in ("dictionary", "legacy"), what not in ("cut", "header", "length")
    assert isinstance(opened(path), MappedFile) == is_mapped
    if not is_mapped:
        assert [(u.start, u.stop, u.num_rows) for u in opened(path).units(0)] == [(0, 1, None)]
    rows = list[pa.RecordBatch]()
    with nullcontext() if is_whole else pytest.raises(DataError):
        rows.extend(open_dataset(path, batch_size=1000))
    assert sum(map(len, rows)) == 5000 or not is_whole


if __name__ == "__main__":
    in_the_child(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
