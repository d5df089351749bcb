"""Libraries compared by ``fast-axolotl bench``: ours, and peers that people have installed.

One function for each operation brings the rows into the form of each library, which is not timed.
Plain Python is written as a careful programmer writes it, and each package is used as its
documentation says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any

from fast_axolotl.cli.race import Contender, Digest, digest_columns, digest_items

BATCH_ROWS = 1000
_PAD_ROWS = 64
"""Rows padded together, to the longest of them: a batch of a training."""
_BLOCK_BYTES = 2 * 1024 * 1024
"""Of pyarrow: the fastest of 1, 2, 4 and 8 MiB for JSON on two cores."""
_MOST_PLAIN_ROWS = 20_000
"""For first fit in plain Python, which looks at every pack for every row."""
_MOST_ROWS = 200
"""Axolotl's default: the most sequences in one pack."""

OURS, OURS_PYTHON = "fast-axolotl", "fast-axolotl, Python"

Request = Mapping[str, Any]


def read(request: Request) -> list[Contender]:
    """Readers of the files, stopped after the rows that are asked for; opening is timed."""
    from fast_axolotl.reading import convert, open_dataset

    rows, form = request["rows"], request["format"]

    def ours() -> Iterator[Any]:
        return _cut(open_dataset(request["paths"], batch_size=BATCH_ROWS), rows)

    def datasets() -> Iterator[Any]:
        package = import_module("datasets")
        package.disable_progress_bars()
        name = {"jsonl": "json", "feather": "arrow"}.get(form, form)
        files = {"data_files": request["files"], "split": "train", "streaming": True}
        return islice(package.load_dataset(name, **files), rows)

    def plain() -> Iterator[Any]:
        if form != "jsonl":
            raise NotImplementedError("it reads JSON lines only")
        return islice(chain.from_iterable(map(_plain_rows, request["files"])), rows)

    digest = {kind: partial(digest_items, kind=kind) for kind in ("arrow", "python", "rows")}
    python = "dicts of lists"
    return [
        Contender(OURS, "Arrow batches", ours, digest["arrow"]),
        Contender(
            OURS_PYTHON, python, lambda: (convert(b, "python") for b in ours()), digest["python"]
        ),
        Contender(
            "HF datasets, streaming", "rows", datasets, digest["rows"], OURS_PYTHON, "datasets"
        ),
        Contender(
            "pyarrow", "Arrow batches", lambda: _cut(_pyarrow(request), rows), digest["arrow"], OURS
        ),
        Contender("plain Python", "rows", plain, digest["rows"], OURS_PYTHON),
    ]


def _cut(batches: Iterable[Any], rows: int) -> Iterator[Any]:
    """The first rows, in batches of at most the same size."""
    for batch in batches:
        for start in range(0, min(rows, len(batch)), BATCH_ROWS):
            yield batch.slice(start, min(BATCH_ROWS, rows - start))
        rows -= len(batch)
        if rows <= 0:
            return


def _pyarrow(request: Request) -> Iterator[Any]:
    """The streaming reader of each format."""
    import pyarrow as pa
    from pyarrow import csv, dataset
    from pyarrow import json as pa_json

    form = request["format"]
    if form == "jsonl":
        block = pa_json.ReadOptions(block_size=_BLOCK_BYTES)
        files = map(pa.input_stream, request["files"])
        return chain.from_iterable(pa_json.open_json(file, block) for file in files)
    if form not in ("parquet", "arrow", "feather", "csv"):
        raise NotImplementedError(f"it does not stream {form} files")
    named: Any = "ipc" if form == "arrow" else form
    if form == "csv":
        named = dataset.CsvFileFormat(csv.ParseOptions(newlines_in_values=True))
    batches: Iterator[Any] = dataset.dataset(request["files"], format=named).to_batches()
    return batches


def _plain_rows(path: str) -> Iterator[Any]:
    with Path(path).open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def read_table(request: Request) -> Any:
    """The chosen columns of the rows, as Arrow."""
    import pyarrow as pa

    from fast_axolotl.reading import open_dataset

    with open_dataset(request["paths"], columns=request["columns"]) as reader:
        return pa.Table.from_batches(_cut(reader, request["rows"])).combine_chunks()


def hash_texts(request: Request) -> list[Contender]:
    """SHA-256 of every text of a list."""
    from fast_axolotl.dedupe import parallel_hash_rows

    rows = read_table(request).column(0).drop_null().to_pylist()

    def digest(hashes: Any) -> Digest:
        return digest_columns({"hash": hashes}, len(rows))

    def plain() -> list[str]:
        return [sha256(row.encode()).hexdigest() for row in rows]

    return [
        Contender(OURS, "list → list", lambda: parallel_hash_rows(rows), digest),
        Contender("hashlib", "list → list", plain, digest, OURS),
    ]


def dedupe(request: Request) -> list[Contender]:
    """The numbers of the rows that are the first of their kind."""
    from fast_axolotl.dedupe import unique_rows

    table = read_table(request)
    columns = [column.to_pylist() for column in table.columns]
    rows = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def plain() -> list[int]:
        """A set of the values; of the rows as text, where they are no texts."""
        seen: set[Any] = set()
        first = []
        for index, value in enumerate(rows if isinstance(rows[0], str) else map(str, rows)):
            if value not in seen:
                seen.add(value)
                first.append(index)
        return first

    def digest(indices: Any) -> Digest:
        return digest_columns({"row": indices}, len(table))

    return [
        Contender(OURS, "Arrow → rows", lambda: unique_rows(table), digest),
        Contender("Python set", "lists → rows", plain, digest, OURS),
    ]


def plan(request: Request) -> list[Contender]:
    """Which rows of tokens share a pack, by first fit; longer ones count as full."""
    import numpy as np
    import pyarrow.compute as pc

    from fast_axolotl.packing import plan_packs

    capacity = request["sequence_len"]
    column = read_table(request).column(0).drop_null()
    lengths = np.minimum(pc.list_value_length(column).to_numpy(), capacity).astype(np.int64)

    def plain() -> list[list[int]]:
        if len(lengths) > _MOST_PLAIN_ROWS:
            raise NotImplementedError(f"it is quadratic: up to {_MOST_PLAIN_ROWS:,} rows only")
        return first_fit(lengths.tolist(), capacity, _MOST_ROWS)

    def digest(packs: Any) -> Digest:
        return digest_columns({"pack": packs}, len(lengths))

    ours = partial(plan_packs, lengths, capacity, max_rows=_MOST_ROWS)
    return [
        Contender(OURS, "lengths → packs", ours, digest),
        Contender("Python first fit", "lengths → packs", plain, digest, OURS),
    ]


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


def pad_rows(request: Request) -> list[Contender]:
    """Batch by batch, as a training pads: each is gone before the next one."""
    from fast_axolotl.packing import pad_sequences

    rows = read_table(request).column(0).drop_null().to_pylist()
    batches = [rows[start : start + _PAD_ROWS] for start in range(0, len(rows), _PAD_ROWS)]

    def digest(padded: Any) -> Digest:
        return digest_columns({"rows": chain.from_iterable(padded)}, len(rows))

    return [
        Contender(OURS, "lists → lists", lambda: map(pad_sequences, batches), digest),
        Contender("plain Python", "lists → lists", lambda: map(_pad, batches), digest, OURS),
    ]


def _pad(sequences: Sequence[list[int]]) -> list[list[int]]:
    """Every sequence with its padding behind it, which is made once for each length."""
    lengths = set(map(len, sequences))
    fillers = {length: [0] * (max(lengths) - length) for length in lengths}
    return [row + fillers[len(row)] for row in sequences]


CONTENDERS: Mapping[str, Callable[[Request], list[Contender]]] = {
    "reader": read,
    "hash": hash_texts,
    "dedupe": dedupe,
    "pack": plan,
    "pad": pad_rows,
}
"""Operation to its libraries; the first peer is the one that the answer begins with."""
