"""The callback in a real Lightning ``Trainer``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install torch")
lightning = pytest.importorskip(
    "lightning.pytorch", reason="Lightning is not installed: pip install lightning"
)

import torch  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from fast_axolotl.integrations.lightning_meter import MeterCallback  # noqa: E402
from fast_axolotl.record import read_run  # noqa: E402
from support.hosts import break_down, end_of, spans_of, total  # noqa: E402

# Lightning advises on the number of workers, and more.
pytestmark = pytest.mark.filterwarnings("default")

WAIT = 0.005


def slow(rows: list[Any]) -> Any:
    time.sleep(WAIT)
    return torch.stack(rows)


def a_loader(count: int) -> Any:
    return DataLoader([torch.ones(4)] * count, batch_size=2, collate_fn=slow)  # type: ignore[arg-type]


class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.fails_at = fails_at

    def training_step(self, batch: Any, index: int) -> Any:
        if index == self.fails_at:
            raise OSError("the disk is gone")
        return self.layer(batch).sum()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.layer(batch).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def fit(folder: Path, module: Any = None, *, validate: Any = None, **options: Any) -> Any:
    arguments = {
        "accelerator": "cpu",
        "max_steps": 10,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "log_every_n_steps": 2,
        **options,
    }
    callback = MeterCallback(folder / "run", sample_system=False, log="all")
    trainer = lightning.Trainer(callbacks=[callback], **arguments)
    trainer.fit(module or Module(), a_loader(100), validate)
    return trainer


def test_fetches_steps_figures_and_spans_of_a_fit(tmp_path: Path) -> None:
    trainer = fit(
        tmp_path,
        validate=a_loader(12),
        val_check_interval=10,
        num_sanity_val_steps=1,
        enable_checkpointing=True,
        accumulate_grad_batches=2,
    )
    rank = read_run(tmp_path / "run").ranks[0]
    assert rank.start.source == "lightning"
    assert (total(rank, "steps"), total(rank, "fetches")) == (10, 20)
    assert total(rank, "host_wait_seconds") >= 20 * WAIT
    assert (rank.values["gradient_accumulation"], rank.values["batch_size"]) == (2, 2)
    assert spans_of(rank)["evaluate"] >= 6 * WAIT
    assert spans_of(rank)["checkpoint"] > 0
    assert "save_checkpoint" not in vars(trainer)
    assert end_of(tmp_path / "run") == ("finished", "")
    assert 0 <= float(trainer.callback_metrics["fast_axolotl/stall_fraction"]) <= 1


def test_an_error_ends_the_record_with_its_name_and_a_fault_of_ours_leaves_the_fit_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        fit(tmp_path / "error", Module(fails_at=6))
    assert end_of(tmp_path / "error" / "run") == ("exception", "OSError: the disk is gone")
    monkeypatch.setattr("fast_axolotl.integrations.lightning_meter.log_figures", break_down)
    trainer = fit(tmp_path)
    assert trainer.global_step == 10
    assert "stopped measuring: ZeroDivisionError: ours" in caplog.text
    assert "save_checkpoint" not in vars(trainer)
    assert end_of(tmp_path / "run")[1] == "the meter failed: ZeroDivisionError: ours"
