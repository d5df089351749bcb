"""Libraries compared by ``fast-axolotl bench``: ours, and what people have installed anyway.

One function for each operation builds a contender, in its own process (``race``): it imports, and
brings the rows into its form, which is not timed. Nobody is slow on purpose: plain Python is
written as a careful programmer writes it, and each package is used as its documentation says.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from importlib import import_module, metadata
from itertools import chain, islice
from typing import Any

from fast_axolotl.cli.race import Contender, Digest, Entry, digest_columns, digest_items

BATCH_ROWS = 1000
PAD_ROWS = 64
"""Rows padded together, to the longest of them: a batch of a training."""
_BLOCK_BYTES = 2 * 1024 * 1024
"""Of pyarrow: the fastest of 1, 2, 4 and 8 MiB for JSON and CSV on two cores."""
_MOST_PLAIN_ROWS = 20_000
"""For first fit in plain Python, which looks at every pack for every row."""
_GROUP_SIZE, _MOST_ROWS = 100_000, 200
"""Axolotl's defaults: sequences planned together, and in one pack."""

OURS, OURS_PYTHON, OURS_TORCH = "fast-axolotl", "fast-axolotl, Python", "fast-axolotl, torch"

Request = Mapping[str, Any]


def read(request: Request) -> Contender:
    """A reader of the files, stopped after the rows that are asked for; opening is timed."""
    from fast_axolotl.reading import convert, open_dataset

    who, version = request["who"], None
    items: Callable[[], Any]
    open_ours = partial(open_dataset, request["paths"], batch_size=BATCH_ROWS)
    if who == "ours":
        kind, items = "arrow", open_ours
    elif who == "ours python":
        kind, items = "python", lambda: (convert(batch, "python") for batch in open_ours())
    elif who == "pyarrow":
        kind, items = "arrow", partial(_pyarrow_batches, request)
        version = metadata.version("pyarrow")
    elif who == "plain":
        kind, items = "rows", partial(_plain_rows, request)
        if request["format"] not in ("jsonl", "csv"):
            raise NotImplementedError(f"the standard library reads no {request['format']} files")
    else:
        if request["format"] == "mixed":
            raise NotImplementedError("it reads files of one format at a time")
        datasets = import_module("datasets")
        datasets.disable_progress_bars()
        kind, version = "rows", datasets.__version__
        items = partial(
            datasets.load_dataset,
            {"jsonl": "json", "feather": "arrow"}.get(request["format"], request["format"]),
            data_files=request["files"],
            split="train",
            streaming=True,
        )

    def run() -> Iterator[Any]:
        left = request["rows"]
        if kind == "rows":
            yield from islice(items(), left)
            return
        for batch in items():
            rows = len(batch) if kind == "arrow" else max(map(len, batch.values()), default=0)
            if rows > left and kind == "arrow":
                batch = batch.slice(0, left)
            elif rows > left:
                batch = {name: values[:left] for name, values in batch.items()}
            yield batch
            left -= rows
            if left <= 0:
                return

    def digest(items: Any) -> Digest:
        return digest_items(items, kind)

    return Contender(run=run, digest=digest, is_stream=True, version=version)


def _pyarrow_batches(request: Request) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import csv as pa_csv
    from pyarrow import json as pa_json
    from pyarrow import parquet as pq

    def open_file(path: str) -> Any:
        if request["format"] == "parquet":
            return pq.ParquetFile(path).iter_batches(BATCH_ROWS)
        if request["format"] == "csv":
            options = pa_csv.ReadOptions(block_size=_BLOCK_BYTES)
            parse = pa_csv.ParseOptions(newlines_in_values=True)
            return pa_csv.open_csv(path, read_options=options, parse_options=parse)
        if request["format"] == "jsonl":
            stream = pa.input_stream(path)
            return pa_json.open_json(stream, pa_json.ReadOptions(block_size=_BLOCK_BYTES))
        if request["format"] in ("arrow", "feather"):
            try:
                file = pa.ipc.open_file(pa.memory_map(path))
            except pa.ArrowInvalid:
                return pa.ipc.open_stream(pa.memory_map(path))
            return map(file.get_batch, range(file.num_record_batches))
        raise NotImplementedError(f"it does not stream {request['format']} files")

    for batch in chain.from_iterable(map(open_file, request["files"])):
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def _plain_rows(request: Request) -> Iterator[Any]:
    """The standard library, one row at a time; CSV with the types that ours found."""
    numbers = {"int64": int, "double": float}
    casts = {name: numbers[kind] for name, kind in request["types"].items() if kind in numbers}
    for path in request["files"]:
        opened = gzip.open if path.endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8", newline="") as file:
            if request["format"] == "jsonl":
                yield from map(json.loads, file)
            else:
                for row in csv.DictReader(file):
                    yield row | {name: cast(row[name]) for name, cast in casts.items()}


def _table(request: Request) -> Any:
    """The chosen columns of the rows, as Arrow."""
    import pyarrow as pa

    from fast_axolotl.reading import open_dataset

    batches, left = [], request["rows"]
    with open_dataset(request["paths"], columns=request["columns"]) as reader:
        for batch in reader:
            batches.append(batch.slice(0, left))
            left -= len(batches[-1])
            if left <= 0:
                break
    return pa.Table.from_batches(batches).combine_chunks()


def _answers(
    run: Callable[[], Any],
    rows: int,
    columns: Callable[[Any], Mapping[str, Any]],
    package: str | None = None,
) -> Contender:
    return Contender(
        run=run,
        digest=lambda answer: digest_columns(columns(answer), rows),
        version=None if package is None else metadata.version(package),
    )


def _axolotl(name: str) -> Any:
    """A module of Axolotl, stock: importing our package has installed the replacements."""
    import fast_axolotl

    fast_axolotl.uninstall()
    return import_module(name)


def hash_texts(request: Request) -> Contender:
    """SHA-256 of every text."""
    from fast_axolotl.dedupe import parallel_hash_rows

    column = _table(request).column(0).drop_null().cast("large_string").combine_chunks()
    if request["who"] == "ours Arrow":
        return _answers(
            lambda: parallel_hash_rows(column),
            len(column),
            lambda found: {"hash": [digest.hex() for digest in found.to_pylist()]},
        )
    rows = column.to_pylist()
    function = parallel_hash_rows if request["who"] == "ours" else hash_rows
    return _answers(lambda: function(rows), len(rows), lambda found: {"hash": found})


def hash_rows(rows: Iterable[str]) -> list[str]:
    """The loop of hashlib."""
    return [sha256(row.encode()).hexdigest() for row in rows]


def dedupe(request: Request) -> Contender:
    """The numbers of the rows that are the first of their kind."""

    from fast_axolotl.dedupe import unique_rows

    table, who = _table(request), request["who"]
    indices = partial(_answers, rows=len(table), columns=lambda found: {"row": found})
    if who == "ours":
        return indices(lambda: unique_rows(table))
    if who == "pandas":
        frame = table.to_pandas()
        return indices(lambda: frame.drop_duplicates().index.to_numpy(), package="pandas")
    if who == "Axolotl":
        dataset = import_module("datasets").Dataset(table)
        deduplicate = _axolotl("axolotl.utils.data.utils")._deduplicate_dataset

        def kept(found: Any) -> Mapping[str, Any]:
            chosen = found._indices
            return {"row": range(len(found)) if chosen is None else chosen.column(0).to_pylist()}

        return indices(lambda: deduplicate(dataset)[0], columns=kept, package="axolotl")
    # A set of the values; of the rows as text, where there are several or they are no texts.
    columns = [column.to_pylist() for column in table.columns]
    rows = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
    is_text = isinstance(rows[0], str)

    def run() -> list[int]:
        seen: set[Any] = set()
        first = []
        for index, value in enumerate(rows if is_text else map(str, rows)):
            if value not in seen:
                seen.add(value)
                first.append(index)
        return first

    return indices(run)


def plan(request: Request) -> Contender:
    """Which rows of tokens share a pack, by first fit; longer ones count as full."""
    import numpy as np
    import pyarrow.compute as pc

    from fast_axolotl.packing import plan_packs

    capacity = request["sequence_len"]
    column = _table(request).column(0).drop_null()
    lengths = np.minimum(pc.list_value_length(column).to_numpy(), capacity).astype(np.int64)

    def plain() -> list[list[int]]:
        packs: list[list[int]] = []
        for start in range(0, len(lengths), _GROUP_SIZE):
            group = lengths[start : start + _GROUP_SIZE].tolist()
            found = first_fit(group, capacity, _MOST_ROWS)
            packs += [[start + index for index in pack] for pack in found] if start else found
        return packs

    def packs(found: Any) -> Mapping[str, Any]:
        return {"packs": found.tolist() if hasattr(found, "tolist") else found}

    answers = partial(_answers, rows=len(lengths), columns=packs)
    if request["who"] == "ours":
        options: Any = {"max_rows": _MOST_ROWS, "group_size": _GROUP_SIZE}
        return answers(lambda: plan_packs(lengths, capacity, **options))
    if request["who"] == "plain":
        if len(lengths) > _MOST_PLAIN_ROWS:
            raise NotImplementedError(f"it is quadratic: up to {_MOST_PLAIN_ROWS:,} rows only")
        return answers(plain)
    pack = _axolotl("axolotl.utils.samplers.multipack").pack_parallel
    options = {"bin_capacity": capacity, "group_size": _GROUP_SIZE, "bin_size": _MOST_ROWS}
    return answers(lambda: pack(lengths, **options), package="axolotl")


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


def pad_rows(request: Request) -> Contender:
    """Batch by batch, as a training pads: each is gone before the next one."""
    from fast_axolotl.packing import pad_sequences

    rows = _table(request).column(0).drop_null().to_pylist()
    batches = [rows[start : start + PAD_ROWS] for start in range(0, len(rows), PAD_ROWS)]
    version = None
    pad_batch: Callable[[Any], Any] = pad_sequences
    if request["who"] == "plain":
        pad_batch = lambda batch: pad(batch, max(map(len, batch)), 0)  # noqa: E731
    elif request["who"] != "ours":
        torch = import_module("torch")
        pad_batch = partial(pad_sequences, output="torch")
        if request["who"] == "torch":
            pad_tensors = import_module("torch.nn.utils.rnn").pad_sequence
            pad_batch = lambda batch: pad_tensors(list(map(torch.tensor, batch)), True)  # noqa: E731
            version = torch.__version__

    def digest(padded: Iterable[Any]) -> Digest:
        lists = (batch.tolist() if hasattr(batch, "tolist") else batch for batch in padded)
        return digest_columns({"rows": chain.from_iterable(lists)}, len(rows))

    return Contender(
        run=lambda: map(pad_batch, batches), digest=digest, is_stream=True, version=version
    )


def pad(sequences: Sequence[list[int]], target_length: int, pad_value: int) -> list[list[int]]:
    """Every sequence with its padding behind it, which is made once for each length."""
    lengths = set(map(len, sequences))
    fillers = {length: [pad_value] * (target_length - length) for length in lengths}
    return [row + fillers[len(row)] for row in sequences]


CONTENDERS: Mapping[str, tuple[Entry, ...]] = {
    "reader": (
        Entry(read, "ours", OURS, "Arrow batches"),
        Entry(read, "ours python", OURS_PYTHON, "dicts of lists"),
        Entry(read, "HF", "HF datasets, streaming", "rows", OURS_PYTHON, "datasets"),
        Entry(read, "pyarrow", "pyarrow", "Arrow batches", OURS),
        Entry(read, "plain", "plain Python", "rows", OURS_PYTHON),
    ),
    "hash": (
        Entry(hash_texts, "ours", OURS, "list → list"),
        Entry(hash_texts, "ours Arrow", "fast-axolotl, Arrow", "Arrow → Arrow"),
        Entry(hash_texts, "hashlib", "hashlib", "list → list", OURS),
    ),
    "dedupe": (
        Entry(dedupe, "ours", OURS, "Arrow → rows"),
        Entry(dedupe, "Axolotl", "Axolotl", "Dataset → Dataset", OURS, "axolotl"),
        Entry(dedupe, "plain", "Python set", "lists → rows", OURS),
        Entry(dedupe, "pandas", "pandas", "frame → rows", OURS, "pandas"),
    ),
    "pack": (
        Entry(plan, "ours", OURS, "lengths → packs"),
        Entry(plan, "Axolotl", "Axolotl pack_parallel", "lengths → packs", OURS, "axolotl"),
        Entry(plan, "plain", "Python first fit", "lengths → packs", OURS),
    ),
    "pad": (
        Entry(pad_rows, "ours", OURS, "lists → lists"),
        Entry(pad_rows, "plain", "plain Python", "lists → lists", OURS),
        Entry(pad_rows, "ours torch", OURS_TORCH, "lists → torch", None, "torch"),
        Entry(pad_rows, "torch", "torch pad_sequence", "lists → torch", OURS_TORCH, "torch"),
    ),
}
"""Operation to who may take part; the first peer is the one that the answer begins with."""
