"""A pretraining run over a stream: the same batches, memory of the process tree, and the stalls.

Two inputs: documents of 2 kB, where everything is compared; and documents of 1 MB, where Axolotl's
buffer, which counts rows, holds whatever they weigh, and ours is bounded by bytes. There the
batches may differ, since the buffers end elsewhere: no speed is told, but memory.

A stall is the time that the training loop waits for its next batch, over that time and the steps'.
The first batch is told apart: it fills the first buffer.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fast_axolotl.bench.axolotl_cases import TRAIN_COMMAND, AxolotlSession, Race
from fast_axolotl.bench.axolotl_driver import WATCHING
from fast_axolotl.bench.axolotl_inputs import streaming_config, write_config, write_documents
from fast_axolotl.bench.axolotl_prepared import batches_difference
from fast_axolotl.bench.axolotl_runs import OURS, STOCK, Run
from fast_axolotl.bench.goals import most_goal
from fast_axolotl.bench.matrix import Goal
from fast_axolotl.bench.operation_result import Measurement, OperationCase

__all__ = [
    "STREAMING",
    "peak_above_bytes",
    "peak_bytes",
    "stall_share",
    "streaming_case",
]

_MEGABYTE = 1_000_000
_BEGIN, _FIRST, _END = "first batch asked for", "first step", "trained"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    document_bytes: int
    steps: int
    buffer_rows: int
    """``streaming_multipack_buffer_size`` of both."""
    share: float
    """Of the asked-for size of the file."""
    budget_bytes: int | None = None
    """What ours may take for the first batch, beyond what it held before."""
    buffer_bytes: int | None = None
    """At which ours ends a buffer; ``None`` leaves that to the rows, as stock does."""


STREAMING: Mapping[str, _Stream] = {
    "streaming": _Stream(document_bytes=2000, steps=60, buffer_rows=100, share=1.0),
    "streaming-1mb": _Stream(
        document_bytes=_MEGABYTE,
        steps=20,
        buffer_rows=64,
        share=0.25,
        budget_bytes=256 * 1024**2,
        buffer_bytes=8 * 1024**2,
    ),
}
"""The buffers are smaller than Axolotl's default of 10,000 rows, so that a short run meets some."""


def streaming_case(name: str, session: AxolotlSession, megabytes: int) -> OperationCase:
    """``axolotl train`` on a stream, stock and with our reader."""
    stream = STREAMING[name]
    data = session.folder / f"{name}.jsonl"
    session.tell(f"{name}: writing the documents")
    write_documents(data, round(megabytes * _MEGABYTE * stream.share), stream.document_bytes)
    race = Race(
        name=name,
        command=TRAIN_COMMAND,
        configure=_configure(stream, session, data),
        difference=batches_difference if stream.buffer_bytes is None else _no_difference,
        session=session,
        watch_memory=True,
    )
    shutil.rmtree(race.check().folder)
    race.count()
    timings = race.timings(stream.steps, "stream → steps", _training_seconds)
    size = data.stat().st_size
    data.unlink()
    kilobytes = stream.document_bytes // 1000
    return OperationCase(
        name=name,
        text=f"{size / _MEGABYTE:,.0f} MB, documents of {kilobytes:,} kB, {stream.steps} steps",
        rows=stream.steps,
        unit="steps",
        timings=timings if stream.buffer_bytes is None else (),
        rivals={STOCK: OURS},
        measurements=(*_measurements(race), race.answered()),
        goals=tuple(_goals(stream, race)),
    )


def _configure(stream: _Stream, session: AxolotlSession, data: Path) -> Callable[[str, Path], Path]:
    def configure(arm: str, folder: Path) -> Path:
        config = streaming_config(
            session.model,
            data,
            folder / "output",
            steps=stream.steps,
            buffer_rows=stream.buffer_rows,
            ours=arm == OURS,
        )
        if arm == OURS and stream.budget_bytes is not None:
            config["fast_axolotl_memory_budget"] = stream.budget_bytes // 2
            config["fast_axolotl_buffer_bytes"] = stream.buffer_bytes
        return write_config(config, folder / "config.yml")

    return configure


def _no_difference(_: Run, __: Run) -> str | None:
    return None


def _training_seconds(run: Run) -> float:
    return run.work_seconds(since=_BEGIN, until=_END, apart=(WATCHING,))


def stall_share(run: Run) -> float:
    """Of the time from the second batch on."""
    first, *waits = run.ledgers[0]["waits"]
    return sum(waits) / (_training_seconds(run) - first)


def peak_bytes(run: Run) -> int | None:
    """The most PSS of the process tree."""
    return max((sample.pss_bytes for sample in run.memory), default=None)


def peak_above_bytes(run: Run) -> int | None:
    """The most anonymous PSS until the first batch is there, above that when it was asked for.

    Afterwards the memory of the steps is in it, too, which is none of the data's.
    """
    begin, end = run.at(_BEGIN), run.at(_FIRST)
    before = [sample.anonymous_bytes for sample in run.memory if sample.at <= begin]
    during = [sample.anonymous_bytes for sample in run.memory if begin < sample.at <= end]
    return max(during) - before[-1] if before and during else None


def _measurements(race: Race) -> list[Measurement]:
    found = []
    for arm, runs in race.runs.items():
        for number, run in enumerate(runs, start=1):
            peak = peak_bytes(run)
            values = {
                "peak_pss_bytes": peak,
                "for_the_first_batch_bytes": peak_above_bytes(run),
                "first_batch_seconds": run.ledgers[0]["waits"][0],
                "stall_share": stall_share(run),
            }
            reason = None if peak is not None else "this system tells no PSS"
            found.append(Measurement(name=f"{arm}, run {number}", values=values, reason=reason))
    return found


def _goals(stream: _Stream, race: Race) -> list[Goal]:
    stock, ours = (_median([peak_bytes(run) for run in race.runs[arm]]) for arm in (STOCK, OURS))
    share = None if stock is None or ours is None else ours / stock
    goals = [most_goal("peak PSS of the process tree, ours over stock's", 1.0, "×", share)]
    if stream.budget_bytes is not None:
        above = _median([peak_above_bytes(run) for run in race.runs[OURS]])
        goals.append(
            most_goal(
                "memory that ours takes for its first batch",
                stream.budget_bytes / _MEGABYTE,
                "MB",
                None if above is None else above / _MEGABYTE,
            )
        )
    return goals


def _median(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
