"""``dedupe_files`` and its command: exact, in order, whole or not at all, in bounded memory."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fast_axolotl import dedupe_files
from fast_axolotl.dedupe import files
from fast_axolotl.dedupe import output as written
from fast_axolotl.dedupe.spill import Spill
from fast_axolotl.errors import DataError, FastAxolotlError, UsageError
from support.children import run_child
from support.files import read_rows, write_jsonl
from support.golden import check_calls

BUDGET = 192 * 1024 * 1024
COMMAND = [sys.executable, "-m", "fast_axolotl", "dedupe"]
CODE = "import sys, fast_axolotl; fast_axolotl.dedupe_files(sys.argv[1], sys.argv[3])"
SCRIPT = [sys.executable, "-c", CODE]


def numbered(count: int, distinct: int, seed: int = 0) -> pa.Table:
    ids = np.random.default_rng(seed).integers(0, distinct, count)
    return pa.table({"id": ids, "text": [f"row {number}" for number in ids]})


def left_behind(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


ROWS = [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}, {"a": 1, "b": "x"}, {"a": 1, "b": None}] * 3


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", ROWS)


@pytest.mark.parametrize(
    "ending", ["parquet", "arrow", "feather", "jsonl", "jsonl.gz", "jsonl.zst"]
)
def test_every_output_holds_the_first_of_each_row_in_order(
    source: Path, tmp_path: Path, ending: str
) -> None:
    output = tmp_path / f"out.{ending}"
    summary = dedupe_files(source, output)
    assert read_rows(output) == ROWS[:2] + ROWS[3:4]
    assert (summary.rows_in, summary.rows_out, summary.duplicates) == (12, 3, 9)
    assert summary.bytes_in == source.stat().st_size
    assert summary.bytes_out == output.stat().st_size
    assert summary.spilled_bytes == 0
    assert left_behind(tmp_path) == ["in.jsonl", output.name]


def test_types_found_late_are_compared_as_what_they_are(tmp_path: Path) -> None:
    rows = [{"a": 1}, {"a": None}, {"a": 1.0}, {"a": 2.5}, {"a": 1, "late": "x"}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    dedupe_files(source, tmp_path / "out.parquet")
    written = [tuple(row.values()) for row in read_rows(tmp_path / "out.parquet")]
    assert written == [(1.0, None), (None, None), (2.5, None), (1.0, "x")]


def test_chosen_columns_decide_and_rows_of_the_other_data_are_left_out(
    source: Path, tmp_path: Path
) -> None:
    dedupe_files(source, tmp_path / "out.jsonl", columns=["a"])
    assert read_rows(tmp_path / "out.jsonl") == ROWS[:2]
    source = write_jsonl(source, [{"a": n, "b": "x"} for n in (1, 2, 1, 3, 4)])
    other = tmp_path / "test.parquet"
    pq.write_table(pa.table({"b": ["x", "x"], "a": pa.array([2, 4], pa.int8())}), other)
    summary = dedupe_files(source, tmp_path / "out.jsonl", against=other, overwrite=True)
    assert [row["a"] for row in read_rows(tmp_path / "out.jsonl")] == [1, 3]
    assert (summary.duplicates, summary.duplicates_of_others) == (3, 2)


@pytest.mark.parametrize("limit", [0, 40_000])
@pytest.mark.parametrize("with_others", [False, True])
def test_spilling_gives_the_same_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, with_others: bool
) -> None:
    pq.write_table(numbered(60_000, 30_000), tmp_path / "in.parquet", row_group_size=7000)
    pq.write_table(numbered(9000, 30_000, seed=1), tmp_path / "other.parquet")
    other = tmp_path / "other.parquet" if with_others else None
    monkeypatch.setattr(files, "_BATCH_ROWS", 1000)

    def run(name: str) -> tuple[Any, pa.Table]:
        output = tmp_path / f"{name}.parquet"
        summary = dedupe_files(tmp_path / "in.parquet", output, against=other, memory_budget=BUDGET)
        return summary, pq.read_table(output)

    kept, rows = run("kept")
    monkeypatch.setattr(files, "_LEAST_WORKING_BYTES", BUDGET - limit)
    spilled, rows_again = run("spilled")
    assert spilled.spilled_bytes > 0 == kept.spilled_bytes
    assert rows.equals(rows_again)
    assert kept.duplicates_of_others == spilled.duplicates_of_others
    assert (kept.duplicates_of_others > 0) == with_others
    assert not [name for name in left_behind(tmp_path) if name.startswith(".")]


def test_a_bucket_too_large_for_memory_is_read_in_passes(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    digests = rng.integers(0, 2**64, 2 * 20_000, np.uint64)
    digests[0::2] &= np.uint64(0xFFFF_FFFF_FFFF_FF00)  # one bucket
    doubled = np.concatenate([digests, digests])
    work = Spill(tmp_path, limit=200_000)
    work.add(doubled, np.arange(40_000))
    work.resolve()
    firsts = np.concatenate([work.firsts(at, at + 777) for at in range(0, 40_000, 777)])[:40_000]
    assert (firsts == np.tile(np.arange(20_000), 2)).all()
    work.close()
    mixed = rng.permutation(40_000)  # the least number need not come first
    work = Spill(tmp_path, limit=200_000)
    work.add(doubled.reshape(-1, 2)[mixed], mixed)
    work.resolve()
    repeated = np.concatenate([numbers for numbers, _ in work.pairs])
    assert sorted(repeated) == [*range(20_000, 40_000)]
    work.close()
    assert left_behind(tmp_path) == []


def test_an_input_that_changes_between_the_passes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"a": f"{n:05}"} for n in range(40_000)])
    monkeypatch.setattr(files, "_LEAST_WORKING_BYTES", BUDGET)

    def shrink(phase: str, *_: int) -> None:
        if "disk" in phase:
            lines = source.read_text().splitlines()
            source.write_text("\n".join(lines[:30_000]).ljust(source.stat().st_size - 1) + "\n")

    with pytest.raises(FastAxolotlError):
        dedupe_files(source, tmp_path / "out.jsonl", memory_budget=BUDGET, progress=shrink)
    assert left_behind(tmp_path) == ["in.jsonl"]


def test_a_second_run_refuses_to_overwrite_and_says_how_to(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    dedupe_files(source, output)
    before = output.read_bytes()
    with pytest.raises(
        UsageError, match=r"out\.jsonl already exists.*overwrite=True \(--overwrite\)"
    ):
        dedupe_files(source, output)
    assert output.read_bytes() == before
    dedupe_files(source, output, overwrite=True)
    assert output.read_bytes() == before


def test_an_error_half_way_leaves_the_old_output_and_nothing_else(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"a": n} for n in range(50_000)])
    output = tmp_path / "out.jsonl"
    output.write_text("old")

    def fail(phase: str, *_: int) -> None:
        if phase == "reading":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dedupe_files(source, output, overwrite=True, progress=fail)
    assert output.read_text() == "old"
    assert left_behind(tmp_path) == ["in.jsonl", "out.jsonl"]


def test_a_disk_that_fails_is_an_error_that_names_the_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    with pytest.raises(DataError, match=r"out\.parquet: writing failed \(No space left"):
        dedupe_files(source, tmp_path / "out.parquet")
    assert left_behind(tmp_path) == ["in.jsonl"]


def test_what_cannot_be_compared_or_stored_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows: dict[str, list[Any]] = {
        "rows": ROWS,
        "texts": [{"a": "one"}],
        # Values of several kinds are held as JSON text, which no plain text equals.
        "mixed": [{"a": ["x", 1]}],
        "struct": [{"a": 1, "meta": {}}],
        "none": [{}, {}],
    }
    before = [write_jsonl(Path(f"{name}.jsonl"), found).name for name, found in rows.items()]
    pq.write_table(pa.table({"a": [[b"x"]]}), "bytes.parquet")
    check_calls("dedupe")
    assert left_behind(tmp_path) == sorted([*before, "bytes.parquet"])


def test_nested_and_view_types_survive(tmp_path: Path) -> None:
    table = pa.table(
        {
            "chat": [[{"role": "user", "content": "hi"}], [], None, []],
            "view": pa.array(["a", "b", None, "b"], pa.string_view()),
        }
    )
    with pa.ipc.new_file(str(tmp_path / "in.arrow"), table.schema) as writer:
        writer.write_table(table)
    dedupe_files(tmp_path / "in.arrow", tmp_path / "out.arrow")
    with pa.ipc.open_file(str(tmp_path / "out.arrow")) as reader:
        assert reader.read_all().to_pylist() == table.to_pylist()[:3]
        assert reader.schema == table.schema.set(1, pa.field("view", pa.string()))


@pytest.mark.usefixtures("source")
def test_the_command_prints_a_summary_and_json_and_refuses_to_overwrite(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_child(*COMMAND, "in.jsonl", "-o", "out.parquet", *arguments, cwd=tmp_path)

    done = run()
    assert done.returncode == 0, done.stderr
    for line in ("rows in", "share     75.0 %", "rows out", "peak memory", "out.parquet"):
        assert line in done.stdout
    again = run()
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "--overwrite" in again.stderr
    summary = json.loads(run("--overwrite", "--json").stdout)
    assert (summary["rows_in"], summary["rows_out"], summary["duplicates"]) == (12, 3, 9)
    assert summary["peak_memory_bytes"] > 0


@pytest.mark.parametrize(
    ("command", "number", "code", "message"),
    [
        (COMMAND, signal.SIGINT, 130, "fast-axolotl: interrupted\n"),
        (COMMAND, signal.SIGTERM, 143, "fast-axolotl: stopped by SIGTERM\n"),
        (SCRIPT, signal.SIGTERM, 143, ""),
        (SCRIPT, signal.SIGKILL, -9, ""),
    ],
)
def test_what_is_stopped_leaves_nothing_behind_or_the_next_start_removes_it(
    tmp_path: Path, command: list[str], number: int, code: int, message: str
) -> None:
    pq.write_table(numbered(400_000, 300_000), tmp_path / "in.parquet", row_group_size=5000)
    process = subprocess.Popen(
        [*command, "in.parquet", "-o", "out.jsonl"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while len(left_behind(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (code, message)
    if number == signal.SIGKILL:
        killed = f".out.jsonl.{platform.node()}.{process.pid}.partial"
        assert left_behind(tmp_path) == [killed, "in.parquet"]
        others = [f".out.jsonl.{name}.partial" for name in (f"{platform.node()}.1", "elsewhere.7")]
        for name in others:  # of a process that lives, and of another machine
            (tmp_path / name).touch()
        dedupe_files(tmp_path / "in.parquet", tmp_path / "out.jsonl")
        assert left_behind(tmp_path) == sorted([*others, "in.parquet", "out.jsonl"])
    else:
        assert left_behind(tmp_path) == ["in.parquet"]


def test_dictionary_columns_are_compared_by_value_and_decoded_in_arrow_files(
    tmp_path: Path,
) -> None:
    for name, values in (("1", ["a", "b", "a"]), ("2", ["b", "c", "a"])):
        table = pa.table({"x": pa.array(values).dictionary_encode(), "n": [0, 0, 0]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    inputs = [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    for ending in ("arrow", "parquet", "jsonl"):
        output = tmp_path / f"out.{ending}"
        dedupe_files(inputs, output)
        assert [row["x"] for row in read_rows(output)] == ["a", "b", "c"]


def test_what_could_not_be_read_is_listed_on_both_sides(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n{"a": \n{"a": 2}\n')
    (tmp_path / "other.jsonl").write_text('{"a": 2}\nnonsense\n')
    summary = dedupe_files(
        tmp_path / "in.jsonl",
        tmp_path / "out.jsonl",
        against=tmp_path / "other.jsonl",
        on_error="skip",
    )
    assert (summary.rows_out, summary.rejected_rows) == (1, 2)
    assert [Path(item.path).name for item in summary.rejections] == ["other.jsonl", "in.jsonl"]
    assert (summary.files_in, summary.files_against) == (1, 1)


def test_small_batches_share_a_row_group(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_pydict({"a": [1]})
    writer = written.ParquetWriter(tmp_path / "out.parquet", batch.schema)
    for _ in range(500):
        writer.write(batch)
    writer.close()
    assert pq.ParquetFile(tmp_path / "out.parquet").metadata.num_row_groups == 1
