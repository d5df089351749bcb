"""The command line as a user meets it: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROWS = [{"id": index, "text": f"row {index}"} for index in range(2500)]


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    source = Path(__file__).parents[1] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source), "COLUMNS": "100", "TERM": "dumb"}
    command = [sys.executable, "-m", "fast_axolotl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_reading_reports_rows_speed_and_working_set(rows_file: Path) -> None:
    done = run("read", rows_file)
    assert done.returncode == 0
    assert done.stderr == ""
    for word in ("2,500 in 3 batches", "rows/s", "working set", "rejected rows", "id: int64"):
        assert word in done.stdout


def test_json_gives_every_figure(rows_file: Path) -> None:
    summary = json.loads(run("read", rows_file, "--json").stdout)
    assert (summary["rows"], summary["batches"], summary["files"]) == (2500, 3, 1)
    assert summary["columns"] == {"id": "int64", "text": "string"}
    assert summary["rows_per_second"] > 0
    assert summary["rejections"] == []


def test_head_prints_rows_as_json_lines(rows_file: Path) -> None:
    done = run("read", rows_file, "--head", "2", "--columns", "text")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"text": "row 0"},
        {"text": "row 1"},
    ]


def test_head_of_more_rows_than_there_are_prints_all(rows_file: Path) -> None:
    assert len(run("read", rows_file, "--head", "9999").stdout.splitlines()) == 2500


def test_shards_partition_the_rows(rows_file: Path) -> None:
    counts = [
        json.loads(run("read", rows_file, "--shard", f"{index}/3", "--json").stdout)["rows"]
        for index in range(3)
    ]
    assert sum(counts) == 2500
    assert min(counts) > 0


def test_a_batch_size_is_kept(rows_file: Path) -> None:
    summary = json.loads(run("read", rows_file, "--batch-size", "100", "--json").stdout)
    assert summary["batches"] == 25


def test_rejected_rows_are_counted_and_listed(rows_file: Path) -> None:
    rows_file.write_text(rows_file.read_text() + "{broken\n")
    summary = json.loads(run("read", rows_file, "--on-error", "skip", "--json").stdout)
    assert (summary["rows"], summary["rejected_rows"]) == (2500, 1)
    assert summary["rejections"][0]["place"] == "line 2501"


def test_a_data_error_is_one_line_and_exit_code_1(rows_file: Path) -> None:
    rows_file.write_text(rows_file.read_text() + "{broken\n")
    done = run("read", rows_file)
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "rows.jsonl, line 2501" in done.stderr


def test_a_missing_file_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    done = run("read", tmp_path / "none.parquet")
    assert done.returncode == 1
    assert "no such file" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("read",),
        ("read", "x.jsonl", "--bogus"),
        ("read", "x.jsonl", "--head", "0"),
        ("read", "x.jsonl", "--shard", "3"),
        ("read", "x.jsonl", "--shard", "8/8"),
        ("read", "x.jsonl", "--batch-size", "0"),
        ("read", "x.jsonl", "--memory-budget", "much"),
        ("read", "x.jsonl", "--memory-budget", "1MB"),
        ("read", "x.jsonl", "--format", "excel"),
        ("read", "x.jsonl", "--columns", "a,a"),
        ("read", ""),
        ("bench", "hash", "x.jsonl", "--column", "nonsense"),
        ("nonsense",),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    done = run(*(str(tmp_path / word) if word == "x.jsonl" else word for word in arguments))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_a_misnamed_file_is_read_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    done = run("read", path, "--json")
    assert json.loads(done.stdout)["rows"] == 2
    assert "the name says parquet but the content is jsonl" in done.stderr


def test_help_has_examples_and_the_version_is_told() -> None:
    assert "fast-axolotl read train.jsonl.zst" in run("read", "--help").stdout
    assert run("--version").stdout.startswith("fast-axolotl 1.")
    assert run().returncode in (0, 2)


def test_a_closed_pipe_is_no_traceback(rows_file: Path) -> None:
    source = Path(__file__).parents[1] / "src"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = f"'{sys.executable}' -m fast_axolotl read '{rows_file}' --head 2500 | head -1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.stdout.splitlines() == ['{"id": 0, "text": "row 0"}']
    assert "Traceback" not in done.stderr
