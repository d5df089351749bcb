"""Hash rows with SHA-256 and keep the first of each.

A row is a ``str``, hashed as UTF-8, or ``bytes``; digests equal hashlib's. Rows come as a list, and
leave as hex digits, or as an Arrow column, and leave as one of 32 bytes each with no Python object
made on the way. Rows up to ``sha256.LONGEST_BYTES`` are laid one after another and go through a
kernel that hashes many at once; longer ones go to hashlib, which frees the interpreter for others.
Both run on several threads, but for short rows of a list. Fewer than ``_FEW_ROWS`` are not worth
loading a compiler for.

Cost: the digests, 32 bytes a row; a copy of a list's rows, a few MB of them at a time; and one
64-character string for each row of a list, for each row kept, and for each hash already known. It
does not compare the rows themselves: equal digests count as equal rows.
"""

from __future__ import annotations

import re
from binascii import unhexlify
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from itertools import islice, pairwise
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fast_axolotl.dedupe.row_bytes import BINARY, TEXT, is_one_of, text_bytes
from fast_axolotl.errors import UsageError
from fast_axolotl.kernels.threads import slices, spread
from fast_axolotl.system import usable_cores

ByteArray: TypeAlias = npt.NDArray[np.uint8]
IntArray: TypeAlias = npt.NDArray[np.int64]
_Result = TypeVar("_Result")

_DIGEST_BYTES = 32
_FEW_ROWS = 200
_HEX_ROWS = 8192
_BATCH_ROWS, _LONG_BATCH_ROWS = 8192, 65536
"""Rows taken at a time from a list or an iterator; short ones then fit the processor's caches."""
_PIECE_BYTES, _PIECE_ROWS = 512 << 10, 128
"""How much of a batch is joined at a time: enough for every lane to hash several rows, and little
enough for its memory to be used again; fresh pages cost as much as the hashing."""
_THREADED_BYTES = 512
"""Rows of a list that are shorter on average stay on one thread: most of their time goes into
joining them and making strings, which the interpreter's lock does not let two threads do at once.
Two threads were slower there, by a tenth."""
_TASK_BYTES = 1 << 20
"""What one thread takes at a time: half a millisecond, ten times the price of a thread."""
_ROW_BYTES = 64
"""What a row costs beside its length, in bytes hashed: half a block of padding, and its lane."""
_TASKS_PER_THREAD = 8
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

    Uses up to ``num_threads`` threads, 0 for all available CPU cores; short rows of a list do not
    gain from threads and use one.

    A list or iterable of ``str`` and ``bytes`` gives a list of hex digests. An Arrow column of text
    or bytes, dictionary-encoded or not, gives an Arrow column of ``fixed_size_binary(32)`` in the
    same chunks, null where the row is null.
    """
    _require_threads(num_threads)
    _require_many("rows", rows)
    if isinstance(rows, pa.ChunkedArray):
        return pa.chunked_array(_hash_chunks(rows.chunks, rows.type, num_threads), _DIGEST)
    if isinstance(rows, pa.Array):
        return _hash_chunks([rows], rows.type, num_threads)[0]
    texts: list[str] = []
    for some in _hash_list(rows, num_threads, _hex):
        texts += some
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
    _require_threads(num_threads)
    known = () if existing_hashes is None else existing_hashes
    _require_many("existing_hashes", known)
    _require_many("rows", rows)
    known_digests = _known_digests(set(known))
    if isinstance(rows, pa.Array | pa.ChunkedArray):
        chunks = rows.chunks if isinstance(rows, pa.ChunkedArray) else [rows]
        hashed = pa.chunked_array(_hash_chunks(chunks, rows.type, num_threads), _DIGEST)
        if hashed.null_count:
            index = pc.index(hashed.is_null(), True).as_py()
            raise TypeError(f"row {index} is null; drop or fill the nulls before hashing")
        parts = []
        for chunk in hashed.chunks:
            flat = np.frombuffer(chunk.buffers()[1] or b"", np.uint8).reshape(-1, _DIGEST_BYTES)
            parts.append(flat[chunk.offset : chunk.offset + len(chunk)])
    else:
        parts = _hash_list(rows, num_threads, np.asarray)
    digests = np.concatenate([known_digests, *parts])
    indices = np.flatnonzero(_is_first(digests)[len(known_digests) :])
    return indices.tolist(), _hex(digests[len(known_digests) :][indices])


def _require_threads(num_threads: int) -> None:
    if num_threads < 0:
        raise UsageError(f"num_threads must be 0 (all processors) or more, not {num_threads}")


def _require_many(name: str, values: object) -> None:
    if isinstance(values, str | bytes):
        raise TypeError(f"{name} is a single {type(values).__name__}; pass a list")


def _hex(digests: ByteArray) -> list[str]:
    """One string per digest, cut from a text of lines, since that takes no loop in Python."""
    if len(digests) < _FEW_ROWS:
        return digests.tobytes().hex("\n", _DIGEST_BYTES).split()
    from fast_axolotl.kernels.sha256 import write_hex

    texts: list[str] = []
    lines = np.empty((min(len(digests), _HEX_ROWS), 2 * _DIGEST_BYTES + 1), np.uint8)
    for start in range(0, len(digests), _HEX_ROWS):
        some = digests[start : start + _HEX_ROWS]
        write_hex(some.reshape(-1), lines.reshape(-1))
        found = str(lines[: len(some)].reshape(-1)[:-1].data, "ascii").split("\n")
        texts = texts + found if texts else found
    return texts


def _known_digests(hashes: set[str]) -> ByteArray:
    """The digests that are written as ``parallel_hash_rows`` writes them; no other equals one."""
    texts = [text for text in hashes if isinstance(text, str) and len(text) == 2 * _DIGEST_BYTES]
    joined = "".join(texts)
    try:
        raw = unhexlify(joined if joined == joined.lower() else "?")
    except ValueError:
        raw = unhexlify("".join(text for text in texts if _HEX_DIGEST.fullmatch(text)))
    return np.frombuffer(raw, np.uint8).reshape(-1, _DIGEST_BYTES)


def _is_first(digests: ByteArray) -> npt.NDArray[np.bool_]:
    """Whether each digest is the first of its kind."""
    if len(digests) < _FEW_ROWS:
        firsts: dict[bytes, int] = {}
        at = [firsts.setdefault(digest.tobytes(), index) for index, digest in enumerate(digests)]
        return np.equal(at, range(len(at)))
    from fast_axolotl.kernels.sha256 import mark_first

    is_first = np.zeros(len(digests), np.bool_)
    table = np.full(1 << (2 * len(digests)).bit_length(), -1, np.int64)
    mark_first(np.ascontiguousarray(digests).view(np.uint64).reshape(-1), table, is_first)
    return is_first


# Lists and other iterables of rows


def _hash_list(
    rows: Iterable[str | bytes], num_threads: int, finish: Callable[[ByteArray], _Result]
) -> list[_Result]:
    """What ``finish`` makes of the digests of each run of rows, in order."""
    results: list[_Result] = []
    first = 0
    for batch in _batches(rows):
        try:
            results += _hash_batch(batch, num_threads, finish)
        except (TypeError, ValueError):
            for index, row in enumerate(batch, first):
                _encode(index, row)
            raise
        first += len(batch)
    return results


def _batches(rows: Iterable[str | bytes]) -> Iterator[Sequence[str | bytes]]:
    if not isinstance(rows, list | tuple):
        iterator = iter(rows)
        while batch := list(islice(iterator, _BATCH_ROWS)):
            yield batch
        return
    size = _BATCH_ROWS
    if len(rows) > size:
        # A sample says whether threads will share each batch; large ones then start fewer.
        sample = [row for row in rows[:: len(rows) // 256 + 1] if isinstance(row, str | bytes)]
        if sum(map(len, sample)) >= _THREADED_BYTES * max(1, len(sample)):
            size = _LONG_BATCH_ROWS
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


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


def _hash_batch(
    rows: Sequence[str | bytes], num_threads: int, finish: Callable[[ByteArray], _Result]
) -> list[_Result]:
    if len(rows) < _FEW_ROWS:
        raw = [row.encode() if type(row) is str else _encode(i, row) for i, row in enumerate(rows)]
        joined = b"".join([sha256(row).digest() for row in raw])
        return [finish(np.frombuffer(joined, np.uint8).reshape(-1, _DIGEST_BYTES))]
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    if lengths.sum() < _THREADED_BYTES * len(rows):
        return [finish(_hash_piece(rows, lengths))]
    from fast_axolotl.kernels.sha256 import LONGEST_BYTES

    # Pieces that are about equally much work.
    size = max(_PIECE_BYTES, int(_PIECE_ROWS * np.minimum(lengths, LONGEST_BYTES).mean()))
    work = np.cumsum(lengths + _ROW_BYTES)
    inner = np.searchsorted(work, np.arange(size, work[-1], size)) + 1
    ranges = list(pairwise(sorted({0, *inner.tolist(), len(lengths)})))
    results: dict[int, _Result] = {}

    def hash_piece(start: int, stop: int) -> None:
        results[start] = finish(_hash_piece(rows[start:stop], lengths[start:stop]))

    spread(hash_piece, ranges, _threads(num_threads, len(ranges)))
    return [results[start] for start, _ in ranges]


def _hash_piece(rows: Sequence[str | bytes], lengths: IntArray) -> ByteArray:
    """The digests of rows of a list; ``lengths`` count their characters or bytes."""
    from fast_axolotl.kernels.sha256 import LONGEST_BYTES, hash_rows

    short, long_rows = rows, []
    if lengths.max() > LONGEST_BYTES:
        long_rows = np.flatnonzero(lengths > LONGEST_BYTES).tolist()
        short, lengths = list(rows), np.where(lengths > LONGEST_BYTES, 0, lengths)
        for index in long_rows:
            short[index] = "" if isinstance(rows[index], str) else b""
    digests = np.empty((len(rows), _DIGEST_BYTES), np.uint8)
    if len(long_rows) < len(rows):
        joined, lengths = _join(short, lengths)
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if offsets[-1] != len(joined):
            raise TypeError(
                "a row is of a subclass that overrides __len__; pass plain str or bytes"
            )
        data, words = np.frombuffer(joined, np.uint8), digests.reshape(-1).view(np.uint32)
        hash_rows(data, offsets, 0, len(rows), data.size, words)
    for index in long_rows:
        digest = sha256(_encode(index, rows[index])).digest()
        digests[index] = np.frombuffer(digest, np.uint8)
    return digests


def _join(rows: Sequence[str | bytes], lengths: IntArray) -> tuple[bytes, IntArray]:
    """The rows as UTF-8, one after another, and their lengths in bytes."""
    encoded: Sequence[Any]
    try:
        text = "".join(rows)  # type: ignore[arg-type]
    except TypeError:
        if set(map(type, rows)) == {bytes}:
            return b"".join(rows), lengths  # type: ignore[arg-type]
        encoded = [_encode(index, row) for index, row in enumerate(rows)]
    else:
        if text.isascii() and len(text) == lengths.sum():
            return text.encode(), lengths
        encoded = list(map(str.encode, rows))  # type: ignore[arg-type]
    return b"".join(encoded), np.fromiter(map(len, encoded), np.int64, len(encoded))


# Arrow columns


def _hash_chunks(chunks: list[pa.Array], kind: pa.DataType, num_threads: int) -> list[pa.Array]:
    """The digests of columns of one type, a column for each."""
    if pa.types.is_null(kind):
        return [pa.nulls(len(chunk), _DIGEST) for chunk in chunks]
    if pa.types.is_dictionary(kind):
        # The values of each dictionary once; chunks in a row often share one.
        dictionaries: list[pa.Array] = []
        places = []
        for chunk in chunks:
            if not (dictionaries and dictionaries[-1].equals(chunk.dictionary)):
                dictionaries.append(chunk.dictionary)
            places.append(len(dictionaries) - 1)
        hashed = _hash_chunks(dictionaries, kind.value_type, num_threads)
        return [hashed[at].take(chunk.indices) for at, chunk in zip(places, chunks, strict=True)]
    if not is_one_of(kind, (*TEXT, *BINARY, pa.types.is_fixed_size_binary)):
        raise TypeError(
            f"rows have the Arrow type {kind}, which cannot be hashed as text; cast them, for "
            "example with rows.cast(pyarrow.string())"
        )
    are_few = sum(map(len, chunks)) < _FEW_ROWS
    tasks: list[Callable[[], Any]] = []
    columns = []
    for chunk in chunks:
        digests = np.empty((len(chunk), _DIGEST_BYTES), np.uint8)
        plain = chunk.cast(pa.large_binary()) if pa.types.is_fixed_size_binary(kind) else chunk
        tasks += _column_tasks(*text_bytes(plain), digests, are_few=are_few)
        buffers = [None, pa.py_buffer(digests)]
        columns.append(pa.FixedSizeBinaryArray.from_buffers(_DIGEST, len(chunk), buffers))

    def run_some(start: int, stop: int) -> None:
        for task in tasks[start:stop]:
            task()

    threads = _threads(num_threads, len(tasks))
    spread(run_some, slices(len(tasks), threads * _TASKS_PER_THREAD), threads)
    return [
        pc.if_else(chunk.is_valid(), column, None) if chunk.null_count else column
        for chunk, column in zip(chunks, columns, strict=True)
    ]


def _column_tasks(
    data: ByteArray, offsets: IntArray, digests: ByteArray, *, are_few: bool
) -> list[Callable[[], Any]]:
    """Calls that together hash every row: short ones in lanes, long ones one by one."""
    lengths = np.diff(offsets)
    longest = -1
    if not are_few:
        from fast_axolotl.kernels.sha256 import LONGEST_BYTES, hash_rows

        longest = LONGEST_BYTES
    long_rows = np.flatnonzero(lengths > longest)

    def hash_long(start: int, stop: int) -> None:
        for row in long_rows[start:stop].tolist():
            digest = sha256(data[offsets[row] : offsets[row + 1]].data).digest()
            digests[row] = np.frombuffer(digest, np.uint8)

    count = 1 + int(lengths[long_rows].sum()) // _TASK_BYTES
    tasks: list[Callable[[], Any]] = [
        partial(hash_long, *edges) for edges in slices(len(long_rows), count)
    ]
    if len(long_rows) < len(lengths):
        words = digests.reshape(-1).view(np.uint32)
        count = 1 + (int(offsets[-1] - offsets[0]) + _ROW_BYTES * len(lengths)) // _TASK_BYTES
        tasks += [
            partial(hash_rows, data, offsets, start, stop, longest, words)
            for start, stop in slices(len(lengths), count)
        ]
    return tasks


def _threads(num_threads: int, num_tasks: int) -> int:
    return num_threads or (usable_cores() if num_tasks > 1 else 1)
