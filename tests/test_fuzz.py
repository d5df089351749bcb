"""Damaged files of every format: rows or one of our errors, never anything else.

Each case takes a small valid file, flips, deletes, inserts or repeats a few of its bytes, and reads
the result to the last Python value. Cases run in a child process, so that a crash inside pyarrow,
an allocation without bound or a hang is a failure that names its case rather than the end of the
test run. Where a format carries checksums, a read that succeeds must also give the rows that were
written.

``FAST_AXOLOTL_FUZZ_CASES`` sets the number of cases a sample. One case is run again, in the open,
by ``PYTHONPATH=tests python tests/test_fuzz.py SAMPLE FIRST STOP``.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fast_axolotl.errors import FastAxolotlError
from fast_axolotl.reading import FormatWarning, convert, open_dataset
from support.files import (
    arrow_bytes,
    csv_bytes,
    feather_bytes,
    flat_rows,
    jsonl_bytes,
    make_rows,
    parquet_bytes,
    squeeze,
)

CASES = int(os.environ.get("FAST_AXOLOTL_FUZZ_CASES", "60"))
"""Cases of each sample."""

SECONDS_TO_START = 60
SECONDS_PER_CASE = 0.5
"""A child that takes longer than this in the mean hangs; the usual case takes milliseconds."""

ADDRESS_SPACE_BYTES = 8 * 1024**3
"""What a damaged length may make a child ask for before it is out of memory."""


PLAIN = make_rows(40)


def typed_table(*, with_views: bool = False) -> pa.Table:
    """Types that text formats lack: dates, decimals, dictionaries, binary, maps, fixed sizes.

    With views also layouts that only Arrow files have: views, and lists of them.
    """
    count = 30
    table = pa.table(
        {
            "when": pa.array(range(count), pa.timestamp("us", "UTC")),
            "day": pa.array(range(count), pa.date32()),
            "price": pa.array(range(count), pa.decimal128(10, 2)),
            "word": pa.array(["x", "y", None] * 10).dictionary_encode(),
            "raw": pa.array([bytes([index]) * index for index in range(count)], pa.binary()),
            "fixed": pa.array([b"abcd"] * count, pa.binary(4)),
            "map": pa.array([[("k", n)] for n in range(count)], pa.map_(pa.string(), pa.int64())),
            "pair": pa.array([[index, 1] for index in range(count)], pa.list_(pa.int32(), 2)),
            "deep": pa.array([[[index], None, []] for index in range(count)]),
            "large": pa.array(["text"] * count, pa.large_string()),
            "half": pa.array(range(count), pa.float32()),
            "time": pa.array(range(count), pa.time64("us")),
        }
    )
    if not with_views:
        return table
    words = ["short", "a text that is longer than twelve bytes", None] * 10
    views = {
        "view": pa.array(words, pa.string_view()),
        "raw_view": pa.array([w and w.encode() for w in words], pa.binary_view()),
        "view_list": pa.array([[word, "x" * 20] for word in words], pa.list_(pa.string_view())),
        "view_pair": pa.array([{"a": word} for word in words], pa.struct({"a": pa.string_view()})),
        "span": pa.array([[1, 2], [], None] * 10, pa.list_view(pa.int16())),
    }
    for name, values in views.items():
        table = table.append_column(name, values)
    return table


parquet = partial(parquet_bytes, row_group_size=15)
arrow = partial(arrow_bytes, batch_rows=15)
stream = partial(arrow, form=pa.ipc.new_stream)
TEXT = "".join(f"line {index} ünïcode \U0001f98e\r\n" for index in range(60)).encode()
DOCUMENT = json.dumps(PLAIN, indent=1).encode()

SAMPLES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "parquet": ("parquet", lambda: parquet(PLAIN)),
    "parquet-zstd-v2": (
        "parquet",
        lambda: parquet(PLAIN, compression="zstd", data_page_version="2.0", data_page_size=200),
    ),
    "parquet-delta": (
        "parquet",
        lambda: parquet(
            PLAIN,
            use_dictionary=False,
            column_encoding={
                "text": "DELTA_BYTE_ARRAY",
                "id": "DELTA_BINARY_PACKED",
                "score": "BYTE_STREAM_SPLIT",
            },
        ),
    ),
    "parquet-types": ("parquet", lambda: parquet(typed_table())),
    "arrow-file": ("arrow", lambda: arrow(PLAIN)),
    "arrow-file-zstd": ("arrow", lambda: arrow(PLAIN, compression="zstd")),
    "arrow-file-views": ("arrow", lambda: arrow(typed_table(with_views=True))),
    "arrow-stream": ("arrow", lambda: stream(PLAIN)),
    "arrow-stream-views": ("arrow", lambda: stream(typed_table(with_views=True))),
    "feather-lz4": ("feather", lambda: feather_bytes(PLAIN, chunksize=15)),
    "json": ("json", lambda: DOCUMENT),
    "jsonl": ("jsonl", lambda: jsonl_bytes(PLAIN)),
    "csv": ("csv", lambda: csv_bytes(flat_rows(40))),
    "text": ("txt", lambda: TEXT),
    "jsonl-gzip": ("jsonl.gz", lambda: squeeze(jsonl_bytes(PLAIN), "gzip")),
    "json-zstd": ("json.zst", lambda: squeeze(DOCUMENT, "zstd")),
    "parquet-in-gzip": ("parquet.gz", lambda: squeeze(parquet(PLAIN), "gzip")),
    "arrow-in-zstd": ("arrow.zst", lambda: squeeze(arrow(PLAIN), "zstd")),
}


# Both that end in gzip carry a checksum: damage cannot pass for other rows.


def damaged(data: bytes, generator: random.Random) -> bytes:
    """One to four changes: bits flipped, bytes set, removed, added or repeated, the end cut."""
    result = bytearray(data)
    for _ in range(generator.choice((1, 1, 1, 2, 4))):
        place = generator.randrange(len(result) or 1)
        if generator.random() < 0.3:
            place = max(0, len(result) - 1 - generator.randrange(min(1200, len(result) or 1)))
        length = generator.choice((1, 1, 2, 4, 8, 40))
        kind = generator.randrange(6)
        if kind == 0 and result:
            result[place] ^= 1 << generator.randrange(8)
        elif kind == 1:
            result[place : place + length] = generator.randbytes(length)
        elif kind == 2:
            del result[place : place + length]
        elif kind == 3:
            result[place:place] = generator.randbytes(length)
        elif kind == 4:
            result[place:place] = result[place : place + length]
        else:
            extreme = generator.choice((b"\xff", b"\x00", b"\x7f", b"\x80"))
            result[place : place + length] = extreme * length
    return bytes(result)


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"on_error": "skip"},
    {"infer": "scan"},
    {"shuffle": 7, "shard": (0, 2), "on_error": "skip"},
)
"""Cases take turns in how they read."""


def read_all(path: Path, **options: Any) -> list[dict[str, list[Any]]]:
    """Every row as Python values, through every step that touches the buffers."""
    batches = []
    for batch in open_dataset(path, num_threads=1, batch_size=16, **options):
        batches.append(convert(batch, "python"))
        convert(batch, "numpy")
    return batches


def run_case(name: str, case: int, data: bytes, folder: Path) -> str | None:
    """What went wrong, or ``None``."""
    ending = SAMPLES[name][0]
    change = damaged(data, random.Random(f"{name} {case}"))
    path = folder / f"case.{ending}"
    path.write_bytes(change)
    try:
        rows = read_all(path, **WAYS[case % len(WAYS)])
    except FastAxolotlError as error:
        return None if str(error).strip() else "an error without a message"
    except Exception:  # noqa: BLE001 - the very thing that is looked for
        return traceback.format_exc()
    if name.endswith("gzip") and case % len(WAYS) == 0 and change != data:
        path.write_bytes(data)
        if rows != read_all(path):
            return "damaged rows passed a checksum"
    return None


def run_cases(name: str, first: int, stop: int, folder: Path) -> None:
    """In the child: a line per case begun and per failure found, and one at the end."""
    ending, make = SAMPLES[name]
    path, data = folder / f"whole.{ending}", make()
    path.write_bytes(data)
    whole = read_all(path)
    assert sum(len(next(iter(batch.values()))) for batch in whole) > 20
    for case in range(first, stop):
        print(f"case {case}", flush=True)
        failure = run_case(name, case, data, folder)
        if failure is not None:
            print(json.dumps({"case": case, "failure": failure}), flush=True)
    print("done", flush=True)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_damaged_file_gives_rows_or_one_of_our_errors(name: str, tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, __file__, name, "0", str(CASES)],
        env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"},
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_START + SECONDS_PER_CASE * CASES,
        check=False,
    )
    *lines, last = child.stdout.splitlines() or [""]
    failures = [line for line in lines if not line.startswith("case ")]
    report = "\n".join(failures[:10]).replace("\\n", "\n")
    assert not failures, f"{len(failures)} of {CASES} cases of {name}:\n{report}"
    assert last == "done", f"{name}, {last}: exit code {child.returncode}: {child.stderr[-2000:]}"


if __name__ == "__main__":
    warnings.simplefilter("ignore", FormatWarning)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    sample_name, begin, end = sys.argv[1:]
    with tempfile.TemporaryDirectory() as temporary:
        run_cases(sample_name, int(begin), int(end), Path(temporary))
