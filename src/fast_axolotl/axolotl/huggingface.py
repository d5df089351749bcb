"""Files of a streamed Hugging Face dataset through our reader.

``through_reader`` takes a dataset that ``load_dataset(..., streaming=True)`` made and exchanges the
one part that reads files. Everything else stays what Hugging Face made it: info, features, split,
the list of files that is the list of shards, and with it how ranks, workers and epochs divide and
shuffle them. Tables go through the builder's own cast, rows through its own formatter.

Whether a file can be read so is looked at before: JSON lines, Parquet, Arrow or text, plain
features, and a first block whose types are those features. What shows up later (a column that
changes its type, a malformed line) is met in the stream: the rest of that file is then read by
Hugging Face's own code from that row on, so that it decides what the rows are, or the error.

State: the reader's position as a JSON string and the rows taken since, so a resumed iteration
starts at the exact row without reading what came before.

Does not read CSV: pandas settles types and missing values chunk by chunk. JSON with a key twice in
an object is an error there, or the whole file over again; here the last value counts.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fast_axolotl.axolotl.patching import Unfamiliar
from fast_axolotl.errors import FastAxolotlError, MissingExtraError
from fast_axolotl.reading import Reader, open_dataset
from fast_axolotl.reading.reader import usable_threads

try:
    from datasets import iterable_dataset as hf
    from datasets.formatting import PythonFormatter
    from datasets.packaged_modules.json import json as json_files
    from datasets.utils.sharding import _merge_gen_kwargs, _shuffle_gen_kwargs, _split_gen_kwargs
except ImportError as error:
    raise MissingExtraError(
        "streaming into Hugging Face needs its package: pip install datasets"
    ) from error

LOG = logging.getLogger("fast_axolotl")

_FORMATS = {"Json": "jsonl", "Parquet": "parquet", "Arrow": "arrow", "Text": "text"}
"""Builder of Hugging Face → the format of ours that gives its rows."""

_SETTINGS = (
    *("field", "encoding", "encoding_errors", "chunksize", "columns", "filters", "batch_size"),
    *("features", "keep_linebreaks", "sample_by", "on_mixed_types", "on_bad_files"),
)
"""Settings of the builders that change rows; Axolotl gives none of them."""

_PLAIN = {"Value", "List", "LargeList", "Sequence", "ClassLabel", "dict", "list"}
"""Kinds of features whose values are what they are stored as."""

_CODECS = {"gzip", "bz2", "xz", "lz4", "zstd"}
"""Compressions that both open by the file's own address."""

_TIME = (
    r"^\d{4}-\d{2}-\d{2}"
    r"([T ]\d{2}(:?\d{2}(:?\d{2}([.,]\d+)?)?)?)?\s*(Z|[+-]\d{2}(:?\d{2})?)?$"
)
"""What pyarrow takes for a time, and some more, where it infers the types of JSON."""

_TEXT = pa.schema([("text", pa.string())])

_START: dict[str, Any] = {"shard_idx": 0, "shard_example_idx": 0, "reader": None, "taken": 0}
"""The state before the first row. The position is a string: Hugging Face merges lists by item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """How the files of a dataset are opened; holds no open file, so it can be sent anywhere."""

    builder: Any
    """The builder that Hugging Face would read with."""
    memory_budget: int
    """Bytes that reading ahead may hold, in each process that reads."""
    options: dict[str, Any] = field(default_factory=dict)
    """For fsspec, by the way Hugging Face finds them."""

    @property
    def schema(self) -> pa.Schema:
        """What the builder casts its tables to."""
        features = self.builder.info.features
        return _TEXT if features is None else features.arrow_schema

    @property
    def format(self) -> str:
        return _FORMATS[type(self.builder).__name__]

    def open(self, path: str) -> Reader:
        reader = open_dataset(
            path,
            format=self.format,
            memory_budget=self.memory_budget,
            num_threads=_threads(),
            storage_options=self.options or None,
        )
        found = {item.format for item in reader.files}
        if found - {self.format, *(["feather"] if self.format == "arrow" else [])}:
            raise Unfamiliar(f"{path} is {', '.join(sorted(found))}, not {self.format}")
        return reader

    def window(self, reader: Reader) -> int:
        """Encoded bytes that must have been seen past a row before it may be given away.

        Hugging Face settles the types of JSON chunk by chunk: one odd value changes how the rows
        before it in the chunk come out. The reader's count may be ahead by a batch and two blocks.
        """
        if self.format != "jsonl":
            return 0
        block_bytes: int = reader.state_dict()["plan"]["block_bytes"]
        return int(self.builder.config.chunksize) + self.memory_budget // 8 + 2 * block_bytes

    def require_fit(self, schema: pa.Schema) -> None:
        """``Unfamiliar`` where the builder would meet other types than it expects."""
        if not fits(pa.struct(schema), pa.struct(self.schema)):
            raise Unfamiliar("the types of the rows changed")

    def cast(self, batch: pa.RecordBatch) -> pa.Table:
        """The batch as the builder gives it; ``Unfamiliar`` where it would not be the same."""
        self.require_fit(batch.schema)
        table = pa.Table.from_batches([batch])
        for text in _texts(table):
            if self.format == "text" and _any_match(text, "\r"):
                raise Unfamiliar("a line has a carriage return, which ends the line in datasets")
            if self.format == "jsonl" and _any_match(text, _TIME):
                raise Unfamiliar("a text looks like a date or time, which datasets may convert")
        cast: pa.Table = self.builder._cast_table(table)
        return cast


def through_reader(dataset: Any, *, memory_budget: int) -> Any:
    """The dataset with its files read by ``open_dataset``; ``Unfamiliar`` where it cannot be."""
    examples = dataset._ex_iterable
    shards = shard_sources(dataset)
    builder = examples.generate_tables_fn.__self__
    path, options = locate(shards[0], builder)
    source = FileSource(builder=builder, memory_budget=memory_budget, options=options)
    with source.open(path) as reader:
        source.require_fit(reader.schema)
    ours = ReaderExamples(examples.generate_tables_fn, examples.kwargs, source)
    return hf.IterableDataset(
        ex_iterable=ours,
        info=dataset._info.copy(),
        split=dataset._split,
        formatting=dataset._formatting,
        distributed=dataset._distributed,
        token_per_repo_id=dataset._token_per_repo_id,
    )


def shard_sources(dataset: Any) -> list[str]:
    """The addresses of the files; ``Unfamiliar`` for a dataset that is not plainly files."""
    examples: Any = getattr(dataset, "_ex_iterable", None)
    if type(dataset) is not hf.IterableDataset or type(examples) is not hf.ArrowExamplesIterable:
        raise Unfamiliar("the dataset is not a plain stream of files")
    if dataset._formatting or dataset._distributed:
        raise Unfamiliar("the dataset already has a format or is split across ranks")
    builder: Any = getattr(examples.generate_tables_fn, "__self__", None)
    name, module = type(builder).__name__, type(builder).__module__
    if name not in _FORMATS or not module.startswith("datasets.packaged_modules."):
        raise Unfamiliar(f"datasets reads it with {name}, which fast-axolotl does not replace")
    config, usual = builder.config, type(builder.config)()
    for setting in _SETTINGS:
        if getattr(config, setting, None) != getattr(usual, setting, None):
            raise Unfamiliar(f"{setting} is set")
    features = builder.info.features
    traces = getattr(json_files, "AGENT_TRACES_FEATURES", None)
    if name == "Json" and features is not None and features == traces:
        raise Unfamiliar("datasets makes one row per file here")
    if features is None and name != "Text":
        raise Unfamiliar("datasets does not know the columns before it has read everything")
    for column, feature in (features or {}).items():
        inner: list[Any] = []
        hf._visit(feature, inner.append)
        # Others are stored as something else than they are, such as JSON or a matrix.
        if hf.require_decoding(feature) or {type(item).__name__ for item in inner} - _PLAIN:
            raise Unfamiliar(f"column {column!r} has nested values")
    lists = [value for value in examples.kwargs.values() if isinstance(value, list)]
    count = max(map(len, lists), default=0)
    shards = _split_gen_kwargs(examples.kwargs, max_num_jobs=max(1, count))
    paths = [_address(shard) for shard in shards]
    if not paths:
        raise Unfamiliar("the dataset has no files")
    return paths


class ReaderExamples(hf.ArrowExamplesIterable):  # type: ignore[misc]
    """Files by our reader; typed, so that rows are taken one by one, where positions are exact."""

    def __init__(self, generate_tables_fn: Any, kwargs: dict[str, Any], source: FileSource) -> None:
        super().__init__(generate_tables_fn, kwargs)
        self.source = source

    @property
    def is_typed(self) -> bool:
        return self.features is not None

    @property
    def features(self) -> Any:
        return self.source.builder.info.features

    def _init_state_dict(self) -> dict[str, Any]:
        self._state_dict: dict[str, Any] = {**_START, "type": type(self).__name__}
        return self._state_dict

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        formatter, state = PythonFormatter(), self._state_dict
        for key, table, after in self._tables():
            for number, example in enumerate(hf._batch_to_examples(formatter.format_batch(table))):
                if state:
                    state["taken"] += 1
                    state["shard_example_idx"] += 1
                yield (*key, number), example
            if state:
                state.update(reader=after, taken=0)

    def _iter_arrow(self) -> Iterator[tuple[Any, pa.Table]]:
        state = self._state_dict
        for key, table, after in self._tables():
            if state:
                state["shard_example_idx"] += len(table)
                state.update(reader=after, taken=0)
            yield key, table

    def _tables(self) -> Iterator[tuple[tuple[int, int], pa.Table, str | None]]:
        """Tables from the current position on, each with the reader's position after it."""
        state = self._state_dict or dict(_START)
        shards = _split_gen_kwargs(self.kwargs, max_num_jobs=self.num_shards)
        for index in range(state["shard_idx"], len(shards)):
            for number, (table, after) in enumerate(self._shard_tables(shards[index], state)):
                if len(table):
                    yield (index, number), table, after
            state.update(shard_idx=index + 1, shard_example_idx=0, reader=None, taken=0)

    def _shard_tables(
        self, shard: dict[str, Any], state: dict[str, Any]
    ) -> Iterator[tuple[pa.Table, str | None]]:
        """One file, by our reader; from where that cannot go on, by Hugging Face."""
        given = state["shard_example_idx"]
        try:
            for table, after in self._read(shard, state["reader"], state["taken"], given):
                given += len(table)
                yield table, after
            return
        except (FastAxolotlError, Unfamiliar, pa.ArrowException, TypeError, ValueError) as problem:
            LOG.warning("datasets itself reads the file from row %d on: %s", given, problem)
        for _, table in self.generate_tables_fn(**shard):
            if given < len(table):
                yield table.slice(given), None
            given = max(0, given - len(table))

    def _read(
        self, shard: dict[str, Any], position: str | None, taken: int, given: int
    ) -> Iterator[tuple[pa.Table, str]]:
        path, options = locate(_address(shard), self.source.builder)
        skip = taken if position else given
        source = replace(self.source, options=options)
        held: deque[tuple[pa.Table, str, int]] = deque()
        with source.open(path) as reader:
            if position:
                reader.load_state_dict(json.loads(position))
            window = source.window(reader)
            for batch in reader:
                dropped = min(skip, batch.num_rows)
                skip -= dropped
                source.require_fit(reader.schema)
                table = source.cast(batch.slice(dropped))
                held.append((table, json.dumps(reader.state_dict()), reader.stats.num_bytes))
                while held and reader.stats.num_bytes - held[0][2] >= window:
                    yield held.popleft()[:2]
            while held:
                yield held.popleft()[:2]

    def shuffle_data_sources(self, generator: Any) -> ReaderExamples:
        return self._with(_shuffle_gen_kwargs(deepcopy(generator), self.kwargs))

    def shard_data_sources(
        self, num_shards: int, index: int, contiguous: bool = True
    ) -> ReaderExamples:
        shards = _split_gen_kwargs(self.kwargs, max_num_jobs=self.num_shards)
        chosen = self.split_shard_indices_by_worker(num_shards, index, contiguous=contiguous)
        return self._with(_merge_gen_kwargs([shards[number] for number in chosen]))

    def reshard_data_sources(self) -> ReaderExamples:
        return self._with(self.kwargs)

    def _with(self, kwargs: dict[str, Any]) -> ReaderExamples:
        return type(self)(self.generate_tables_fn, kwargs, self.source)


def fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of one type are values of another as they are.

    Nulls fit anywhere, and what a struct lacks is null; sizes of offsets do not matter. An integer
    is no float: pyarrow reads a column with both as floats, -0 included.
    """
    kinds = pa.types
    if found == wanted or kinds.is_null(found):
        return True
    if kinds.is_dictionary(found):
        return fits(found.value_type, wanted)
    if _is_text(found) and _is_text(wanted):
        return True
    if {found, wanted} <= {pa.binary(), pa.large_binary()}:
        return True
    if _is_list(found) and _is_list(wanted):
        return fits(found.value_type, wanted.value_type)
    if not (kinds.is_struct(found) and kinds.is_struct(wanted)):
        return False
    named = {
        wanted.field(index).name: wanted.field(index).type for index in range(wanted.num_fields)
    }
    inner = [found.field(index) for index in range(found.num_fields)]
    return all(item.name in named and fits(item.type, named[item.name]) for item in inner)


def _texts(table: pa.Table) -> Iterator[pa.Array]:
    """Every array of text in a table, also inside lists and structs."""
    arrays = [chunk for column in table.columns for chunk in column.chunks]
    while arrays:
        array = arrays.pop()
        if _is_text(array.type):
            yield array
        elif _is_list(array.type):
            arrays.append(array.flatten())
        elif pa.types.is_struct(array.type):
            arrays += array.flatten()
        elif pa.types.is_dictionary(array.type):
            arrays.append(array.dictionary)


def _any_match(text: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(text, pattern)).as_py())


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _address(shard: dict[str, Any]) -> str:
    """The one file of a shard, by the address that both open."""
    if "files" in shard:
        if len(shard["files"]) != 1 or shard.get("row_groups_list", [None]) != [None]:
            raise Unfamiliar("a shard is not one whole file")
        return str(shard["files"][0])
    keys = set(shard) - {"original_files"}  # which datasets has since 4.8.5
    if keys != {"files_iterables", "base_files"} or len(shard["base_files"]) != 1:
        raise Unfamiliar("a shard is not one whole file")
    inner, base = list(shard["files_iterables"][0]), str(shard["base_files"][0])
    if inner == [base]:
        return base
    codec, _, rest = inner[0].partition("://")
    if len(inner) == 1 and codec in _CODECS and rest.endswith(f"::{base}"):
        return base
    raise Unfamiliar(f"{base} is an archive")


def locate(path: str, builder: Any) -> tuple[str, dict[str, Any]]:
    """The address and its storage options as Hugging Face prepares them."""
    from datasets import DownloadConfig
    from datasets.utils.file_utils import _prepare_path_and_storage_options

    if "://" not in path:
        return path, {}
    config = DownloadConfig(token=builder.token, storage_options=builder.storage_options)
    prepared, options = _prepare_path_and_storage_options(path, config)
    return prepared, dict(options.get(prepared.partition("://")[0], {}))


def _threads() -> int:
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    return max(1, usable_threads() // worker.num_workers) if worker else 0
