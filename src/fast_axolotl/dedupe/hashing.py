"""Hash rows with SHA-256 and keep the first of each.

A row is a ``str``, hashed as UTF-8, or ``bytes``; digests equal hashlib's. A list leaves as hex
digits, an Arrow column as one of 32 bytes each with no Python object made on the way. Rows up to
``sha256.LONGEST_BYTES`` go through a kernel that hashes many at once; longer ones go to hashlib,
which frees the interpreter for others. Fewer than ``_FEW_ROWS`` are not worth loading a compiler
for. Rows are not compared with one another: equal digests count as equal rows.
"""

from __future__ import annotations

import re
from binascii import unhexlify
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fast_axolotl.dedupe.row_bytes import BINARY, TEXT, is_one_of, text_bytes
from fast_axolotl.dedupe.seen import SeenRows, require_threads
from fast_axolotl.errors import UsageError
from fast_axolotl.kernels.threads import slices, spread
from fast_axolotl.system import usable_cores

ByteArray: TypeAlias = npt.NDArray[np.uint8]

_DIGEST_BYTES = 32
_FEW_ROWS = 200
_BATCH_ROWS = 8192
"""Rows taken at a time from a list or an iterator; short ones then fit the processor's caches."""
_TASK_BYTES = 1 << 20
"""What one thread takes at a time: half a millisecond, ten times the price of a thread."""
_ROW_BYTES = 64
"""What a row costs beside its length, in bytes hashed: half a block of padding, and its lane."""
_DIGEST = pa.binary(_DIGEST_BYTES)
_HEX_DIGEST = re.compile("[0-9a-f]{64}")


@overload
def parallel_hash_rows(rows: Iterable[str | bytes], num_threads: int = 0) -> list[str]: ...
@overload
def parallel_hash_rows(rows: pa.Array | pa.ChunkedArray, num_threads: int = 0) -> Any: ...
def parallel_hash_rows(
    rows: Iterable[str | bytes] | pa.Array | pa.ChunkedArray, num_threads: int = 0
) -> list[str] | pa.Array | pa.ChunkedArray:
    """The SHA-256 digest of every row, in order.

    Uses up to ``num_threads`` threads, 0 for all available CPU cores.

    A list or iterable of ``str`` and ``bytes`` gives a list of hex digests. An Arrow column of text
    or bytes, dictionary-encoded or not, gives an Arrow column of ``fixed_size_binary(32)`` in the
    same chunks, null where the row is null.
    """
    require_threads(num_threads)
    hashed = (_hash_column(column, num_threads) for column in _columns(rows))
    if isinstance(rows, pa.Array):
        return next(hashed)
    if isinstance(rows, pa.ChunkedArray):
        return pa.chunked_array(list(hashed), _DIGEST)
    texts: list[str] = []
    for digests in hashed:
        texts += _hex(_bytes_of(digests))
    return texts


def deduplicate_indices(
    rows: Iterable[str | bytes] | pa.Array | pa.ChunkedArray,
    existing_hashes: Iterable[str] | None = None,
    num_threads: int = 0,
) -> tuple[list[int], list[str]]:
    """The indices of the first row of each value, and their hashes in hex.

    ``existing_hashes`` are digests as ``parallel_hash_rows`` returns them for a list; rows with one
    of these are dropped. ``rows`` may be what that function takes, but without nulls.
    """
    require_threads(num_threads)
    known = () if existing_hashes is None else existing_hashes
    _require_many("existing_hashes", known)
    # Other texts than those of ``parallel_hash_rows`` equal no digest.
    texts = [text for text in set(known) if isinstance(text, str) and _HEX_DIGEST.fullmatch(text)]
    known_digests = np.frombuffer(unhexlify("".join(texts)), np.uint8).reshape(-1, _DIGEST_BYTES)
    hashed = [_hash_column(column, num_threads) for column in _columns(rows)]
    if (joined := pa.chunked_array(hashed, _DIGEST)).null_count:
        index = pc.index(joined.is_null(), True).as_py()
        raise TypeError(f"row {index} is null; drop or fill the nulls before hashing")
    digests = np.concatenate([known_digests, *map(_bytes_of, hashed)])
    indices = np.flatnonzero(_is_first(digests)[len(known_digests) :])
    return indices.tolist(), _hex(digests[len(known_digests) :][indices])


def _require_many(name: str, values: object) -> None:
    if isinstance(values, str | bytes):
        raise TypeError(f"{name} is a single {type(values).__name__}; pass a list")


def _hex(digests: ByteArray) -> list[str]:
    """One string per digest, cut from texts of lines, since that takes no loop in Python."""
    texts: list[str] = []
    for start in range(0, len(digests), _BATCH_ROWS):
        some = digests[start : start + _BATCH_ROWS].tobytes()
        texts += some.hex("\n", _DIGEST_BYTES).split("\n")
    return texts


def _is_first(digests: ByteArray) -> npt.NDArray[np.bool_]:
    """Whether each digest is the first of its kind; half of it, 128 bits, tells that."""
    halves = np.ascontiguousarray(digests[:, :16])
    if len(digests) < _FEW_ROWS:
        firsts: dict[bytes, int] = {}
        at = [firsts.setdefault(half.tobytes(), index) for index, half in enumerate(halves)]
        return np.equal(at, range(len(at)))
    numbers = np.arange(len(digests))
    firsts_of: Any = SeenRows().enter(halves.view(np.uint64).reshape(-1), numbers)
    is_first: npt.NDArray[np.bool_] = firsts_of == numbers
    return is_first


def _columns(rows: Iterable[str | bytes] | pa.Array | pa.ChunkedArray) -> Iterator[pa.Array]:
    """The rows in Arrow columns of text or bytes; those of a list a batch at a time."""
    if isinstance(rows, pa.Array | pa.ChunkedArray):
        _require_text(rows.type)
        yield from rows.chunks if isinstance(rows, pa.ChunkedArray) else [rows]
        return
    _require_many("rows", rows)
    rows = rows if isinstance(rows, list) else list(rows)
    for first in range(0, len(rows), _BATCH_ROWS):
        batch = rows[first : first + _BATCH_ROWS]
        try:
            column = pa.array(batch, pa.large_binary())
            is_read = not column.null_count
        except (pa.ArrowException, UnicodeEncodeError):
            is_read = False
        if not is_read:  # names the row that is no text, or encodes what pyarrow cannot
            encoded = [_encode(index, row) for index, row in enumerate(batch, first)]
            column = pa.array(encoded, pa.large_binary())
        yield column


def _bytes_of(digests: pa.Array) -> ByteArray:
    """A column of digests as an array, a row each."""
    flat = np.frombuffer(digests.buffers()[1] or b"", np.uint8).reshape(-1, _DIGEST_BYTES)
    return flat[digests.offset : digests.offset + len(digests)]


def _encode(index: int, row: object) -> bytes:
    if isinstance(row, bytes):
        return row
    if not isinstance(row, str):
        raise TypeError(f"row {index} has the type {type(row).__name__}; pass str or bytes")
    try:
        return row.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"row {index} has the lone surrogate {row[error.start]!r} at character {error.start}, "
            "which UTF-8 cannot represent; pass bytes, or encode the row with "
            "errors='surrogatepass'"
        ) from error


def _hash_column(column: pa.Array, num_threads: int) -> pa.Array:
    """The digests of a column: short rows in lanes, long ones one by one."""
    kind = column.type
    if pa.types.is_null(kind):
        return pa.nulls(len(column), _DIGEST)
    if pa.types.is_dictionary(kind):
        return _hash_column(column.dictionary, num_threads).take(column.indices)
    plain = column.cast(pa.large_binary()) if pa.types.is_fixed_size_binary(kind) else column
    data, offsets = text_bytes(plain)
    digests = np.empty((len(column), _DIGEST_BYTES), np.uint8)
    lengths = np.diff(offsets)
    longest = -1
    if len(column) >= _FEW_ROWS:
        from fast_axolotl.kernels.sha256 import LONGEST_BYTES, hash_rows

        longest = LONGEST_BYTES
    long_rows = np.flatnonzero(lengths > longest)

    def hash_long(start: int, stop: int) -> None:
        for row in long_rows[start:stop].tolist():
            digest = sha256(data[offsets[row] : offsets[row + 1]].data).digest()
            digests[row] = np.frombuffer(digest, np.uint8)

    def hash_short(start: int, stop: int) -> None:
        hash_rows(data, offsets, start, stop, longest, digests.reshape(-1).view(np.uint32))

    threads = num_threads or usable_cores()
    count = 1 + int(lengths[long_rows].sum()) // _TASK_BYTES
    spread(hash_long, slices(len(long_rows), count), threads)
    if len(long_rows) < len(lengths):
        count = 1 + (int(offsets[-1] - offsets[0]) + _ROW_BYTES * len(lengths)) // _TASK_BYTES
        spread(hash_short, slices(len(lengths), count), threads)
    buffers = [None, pa.py_buffer(digests)]
    hashed = pa.FixedSizeBinaryArray.from_buffers(_DIGEST, len(column), buffers)
    return pc.if_else(column.is_valid(), hashed, None) if column.null_count else hashed


def _require_text(kind: pa.DataType) -> None:
    if pa.types.is_dictionary(kind):
        _require_text(kind.value_type)
    elif not is_one_of(kind, (*TEXT, *BINARY, pa.types.is_fixed_size_binary, pa.types.is_null)):
        raise TypeError(
            f"rows have the Arrow type {kind}, which cannot be hashed as text; cast them, for "
            "example with rows.cast(pyarrow.string())"
        )
