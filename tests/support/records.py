"""Records made up for tests: a rank is simulated fetch by fetch, and folded as the meter would."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fast_axolotl.record import (
    End,
    Histogram,
    Mark,
    ProfileWindow,
    RankRecord,
    RunRecord,
    RunSummary,
    Settings,
    Start,
    StepBlock,
    SystemRecord,
    SystemSample,
    SystemStart,
)
from fast_axolotl.record.folder import dump_line, system_file
from fast_axolotl.record.schema import PhaseName

START_TIME = 1_700_000_000.0
"""Seconds since 1970 at which all made-up runs start."""

GIGABYTE = 1_000_000_000

_COUNTED = (
    *("cpu_", "machine_", "steal_", "throttled_", "device_"),
    *("oom_", "read_", "swap_in_", "psi_"),
)
"""How the names of a watcher's counters begin."""

Wait = Callable[[int], float]
"""Seconds that the fetch of this number waits."""


def steady(share: float, own_seconds: float = 0.01) -> Wait:
    """Every fetch waits the same, and all of them for this share of the time."""
    return lambda fetch: own_seconds * share / (1.0 - share)


def every(period: float, share: float, own_seconds: float = 0.01) -> Wait:
    """One long wait in so many fetches."""

    def wait(fetch: int) -> float:
        is_due = int(fetch / period) != int((fetch + 1) / period)
        return period * own_seconds * share / (1.0 - share) if is_due else 1e-5

    return wait


def make_rank(
    *,
    rank: int = 0,
    world_size: int = 1,
    wait: Wait | None = None,
    device_wait: Wait | None = None,
    own_seconds: float = 0.01,
    fetches: int = 600,
    warmup_steps: int = 5,
    accumulation: int = 1,
    samples: int = 8,
    tokens: int | None = None,
    padded: int | None = None,
    queue: Callable[[int], float] | None = None,
    source: str = "loop",
    settings: dict[str, Any] | None = None,
    reasons: dict[str, str] | None = None,
    start: dict[str, Any] | None = None,
    end: str | None = "finished",
    **block_values: Any,
) -> RankRecord:
    """A rank of so many steady fetches, each followed by ``own_seconds`` of the model's work."""
    values = {"gradient_accumulation": accumulation, **(settings or {})}
    first = Start(
        time=START_TIME,
        rank=rank,
        world_size=world_size,
        pid=100 + rank,
        host="machine",
        version="0",
        source=source,
        environment={"cores": 8, "python": "3.12.0"},
    )
    record = RankRecord(start=replace(first, **(start or {})))
    record.add(Settings(t=0.0, values=values, reasons=reasons or {}))

    def simulate(phase: PhaseName, count: int) -> None:
        """So many fetches, in blocks of a second; a last step that does not come out is cut off."""
        nonlocal t, fetch, step
        pending: list[tuple[float, float | None]] = []
        begin = t
        for left in range(count - count % accumulation, 0, -1):
            host, device = (wait or steady(0.0))(fetch), device_wait(fetch) if device_wait else None
            pending.append((host, device))
            t += (host if device is None else device) + own_seconds
            if not record.marks:
                record.add(Mark(t=t, name="first_batch"))
            fetch += 1
            is_full = t - begin >= 1.0 and len(pending) % accumulation == 0
            if not is_full and left > 1:
                continue
            hosts = [host for host, _ in pending]
            devices = [device for _, device in pending if device is not None]
            number, first = len(pending), fetch - len(pending)
            steps = number // accumulation
            block = StepBlock(
                t=t,
                phase=phase,
                first_step=step,
                steps=steps,
                first_fetch=first,
                fetches=number,
                wall_seconds=t - begin,
                host_wait_seconds=sum(hosts),
                device_wait_seconds=sum(devices) if devices else None,
                samples=samples * number,
                real_tokens=None if tokens is None else tokens * number,
                padded_tokens=None if padded is None else padded * number,
                queue_depth=None if queue is None else queue(step),
                host_waits=_histogram(hosts),
                device_waits=_histogram(devices) if devices else None,
                step_times=_histogram([(t - begin) / steps] * steps),
                **block_values,
            )
            record.add(block)
            step += steps
            pending, begin = [], t

    t, fetch, step = 0.0, 0, 0
    simulate("warmup", warmup_steps * accumulation)
    simulate("steady", fetches)
    if end is not None:
        record.add(
            End(
                t=t,
                reason=end,  # type: ignore[arg-type]
                overhead_seconds=30e-6 * fetch,
                overhead_fetches=fetch,
            )
        )
    return record


def make_ranks(count: int, **values: Any) -> list[RankRecord]:
    """So many equal ranks of one run."""
    return [make_rank(rank=number, world_size=count, **values) for number in range(count)]


def _histogram(durations: Iterable[float]) -> dict[str, int]:
    found = Histogram()
    for one in durations:
        found.add(one)
    return found.written()


def make_system(
    *,
    samples: int = 60,
    start: dict[str, Any] | None = None,
    end: str | None = "finished",
    **rates: float,
) -> SystemRecord:
    """A watcher's samples, one a second; ``read_bytes=1e6`` is a counter that grows so a second.

    Names that are no counter are constant.
    """
    counters = {
        "read_bytes": 0,
        "read_chars": 0,
        "swap_in_bytes": 0,
        "swap_out_bytes": 0,
        "psi_memory_full_seconds": 0.0,
        "psi_io_full_seconds": 0.0,
    }
    levels: dict[str, Any] = {
        "pss_bytes": 4 * GIGABYTE,
        "rss_bytes": 5 * GIGABYTE,
        "anon_bytes": 3 * GIGABYTE,
        "shared_bytes": GIGABYTE,
        "hwm_bytes": 6 * GIGABYTE,
    }
    for name, value in rates.items():
        (counters if name.startswith(_COUNTED) else levels)[name] = value
    values: dict[str, Any] = {"time": START_TIME, "host": "machine", "root_pid": 100}
    values |= {"memory_bytes": 64 * GIGABYTE, "disk_bytes_per_second": 1e9, **(start or {})}
    record = SystemRecord(start=SystemStart(**values))
    for second in range(samples):
        known = {name: rate for name, rate in counters.items() if rate is not None}
        grown: dict[str, Any] = {name: rate * second for name, rate in known.items()}
        record.samples.append(SystemSample(t=float(second), processes=3, **levels, **grown))
    if end is not None:
        record.end = End(t=float(samples), reason=end)  # type: ignore[arg-type]
    return record


def make_run(*ranks: RankRecord, system: SystemRecord | None = None) -> RunRecord:
    """A run of these ranks."""
    systems = {} if system is None else {system.start.host: system}
    by_number = {rank.start.rank: rank for rank in ranks}
    return RunRecord(path="runs/made-up", ranks=by_number, systems=systems)


def with_figures(summary: RunSummary, **figures: Any) -> RunSummary:
    """The same summary with other figures, or other fields."""
    own = {name: figures.pop(name) for name in [*figures] if name not in summary.figures}
    return replace(summary, figures={**summary.figures, **figures}, **own)


def make_profiled_run(*collectives: tuple[float, ...], **values: Any) -> RunRecord:
    """A run of as many ranks, each with a window of one second that saw these collectives."""
    ranks = make_ranks(len(collectives), **values)
    for rank, seconds in zip(ranks, collectives, strict=True):
        exposed = sum(seconds)
        window = ProfileWindow(t=1.0, steps=2, wall_seconds=1.0, collectives=seconds)
        rank.add(replace(window, exposed_communication_seconds=exposed))
    return make_run(*ranks)


def lines_of(one: RankRecord | SystemRecord) -> list[str]:
    """A made-up rank or watcher as the lines of its file."""
    middle = (
        one.samples
        if isinstance(one, SystemRecord)
        else [*one.settings, *one.marks, *one.models, *one.blocks, *one.phases, *one.logs]
    )
    ends = [] if one.end is None else [one.end]
    return [dump_line(line) + "\n" for line in [one.start, *middle, *ends]]


def write_run(folder: Path, record: RunRecord) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, rank in record.ranks.items():
        (folder / f"rank-{number}.jsonl").write_text("".join(lines_of(rank)))
    for node, system in record.systems.items():
        # One node's file has the name of earlier versions, so that this stays readable.
        path = system_file(folder, node) if len(record.systems) > 1 else folder / "system.jsonl"
        path.write_text("".join(lines_of(system)))
