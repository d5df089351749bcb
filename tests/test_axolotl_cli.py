"""Axolotl's real command line alone, with the plugin and behind ``run``: same rows, same losses.

Each run starts an interpreter that imports Axolotl, so there are three, made once. The first is
measured from outside, the second by a key of its configuration.
"""

from __future__ import annotations

import json
import os
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
from fast_axolotl.record import read_run
from support.axolotl import AGAINST_AXOLOTL, ON_A_PROCESSOR, PLUGIN, TOLD_LESS, VERSION
from support.children import FAST_AXOLOTL, clean_environment, run_child
from support.hosts import end_of, total

pytestmark = AGAINST_AXOLOTL

ROWS = 400
STEPS = 4
TRAINING = {"max_steps": STEPS, "save_steps": STEPS, "dataloader_num_workers": 1, **ON_A_PROCESSOR}
TRAINING |= {"gradient_accumulation_steps": 2, "num_epochs": 4, "sequence_len": 512}


class Trainings:
    """A model and data, and trainings of Axolotl on them, each with a preparation of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_model(folder / "model")
        self.data = write_rows(folder / "chat.jsonl", ROWS)
        record = str(folder / "record")
        # The plugin in the configuration does not change that stock is measured.
        measured = (*FAST_AXOLOTL, "measure", "--output", record, "--", "axolotl", "train")
        self.stock = self.train("stock", measured, plugins=[PLUGIN])
        keys = {"fast_axolotl_measure": True, "fast_axolotl_skip": ["save"]}
        self.plugin = self.train("plugin", ("axolotl", "train"), plugins=[PLUGIN], **keys)
        run, launcher = (
            (*FAST_AXOLOTL, "run", "--", "axolotl", "train"),
            ("accelerate", "--", "--cpu"),
        )
        self.run = self.train("run", run, launcher=launcher)

    def train(
        self, name: str, command: tuple[str, ...], launcher: Any = ("python",), **keys: Any
    ) -> subprocess.CompletedProcess[str]:
        prepared = self.folder / name / "prepared"
        prepared.parent.mkdir()
        config = preprocess_config(self.folder / "model", self.data, prepared)
        config = {**train_config(config, self.folder / name / "out"), **TRAINING, **keys}
        path = str(write_config(config, self.folder / f"{name}.yml"))
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = clean_environment(PATH=programs)
        done = run_child(
            *(*command, path, "--launcher", *launcher), environment=environment, timeout=600
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    def prepared(self, name: str) -> Any:
        from datasets import load_from_disk

        # A lock file of Axolotl may lie beside the folder.
        [found] = (p for p in (self.folder / name / "prepared").iterdir() if p.is_dir())
        return load_from_disk(str(found))

    def logs(self, name: str) -> list[dict[str, Any]]:
        [state] = (self.folder / name / "out").glob("checkpoint-*/trainer_state.json")
        history: list[dict[str, Any]] = json.loads(state.read_text())["log_history"]
        return [entry for entry in history if "loss" in entry]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("axolotl"))


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("fast-axolotl: ")]


@pytest.mark.parametrize("name", ["plugin", "run"])
def test_rows_and_losses_are_those_of_stock(trainings: Trainings, name: str) -> None:
    found, wanted = trainings.prepared(name), trainings.prepared("stock")
    assert found.features == wanted.features
    assert found.column_names == wanted.column_names
    assert len(found) == len(wanted) < ROWS
    assert found.with_format("arrow")[:].equals(wanted.with_format("arrow")[:])
    assert [Path(item["filename"]).name for item in found.cache_files] == [
        Path(item["filename"]).name for item in wanted.cache_files
    ]
    losses = [[entry["loss"] for entry in trainings.logs(item)] for item in (name, "stock")]
    assert len(losses[0]) == STEPS
    assert losses[0] == losses[1]


def test_lines_say_what_is_replaced_and_what_was_used(trainings: Trainings) -> None:
    first, last = lines(trainings.run)[0], lines(trainings.run)[-1]
    assert first.startswith((f"fast-axolotl: Axolotl {VERSION}; replacements: ", TOLD_LESS))
    is_whole = not first.startswith(TOLD_LESS)  # older releases are told which are inactive
    for name in ("dedupe ×1", "save ×1", "sampler ×", *(["packing ×1", "long ×1"] * is_whole)):
        assert name in last
    own = last.partition("stock calls")[2]
    assert not any(name in own for name in ("dedupe", "save", "packing", "long", "tokenize"))
    said = "\n".join(lines(trainings.plugin))
    assert "1 switched off" in said
    assert "accelerated calls: dedupe ×1" in said
    assert "save ×" not in said
    said = trainings.stock.stderr
    assert read_run(trainings.folder / "record").ranks[0].values["replacements"] == []
    assert "accelerated calls" not in said
    assert "Inconclusive" in said


@pytest.mark.parametrize(
    ("name", "record"), [("stock", "record"), ("plugin", "plugin/out/fast-axolotl-measure")]
)
def test_a_training_is_measured(trainings: Trainings, name: str, record: str) -> None:
    found = read_run(trainings.folder / record)
    assert list(found.ranks) == [0]
    rank = found.ranks[0]
    assert rank.start.source == "axolotl"
    assert (total(rank, "steps"), total(rank, "fetches")) == (STEPS, 2 * STEPS + 1)
    assert total(rank, "trainable_tokens") > 0
    assert total(rank, "rows") > total(rank, "samples")  # packed
    assert rank.values["num_workers"] == 1
    assert rank.values["gradient_accumulation"] == 2
    assert rank.values["sample_packing"] is True
    assert rank.values["config"]["sequence_len"] == 512
    [shape] = rank.models
    assert (shape.layers, shape.is_packed, shape.sequence_len) == (2, True, 512)
    assert end_of(trainings.folder / record) == ("finished", "")
    assert found.system is not None
    assert any(sample.pss_bytes for sample in found.system.samples)
    assert {"collators", "sampler"} <= set(rank.values["replacements"]) or name == "stock"
    for figure in ("stall_fraction", "tokens_per_second"):
        assert trainings.logs(name)[-1][f"fast_axolotl/{figure}"] >= 0
