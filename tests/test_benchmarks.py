"""The benchmarks: results, goals, and small runs of the cheap ones. No figure is asserted."""

from __future__ import annotations

import json
import textwrap
import venv
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks import axolotl_runs, meter
from benchmarks.axolotl_runs import Run
from benchmarks.operations import OPERATIONS
from tools.benchmark_page import PAGE, make_page

pytestmark = pytest.mark.filterwarnings("default")
"""What the peers warn about is theirs."""

EARLIER_PACKAGE = """
    __version__ = "0.0.test"

    def pad_sequences(sequences, target_length, pad_value):
        return [row + [pad_value + 1] * (target_length - len(row)) for row in sequences]
"""


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass a repeat, and of the peers none that takes seconds to import."""
    monkeypatch.setattr("timeit.Timer.autorange", lambda _: (1, 0.0))
    monkeypatch.setattr("fast_axolotl.cli.race.find_spec", lambda _: None)


@pytest.fixture(scope="module")
def earlier_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds a stand-in for the earlier package."""
    folder = tmp_path_factory.mktemp("earlier")
    venv.create(folder, with_pip=False)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "fast_axolotl.py").write_text(textwrap.dedent(EARLIER_PACKAGE))
    return folder / "bin" / "python"


# The race.


def run_race(race: str, *arguments: str, folder: Path) -> dict[str, Any]:
    """The result that a race writes."""
    path = folder / "result.json"
    import_module(f"benchmarks.{race}").main(
        [*arguments, "--work-dir", str(folder), "--output", str(path)]
    )
    data: dict[str, Any] = json.loads(path.read_text())
    assert {"title", "date", "command", "machine"} <= set(data)
    assert not list(folder.glob("fast-axolotl-bench-*"))
    return data


def test_the_reader_runs_small_with_equal_rows(tmp_path: Path) -> None:
    cases = "messages-jsonl,memory-parquet"
    data = run_race(
        "reader", "--cases", cases, "--scale", "0.0005", "--repeats", "1", folder=tmp_path
    )
    jsonl, memory = data["cases"]
    assert {"fast-axolotl", "pyarrow"} <= {item["name"] for item in jsonl["timings"]}
    assert "earlier package" in [item["name"] for item in jsonl["left_out"]]
    assert memory["measurements"][0]["values"]["rows"] > 0


@pytest.mark.kernels
def test_operations_run_small_and_another_answer_is_not_timed(
    tmp_path: Path, earlier_python: Path
) -> None:
    arguments = ("--sizes", "300", "--repeats", "1", "--peer-python", str(earlier_python))
    reasons = {}
    for operation in OPERATIONS:
        folder = tmp_path / operation
        folder.mkdir()
        data = run_race("operations", operation, *arguments, folder=folder)
        timings = {item["name"] for case in data["cases"] for item in case["timings"]}
        assert len(timings) >= 2, operation
        assert "earlier package" not in timings
        measured = [item for case in data["cases"] for item in case["measurements"]]
        assert not [item["reason"] for item in measured if item["reason"]]
        assert data["command"].endswith("--peer-python PYTHON")
        left_out = [item for case in data["cases"] for item in case["left_out"]]
        reasons[operation] = {item["name"]: item["reason"] for item in left_out}
    assert "deduplicate_indices" in reasons["dedupe"]["earlier package"]
    assert reasons["pad"]["earlier package"] == "it gives another answer"


# Axolotl.


def write_prepared(folder: Path, rows: list[int], shards: int = 1, **state: Any) -> Path:
    dataset_class = pytest.importorskip("datasets").Dataset
    dataset = dataset_class.from_dict({"input_ids": [[row] for row in rows]})
    dataset.save_to_disk(str(folder), num_shards=shards)
    file = folder / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **state}))
    return folder


def test_prepared_datasets_are_compared_by_all_but_their_fingerprint(tmp_path: Path) -> None:
    stock = write_prepared(tmp_path / "stock", [1, 2, 3])
    same = write_prepared(tmp_path / "a", [1, 2, 3], _fingerprint="another")
    assert axolotl_runs.prepared_difference(stock, same) is None
    file = "data-00000-of-00001.arrow"
    for rows, options, reason in (
        ([2, 1, 3], {}, f"{file}: other values in input_ids"),
        ([1, 2], {}, f"{file}: 2 rows in place of 3"),
        ([1, 2, 3], {"shards": 2}, "files "),
        ([1, 2, 3], {"_split": "test"}, "state.json: _split: test in place of None"),
    ):
        other = write_prepared(tmp_path / reason.replace("/", ""), rows, **options)
        assert str(axolotl_runs.prepared_difference(stock, other)).startswith(reason)
    nothing = tmp_path / "nothing"
    assert axolotl_runs.prepared_difference(nothing, nothing) == "stock prepared nothing"


def test_losses_and_batches_are_compared_to_the_last_digit(tmp_path: Path) -> None:
    def train(name: str, *losses: float, batches: str = "xy") -> Run:
        state = tmp_path / name / "output" / "checkpoint-2" / "trainer_state.json"
        state.parent.mkdir(parents=True)
        history = [{"loss": loss, "grad_norm": 0.5} for loss in losses]
        state.write_text(json.dumps({"log_history": [*history, {"train_runtime": 1.0}]}))
        ledger = {"marks": {}, "waits": [], "batches": list(batches)}
        return Run(folder=tmp_path / name, wall_seconds=20.0, ledgers=[ledger])

    stock = train("a", 0.1, 0.2)
    for run, difference in (
        (train("b", 0.1, 0.2), None),
        (train("c", 0.1, 0.20000000000000004), "step 2: loss 0.20000000000000004 in place of 0.2"),
        (train("d", 0.1), "1 logged steps in place of 2"),
        (train("e", 0.1, 0.2, batches="xz"), "batch 2 differs, and 0 more of 2"),
    ):
        assert axolotl_runs.losses_difference(stock, run) == difference


# The meter, the protocol, the advice.


def test_a_cell_is_near_the_truth_and_a_loop_is_run_against_a_slower_one(tmp_path: Path) -> None:
    cell = replace(meter.cells_of("loop", 0, 1)[0], pattern="burst", planned_share=0.5)
    found = meter.run_cell(cell, tmp_path, 300)
    # How near it comes is the race's affair: machines that run tests are busy.
    assert found["stall_fraction"] == pytest.approx(found["true_stall"], abs=0.1)
    assert found["verdict"] == "data"
    trials = ["--same", "0", "--different", "1", "--pairs", "2", "--steps", "40", "--slower", "2"]
    (slow,) = run_race("protocol", *trials, folder=tmp_path)["trials"]
    assert slow["kind"] == "A/B"
    # Three times as slow: seen in each single pair, whatever else the machine does.
    pairs = zip(slow["baseline"], slow["candidate"], strict=True)
    assert all(after < before for before, after in pairs)


def test_the_page_of_figures_is_that_of_the_result_files() -> None:
    assert PAGE.read_text(encoding="utf-8") == make_page(), "run python tools/benchmark_page.py"
