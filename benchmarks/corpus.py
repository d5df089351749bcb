"""The inputs, made on the spot and always the same: conversations, and the earlier package's rows.

A conversation has 2 to 6 messages; their texts are slices, of random place and length, of one long
text of random words, so no two are alike and all formats together take seconds to write. Every
fiftieth row has quotes, a newline and letters beyond ASCII in it.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import string
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq

MESSAGE_ROWS = 200_000
"""Rows of the conversation cases at scale 1: about 240 MB as JSON lines."""

SAMPLE_ROWS = 50_000
"""Rows of the earlier package's own benchmark."""

ROW_GROUP_ROWS = 10_000
RECORD_BATCH_ROWS = 1000
_TEXT_WORDS = 3_000_000
_LARGE_BLOCK_ROWS = 20_000
_COMPRESS = {
    ".gz": lambda data: gzip.compress(data, 1),
    ".bz2": lambda data: bz2.compress(data, 1),
    ".xz": lambda data: lzma.compress(data, preset=0),
}
"""Lowest levels: higher ones take longer to write than all the other files together."""
_ARROW_CODECS = {".zst": "zstd", ".lz4": "lz4"}
COMPRESSIONS = (*_COMPRESS, *_ARROW_CODECS)


def write_inputs(folder: Path, names: Collection[str], count: int) -> dict[str, Path]:
    """The conversations as files of these names, each in the format that its name says.

    All are written before anything is timed, so that the Python objects behind them are gone by
    then: a million of them would slow down every pass of the garbage collector.
    """
    if not names:
        return {}
    rows = conversations(count)
    table = pa.Table.from_pylist(rows)
    paths = {name: folder / name for name in names}
    for name, path in paths.items():
        if name.endswith(".parquet"):
            group_rows = count if "one-group" in name else ROW_GROUP_ROWS
            codec = "zstd" if "zstd" in name else "snappy"
            pq.write_table(table, path, row_group_size=group_rows, compression=codec)
        elif name.endswith(".feather"):
            pa.feather.write_feather(table, path, compression="lz4", chunksize=RECORD_BATCH_ROWS)
        elif name.endswith((".arrow", ".arrows")):
            form = pa.ipc.new_file if name.endswith(".arrow") else pa.ipc.new_stream
            with form(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=RECORD_BATCH_ROWS)
        else:
            data = _lines(name, rows, table)
            if path.suffix in _ARROW_CODECS:
                with pa.CompressedOutputStream(str(path), _ARROW_CODECS[path.suffix]) as file:
                    file.write(data)
            else:
                path.write_bytes(_COMPRESS.get(path.suffix, bytes)(data))
    return paths


def _lines(name: str, rows: list[dict[str, Any]], table: pa.Table) -> bytes:
    """The conversations in the line format that a file is named after, not yet compressed."""
    if ".jsonl" in name:
        return ("\n".join(map(_to_json, rows)) + "\n").encode()
    if ".csv" in name:
        texts = pa.array([_to_json(row["messages"]) for row in rows])
        file = pa.BufferOutputStream()
        pa.csv.write_csv(table.drop(["messages"]).append_column("messages", texts), file)
        return bytes(file.getvalue())
    texts = (" ".join(message["content"] for message in row["messages"]) for row in rows)
    return "".join(text.replace("\n", " ") + "\n" for text in texts).encode()


def write_sample(path: Path, rows: int) -> Path:
    """The rows of the earlier package's benchmark as Parquet."""
    texts = [f"This is sample text number {i} with some content." for i in range(rows)]
    pq.write_table(pa.table({"text": texts, "label": list(range(rows))}), path)
    return path


def write_large_jsonl(path: Path, num_bytes: int) -> int:
    """At least so many bytes of conversations as JSON lines; gives the number of rows."""
    rows = conversations(_LARGE_BLOCK_ROWS)
    tails = [_to_json(row).partition(", ")[2] for row in rows]
    count, written = 0, 0
    with path.open("wb") as file:
        while written < num_bytes:
            numbered = zip(range(count, count + len(tails)), tails, strict=True)
            lines = [f'{{"id": {number}, {tail}\n' for number, tail in numbered]
            written += file.write("".join(lines).encode())
            count += len(lines)
    return count


def write_large_parquet(path: Path, num_bytes: int, *, one_group: bool) -> int:
    """About so many bytes of conversations as Parquet; gives the number of rows."""
    block = pa.Table.from_pylist(conversations(_LARGE_BLOCK_ROWS))
    pq.write_table(block, path, row_group_size=ROW_GROUP_ROWS)
    blocks = max(1, round(num_bytes / path.stat().st_size))
    numbered = (
        block.set_column(0, "id", pa.array(range(start, start + block.num_rows), pa.int64()))
        for start in range(0, blocks * block.num_rows, block.num_rows)
    )
    if one_group:
        table = pa.concat_tables(numbered)
        pq.write_table(table, path, row_group_size=table.num_rows)
    else:
        with pq.ParquetWriter(path, block.schema) as writer:
            for table in numbered:
                writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
    return blocks * _LARGE_BLOCK_ROWS


def conversations(count: int) -> list[dict[str, Any]]:
    """Rows of id, source, score and messages; a smaller count gives other texts."""
    rng = random.Random(0)
    letters = string.ascii_lowercase
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(5000)]
    text = " ".join(rng.choices(words, k=min(_TEXT_WORDS, 50 * count)))
    last = len(text) - 500
    rows = []
    for index in range(count):
        extra = '\n"quoted", naïve – 引用' if index % 50 == 0 else ""
        messages = []
        for turn in range(rng.randint(2, 6)):
            start = int(rng.random() * last)
            content = text[start : start + 60 + int(rng.random() * 400)] + extra
            messages.append({"role": ("user", "assistant")[turn % 2], "content": content})
        rows.append(
            {"id": index, "source": f"set{index % 7}", "score": index * 0.5, "messages": messages}
        )
    return rows


_to_json = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
