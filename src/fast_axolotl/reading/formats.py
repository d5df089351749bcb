"""What a file is: by its name first, then by its first bytes.

``detect_format`` looks at the name alone and keeps the answers of the earlier package, so an
unknown ending is "json". ``sniff`` looks at content: magic bytes for the binary formats, the first
complete JSON value for the text ones. The reader asks both and trusts the content; it warns where
a name had promised something else.

Costs one read of at most ``HEAD_BYTES`` a file. Does not tell CSV from plain text by content:
without a name or an explicit format both look the same, and text is the one that loses nothing.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath

__all__ = [
    "FORMATS",
    "HEAD_BYTES",
    "SUFFIXES",
    "detect_format",
    "format_of_name",
    "is_cut_magic",
    "is_saved_dataset",
    "list_supported_formats",
    "sniff_compression",
    "sniff_format",
]

HEAD_BYTES = 64 * 1024
"""Enough for any magic and, as a rule, for the first row of a JSON lines file."""

FORMATS = ("parquet", "arrow", "feather", "csv", "json", "jsonl", "text")

SUFFIXES = {
    "parquet": "parquet",
    "pq": "parquet",
    "arrow": "arrow",
    "ipc": "arrow",
    "arrows": "arrow",
    "feather": "feather",
    "fea": "feather",
    "csv": "csv",
    "tsv": "csv",
    "json": "json",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "txt": "text",
    "text": "text",
}

_COMPRESSION_SUFFIXES = {
    "gz": "gzip",
    "gzip": "gzip",
    "zst": "zstd",
    "zstd": "zstd",
    "bz2": "bz2",
    "xz": "xz",
    "lz4": "lz4",
    "sz": "snappy",
    "snappy": "snappy",
}

_COMPRESSION_MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bz2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"\xff\x06\x00\x00sNaPpY", "snappy"),
)

_FORMAT_MAGIC = (
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    (b"FEA1", "feather"),
    (b"\xff\xff\xff\xff", "arrow"),
)

_LISTED_COMPRESSIONS = ("zst", "gz", "bz2", "xz", "lz4")


def detect_format(path: str) -> tuple[str, str | None]:
    """The format and the compression that a name tells; nothing is opened but a folder's marks.

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
    compressed = [f"{base}.{ending}" for base in FORMATS for ending in _LISTED_COMPRESSIONS]
    return [*FORMATS, *compressed, "hf_dataset"]


def format_of_name(path: str) -> tuple[str | None, str | None]:
    """Like ``detect_format``, with ``None`` where the name tells no format."""
    endings = [part.lower() for part in PurePosixPath(path).name.split(".")[1:]]
    compression = _COMPRESSION_SUFFIXES.get(endings[-1]) if endings else None
    if compression:
        endings.pop()
    return (SUFFIXES.get(endings[-1]) if endings else None), compression


def is_saved_dataset(path: str) -> bool:
    """Whether a local folder was written by Hugging Face ``save_to_disk``."""
    from pathlib import Path

    try:
        return any((Path(path) / mark).is_file() for mark in ("state.json", "dataset_dict.json"))
    except OSError:
        return False


def sniff_compression(head: bytes) -> str | None:
    """The compression that the first bytes prove."""
    return next((name for magic, name in _COMPRESSION_MAGIC if head.startswith(magic)), None)


def is_cut_magic(head: bytes, compression: str) -> bool:
    """Whether these bytes are all that is left of a compressed file: less than its magic."""
    return any(magic.startswith(head) for magic, name in _COMPRESSION_MAGIC if name == compression)


def sniff_format(head: bytes, promised: str | None) -> str:
    """The format of decompressed content, given what the name or the caller promised.

    Binary magic decides alone. A text format that was promised stands unless the content is
    provably another: JSON lines called ``.json`` and the reverse are told apart here.
    """
    binary = next((name for magic, name in _FORMAT_MAGIC if head.startswith(magic)), None)
    if binary:
        return "feather" if binary == "arrow" and promised == "feather" else binary
    if promised in ("parquet", "arrow", "feather"):
        if any(magic.startswith(head) for magic, _ in _FORMAT_MAGIC):
            return promised
        return _sniff_text(head) if _looks_like_text(head) else promised
    if promised in ("json", "jsonl", None):
        return _sniff_text(head, fallback=promised)
    return promised


def _sniff_text(head: bytes, fallback: str | None = None) -> str:
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"["):
        return "jsonl" if fallback == "jsonl" and _is_value(_first_line(text)) else "json"
    if text.startswith(b"{"):
        return _lines_or_document(text, len(head), fallback)
    return fallback or "text"


def _lines_or_document(text: bytes, head_length: int, fallback: str | None) -> str:
    """JSON lines when the first line is a whole value, a document when it visibly is not."""
    line = _first_line(text)
    if line is None:
        if head_length < HEAD_BYTES:
            return fallback or "json"
        return fallback or "jsonl"
    if _is_value(line):
        return "jsonl" if fallback != "json" or text[len(line) :].strip() else "json"
    return "json" if _opens_a_document(line) else (fallback or "jsonl")


def _opens_a_document(line: bytes) -> bool:
    """Whether a first line is the start of a pretty-printed object: cut, not malformed."""
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return error.pos >= len(line.decode("utf-8", "replace").rstrip())
    except ValueError:
        return False
    return False


def _first_line(text: bytes) -> bytes | None:
    end = text.find(b"\n")
    return None if end < 0 else text[:end]


def _is_value(line: bytes | None) -> bool:
    if line is None:
        return False
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _looks_like_text(head: bytes) -> bool:
    if not head or b"\x00" in head:
        return False
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start >= len(head) - 4
    return True
