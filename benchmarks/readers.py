"""The readers that a case compares: ours, HF datasets, pyarrow, Polars, DuckDB.

A ``Peer`` prepares a pass over a file and gives back a function that makes it: imports and
connections are outside the timing, opening the file is inside. Each is set up for speed as its
documentation says, in bounded memory where it can, in the order of the file, in batches of 1000
rows. Polars appears twice: its zero-copy ``string_view`` columns, which many consumers cannot take,
and the plain strings that ``to_arrow()`` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

BATCH_ROWS = 1000
OURS_ARROW = "fast-axolotl arrow"
OURS_PYTHON = "fast-axolotl python"
HF_ROWS = 20_000
"""Rows of a Hugging Face streaming pass: it delivers single rows, and a prefix shows the speed."""

_PYARROW_BLOCK_BYTES = 2 * 1024 * 1024
"""The fastest of 1, 2, 4 and 8 MiB for both JSON and CSV on two cores."""
_ALL = ("parquet", "jsonl", "csv", "arrow", "arrow-stream", "text")
_HF_BUILDERS = {"jsonl": "json", "arrow-stream": "arrow"}
_POLARS_SCANS = {
    "parquet": "scan_parquet",
    "jsonl": "scan_ndjson",
    "csv": "scan_csv",
    "arrow": "scan_ipc",
    "text": "scan_lines",
}
_DUCKDB_READS = {
    "parquet": "read_parquet",
    "jsonl": "read_json",
    "csv": "read_csv",
    "text": "read_csv",
}
_DUCKDB_LINES = {
    "sep": "\x01",
    "quotechar": "",
    "escapechar": "",
    "header": False,
    "names": ["text"],
    "dtype": ["VARCHAR"],
}
_PRE_BUFFERED = "keeps the bytes of every row group that it has read"
_PARQUETS = ("messages-parquet", "messages-parquet-one-group", "messages-parquet-zstd")
_ONE_GROUP = {"messages-parquet-one-group": "holds a whole row group"}

Pass = Callable[[], Iterator[Any]]


@dataclass(frozen=True, slots=True)
class Peer:
    """A reader and how it reads each format."""

    name: str
    """The name in the matrix."""
    package: str | None
    """Its distribution, for the version."""
    output: str
    """What it gives: ``arrow`` batches, ``python`` dicts of lists, or single ``rows``."""
    formats: tuple[str, ...]
    prepare: Callable[[str, Path], Pass]
    """From a format and a file to a pass."""
    unbounded: Mapping[str, str] = field(default_factory=dict)
    """Case to why memory grows with the file there: not a rival for the fastest in bounded memory.

    Found by the memory cases, which show the figures in every result."""
    most_rows: int | None = None
    """A pass stops after so many rows."""
    only: str | None = None
    """The only case it takes part in; ``None`` for all."""
    is_variant: bool = False
    """Another way to use a package that is there already: not missed where it has no such way."""


def _ours_arrow(form: str, path: Path) -> Pass:
    from fast_axolotl.reading import open_dataset

    # The types that this scan finds are kept: numbers are numbers, and timed passes do not scan.
    open_dataset(path, infer="scan" if form == "csv" else "auto").close()
    return lambda: iter(open_dataset(path, batch_size=BATCH_ROWS))


def _ours_python(form: str, path: Path) -> Pass:
    from fast_axolotl.streaming import streaming_dataset_reader

    _ours_arrow(form, path)
    return lambda: streaming_dataset_reader(str(path), "", BATCH_ROWS)


def _hf(form: str, path: Path, *, how: str) -> Pass:
    import datasets

    datasets.disable_progress_bars()
    load = partial(
        datasets.load_dataset,
        _HF_BUILDERS.get(form, form),
        data_files=str(path),
        split="train",
        streaming=how == "stream",
        cache_dir=str(path.parent / "hf-cache"),
    )
    if how == "stream":
        return lambda: islice(load(), HF_ROWS)
    dataset = load()
    return lambda: iter(load() if how == "load" else dataset)


def _pyarrow(form: str, path: Path, *, is_mapped: bool = False, in_pages: bool = False) -> Pass:
    import pyarrow as pa
    from pyarrow import csv as pa_csv
    from pyarrow import json as pa_json
    from pyarrow import parquet as pq

    def cut(batches: Any) -> Iterator[Any]:
        """Slices of at most ``BATCH_ROWS``; copies nothing."""
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS)

    def run() -> Iterator[Any]:
        if form == "parquet":
            pages = {"pre_buffer": False, "buffer_size": _PYARROW_BLOCK_BYTES} if in_pages else {}
            return iter(pq.ParquetFile(path, **pages).iter_batches(BATCH_ROWS))
        if form == "jsonl":
            options = pa_json.ReadOptions(block_size=_PYARROW_BLOCK_BYTES)
            return cut(pa_json.open_json(pa.input_stream(str(path)), read_options=options))
        if form in ("csv", "text"):
            read = pa_csv.ReadOptions(block_size=_PYARROW_BLOCK_BYTES)
            parse = pa_csv.ParseOptions(newlines_in_values=True)
            if form == "text":
                read.column_names = ["text"]
                parse = pa_csv.ParseOptions(
                    delimiter="\x01", quote_char=False, ignore_empty_lines=False
                )
            return cut(pa_csv.open_csv(path, read_options=read, parse_options=parse))
        source = pa.memory_map(str(path)) if is_mapped else pa.OSFile(str(path))
        if form == "arrow-stream":
            return iter(pa.ipc.open_stream(source))
        reader = pa.ipc.open_file(source)
        return map(reader.get_batch, range(reader.num_record_batches))

    return run


def _polars(form: str, path: Path, *, has_views: bool) -> Pass:
    import polars

    level = polars.CompatLevel.newest() if has_views else polars.CompatLevel.oldest()
    scan = getattr(polars, _POLARS_SCANS[form])
    settings = {"name": "text"} if form == "text" else {}

    def run() -> Iterator[Any]:
        for frame in scan(path, **settings).collect_batches(chunk_size=BATCH_ROWS):
            yield from frame.to_arrow(compat_level=level).to_batches()

    return run


def _duckdb(form: str, path: Path) -> Pass:
    import duckdb

    read = getattr(duckdb.connect(), _DUCKDB_READS[form])
    settings = _DUCKDB_LINES if form == "text" else {}
    return lambda: iter(read(str(path), **settings).to_arrow_reader(BATCH_ROWS))


OURS = (
    Peer(OURS_ARROW, None, "arrow", _ALL, _ours_arrow),
    Peer(OURS_PYTHON, None, "python", _ALL, _ours_python),
)
"""Our reader with both outputs; the first is the one that equality is checked against."""

_hf_sample = partial(Peer, package="datasets", output="rows", only="sample-parquet")
_arrow = partial(Peer, output="arrow")

PEERS = (
    _hf_sample("HF load + rows", formats=("parquet",), prepare=partial(_hf, how="load")),
    _hf_sample("HF rows", formats=("parquet",), prepare=partial(_hf, how="rows")),
    Peer("HF streaming", "datasets", "rows", _ALL, partial(_hf, how="stream"), most_rows=HF_ROWS),
    _arrow(
        "pyarrow",
        "pyarrow",
        formats=_ALL,
        prepare=_pyarrow,
        unbounded=dict.fromkeys(_PARQUETS, _PRE_BUFFERED),
    ),
    _arrow(
        "pyarrow pages",
        "pyarrow",
        formats=("parquet",),
        prepare=partial(_pyarrow, in_pages=True),
        is_variant=True,
    ),
    _arrow(
        "pyarrow mapped",
        "pyarrow",
        formats=("arrow", "arrow-stream"),
        prepare=partial(_pyarrow, is_mapped=True),
        is_variant=True,
    ),
    _arrow(
        "Polars",
        "polars",
        formats=tuple(_POLARS_SCANS),
        prepare=partial(_polars, has_views=False),
        unbounded=_ONE_GROUP,
    ),
    _arrow(
        "Polars views",
        "polars",
        formats=tuple(_POLARS_SCANS),
        prepare=partial(_polars, has_views=True),
        unbounded=_ONE_GROUP,
        is_variant=True,
    ),
    _arrow(
        "DuckDB",
        "duckdb",
        formats=tuple(_DUCKDB_READS),
        prepare=_duckdb,
        unbounded=_ONE_GROUP,
    ),
)
"""Everything we are compared with but the earlier package, which needs a process of its own."""
