"""From what the caller wrote to a list of opened files.

A path is a file, a folder, a glob or a URI; a list of them is read in its own order, a folder in
the sorted order of its files. Folders written by Hugging Face ``save_to_disk`` name their files
themselves. Where the names in a folder tell several splits apart, one has to be chosen: reading
the test rows into training, or leaving them out, would both be silent mistakes.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import pyarrow as pa

from fast_axolotl.errors import AccessError, DataError, MissingFileError, UsageError
from fast_axolotl.reading.blocks import Block, BrokenBlock, FileFormat, ReadOptions, Unit
from fast_axolotl.reading.columnar import open_arrow, open_parquet
from fast_axolotl.reading.compression import head_of, spool
from fast_axolotl.reading.csv_files import CsvFile
from fast_axolotl.reading.formats import (
    FORMATS,
    HEAD_BYTES,
    format_of_name,
    is_cut_magic,
    is_saved_dataset,
    sniff_compression,
    sniff_format,
)
from fast_axolotl.reading.json_files import JsonDocument, JsonLinesFile
from fast_axolotl.reading.storage import Source, expand, translate_os_errors
from fast_axolotl.reading.text_lines import TextFile

__all__ = ["BrokenFile", "FormatWarning", "InputFile", "find_files", "open_files"]

_Picked = TypeVar("_Picked")

_OPENING_THREADS = 8
"""Footers and first bytes of many files are read so many at a time."""

_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF_WORD = {word: split for split, words in _SPLIT_WORDS.items() for word in words}

_NOT_DATA = re.compile(
    r"(^|/)([._].*|README.*|LICEN[SC]E.*|CHANGELOG.*|dataset_infos?\.json|dataset_dict\.json"
    r"|state\.json)$",
    re.IGNORECASE,
)


_NO_COLUMNS = pa.schema([])


class FormatWarning(UserWarning):
    """A file is not what its name says, and is read as what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """A file and what it turned out to be."""

    source: Source
    format: str
    compression: str | None


def find_files(
    paths: str | Path | Sequence[str | Path],
    *,
    split: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> tuple[list[Source], list[str]]:
    """The files that are meant, in order, and the ones in folders that were passed over."""
    listed = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not listed or not all(str(path) for path in listed):
        raise UsageError("the path is empty; pass a file, a folder, a glob or a list of them")
    sources: list[Source] = []
    ignored: list[str] = []
    for path in listed:
        found, passed_over = _find(str(path), split, storage_options)
        sources += found
        ignored += passed_over
    return sources, ignored


def open_files(
    sources: Sequence[Source], format: str, options: ReadOptions
) -> list[tuple[InputFile, FileFormat]]:
    """Every file identified and opened: a read of its first bytes, and of its footer if any."""
    wanted = _told_format(format)
    if len(sources) == 1:
        return [_open_or_reject(sources[0], wanted, options)]
    with ThreadPoolExecutor(_OPENING_THREADS) as pool:
        return list(pool.map(lambda source: _open_or_reject(source, wanted, options), sources))


def _told_format(format: str) -> str | None:
    base = format.split(".")[0].lower()
    if base in ("", "auto", "hf_dataset"):
        return None
    known = {"ndjson": "jsonl", "tsv": "csv", "txt": "text", "ipc": "arrow", "pq": "parquet"}
    base = known.get(base, base)
    if base not in FORMATS:
        names = ", ".join(FORMATS)
        raise UsageError(f"unknown format {format!r}; use auto or one of {names}")
    return base


def _find(
    path: str, split: str | None, storage_options: dict[str, Any] | None
) -> tuple[list[Source], list[str]]:
    if is_saved_dataset(path):
        return _saved_files(Path(path), split), []
    sources, root = expand(path, storage_options)
    if len(sources) == 1 and sources[0].path.rstrip("/").endswith(PurePosixPath(path).name):
        return sources, []
    names = [source.path.removeprefix(root).lstrip("/") for source in sources]
    eligible = [
        (name, source)
        for name, source in zip(names, sources, strict=True)
        if not _NOT_DATA.search(name)
    ]
    data = [(name, source) for name, source in eligible if format_of_name(name)[0]]
    if not data and any(mark in path for mark in "*?[") and not Path(path).is_dir():
        data = eligible  # the pattern says which files are meant, whatever they are called
    if not data:
        raise MissingFileError(
            "no data file in this folder; pass another, or use names that end in .parquet, .arrow, "
            ".jsonl, .json, .csv, .txt or their compressed forms",
            path=path,
        )
    chosen = _choose_split(data, split, path)
    taken = {source.path for _, source in data}
    return chosen, [source.path for source in sources if source.path not in taken]


def _choose_split(data: list[tuple[str, Source]], split: str | None, path: str) -> list[Source]:
    by_split: dict[str, list[Source]] = {}
    for name, source in data:
        by_split.setdefault(_split_of(name), []).append(source)
    if split == "all" or (split is None and len(by_split) == 1):
        return [source for _, source in data]
    names = sorted(name or "(none)" for name in by_split)
    if split is None:
        raise UsageError(
            f"{path}: the file names tell several splits apart ({', '.join(names)}); pass "
            'split="train", or split="all" to read them all'
        )
    wanted = by_split.get(_SPLIT_OF_WORD.get(split, split))
    if wanted is None:
        raise UsageError(f"{path}: no files of split {split!r}; there are: {', '.join(names)}")
    return wanted


def _split_of(name: str) -> str:
    for word in reversed(re.split(r"[^a-z]+", name.lower())):
        if word in _SPLIT_OF_WORD:
            return _SPLIT_OF_WORD[word]
    return ""


def _saved_files(folder: Path, split: str | None) -> list[Source]:
    """The files of a ``save_to_disk`` folder in the order that its own index gives."""
    index = folder / "dataset_dict.json"
    if index.is_file():
        splits = _read_index(index, lambda content: _texts(content["splits"]))
        if split == "all":
            return [source for name in splits for source in _saved_files(folder / name, None)]
        if split is None and len(splits) > 1:
            raise UsageError(
                f'{folder}: holds the splits {", ".join(splits)}; pass split="train", or '
                'split="all" to read them all'
            )
        chosen = split or splits[0]
        if chosen not in splits:
            raise UsageError(f"{folder}: no split {chosen!r}; there are: {', '.join(splits)}")
        return _saved_files(folder / chosen, None)
    state = folder / "state.json"
    if _read_index(state, lambda content: content.get("_indices_data_files")):
        raise DataError(
            "this dataset was saved with an indices mapping; save it again after flatten_indices()",
            path=str(folder),
        )
    names = _read_index(
        state, lambda content: _texts([item["filename"] for item in content["_data_files"]])
    )
    return [expand(str(folder / name), None)[0][0] for name in names]


def _read_index(path: Path, pick: Callable[[Any], _Picked]) -> _Picked:
    try:
        with translate_os_errors(str(path)):
            return pick(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise DataError(
            f"the index of this saved dataset is damaged ({type(error).__name__}: {error}); save "
            "it again",
            path=str(path),
        ) from None


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list) or not values or not all(isinstance(v, str) for v in values):
        raise ValueError(f"expected names, found {values!r}")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenFile:
    """Stands for a file that could not be opened, where such files are to be skipped."""

    error: DataError
    num_bytes: int
    options: ReadOptions
    schema: pa.Schema = _NO_COLUMNS

    def units(self, file: int) -> list[Unit]:
        return [Unit(file=file, start=0, stop=1, num_bytes=max(1, self.num_bytes))]

    def blocks(self, unit: Unit) -> Iterator[Block]:
        yield BrokenBlock(self.error)


def _open_or_reject(
    source: Source, told: str | None, options: ReadOptions
) -> tuple[InputFile, FileFormat]:
    try:
        return _open(source, told, options)
    except (MissingFileError, AccessError):
        raise
    except DataError as error:
        if options.on_error == "raise":
            raise
        file = InputFile(source=source, format=told or "unknown", compression=None)
        return file, BrokenFile(error=error, num_bytes=source.num_bytes, options=options)


def _open(source: Source, told: str | None, options: ReadOptions) -> tuple[InputFile, FileFormat]:
    named, packed = format_of_name(source.path)
    promised = told or named
    head = source.read_at(0, HEAD_BYTES)
    compression = sniff_compression(head)
    if compression is not None:
        head = head_of(source, compression, HEAD_BYTES)
    elif packed is not None:
        _refuse_cut_magic(source, head, packed)
    _refuse_empty(source, head, promised)
    found = sniff_format(head, promised)
    if options.json_field is not None and found == "jsonl":
        found = "json"
    _warn_if_misnamed(source, named, found, told)
    if packed is not None and packed != compression:
        _warn(source, packed, compression or "not compressed")
    file = InputFile(source=source, format=found, compression=compression)
    return file, _open_as(file, options)


def _open_as(file: InputFile, options: ReadOptions) -> FileFormat:
    source, compression = file.source, file.compression
    if file.format in ("parquet", "arrow", "feather"):
        opener = open_parquet if file.format == "parquet" else open_arrow
        if compression is None:
            return opener(source, source.path, options)
        copy, handle = spool(source, compression)
        return opener(copy, source.path, options, handle)
    if file.format == "csv":
        return CsvFile.open(source, compression, options)
    kinds: dict[str, Callable[..., FileFormat]] = {
        "text": TextFile,
        "jsonl": JsonLinesFile,
        "json": JsonDocument,
    }
    return kinds[file.format](source=source, compression=compression, options=options)


def _refuse_empty(source: Source, head: bytes, promised: str | None) -> None:
    """An empty text or JSON lines file has no rows; an empty anything else is damaged."""
    if head or promised in ("text", "jsonl"):
        return
    raise DataError(
        "the file is empty; fetch it again, or leave it out", path=source.path, place="byte 0"
    )


def _refuse_cut_magic(source: Source, head: bytes, packed: str) -> None:
    if is_cut_magic(head, packed):
        raise DataError(
            f"the {packed} file is cut off after {len(head)} bytes; fetch it again",
            path=source.path,
            place=f"byte {len(head)}",
        )


def _warn_if_misnamed(source: Source, named: str | None, found: str, told: str | None) -> None:
    same = {frozenset(("arrow", "feather"))}
    if named is None or named == found or frozenset((named, found)) in same or told == found:
        return
    _warn(source, named, found)


def _warn(source: Source, named: str, found: str) -> None:
    warnings.warn(
        f"{source.path}: the name says {named} but the content is {found}; it is read as {found}",
        FormatWarning,
        stacklevel=2,
    )
