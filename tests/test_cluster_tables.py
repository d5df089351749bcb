"""Datasets deduplicated and packed in stages: the rows of one process, whoever does the work."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fast_axolotl import dedupe_files, open_dataset, plan_packs
from fast_axolotl.cluster import shares, tables
from fast_axolotl.cluster.tables import dedupe_on, pack_on
from fast_axolotl.cluster.tasks import Event
from fast_axolotl.errors import ConflictError, DataError, UsageError
from fast_axolotl.reading import index
from support.files import (
    compress,
    jsonl_bytes,
    make_rows,
    read_rows,
    write_csv,
    write_jsonl,
    write_parquet,
)

COMMAND = [sys.executable, "-m", "fast_axolotl"]
KIB = 1024


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Makes some hundred kB several tasks; the callable forgets what scans have found."""
    monkeypatch.setattr(shares, "_LEAST_BYTES", 64 * KIB)
    monkeypatch.setattr(tables, "_PACK_BYTES", 64 * KIB)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def clear() -> None:
        index._memory.clear()
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)

    clear()
    return clear


def repeated_rows(count: int = 1500) -> list[dict[str, Any]]:
    rows = make_rows(count // 2, text_bytes=300)
    return random.Random(0).choices(rows, k=count)


def write_inputs(folder: Path, kind: str) -> list[Path]:
    rows = repeated_rows()
    folder.mkdir(exist_ok=True)
    if kind == "csv":
        flat = [{"id": row["id"] % 50 / 4, "text": row["text"]} for row in rows]
        return [write_csv(folder / "a.csv", flat), write_csv(folder / "b.csv", flat[:40])]
    if kind == "jsonl":
        return [write_jsonl(folder / "a.jsonl", rows)]
    if kind == "parquet":
        return [write_parquet(folder / "a.parquet", rows, row_group_size=100)]
    parts = [rows[:700], rows[700:710], rows[710:]]
    return [
        write_parquet(folder / "a.parquet", parts[0]),
        write_jsonl(folder / "b.jsonl", parts[1]),
        compress(write_jsonl(folder / "c.jsonl", parts[2]), "gzip"),
    ]


@pytest.mark.parametrize("columns", [None, ["id"]])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "several"])
def test_the_rows_are_those_of_dedupe_files(
    tmp_path: Path, kind: str, columns: list[str] | None, forget: Callable[[], None]
) -> None:
    inputs = write_inputs(tmp_path / "in", kind)
    expected = dedupe_files(inputs, tmp_path / "one.parquet", columns=columns)
    for workers in (1, 2):
        forget()
        output = tmp_path / f"out-{workers}"
        summary = dedupe_on(inputs, str(output), columns=columns, workers=workers)
        assert read_rows(output) == read_rows(tmp_path / "one.parquet")
        assert pq.read_schema(output / "part-00000.parquet").equals(
            pq.read_schema(tmp_path / "one.parquet")
        )
        assert (summary.rows_in, summary.duplicates) == (expected.rows_in, expected.duplicates)
        assert summary.rows_out == expected.rows_out
        assert summary.bytes_in == expected.bytes_in
        assert summary.bytes_out == sum(path.stat().st_size for path in output.iterdir())
        assert len(list(output.iterdir())) > 1 or kind == "csv"
        assert not list(tmp_path.glob("out*.*"))  # no work folder, no parts


def test_types_are_joined_over_all_shares_before_rows_are_compared(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"n": 1, "pad": "x" * KIB}] * 200
    rows += [{"n": 1.0, "pad": "x" * KIB}, {"n": 2.5, "late": "y"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    summary = dedupe_on(path, str(tmp_path / "out"))
    dedupe_files(path, tmp_path / "one.parquet")
    assert read_rows(tmp_path / "out") == read_rows(tmp_path / "one.parquet")
    assert (summary.rows_out, summary.stages[0].name) == (2, "types")
    write_jsonl(path, [*rows, {"n": "text"}])
    with pytest.raises(ConflictError, match="'n'"):
        dedupe_on(path, str(tmp_path / "other"))
    texts = dedupe_on(path, str(tmp_path / "texts"), on_conflict="json")
    dedupe_files(path, tmp_path / "two.parquet", on_conflict="json")
    assert read_rows(tmp_path / "texts") == read_rows(tmp_path / "two.parquet")
    assert texts.rows_out == 4


def test_rows_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in repeated_rows(400)]
    for place in (3, 250, 399):
        lines[place] = lines[place][:-1]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    summary = dedupe_on(path, str(tmp_path / "out"), on_error="skip")
    dedupe_files(path, tmp_path / "one.parquet", on_error="skip")
    assert read_rows(tmp_path / "out") == read_rows(tmp_path / "one.parquet")
    assert summary.dropped == {"unreadable": 3}
    assert [item["path"] for item in summary.extra["rejections"]] == [str(path)] * 3
    with pytest.raises(DataError, match=r"a\.jsonl.*line 4"):
        dedupe_on(path, str(tmp_path / "other"))


def test_no_rows_give_one_part_with_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), path)
    summary = dedupe_on(path, str(tmp_path / "out"))
    assert (summary.rows_in, read_rows(tmp_path / "out")) == (0, [])
    assert open_dataset(tmp_path / "out").schema.names == ["a"]


class Stopping:
    """Interrupts a job after so many tasks."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.done: list[str] = []

    def __call__(self, event: Event) -> None:
        if event.kind == "done" and event.task is not None:
            self.done.append(event.task.answer_name)
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


@pytest.mark.parametrize("job", [dedupe_on, pack_on])
def test_a_job_goes_on_after_it_was_stopped_behind_any_task(
    tmp_path: Path, job: Callable[..., Any], forget: Callable[[], None]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", token_rows(600))
    options = {"length": 200} if job is pack_on else {}
    job(path, str(tmp_path / "whole"), heard=(total := Stopping(-1)), **options)
    output = tmp_path / "out"
    for after in range(1, len(total.done)):
        forget()
        with pytest.raises(KeyboardInterrupt):
            job(path, str(output), heard=Stopping(after), **options)
    job(path, str(output), **options)
    names = [item.name for item in sorted((tmp_path / "whole").iterdir())]
    assert [item.name for item in sorted(output.iterdir())] == names
    assert [pq.read_table(output / name) for name in names] == [
        pq.read_table(tmp_path / "whole" / name) for name in names
    ]


def test_a_killed_command_goes_on_when_it_is_run_again(tmp_path: Path) -> None:
    rows = [{"id": index % 70_000, "text": "x" * 200} for index in range(100_000)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    command = [*COMMAND, "dedupe", str(path), "-o", str(tmp_path / "out"), "--engine", "local"]
    command += ["--workers", "1", "--json"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out.work/digest/0*.json")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows_out"] == 70_000
    assert [row["id"] for row in read_rows(tmp_path / "out")] == list(range(70_000))


def test_what_belongs_to_others_is_left_alone(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", repeated_rows(100))
    output = str(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        dedupe_on(path, output, heard=Stopping(1))
    with pytest.raises(UsageError, match=r"out\.work was left by another job: its columns is None"):
        dedupe_on(path, output, columns=["id"])
    with pytest.raises(UsageError, match=r"columns must be some of id, text.*'missing'"):
        dedupe_on(path, output, columns=["missing"], restart=True)
    dedupe_on(path, output, columns=["id"])  # nothing was left of a job that cannot be
    with pytest.raises(UsageError, match="exists and is left as it is"):
        dedupe_on(path, output)
    dedupe_on(path, output, overwrite=True)
    with pytest.raises(UsageError, match="folder of Parquet files"):
        dedupe_on(path, str(tmp_path / "out.jsonl"))
    with pytest.raises(UsageError, match="belongs to no job"):
        dedupe_on(path, str(tmp_path / "new"), work=output)


# Packs


def token_rows(count: int, longest: int = 200) -> list[dict[str, Any]]:
    generator = np.random.default_rng(4)
    rows = []
    for length in generator.integers(0, longest + 1, count).tolist():
        ids = generator.integers(0, 50_000, length).tolist()
        rows.append({"input_ids": ids, "labels": [-100, *ids[1:]][:length], "source": "x"})
    return rows


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_packs_hold_every_sequence_once_as_planned(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_PLANNED_TOKENS", 20_000)
    rows = token_rows(1000)
    path = (write_jsonl if ending == "jsonl" else write_parquet)(tmp_path / f"a.{ending}", rows)
    summary = pack_on(path, str(tmp_path / "out"), length=256, workers=2)
    packs = read_rows(tmp_path / "out")
    found = []
    for pack in packs:
        assert list(pack) == ["input_ids", "labels", "position_ids", "lengths"]
        assert sum(pack["lengths"]) == len(pack["input_ids"]) == len(pack["labels"]) <= 256
        assert pack["position_ids"] == [place for n in pack["lengths"] for place in range(n)]
        edges = np.cumsum([0, *pack["lengths"]]).tolist()
        for start, stop in pairwise(edges):
            found.append((pack["input_ids"][start:stop], pack["labels"][start:stop]))
    sequences = [(row["input_ids"], row["labels"]) for row in rows if row["input_ids"]]
    assert sorted(found) == sorted(sequences)
    tokens = sum(len(ids) for ids, _ in sequences)
    assert (summary.rows_in, summary.rows_out, summary.tokens) == (1000, len(packs), tokens)
    assert summary.dropped == {"empty": 1000 - len(sequences)}
    assert summary.extra["efficiency"] == tokens / (len(packs) * 256) > 0.8
    pack_on(path, str(tmp_path / "one"), length=256, workers=1, memory=192 * KIB * KIB)
    assert read_rows(tmp_path / "one") == packs


def test_what_is_planned_together_does_not_depend_on_how_rows_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "_PLANNED_ROWS", 50)
    monkeypatch.setattr(tables, "_PLANNED_TOKENS", 3_000)
    lists = [row["input_ids"] for row in token_rows(400, 120)] + [[7] * 5_000]
    table = pa.table({"a": pa.array(lists, pa.list_(pa.int32()))})
    together = [part.num_rows for part in tables._planned_together([table])]
    assert (sum(together), together[-1]) == (401, 1)
    for step in (1, 7, 64):
        cut = [table.slice(start, step) for start in range(0, 401, step)]
        assert [part.num_rows for part in tables._planned_together(cut)] == together


def test_long_rows_stop_the_job_or_are_dropped_or_cut(tmp_path: Path) -> None:
    rows = token_rows(300, 100)
    rows[250] = {"input_ids": list(range(500)), "labels": list(range(500)), "source": "x"}
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"a\.jsonl.*row .*500 tokens.*more than 128.*--long"):
        pack_on(path, str(tmp_path / "out"), length=128)
    dropped = pack_on(path, str(tmp_path / "dropped"), length=128, long="drop")
    assert dropped.dropped["too long"] == 1
    cut = pack_on(path, str(tmp_path / "cut"), length=128, long="cut")
    assert (cut.extra["cut"], cut.tokens) == (1, dropped.tokens + 128)
    packs = [row["input_ids"] for row in read_rows(tmp_path / "cut")]
    assert list(range(128)) in packs
    planned = plan_packs([len(row["input_ids"]) for row in rows], 128)
    assert abs(cut.rows_out - len(planned)) < 12


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2], "labels": [1]}, "row 4.*another number of labels"),
        ({"input_ids": ["a"], "labels": [1]}, "no token ids"),
        ({"input_ids": [2**40], "labels": [1]}, "no token ids"),
        ({"input_ids": [1, None], "labels": [1, 2]}, "no token ids"),
    ],
)
def test_rows_that_are_no_tokens_are_named(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    good = {"input_ids": [1], "labels": [1]} if row["input_ids"] != ["a"] else row
    path = write_jsonl(tmp_path / "a.jsonl", [good, good, good, row])
    with pytest.raises(DataError, match=rf"a\.jsonl.*{message}"):
        pack_on(path, str(tmp_path / "out"), length=8)
    with pytest.raises(UsageError, match="must be among input_ids, labels"):
        pack_on(path, str(tmp_path / "out"), length=8, column="tokens", restart=True)


# Elsewhere


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    type(fsspec.filesystem("s3")).clear_instance_cache()
    filesystem = fsspec.filesystem("s3")
    filesystem.mkdir("rows")
    yield filesystem
    type(filesystem).clear_instance_cache()
    server.stop()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_object_store_is_input_and_output(s3: Any, tmp_path: Path) -> None:
    rows = repeated_rows(600)
    for part in range(3):
        data = jsonl_bytes(rows[part * 200 : part * 200 + 200])
        s3.pipe_file(f"rows/in/part-{part}.jsonl", data)
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    dedupe_files(path, tmp_path / "one.parquet")
    with pytest.raises(KeyboardInterrupt):
        dedupe_on("s3://rows/in", "s3://rows/out", heard=Stopping(6))
    dedupe_on("s3://rows/in", "s3://rows/out", workers=2)
    assert read_rows("s3://rows/out") == read_rows(tmp_path / "one.parquet")
    s3.invalidate_cache()
    assert s3.exists("rows/out/_SUCCESS")
    assert not s3.exists("rows/out.work")


def test_the_commands_print_what_was_done(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", token_rows(50))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
        )

    done = run("pack", "a.jsonl", "-o", "packed", "--length", "400", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows_out"] == len(read_rows(tmp_path / "packed"))
    done = run("dedupe", str(path), "-o", "out", "--engine", "local", "--columns", "source")
    assert done.returncode == 0, done.stderr
    assert len(read_rows(tmp_path / "out")) == 1
    done = run("dedupe", "a.jsonl", "-o", "out.parquet", "--workers", "2")
    assert (done.returncode, "need --engine" in done.stderr) == (2, True)
