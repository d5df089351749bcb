"""The readers that a case compares: ours, HF datasets, pyarrow, Polars, DuckDB.

A ``Peer`` prepares a pass over a file and gives back a function that makes it: imports and
connections are outside the timing, opening the file is inside. Each is set up for speed as its
documentation says, in bounded memory where it can, in the order of the file, in batches of 1000
rows. Polars appears twice: its zero-copy ``string_view`` columns, which many consumers cannot take,
and the plain strings that ``to_arrow()`` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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

Pass = Callable[[], Iterator[Any]]
Prepare = Callable[[Path], Pass]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A reader and how it reads each format."""

    name: str
    """The name in the matrix."""
    package: str | None
    """Its distribution, for the version."""
    output: str
    """What it gives: ``arrow`` batches, ``python`` dicts of lists, or single ``rows``."""
    formats: dict[str, Prepare]
    """Format to what prepares a pass over a file of it."""
    unbounded: dict[str, str] = field(default_factory=dict)
    """Case to why memory grows with the file there: not a rival for the fastest in bounded memory.

    Found by the memory cases, which show the figures in every result."""
    most_rows: int | None = None
    """A pass stops after so many rows."""
    only: tuple[str, ...] = ()
    """The only cases it takes part in; empty for all."""
    variant: bool = False
    """Another way to use a package that is there already: not missed where it has no such way."""


def _ours_arrow(path: Path) -> Pass:
    from fast_axolotl.reading import open_dataset

    return lambda: iter(open_dataset(path, batch_size=BATCH_ROWS))


def _ours_python(path: Path) -> Pass:
    from fast_axolotl.streaming import streaming_dataset_reader

    return lambda: streaming_dataset_reader(str(path), "", BATCH_ROWS)


def _hf_rows(path: Path) -> Pass:
    dataset = _hf_load("parquet", path)
    return lambda: iter(dataset)


def _hf_load_and_rows(path: Path) -> Pass:
    _hf_load("parquet", path)
    return lambda: iter(_hf_load("parquet", path))


def _hf_streaming(builder: str) -> Prepare:
    def prepare(path: Path) -> Pass:
        import datasets  # noqa: F401 - its import is not part of the pass

        return lambda: islice(_hf_load(builder, path, streaming=True), HF_ROWS)

    return prepare


def _hf_load(builder: str, path: Path, *, streaming: bool = False) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset(
        builder,
        data_files=str(path),
        split="train",
        streaming=streaming,
        cache_dir=str(path.parent / "hf-cache"),
    )


def _cut(batches: Any) -> Iterator[Any]:
    """Slices of at most ``BATCH_ROWS``; copies nothing."""
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def _pyarrow_parquet(path: Path) -> Pass:
    import pyarrow.parquet as pq

    return lambda: pq.ParquetFile(path).iter_batches(BATCH_ROWS)


def _pyarrow_pages(path: Path) -> Pass:
    import pyarrow.parquet as pq

    def run() -> Iterator[Any]:
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=_PYARROW_BLOCK_BYTES)
        return iter(file.iter_batches(BATCH_ROWS))

    return run


def _pyarrow_jsonl(path: Path) -> Pass:
    import pyarrow as pa
    from pyarrow import json as pa_json

    options = pa_json.ReadOptions(block_size=_PYARROW_BLOCK_BYTES)
    return lambda: _cut(pa_json.open_json(pa.input_stream(str(path)), read_options=options))


def _pyarrow_csv(path: Path) -> Pass:
    from pyarrow import csv as pa_csv

    read = pa_csv.ReadOptions(block_size=_PYARROW_BLOCK_BYTES)
    parse = pa_csv.ParseOptions(newlines_in_values=True)
    return lambda: _cut(pa_csv.open_csv(path, read_options=read, parse_options=parse))


def _pyarrow_text(path: Path) -> Pass:
    from pyarrow import csv as pa_csv

    read = pa_csv.ReadOptions(block_size=_PYARROW_BLOCK_BYTES, column_names=["text"])
    parse = pa_csv.ParseOptions(delimiter="\x01", quote_char=False, ignore_empty_lines=False)
    return lambda: _cut(pa_csv.open_csv(path, read_options=read, parse_options=parse))


def _pyarrow_arrow(path: Path, *, mapped: bool = False) -> Pass:
    import pyarrow as pa

    def run() -> Iterator[Any]:
        reader = pa.ipc.open_file(pa.memory_map(str(path)) if mapped else pa.OSFile(str(path)))
        return (reader.get_batch(index) for index in range(reader.num_record_batches))

    return run


def _pyarrow_stream(path: Path, *, mapped: bool = False) -> Pass:
    import pyarrow as pa

    def run() -> Iterator[Any]:
        return iter(
            pa.ipc.open_stream(pa.memory_map(str(path)) if mapped else pa.OSFile(str(path)))
        )

    return run


def _polars(scan: str, *, views: bool, **settings: Any) -> Prepare:
    def prepare(path: Path) -> Pass:
        import polars

        level = polars.CompatLevel.newest() if views else polars.CompatLevel.oldest()

        def run() -> Iterator[Any]:
            frames = getattr(polars, scan)(path, **settings).collect_batches(chunk_size=BATCH_ROWS)
            for frame in frames:
                yield from frame.to_arrow(compat_level=level).to_batches()

        return run

    return prepare


def _polars_formats(*, views: bool) -> dict[str, Prepare]:
    return {
        "parquet": _polars("scan_parquet", views=views),
        "jsonl": _polars("scan_ndjson", views=views),
        "csv": _polars("scan_csv", views=views),
        "arrow": _polars("scan_ipc", views=views),
        "text": _polars("scan_lines", views=views, name="text"),
    }


def _duckdb(read: str, **settings: Any) -> Prepare:
    def prepare(path: Path) -> Pass:
        import duckdb

        connection = duckdb.connect()

        def run() -> Iterator[Any]:
            relation = getattr(connection, read)(str(path), **settings)
            return iter(relation.to_arrow_reader(BATCH_ROWS))

        return run

    return prepare


_DUCKDB_LINES = {
    "sep": "\x01",
    "quotechar": "",
    "escapechar": "",
    "header": False,
    "names": ["text"],
    "dtype": ["VARCHAR"],
}


_PRE_BUFFERED = "keeps the bytes of every row group that it has read"
_WHOLE_GROUP = "holds a whole row group"
_ALL = ("parquet", "jsonl", "csv", "arrow", "arrow-stream", "text")

OURS = (
    Peer(
        name=OURS_ARROW,
        package=None,
        output="arrow",
        formats=dict.fromkeys(_ALL, _ours_arrow),
    ),
    Peer(
        name=OURS_PYTHON,
        package=None,
        output="python",
        formats=dict.fromkeys(_ALL, _ours_python),
    ),
)
"""Our reader with both outputs; the first is the one that equality is checked against."""

PEERS = (
    Peer(
        name="HF load + rows",
        package="datasets",
        output="rows",
        formats={"parquet": _hf_load_and_rows},
        only=("sample-parquet",),
    ),
    Peer(
        name="HF rows",
        package="datasets",
        output="rows",
        formats={"parquet": _hf_rows},
        only=("sample-parquet",),
    ),
    Peer(
        name="HF streaming",
        package="datasets",
        output="rows",
        formats={
            "parquet": _hf_streaming("parquet"),
            "jsonl": _hf_streaming("json"),
            "csv": _hf_streaming("csv"),
            "arrow": _hf_streaming("arrow"),
            "arrow-stream": _hf_streaming("arrow"),
            "text": _hf_streaming("text"),
        },
        most_rows=HF_ROWS,
    ),
    Peer(
        name="pyarrow",
        package="pyarrow",
        output="arrow",
        formats={
            "parquet": _pyarrow_parquet,
            "jsonl": _pyarrow_jsonl,
            "csv": _pyarrow_csv,
            "arrow": _pyarrow_arrow,
            "arrow-stream": _pyarrow_stream,
            "text": _pyarrow_text,
        },
        unbounded={
            "messages-parquet": _PRE_BUFFERED,
            "messages-parquet-one-group": _PRE_BUFFERED,
        },
    ),
    Peer(
        name="pyarrow pages",
        variant=True,
        package="pyarrow",
        output="arrow",
        formats={"parquet": _pyarrow_pages},
    ),
    Peer(
        name="pyarrow mapped",
        variant=True,
        package="pyarrow",
        output="arrow",
        formats={
            "arrow": lambda path: _pyarrow_arrow(path, mapped=True),
            "arrow-stream": lambda path: _pyarrow_stream(path, mapped=True),
        },
    ),
    Peer(
        name="Polars",
        package="polars",
        output="arrow",
        formats=_polars_formats(views=False),
        unbounded={"messages-parquet-one-group": _WHOLE_GROUP},
    ),
    Peer(
        name="Polars views",
        variant=True,
        package="polars",
        output="arrow",
        formats=_polars_formats(views=True),
        unbounded={"messages-parquet-one-group": _WHOLE_GROUP},
    ),
    Peer(
        name="DuckDB",
        package="duckdb",
        output="arrow",
        formats={
            "parquet": _duckdb("read_parquet"),
            "jsonl": _duckdb("read_json"),
            "csv": _duckdb("read_csv"),
            "text": _duckdb("read_csv", **_DUCKDB_LINES),
        },
        unbounded={"messages-parquet-one-group": _WHOLE_GROUP},
    ),
)
"""Everything we are compared with but the earlier package, which needs a process of its own."""
