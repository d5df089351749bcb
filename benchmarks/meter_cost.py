"""What does measuring cost? ``make bench-meter-cost``.

``fetch``: a small model is trained from a torch ``DataLoader``, alternately with and without a
meter. The cost of a fetch is the time that our hooks take around torch's own calls, by this
module's clock. Beside it stands what the meter reports of itself, and by how much a median step is
longer. It runs on the GPU where there is one, with steps of about 50 ms, and else on the CPU.

``long``: the real meter under a clock that this module moves. A day of 50 ms steps of one of 64
ranks gives the size of its record, and 64 such records are read and summed up. A week of steps of
half a second shows whether the memory of the process grows.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.result import MEGABYTE, Case, Goal, Measurement, Result
from fast_axolotl.measure import measure
from fast_axolotl.record import read_run

PARTS = ("fetch", "long")
_SEGMENTS, _SEGMENT_STEPS = 4, 100
_WARM_STEPS = 5
"""At the start of each segment, left out."""
_RANKS = 64
_DAY, _WEEK = 86_400.0, 604_800.0
_MICROSECOND = 1e-6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("meter-cost", __doc__)
    parser.add_argument("--parts", type=names, default=[], help=f"of {', '.join(PARTS)}")
    parser.add_argument("--days", type=float, default=1.0, help="of the record that is summed up")
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """Both parts, or those that are named."""
    parts = check_names("part", options.parts, PARTS)
    cases = [_run_fetches(folder, tell)] if "fetch" in parts else []
    if "long" in parts:
        cases.append(_run_long(folder, options.days * _DAY, tell))
    return Result(cases=cases)


def _run_fetches(folder: Path, tell: Tell) -> Case:
    import torch

    is_gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    shapes = ((8, 2048),) if is_gpu else ((4, 512), (8, 2048))
    measurements, costs = [], []
    for rows, width in shapes:
        train = _make_training(torch, rows, width, is_gpu)
        for workers in (0, 2):
            for is_synchronised in (False, True) if is_gpu else (False,):
                name = f"{rows} × {width}, {workers} workers" + ", sync" * is_synchronised
                tell(f"fetch: {name}")
                place = folder / name.replace(" ", "")
                found = _compare(train, workers, is_synchronised, place)
                measurements.append(Measurement(name=name, values=found))
                costs.append(found["hooks"])
    most = 150.0 if is_gpu else 60.0
    device = torch.cuda.get_device_name(0) if is_gpu else "CPU"
    return Case(
        name="fetch",
        text=f"a small model on {device}, µs a fetch; counting and events: mean of a call",
        rows=_SEGMENTS * _SEGMENT_STEPS,
        unit="steps",
        measurements=measurements,
        goals=[Goal("hooks, dearest of all", most, "µs", max(costs))],
    )


Train = Callable[[int, int, bool], list[float]]
"""Steps, workers, whether each ends with the device idle → when each step began."""


def _make_training(torch: Any, rows: int, width: int, is_gpu: bool) -> Train:
    class Rows(torch.utils.data.Dataset):  # type: ignore[misc]
        def __init__(self, steps: int) -> None:
            self.steps = steps

        def __len__(self) -> int:
            return rows * self.steps

        def __getitem__(self, index: int) -> dict[str, Any]:
            ids = torch.randint(0, 1000, (width,))
            mask, labels = torch.ones_like(ids), ids.clone()
            mask[-100:], labels[:100] = 0, -100
            return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    device = "cuda" if is_gpu else "cpu"
    size, layers = (1024, 8) if is_gpu else (64, 2)
    layer = torch.nn.TransformerEncoderLayer(size, size // 64 or 1, 4 * size, batch_first=True)
    embedding = torch.nn.Embedding(1000, size, device=device)
    body = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device)
    head = torch.nn.Linear(size, 1000, device=device)
    model = torch.nn.Sequential(embedding, body, head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    # A CPU reads the whole batch and trains on a part of it.
    used = (slice(None), slice(None)) if is_gpu else (slice(2), slice(128))

    def train(steps: int, workers: int, is_synchronised: bool) -> list[float]:
        begun = []
        for batch in torch.utils.data.DataLoader(Rows(steps), batch_size=rows, num_workers=workers):
            begun.append(time.perf_counter())
            ids, labels = (batch[name][used].to(device) for name in ("input_ids", "labels"))
            with torch.autocast(device, dtype=torch.bfloat16, enabled=is_gpu):
                logits = model(ids)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if is_synchronised:
                loss.item()
        if is_gpu:
            torch.cuda.synchronize()
        return begun

    train(_WARM_STEPS, 0, True)
    return train


def _compare(train: Train, workers: int, is_synchronised: bool, folder: Path) -> dict[str, Any]:
    """Segments with and without a meter in turn."""
    from fast_axolotl.integrations.torch_meter import TorchWatch

    steps: dict[bool, list[float]] = {False: [], True: []}
    costs: list[float] = []
    own: list[float] = []
    parts: dict[str, list[float]] = {"counting": [], "events": []}
    for number in range(_SEGMENTS):
        for is_measured in (False, True) if number % 2 else (True, False):
            if not is_measured:
                begun = train(_SEGMENT_STEPS, workers, is_synchronised)
            else:
                place = folder / str(number)
                metered = measure(place, sample_system=False)
                with metered as meter, _timed(TorchWatch(meter)) as timer:
                    begun = train(_SEGMENT_STEPS, workers, is_synchronised)
                costs += timer.costs()[_WARM_STEPS:]
                for name, seconds in parts.items():
                    seconds.append(statistics.mean(getattr(timer, name)[_WARM_STEPS:]))
                end = read_run(place).ranks[0].end
                own.append(end.overhead_seconds / end.overhead_fetches if end else 0.0)
            pairs = zip(begun[_WARM_STEPS:], begun[_WARM_STEPS + 1 :], strict=False)
            steps[is_measured] += [after - before for before, after in pairs]
    plain = statistics.median(steps[False])
    return {
        "hooks": statistics.median(costs) / _MICROSECOND,
        "hooks_mean": statistics.mean(costs) / _MICROSECOND,
        **{name: statistics.median(means) / _MICROSECOND for name, means in parts.items()},
        "own_account": statistics.median(own) / _MICROSECOND,
        "step_longer_by": (statistics.median(steps[True]) - plain) / _MICROSECOND,
        "step": plain / _MICROSECOND,
    }


class _HookTimer:
    """Times our hooks: the calls around torch's own, less torch's own."""

    def __init__(self) -> None:
        self.inner: list[float] = []
        self.outer: list[float] = []
        self.others: list[float] = []
        self.counting: list[float] = []
        self.events: list[float] = []

    def timed(self, call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                seconds.append(time.perf_counter() - begun)

        return timed

    def costs(self) -> list[float]:
        """Of every fetch, the hooks of its step included."""
        around = [outer - inner for inner, outer in zip(self.inner, self.outer, strict=True)]
        each = len(self.others) // max(1, len(around) - 1)
        return [
            cost + sum(self.others[number * each : (number + 1) * each])
            for number, cost in enumerate(around[:-1])
        ]


@contextmanager
def _timed(watch: Any) -> Iterator[_HookTimer]:
    """A watch between two clocks, and a clock around each of its other hooks."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter as Iterators

    timer = _HookTimer()
    for name in ("optimizer_step", "backward_begin", "backward_end"):
        setattr(watch, name, timer.timed(getattr(watch, name), timer.others))
    meter = watch.meter
    meter._counter.count = timer.timed(meter._counter.count, timer.counting)
    for name in ("record", "pair", "wait_pair"):
        setattr(meter._queue, name, timer.timed(getattr(meter._queue, name), timer.events))
    original = Iterators.__next__
    Iterators.__next__ = timer.timed(original, timer.inner)
    watch.start()
    watched = Iterators.__next__
    Iterators.__next__ = timer.timed(watched, timer.outer)
    try:
        yield timer
    finally:
        Iterators.__next__ = watched
        watch.stop()
        Iterators.__next__ = original


# Long runs.


def _run_long(folder: Path, seconds: float, tell: Tell) -> Case:
    from fast_axolotl.measure.summary import summarise

    tell("long: the record of one rank")
    first = folder / "run" / "rank-0.jsonl"
    begun = time.process_time()
    steps = train_long(first.parent, seconds, step_seconds=0.05, world_size=_RANKS)
    per_step = (time.process_time() - begun) / steps
    text = first.read_text()
    for rank in range(1, _RANKS):
        own = text.replace('"rank":0', f'"rank":{rank}', 1)
        first.with_name(f"rank-{rank}.jsonl").write_text(own)
    tell(f"long: {_RANKS} ranks are summed up")
    before = _resident_bytes()
    begun, used = time.perf_counter(), time.process_time()
    record = read_run(first.parent)
    read = time.perf_counter()
    summary = summarise(record)
    summed = time.perf_counter()
    used = time.process_time() - used
    grown = _resident_bytes() - before
    assert sum(rank.steps for rank in summary.ranks) > 0.99 * _RANKS * steps
    del record, summary
    tell("long: the memory of a week")
    sizes: list[int] = []
    train_long(folder / "week", _WEEK, step_seconds=0.5, world_size=_RANKS, each_day=sizes)
    week = folder / "week" / "rank-0.jsonl"
    return Case(
        name="long",
        text=f"{seconds / _DAY:g} days of 50 ms steps, {_RANKS} ranks",
        rows=steps,
        unit="steps",
        measurements=[
            Measurement(
                name="record of a rank",
                values={"lines": text.count("\n"), "file_bytes": len(text.encode())},
            ),
            Measurement(
                name="summing up",
                values={
                    "reading_seconds": read - begun,
                    "summing_seconds": summed - read,
                    "processor_seconds": used,
                    "memory_bytes": grown,
                },
            ),
            Measurement(
                name="a week of half-second steps",
                values={
                    "lines": sum(1 for _ in week.open()),
                    "file_bytes": week.stat().st_size,
                    "memory_bytes": max(sizes) - sizes[0],
                },
            ),
            Measurement(name="a step, hot", values={"meter_microseconds": per_step / _MICROSECOND}),
        ],
        goals=[
            Goal("read and summed up", 10.0, "s", summed - begun),
            Goal("record of a rank", 8.0 * seconds / _DAY, "MB", len(text.encode()) / MEGABYTE),
            Goal("growth over a week", 4.0, "MB", (max(sizes) - sizes[0]) / MEGABYTE),
        ],
    )


def train_long(
    folder: Path,
    seconds: float,
    *,
    step_seconds: float,
    world_size: int,
    each_day: list[int] | None = None,
) -> int:
    """Steps of about one length, with short waits and a long one now and then; how many. Sizes of
    the process, one for each day, go to ``each_day``."""

    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    clock, chance = Clock(), random.Random(0).random
    batch = [0] * 8
    steps, day = 0, _DAY / 2
    with measure(
        folder,
        told_steps=True,
        world_size=world_size,
        sample_system=False,
        environment={},
        clock=clock,
        wall_clock=clock,
        events=lambda: None,
    ) as meter:
        while clock.now < seconds:
            meter.fetch_begin(4)
            clock.now += 0.4 if steps % 997 == 0 else 0.001 * (0.5 + chance())
            meter.fetch_end(batch)
            meter.tokens(8192, trainable=8000, padded=8192)
            clock.now += 0.3 * step_seconds
            meter.backward_begin()
            clock.now += step_seconds * (0.6 + 0.2 * chance())
            meter.backward_end()
            meter.step()
            steps += 1
            if each_day is not None and clock.now > day:
                day += _DAY
                gc.collect()
                each_day.append(_resident_bytes())
    return steps


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
