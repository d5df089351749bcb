"""``bench hash``, ``dedupe``, ``pack`` and ``pad``: equal answers first, then figures."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fast_axolotl.bench import plain
from fast_axolotl.bench.answers import digest_columns
from fast_axolotl.bench.axolotl_worker import __file__ as axolotl_worker
from fast_axolotl.bench.contest import Contest, Entry, Session, run_contest
from fast_axolotl.bench.matrix import Goal, LeftOut, Machine, PeerTiming
from fast_axolotl.bench.operation_goals import (
    ARRAYS,
    HASHLIB,
    LISTS,
    OURS,
    PLAIN,
    PLAIN_TENSORS,
    growth_goal,
    operation_goals,
)
from fast_axolotl.bench.operation_result import (
    Measurement,
    OperationCase,
    OperationResult,
    WarmUp,
    losses,
    operation_tables,
)
from fast_axolotl.bench.operations import OPERATIONS, run_operation_bench
from fast_axolotl.bench.peaks import output_bytes
from fast_axolotl.bench.peer_process import PeerProcess
from fast_axolotl.bench.sizes import parse_sizes, size_name
from fast_axolotl.bench.tokens import token_contest
from fast_axolotl.bench.workloads import Sequences, json_rows, long_rows, token_rows
from fast_axolotl.errors import DataError, UsageError

pytestmark = pytest.mark.filterwarnings("default")
"""What the peers warn about is theirs."""

EARLIER_PACKAGE = """
    from hashlib import sha256

    __version__ = "0.0.test"

    def parallel_hash_rows(rows):
        return [sha256(row.encode()).hexdigest() for row in rows]

    def deduplicate_indices(rows):
        hashes = parallel_hash_rows(rows)
        firsts = {}
        for index, digest in enumerate(hashes):
            firsts.setdefault(digest, index)
        return list(firsts.values()), list(firsts)

    def pack_sequences(sequences, max_length, pad_token_id, eos_token_id):
        raise RuntimeError("cannot pack")

    def pad_sequences(sequences, target_length, pad_value):
        return [row + [pad_value + 1] * (target_length - len(row)) for row in sequences]
"""


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass a repeat, and no Axolotl, whose import takes longer than all tests here."""
    monkeypatch.setattr("fast_axolotl.bench.timing._LEAST_SECONDS", 0.0)
    monkeypatch.setattr("fast_axolotl.bench.operations.find_spec", lambda _: None)


@pytest.fixture(scope="module")
def earlier_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds a stand-in for the earlier package."""
    folder = tmp_path_factory.mktemp("earlier")
    (packages(folder) / "fast_axolotl.py").write_text(textwrap.dedent(EARLIER_PACKAGE))
    return folder / "bin" / "python"


def packages(folder: Path) -> Path:
    """The packages of a new environment."""
    venv.create(folder, with_pip=False)
    return next((folder / "lib").glob("python*/site-packages"))


def session(folder: Path) -> Session:
    return Session(
        folder=folder,
        repeats=1,
        earlier=LeftOut(name="earlier package", reason="not here"),
        axolotl=lambda: LeftOut(name="Axolotl", reason="not here"),
        progress=lambda _: None,
    )


def timing(name: str, *seconds: float, rows: int = 1000, **changes: Any) -> PeerTiming:
    fields: dict[str, Any] = {"version": None, "output": "list → list", "unbounded": None}
    fields |= {"equal": True, "reason": None}
    return PeerTiming(name=name, rows=rows, seconds=seconds, **{**fields, **changes})


@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_a_tiny_run_gives_equal_answers_and_survives_json(
    operation: str, tmp_path: Path, earlier_python: Path
) -> None:
    steps: list[str] = []
    result = run_operation_bench(
        operation,
        sizes=(300,),
        repeats=2,
        peer_python=str(earlier_python),
        work_dir=tmp_path / "work",
        progress=steps.append,
    )
    for case in result.cases:
        ours = [item for item in case.timings if item.name.startswith(OURS)]
        assert all(item.equal for item in ours)
        assert {len(item.seconds) for item in case.timings} <= {2}
        assert [item.name for item in case.timings if not item.equal] in ([], ["earlier package"])
        assert [item.reason for item in case.measurements if item.reason] == []
    assert OperationResult.from_json(result.to_json()) == result
    assert list((tmp_path / "work").iterdir()) == []
    assert str(tmp_path) not in json.dumps(result.to_json())
    assert result.machine.versions["earlier package"] == "0.0.test"
    assert any(step.endswith("repeat 2 of 2") for step in steps)
    assert all(seconds >= 0 for seconds in result.warm_up.compile_seconds.values())
    assert operation_tables(result)[-1].title == f"{operation}: goals"


def test_an_earlier_package_that_fails_or_answers_otherwise_is_named(
    tmp_path: Path, earlier_python: Path
) -> None:
    settings: Any = {"sizes": (200,), "repeats": 1, "peer_python": str(earlier_python)}
    packed = run_operation_bench("pack", **settings, work_dir=tmp_path).cases[0]
    assert LeftOut(name="earlier package", reason="RuntimeError: cannot pack") in packed.left_out
    result = run_operation_bench("pad", **settings, work_dir=tmp_path)
    found = result.cases[0].timing("earlier package")
    assert found is not None
    assert not found.equal
    assert found.reason == "column rows differs after its first row"
    notes = operation_tables(result)[0].notes
    assert "earlier package: another answer: column rows differs after its first row" in notes


def test_a_wrong_contestant_is_caught_and_still_timed(tmp_path: Path) -> None:
    def entry(name: str, answer: list[int], **changes: Any) -> Entry:
        return Entry(
            name=name,
            gives="nothing → list",
            rows=3,
            prepare=lambda: lambda: answer,
            columns=lambda found: {"value": found},
            **changes,
        )

    entries = (
        entry(OURS, [1, 2, 3]),
        entry("right", [1, 2, 3], rival=OURS),
        entry("short", [1, 2], rival=OURS),
        entry("wrong", [1, 2, 4], rival=OURS),
        replace(entry("absent", []), prepare=lambda: __import__("no_such_package")),
    )
    contest = Contest(name="case", text="three", rows=3, unit="rows", entries=entries)
    case = run_contest(contest, session(tmp_path))
    assert [(item.name, item.reason) for item in case.timings] == [
        (OURS, None),
        ("right", None),
        ("short", "column value begins 2: 1 in place of 3: 1"),
        ("wrong", "column value differs after its first row"),
    ]
    assert case.left_out == (LeftOut(name="absent", reason="not installed: no_such_package"),)
    assert case.rivals == {"right": OURS, "short": OURS, "wrong": OURS}


def test_peers_that_are_not_installed_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "polars", "duckdb"):
        monkeypatch.setitem(sys.modules, name, None)
    reasons: dict[str, str] = {}
    for operation in ("dedupe", "pad"):
        result = run_operation_bench(operation, sizes=(100,), repeats=1, work_dir=tmp_path)
        reasons |= {item.name: item.reason for case in result.cases for item in case.left_out}
        notes = operation_tables(result)[-1].notes
        assert any("earlier package: left out" in note for note in notes)
    assert reasons == {
        "Axolotl": "not installed: axolotl",
        "DuckDB DISTINCT, any order": "not installed: duckdb",
        "DuckDB, in order": "not installed: duckdb",
        "Polars": "not installed: polars",
        "earlier package": "no interpreter of its environment was given",
        "fast-axolotl torch": "not installed: torch",
        PLAIN_TENSORS: "not installed: torch",
    }


def test_above_so_many_sequences_lists_are_timed_on_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fast_axolotl.bench.packing import pack_operation

    monkeypatch.setattr("fast_axolotl.bench.tokens.FEW_LISTS", 20)
    operation = replace(pack_operation(), most_lists=50)
    case = run_contest(token_contest(operation, 60, session(tmp_path)), session(tmp_path))
    assert all(item.equal for item in case.timings)
    rows = {item.name: item.rows for item in case.timings}
    assert (rows[ARRAYS], rows[LISTS], rows[PLAIN]) == (60, 20, 20)
    arrays = case.timing(ARRAYS)
    assert arrays is not None
    assert arrays.output == "arrays → int32"


def test_axolotl_is_asked_in_a_process_that_has_not_seen_our_package(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = packages(tmp_path / "env")
    for path, text in {
        "here.pth": str(Path(np.__file__).parents[1]),
        "axolotl-7.7.dist-info/METADATA": "Metadata-Version: 2.1\nName: axolotl\nVersion: 7.7\n",
        "axolotl/__init__.py": "",
        "axolotl/utils/data/utils.py": """
            import sys
            assert "fast_axolotl" not in sys.modules

            def _deduplicate_dataset(dataset):
                return dataset.select([0, 2]), set()
        """,
        "axolotl/utils/samplers/multipack.py": """
            def pack_parallel(lengths, bin_capacity, group_size, bin_size):
                return [[0], [1, 2]]
        """,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(textwrap.dedent(text))
    rows = tmp_path / "rows.arrow"
    table = pa.table({"a": [1, 1, 2]})
    with pa.ipc.new_file(rows, table.schema) as writer:
        writer.write_table(table)
    np.save(tmp_path / "lengths.npy", np.array([1, 2, 3]))
    settings = {"bin_capacity": 5, "group_size": 10, "bin_size": 2}
    python = str(tmp_path / "env" / "bin" / "python")
    with PeerProcess(python, Path(axolotl_worker), tmp_path) as peer:
        assert peer.version == "7.7"
        peer.ask(task="load", operation="deduplicate", path=str(rows), settings={})
        assert peer.ask(task="answer")["first"] == {"index": "2: 0"}
        path = str(tmp_path / "lengths.npy")
        peer.ask(task="load", operation="pack_parallel", path=path, settings=settings)
        digests, first = digest_columns({"packs": [[0], [1, 2]]})
        assert peer.ask(task="answer") == {"columns": digests, "first": first}
        assert peer.ask(task="seconds")["seconds"] >= 0


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("10k,100k,1M,10M", (10_000, 100_000, 1_000_000, 10_000_000)),
        ("2500", (2500,)),
        (" 1m , 1.5k,1500 ", (1500, 1_000_000)),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", ",", "10x", "k", "-5", "0", "1.5", "1kM", "nan", "inf"])
def test_a_size_that_is_none_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        parse_sizes(text)


def test_a_size_is_named_in_short() -> None:
    names = [size_name(size) for size in (7, 2500, 10_000, 1_000_000, 1_200_000)]
    assert names == ["7", "2500", "10k", "1M", "1200k"]


def test_a_digest_does_not_depend_on_what_holds_the_values() -> None:
    rows = [[1, 2, 3], [4, 5, 6]]
    expected = digest_columns({"a": rows})
    for dtype in ("int64", "int32", "uint8"):
        assert digest_columns({"a": np.array(rows, dtype)}) == expected
    assert digest_columns({"a": iter(rows)}) == expected
    assert digest_columns({"a": [5, 6]}) == digest_columns({"a": np.array([5, 6])})
    assert digest_columns({"a": []}) == digest_columns({"a": np.empty((0, 3))})
    assert digest_columns({"a": (text for text in "xy")}) == digest_columns({"a": ["x", "y"]})
    torch = pytest.importorskip("torch")
    assert digest_columns({"a": torch.tensor(rows)}) == expected


@pytest.mark.parametrize("other", [[[1, 2], [3]], [[1], [2, 3], []], [[1], [2, 4]], [[1]], []])
def test_other_values_or_other_rows_have_other_digests(other: list[list[int]]) -> None:
    ours, _ = digest_columns({"a": [[1], [2, 3]]})
    theirs, _ = digest_columns({"a": other})
    assert ours != theirs


def test_inputs_are_those_of_the_earlier_benchmark_and_always_the_same() -> None:
    assert json.loads(json_rows(3)[2]) == {"id": 2, "text": "Sample text content 2", "value": 3.0}
    assert {len(row) for row in long_rows(20)} == {4096}
    sequences = Sequences(500, 10, 100)
    lists = sequences.lists(500)
    lengths = {len(row) for row in lists}
    assert (min(lengths), max(lengths)) == (10, 100)
    assert max(map(max, lists)) < 30_000
    assert Sequences(500, 10, 100).lists(7) == lists[:7]
    table = token_rows(200)
    assert table.num_rows == 200
    assert len(plain.unique_rows(table)) <= 160


def test_plain_python_packs_in_order_and_pads() -> None:
    packed = plain.pack([[5, 6], [7], [8, 9, 10]], 6, 0, 2)
    assert packed == {
        "input_ids": [[5, 6, 2, 0, 0, 0], [7, 2, 0, 0, 0, 0], [8, 9, 10, 2, 0, 0]],
        "labels": [[5, 6, 2, *[-100] * 3], [7, 2, *[-100] * 4], [8, 9, 10, 2, -100, -100]],
        "attention_mask": [[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]],
    }
    assert plain.first_fit([3, 4, 2, 1], 5, 2) == [[0, 2], [1, 3]]


def test_goals_are_set_where_they_were_set() -> None:
    timings = [timing(LISTS, 1.0), timing(HASHLIB, 3.0)]
    assert operation_goals("hash", 10_000, timings) == []
    over_loop, over_earlier = operation_goals("hash", 100_000, timings)
    assert (over_loop.measured, over_loop.met) == (3.0, True)
    assert (over_earlier.measured, over_earlier.detail) == (None, "earlier package took no part")
    small = OperationCase(
        name="a", text="", rows=1, unit="lengths", timings=(timing(OURS, 1.0, rows=1),)
    )
    large = replace(small, name="b", rows=10, timings=(timing(OURS, 16.0, rows=10),))
    goal = growth_goal(small, large)
    assert (goal.measured, goal.target, goal.met) == (16.0, 15.0, False)


def test_what_an_answer_takes_is_counted_without_shared_integers() -> None:
    assert output_bytes(np.zeros((3, 4), np.int32)) == 48
    assert output_bytes({"a": np.zeros(2), "b": np.zeros(3)}) == 40
    rows = [[1, 2], [3]]
    assert output_bytes(rows) == sum(map(sys.getsizeof, (rows, *rows)))


@pytest.fixture
def result() -> OperationResult:
    """A result with something of everything, all figures made up."""
    timings = (
        timing(LISTS, 0.2, 0.1, 0.3),
        timing("fast-axolotl Arrow", 0.00005, output="Arrow → Arrow"),
        timing(HASHLIB, 0.1, rows=250),
        timing("earlier package", 0.1, equal=False, reason="column hash begins x in place of y"),
    )
    memory = Measurement(
        name=LISTS, values={"peak_bytes": 3_000_000, "output_bytes": 2_000_000, "share": 1.5}
    )
    goal = Goal(text="x over y", target=2, at_least=True, unit="×", measured=1.5, detail=None)
    methods = (
        Measurement(
            name="first_fit",
            seconds=(0.5, 0.7, 0.6),
            values={"packs": 1234, "efficiency": 0.98765, "equal": True},
        ),
        Measurement(name="other", values={"packs": None}, reason="not run"),
    )
    return OperationResult(
        title="hash",
        date="2030-01-02T03:04:05+00:00",
        command="fast-axolotl bench hash --sizes 1k --repeats 3",
        machine=Machine(
            cpu="A Processor",
            cores=2,
            memory_bytes=None,
            system="Linux 6 x86_64",
            python="3.11.0",
            versions={"pyarrow": "26.0"},
            load_average=None,
        ),
        notes=("equal first",),
        warm_up=WarmUp(import_seconds=0.25, compile_seconds={"a.b": 1.0, "a.c": 0.5}),
        cases=(
            OperationCase(
                name="hash-1k",
                text="1,000 rows",
                rows=1000,
                unit="rows",
                timings=timings,
                rivals={HASHLIB: LISTS, "earlier package": LISTS},
                measurements=(memory,),
                goals=(goal,),
                left_out=(LeftOut(name="torch", reason="not installed: torch"),),
            ),
            OperationCase(
                name="methods", text="lengths", rows=5, unit="lengths", measurements=methods
            ),
        ),
    )


def test_a_loss_is_told() -> None:
    case = OperationCase(
        name="case",
        text="",
        rows=1000,
        unit="rows",
        timings=(timing(LISTS, 2.0), timing("quick", 1.0), timing("slow", 4.0)),
        rivals={"quick": LISTS, "slow": LISTS, "absent": LISTS},
    )
    assert losses(case) == ["case: fast-axolotl lists loses to quick: 0.50×"]


def test_a_result_is_saved_once_and_read_back(tmp_path: Path, result: OperationResult) -> None:
    path = tmp_path / "new" / "result.json"
    result.save(path)
    assert OperationResult.from_json(json.loads(path.read_text(encoding="utf-8"))) == result
    with pytest.raises(UsageError, match="there already"):
        result.save(path)
    with pytest.raises(DataError, match="schema 99"):
        OperationResult.from_json({**result.to_json(), "schema_version": 99})


def test_tables_golden(result: OperationResult) -> None:
    lines = []
    for table in operation_tables(result):
        lines += [f"# {table.title}", " | ".join(table.header)]
        lines += [" | ".join(row).rstrip(" |") for row in table.rows]
        lines += [f"- {note}" for note in table.notes]
    assert lines == textwrap.dedent(TABLES_GOLDEN).strip().splitlines()


TABLES_GOLDEN = """
    # hash: hash-1k: 1,000 rows
     | takes → gives | median | min – max | rows/s | ours, lists | ours, Arrow | equal
    fast-axolotl lists | list → list | 200.0 ms | 100.0 ms – 300.0 ms | 5,000 | 1.00× | 4,000× | yes
    fast-axolotl Arrow | Arrow → Arrow | 50 µs | 50 µs – 50 µs | 20,000,000 | 0.00× | 1.00× | yes
    hashlib loop | list → list | 100.0 ms | 100.0 ms – 100.0 ms | 2,500 | 2.00× | 8,000× | yes
    earlier package | list → list | 100.0 ms | 100.0 ms – 100.0 ms | 10,000 | 0.50× | 2,000× | no
    - earlier package: another answer: column hash begins x in place of y
    - timed on the first 250 rows, compared by rows/s: hashlib loop
    # hash: hash-1k: memory
     | peak | output | share
    fast-axolotl lists | 3.0 MB | 2.0 MB | 1.50
    # hash: methods: lengths
     | median | packs | efficiency | equal
    first_fit | 600.0 ms | 1,234 | 98.77% | yes
    other | – | – | – | –
    - other: not run
    # hash: goals
    goal | target | measured | met | decided by
    hash-1k: x over y | ≥ 2.00× | 1.50× | no
    - 0 of 1 goals met
    - hash-1k: fast-axolotl lists loses to earlier package: 0.50×
    - torch: left out of hash-1k: not installed: torch
    - before the first call, timed apart: imports 250.0 ms, 2 kernels compiled or loaded in 1.50 s
    - equal first
    - 2 × A Processor, Linux 6 x86_64
    - Python 3.11.0, pyarrow 26.0
    - 2030-01-02T03:04:05+00:00: fast-axolotl bench hash --sizes 1k --repeats 3
"""


def invoke(*arguments: str) -> None:
    from typer import main as typer_main  # some versions warn when they are imported

    from fast_axolotl.cli.bench import bench_app

    typer_main.get_command(bench_app)(list(arguments), standalone_mode=False)


@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_the_command_prints_json_and_writes_the_same(
    operation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    arguments = [operation, "--sizes", "100", "--repeats", "1", "--work-dir", str(tmp_path)]
    invoke(*arguments, "--json", "-o", str(path))
    printed = capsys.readouterr()
    found = OperationResult.from_json(json.loads(printed.out))
    assert found == OperationResult.from_json(json.loads(path.read_text(encoding="utf-8")))
    assert found.command == f"fast-axolotl bench {operation} --sizes 100 --repeats 1"
    assert "compiling kernels" in printed.err
    with pytest.raises(UsageError, match="there already"):
        invoke(*arguments, "-o", str(path))
    assert capsys.readouterr().err == "", "refused before anything is run"


def test_the_command_prints_tables_and_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invoke("hash", "--sizes", "100", "--repeats", "1", "--work-dir", str(tmp_path))
    printed = capsys.readouterr().out
    for text in (
        "hash: hash-100: 100 rows of about 70 bytes",
        "hash: hash-4kb-2: 2 rows of 4 KB",
        "hashlib loop",
        "earlier package: left out of hash-100, hash-4kb-2: no interpreter",
    ):
        assert text in printed


def test_a_wrong_size_is_one_line_and_exit_code_2() -> None:
    command = [sys.executable, "-m", "fast_axolotl", "bench", "pack", "--sizes", "10x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("fast-axolotl: cannot read '10x' as a size; write")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [*OPERATIONS, "reader", "demo"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    invoke(command, "--help")
    printed = capsys.readouterr().out
    assert "Examples" in printed
    assert f"fast-axolotl bench {command}" in printed


def test_an_unknown_operation_and_no_repeats_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="no operation is called 'sort'"):
        run_operation_bench("sort", sizes=(1,))
    with pytest.raises(UsageError, match="at least 1"):
        run_operation_bench("hash", sizes=(1,), repeats=0)
