"""Detect the format of a file by its name and first bytes, and open it.

``detect_format`` looks at the name alone and keeps the answers of the earlier package, so an
unknown ending is "json". ``open_files`` looks at content too: magic bytes for the binary formats,
the first complete JSON value for the text ones. It trusts the content, and warns where a name had
promised something else.

Costs one read of ``_SHORT_HEAD_BYTES`` a file, and one of ``_HEAD_BYTES`` where that holds no whole
line. Does not tell CSV from plain text by content: text is the one that loses nothing.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa

from fast_axolotl.errors import AccessError, DataError, MissingFileError, UsageError
from fast_axolotl.reading.blocks import BrokenFile, InputFile, ReadOptions
from fast_axolotl.reading.storage import Source, Supply, spool, start_of

_SHORT_HEAD_BYTES = 8 * 1024
_HEAD_BYTES = 64 * 1024
"""Enough for any magic and, as a rule, for the first row of a JSON lines file."""

_OPENING_THREADS = 8
"""Footers and first bytes of many files are read so many at a time."""

_OPENED_TOGETHER = 64
"""A thread opens so many: handing out single ones costs more than to open a local file."""

_SMALL_BYTES = 64 * 1024
_MANY_FILES = 16
"""Files of JSON lines up to this size are read as one, where there are many of them in a row."""

_FORMATS = {
    "parquet": ("parquet", "pq"),
    "arrow": ("arrow", "ipc", "arrows"),
    "feather": ("feather", "fea"),
    "csv": ("csv", "tsv"),
    "json": ("json",),
    "jsonl": ("jsonl", "ndjson"),
    "text": ("txt", "text"),
}
"""The endings of each format."""
_FORMAT_OF_ENDING = {ending: name for name, endings in _FORMATS.items() for ending in endings}

_COMPRESSIONS = {
    "gzip": (b"\x1f\x8b", ("gz", "gzip")),
    "zstd": (b"\x28\xb5\x2f\xfd", ("zst", "zstd")),
    "bz2": (b"BZh", ("bz2",)),
    "xz": (b"\xfd7zXZ\x00", ("xz",)),
    "lz4": (b"\x04\x22\x4d\x18", ("lz4",)),
    "snappy": (b"\xff\x06\x00\x00sNaPpY", ("sz", "snappy")),
}
"""The first bytes and the endings of each compression."""
_COMPRESSION_OF_ENDING = {
    ending: name for name, (_, endings) in _COMPRESSIONS.items() for ending in endings
}

_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
"""A frame that holds no data, which zstd (pzstd) and lz4 files may begin with."""

_FORMAT_MAGIC = (
    (b"PAR1", "parquet"),
    (b"PARE", "parquet"),  # encrypted
    (b"ARROW1", "arrow"),
    (b"FEA1", "feather"),
    (b"\xff\xff\xff\xff", "arrow"),
)

_LISTED_COMPRESSIONS = ("zst", "gz", "bz2", "xz", "lz4")


class FormatWarning(UserWarning):
    """The content of a file differs from what its name or its first rows suggest."""


def detect_format(path: str) -> tuple[str, str | None]:
    """The format and compression by file name; opens no file, except to recognise HF folders.

    >>> detect_format("rows.jsonl.zst")
    ('jsonl', 'zstd')
    >>> detect_format("no-ending")
    ('json', None)
    """
    if is_saved_dataset(path):
        return "hf_dataset", None
    name_format, compression = format_of_name(path)
    return name_format or "json", compression


def list_supported_formats() -> list[str]:
    """Every format by name, each compressed form, and ``hf_dataset`` for folders."""
    compressed = [f"{base}.{ending}" for base in _FORMATS for ending in _LISTED_COMPRESSIONS]
    return [*_FORMATS, *compressed, "hf_dataset"]


def format_of_name(path: str) -> tuple[str | None, str | None]:
    """Like ``detect_format``, with ``None`` where the name tells no format."""
    endings = path.rstrip("/").rpartition("/")[2].lower().split(".")[1:]
    compression = _COMPRESSION_OF_ENDING.get(endings[-1]) if endings else None
    if compression:
        endings.pop()
    return (_FORMAT_OF_ENDING.get(endings[-1]) if endings else None), compression


def is_saved_dataset(path: str) -> bool:
    """Whether a local folder was written by Hugging Face ``save_to_disk``."""
    try:
        return any((Path(path) / mark).is_file() for mark in ("state.json", "dataset_dict.json"))
    except OSError:
        return False


def open_files(sources: Sequence[Source], format: str, options: ReadOptions) -> list[InputFile]:
    """Every file identified and opened: a read of its first bytes, and of its footer if any."""
    base = format.split(".")[0].lower()
    declared = None if base in ("", "auto", "hf_dataset") else _FORMAT_OF_ENDING.get(base, base)
    if declared not in (None, *_FORMATS):
        names = ", ".join(_FORMATS)
        raise UsageError(f"unknown format {format!r}; pass auto or one of {names}")

    def open_or_reject(source: Source | tuple[Source, ...]) -> InputFile:
        if isinstance(source, tuple):
            from fast_axolotl.reading.json_lines import SmallFiles

            size = sum(file.num_bytes for file in source)
            whole = Source(path=source[0].path, num_bytes=size, keys=source[0].keys)
            return SmallFiles(source=whole, format="jsonl", options=options, files=source)
        try:
            return _open(source, declared, options)
        except (MissingFileError, AccessError):
            raise
        except DataError as error:
            if options.on_error == "raise":
                raise
            kind = declared or "unknown"
            return BrokenFile(source=source, format=kind, options=options, error=error)

    found = [*_with_small_together(sources)] if declared in (None, "jsonl") else sources
    if len(found) == 1:
        return [open_or_reject(found[0])]
    from concurrent.futures import ThreadPoolExecutor

    parts = [found[at : at + _OPENED_TOGETHER] for at in range(0, len(found), _OPENED_TOGETHER)]
    with ThreadPoolExecutor(_OPENING_THREADS) as pool:
        opened = pool.map(lambda part: [open_or_reject(source) for source in part], parts)
        files: list[Any] = [file for part in opened for file in part]
    # What the rows of one Parquet file take says how those of the next ones are best read.
    learned: dict[pa.Schema, Any] = {}
    for index, file in enumerate(files):
        if hasattr(file, "row_bytes"):
            row_bytes = learned.setdefault(file.schema.remove_metadata(), file.row_bytes)
            files[index] = replace(file, row_bytes=row_bytes)
    return files


def _with_small_together(sources: Sequence[Source]) -> Iterator[Source | tuple[Source, ...]]:
    """The same files; where there are many small ones of JSON lines in a row, these as one."""

    def kind(source: Source) -> tuple[bool, Any]:
        is_lines = source.path.lower().endswith((".jsonl", ".ndjson"))
        return is_lines and source.is_local and source.num_bytes <= _SMALL_BYTES, source.keys

    for (is_small, _), group in groupby(sources, kind):
        files = tuple(group)
        some = files[:: len(files) // _MANY_FILES or 1]
        if is_small and len(files) >= _MANY_FILES and all(map(_holds_objects, some)):
            yield files
        else:
            yield from files


def _holds_objects(source: Source) -> bool:
    """Whether a file begins as JSON lines do; what is wrong with it is told when it is opened."""
    with suppress(DataError):
        text = source.read_at(0, _SHORT_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
        return text[:1] in (b"", b"{")
    return False


def _open(source: Source, declared: str | None, options: ReadOptions) -> InputFile:
    named, named_compression = format_of_name(source.identity)
    promised = declared or named
    head = source.read_at(0, _SHORT_HEAD_BYTES // (4 if named_compression else 1))
    compression = next(
        (name for name, (magic, _) in _COMPRESSIONS.items() if head.startswith(magic)), None
    )
    if _SKIPPABLE.match(head):
        compression = "lz4" if named_compression == "lz4" else "zstd"
    if compression is not None:
        head = start_of(head, compression) or Supply(source, compression, _HEAD_BYTES).held
    elif named_compression and _COMPRESSIONS[named_compression][0].startswith(head):
        raise DataError(
            f"the {named_compression} file is truncated after {len(head)} bytes; replace it with "
            "an intact copy",
            path=source.path,
            place=f"byte {len(head)}",
        )
    elif b"\n" not in head and not any(head.startswith(magic) for magic, _ in _FORMAT_MAGIC):
        head = source.read_at(0, _HEAD_BYTES)
    if not head and promised not in ("text", "jsonl"):
        # An empty text or JSON lines file has no rows; an empty file of another format is corrupt.
        raise DataError(
            "the file is empty; replace it with an intact copy, or remove it",
            path=source.path,
            place="byte 0",
        )
    found = _sniff_format(head, promised)
    is_wide = head.startswith((b"\xff\xfe", b"\xfe\xff"))
    if is_wide or (b"\0" in head[:2] and found in ("csv", "json", "jsonl")):
        raise DataError("the file is UTF-16; convert it to UTF-8", path=source.path, place="line 1")
    for name, content in (
        (None if declared == found or {named, found} == {"arrow", "feather"} else named, found),
        (named_compression, compression or "uncompressed"),
    ):
        if name not in (None, content):
            warnings.warn(
                f"{source.path}: the file name says {name}, but the content is {content}; it is "
                f"read as {content}",
                FormatWarning,
                stacklevel=2,
            )
    facts = dict[str, Any](source=source, format=found, compression=compression, options=options)
    # Each format imports what it needs when a file of it is met: for one small Parquet file, the
    # other formats' modules would take as long as all of the reading.
    if found in ("parquet", "arrow", "feather"):
        from fast_axolotl.reading.columnar import open_arrow, open_parquet

        opener = open_parquet if found == "parquet" else open_arrow
        return opener(spool(source, compression) if compression else source, **facts)
    if found == "csv":
        from fast_axolotl.reading.csv_files import CsvFile

        return CsvFile.open(**facts)
    if found == "json":
        from fast_axolotl.reading.json_documents import JsonDocument

        return JsonDocument(**facts)
    from fast_axolotl.reading.json_lines import JsonLinesFile
    from fast_axolotl.reading.lines import TextFile, least_unit_bytes

    opened = TextFile if found == "text" else JsonLinesFile
    return opened(**facts, least_unit_bytes=least_unit_bytes(head))


def _sniff_format(head: bytes, promised: str | None) -> str:
    """The format of decompressed content, given what the name or the caller promised.

    Binary magic decides alone. Any other format that was promised stands, but JSON lines called
    ``.json`` and the reverse are told apart here: they are JSON lines where the first line is a
    whole object, a document where it begins an array. What is called JSON lines is a document only
    where its first line is an array that goes on, or that holds all of the rows.
    """
    binary = next((name for magic, name in _FORMAT_MAGIC if head.startswith(magic)), None)
    if binary:
        return "feather" if binary == "arrow" and promised == "feather" else binary
    if promised not in (None, "json", "jsonl"):
        return promised
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text.startswith((b"[", b"{")):
        return promised or "text"
    if promised == "jsonl" and text.startswith(b"{"):
        return promised
    line, _, rest = text.partition(b"\n")
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        first = None
    if isinstance(first, dict) and (promised != "json" or rest.strip()):
        return "jsonl"
    if promised == "jsonl" and isinstance(first, list):
        # Another line that is no row, unless it is all there is and holds the rows.
        is_all = not rest.strip() and all(isinstance(row, dict) for row in first)
        return "json" if is_all else promised
    return "json" if text.startswith(b"[") else promised or "json"
