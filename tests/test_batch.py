"""``fast-axolotl batch``: the next size, the knee, and sweeps of real processes."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fast_axolotl
from fast_axolotl.axolotl.longest import copy_longest
from fast_axolotl.cli.plan import batch, batch_document
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.plan.batch import advise, choose_next, find_sizes
from fast_axolotl.protocol.compare import compare_folders
from fast_axolotl.protocol.runner import find_out_of_memory
from fast_axolotl.record.folder import read_run
from fast_axolotl.record.protocol_result import Trial
from support.axolotl import AGAINST_AXOLOTL, ON_A_PROCESSOR

GIGABYTE = 10**9
OVERHEAD, PER_SAMPLE = 0.030, 0.010

SCRIPT = """
import os, sys, time
from fast_axolotl.measure import measure

micro, accumulation, steps, limit = map(int, sys.argv[1:])
with measure(os.environ["FAST_AXOLOTL_MEASURE"]) as meter:
    for batch in meter.watch([{"input_ids": [[1] * 16] * micro}] * (accumulation * steps)):
        if micro > limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        time.sleep(0.02 + 0.0005 * micro)
"""


def trial(micro: int, limit: int = 10**6, share: int = 0, **named: Any) -> Trial:
    """A device whose pass takes 30 ms and 10 ms for each sample; it holds ``limit`` of them."""
    accumulation = share // micro or 1
    found = Trial(micro_batch=micro, accumulation=accumulation, outcome="out of memory")
    if micro > limit:
        return found
    seconds = OVERHEAD + PER_SAMPLE * micro
    rate = 1000 * micro / seconds
    known = {"rate": rate, "low": 0.999 * rate, "high": 1.001 * rate, "total_bytes": 80 * GIGABYTE}
    known |= {"step_seconds": seconds * accumulation, "peak_bytes": micro * GIGABYTE}
    return replace(found, outcome="ran", **{**known, **named})


def sweep(limit: int, share: int = 0, wanted: tuple[int, ...] = ()) -> list[Trial]:
    sizes = find_sizes(share, wanted)
    trials: list[Trial] = []
    while size := choose_next(trials, sizes, is_listed=bool(wanted)):
        trials.append(trial(size, limit, share))
    return trials


@pytest.mark.parametrize(
    ("limit", "share", "order", "told"),
    [
        (6, 0, [1, 2, 4, 8, 6, 7], "6 is the largest that ran; 7 does not fit."),
        (70, 0, [1, 2, 4, 8, 16, 32, 64, 128, 96, 80, 72], "64 is the largest that ran; 72 does"),
        (6, 24, [1, 2, 4, 8, 6], "6 is the largest that ran; 8 does not fit."),
        (100, 12, [1, 2, 4, 6, 12], "gives 3.20 × the tokens/s of 1."),
        (0, 0, [1], "micro-batch: 1 runs out of memory."),
        (5, 7, [1, 7], "1 is the largest that ran; 7 does not fit."),
    ],
)
def test_sizes_are_doubled_and_the_boundary_is_halved(
    limit: int, share: int, order: list[int], told: str
) -> None:
    trials = sweep(limit, share)
    assert [one.micro_batch for one in trials] == order
    assert told in advise(trials).sentences[-1]


def test_a_rate_that_falls_clearly_and_a_failure_end_a_sweep() -> None:
    sizes = find_sizes(0)
    slow = trial(4, rate=10.0, low=9.9, high=10.1)
    assert choose_next([trial(1), trial(2), slow], sizes, is_listed=False) is None
    unsure = replace(slow, high=45_000.0)
    assert choose_next([trial(1), trial(2), unsure], sizes, is_listed=False) == 8
    failed = replace(trial(2), outcome="failed")
    assert choose_next([trial(1), failed], sizes, is_listed=False) is None


def test_listed_sizes_are_all_tried_below_the_one_that_does_not_fit() -> None:
    assert [one.micro_batch for one in sweep(4, 0, (8, 1, 2, 16))] == [1, 2, 8]
    with pytest.raises(UsageError, match=r"micro-batches \[5, 8\] do not divide the 12 samples"):
        find_sizes(12, (1, 4, 5, 8))


def test_the_knee_is_the_smallest_within_three_percent_or_its_interval() -> None:
    found = advise(sweep(300, 512), is_axolotl=True)
    # 64 of 256: 94 and 98.8 ms of 100 for ten samples each.
    assert (found.knee, found.best) == (128, 256)
    assert found.sentences[0] == "Set micro_batch_size: 128 and gradient_accumulation_steps: 4."
    assert "3.91 × the tokens/s of 1; 256 gives 1 % more." in found.sentences[1]
    assert found.sentences[2] == "256 is the largest that ran; 512 does not fit."
    noisy = [trial(1), trial(2, high=10**6), trial(4)]
    assert advise(noisy).knee == 4
    near = [trial(1), trial(2, rate=0.92 * (trial(4).rate or 0), high=10**6), trial(4)]
    assert advise(near).knee == 2
    unclear = [trial(size, low=1.0, high=10**6) for size in (1, 2, 4)]
    assert (advise(unclear).knee, advise(unclear).best) == (None, 4)
    assert "intervals of all overlap" in advise(unclear).sentences[0]
    assert "as fast as any" in advise([trial(1)]).sentences[1]
    assert "runs out of memory" in advise([trial(1, 0)]).sentences[0]
    assert "No run gave a rate" in advise([trial(1, rate=None)]).sentences[0]


def test_pitfalls_are_told_with_their_figures() -> None:
    latency, larger = advise([trial(1), trial(16)]).warnings
    assert "needs another learning rate and may generalise worse" in larger
    assert "40.0 ms, but its throughput is 30 % of the best: low latency" in latency
    [stall] = advise([trial(1, stall=0.4)]).warnings
    assert "waits for data 40.0 %" in stall
    # With a constant global batch learning stays as it is.
    assert not advise(sweep(300, 64)).warnings[1:]


def test_the_longest_batch_has_a_row_that_says_whether_it_fits() -> None:
    own, longest = trial(4), trial(4, rate=None, peak_bytes=61 * GIGABYTE)
    found = {"trials": [own], "advice": advise([own]), "longest_tokens": 8190}
    table = batch_document({**found, "longest": longest}).blocks[0]
    assert table.rows[1][4:] == ("61 GB (76 %)", "the longest rows: 8,190 tokens")
    full = replace(longest, outcome="out of memory", reason="CUDA out of memory")
    lines = batch_document({**found, "longest": full}).blocks[2].lines
    assert "lower micro_batch_size or sequence_len" in lines[-1]


def test_memory_that_ran_out_is_told_from_other_failures(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    for line in (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: HIP out of memory. Tried to allocate",
        "  exitcode  : -9 (pid: 12)",
    ):
        log.write_text(f"a line\n{line}\n" + "another rank\n" * 10_000)
        assert find_out_of_memory(1, log) == line.strip()
    log.write_text("ValueError: out of memory of what happened\n")
    assert not find_out_of_memory(1, log)
    assert "signal 9" in find_out_of_memory(-9, log)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONPATH", str(Path(fast_axolotl.__file__).parents[1]))
    (tmp_path / "train.py").write_text(SCRIPT)
    words = shlex.join([sys.executable, str(tmp_path / "train.py")])
    return f"{words} {{micro_batch}} {{accumulation}} {{steps}} 2"


def test_a_sweep_is_interrupted_and_goes_on(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "s"
    options = ["--global-batch", "4", "--steps", "12", "-o", str(folder)]
    program = [sys.executable, "-m", "fast_axolotl", "batch", "--command", command, *options]
    child = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while not (folder / "runs" / "02-micro-2x2").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child.terminate()
    _, told = child.communicate(timeout=60)
    assert "the same command with --output continues" in told
    before = (folder / "runs" / "01-micro-1x4" / "rank-0.jsonl").stat().st_mtime_ns
    batch(command=command, global_batch=4, steps=12, output=folder, as_json=True)
    found = json.loads(capsys.readouterr().out)
    outcomes = [(one["micro_batch"], one["outcome"]) for one in found["trials"]]
    assert outcomes == [(1, "ran"), (2, "ran"), (4, "out of memory")]
    assert "Tried to allocate" in found["trials"][2]["reason"]
    advice = found["advice"]
    assert advice["knee"] == 2
    assert (folder / "runs" / "01-micro-1x4" / "rank-0.jsonl").stat().st_mtime_ns == before
    assert compare_folders(folder / "runs/01-micro-1x4", folder / "runs/02-micro-2x2").matrix.rows
    # Everything is known by now, and nothing is run.
    batch(command=command, global_batch=4, steps=12, output=folder)
    table = capsys.readouterr().out
    assert "global batch 4" in table
    assert "Set micro-batch: 2 and accumulation: 2." in table
    assert "4 × 1: out of memory: " in table
    with pytest.raises(UsageError, match="holds another protocol"):
        batch(command=f"{command} 1", global_batch=4, steps=12, output=folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "pass an Axolotl configuration"),
        ({"command": "train"}, r"\{micro_batch\} in it"),
        ({"command": "train {micro_batch}", "global_batch": 8}, "go together"),
        ({"command": "train {micro_batch}", "micro_batches": "1,x"}, "cannot read --micro-batches"),
        ({"global_batch": 9, "ranks": 2}, "cannot be divided among 2"),
        ({"command": "t {micro_batch} {accumulation}", "global_batch": 8, "micro_batches": "3"},
         r"micro-batches \[3\] do not divide the 8 samples"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_said(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        batch(**options, output=tmp_path / "s")
    assert not (tmp_path / "s").exists()


class TestAgainstAxolotl:
    pytestmark = AGAINST_AXOLOTL

    def test_a_copy_has_the_longest_rows_or_full_packs(self, tmp_path: Path, stock: Any) -> None:
        datasets = stock("datasets")
        lengths = [1, 4, 2, 7, 3, 6]
        rows = {
            "input_ids": [[size] * size for size in lengths],
            "position_ids": [list(range(size)) for size in lengths],
            "length": lengths,
        }
        for name in ("used", "other"):
            datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "prepared" / name)
        log = tmp_path / "log.txt"
        log.write_text(f"Loading {tmp_path}/prepared/us\ned...")
        config: dict[str, Any] = {"dataset_prepared_path": str(tmp_path / "prepared")}
        assert copy_longest(config, log, tmp_path / "rows", 2, 3) == 7
        assert datasets.load_from_disk(tmp_path / "rows" / "used")["length"][:] == [7, 6] * 3
        config |= {"sample_packing": True, "sequence_len": 9}
        assert copy_longest(config, log, tmp_path / "packs", 2, 3) == 9
        found = datasets.load_from_disk(tmp_path / "packs" / "used")[:]
        assert found["length"] == [9] * 6
        assert found["input_ids"][5] == [7] * 7 + [6] * 2
        assert found["position_ids"][0] == [*range(7), 0, 1]
        log.write_text("nothing")
        with pytest.raises(DataError, match="no single prepared dataset"):
            copy_longest(config, log, tmp_path / "packs", 2, 3)

    def test_the_longest_batches_of_the_prepared_dataset_are_tried(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        from benchmarks.axolotl_inputs import (
            preprocess_config,
            write_config,
            write_model,
            write_rows,
        )

        write_model(tmp_path / "model")
        data = write_rows(tmp_path / "chat.jsonl", 200)
        config = preprocess_config(tmp_path / "model", data, tmp_path / "elsewhere")
        config |= {"sequence_len": 256, "gradient_accumulation_steps": 2, "val_set_size": 0.1}
        config |= {"save_steps": 1, "dataloader_num_workers": 1, **ON_A_PROCESSOR}
        del config["dataset_prepared_path"]
        path = write_config(config, tmp_path / "config.yml")
        monkeypatch.setenv("PYTHONPATH", str(Path(fast_axolotl.__file__).parents[1]))
        launch, folder = "axolotl train {config} --launcher python", tmp_path / "s"
        batch(path, command=launch, micro_batches="2", steps=8, output=folder, as_json=True)
        found = json.loads(capsys.readouterr().out)
        [one], longest = found["trials"], found["longest"]
        assert (one["outcome"], one["accumulation"]) == ("ran", 1)
        assert (longest["outcome"], longest["micro_batch"]) == ("ran", 2), longest["reason"]
        assert sum(block.steps for block in read_run(folder / one["folder"]).ranks[0].blocks) == 8
        assert len(list((folder / "prepared").glob("*/state.json"))) == 1
        log = (folder / longest["folder"] / "log.txt").read_text()
        assert "Loading prepared dataset" in log
        tokens = found["longest_tokens"]
        assert tokens == 256
        for block in read_run(folder / longest["folder"]).ranks[0].blocks:
            assert block.padded_tokens == block.fetches * 2 * tokens
            assert block.real_tokens >= 0.9 * block.padded_tokens
        assert not list(folder.rglob("checkpoint-*"))
