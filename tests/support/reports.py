"""Reports made for tests: of recorded runs and protocols, and of records made up."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import RunRecord, StepBlock, read_run
from fast_axolotl.record.protocol_result import ProtocolResult
from fast_axolotl.report.document import Document
from fast_axolotl.report.live import Moment, lay_out
from fast_axolotl.report.page import report_document
from fast_axolotl.report.runs import ReportRun, run_document
from fast_axolotl.report.terminal import print_document
from support.golden import GOLDEN
from support.records import START_TIME, make_rank, make_run, make_system


def golden_run(name: str) -> RunRecord:
    """``lively`` has jitter, a spike, losses and a GPU; the others are named by their verdicts."""
    return read_run(GOLDEN / "runs" / name)


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


def screen_of(moment: Moment, width: int = 100) -> str:
    """What a terminal of this width shows of a run that goes on."""
    console = Console(width=width, file=io.StringIO())
    with console.capture() as screen:
        console.print(lay_out(moment))
    return "\n".join(line.rstrip() for line in screen.get().splitlines())


def shown(record: RunRecord, *, width: int = 100, **changed: Any) -> str:
    """A run with every figure, as a pipe receives it."""
    return text_of(run_document(report_run(record, **changed)), width)


def make_protocol(
    *,
    are_losses_equal: bool | None = True,
    names: tuple[str, ...] = ("baseline", "drop-in", "streaming"),
    fails: bool = True,
) -> ProtocolResult:
    """Three arms of five pairs, one of which failed; under other names, or the first two."""
    protocol = ProtocolResult.read(GOLDEN / "protocols" / "three-arms")
    new_names = dict(zip(protocol.matrix.arms, names, strict=False))
    well: dict[str, Any] = {} if fails else {"status": "done", "exit_code": 0, "log_tail": ""}
    arms = []
    for arm in protocol.arms[: len(names)]:
        name = new_names[arm.name]
        runs = (replace(run, folder=run.folder.replace(arm.name, name), **well) for run in arm.runs)
        arms.append(replace(arm, name=name, runs=tuple(runs)))
    unequal = "DIFFERENT: at step 12 the baseline lost 1.832 and drop-in 1.911."
    return replace(
        protocol,
        arms=tuple(arms),
        order=tuple(new_names[name] for name in protocol.order if name in new_names),
        matrix=replace(protocol.matrix, arms=names),
        are_losses_equal=are_losses_equal,
        losses=protocol.losses if are_losses_equal else unequal,
    )


def protocol_report(**options: Any) -> Document:
    """Three arms with charts."""
    folders = sorted((GOLDEN / "protocols" / "three-arms" / "runs").iterdir())
    protocol = make_protocol(**options)
    names = [arm.name for arm in protocol.arms]
    return as_report(*map(read_run, folders), names=names, protocol=protocol)


def one_step() -> RunRecord:
    return make_run(make_rank(fetches=1, warmup_steps=0), system=make_system(samples=2))


def long_run(steps: int, *, steps_per_block: int = 20) -> RunRecord:
    """So many steps, each known, with one that took a hundred times as long."""
    own = 0.05
    made = make_rank(fetches=0, warmup_steps=0)
    for first in range(0, steps, steps_per_block):
        walls, hosts = [own] * steps_per_block, [0.004] * steps_per_block
        if first <= steps // 2 < first + steps_per_block:
            walls[0], hosts[0] = 5.0, 4.95
        made.blocks.append(
            StepBlock(
                t=first * own + sum(walls),
                phase="steady",
                first_step=first,
                steps=steps_per_block,
                first_fetch=first,
                fetches=steps_per_block,
                wall_seconds=sum(walls),
                host_wait_seconds=sum(hosts),
                walls=tuple(walls),
                hosts=tuple(hosts),
            )
        )
    return make_run(made, system=make_system(samples=int(steps * own)))
