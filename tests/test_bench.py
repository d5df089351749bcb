"""The benchmarks run, compare rows before they time, and keep what they measured."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import venv
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fast_axolotl.bench.corpus import WRITERS, write_inputs
from fast_axolotl.bench.demo import demo_tables, run_demo
from fast_axolotl.bench.earlier import EarlierPackage, PeerError
from fast_axolotl.bench.fingerprint import difference, fingerprint
from fast_axolotl.bench.goals import memory_goals, timing_goals
from fast_axolotl.bench.matrix import (
    OURS_ARROW,
    OURS_PYTHON,
    BenchResult,
    CaseResult,
    Goal,
    LeftOut,
    Machine,
    MemoryRun,
    PeerTiming,
    matrix_rows,
)
from fast_axolotl.bench.peers import OURS, Peer
from fast_axolotl.bench.reader import TimedCase, run_reader_bench, run_timed_case
from fast_axolotl.errors import DataError, UsageError

pytestmark = pytest.mark.filterwarnings("default")
"""What the peers warn about is theirs."""

EARLIER_PACKAGE = """
    import json

    __version__ = "0.0.test"

    def streaming_dataset_reader(path, kind, batch_size, num_threads):
        print("noise on stdout")
        if kind != "jsonl":
            raise RuntimeError(f"cannot read {kind} in {path}")
        rows = [json.loads(line) for line in open(path, encoding="utf-8")]
        for start in range(0, len(rows), 7):
            part = rows[start : start + 7]
            yield {name: [row[name] for row in part] for name in reversed(part[0])}
"""


def timing(name: str, *seconds: float, **changes: Any) -> PeerTiming:
    fields = {
        "version": None,
        "output": "arrow",
        "rows": 1000,
        "equal": True,
        "reason": None,
        "unbounded": None,
    }
    return PeerTiming(name=name, seconds=seconds, **{**fields, **changes})


def memory_run(file: str, above: int, first: float) -> MemoryRun:
    return MemoryRun(
        file=file,
        num_bytes=2_000_000_000,
        name=OURS_ARROW,
        rows=10,
        seconds=2.5,
        first_batch_seconds=first,
        import_seconds=0.25,
        baseline_bytes=30_000_000,
        peak_bytes=30_000_000 + above,
    )


@pytest.fixture
def result() -> BenchResult:
    """A result with something of everything, all figures made up."""
    timings = (
        timing(OURS_ARROW, 0.1, 0.3, 0.2),
        timing(OURS_PYTHON, 0.4, output="python"),
        timing("earlier package", 1.5, output="python", equal=False, reason="999 of 1,000 rows"),
        timing("HF streaming", 1.0, output="rows", rows=10, version="4.0"),
        timing("pyarrow", 0.1, unbounded="keeps everything"),
        timing("nothing read", 0.001, rows=0, equal=False, reason="0 of 1,000 rows"),
    )
    runs = (memory_run("small", 100_000_000, 0.1), memory_run("large", 110_000_000, 0.6))
    return BenchResult(
        title="reader",
        date="2030-01-02T03:04:05+00:00",
        command="fast-axolotl bench reader --repeats 3 --scale 1",
        machine=Machine(
            cpu="A Processor",
            cores=2,
            memory_bytes=8_000_000_000,
            system="Linux 6 x86_64",
            python="3.11.0",
            versions={"pyarrow": "26.0"},
            load_average=0.5,
        ),
        notes=("the page cache is warm",),
        cases=(
            CaseResult(
                name="messages-parquet",
                rows=1000,
                num_bytes=2_000_000,
                timings=timings,
                goals=tuple(timing_goals("messages-parquet", timings)),
                left_out=(LeftOut(name="DuckDB", reason="not installed: duckdb"),),
            ),
            CaseResult(
                name="memory-jsonl",
                rows=10,
                num_bytes=2_000_000_000,
                memory=runs,
                goals=tuple(memory_goals(runs)),
            ),
        ),
    )


def test_a_small_run_gives_equal_rows_with_every_peer_that_is_installed(tmp_path: Path) -> None:
    names = ("messages-jsonl", "messages-parquet")
    python = environment_with_earlier_package(tmp_path / "env")
    steps: list[str] = []
    result = run_reader_bench(
        cases=names,
        repeats=2,
        scale=0.001,
        peer_python=str(python),
        work_dir=tmp_path / "work",
        progress=steps.append,
    )
    assert {case.name for case in result.cases} == set(names)
    for case in result.cases:
        assert [item.name for item in case.timings[:2]] == [OURS_ARROW, OURS_PYTHON]
        assert "pyarrow" in {item.name for item in case.timings}
        assert [item for item in case.timings if not item.equal] == []
        assert {len(item.seconds) for item in case.timings} == {2}
        assert case.rows == 200
    parquet, jsonl = result.cases
    found = jsonl.timing("earlier package")
    assert found is not None
    assert found.version == "0.0.test"
    reasons = {item.name: item.reason for item in parquet.left_out}
    assert reasons["earlier package"] == "RuntimeError: cannot read parquet in messages.parquet"
    assert "messages-jsonl: repeat 2 of 2" in steps
    assert list((tmp_path / "work").iterdir()) == []
    assert BenchResult.from_json(result.to_json()) == result
    assert str(tmp_path) not in json.dumps(result.to_json())


def test_the_demo_reads_five_formats_and_does_four_jobs_with_equal_answers(
    tmp_path: Path,
) -> None:
    result = run_demo(tmp_path, rows=200, repeats=1, job_scale=0.01)
    formats = ["parquet", "jsonl", "csv", "arrow", "text"]
    assert [case.name for case in result.reader.cases] == formats
    assert [case.name for case in result.jobs.cases] == ["sample-parquet", "pack", "pad", "hash"]
    for cases in (result.reader.cases, result.jobs.cases):
        assert all(item.equal for case in cases for item in case.timings)
    assert list(tmp_path.iterdir()) == []
    assert result.to_json()["jobs"]["title"] == "demo"


def test_the_demo_shows_the_four_jobs_beside_the_published_ratios(tmp_path: Path) -> None:
    table = demo_tables(run_demo(tmp_path, rows=200, repeats=1, job_scale=0.01))[-1]
    assert [(row[0], row[-1]) for row in table.rows] == [
        ("stream 500 rows of Parquet", "77.26×"),
        ("pack 100 sequences into 512", "0.42×"),
        ("hash 1,000 rows", "1.90×"),
        ("pad 100 sequences to 256", "0.53×"),
    ]
    assert all("–" not in row for row in table.rows)
    assert any(note.startswith("earlier package: left out") for note in table.notes)
    assert any("kernels compiled or loaded" in note for note in table.notes)


def test_an_environment_without_the_earlier_package_says_so(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="is the package installed there"):
        EarlierPackage(str(environment(tmp_path / "env")), tmp_path)
    with pytest.raises(PeerError, match="its interpreter cannot be started"):
        EarlierPackage(str(tmp_path / "no-python"), tmp_path)


def test_a_peer_that_fails_is_left_out_and_one_that_differs_is_marked(tmp_path: Path) -> None:
    path = write_inputs(tmp_path, ["messages.txt"], 100)["messages.txt"]

    def broken(_: Path) -> Any:
        raise ModuleNotFoundError("No module named 'a'", name="a")

    def fails(_: Path) -> Any:
        return lambda: 1 / 0

    def short(_: Path) -> Any:
        return lambda: iter([{"text": "only one"}])

    peers = [
        Peer(name=name, package=None, output="rows", formats={"text": prepare})
        for name, prepare in (("broken", broken), ("fails", fails), ("short", short))
    ]
    case = TimedCase(name="text", file=path.name, format="text")
    result = run_timed_case(case, path, peers, (), 1, lambda _: None)
    assert [(item.name, item.reason) for item in result.left_out] == [
        ("broken", "not installed: a"),
        ("fails", "ZeroDivisionError: division by zero"),
    ]
    found = result.timing("short")
    assert found is not None
    assert (found.equal, found.reason, found.rows) == (False, "1 of 100 rows", 1)


def test_every_input_holds_the_same_conversations(tmp_path: Path) -> None:
    paths = write_inputs(tmp_path, list(WRITERS), 150)
    read = {name: OURS[0].formats["parquet"](path) for name, path in paths.items()}
    found = {name: fingerprint(run(), "arrow") for name, run in read.items()}
    nested = {
        name: item.digest for name, item in found.items() if not name.endswith(("csv", "txt"))
    }
    assert len(nested) == 7
    assert len(set(nested.values())) == 1
    assert {item.rows for item in found.values()} == {150}


def test_an_unknown_case_and_a_wrong_scale_are_usage_errors(tmp_path: Path) -> None:
    settings = {"peer_python": None, "work_dir": tmp_path, "progress": None}
    with pytest.raises(UsageError, match="no case is called 'other'"):
        run_reader_bench(cases=("other",), repeats=1, scale=1, **settings)
    with pytest.raises(UsageError, match="scale"):
        run_reader_bench(cases=(), repeats=1, scale=0, **settings)


def test_a_fingerprint_does_not_depend_on_batches_or_kind() -> None:
    rows = [{"a": index, "b": [{"c": str(index), "d": None}]} for index in range(10)]
    columns = {"b": [row["b"] for row in rows], "a": [row["a"] for row in rows]}
    table = pa.Table.from_pylist(rows)
    expected = fingerprint(rows, "rows")
    assert expected.digest == fingerprint([columns], "python").digest
    for size in (1, 3, 10):
        batches = table.to_batches(max_chunksize=size)
        assert fingerprint(batches, "arrow").digest == expected.digest
        first = fingerprint(batches, "arrow", limit=4)
        assert first.digest == fingerprint(rows[:4], "rows").digest
    assert difference(expected, fingerprint(rows, "rows")) is None


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([{"a": 1}], "1 of 2 rows"),
        ([{"b": 1}, {"b": 2}], "columns ['b'] in place of ['a']"),
        ([{"a": 2}, {"a": 1}], "column a begins 2 in place of 1"),
        ([{"a": 1}, {"a": 2.0}], "column a differs after its first row"),
    ],
)
def test_a_difference_is_named(rows: list[dict[str, Any]], text: str) -> None:
    ours = fingerprint([{"a": 1}, {"a": 2}], "rows")
    assert difference(ours, fingerprint(rows, "rows")) == text


def test_the_fastest_rival_gives_equal_rows_in_bounded_memory() -> None:
    timings = [
        timing(OURS_ARROW, 1.0),
        timing("pyarrow", 0.1, unbounded="keeps everything"),
        timing("Polars", 0.2, equal=False, reason="other rows"),
        timing("DuckDB", 0.9),
        timing("pyarrow pages", 0.5),
    ]
    goal = timing_goals("messages-text", timings)[-1]
    assert (goal.measured, goal.met, goal.detail) == (0.5, False, "pyarrow pages")
    goal = timing_goals("messages-text", timings[:3])[-1]
    assert (goal.measured, goal.met, goal.detail) == (None, None, "none took part")


def test_a_result_survives_being_saved_and_is_not_overwritten(
    tmp_path: Path, result: BenchResult
) -> None:
    path = tmp_path / "new" / "result.json"
    result.save(path)
    assert BenchResult.from_json(json.loads(path.read_text(encoding="utf-8"))) == result
    with pytest.raises(UsageError, match="there already"):
        result.save(path)
    with pytest.raises(DataError, match="schema 99"):
        BenchResult.from_json({**result.to_json(), "schema_version": 99})


def test_a_goal_without_a_figure_is_neither_met_nor_missed() -> None:
    goal = Goal(text="x", target=1, at_least=True, unit="×", measured=None, detail="no peer")
    assert goal.met is None


def test_the_memory_worker_prints_its_figures(tmp_path: Path) -> None:
    path = write_inputs(tmp_path, ["messages.parquet"], 300)["messages.parquet"]
    module = "fast_axolotl.bench.memory_worker"
    command = [sys.executable, "-m", module, OURS_ARROW, "parquet", str(path)]
    figures = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert figures["rows"] == 300
    assert figures["peak_bytes"] >= figures["baseline_bytes"] > 0
    assert figures["seconds"] >= figures["first_batch_seconds"] > 0


def test_matrix_golden(result: BenchResult) -> None:
    lines = []
    for table in matrix_rows(result):
        lines += [f"# {table.title}", " | ".join(table.header)]
        lines += [" | ".join(row).rstrip(" |") for row in table.rows]
        lines += [f"- {note}" for note in table.notes]
    assert lines == textwrap.dedent(MATRIX_GOLDEN).strip().splitlines()


MATRIX_GOLDEN = """
    # reader
    reader | gives | median | min – max | rows/s | MB/s | ours arrow | ours python | same rows
    messages-parquet: 1,000 rows, 2.0 MB
      fast-axolotl arrow | arrow | 200.0 ms | 100.0 ms – 300.0 ms | 5,000 | 10 | 1.00× | 0.50× | yes
      fast-axolotl python | python | 400.0 ms | 400.0 ms – 400.0 ms | 2,500 | 5 | 2.00× | 1.00× | yes
      earlier package | python | 1.50 s | 1.50 s – 1.50 s | 667 | 1 | 7.50× | 3.75× | no
      HF streaming | rows | 1.00 s | 1.00 s – 1.00 s | 10 | 0 | 500× | 250× | yes
      pyarrow | arrow | 100.0 ms | 100.0 ms – 100.0 ms | 10,000 | 20 | 0.50× | 0.25× | yes
      nothing read | arrow | 1.0 ms | 1.0 ms – 1.0 ms | 0 | 0 | – | – | no
    - messages-parquet, earlier package: other rows: 999 of 1,000 rows
    - messages-parquet, HF streaming: timed on its first 10 rows
    - messages-parquet, pyarrow: unbounded memory: keeps everything
    - messages-parquet, nothing read: other rows: 0 of 1,000 rows
    - messages-parquet, DuckDB: left out: not installed: duckdb
    - the page cache is warm
    - 2 × A Processor, Linux 6 x86_64
    - Python 3.11.0, pyarrow 26.0
    - 2030-01-02T03:04:05+00:00: fast-axolotl bench reader --repeats 3 --scale 1
    # reader: memory
    reader | file | time | peak above start | first batch | with imports
    memory-jsonl
      fast-axolotl arrow | small, 2,000 MB | 2.50 s | 100 MB | 100.0 ms | 350.0 ms
      fast-axolotl arrow | large, 2,000 MB | 2.50 s | 110 MB | 600.0 ms | 850.0 ms
    # reader: goals
    goal | target | measured | met | decided by
    messages-parquet: fast-axolotl arrow over earlier package | ≥ 4.00× | 7.50× | yes | its rows differ
    messages-parquet: fast-axolotl arrow over HF streaming | ≥ 25.0× | 500× | yes
    messages-parquet: fast-axolotl arrow over the fastest in bounded memory | ≥ 0.80× | – | – | none took part
    memory-jsonl: memory above the start, small | ≤ 368 MB | 100 MB | yes
    memory-jsonl: first batch, small | ≤ 0.50 s | 0.10 s | yes
    memory-jsonl: memory above the start, large | ≤ 368 MB | 110 MB | yes
    memory-jsonl: first batch, large | ≤ 0.50 s | 0.60 s | no
    memory-jsonl: memory, large file against small | ≤ 15.0 % | 10.0 % | yes
    - 6 of 8 goals met
"""  # noqa: E501


def environment(folder: Path) -> Path:
    """A Python environment with nothing in it; gives its interpreter."""
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def environment_with_earlier_package(folder: Path) -> Path:
    python = environment(folder)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "fast_axolotl.py").write_text(textwrap.dedent(EARLIER_PACKAGE))
    return python
