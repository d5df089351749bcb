"""Real trainings on streams: those that stop and resume log what an uninterrupted one does.

Every training runs in a child that has imported Axolotl once. Dropout makes the model draw random
numbers between the batches, in the process that packs them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.axolotl_inputs import common_config, random_text, write_config, write_model
from fast_axolotl.axolotl.patching import Unfamiliar
from support.axolotl import (
    AGAINST_AXOLOTL,
    ON_A_PROCESSOR,
    PLUGIN,
    RELEASE,
    Later,
    needs,
    run_child,
)

pytestmark = [*AGAINST_AXOLOTL, needs("stream")]

DATASETS = importlib.metadata.version("datasets") if importlib.util.find_spec("datasets") else "0"
STATE = "fast_axolotl_reader_rank0.json"
resume = Later("fast_axolotl.axolotl.resume")


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
            **ON_A_PROCESSOR,
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
            "max_steps": 8,
            "save_steps": keys.get("max_steps", 8) if resume else 1,
            "save_total_limit": 20,
            "plugins": [PLUGIN],
            "dataset_use_rust_streaming": True,
            **keys,
        }
        if resume:
            config["resume_from_checkpoint"] = str(self.folder / resume)
        written = write_config(config, self.folder / f"{name}.yml")
        self.configs.append(str(written))

    def remove(self, path: str) -> None:
        """When the trainings added so far are done."""
        self.configs.append(f"remove {self.folder / path}")

    def state(self, checkpoint: str, rank: int = 0) -> dict[str, Any]:
        path = self.folder / checkpoint / STATE.replace("0", str(rank))
        saved: dict[str, Any] = json.loads(path.read_text())
        return saved

    def run(self, *launcher: str) -> dict[str, Any]:
        result = self.folder / "result.json"
        program = ("-m", "support.train_streams", str(result), *self.configs)
        folders = (Path(__file__).parent,)
        done = run_child(
            sys.executable,
            *launcher,
            *program,
            folders=folders,
            OMP_NUM_THREADS="1",
            ACCELERATE_USE_CPU="true",
        )
        assert done.returncode == 0, done.stderr[-3000:]
        names = [Path(config).stem for config in self.configs if config[:6] != "remove"]
        self.configs = []
        return dict(zip(names, json.loads(result.read_text()), strict=True))


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("streams"))


def test_a_resumed_run_logs_what_an_uninterrupted_one_logs(trainings: Trainings) -> None:
    """In the middle of an epoch, in the second; with two workers; without a state."""
    off = {"plugins": None, "dataset_use_rust_streaming": None}
    trainings.add("stock", **off, save_steps=99)
    trainings.add("whole")
    for step in (2, 7):
        trainings.add(f"from-{step}", resume=f"whole/checkpoint-{step}")
    workers = {"files": "*.jsonl", "dataloader_num_workers": 2, "gradient_accumulation_steps": 2}
    trainings.add("workers", **workers, max_steps=4)
    trainings.add("workers-from-2", **workers, resume="workers/checkpoint-2", max_steps=4)
    trainings.remove(f"whole/checkpoint-6/{STATE}")
    trainings.add("without", resume="whole/checkpoint-6", max_steps=7)
    runs = trainings.run()
    saved = [trainings.state(f"whole/checkpoint-{step}") for step in (2, 7)]
    assert [(item["epoch"], item["is_finished"]) for item in saved] == [(0, False), (1, False)]
    whole = runs["whole"]["losses"]
    assert len(whole) == 8
    assert runs["stock"]["losses"] == whole
    for name in ("from-2", "from-7"):
        assert runs[name]["losses"] == whole, name
        assert "without a replay" in runs[name]["said"][-1]
    assert runs["workers-from-2"]["losses"] == runs["workers"]["losses"]
    assert f"has no {STATE}" in runs["without"]["said"][-1]


def test_a_checkpoint_of_another_stream_is_refused(tmp_path: Path) -> None:
    """It would give other batches: the trainer replays, and the reason is in the log."""
    checkpoint = resume.StreamCheckpoint.__new__(resume.StreamCheckpoint)
    checkpoint.rank, checkpoint.identity = 0, {"sequence_len": 160}
    for saved, reason in (
        ({"version": 1}, "version 1, not 2"),
        ({"version": 2, "identity": {"sequence_len": 128}}, "sequence_len was 128 .* is 160 now"),
    ):
        (tmp_path / STATE).write_text(json.dumps(saved))
        with pytest.raises(Unfamiliar, match=reason):
            checkpoint.read(str(tmp_path))


@pytest.mark.skipif(RELEASE == (0, 17), reason="0.17 looks for CUDA when there are several ranks")
@pytest.mark.skipif(
    int(DATASETS.partition(".")[0]) >= 5, reason="streams of several files stay stock there"
)
def test_two_ranks_read_their_shares_and_resume(trainings: Trainings) -> None:
    """Files of their own, of which one rank has more."""
    gloo = {"max_memory": {"cpu": "8GiB"}, "ddp_backend": "gloo", "max_steps": 5}
    own = {**gloo, "files": "*.jsonl", "gradient_accumulation_steps": 2}
    trainings.add("own", **own)
    trainings.add("own-from-3", **own, resume="own/checkpoint-3")
    runs = trainings.run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert loss(runs["own-from-3"]) == loss(runs["own"])
    # The rank with fewer rows is in a later epoch.
    epochs = [trainings.state("own/checkpoint-5", rank)["epoch"] for rank in range(2)]
    assert epochs == [1, 2]


def loss(run: dict[str, Any]) -> list[Any]:
    return [[step, *rest] for step, _, *rest in run["losses"]]
