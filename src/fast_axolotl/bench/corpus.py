"""The inputs, made on the spot and always the same: conversations, and the earlier package's rows.

A conversation has 2 to 6 messages; their texts are slices, of random place and length, of one long
text of random words, so no two are alike and all formats together take seconds to write. Every
fiftieth row has quotes, a newline and letters beyond ASCII in it.
"""

from __future__ import annotations

import gzip
import json
import random
import string
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

__all__ = ["Corpus", "write_large_jsonl", "write_large_parquet"]

MESSAGE_ROWS = 200_000
"""Rows of the conversation cases at scale 1, as the issue asks; about 240 MB as JSON lines."""

SAMPLE_ROWS = 50_000
"""Rows of the earlier package's own benchmark."""

ROW_GROUP_ROWS = 10_000
RECORD_BATCH_ROWS = 1000
_TEXT_WORDS = 3_000_000
_LARGE_BLOCK_ROWS = 20_000
_GZIP_LEVEL = 1
"""Level 6 would take longer to write than everything else; it reads at the same speed."""


class Corpus:
    """Writes the file of a case when it is asked for; keeps only the rows in memory."""

    def __init__(self, folder: Path, scale: float) -> None:
        self._folder = folder
        self.rows = max(100, round(MESSAGE_ROWS * scale))
        self.sample_rows = max(100, round(SAMPLE_ROWS * scale))

    def sample(self) -> Path:
        """The rows of the earlier package's benchmark."""
        path = self._folder / "sample.parquet"
        numbers = range(self.sample_rows)
        texts = [f"This is sample text number {i} with some content." for i in numbers]
        pq.write_table(pa.table({"text": texts, "label": list(numbers)}), path)
        return path

    def messages(self, name: str) -> Path:
        """The conversations as a file of this name, one of ``messages_files()``."""
        path = self._folder / name
        _WRITERS[name](self, path)
        return path

    @cached_property
    def conversations(self) -> list[dict[str, Any]]:
        return _conversations(self.rows)

    @cached_property
    def table(self) -> pa.Table:
        return pa.Table.from_pylist(self.conversations)

    def _write_parquet(self, path: Path) -> None:
        pq.write_table(self.table, path, row_group_size=ROW_GROUP_ROWS)

    def _write_one_group(self, path: Path) -> None:
        pq.write_table(self.table, path, row_group_size=self.rows)

    def _write_arrow(self, path: Path) -> None:
        with pa.ipc.new_file(path, self.table.schema) as writer:
            writer.write_table(self.table, max_chunksize=RECORD_BATCH_ROWS)

    def _write_arrow_stream(self, path: Path) -> None:
        with pa.ipc.new_stream(path, self.table.schema) as writer:
            writer.write_table(self.table, max_chunksize=RECORD_BATCH_ROWS)

    def _write_jsonl(self, path: Path) -> None:
        with path.open("wb") as file:
            self._put_lines(file)

    def _write_jsonl_gz(self, path: Path) -> None:
        with gzip.open(path, "wb", compresslevel=_GZIP_LEVEL) as file:
            self._put_lines(file)

    def _write_jsonl_zst(self, path: Path) -> None:
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            self._put_lines(file)

    def _put_lines(self, file: IO[bytes]) -> None:
        lines = [_to_json(row) for row in self.conversations]
        file.write(("\n".join(lines) + "\n").encode())

    def _write_csv(self, path: Path) -> None:
        texts = [_to_json(row["messages"]) for row in self.conversations]
        table = self.table.drop(["messages"]).append_column("messages", pa.array(texts))
        pa.csv.write_csv(table, path)

    def _write_text(self, path: Path) -> None:
        with path.open("w", encoding="utf-8", newline="\n") as file:
            for row in self.conversations:
                text = " ".join(message["content"] for message in row["messages"])
                file.write(text.replace("\n", " ") + "\n")


_WRITERS: dict[str, Callable[[Corpus, Path], None]] = {
    "messages.parquet": Corpus._write_parquet,
    "messages-one-group.parquet": Corpus._write_one_group,
    "messages.jsonl": Corpus._write_jsonl,
    "messages.jsonl.gz": Corpus._write_jsonl_gz,
    "messages.jsonl.zst": Corpus._write_jsonl_zst,
    "messages.csv": Corpus._write_csv,
    "messages.arrow": Corpus._write_arrow,
    "messages-stream.arrows": Corpus._write_arrow_stream,
    "messages.txt": Corpus._write_text,
}


def write_large_jsonl(path: Path, num_bytes: int) -> int:
    """Conversations of at least so many bytes as JSON lines, with rising ids; gives their number."""
    rows = _conversations(_LARGE_BLOCK_ROWS)
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
    """Conversations of about so many bytes as Parquet, with rising ids; gives their number."""
    block = pa.Table.from_pylist(_conversations(_LARGE_BLOCK_ROWS))
    pq.write_table(block, path, row_group_size=ROW_GROUP_ROWS)
    blocks = max(1, round(num_bytes / path.stat().st_size))
    numbered = (_renumbered(block, index * block.num_rows) for index in range(blocks))
    if one_group:
        table = pa.concat_tables(numbered)
        pq.write_table(table, path, row_group_size=table.num_rows)
    else:
        with pq.ParquetWriter(path, block.schema) as writer:
            for table in numbered:
                writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
    return blocks * block.num_rows


def _renumbered(block: pa.Table, start: int) -> pa.Table:
    return block.set_column(0, "id", pa.array(range(start, start + block.num_rows), pa.int64()))


def _conversations(count: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    letters = string.ascii_lowercase
    words = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(5000)]
    text = " ".join(rng.choices(words, k=min(_TEXT_WORDS, 200 * count)))
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
