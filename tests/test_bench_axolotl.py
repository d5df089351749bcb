"""``bench axolotl``: inputs that never change, equal results first, then figures."""

from __future__ import annotations

import itertools
import json
import random
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl.bench import axolotl_inputs, axolotl_streaming
from fast_axolotl.bench.axolotl_bench import CASES, run_axolotl_bench
from fast_axolotl.bench.axolotl_driver import COMPILING, IMPORTS, Ledger
from fast_axolotl.bench.axolotl_functions import answer_difference
from fast_axolotl.bench.axolotl_goals import losses_goal, ratio_goals
from fast_axolotl.bench.axolotl_memory import Sample, TreeMemory
from fast_axolotl.bench.axolotl_prepared import (
    batches_difference,
    logged_losses,
    losses_difference,
    prepared_difference,
)
from fast_axolotl.bench.axolotl_result import ANSWERED, COLD, FUNCTION, axolotl_tables
from fast_axolotl.bench.axolotl_runs import OURS, STOCK, Run, RunError, Runner, by_turns, last_line
from fast_axolotl.bench.matrix import Machine, PeerTiming
from fast_axolotl.bench.operation_result import (
    Measurement,
    OperationCase,
    OperationResult,
    WarmUp,
)
from fast_axolotl.errors import MissingExtraError, UsageError
from support.axolotl import AGAINST_AXOLOTL

FAKE_AXOLOTL = {
    "__init__": "",
    "cli/config": "load_cfg = lambda path: path",
    "cli/main": """
        import sys
        from axolotl.utils.data import sft
        import late

        if __name__ == "__main__":
            sft.save_preprocessed_dataset()
            sys.exit(int(open(sys.argv[2]).read()))
    """,
    "common/datasets": "",
    "utils/data/rl": "",
    "utils/data/sft": """
        import time
        def save_preprocessed_dataset():
            time.sleep(0.05)
    """,
}
"""As little of Axolotl as the watcher needs."""


def ledger(**changes: Any) -> dict[str, Any]:
    marks = {
        "loaded": {IMPORTS: 4.0, "rest": 1.0},
        "end": {IMPORTS: 5.0, COMPILING: 2.0, "rest": 9.0},
    }
    empty: dict[str, Any] = {"started": 100.0, "waits": [], "batches": [], "patches": []}
    return {**empty, "seconds": marks["end"], "marks": marks, **changes}


def a_run(folder: Path, *ledgers: dict[str, Any], arm: str = STOCK, **changes: Any) -> Run:
    return Run(arm=arm, folder=folder, wall_seconds=20.0, ledgers=ledgers or [ledger()], **changes)


def timing(name: str, *seconds: float, reason: str | None = None) -> PeerTiming:
    return PeerTiming(
        name=name,
        version=None,
        output="JSON lines → prepared",
        rows=1000,
        seconds=seconds,
        equal=reason is None,
        reason=reason,
        unbounded=None,
    )


def test_rows_are_the_same_every_time_and_a_fifth_repeats(tmp_path: Path) -> None:
    for kind in axolotl_inputs.DATASETS:
        paths = [tmp_path / f"{kind}-{number}.jsonl" for number in (1, 2)]
        first, second = (axolotl_inputs.write_rows(kind, path, 500).read_text() for path in paths)
        assert first == second
        lines = first.splitlines()
        assert len(lines) == 500
        assert 350 < len(set(lines)) < 450
        assert all(isinstance(json.loads(line), dict) for line in lines)


def test_a_conversation_is_as_before() -> None:
    row = next(axolotl_inputs.chat_rows(random.Random(0)))
    assert [turn["role"] for turn in row["messages"]] == ["user", "assistant"] * 2
    assert row["messages"][0]["content"].split()[:3] == ["rotigoca", "biri", "cetatule"]


def test_documents_have_about_the_size_that_is_asked_for(tmp_path: Path) -> None:
    path = axolotl_inputs.write_documents(tmp_path / "a.jsonl", 200_000, 2000)
    lines = path.read_text().splitlines()
    assert len(lines) == 100
    assert 150_000 < path.stat().st_size < 250_000
    assert json.loads(lines[7])["text"].startswith("7 ")


def test_configurations_differ_between_the_arms_by_our_keys_alone(tmp_path: Path) -> None:
    settings: Any = {"steps": 3, "buffer_rows": 5}
    stock, ours = (
        axolotl_inputs.streaming_config(tmp_path, tmp_path, tmp_path, **settings, ours=is_ours)
        for is_ours in (False, True)
    )
    added = {key: value for key, value in ours.items() if key not in stock}
    assert added.pop("plugins") == ["fast_axolotl.integrations.axolotl.FastAxolotlPlugin"]
    assert set(added) == {"dataset_use_rust_streaming", "fast_axolotl_streaming_force"}
    assert {key: ours[key] for key in stock} == stock


def test_turns_go_back_and_forth() -> None:
    assert [arm for arm, _ in by_turns(3)] == [STOCK, OURS, OURS, STOCK, STOCK, OURS]


def test_every_moment_is_charged_to_one_name() -> None:
    now = itertools.count()
    found = Ledger(clock=lambda: float(next(now)))
    with found.under("save"):
        with found.under(IMPORTS):
            pass
        found.mark("halfway")
    found.mark("end")
    found.mark("end")
    assert found.marks["halfway"] == {"rest": 1.0, "save": 2.0, IMPORTS: 1.0}
    assert found.marks["end"] == {"rest": 2.0, "save": 3.0, IMPORTS: 1.0}


def test_work_is_what_is_left_of_imports_and_compilation(tmp_path: Path) -> None:
    slow = ledger(marks={**ledger()["marks"], "end": {IMPORTS: 5.0, "rest": 11.0}})
    run = a_run(tmp_path, ledger(), slow)
    assert run.work_seconds() == 11.0
    assert run.work_seconds(since="loaded") == 10.0
    assert run.seconds(COMPILING) == 2.0
    assert run.at("loaded") == 105.0


@pytest.fixture
def fake_axolotl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """A runner that finds a stand-in for Axolotl."""
    packages = tmp_path / "packages"
    for name, text in FAKE_AXOLOTL.items():
        path = packages / "axolotl" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    (packages / "late.py").write_text("import time; time.sleep(0.03)")
    source = Path(axolotl_inputs.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{packages}:{source}")
    (tmp_path / "runs").mkdir()
    return Runner(folder=tmp_path / "runs", cache=tmp_path / "cache")


@pytest.mark.parametrize("arm", [STOCK, OURS])
def test_a_run_is_watched_from_outside(fake_axolotl: Runner, arm: str) -> None:
    def configure(folder: Path) -> Path:
        (folder / "config.yml").write_text("0")
        return folder / "config.yml"

    run = fake_axolotl.run(arm, ("axolotl.cli.main", "preprocess"), configure)
    assert 0.05 <= run.phases["save"] < 1
    assert run.phases[IMPORTS] >= 0.03
    assert run.wall_seconds > run.work_seconds()
    assert bool(run.ledgers[0]["patches"]) == (arm == OURS)


def test_a_run_that_fails_says_why(fake_axolotl: Runner, tmp_path: Path) -> None:
    def configure(folder: Path) -> Path:
        (folder / "config.yml").write_text("no number")
        return folder / "config.yml"

    with pytest.raises(RunError, match="exit code 1: ValueError: invalid literal"):
        fake_axolotl.run(STOCK, ("axolotl.cli.main", "preprocess"), configure)
    log = tmp_path / "log.txt"
    log.write_text("a\n[rank1]: RuntimeError: no device\n=====\n")
    assert last_line(log) == "[rank1]: RuntimeError: no device"


def test_memory_is_that_of_the_whole_tree(tmp_path: Path) -> None:
    parents = {1: 0, 10: 1, 11: 10, 12: 11, 13: 1}
    for pid, parent in parents.items():
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (a) b) S {parent} 0 0")
        (folder / "smaps_rollup").write_text(f"x [rollup]\nPss: {pid} kB\nPss_Anon: 1 kB\n")
    sample = TreeMemory(10, tmp_path).take()
    assert sample is not None
    assert (sample.pss_bytes, sample.anonymous_bytes) == (33 * 1024, 3 * 1024)
    assert TreeMemory(99, tmp_path).take() is None


def test_a_stall_is_the_waiting_after_the_first_batch(tmp_path: Path) -> None:
    marks = {
        "first batch asked for": {"rest": 10.0},
        "first step": {"rest": 10.0, "waiting for a batch": 4.0},
        "trained": {"rest": 16.0, "waiting for a batch": 6.0, "watching": 50.0},
    }
    samples = [
        Sample(100 + at, 10 * size, size) for at, size in ((9, 5), (11, 7), (12, 9), (190, 99))
    ]
    run = a_run(tmp_path, ledger(marks=marks, waits=[4.0, 1.0, 1.0]), memory=samples)
    assert axolotl_streaming.stall_share(run) == 2 / (6 + 6 - 4)
    assert axolotl_streaming.peak_bytes(run) == 990
    assert axolotl_streaming.peak_above_bytes(run) == 4


def write_prepared(folder: Path, rows: list[int], shards: int = 1, **state: Any) -> Path:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"input_ids": [[row] for row in rows]})
    path = folder / "prepared"
    dataset.save_to_disk(str(path / "hash"), num_shards=shards)
    for name, value in state.items():
        file = path / "hash" / "state.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    return path


@pytest.mark.filterwarnings("default")
def test_prepared_datasets_are_compared_by_all_but_their_fingerprint(tmp_path: Path) -> None:
    stock = write_prepared(tmp_path / "stock", [1, 2, 3])
    others = {
        "same": write_prepared(tmp_path / "a", [1, 2, 3], _fingerprint="another"),
        "order": write_prepared(tmp_path / "b", [2, 1, 3]),
        "rows": write_prepared(tmp_path / "c", [1, 2]),
        "shards": write_prepared(tmp_path / "d", [1, 2, 3], shards=2),
        "state": write_prepared(tmp_path / "e", [1, 2, 3], _split="test"),
    }
    found = {name: prepared_difference(stock, other) for name, other in others.items()}
    assert found["same"] is None
    assert found["order"] == "data-00000-of-00001.arrow: other values in input_ids"
    assert found["rows"] == "data-00000-of-00001.arrow: 2 rows in place of 3"
    assert str(found["shards"]).startswith("files ")
    assert found["state"] == "state.json: _split: test in place of None"
    assert (
        prepared_difference(tmp_path / "nothing", tmp_path / "nothing") == "stock prepared nothing"
    )


def train_run(folder: Path, *losses: float, batches: Sequence[str] = ()) -> Run:
    state = folder / "output" / "checkpoint-2" / "trainer_state.json"
    state.parent.mkdir(parents=True)
    history = [{"loss": loss, "grad_norm": 0.5} for loss in losses]
    state.write_text(json.dumps({"log_history": [*history, {"train_runtime": 1.0}]}))
    return a_run(folder, ledger(batches=list(batches)))


def test_losses_are_compared_to_the_last_digit(tmp_path: Path) -> None:
    stock = train_run(tmp_path / "a", 0.1, 0.2, batches=("x", "y"))
    assert logged_losses(stock) == [("0.1", "0.5"), ("0.2", "0.5")]
    same = train_run(tmp_path / "b", 0.1, 0.2, batches=("x", "y"))
    assert losses_difference(stock, same) is None
    other = train_run(tmp_path / "c", 0.1, 0.20000000000000004, batches=("x", "y"))
    assert losses_difference(stock, other) == "step 2: loss 0.20000000000000004 in place of 0.2"
    short = train_run(tmp_path / "d", 0.1)
    assert losses_difference(stock, short) == "1 logged steps in place of 2"
    mixed = train_run(tmp_path / "e", 0.1, 0.2, batches=("x", "z"))
    assert losses_difference(stock, mixed) == "batch 2 differs, and 0 more of 2"
    assert batches_difference(stock, short) == "0 batches in place of 2"


def test_answers_are_compared_by_type_and_value() -> None:
    import numpy as np

    equal = {"a": [1, 2], "b": np.array([1, 2]), "c": ("x", [None])}
    assert (
        answer_difference(equal, {"a": [1, 2], "b": np.array([1, 2]), "c": ("x", [None])}) is None
    )
    for other, reason in [
        ({**equal, "a": [1, 3]}, "answer a: other values"),
        ({**equal, "a": (1, 2)}, "answer a: a tuple in place of a list"),
        ({**equal, "b": np.array([1, 2], np.int32)}, "answer b: other values, or int32 of (2,)"),
        ({**equal, "c": ("x", [0])}, "answer c[1]: items of"),
        ({"b": 1}, "answer: ['b'] in place of ['a', 'b', 'c']"),
    ]:
        assert str(answer_difference(equal, other)).startswith(reason)


def test_what_differs_has_no_speed() -> None:
    timings = (timing(OURS, 1.0, 2.0, 1.0), timing(STOCK, 4.0))
    asked, aimed = ratio_goals("preprocess-chat", timings)
    assert (asked.measured, asked.target, asked.met) == (4.0, 2.0, True)
    assert (aimed.target, aimed.text) == (3.0, "fast-axolotl over Axolotl, aimed at")
    wrong = (replace(timings[0], equal=False, reason="2 rows"), timings[1])
    for goal in ratio_goals("preprocess-chat", wrong):
        assert (goal.measured, goal.met, goal.detail) == (None, None, "differs: 2 rows")
    assert ratio_goals("handle_long_seq", timings) == []
    assert [losses_goal(equal, 20).met for equal in (19, 20)] == [False, True]


@pytest.fixture
def result() -> OperationResult:
    """A result with something of everything, all figures made up."""
    runs = (timing(OURS, 2.0, 3.0, 1.0), timing(STOCK, 9.0, 8.0, 10.0))
    phases = (
        Measurement(name=f"{STOCK}: whole process", seconds=(30.0,), values={}),
        Measurement(name=f"{STOCK}: {IMPORTS}", seconds=(20.0, 22.0, 21.0), values={}),
        Measurement(name=f"{STOCK}: merge", seconds=(0.001,), values={}),
        Measurement(name=f"{STOCK}: dedupe", seconds=(3.0,), values={}),
        Measurement(name=f"{OURS}: dedupe", seconds=(0.03,), values={}),
        Measurement(name=ANSWERED, values={"dedupe": 1, "rl": 0}, reason="left to Axolotl: x"),
        Measurement(name=COLD, seconds=(5.0,), values={"compiling_seconds": 3.0}),
    )
    preprocess = OperationCase(
        name="preprocess-chat",
        text="1,000 rows",
        rows=1000,
        unit="rows",
        timings=runs,
        rivals={STOCK: OURS},
        measurements=phases,
        goals=tuple(ratio_goals("preprocess-chat", runs)),
    )
    memory = Measurement(name=f"{OURS}, run 1", values={"peak_pss_bytes": 5_000_000})
    wrong = (timing(OURS, 0.01, reason="1 row in place of 2"), timing(STOCK, 1.0))
    return OperationResult(
        title="axolotl",
        date="2030-01-31T00:00:00+00:00",
        command="fast-axolotl bench axolotl",
        machine=Machine(
            cpu="a processor",
            cores=2,
            memory_bytes=1,
            system="Linux",
            python="3.11",
            versions={"axolotl": "0.19.0"},
            load_average=0.0,
        ),
        notes=("how",),
        warm_up=WarmUp(import_seconds=1.0, compile_seconds={"a.b": 2.0}),
        cases=(
            preprocess,
            replace(preprocess, name="streaming", measurements=(memory,), goals=()),
            replace(preprocess, name=f"{FUNCTION}dedupe", timings=wrong, measurements=()),
        ),
    )


def test_tables_say_first_what_is_wrong(result: OperationResult) -> None:
    wrong, times, phases, _, stream, functions, goals = axolotl_tables(result)
    assert wrong.title == "axolotl: INVALID, results differ from stock's"
    assert wrong.rows == (("functions: dedupe", "1 row in place of 2"),)
    assert times.rows[1][-2:] == ("4.50×", "yes")
    assert phases.rows == (
        ("whole process", "30.00 s", "–", "–"),
        ("imports", "21.00 s", "–", "–"),
        ("dedupe", "3.00 s", "30.0 ms", "100×"),
    )
    assert phases.notes == (
        "calls that fast-axolotl answered, forked workers apart: dedupe ×1",
        "left to Axolotl: x",
        "fast-axolotl, no kernel compiled before: 5.00 s, 3.00 s of compiling, all threads",
    )
    assert stream.title == "axolotl: streaming, run by run: 1,000 rows"
    assert stream.rows == ((f"{OURS}, run 1", "5.0 MB"),)
    assert functions.rows[0][-2:] == ("100×", "no")
    assert goals.notes[0] == "4 of 4 goals met"


def test_a_result_survives_json(result: OperationResult) -> None:
    assert OperationResult.from_json(result.to_json()) == result


def test_without_axolotl_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fast_axolotl.bench.axolotl_bench.find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"pip install axolotl==0\.19\.0"):
        run_axolotl_bench(work_dir=tmp_path)


def test_a_case_or_a_function_that_is_none_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no case is called 'x': preprocess-chat, "):
        run_axolotl_bench(cases=("x",))
    with pytest.raises(UsageError, match="no function is called 'x': dedupe, "):
        run_axolotl_bench(functions=("x",))
    with pytest.raises(UsageError, match="at least 1"):
        run_axolotl_bench(rows=0)
    assert len(set(CASES)) == len(CASES)


class TestAgainstAxolotl:
    pytestmark = AGAINST_AXOLOTL

    def test_a_tiny_run_of_the_functions_gives_equal_answers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        warmth = WarmUp(import_seconds=0.0, compile_seconds={})
        monkeypatch.setattr("fast_axolotl.bench.axolotl_bench._warm_up", lambda _: warmth)
        steps: list[str] = []
        result = run_axolotl_bench(
            cases=("functions",),
            rows=200,
            repeats=1,
            functions=(
                "dedupe",
                "get_dataset_lengths",
                "encode_streaming (without the tokenizer)",
                "_diff_char_span",
            ),
            work_dir=tmp_path,
            progress=steps.append,
        )
        assert [case.name for case in result.cases] == [
            f"{FUNCTION}{name}"
            for name in (
                "dedupe",
                "get_dataset_lengths",
                "encode_streaming (without the tokenizer)",
                "_diff_char_span",
            )
        ]
        for case in result.cases:
            assert case.left_out == ()
            assert [item.reason for item in case.timings] == [None, None]
            assert {len(item.seconds) for item in case.timings} == {1}
        assert "functions: dedupe" in steps
        assert list(tmp_path.iterdir()) == []
        assert str(tmp_path) not in json.dumps(result.to_json())
        assert axolotl_tables(result)[0].title.startswith("axolotl: function by function")
