"""Reports made up for tests: runs and protocols of every kind that a page has to show."""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import DeviceSample, Log, Mark, RunRecord, StepBlock
from fast_axolotl.record.protocol_result import ProtocolResult
from fast_axolotl.report.document import Document
from fast_axolotl.report.page import report_document
from fast_axolotl.report.runs import ReportRun, run_document
from fast_axolotl.report.terminal import print_document
from support.records import GIGABYTE, START_TIME, every, make_rank, make_run, make_system, steady


def as_report(
    *records: RunRecord, names: Sequence[str] = (), protocol: ProtocolResult | None = None
) -> Document:
    names = list(names) or [f"run-{number}" for number in range(len(records))]
    runs = [report_run(record, name) for name, record in zip(names, records, strict=True)]
    title = protocol.title if protocol else ", ".join(names)
    arm_runs = 0 if protocol is None else len(runs)
    made: dict[str, Any] = {"made": START_TIME + 9000, "version": "0"}
    return report_document(title, runs, protocol=protocol, arm_runs=arm_runs, **made)


def report_run(record: RunRecord, name: str = "", **changed: Any) -> ReportRun:
    return ReportRun(name=name, record=record, summary=replace(summarise(record), **changed))


def text_of(document: Document, width: int = 100) -> str:
    """What a pipe receives."""
    file = io.StringIO()
    print_document(document, file=file, width=width)
    return file.getvalue()


def shown(record: RunRecord, *, width: int = 100, **changed: Any) -> str:
    """A run with every figure, as a pipe receives it."""
    return text_of(run_document(report_run(record, **changed)), width)


def embedded(html: str, name: str) -> Any:
    """The data of a page."""
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found.group(1), parse_constant=pytest.fail)


def lively_run(
    *,
    share: float = 0.3,
    seconds: int = 180,
    own_seconds: float = 0.05,
    gpus: int = 0,
    seed: int = 1,
    **rank: Any,
) -> RunRecord:
    """A run that looks like one: jitter, shards, a spike, memory that fills, reads that come."""
    chance = random.Random(seed)
    long = every(64, share * 0.6, own_seconds)
    usual = share * 0.4 * own_seconds / (1 - share)

    def wait(fetch: int) -> float:
        return long(fetch) * chance.uniform(0.6, 1.4) + usual * chance.expovariate(1.0)

    fetches = int(seconds * (1 - share) / own_seconds)
    made = make_rank(
        wait=wait,
        device_wait=(lambda fetch: wait(fetch) * 0.8) if gpus else None,
        own_seconds=own_seconds,
        fetches=fetches,
        tokens=8 * 512,
        padded=8 * 640,
        settings={"num_workers": 2, "prefetch_factor": 4, "batch_size": 8, "dispatcher": False},
        **rank,
    )
    add_singles(made.blocks, chance)
    for number, block in enumerate(made.blocks):
        if number % 25 == 10:
            made.add(Mark(t=block.t, name="shard", fetch=block.first_fetch))
    for number in range(0, fetches, 10):
        loss = 2.5 * 0.9985**number + 0.6 + chance.gauss(0, 0.01)
        made.add(Log(t=number * own_seconds, step=number, values={"loss": loss}))
    return make_run(made, system=lively_system(seconds, chance, gpus=gpus))


def add_singles(blocks: list[StepBlock], chance: random.Random) -> None:
    """The times of single steps, as the meter writes them."""
    for number, block in enumerate(blocks):
        if not 0 < block.steps <= 64:
            continue
        rough = [chance.gauss(1.0, 0.04) for _ in range(block.steps)]
        own = (block.wall_seconds - block.host_wait_seconds) / sum(rough)
        slow = {one.fetch - block.first_fetch: one.seconds for one in block.slow}
        rest = max(0.0, block.host_wait_seconds - sum(slow.values())) / block.steps
        waits = [slow.get(place, 0.0) + rest for place in range(block.steps)]
        walls = [one * own + wait for one, wait in zip(rough, waits, strict=True)]
        blocks[number] = replace(block, walls=tuple(walls), hosts=tuple(waits))


def lively_system(seconds: int, chance: random.Random, *, gpus: int = 0) -> Any:
    system = make_system(
        samples=seconds,
        start={
            "limit_bytes": 16 * GIGABYTE,
            "disk_bytes_per_second": 1.4e9,
            "gpu_names": ("NVIDIA H200",) * gpus,
        },
    )
    read = chars = 0.0
    for number, sample in enumerate(system.samples):
        level = 6.0 * (1 - 0.97**number) + 1.5 + chance.gauss(0, 0.05)
        read += max(0.0, chance.gauss(120e6, 60e6)) if number % 25 < 8 else 0.0
        chars += max(0.0, chance.gauss(300e6, 40e6))
        devices = tuple(
            DeviceSample(
                index=index,
                utilization=min(1.0, max(0.0, chance.gauss(0.86, 0.06))),
                memory_bytes=int(61e9 + 2e9 * min(1.0, number / 20)),
                power_watts=510.0,
                clock_mhz=1830.0,
            )
            for index in range(gpus)
        )
        system.samples[number] = replace(
            sample,
            pss_bytes=int(level * GIGABYTE) if number % 5 == 0 else None,
            anon_bytes=int((level - 1.1) * GIGABYTE),
            rss_bytes=int((level + 1.0) * GIGABYTE),
            hwm_bytes=int((level + 1.2 + (2.5 if number > 15 else 0.0)) * GIGABYTE),
            read_bytes=int(read),
            read_chars=int(chars),
            gpus=devices,
        )
    return system


PROTOCOLS = Path(__file__).parents[1] / "golden" / "protocols"


def make_protocol(
    *,
    are_losses_equal: bool | None = True,
    names: tuple[str, ...] = ("baseline", "drop-in", "streaming"),
    fails: bool = True,
) -> ProtocolResult:
    """Three arms of five pairs, one of which failed; under other names, or the first two."""
    protocol = ProtocolResult.read(PROTOCOLS / "three-arms")
    new_names = dict(zip(protocol.matrix.arms, names, strict=False))
    well: dict[str, Any] = {} if fails else {"status": "done", "exit_code": 0, "log_tail": ""}
    arms = []
    for arm in protocol.arms[: len(names)]:
        name = new_names[arm.name]
        runs = (replace(run, folder=run.folder.replace(arm.name, name), **well) for run in arm.runs)
        arms.append(replace(arm, name=name, runs=tuple(runs)))
    changes: dict[str, Any] = {}
    if not are_losses_equal:
        changes["losses"] = "DIFFERENT: at step 12 the baseline lost 1.832 and drop-in 1.911."
    return replace(
        protocol,
        arms=tuple(arms),
        order=tuple(new_names[name] for name in protocol.order if name in new_names),
        matrix=replace(protocol.matrix, arms=names),
        are_losses_equal=are_losses_equal,
        **changes,
    )


def middle_of_a_protocol() -> ProtocolResult:
    """One warm-up run each of two arms, of six planned runs, and nothing that counts."""
    return ProtocolResult.read(PROTOCOLS / "in-the-middle")


def protocol_report(**options: Any) -> Document:
    """Three arms with charts."""
    records = [
        lively_run(share=0.34, seconds=96, seed=1),
        lively_run(share=0.12, seconds=80, seed=2),
        lively_run(share=0.012, seconds=70, seed=3),
    ]
    protocol = make_protocol(**options)
    return as_report(*records, names=[arm.name for arm in protocol.arms], protocol=protocol)


def drained_run(steps: int = 800) -> RunRecord:
    """A queue of 64 batches hides a loader that is too slow, until it is empty at step 384."""

    def wait(fetch: int) -> float:
        return 0.02 + (0.3 if fetch % 50 == 0 else 0.0) if fetch >= 384 or fetch % 100 == 0 else 0.0

    rank = make_rank(
        wait=wait,
        queue=lambda step: max(0.0, 64 - step / 6),
        own_seconds=0.1,
        warmup_steps=65,
        fetches=steps - 65,
        settings={"num_workers": 2, "prefetch_factor": 32},
    )
    return make_run(rank)


def many_ranks(count: int = 64, seconds: int = 60) -> RunRecord:
    chance = random.Random(5)
    ranks = [
        make_rank(
            rank=number,
            world_size=count,
            wait=steady(0.24 if number == 17 else chance.uniform(0.01, 0.06), 0.1),
            own_seconds=0.1,
            fetches=int(seconds / 0.11),
            tokens=4096,
        )
        for number in range(count)
    ]
    return make_run(*ranks, system=make_system(samples=seconds))


def one_step() -> RunRecord:
    return make_run(make_rank(fetches=1, warmup_steps=0), system=make_system(samples=2))


def with_nans() -> RunRecord:
    """Figures that are no numbers, in every place that a record has."""
    nan = float("nan")
    record = lively_run(seconds=40)
    rank = record.ranks[0]
    rank.blocks[5] = replace(rank.blocks[5], wall_seconds=nan, host_wait_seconds=nan)
    walls = tuple(nan for _ in rank.blocks[6].walls or ())
    rank.blocks[6] = replace(rank.blocks[6], walls=walls)
    rank.logs[30:] = [replace(log, values={"loss": nan}) for log in rank.logs[30:]]
    assert record.system is not None
    record.system.samples[3] = replace(record.system.samples[3], pss_bytes=nan)  # type: ignore[arg-type]
    return record


def long_run(steps: int = 1_000_000, *, steps_per_block: int = 20) -> RunRecord:
    """So many steps, each known, with one that took a hundred times as long."""
    own = 0.05
    blocks = []
    for first in range(0, steps, steps_per_block):
        count = min(steps_per_block, steps - first)
        walls = [own] * count
        hosts = [0.004] * count
        if first <= steps // 2 < first + count:
            walls[0], hosts[0] = 5.0, 4.95
        blocks.append(
            StepBlock(
                t=first * own + sum(walls),
                phase="steady",
                first_step=first,
                steps=count,
                first_fetch=first,
                fetches=count,
                wall_seconds=sum(walls),
                host_wait_seconds=sum(hosts),
                samples=8 * count,
                real_tokens=4096 * count,
                host_waits={"417": count},
                step_times={"547": count},
                walls=tuple(walls),
                hosts=tuple(hosts),
            )
        )
    made = make_rank(fetches=0, warmup_steps=0)
    made.blocks.extend(blocks)
    return make_run(made, system=make_system(samples=int(steps * own)))
