"""The callback in a real ``Trainer``: fetches, steps, spans, settings, figures in the logs."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers"
)
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")

from torch.utils.data import Dataset, IterableDataset  # noqa: E402

import fast_axolotl  # noqa: E402
from fast_axolotl.integrations.transformers_meter import MeterCallback  # noqa: E402
from fast_axolotl.record import RankRecord, read_run  # noqa: E402

# transformers, accelerate and torch warn of one another; forked workers beside threads do, too.
pytestmark = pytest.mark.filterwarnings("default")

WAIT = 0.01
LENGTH = 16


class Rows(Dataset):  # type: ignore[type-arg]
    """Token rows; each takes some time to read."""

    def __init__(self, count: int, seconds: float = 0.0) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        ids = torch.arange(LENGTH) % 50
        mask = (torch.arange(LENGTH) < 12).long()
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": torch.where(mask > 0, ids, -100),
        }


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        yield from (Rows(self.count)[index] for index in range(self.count))


class Reporter(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
    """A stand-in for TensorBoard's or W&B's callback."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


class Saver(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
    """A callback that asks for a checkpoint after ours has seen the step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_save = state.global_step == 8
        return control


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def train(
    model: Any,
    folder: Path,
    *,
    rows: Any = None,
    callbacks: list[Any] | None = None,
    resume: str | None = None,
    evaluate: Any = None,
    **options: Any,
) -> Any:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "max_steps": 10,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    arguments = transformers.TrainingArguments(output_dir=str(folder / "out"), **given | options)
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=rows if rows is not None else Rows(200),
        eval_dataset=evaluate,
        callbacks=callbacks or [MeterCallback(folder / "run", sample_system=False)],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def rank_of(folder: Path, number: int = 0) -> RankRecord:
    return read_run(folder).ranks[number]


def spans_of(rank: RankRecord) -> dict[str, float]:
    found: dict[str, float] = {}
    for block in rank.blocks:
        for name, seconds in block.spans.items():
            found[name] = found.get(name, 0.0) + seconds
    return found


def test_fetches_and_steps_of_accumulation_are_counted(model: Any, tmp_path: Path) -> None:
    train(model, tmp_path, rows=Rows(400, WAIT / 2), gradient_accumulation_steps=2)
    rank = rank_of(tmp_path / "run")
    assert rank.start.source == "transformers"
    assert sum(block.steps for block in rank.blocks) == 10
    # accelerate is one batch ahead.
    assert sum(block.fetches for block in rank.blocks) == 21
    assert sum(block.host_wait_seconds for block in rank.blocks) >= 21 * WAIT
    assert sum(block.real_tokens or 0 for block in rank.blocks) == 21 * 2 * 12
    assert sum(block.padded_tokens or 0 for block in rank.blocks) == 21 * 2 * LENGTH
    assert rank.end is not None
    assert rank.end.reason == "finished"
    values = rank.values
    assert (values["gradient_accumulation"], values["num_workers"]) == (2, 0)
    assert (values["batch_size"], values["dispatcher"]) == (2, False)
    [shape] = rank.models
    assert shape.layers == 1
    assert shape.num_parameters > 0


def test_workers_and_their_queue_are_seen(model: Any, tmp_path: Path) -> None:
    train(model, tmp_path, dataloader_num_workers=1, dataloader_prefetch_factor=3)
    rank = rank_of(tmp_path / "run")
    assert (rank.values["num_workers"], rank.values["prefetch_factor"]) == (1, 3)
    depths = [block.queue_depth for block in rank.blocks]
    assert all(depth is not None and 0 <= depth <= 3 for depth in depths)


def test_figures_join_the_logs_before_reporters_that_were_there_first(
    model: Any, tmp_path: Path
) -> None:
    reporter = Reporter()
    callbacks = [reporter, MeterCallback(tmp_path / "run", sample_system=False)]
    trainer = train(model, tmp_path, callbacks=callbacks, logging_strategy="steps", logging_steps=2)
    last = [logs for logs in reporter.logs if "loss" in logs][-1]
    for name in ("stall_fraction", "host_stall_fraction", "tokens_per_second"):
        assert isinstance(last[f"fast_axolotl/{name}"], float), last
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert "fast_axolotl/stall_fraction" in history[-1]
    order = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
    assert (order[0], order[-1]) == ("MeterCallback", "_Tail")


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="pip install tensorboard"
)
def test_tensorboard_shows_our_figures(model: Any, tmp_path: Path) -> None:
    train(
        model,
        tmp_path,
        report_to=["tensorboard"],
        logging_strategy="steps",
        logging_steps=5,
    )
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("events.out.tfevents*"))
    assert b"train/fast_axolotl/stall_fraction" in written


def test_logs_stay_as_they_are_where_figures_are_not_wanted(model: Any, tmp_path: Path) -> None:
    reporter = Reporter()
    callbacks = [MeterCallback(tmp_path / "run", sample_system=False, log=False), reporter]
    train(model, tmp_path, callbacks=callbacks, logging_strategy="steps", logging_steps=5)
    assert not any("fast_axolotl" in name for logs in reporter.logs for name in logs)


def test_logging_evaluation_and_checkpoints_are_spans(model: Any, tmp_path: Path) -> None:
    callbacks = [MeterCallback(tmp_path / "run", sample_system=False), Saver()]
    train(
        model,
        tmp_path,
        callbacks=callbacks,
        evaluate=Rows(8, WAIT),
        eval_strategy="steps",
        eval_steps=6,
        logging_strategy="steps",
        logging_steps=4,
    )
    rank = rank_of(tmp_path / "run")
    spans = spans_of(rank)
    assert set(spans) >= {"log", "evaluate", "checkpoint"}
    # Evaluated after step 6 and at the end: eight rows each.
    assert spans["evaluate"] >= 8 * WAIT
    # Its loader's fetches are not the training's.
    assert sum(block.fetches for block in rank.blocks) == 11
    assert sum(block.host_wait_seconds for block in rank.blocks) < 8 * WAIT


def test_a_best_model_that_was_not_saved_leaves_the_loop_alone(model: Any, tmp_path: Path) -> None:
    train(
        model,
        tmp_path,
        evaluate=Rows(4),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="best",
        metric_for_best_model="eval_loss",
    )
    rank = rank_of(tmp_path / "run")
    assert sum(block.steps for block in rank.blocks) == 10
    assert sum(block.fetches for block in rank.blocks) == 11


def test_epochs_are_marked_and_the_end_of_one_can_evaluate(model: Any, tmp_path: Path) -> None:
    train(
        model,
        tmp_path,
        rows=Rows(8),
        evaluate=Rows(4, WAIT),
        max_steps=-1,
        num_train_epochs=3,
        eval_strategy="epoch",
        logging_strategy="epoch",
    )
    rank = rank_of(tmp_path / "run")
    assert sum(block.steps for block in rank.blocks) == 12
    assert sum(block.fetches for block in rank.blocks) == 12
    assert len([mark for mark in rank.marks if mark.name == "epoch"]) == 2
    assert spans_of(rank)["evaluate"] >= 2 * 4 * WAIT


def test_a_resumed_run_counts_what_it_trains_itself(model: Any, tmp_path: Path) -> None:
    train(model, tmp_path, save_strategy="steps", save_steps=6, max_steps=6)
    callbacks = [MeterCallback(tmp_path / "again", sample_system=False)]
    checkpoint = str(tmp_path / "out" / "checkpoint-6")
    train(model, tmp_path, callbacks=callbacks, resume=checkpoint)
    rank = rank_of(tmp_path / "again")
    assert sum(block.steps for block in rank.blocks) == 4
    assert sum(block.fetches for block in rank.blocks) == 5
    assert rank.values["resumed_at_step"] == 6


def test_a_second_training_gets_a_folder_beside_the_first(model: Any, tmp_path: Path) -> None:
    trainer = train(model, tmp_path, max_steps=2)
    trainer.train()
    assert sum(block.steps for block in rank_of(tmp_path / "run").blocks) == 2
    assert sum(block.steps for block in rank_of(tmp_path / "run-2").blocks) == 2


def test_a_streamed_dataset_is_read_by_the_dispatcher(model: Any, tmp_path: Path) -> None:
    train(
        model,
        tmp_path,
        rows=Stream(100),
        accelerator_config={"dispatch_batches": True},
    )
    rank = rank_of(tmp_path / "run")
    assert rank.values["dispatcher"] is True
    assert sum(block.steps for block in rank.blocks) == 10
    assert sum(block.fetches for block in rank.blocks) == 11


def test_a_training_that_fails_is_recorded_at_the_end_of_the_process(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\n"
        "import test_transformers_meter as parts\n"
        "model = parts.transformers.LlamaForCausalLM(parts.transformers.LlamaConfig(\n"
        "    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,\n"
        "    num_attention_heads=2, num_key_value_heads=2))\n"
        "class Bad(parts.Rows):\n"
        "    def __getitem__(self, index):\n"
        "        if self.seconds > 6:\n"
        "            raise OSError('the disk is gone')\n"
        "        self.seconds += 0.5\n"
        "        return parts.Rows(9)[index]\n"
        f"parts.train(model, Path({str(tmp_path)!r}), rows=Bad(200))\n"
    )
    source = str(Path(fast_axolotl.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    rank = rank_of(tmp_path / "run")
    assert rank.end is not None
    assert (rank.end.reason, rank.end.error) == ("exception", "OSError: the disk is gone")
    assert [mark.name for mark in rank.marks if mark.name == "error"] == ["error"]


class Evaluator(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
    """A callback of the user's that evaluates on its own."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            self.trainer.evaluate(self.rows)


def a_trainer(model: Any, folder: Path, **options: Any) -> Any:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 6,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    others = {
        name: options.pop(name) for name in ("train_dataset", "eval_dataset") if name in options
    }
    callbacks = options.pop("callbacks", [MeterCallback(folder / "run", sample_system=False)])
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder / "out"), **given | options),
        callbacks=callbacks,
        **{"train_dataset": Rows(40), **others},
    )


def test_every_dataset_of_an_evaluation_is_in_its_span(model: Any, tmp_path: Path) -> None:
    trainer = a_trainer(
        model,
        tmp_path,
        eval_dataset={name: Rows(8, WAIT) for name in "abc"},
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        max_steps=7,
    )
    begin = time.perf_counter()
    trainer.train()
    took = time.perf_counter() - begin
    rank = rank_of(tmp_path / "run")
    spans = spans_of(rank)
    assert spans["evaluate"] >= 2 * 3 * 8 * WAIT
    assert spans["checkpoint"] > 0
    assert sum(block.fetches for block in rank.blocks) == 8
    assert sum(block.wall_seconds for block in rank.blocks) < took - spans["evaluate"]


@pytest.mark.parametrize("is_training_data", [False, True])
def test_an_evaluation_by_a_callback_of_the_user_is_a_span(
    model: Any, tmp_path: Path, is_training_data: bool
) -> None:
    rows = Rows(20, WAIT)
    evaluator = Evaluator(rows if is_training_data else Rows(20, WAIT))
    callbacks = [evaluator, MeterCallback(tmp_path / "run", sample_system=False)]
    trainer = a_trainer(model, tmp_path, train_dataset=rows, callbacks=callbacks)
    evaluator.trainer = trainer
    trainer.train()
    rank = rank_of(tmp_path / "run")
    assert spans_of(rank)["evaluate"] >= 20 * WAIT
    assert "checkpoint" not in spans_of(rank)
    assert sum(block.fetches for block in rank.blocks) == 7
    assert sum(block.steps for block in rank.blocks) == 6


def test_an_evaluation_before_the_first_step_is_a_span_even_of_the_training_data(
    model: Any, tmp_path: Path
) -> None:
    rows = Rows(20, WAIT)
    trainer = a_trainer(
        model,
        tmp_path,
        train_dataset=rows,
        eval_dataset=rows,
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=100,
    )
    trainer.train()
    rank = rank_of(tmp_path / "run")
    assert spans_of(rank)["evaluate"] >= 20 * WAIT
    assert sum(block.fetches for block in rank.blocks) == 7


def test_bracketed_methods_look_and_work_as_before_without_a_training(
    model: Any, tmp_path: Path
) -> None:
    trainer = a_trainer(model, tmp_path)
    found = inspect.signature(transformers.Trainer.evaluate).parameters
    assert list(found) == ["self", "eval_dataset", "ignore_keys", "metric_key_prefix"]
    assert "eval_loss" in trainer.evaluate(Rows(4))
    assert len(trainer.predict(Rows(4)).predictions) == 4
    assert not (tmp_path / "run").exists()


def test_the_matmul_rate_is_measured_where_it_is_asked_for(model: Any, tmp_path: Path) -> None:
    asked = MeterCallback(tmp_path / "run", sample_system=False, matmul=True)
    train(model, tmp_path, callbacks=[asked])
    [shape] = rank_of(tmp_path / "run").models
    assert shape.matmul_tflops is not None
    assert shape.matmul_tflops > 0


def test_settings_of_the_user_go_before_those_that_were_read(model: Any, tmp_path: Path) -> None:
    settings = {"batch_size": 2, "dispatcher": "mine", "corpus": "c4"}
    callback = MeterCallback(tmp_path / "run", sample_system=False, settings=settings)
    a_trainer(model, tmp_path, callbacks=[callback]).train()
    values = rank_of(tmp_path / "run").values
    assert (values["batch_size"], values["dispatcher"], values["corpus"]) == (2, "mine", "c4")
    assert values["num_workers"] == 0


@pytest.mark.parametrize(
    "part",
    ["training_meter.open_meter", "transformers_meter.log_figures", "training_meter.TorchWatch"],
)
def test_a_fault_of_the_callback_leaves_the_training_alone(
    model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
) -> None:
    def break_down(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(f"fast_axolotl.integrations.{part}", break_down)
    trainer = a_trainer(model, tmp_path, logging_strategy="steps", logging_steps=2)
    trainer.train()
    assert trainer.state.global_step == 6
    assert "stopped measuring: ZeroDivisionError: ours" in caplog.text
    if "open_meter" not in part:
        end = rank_of(tmp_path / "run").end
        assert end is not None
        assert end.error == "the meter failed: ZeroDivisionError: ours"


def test_an_error_that_is_swallowed_ends_the_record_all_the_same(
    model: Any, tmp_path: Path
) -> None:
    class Bad(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4:
                raise RuntimeError("out of luck")

    callbacks = [Bad(), MeterCallback(tmp_path / "run", sample_system=False)]
    with pytest.raises(RuntimeError, match="out of luck"):
        a_trainer(model, tmp_path, callbacks=callbacks).train()
    end = rank_of(tmp_path / "run").end
    assert end is not None
    assert (end.reason, end.error) == ("exception", "RuntimeError: out of luck")


def test_a_training_tried_again_gets_a_folder_and_the_first_is_given_up(
    model: Any, tmp_path: Path
) -> None:
    class TooLarge(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        tries = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.tries += 1
            if self.tries == 2:
                raise RuntimeError("CUDA out of memory.")

    callbacks = [TooLarge(), MeterCallback(tmp_path / "run", sample_system=False)]
    a_trainer(model, tmp_path, callbacks=callbacks, auto_find_batch_size=True).train()
    end = rank_of(tmp_path / "run").end
    assert end is not None
    assert (end.reason, end.error) == ("exception", "the training was given up")
    assert sum(block.steps for block in rank_of(tmp_path / "run-2").blocks) == 6
