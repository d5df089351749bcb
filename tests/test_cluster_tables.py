"""Datasets deduplicated in stages: the rows of one process, whoever does the work."""

from __future__ import annotations

import errno
import json
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fast_axolotl import dedupe_files, open_dataset
from fast_axolotl.cluster import engines, job, store, tables
from fast_axolotl.cluster.engines import Answer, Task, perform, run_tasks
from fast_axolotl.cluster.job import Stage
from fast_axolotl.cluster.shards import deal, write
from fast_axolotl.cluster.store import Store
from fast_axolotl.cluster.tables import dedupe_on
from fast_axolotl.errors import ConflictError, DataError, UsageError
from fast_axolotl.reading import index, remote
from fast_axolotl.reading.reader import dataset_of
from fast_axolotl.reading.schema import schema_text
from support.axolotl import AGAINST_AXOLOTL
from support.children import run_child
from support.cluster_tasks import squares, task
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
WRITE = {"jsonl": write_jsonl, "parquet": lambda path, rows: write_parquet(path, rows, 100)}
Forget = Callable[[], None]


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Forget:
    """Makes some hundred kB several tasks; the callable forgets what scans have found."""
    monkeypatch.setattr(tables, "_LEAST_BYTES", 64 * KIB)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def clear() -> None:
        index._memory.clear()
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)

    return clear


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks are done in this process, the last one first."""

    def run(_: Any, url: str, tasks: Sequence[Task], __: Any) -> Iterator[tuple[Task, Answer]]:
        return ((task, perform(url, task)) for task in reversed(tasks))

    monkeypatch.setattr(job, "run_tasks", run)


def repeated_rows(count: int = 1500) -> list[dict[str, Any]]:
    return random.Random(0).choices(make_rows(count // 2, text_bytes=300), k=count)


def write_inputs(folder: Path, kind: str) -> list[Path]:
    rows = repeated_rows()
    if kind == "empty":  # what has no rows has a schema
        pq.write_table(pa.table({"id": pa.array([], pa.int64())}), folder / "a.parquet")
        return [folder / "a.parquet"]
    if kind == "csv":
        rows = [{"id": row["id"] % 50 / 4, "text": row["text"]} for row in rows]
        return [write_csv(folder / "a.csv", rows), write_csv(folder / "b.csv", rows[:40])]
    if kind != "several":
        return [WRITE[kind](folder / f"a.{kind}", rows)]
    return [
        write_parquet(folder / "a.parquet", rows[:700]),
        write_jsonl(folder / "b.jsonl", rows[700:710]),
        compress(write_jsonl(folder / "c.jsonl", rows[710:]), "gzip"),
    ]


def check_dedupe(tmp_path: Path, inputs: Any, forget: Forget, **options: Any) -> Any:
    """Demands what ``dedupe_files`` writes, types included; what else it tells."""
    one, output = tmp_path / "one.parquet", tmp_path / "out"
    job = ("engine", "address", "workers", "memory")
    reading = {name: options[name] for name in options if name not in job}
    expected = dedupe_files(inputs, one, overwrite=True, **reading)
    forget()
    summary = dedupe_on(inputs, str(output), overwrite=True, **options)
    assert read_rows(output) == read_rows(one)
    assert pq.read_schema(output / "part-00000.parquet").equals(pq.read_schema(one))
    assert (summary.rows_in, summary.duplicates) == (expected.rows_in, expected.duplicates)
    assert (summary.rows_out, summary.bytes_in) == (expected.rows_out, expected.bytes_in)
    assert summary.bytes_out == sum(path.stat().st_size for path in output.glob("*.parquet"))
    assert not list(tmp_path.glob("out.*"))  # no work folder, no parts
    return summary


@pytest.mark.parametrize("columns", [None, ["id"]])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "several", "empty"])
@pytest.mark.usefixtures("inline")
def test_the_rows_are_those_of_dedupe_files(
    tmp_path: Path, kind: str, columns: list[str] | None, forget: Forget
) -> None:
    inputs = write_inputs(tmp_path, kind)
    summary = check_dedupe(tmp_path, inputs, forget, columns=columns)
    assert all(stage.done_before == 0 < stage.tasks for stage in summary.stages)
    stages = {stage.name: stage.tasks for stage in summary.stages}
    assert (stages["digest"] > 1) == (kind != "empty")


def test_processes_write_the_same(tmp_path: Path, forget: Forget) -> None:
    check_dedupe(tmp_path, write_inputs(tmp_path, "several"), forget, workers=2)


@pytest.mark.usefixtures("inline")
def test_types_are_joined_over_all_shares_before_rows_are_compared(
    tmp_path: Path, forget: Forget
) -> None:
    rows: list[dict[str, Any]] = [{"n": 1, "pad": "x" * KIB}] * 200
    rows += [{"n": 1.0, "pad": "x" * KIB}, {"n": 2.5, "late": "y"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert check_dedupe(tmp_path, path, forget).rows_out == 2
    write_jsonl(path, [*rows, {"n": "text"}])
    with pytest.raises(ConflictError, match="'n'"):
        dedupe_on(path, str(tmp_path / "other"))


def test_no_rows_of_a_mapped_file_are_sent_to_a_task(tmp_path: Path) -> None:
    table = pa.table({"x": range(10_000)})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    sent = pickle.dumps(dataset_of(open_dataset(tmp_path / "a.arrow")))
    assert len(sent) < 5_000
    assert pickle.loads(sent).files[0].batches[0]["x"].equals(table["x"].chunk(0))


@pytest.mark.usefixtures("inline")
def test_what_cannot_be_read_is_an_error_with_its_place(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in repeated_rows(400)]
    lines[250] = lines[250][:-1]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"a\.jsonl.*line 251"):
        dedupe_on(path, str(tmp_path / "out"))


class Stopping:
    """Interrupts a job after so many tasks."""

    def __init__(self, after: int) -> None:
        self.after, self.done = after, 0

    def __call__(self, _: Stage, what: str) -> None:
        self.done += what in ("", "done")
        if self.done == self.after:
            raise KeyboardInterrupt


@pytest.mark.usefixtures("inline")
def test_a_job_goes_on_after_it_was_stopped_behind_any_task(tmp_path: Path, forget: Forget) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", repeated_rows(600))
    dedupe_on(path, str(tmp_path / "whole"), heard=(total := Stopping(-1)))
    for after in range(1, total.done):
        forget()
        with pytest.raises(KeyboardInterrupt):
            dedupe_on(path, str(tmp_path / "out"), heard=Stopping(after))
    summary = dedupe_on(path, str(tmp_path / "out"))
    assert sum(stage.done_before for stage in summary.stages) > 0
    wholes = sorted((tmp_path / "whole").glob("*.parquet"))
    parts = sorted((tmp_path / "out").glob("*.parquet"))
    assert [part.name for part in parts] == [whole.name for whole in wholes]
    assert all(w.read_bytes() == (tmp_path / "out" / w.name).read_bytes() for w in wholes)


@pytest.mark.usefixtures("inline")
def test_what_belongs_to_others_is_left_alone(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", repeated_rows(100))
    output = str(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        dedupe_on(path, output, heard=Stopping(1))
    with pytest.raises(UsageError, match=r"out\.work has an unfinished job with other columns"):
        dedupe_on(path, output, columns=["id"])
    with pytest.raises(UsageError, match=r"the input has no column 'missing'; it has id, text"):
        dedupe_on(path, output, columns=["missing"], restart=True)
    dedupe_on(path, output, columns=["id"], restart=True)
    with pytest.raises(UsageError, match="already exists"):
        dedupe_on(path, output)
    with pytest.raises(UsageError, match="folder of Parquet files"):
        dedupe_on(path, str(tmp_path / "out.jsonl"))
    with pytest.raises(UsageError, match="is not the work folder of a job"):
        dedupe_on(path, str(tmp_path / "new"), work=output)
    with pytest.raises(UsageError, match=r"contains the input .*part-00000\.parquet"):
        dedupe_on(output, output, overwrite=True)


@pytest.mark.parametrize("place", ["out/thesis.txt", "out.parts/.hidden", "out/.hidden"])
@pytest.mark.usefixtures("inline")
def test_a_folder_of_somebody_else_is_refused_whatever_the_options(
    tmp_path: Path, place: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", repeated_rows(100))
    (tmp_path / place).parent.mkdir()
    (tmp_path / place).write_text("years of work")
    for options in ({}, {"overwrite": True}, {"overwrite": True, "restart": True}):
        with pytest.raises(UsageError, match="remove it") as raised:
            dedupe_on(path, str(tmp_path / "out"), **options)
        assert "overwrite" not in str(raised.value)
    assert (tmp_path / place).read_text() == "years of work"


def stop_in_write(path: Path, output: Path, **options: Any) -> None:
    """Interrupts a job after its first written part."""

    def stop(stage: Stage, _: str) -> None:
        if stage.name == "write" and stage.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dedupe_on(path, str(output), heard=stop, **options)


@pytest.mark.usefixtures("inline")
def test_parts_that_were_removed_are_written_again(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", repeated_rows(2_000))
    stop_in_write(path, tmp_path / "out")
    assert list((tmp_path / "out.work/write").iterdir())
    shutil.rmtree(tmp_path / "out.parts")
    summary = dedupe_on(path, str(tmp_path / "out"))
    dedupe_files(path, tmp_path / "one.parquet")
    assert read_rows(tmp_path / "out") == read_rows(tmp_path / "one.parquet")
    assert summary.rows_out == len(read_rows(tmp_path / "out"))


@pytest.mark.usefixtures("inline")
def test_a_job_never_replaces_the_output_of_another(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", repeated_rows(2_000))
    out, first, second = tmp_path / "out", str(tmp_path / "first"), str(tmp_path / "second")
    out.mkdir()  # an empty folder is nobody's
    stop_in_write(path, out, work=first)
    stop_in_write(path, out, work=second)
    with pytest.raises(UsageError, match=r"out\.parts already exists"):
        dedupe_on(path, str(out), work=first)
    rows_out = dedupe_on(path, str(out), work=second).rows_out
    with pytest.raises(UsageError, match="already exists"):
        dedupe_on(path, str(out), work=first)
    assert len(read_rows(out)) == rows_out
    assert dedupe_on(path, str(out), work=first, overwrite=True).rows_out == rows_out
    assert len(read_rows(out)) == rows_out
    with Store(str(out)).locked(), pytest.raises(UsageError, match="another job is using"):
        dedupe_on(path, str(out), overwrite=True)


@pytest.mark.parametrize("change", ["remove", "add", "shorten"])
@pytest.mark.usefixtures("inline")
def test_an_output_is_compared_with_the_answers_before_it_gets_its_name(
    tmp_path: Path, change: str
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", repeated_rows(2_000))
    part = tmp_path / "out.parts/part-00000.parquet"

    def disturb(stage: Stage, _: str) -> None:
        if stage.name != "write" or not stage.done or not part.exists():
            return
        table = pq.read_table(part)
        if change == "remove":
            part.unlink()
        elif change == "add":
            pq.write_table(table, part.with_name("part-77777.parquet"))
        else:
            pq.write_table(table.slice(1), part)

    with pytest.raises(DataError, match=r"part-\d+\.parquet is not what its task wrote"):
        dedupe_on(path, str(tmp_path / "out"), heard=disturb)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("inline")
def test_a_job_that_was_stopped_after_the_rename_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", repeated_rows(2_000))
    remove = Store.remove

    def stop(store: Store, folder: str = "") -> None:
        if (tmp_path / "out").exists():
            raise KeyboardInterrupt
        remove(store, folder)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "remove", stop)
        with pytest.raises(KeyboardInterrupt):
            dedupe_on(path, str(tmp_path / "out"))
    rows_out = len(read_rows(tmp_path / "out"))
    assert dedupe_on(path, str(tmp_path / "out")).rows_out == rows_out
    assert not list(tmp_path.glob("out.*"))


@pytest.mark.usefixtures("inline")
def test_an_object_store_is_input_and_output(tmp_path: Path) -> None:
    rows, files = repeated_rows(600), fsspec.filesystem("memory")
    for part in range(3):
        files.pipe_file(f"/tables/in/{part}.jsonl", jsonl_bytes(rows[part * 200 :][:200]))
    dedupe_files(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "one.parquet")
    with pytest.raises(KeyboardInterrupt):
        dedupe_on("memory://tables/in", "memory://tables/out", heard=Stopping(4))
    with Store("memory://tables/out").locked(), pytest.raises(UsageError, match="another job"):
        dedupe_on("memory://tables/in", "memory://tables/out")
    files.pipe_file("/tables/out.lock", b"1700000000")  # of a job that was killed
    dedupe_on("memory://tables/in", "memory://tables/out")
    assert read_rows("memory://tables/out") == read_rows(tmp_path / "one.parquet")
    assert files.glob("/tables/out*") == ["/tables/out"]  # work folder and locks are gone
    assert files.exists("/tables/out/_SUCCESS")
    files.rm("/tables", recursive=True)


INTERRUPTED = """
import os, signal
from fast_axolotl.cli import main
from fast_axolotl.cluster import engines, job
def run_tasks(engine, url, tasks, retried):
    for done in engines.run_tasks(engine, url, tasks, retried):
        yield done
        if tasks[0].stage == "write":
            os.kill(os.getpid(), signal.SIGINT)
job.run_tasks = run_tasks
main()
"""


def test_the_command_prints_what_was_done_and_continues_after_an_interrupt(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", repeated_rows(50))

    def run(line: str, *program: str) -> subprocess.CompletedProcess[str]:
        return run_child(*(program or COMMAND), *line.split(), cwd=tmp_path)

    done = run("dedupe a.jsonl -o out --engine local", sys.executable, "-c", INTERRUPTED)
    assert done.returncode == 130, done.stderr
    assert "the same command continues" in done.stderr
    assert "Traceback" not in done.stderr
    done = run("dedupe a.jsonl -o out --engine local --json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["rows_out"] == len(read_rows(tmp_path / "out"))
    assert summary["tokens"] is None  # rows of data are none yet
    assert all(stage["done_before"] == stage["tasks"] for stage in summary["stages"])
    done = run("dedupe a.jsonl -o out.parquet --workers 2")
    assert (done.returncode, "need --engine" in done.stderr) == (2, True)


# The work folder of a job on an object store, and storage that fails for a while.


class Counted(MemoryFileSystem):
    """An object store that counts the bytes that leave it, and fails when it is told to."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    num_read = 0
    failures: ClassVar[list[Exception]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("counted:", "memory:")))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        if Counted.failures:
            raise Counted.failures.pop()
        data: bytes = super().cat_file(path, start, end, **more)
        Counted.num_read += len(data)
        return data


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    fsspec.register_implementation("counted", Counted, clobber=True)
    monkeypatch.setattr(remote, "pause", lambda _: None)
    Counted.store.clear()
    Counted.num_read = 0
    yield Store("counted://work")
    Counted.failures.clear()


@AGAINST_AXOLOTL[0]
def test_write_reads_of_an_object_store_what_it_writes(counted: Store) -> None:
    rng = np.random.default_rng(0)
    units, rows, pieces = 6, 2000, 40
    places = rng.permutation(units * rows).reshape(units, rows)
    for unit in range(units):
        table = pa.table(
            {"input_ids": list(rng.integers(0, 99999, (rows, 100))), "n": places[unit]}
        )
        file = pa.BufferOutputStream()
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, 1000)
        with counted.writing(f"tokens/{unit}.arrow") as path:
            path.write_bytes(file.getvalue())
        counted.write_array(f"places/{unit}", places[unit])
    counted.write_array("edges", np.linspace(0, units * rows, pieces + 1).astype(np.int64))
    counted.write_json("types.json", {"final": schema_text(table.schema)})
    counted.write_json("dealt.json", [str(unit) for unit in range(units)])
    for unit in range(units):
        deal(counted, unit=str(unit))
    Counted.num_read = num_bytes = 0
    numbers = []
    for shard in range(4):
        span = range(shard * pieces // 4, (shard + 1) * pieces // 4)
        done = write(counted, name=f"{shard}.arrow", pieces=span, target="counted://out")
        num_bytes += done["bytes_out"]
    assert Counted.num_read <= 1.3 * num_bytes
    for shard in range(4):
        data = Store("counted://out").read(f"{shard}.arrow")
        numbers += pa.ipc.open_stream(data).read_all()["n"].to_pylist()
    assert numbers == list(range(units * rows))


def test_two_who_run_one_job_in_an_object_store_make_the_same_digests(counted: Store) -> None:
    keys = []
    for name in "aab":
        output = job.Output(Store("counted://out"), counted, is_ours=True)
        with ExitStack() as held:
            output.claim(held, {"job": name}, restart=True)
        keys.append(output.secret)
    assert keys[0] == keys[1] != keys[2]


class HttpError(Exception):
    status = 503


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "stale"), TimeoutError(), HttpError()])
def test_errors_of_storage_that_may_pass_are_tried_again_and_then_on_another_node(
    counted: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    counted.write_json("a", 1)
    Counted.failures += [error] * 2
    assert counted.read_json("a") == 1
    monkeypatch.setattr(store, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(engines, "_MOMENT_SECONDS", 0.0)
    Counted.failures += [error] * 3
    kind, reason = engines._attempt(counted.url, task("read", name="a"))
    assert (kind, type(error).__name__ in reason, "Traceback" in reason) == ("lost", True, False)
    Counted.failures.clear()
    kind, told = engines._attempt(counted.url, task("fail", error=[errno.ENOSPC, "No space left"]))
    assert (kind, "No space left); free disk space" in str(told)) == ("meant", True)
    assert engines._attempt(counted.url, task("fail", error=["the hub is down"]))[0] == "lost"
    for refused in (PermissionError(errno.EACCES, "no"), FileNotFoundError("x")):
        Counted.failures += [refused] * 2
        with pytest.raises(type(refused)):
            counted.read_json("a")
        assert len(Counted.failures) == 1
        Counted.failures.clear()


def test_a_task_that_seems_to_hang_is_started_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_LATE_SECONDS", 0.5)
    monkeypatch.setattr(engines, "_MOMENT_SECONDS", 0.2)
    for workers in (1, 2):
        place, reasons = Store(str(tmp_path / str(workers))), list[str]()
        tasks = [*squares(2), task("hang", times=1), *squares(4)[2:]]
        engine = engines.Local(workers)
        answers = list(run_tasks(engine, place.url, tasks, reasons.append))
        assert len(answers) == len({done.name for done, _ in answers}) == 5
        assert [reason[:19] for reason in reasons] == ["it has not answered"]
        assert not engine._busy  # who hung is gone
        engine.close()
