"""How a job scales: losses that add up, and the command."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl.cli.plan import scale
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.plan.scale import Run, Scaling, make_scaling
from fast_axolotl.protocol.plan import Plan, plan_arm, plan_world_sizes
from fast_axolotl.protocol.statistics import compare_runs
from fast_axolotl.record import ModelShape, ProfileWindow
from fast_axolotl.record.folder import dump_line
from support.children import FAST_AXOLOTL, run_child
from support.records import make_ranks, make_run, steady, write_run

TRAIN = """
import os, torch
from torch.utils.data import DataLoader

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
rows = [{"input_ids": torch.ones(64, dtype=torch.long)}] * 400
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(rows, batch_size=2):
    model(batch["input_ids"].float()).sum().backward()
    optimizer.step()
del model  # holds the group, whose threads could abort the process at its exit
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def made(gpus: int, rate: float, batch: float = 0.0, **values: Any) -> Run:
    return Run(name=f"{gpus}-gpus", gpus=gpus, rate=rate, batch=batch or 8.0 * gpus, **values)


def scaled(*runs: Run, **options: Any) -> Scaling:
    return make_scaling(runs, compare_runs, **{"unit": "tokens", **options})


def test_parts_add_up_to_the_loss_and_what_is_left_is_shown() -> None:
    one = made(1, 1000.0, 64.0, figures={
        "data": 0.02, "communication": 0.0, "transfer": 0.0,
    })  # fmt: skip
    # Four GPUs take 1.25 times the time for a token.
    four = made(4, 3200.0, 64.0, figures={
        "data": 0.05, "communication": 0.12, "transfer": 0.09,
    })  # fmt: skip
    found = scaled(one, four)
    losses = found.counts[1].losses
    assert found.kind == "strong"
    assert found.counts[1].efficiency == pytest.approx(0.8)
    assert sum(losses.values()) == pytest.approx(0.2)
    assert losses["data"] == pytest.approx(0.05 - 0.02 * 0.8)
    assert losses["transfer"] == pytest.approx(0.09)
    assert losses["waiting for the slowest"] == pytest.approx(0.03)
    assert losses["not explained"] == pytest.approx(0.2 - 0.034 - 0.12)
    # Without a profiler window communication is not 0: it is not explained.
    blind = scaled(one, replace(four, figures={"data": 0.05}))
    assert set(blind.counts[1].losses) == {"data", "not explained"}
    assert any("--profile-steps" in note for note in blind.notes)


def test_batches_tell_weak_from_strong_and_from_neither() -> None:
    for batch, kind in ((16, "weak"), (8, "strong"), (11, "neither")):
        assert scaled(made(1, 10.0, 8), made(2, 19.0, batch)).kind == kind


def test_intervals_come_from_repeats_or_pairs() -> None:
    repeats = scaled(
        *(made(1, rate) for rate in (98.0, 100.0, 103.0)), made(2, 180.0), made(2, 184.0)
    )
    first, second = repeats.counts
    estimate = compare_runs([98.0, 100.0, 103.0], [90.0, 92.0], is_paired=False)
    assert (first.runs, second.runs) == (3, 2)
    assert (second.efficiency_low, second.efficiency_high) == (estimate.low, estimate.high)
    # The machine is 30 % slower in the second round: pairs do not see it.
    paired = scaled(
        made(1, 100.0, pair="0"), made(2, 180.0, pair="0"),
        made(1, 70.0, pair="1"), made(2, 126.7, pair="1"),
    )  # fmt: skip
    assert paired.counts[1].efficiency_low == pytest.approx(0.9, abs=0.04)
    single = scaled(made(1, 100.0), made(2, 190.0))
    assert single.counts[1].efficiency_low is None
    assert single.notes[0].startswith("A single run has no interval")


def test_more_gpus_that_cost_more_are_named() -> None:
    few = made(1, 1000.0, 64.0, figures={"data": 0.01})
    found = scaled(few, made(8, 4000.0, 64.0, figures={"data": 0.2}))
    assert found.warnings == (
        "More GPUs cost more: the same work on 8 GPUs costs 2.00 times as much as on 1.",
    )
    assert found.counts[1].losses["data"] == pytest.approx(0.2 - 0.01 * 0.5)
    assert not scaled(made(1, 1000.0), made(8, 7900.0)).warnings


def test_another_model_is_refused_and_other_differences_are_named() -> None:
    job = {"parameters": 8_000_000_000, "torch": "2.10", "GPU": "H100"}
    one = made(1, 10.0, job=job)
    other = replace(one, gpus=2, name="other", rate=20.0, job={**job, "torch": "2.11"})
    [warning] = scaled(one, other).warnings
    assert warning == "These are not the same job: torch is 2.10 in 1-gpus, 2.11 in other."
    with pytest.raises(DataError, match=r"other.*another model: .* in 1-gpus, 1000 in other"):
        scaled(one, replace(other, job={"parameters": 1000}))


def record(
    folder: Path, ranks: int, stall: float = 0.0, seconds: float = 0.05, **more: Any
) -> Path:
    """A run with a window in which a tenth of the time is communication that nothing hides."""
    model = ModelShape(num_parameters=1000, layers=2, attention_width=8)
    made_up = make_ranks(
        ranks, own_seconds=seconds, wait=steady(stall, seconds), tokens=512, **more
    )
    for rank in made_up:
        rank.add(model)
    write_run(folder, make_run(*made_up))
    window = ProfileWindow(
        t=1.0, steps=2, wall_seconds=1.0, exposed_communication_seconds=0.1, collectives=(0.1,)
    )
    for path in folder.glob("rank-*.jsonl") if ranks > 1 else ():
        first, *rest = path.read_text().splitlines()
        path.write_text("\n".join([first, dump_line(window), *rest, ""]))
    return folder


def test_records_are_read_and_the_table_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        record(tmp_path / str(count), count, stall, seconds)
        for count, stall, seconds in ((1, 0.0, 0.05), (2, 0.05, 0.0556), (4, 0.1, 0.0556))
    ]
    scale(folders, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["unit"]) == ("weak", "tokens")
    one, _, four = found["counts"]
    assert one["rate"] == pytest.approx(512 / 0.05, rel=1e-3)
    assert four["efficiency"] == pytest.approx(0.9 * 0.05 / 0.0556, rel=1e-3)
    assert four["losses"]["data"] == pytest.approx(0.1, abs=1e-3)
    assert four["losses"]["transfer"] == pytest.approx(0.1, abs=1e-3)
    assert four["losses"]["not explained"] == pytest.approx(-0.01, abs=2e-3)
    scale(folders)
    text = capsys.readouterr().out
    assert "Scaling, weak: same batch per GPU" in text
    assert "waiting for the slowest" in text
    scale([folders[0], record(tmp_path / "strong", 2, samples=4)], as_json=True)
    assert json.loads(capsys.readouterr().out)["kind"] == "strong"


def test_what_cannot_be_compared_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", 2)
    for runs in ([folder], [folder, record(tmp_path / "again", 2)]):
        with pytest.raises(
            UsageError, match=r"runs? on 2 GPUs: pass runs on two or more numbers of GPUs"
        ):
            scale(runs)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no record"):
        scale([folder, tmp_path / "empty"])
    (folder / "rank-1.jsonl").unlink()
    with pytest.raises(DataError, match="holds 1 of 2 ranks"):
        scale([folder, record(tmp_path / "one", 1)])
    done = run_child(*FAST_AXOLOTL, "scale")
    assert (done.returncode, done.stdout) == (2, "")


def test_arms_of_a_protocol_are_world_sizes() -> None:
    command = "torchrun --nproc-per-node {world_size} train.py"
    plan = Plan(title="", arms=(plan_arm("command", command),))
    found = plan_world_sizes(plan, [4, 1, 2])
    assert [arm.name for arm in found.arms] == ["1-gpu", "2-gpus", "4-gpus"]
    assert found.arms[2].command == ("torchrun", "--nproc-per-node", "4", "train.py")
    assert found.same_work is None
    with pytest.raises(UsageError, match="two or more numbers of GPUs"):
        plan_world_sizes(plan, [2, 2])
    with pytest.raises(UsageError, match=r"needs \{world_size\} in --command"):
        plan_world_sizes(Plan(title="", arms=(plan_arm("command", "python train.py"),)), [1, 2])


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_a_protocol_of_real_ranks_scales(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = (
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node {{world_size}}"
    )
    words = ("--command", f"{command} train.py", "--world-size", "1,2", "--profile-steps", "20")
    words += ("--pairs", "1", "--warmup", "0", "-o", "protocol")
    done = run_child(*FAST_AXOLOTL, "protocol", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run_child(*FAST_AXOLOTL, "scale", "protocol", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    one, two = found["counts"]
    assert (one["gpus"], two["gpus"], found["kind"]) == (1, 2, "weak")
    assert two["losses"]["transfer"] > 0
    assert sum(two["losses"].values()) == pytest.approx(1 - two["efficiency"])
