"""The gradient noise scale: known answers, every layout of ranks, and runs left as they are."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl.measure.batch_noise import noise_interval
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import RunSummary, read_run
from fast_axolotl.record.schema import GradientNorms
from support.children import FAST_AXOLOTL, clean_environment, run_child
from support.records import make_rank, make_run, steady

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")

from fast_axolotl.integrations import noise_scale  # noqa: E402
from support.noise_ranks import BATCH, DIMENSIONS, DISTANCE, LAYOUTS, train  # noqa: E402

# transformers, accelerate and torch warn of one another.
pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.filterwarnings("default")]

NAMES = [f"gradient_noise_scale{end}" for end in ("", "_low", "_high")]
EXPECTED = DIMENSIONS / DISTANCE**2


def assert_close(summary: RunSummary, expected: float, share: float) -> None:
    found, low, high = (getattr(summary, name) or math.nan for name in NAMES)
    assert found == pytest.approx(expected, rel=share)
    assert low <= expected <= high, (low, expected, high)


# By arithmetic.


@pytest.mark.parametrize(("dimensions", "units", "steps"), [(41, 2, 60), (41, 6, 60), (8, 4, 20)])
def test_the_interval_holds_the_true_noise_scale_as_often_as_it_says(
    dimensions: int, units: int, steps: int
) -> None:
    numbers, hits, trials = random.Random(3), 0, 150
    for _ in range(trials):
        pairs = []
        for _ in range(steps):
            rows = [[numbers.gauss(0, 1) for _ in range(dimensions)] for _ in range(units)]
            for row in rows:
                row[0] += DISTANCE
            mean = [sum(column) / units for column in zip(*rows, strict=True)]
            pairs.append((sum(v * v for v in rows[0]), sum(v * v for v in mean)))
        _, low, high = noise_interval(pairs, units)
        expected = dimensions / DISTANCE**2
        hits += low is not None and low <= expected <= (high or math.inf)
    assert 0.88 <= hits / trials <= 0.995


# One process.


@pytest.mark.parametrize("layout", ["alone", "alone-zeroed", "alone-scaled"])
def test_a_quadratic_has_its_noise_scale_though_gradients_are_clipped(
    tmp_path: Path, layout: str
) -> None:
    """With gradients dropped or zeroed, and with a gradient scaler whose factor grows."""
    train(layout, 600, 0.0, tmp_path, passes=4)
    summary = summarise(read_run(tmp_path / layout))
    assert_close(summary, EXPECTED, 0.15)
    assert summary.global_batch_samples == 4 * BATCH


def test_weights_are_the_same_bits_with_the_norms_and_without(tmp_path: Path) -> None:
    bare = train("alone", 20, 0.1, None, passes=4)
    assert train("alone", 20, 0.1, tmp_path, passes=4) == bare
    assert len(read_run(tmp_path / "alone").ranks[0].gradients) == 19


@pytest.mark.parametrize(
    ("steps", "change", "reason"),
    [
        (60, {"passes": 1}, "only one micro-batch on one rank"),
        (60, {"passes": 4, "backwards": 2}, "4 fetches, but 8 backward passes"),
        (20, {"passes": 4}, "10 steps of the second half"),
        (60, {"passes": 4, "is_flattened": True}, "FSDP1"),
    ],
)
def test_what_cannot_be_known_has_a_reason(
    tmp_path: Path, steps: int, change: dict[str, Any], reason: str
) -> None:
    train("alone", steps, 0.0, tmp_path, **change)
    summary = summarise(read_run(tmp_path / "alone"))
    for name in NAMES:
        assert getattr(summary, name) is None
        assert reason in summary.reasons[name]


@pytest.mark.parametrize("error", [ZeroDivisionError("ours"), torch.OutOfMemoryError("full")])
def test_our_faults_end_the_norms_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(noise_scale.NoiseScale, "_square", fail)
    bare = train("alone", 60, 0.1, None, passes=2)
    assert train("alone", 60, 0.1, tmp_path, passes=2) == bare
    summary = summarise(read_run(tmp_path / "alone"))
    assert f"{type(error).__name__}: {error}" in summary.reasons[NAMES[0]]
    assert summary.steps > 50


# Trainers.


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Any]:
    transformers = pytest.importorskip("transformers")

    def make(model: Any, rows: Any, folder: str | None, **options: Any) -> Any:
        from fast_axolotl.integrations.transformers_meter import MeterCallback

        arguments = {
            "output_dir": str(tmp_path / "out"),
            "gradient_accumulation_steps": 4,
            "remove_unused_columns": False,
            "report_to": [],
            "use_cpu": True,
            "seed": 12,
            **dict.fromkeys(("logging_strategy", "save_strategy"), "no"),
            **options,
        }
        meters = [MeterCallback(tmp_path / folder, gradient_noise=True)] if folder else []
        arguments = transformers.TrainingArguments(disable_tqdm=True, **arguments)
        return transformers.Trainer(model, arguments, train_dataset=rows, callbacks=meters)

    return make


class Regression(torch.nn.Module):
    """y = x·w + noise, held at a distance from the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(10))

    def forward(self, x: Any, y: Any) -> dict[str, Any]:
        return {"loss": 0.5 * (x @ self.weight - y).square().mean()}


def test_a_linear_regression_in_a_trainer_has_the_noise_scale_of_its_formula(
    trainer: Callable[..., Any], tmp_path: Path
) -> None:
    torch.manual_seed(2)
    x, answer = torch.randn(6400, 10), torch.zeros(10)
    answer[0] = 2.0
    y = x @ answer + torch.randn(6400)
    rows = [{"x": one, "y": other} for one, other in zip(x, y, strict=True)]
    options = {"per_device_train_batch_size": 4, "learning_rate": 0.0, "max_grad_norm": 0.01}
    trainer(Regression(), rows, "run", num_train_epochs=2, **options).train()
    # tr(Σ) = E|x(x·Δ − ε)|² − |Δ|² = σ²·d + (d + 1)·|Δ|² with x ~ N(0, I), and |G|² = |Δ|² = 4.
    assert_close(summarise(read_run(tmp_path / "run")), (10 + 11 * 4) / 4, 0.15)


# Two ranks.

Ranks = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("noise")
    script = Path(__file__).parent / "support" / "noise_ranks.py"
    children = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), rank],
            env=clean_environment(OMP_NUM_THREADS="1"),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    errors = [child.communicate(timeout=240)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], errors
    return folder, json.loads((folder / "weights-1.json").read_text())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_know_the_noise_scale_and_train_to_the_same_bits(
    ranks: Ranks, layout: str
) -> None:
    folder, weights = ranks
    with_norms, without = weights[layout]
    assert with_norms == without
    assert any(with_norms)
    records = [read_run(folder / name) for name in (layout, layout.replace("fsdp", "ddp"))]
    summaries = [*map(summarise, records)]
    lines = [list(one.ranks.values()) for one in records]
    assert_close(summaries[1], EXPECTED, 0.2)
    del records[1].ranks[1]
    assert "ranks left no record" in summarise(records[1]).reasons[NAMES[0]]
    assert summaries[0].gradient_noise_scale is not None
    assert summaries[0].global_batch_samples == 2 * BATCH * LAYOUTS[layout][0]
    # Sharded or not, it is the same gradient.
    for name in ("first", "whole"):
        own, same = (
            [sum(values) for values in zip(*lists, strict=True)]
            for lists in (
                [[getattr(line, name) for line in rank.gradients] for rank in one] for one in lines
            )
        )
        assert own == pytest.approx(same[: len(own)], rel=1e-4)


# The verdict.


def judged(scale: float, wait: float = 0.0) -> RunSummary:
    """A run of eight micro-batches a step whose noise scale is so many of them."""
    rank, numbers = make_rank(accumulation=8, fetches=4000, wait=steady(wait)), random.Random(0)
    for step in range(400):
        length = numbers.uniform(0.95, 1.05)
        norms = {"first": length * (1 + scale) / 64, "whole": length * (1 + scale / 8)}
        rank.add(GradientNorms(t=1.0, step=step, micro_batches=8, **norms))
    return summarise(make_run(rank))


def test_a_batch_far_above_the_noise_scale_is_told_and_acted_on() -> None:
    summary = judged(1.0)
    assert (summary.global_batch_samples, summary.verdict.kind) == (64, "compute")
    assert "--gradient-noise" in summarise(make_run(make_rank())).reasons[NAMES[0]]
    (line,) = [text for text in summary.verdict.evidence if "noise scale" in text]
    assert "global batch of 64 samples, gradient noise scale at most 8 samples" in line
    assert "proxy" in line
    action = summary.verdict.action
    assert action.startswith(
        "Set gradient_accumulation_steps to 2 (now 8): according to the gradient"
    )


def test_data_that_is_late_keeps_its_verdict_and_a_batch_that_fits_is_left_alone() -> None:
    late, near, below = judged(1.0, wait=0.3), judged(8.0), judged(400.0)
    assert late.verdict.kind == "data"
    told = [any("noise scale" in text for text in one.verdict.evidence) for one in (late, near)]
    assert told == [True, False]
    for one in (late, near, below):
        assert "gradient_accumulation_steps" not in one.verdict.action


def test_the_option_reaches_a_plain_loop(tmp_path: Path) -> None:
    loop = "from support.noise_ranks import train\ntrain('alone', 90, 0.0, None, passes=2)\n"
    (tmp_path / "loop.py").write_text(loop)
    flags = ("measure", "--gradient-noise", "--quiet", "--output", "run", "--")
    command = (*FAST_AXOLOTL, *flags, sys.executable, "loop.py")
    environment = clean_environment(Path(__file__).parent)
    done = run_child(*command, cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path / "run").ranks[0].gradients
    refused = run_child(*FAST_AXOLOTL, "run", "--gradient-noise", "--", "true", cwd=tmp_path)
    assert "add --measure" in refused.stderr
