"""Real trainings on streams: those that stop and resume log what an uninterrupted one does.

Every training runs in a child that has imported Axolotl once. Dropout makes the model draw random
numbers between the batches, in the process that packs them.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.axolotl_inputs import common_config, random_text, write_config, write_model
from support import train_streams
from support.axolotl import AGAINST_AXOLOTL, PLUGIN, run_child

pytestmark = AGAINST_AXOLOTL

STATE = "fast_axolotl_reader_rank0.json"


class Trainings:
    """A model and files of texts, and trainings on them by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_model(folder / "model")
        for number, count in enumerate((24, 32, 20)):
            rng = random.Random(number)
            rows = (json.dumps({"text": random_text(rng, 10, 60)}) for _ in range(count))
            (folder / f"{number}.jsonl").write_text("\n".join(rows) + "\n")
        self.configs: list[str] = []

    def add(self, name: str, *, files: str = "1.jsonl", resume: str = "", **keys: Any) -> None:
        source = {"path": "json", "data_files": str(self.folder / files), "text_column": "text"}
        config = {
            **common_config(self.folder / "model", self.folder / name),
            "pretraining_dataset": [{**source, "type": "pretrain"}],
            "sequence_len": 128,
            "micro_batch_size": 2,
            "streaming": True,
            "streaming_multipack_buffer_size": 16,
            "shuffle_merged_datasets": True,
            "sample_packing": True,
            "pretrain_multipack_attn": True,
            "overrides_of_model_config": {"attention_dropout": 0.2},
            "dataset_num_proc": 1,
            "dataloader_num_workers": 0,
            "max_steps": 10,
            "save_steps": 1,
            "save_total_limit": 20,
            "plugins": [PLUGIN],
            "dataset_use_rust_streaming": True,
            "fast_axolotl_streaming_force": True,
            **keys,
        }
        if resume:
            config["resume_from_checkpoint"] = str(self.folder / resume)
            config["save_steps"] = config["max_steps"]
        written = write_config(config, self.folder / f"{name}.yml")
        self.configs.append(str(written))

    def run(self, *launcher: str) -> dict[str, Any]:
        result = self.folder / "result.json"
        command = (sys.executable, *launcher, train_streams.__file__, str(result), *self.configs)
        done = run_child(*command, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr[-3000:]
        names = [Path(config).stem for config in self.configs]
        self.configs = []
        return dict(zip(names, json.loads(result.read_text()), strict=True))


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("streams"))
