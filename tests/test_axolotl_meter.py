"""The meter in real ``axolotl train`` runs: by a key of the YAML, and by ``run --measure``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fast_axolotl
from fast_axolotl.cli.demo_axolotl import (
    preprocess_config,
    train_config,
    write_config,
    write_model,
    write_rows,
)
from fast_axolotl.integrations.measuring import Order
from fast_axolotl.record import RunRecord, read_run
from support.axolotl import AGAINST_AXOLOTL

pytestmark = AGAINST_AXOLOTL

PLUGIN = "fast_axolotl.integrations.axolotl.FastAxolotlPlugin"
BIN = Path(sys.executable).parent
STEPS = 8


class Bench:
    """A model and data, and trainings of Axolotl on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_model(folder / "model")
        self.data = write_rows(folder / "chat.jsonl", 400)

    def config(self, name: str, **keys: Any) -> str:
        prepare = preprocess_config(self.folder / "model", self.data, self.folder / "prepared")
        config = {**train_config(prepare, self.folder / name), "sequence_len": 512}
        config |= {"max_steps": STEPS, "save_steps": STEPS, "dataloader_num_workers": 1}
        config |= {"gradient_accumulation_steps": 2, "num_epochs": 4, **keys}
        return str(write_config(config, self.folder / f"{name}.yml"))

    def history(self, name: str) -> list[dict[str, Any]]:
        [state] = (self.folder / name).glob("checkpoint-*/trainer_state.json")
        return [entry for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("axolotl"))


def start(*command: str) -> subprocess.CompletedProcess[str]:
    source = Path(fast_axolotl.__file__).parents[1]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FAST_AXOLOTL")}
    done = subprocess.run(
        command,
        env={
            **inherited,
            "PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", "")]),
            "PYTHONPATH": str(source),
            "AXOLOTL_DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def check_record(record: RunRecord) -> None:
    assert list(record.ranks) == [0]
    rank = record.ranks[0]
    assert rank.start.source == "axolotl"
    assert sum(block.steps for block in rank.blocks) == STEPS
    assert sum(block.fetches for block in rank.blocks) == 2 * STEPS + 1
    assert sum(block.trainable_tokens or 0 for block in rank.blocks) > 0
    rows, samples = (sum(getattr(one, name) for one in rank.blocks) for name in ("rows", "samples"))
    assert rows > samples  # packed
    assert rank.values["num_workers"] == 1
    assert rank.values["gradient_accumulation"] == 2
    assert rank.values["sample_packing"] is True
    [shape] = rank.models
    assert (shape.layers, shape.is_packed, shape.sequence_len) == (2, True, 512)
    assert rank.end is not None
    assert rank.end.reason == "finished"
    assert record.system is not None
    assert any(sample.pss_bytes for sample in record.system.samples)


def test_the_folder_is_the_key_s_unless_the_command_line_gave_one(tmp_path: Path) -> None:
    from fast_axolotl.integrations.axolotl_plugin import FastAxolotlArgs, measure_order

    (tmp_path / "rows.jsonl").write_text("")
    rows = str(tmp_path / "rows.jsonl")
    config = {"output_dir": "out", "datasets": [{"path": rows}, {"path": "owner/hub"}]}
    assert measure_order(config, None) is None
    assert measure_order({**config, "fast_axolotl_measure": False}, None) is None
    for value, folder in ((True, "out/fast-axolotl-measure"), ("runs/a", "runs/a")):
        checked = FastAxolotlArgs(fast_axolotl_measure=value).fast_axolotl_measure
        found = measure_order({**config, "fast_axolotl_measure": checked}, None)
        assert found == Order(run_dir=folder, data_paths=(rows,))
    asked = Order(run_dir="elsewhere", profile_steps=3)
    assert measure_order(config, asked) == Order(
        run_dir="elsewhere", profile_steps=3, data_paths=(rows,)
    )


def test_a_key_of_the_yaml_measures_the_training(bench: Bench) -> None:
    config = bench.config("plugin", plugins=[PLUGIN], fast_axolotl_measure=True)
    start("axolotl", "train", config, "--launcher", "python")
    record = read_run(bench.folder / "plugin" / "fast-axolotl-measure")
    check_record(record)
    values = record.ranks[0].values
    assert values["config"]["sequence_len"] == 512
    assert values["data_paths"] == [str(bench.folder / "prepared")]
    last = bench.history("plugin")[-1]
    for name in ("stall_fraction", "tokens_per_second", "working_set_gb"):
        assert last[f"fast_axolotl/{name}"] >= 0


def test_run_measures_an_axolotl_that_is_left_as_it_is(bench: Bench) -> None:
    config = bench.config("stock")
    run = (sys.executable, "-m", "fast_axolotl", "run", "--measure", "--no-accelerate")
    folder = bench.folder / "record"
    done = start(
        *run, "--output", str(folder), "--", "axolotl", "train", config, "--launcher", "python"
    )
    record = read_run(folder)
    check_record(record)
    assert record.ranks[0].values["config"]["sequence_len"] == 512
    assert "fast-axolotl: used" not in done.stderr
    assert "Inconclusive" in done.stderr
    assert "fast_axolotl/stall_fraction" in bench.history("stock")[-1]
