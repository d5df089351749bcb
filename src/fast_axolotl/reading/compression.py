"""Compressed files as a stream of plain chunks, or spooled to disk where seeking is needed.

gzip, zstd, bz2 and lz4 go through pyarrow, xz through the standard library; concatenated members
are one stream. pyarrow has no streaming snappy, so that one is refused with the cure. Parquet and
Arrow need random access: a compressed one is decompressed once into an unnamed temporary file, so
that memory stays bounded whatever its size.
"""

from __future__ import annotations

import io
import lzma
import tempfile
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from fast_axolotl.errors import DataError
from fast_axolotl.reading.storage import Source, SourceFile, read_chunks

__all__ = ["head_of", "open_chunks", "spool"]

_SPOOL_CHUNK_BYTES = 4 * 1024 * 1024


def open_chunks(source: Source, compression: str | None, size: int) -> Iterator[bytes]:
    """The decompressed content in chunks of ``size`` bytes, the last one shorter."""
    if compression is None:
        yield from read_chunks(source, size)
        return
    position = 0
    try:
        with _open_stream(source, compression) as stream:
            while chunk := stream.read(size):
                position += len(chunk)
                yield chunk
    except DataError:
        raise
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException) as error:
        raise DataError(
            f"the {compression} stream is damaged or cut off after {position:,} decompressed "
            f"bytes ({error}); fetch or compress the file again",
            path=source.path,
        ) from error


def head_of(source: Source, compression: str | None, size: int) -> bytes:
    """The first ``size`` bytes of the decompressed content."""
    return next(open_chunks(source, compression, size), b"")


def spool(source: Source, compression: str) -> tuple[Source, Any]:
    """A decompressed copy on disk, and the handle that keeps it alive."""
    copy = tempfile.NamedTemporaryFile(prefix="fast-axolotl-")  # noqa: SIM115 - outlives the call
    for chunk in open_chunks(source, compression, _SPOOL_CHUNK_BYTES):
        copy.write(chunk)
    copy.flush()
    return Source(path=copy.name, num_bytes=copy.tell()), copy


def _open_stream(source: Source, compression: str) -> Any:
    if compression == "snappy":
        raise DataError(
            "pyarrow cannot decompress snappy as a stream; recompress the file with zstd",
            path=source.path,
        )
    if compression == "xz":
        return lzma.LZMAFile(io.BufferedReader(SourceFile(source)))
    return pa.CompressedInputStream(source.open_arrow(), compression)
