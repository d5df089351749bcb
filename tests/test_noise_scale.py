"""The gradient noise scale: known answers, every layout of ranks, and runs left as they are."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl.measure.batch_noise import noise_interval
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import RunSummary, read_run
from fast_axolotl.record.schema import GradientNorms
from support.children import FAST_AXOLOTL, clean_environment, run_child
from support.records import make_rank, make_ranks, make_run, steady

torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")

from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from fast_axolotl.integrations import noise_scale  # noqa: E402
from fast_axolotl.integrations.torch_meter import watch_torch  # noqa: E402
from fast_axolotl.measure import measure  # noqa: E402
from support.noise_ranks import BATCH, DIMENSIONS, DISTANCE, LAYOUTS, Part  # noqa: E402

# transformers, accelerate and torch warn of one another.
pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.filterwarnings("default")]

EXPECTED = DIMENSIONS / DISTANCE**2


@pytest.fixture(autouse=True)
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of these tests take no time, so that norms would be too expensive."""
    monkeypatch.setattr(noise_scale, "MOST_COST", 1e9)


def assert_close(summary: RunSummary, expected: float, share: float = 0.15) -> None:
    figures = summary.gradient_noise_scale_low, summary.gradient_noise_scale_high
    low, high = (value or math.nan for value in figures)
    assert summary.gradient_noise_scale == pytest.approx(expected, rel=share)
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


def test_a_gradient_that_is_lost_in_noise_has_a_lower_bound_only() -> None:
    pairs = [(10.0, 5.0 + (-1) ** step) for step in range(40)]
    found, low, high = noise_interval(pairs, 2)
    assert (found, high) == (None, None)
    assert low is None or low > 0
    assert noise_interval([(1.0, 1.0)] * 40, 2) == [None, None, None]


# One process.


def train(
    folder: Path | None, passes: int = 4, steps: int = 300, *, scaler: Any = None, **change: Any
) -> tuple[Any, Any]:
    """A loop over the quadratic; its weights, and its summary where it is measured."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(steps * passes * BATCH, DIMENSIONS, generator=generator)
    rows[:, 0] += DISTANCE
    model = Part(DIMENSIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=change.get("rate", 0.0))
    meter = measure(folder, sample_system=False) if folder else None
    watch = watch_torch(meter, gradient_noise=True) if meter else None
    if watch:
        watch.__enter__()
    for number, (batch,) in enumerate(DataLoader(TensorDataset(rows), batch_size=BATCH), 1):
        loss = model(batch).mean() / passes
        for _ in range(change.get("backwards", 1)):
            (loss if scaler is None else scaler.scale(loss)).backward(retain_graph=True)
        if number % passes == 0:
            if scaler is not None:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            (optimizer.step if scaler is None else lambda: scaler.step(optimizer))()
            if scaler is not None:
                scaler.update()
            optimizer.zero_grad(set_to_none=change.get("set_to_none", True))
    if watch:
        watch.__exit__(None, None, None)
        meter.close()
    return model.weight.detach(), summarise(read_run(folder)) if folder else None


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_quadratic_has_its_noise_scale_though_gradients_are_clipped(
    tmp_path: Path, set_to_none: bool
) -> None:
    _, summary = train(tmp_path, steps=600, set_to_none=set_to_none)
    assert_close(summary, EXPECTED)
    assert summary.global_batch_samples == 8


def test_a_gradient_scaler_that_changes_its_factor_changes_nothing(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=200)
    _, summary = train(tmp_path, steps=600, scaler=scaler)
    assert scaler.get_scale() > 2.0**10
    assert_close(summary, EXPECTED, 0.2)


def test_weights_are_the_same_bits_with_the_norms_and_without(tmp_path: Path) -> None:
    bare, _ = train(None, steps=20, rate=0.1)
    measured, _ = train(tmp_path, steps=20, rate=0.1)
    assert torch.equal(bare, measured)
    assert read_run(tmp_path).ranks[0].gradients


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"passes": 1}, "one micro-batch of one rank"),
        ({"backwards": 2}, "4 fetches, but 8 backward passes"),
        ({"steps": 20}, "steps of the later half"),
    ],
)
def test_what_cannot_be_known_has_a_reason(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    _, summary = train(tmp_path, **change)
    assert summary.gradient_noise_scale is None
    for end in ("", "_low", "_high"):
        assert reason in summary.reasons[f"gradient_noise_scale{end}"]


def test_our_faults_and_foreign_gradients_end_the_norms_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Part, "_fsdp_flattened", True, raising=False)
    for name, error, reason in (
        ("ours", ZeroDivisionError("ours"), "ZeroDivisionError: ours"),
        ("memory", torch.OutOfMemoryError("full"), "OutOfMemoryError: full"),
    ):
        with monkeypatch.context() as patch:

            def fail(*_: Any, error: Exception = error) -> None:
                raise error

            patch.setattr(noise_scale.NoiseScale, "_square", fail)
            bare, summary = train(tmp_path / name, steps=60, rate=0.1)
        assert torch.equal(bare, train(None, steps=60, rate=0.1)[0])
        assert reason in summary.reasons["gradient_noise_scale"]
        assert summary.steps > 50


def test_fewer_steps_are_looked_at_where_norms_are_expensive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise_scale, "MOST_COST", 1e-4)
    train(tmp_path, steps=200)
    taken = [line.step for line in read_run(tmp_path).ranks[0].gradients]
    assert 9 <= len(taken) < 60
    assert all(step % 16 == 0 for step in taken if step > 20)


# Trainers.


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Any]:
    transformers = pytest.importorskip("transformers")

    def make(model: Any, rows: Any, folder: str | None, **options: Any) -> Any:
        from fast_axolotl.integrations.transformers_meter import MeterCallback

        callback = folder and MeterCallback(
            tmp_path / folder, sample_system=False, gradient_noise=True
        )
        arguments = {
            "output_dir": str(tmp_path / "out"),
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": 12,
            **options,
        }
        return transformers.Trainer(
            model,
            transformers.TrainingArguments(**arguments),
            train_dataset=rows,
            callbacks=[callback] if callback else [],
        )

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
    trainer(
        Regression(),
        rows,
        "run",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=0.0,
        max_grad_norm=0.01,
        num_train_epochs=2,
        remove_unused_columns=False,
    ).train()
    # tr(Σ) = E|x(x·Δ − ε)|² − |Δ|² = σ²·d + (d + 1)·|Δ|² with x ~ N(0, I), and |G|² = |Δ|² = 4.
    assert_close(summarise(read_run(tmp_path / "run")), (10 + 11 * 4) / 4)


def test_lora_trains_to_the_same_bits_and_only_its_adapters_are_looked_at(
    trainer: Callable[..., Any], tmp_path: Path
) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (160, 12))]
    found = []
    for folder in ("run", None):
        torch.manual_seed(4)
        sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
        options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
        trainer(model, rows, folder, learning_rate=0.01, max_steps=20, **options).train()
        found.append({name: item.detach() for name, item in model.named_parameters()})
    assert all(torch.equal(item, found[1][name]) for name, item in found[0].items())
    lines = read_run(tmp_path / "run").ranks[0].gradients
    assert [line.step for line in lines] == list(range(1, 20))
    assert {line.micro_batches for line in lines} == {4}


# Two ranks.


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("noise")
    script = Path(__file__).parent / "support" / "noise_ranks.py"
    children = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), str(rank)],
            env=clean_environment(OMP_NUM_THREADS="1"),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    errors = [child.communicate(timeout=240)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], errors
    return folder, json.loads((folder / "weights-1.json").read_text())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_know_the_noise_scale_and_train_to_the_same_bits(
    ranks: tuple[Path, dict[str, Any]], layout: str
) -> None:
    folder, weights = ranks
    record = read_run(folder / layout)
    summary = summarise(record)
    if layout.startswith("ddp"):
        assert_close(summary, EXPECTED, 0.2)
    assert summary.gradient_noise_scale is not None
    assert summary.global_batch_samples == 2 * BATCH * LAYOUTS[layout][1]
    with_norms, without = weights[layout]
    assert with_norms == without
    assert any(with_norms)
    # Sharded or not, it is the same gradient.
    other = read_run(folder / layout.replace("fsdp", "ddp"))
    for name in ("first", "whole"):
        own, same = (
            [
                sum(getattr(line, name) for line in lines)
                for lines in zip(*(rank.gradients for rank in one.ranks.values()), strict=True)
            ]
            for one in (record, other)
        )
        assert own == pytest.approx(same[: len(own)], rel=1e-4)


def test_a_rank_without_a_record_leaves_the_noise_scale_unknown(
    ranks: tuple[Path, dict[str, Any]],
) -> None:
    record = read_run(ranks[0] / "fsdp-local")
    del record.ranks[1]
    summary = summarise(record)
    assert summary.gradient_noise_scale is None
    assert "ranks left no record" in summary.reasons["gradient_noise_scale"]


# The verdict.


def judged(scale: float, *, wait: float = 0.0, count: int = 1, accumulation: int = 8) -> RunSummary:
    """A run of 8 samples a micro-batch whose noise scale is so many of them."""
    ranks = make_ranks(count, accumulation=accumulation, fetches=4000, wait=steady(wait))
    numbers = random.Random(0)
    for rank in ranks:
        rank.settings[0] = replace(
            rank.settings[0], values={**rank.settings[0].values, "tensor_parallel": 1}
        )
        for step in range(1, 400):
            units, jitter = accumulation * count, numbers.uniform(0.95, 1.05)
            first, whole = jitter * (1 + scale), jitter * (1 + scale / units)
            parts = {"first": first / accumulation**2 / count, "whole": whole / count}
            norms = GradientNorms(t=1.0, step=step, micro_batches=accumulation, **parts)
            rank.add(norms)
    return summarise(make_run(*ranks))


def test_a_batch_far_above_the_noise_scale_is_told_and_acted_on() -> None:
    summary = judged(1.0)
    assert summary.gradient_noise_scale == pytest.approx(8.0, rel=1e-6)
    assert summary.global_batch_samples == 64
    assert summary.verdict.kind == "compute"
    (line,) = [text for text in summary.verdict.evidence if "noise scale" in text]
    assert "global batch 64 samples" in line
    assert "proxy" in line
    action = summary.verdict.action
    assert action.startswith("Set gradient_accumulation_steps to 2 (now 8): by the gradient noise")
    assert "√4 with Adam" in action
    assert "4 times the steps" in action


def test_data_that_is_late_keeps_its_verdict_and_gets_the_line() -> None:
    summary = judged(1.0, wait=0.3)
    assert summary.verdict.kind == "data"
    assert "global batch" not in summary.verdict.action
    assert any("noise scale" in line for line in summary.verdict.evidence)


def test_a_batch_near_or_below_the_noise_scale_is_left_alone() -> None:
    near = judged(8.0)
    assert not any("noise scale" in line for line in near.verdict.evidence)
    below = judged(400.0)
    assert "a larger batch would cost little" in " ".join(below.verdict.evidence)
    assert "too large" not in near.verdict.action + below.verdict.action


def test_a_run_that_nobody_asked_says_how_to_ask() -> None:
    summary = summarise(make_run(make_rank()))
    assert "--gradient-noise" in summary.reasons["gradient_noise_scale"]
    assert summary.global_batch_samples == 8


# The command.

LOOP = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from support.noise_ranks import Part
rows = torch.randn(4000, 8) + torch.eye(8)[0]
model = Part(8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for number, (batch,) in enumerate(DataLoader(TensorDataset(rows), batch_size=5), 1):
    (model(batch).mean() / 2).backward()
    if number % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_the_option_reaches_a_plain_loop(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    command = (sys.executable, "loop.py")
    flags = ("measure", "--gradient-noise", "--quiet", "--output", "run", "--")
    environment = clean_environment(Path(__file__).parent)
    done = run_child(*FAST_AXOLOTL, *flags, *command, cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path / "run").ranks[0].gradients
    refused = run_child(*FAST_AXOLOTL, "run", "--gradient-noise", "--", "true", cwd=tmp_path)
    assert "add --measure" in refused.stderr
