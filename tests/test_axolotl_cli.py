"""The three ways in, with Axolotl's real command line: same prepared rows, same losses.

Each run starts an interpreter that imports Axolotl, so there are few of them, made once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.axolotl_inputs import (
    preprocess_config,
    train_config,
    write_config,
    write_model,
    write_rows,
)
from support.axolotl import (
    AGAINST_AXOLOTL,
    ON_A_PROCESSOR,
    PLUGIN,
    TOLD_LESS,
    VERSION,
    run_child,
)

pytestmark = AGAINST_AXOLOTL

ROWS = 600
STEPS = 4
TRAINING = {"max_steps": STEPS, "save_steps": STEPS, "dataloader_num_workers": 1, **ON_A_PROCESSOR}


def start(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = run_child(*command, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def ours(*command: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "fast_axolotl", "run", "--", *command)


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("fast-axolotl: ")]


class Bench:
    """A model, data, and runs of Axolotl on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model"
        write_model(self.model)
        self.data = write_rows(folder / "chat.jsonl", ROWS)

    def config(self, name: str, **keys: Any) -> dict[str, Any]:
        prepared = self.folder / name / "prepared"
        prepared.parent.mkdir(exist_ok=True)
        return {**preprocess_config(self.model, self.data, prepared), **keys}

    def write(self, name: str, config: dict[str, Any]) -> str:
        return str(write_config(config, self.folder / f"{name}.yml"))

    def prepared(self, name: str) -> Any:
        from datasets import load_from_disk

        # A lock file of Axolotl may lie beside the folder.
        [found] = (p for p in (self.folder / name / "prepared").iterdir() if p.is_dir())
        return load_from_disk(str(found))

    def losses(self, name: str) -> list[Any]:
        [state] = (self.folder / name).glob("checkpoint-*/trainer_state.json")
        history = json.loads(state.read_text())["log_history"]
        return [entry["loss"] for entry in history if "loss" in entry]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("axolotl"))


@pytest.fixture(scope="module")
def as_it_is(bench: Bench) -> Any:
    """Rows that stock's training prepares first; by the command that ``axolotl train`` starts."""
    config = train_config(bench.config("stock"), bench.folder / "train-stock")
    program = (sys.executable, "-m", "axolotl.cli.train")
    start(*program, bench.write("stock", {**config, **TRAINING}), FAST_AXOLOTL="0")
    return bench.prepared("stock")


def assert_same(found: Any, wanted: Any) -> None:
    assert found.features == wanted.features
    assert found.column_names == wanted.column_names
    assert len(found) == len(wanted) < ROWS
    assert found.with_format("arrow")[:].equals(wanted.with_format("arrow")[:])
    assert [Path(item["filename"]).name for item in found.cache_files] == [
        Path(item["filename"]).name for item in wanted.cache_files
    ]


def test_run_in_front_of_the_command(bench: Bench, as_it_is: Any) -> None:
    done = start(*ours("axolotl", "preprocess", bench.write("run", bench.config("run"))))
    assert_same(bench.prepared("run"), as_it_is)
    first, last = lines(done)
    told = (f"fast-axolotl: Axolotl {VERSION}; accelerated: dedupe, save", TOLD_LESS)
    assert first.startswith(told)
    is_whole = not first.startswith(TOLD_LESS)  # older releases are told which are inactive
    for name in ("dedupe ×1", "save ×1", *(["packing ×1", "long ×1"] if is_whole else [])):
        assert name in last
    assert "stock Axolotl calls" not in last


def test_one_line_of_yaml(bench: Bench, as_it_is: Any) -> None:
    config = bench.config("plugin", plugins=[PLUGIN], fast_axolotl_skip=["save"])
    done = start("axolotl", "preprocess", bench.write("plugin", config))
    assert_same(bench.prepared("plugin"), as_it_is)
    first, last = lines(done)
    assert "accelerated: dedupe, " in first or first.startswith(TOLD_LESS)
    assert "switched off: save" in first
    assert "accelerated calls: dedupe ×1" in last
    assert "save" not in last


def test_training_through_accelerate_launch_logs_the_same_losses(
    bench: Bench, as_it_is: Any
) -> None:
    config = train_config(bench.config("stock"), bench.folder / "train-ours")
    arguments = ("axolotl", "train", bench.write("train-ours", {**config, **TRAINING}))
    done = start(*ours(*arguments, "--launcher", "accelerate", "--", "--cpu"))
    assert bench.losses("train-ours") == bench.losses("train-stock")
    assert len(bench.losses("train-ours")) == STEPS
    last = lines(done)[-1]
    assert "sampler ×" in last
