"""Who takes part in ``fast-axolotl bench``: ours, and what people have installed anyway.

A function that takes a request builds one contender, in its own process (``race``): it imports, and
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

__all__ = [
    "CONTENDERS",
    "dedupe_axolotl",
    "dedupe_ours",
    "dedupe_pandas",
    "dedupe_plain",
    "dedupe_pyarrow",
    "first_fit",
    "hash_hashlib",
    "hash_ours",
    "hash_ours_arrow",
    "hash_rows",
    "pack",
    "pack_ours",
    "pack_plain",
    "pad",
    "pad_ours",
    "pad_ours_torch",
    "pad_plain",
    "pad_torch",
    "plan_axolotl",
    "plan_ours",
    "plan_plain",
    "read_arrow",
    "read_plain",
    "read_pyarrow",
    "read_python",
]

BATCH_ROWS = 1000
PAD_ROWS = 64
"""Rows padded together, to the longest of them: a batch of a training."""
_BLOCK_BYTES = 2 * 1024 * 1024
"""Of pyarrow: the fastest of 1, 2, 4 and 8 MiB for JSON and CSV on two cores."""
_GROUP_SIZE, _MOST_ROWS = 100_000, 200
"""Axolotl's defaults: sequences planned together, and in one pack."""

Request = Mapping[str, Any]


def _reader(request: Request, items: Callable[[], Iterator[Any]], kind: str) -> Contender:
    """A reader of files, stopped after the rows that are asked for."""

    def run() -> Iterator[Any]:
        if kind == "rows":
            yield from islice(items(), request["rows"])
            return
        left = request["rows"]
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

    return Contender(run=run, digest=lambda items: digest_items(items, kind), is_stream=True)


def read_arrow(request: Request) -> Contender:
    from fast_axolotl.reading import open_dataset

    paths = request["paths"]
    return _reader(request, lambda: iter(open_dataset(paths, batch_size=BATCH_ROWS)), "arrow")


def read_python(request: Request) -> Contender:
    from fast_axolotl.reading import convert, open_dataset

    paths = request["paths"]
    return _reader(
        request,
        lambda: (convert(batch, "python") for batch in open_dataset(paths, batch_size=BATCH_ROWS)),
        "python",
    )


def _read_hf(request: Request, *, streaming: bool) -> Contender:
    """``load_dataset`` is part of a pass; that it writes its cache at the first one is not."""
    datasets = import_module("datasets")
    datasets.disable_progress_bars()
    load = partial(
        datasets.load_dataset,
        {"jsonl": "json", "feather": "arrow"}.get(request["format"], request["format"]),
        data_files=request["files"],
        split="train",
        streaming=streaming,
        cache_dir=request["folder"],
    )
    return _reader(request, lambda: iter(load()), "rows")


read_hf_streaming = partial(_read_hf, streaming=True)
read_hf_loaded = partial(_read_hf, streaming=False)


def read_pyarrow(request: Request) -> Contender:
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

    def items() -> Iterator[Any]:
        for batch in chain.from_iterable(map(open_file, request["files"])):
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS)

    return _reader(request, items, "arrow")


def read_plain(request: Request) -> Contender:
    """The standard library, one row at a time; CSV with the types that ours found."""
    if request["format"] not in ("jsonl", "csv", "text"):
        raise NotImplementedError(f"the standard library reads no {request['format']} files")
    numbers = {"int64": int, "double": float}
    casts = {name: numbers[kind] for name, kind in request["types"].items() if kind in numbers}

    def rows(path: str) -> Iterator[Any]:
        opened = gzip.open if path.endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8", newline="") as file:
            if request["format"] == "jsonl":
                yield from map(json.loads, file)
            elif request["format"] == "text":
                yield from ({"text": line.rstrip("\r\n")} for line in file)
            else:
                for row in csv.DictReader(file):
                    yield row | {name: cast(row[name]) for name, cast in casts.items()}

    return _reader(request, lambda: chain.from_iterable(map(rows, request["files"])), "rows")


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
    version: str | None = None,
) -> Contender:
    def digest(answer: Any) -> Digest:
        return digest_columns(columns(answer), rows)

    return Contender(run=run, digest=digest, version=version)


def _texts(request: Request) -> Any:
    column = _table(request).column(0).drop_null()
    return column.cast("large_string").combine_chunks()


def hash_ours(request: Request) -> Contender:
    from fast_axolotl.dedupe import parallel_hash_rows

    rows = _texts(request).to_pylist()
    return _answers(lambda: parallel_hash_rows(rows), len(rows), lambda found: {"hash": found})


def hash_ours_arrow(request: Request) -> Contender:
    from fast_axolotl.dedupe import parallel_hash_rows

    rows = _texts(request)
    return _answers(
        lambda: parallel_hash_rows(rows),
        len(rows),
        lambda found: {"hash": [digest.hex() for digest in found.to_pylist()]},
    )


def hash_hashlib(request: Request) -> Contender:
    rows = _texts(request).to_pylist()
    return _answers(lambda: hash_rows(rows), len(rows), lambda found: {"hash": found})


def hash_rows(rows: Iterable[str]) -> list[str]:
    """The loop of hashlib."""
    return [sha256(row.encode()).hexdigest() for row in rows]


def _indices(run: Callable[[], Any], table: Any, package: str | None = None) -> Contender:
    version = None if package is None else metadata.version(package)
    return _answers(run, len(table), lambda found: {"row": found}, version)


def dedupe_ours(request: Request) -> Contender:
    from fast_axolotl.dedupe import unique_rows

    table = _table(request)
    return _indices(lambda: unique_rows(table), table)


def dedupe_plain(request: Request) -> Contender:
    """A set of the values, or of the rows as text where there are several or lists in them."""
    table = _table(request)
    columns = [column.to_pylist() for column in table.columns]
    rows = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
    key = str if any(not isinstance(row, str) for row in rows[:1]) else None

    def run() -> list[int]:
        seen: set[Any] = set()
        kept = []
        for index, value in enumerate(rows if key is None else map(key, rows)):
            if value not in seen:
                seen.add(value)
                kept.append(index)
        return kept

    return _indices(run, table)


def dedupe_pandas(request: Request) -> Contender:
    table = _table(request)
    frame = table.to_pandas()
    return _indices(lambda: frame.drop_duplicates().index.to_numpy(), table, "pandas")


def dedupe_pyarrow(request: Request) -> Contender:
    import pyarrow as pa

    table = _table(request)
    names = [f"c{index}" for index in range(table.num_columns)]
    numbered = table.rename_columns(names).append_column("row", pa.array(range(len(table))))

    def run() -> Any:
        first = numbered.group_by(names, use_threads=False).aggregate([("row", "min")])
        return first["row_min"].combine_chunks().sort().to_numpy()

    return _indices(run, table, "pyarrow")


def dedupe_axolotl(request: Request) -> Contender:
    table = _table(request)
    dataset = import_module("datasets").Dataset(table)
    deduplicate = import_module("axolotl.utils.data.utils")._deduplicate_dataset

    def rows(found: Any) -> Mapping[str, Any]:
        indices = found._indices
        return {"row": range(len(found)) if indices is None else indices.column(0).to_pylist()}

    return _answers(lambda: deduplicate(dataset)[0], len(table), rows, metadata.version("axolotl"))


def _tokens(request: Request) -> list[list[int]]:
    """Rows as lists, cut where they would not fit into a pack with the separators."""
    most = request["sequence_len"] - 2 if request["sequence_len"] else None
    rows = _table(request).column(0).drop_null().to_pylist()
    return [row[:most] for row in rows]


def _plans(request: Request, plan: Callable[[Any], Any], version: str | None = None) -> Contender:
    import numpy as np

    lengths = np.array([len(row) for row in _tokens(request)])

    def packs(found: Any) -> Mapping[str, Any]:
        return {"packs": found.tolist() if hasattr(found, "tolist") else found}

    return _answers(lambda: plan(lengths), len(lengths), packs, version)


def plan_ours(request: Request) -> Contender:
    from fast_axolotl.packing import plan_packs

    capacity = request["sequence_len"]
    options: dict[str, Any] = {"max_rows": _MOST_ROWS, "group_size": _GROUP_SIZE}
    return _plans(request, partial(plan_packs, capacity=capacity, **options))


def plan_plain(request: Request) -> Contender:
    def plan(lengths: Any) -> list[list[int]]:
        packs: list[list[int]] = []
        for start in range(0, len(lengths), _GROUP_SIZE):
            group = lengths[start : start + _GROUP_SIZE].tolist()
            found = first_fit(group, request["sequence_len"], _MOST_ROWS)
            packs += [[start + index for index in pack] for pack in found] if start else found
        return packs

    return _plans(request, plan)


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


def plan_axolotl(request: Request) -> Contender:
    module = import_module("axolotl.utils.samplers.multipack")
    options = {"group_size": _GROUP_SIZE, "bin_size": _MOST_ROWS}
    plan = partial(module.pack_parallel, bin_capacity=request["sequence_len"], **options)
    return _plans(request, plan, metadata.version("axolotl"))


_PACKING: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 2}


def pack_ours(request: Request) -> Contender:
    from fast_axolotl.packing import pack_sequences

    rows, length = _tokens(request), request["sequence_len"]
    return _answers(lambda: pack_sequences(rows, length, **_PACKING), len(rows), dict)


def pack_plain(request: Request) -> Contender:
    rows, length = _tokens(request), request["sequence_len"]
    return _answers(lambda: pack(rows, length, **_PACKING), len(rows), dict)


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


def _pads(request: Request, pad_batch: Callable[[Any], Any], version: Any = None) -> Contender:
    """Batch by batch, as a training pads; every batch is to be gone before the next one."""
    rows = _tokens(request)
    batches = [rows[start : start + PAD_ROWS] for start in range(0, len(rows), PAD_ROWS)]

    def digest(padded: Iterable[Any]) -> Digest:
        lists = (batch.tolist() if hasattr(batch, "tolist") else batch for batch in padded)
        return digest_columns({"rows": chain.from_iterable(lists)}, len(rows))

    return Contender(
        run=lambda: map(pad_batch, batches), digest=digest, is_stream=True, version=version
    )


def pad_ours(request: Request) -> Contender:
    from fast_axolotl.collate import pad_sequences

    return _pads(request, pad_sequences)


def pad_plain(request: Request) -> Contender:
    return _pads(request, lambda rows: pad(rows, max(map(len, rows)), 0))


def pad(sequences: Sequence[list[int]], target_length: int, pad_value: int) -> list[list[int]]:
    """Every sequence with its padding behind it, which is made once for each length."""
    lengths = set(map(len, sequences))
    fillers = {length: [pad_value] * (target_length - length) for length in lengths}
    return [row + fillers[len(row)] for row in sequences]


def pad_ours_torch(request: Request) -> Contender:
    from fast_axolotl.collate import pad_sequences

    import_module("torch")
    return _pads(request, partial(pad_sequences, output="torch"))


def pad_torch(request: Request) -> Contender:
    torch = import_module("torch")
    pad_sequence = import_module("torch.nn.utils.rnn").pad_sequence
    return _pads(
        request,
        lambda rows: pad_sequence([torch.tensor(row) for row in rows], batch_first=True),
        torch.__version__,
    )


def _entry(
    name: str, gives: str, build: str, against: str | None = None, needs: str | None = None
) -> Entry:
    return Entry(name=name, gives=gives, build=f"{__name__}:{build}", against=against, needs=needs)


_OURS = "fast-axolotl"
_OURS_PYTHON = "fast-axolotl, Python"
_OURS_TORCH = "fast-axolotl, torch"
_OURS_PACK = "fast-axolotl pack_sequences"

CONTENDERS: Mapping[str, tuple[Entry, ...]] = {
    "reader": (
        _entry(_OURS, "Arrow batches", "read_arrow"),
        _entry(_OURS_PYTHON, "dicts of lists", "read_python"),
        _entry("HF datasets, streaming", "rows", "read_hf_streaming", _OURS_PYTHON, "datasets"),
        _entry("HF datasets, loaded", "rows", "read_hf_loaded", _OURS_PYTHON, "datasets"),
        _entry("pyarrow", "Arrow batches", "read_pyarrow", _OURS),
        _entry("plain Python", "rows", "read_plain", _OURS_PYTHON),
    ),
    "hash": (
        _entry(_OURS, "list → list", "hash_ours"),
        _entry("fast-axolotl, Arrow", "Arrow → Arrow", "hash_ours_arrow"),
        _entry("hashlib", "list → list", "hash_hashlib", _OURS),
    ),
    "dedupe": (
        _entry(_OURS, "Arrow → rows", "dedupe_ours"),
        _entry("Axolotl", "Dataset → Dataset", "dedupe_axolotl", _OURS, "axolotl"),
        _entry("Python set", "lists → rows", "dedupe_plain", _OURS),
        _entry("pandas", "frame → rows", "dedupe_pandas", _OURS, "pandas"),
        _entry("pyarrow group_by", "Arrow → rows", "dedupe_pyarrow", _OURS),
    ),
    "pack": (
        _entry(_OURS, "lengths → packs", "plan_ours"),
        _entry("Axolotl pack_parallel", "lengths → packs", "plan_axolotl", _OURS, "axolotl"),
        _entry("Python first fit", "lengths → packs", "plan_plain", _OURS),
        _entry(_OURS_PACK, "lists → lists", "pack_ours"),
        _entry("Python, filling rows", "lists → lists", "pack_plain", _OURS_PACK),
    ),
    "pad": (
        _entry(_OURS, "lists → lists", "pad_ours"),
        _entry("plain Python", "lists → lists", "pad_plain", _OURS),
        _entry(_OURS_TORCH, "lists → torch", "pad_ours_torch", needs="torch"),
        _entry("torch pad_sequence", "lists → torch", "pad_torch", _OURS_TORCH, "torch"),
    ),
}
"""Operation to who may take part; the first peer is the one that the answer begins with."""
