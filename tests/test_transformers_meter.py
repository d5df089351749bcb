"""The callback in a real ``Trainer``: fetches, steps, spans, settings, figures in the logs."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install transformers"
)
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")

from torch.utils.data import Dataset, IterableDataset  # noqa: E402

from fast_axolotl.integrations.transformers_meter import MeterCallback  # noqa: E402
from fast_axolotl.measure import measure  # noqa: E402
from fast_axolotl.record import read_run  # noqa: E402
from support.hosts import break_down, end_of, spans_of, total  # noqa: E402

# transformers, accelerate and torch warn of one another; forked workers beside threads do, too.
pytestmark = pytest.mark.filterwarnings("default")

WAIT = 0.01
LENGTH = 16


class Rows(Dataset):  # type: ignore[type-arg]
    """Token rows; each takes some time to read."""

    def __init__(self, count: int, seconds: float = 0.0, fails_at: int | None = None) -> None:
        self.count, self.seconds, self.fails_at = count, seconds, fails_at
        self.num_read = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        self.num_read += 1
        if self.num_read == self.fails_at:
            raise OSError("the disk is gone")
        ids = torch.arange(LENGTH) % 50
        mask = (torch.arange(LENGTH) < 12).long()
        labels = torch.where(mask > 0, ids, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        yield from (Rows(100)[index] for index in range(100))


class Reporter(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
    """A stand-in for TensorBoard's or W&B's callback."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


class AtStepEnd(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
    """A callback of the user's that does something after ours has seen the step."""

    def __init__(self, action: Callable[[Any, Any], None]) -> None:
        self.action = action

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self.action(state, control)
        return control


@pytest.fixture(scope="module")
def model() -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


Make = Callable[..., Any]


@pytest.fixture
def make(model: Any, tmp_path: Path) -> Make:
    """Makes a trainer that records into ``run``, beside callbacks and with options of a test."""

    def make_trainer(
        *callbacks: Any,
        rows: Any = None,
        evaluate: Any = None,
        meter: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        arguments = {
            "output_dir": str(tmp_path / "out"),
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "max_steps": 6,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        }
        own = MeterCallback(tmp_path / "run", **{"sample_system": False, **(meter or {})})
        return transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(**arguments),
            train_dataset=Rows(200) if rows is None else rows,
            eval_dataset=evaluate,
            callbacks=[*callbacks, own],
        )

    return make_trainer


def test_fetches_steps_settings_and_the_model_are_recorded_and_figures_join_the_logs(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test may have loaded Axolotl, which is then taken for the one that trains.
    monkeypatch.delitem(sys.modules, "axolotl.train", raising=False)
    settings = {"batch_size": 2, "dispatcher": "mine", "corpus": "c4"}
    has_board = importlib.util.find_spec("tensorboard") is not None
    reporter, rows = Reporter(), Rows(400, WAIT / 2)
    options = {"gradient_accumulation_steps": 2, "meter": {"settings": settings}}
    options |= {"logging_strategy": "steps", "logging_steps": 2}
    trainer = make(reporter, rows=rows, report_to=["tensorboard"] * has_board, **options)
    trainer.train()
    # Before reporters that were there first.
    last = [logs for logs in reporter.logs if "loss" in logs][-1]
    ours = {name for name in last if name.startswith("fast_axolotl/")}
    assert ours == {"fast_axolotl/stall_fraction", "fast_axolotl/tokens_per_second"}
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert "fast_axolotl/stall_fraction" in history[-1]
    assert type(trainer.callback_handler.callbacks[0]).__name__ == "MeterCallback"
    if has_board:
        written = b"".join(path.read_bytes() for path in tmp_path.rglob("events.out.tfevents*"))
        assert b"train/fast_axolotl/stall_fraction" in written
    rank = read_run(tmp_path / "run").ranks[0]
    assert rank.start.source == "transformers"
    assert total(rank, "steps") == 6
    # accelerate is one batch ahead.
    assert total(rank, "fetches") == 13
    assert total(rank, "host_wait_seconds") >= 13 * WAIT
    assert total(rank, "real_tokens") == 13 * 2 * 12
    assert total(rank, "padded_tokens") == 13 * 2 * LENGTH
    assert end_of(tmp_path / "run") == ("finished", "")
    assert (rank.values["gradient_accumulation"], rank.values["num_workers"]) == (2, 0)
    assert rank.values["arguments"] == "TrainingArguments"
    # Those of the user go before those that were read.
    assert {name: rank.values[name] for name in settings} == settings
    [shape] = rank.models
    assert shape.layers == 1
    assert shape.num_parameters > 0
    assert rank.values["attn_implementation"] == "sdpa"


def test_logging_evaluation_and_checkpoints_are_spans_even_where_no_figures_are_logged(
    make: Make, tmp_path: Path
) -> None:
    reporter, rows = Reporter(), Rows(40, WAIT)

    def save(state: Any, control: Any) -> None:
        control.should_save = state.global_step == 8
        if state.global_step == 3:
            trainer.evaluate(rows)  # on the rows of the training

    trainer = make(
        reporter,
        AtStepEnd(save),
        meter={"log": False},
        rows=rows,
        max_steps=10,
        evaluate=Rows(8, 5 * WAIT),
        eval_strategy="steps",
        eval_steps=6,
        logging_strategy="steps",
        logging_steps=4,
    )
    trainer.train()
    rank = read_run(tmp_path / "run").ranks[0]
    spans = spans_of(rank)
    assert set(spans) >= {"log", "evaluate", "checkpoint"}
    assert spans["evaluate"] >= 8 * 5 * WAIT + 40 * WAIT
    # The fetches of these loaders are not the training's.
    assert (total(rank, "steps"), total(rank, "fetches")) == (10, 11)
    assert not any("fast_axolotl" in name for logs in reporter.logs for name in logs)


def test_batches_that_a_resumed_stream_skips_are_no_steps(make: Make, tmp_path: Path) -> None:
    with measure(tmp_path / "run-2", sample_system=False) as unrelated:
        list(unrelated.watch([["row"]] * 3))
    trainer = make(rows=Stream(), save_strategy="steps", save_steps=20, max_steps=20)
    trainer.train()
    trainer.args.max_steps = 30
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-20"))
    assert [path.name for path in (tmp_path / "run-2").iterdir()] == ["rank-0.jsonl"]
    rank = read_run(tmp_path / "run-3").ranks[0]
    # The batches of the first step cannot be told from those before it.
    assert total(rank, "steps") == 9
    assert total(rank, "real_tokens") == 9 * 2 * 12
    assert spans_of(rank)["resume"] > 0
    assert [mark.fetch for mark in rank.marks if mark.name == "resume"] == [21]


def test_bracketed_methods_look_and_work_as_before_without_a_training(
    make: Make, tmp_path: Path
) -> None:
    trainer = make()
    found = inspect.signature(transformers.Trainer.evaluate).parameters
    assert list(found) == ["self", "eval_dataset", "ignore_keys", "metric_key_prefix"]
    assert "eval_loss" in trainer.evaluate(Rows(4))
    assert len(trainer.predict(Rows(4)).predictions) == 4
    assert not (tmp_path / "run").exists()
    assert list(inspect.signature(MeterCallback).parameters)[:2] == ["run_dir", "peak_tflops"]


@pytest.mark.parametrize(
    "part",
    ["training_meter.open_meter", "training_meter.TorchWatch", "transformers_meter.log_figures"],
)
def test_a_fault_of_the_callback_leaves_the_training_alone(
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
) -> None:
    monkeypatch.setattr(f"fast_axolotl.integrations.{part}", break_down)
    trainer = make(logging_strategy="steps", logging_steps=2)
    trainer.train()
    assert trainer.state.global_step == 6
    assert "stopped measuring: ZeroDivisionError: ours" in caplog.text
    if "open_meter" not in part:
        assert end_of(tmp_path / "run")[1] == "the meter failed: ZeroDivisionError: ours"


@pytest.mark.parametrize("is_loader_s", [False, True])
def test_an_error_that_is_swallowed_ends_the_record_all_the_same(
    make: Make, tmp_path: Path, is_loader_s: bool
) -> None:
    def fail(state: Any, control: Any) -> None:
        if state.global_step == 5:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        make(AtStepEnd(fail), rows=Rows(200, fails_at=9 if is_loader_s else None)).train()
    assert end_of(tmp_path / "run") == ("exception", "OSError: the disk is gone")
    marks = [mark.name for mark in read_run(tmp_path / "run").ranks[0].marks]
    assert marks.count("error") == is_loader_s
