"""``axolotl preprocess`` and ``axolotl train``, stock and accelerated, by turns.

A case begins with one run of each that is compared and not counted; every counted pair is compared
as well. What is timed is the work: the process less its imports and less compilation, both of which
stand apart in the result, as does the same run with no kernel compiled before.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.axolotl_driver import COMPILING, WATCHING
from benchmarks.axolotl_inputs import (
    DATASETS,
    dataset_config,
    documents,
    stream_config,
    text_stream,
)
from benchmarks.axolotl_model import (
    TRAIN_STEPS,
    Config,
    train_config,
    write_config,
    write_rows,
)
from benchmarks.axolotl_runs import (
    OURS,
    STOCK,
    Run,
    Runner,
    batches_difference,
    by_turns,
    logged_losses,
    losses_difference,
    prepared_difference,
)
from benchmarks.command import Tell
from benchmarks.result import MEGABYTE, Case, Goal, Measurement, Timing, most_goal, ratio_goal

ANSWERED = "calls that fast-axolotl answered"
"""The measurement that counts them, by replacement."""
COLD = "fast-axolotl, no kernel compiled before"
"""The measurement of a run that had to compile."""

_PREPROCESS = (2.0, 3.0)
"""What is asked for, and what is aimed at."""
_LEAST: Mapping[str, Sequence[float]] = {
    "preprocess-chat": _PREPROCESS,
    "preprocess-alpaca": _PREPROCESS,
    "preprocess-completion": _PREPROCESS,
    "preprocess-dpo": _PREPROCESS,
    "train": (4.0,),
    "train-2-ranks": (4.0,),
    "dedupe": (50.0,),
    "save": (20.0,),
    "pack_parallel": (30.0,),
    "len(sampler)": (15.0,),
    "process_datasets_for_packing": (25.0,),
    "V2 collator": (6.0,),
    "encode_streaming (without the tokenizer)": (10.0,),
}
"""Case or function to the least ratios of ours over stock's speed."""


def ratio_goals(name: str, timings: Sequence[Timing]) -> list[Goal]:
    """The goals of a case, or of a function."""
    goals = [ratio_goal(OURS, STOCK, least, timings) for least in _LEAST.get(name, ())]
    return [*goals[:1], *(replace(goal, text=f"{goal.text}, aimed at") for goal in goals[1:])]


PREPROCESS = tuple(f"preprocess-{kind}" for kind in DATASETS)
PREPROCESS_COMMAND = ("axolotl.cli.main", "preprocess")
"""As the console script runs it. It matters: workers that stock spawns import this main module, in
a third of the time that ``axolotl.cli.preprocess`` takes."""
TRAIN_COMMAND = ("axolotl.cli.train",)
"""What ``axolotl train`` has ``accelerate launch`` run."""
TRAIN = {"train": 1, "train-2-ranks": 2}
"""Case to its number of ranks."""

Difference = Callable[[Run, Run], str | None]


@dataclass(slots=True, kw_only=True)
class AxolotlSession:
    """What the cases share."""

    runner: Runner
    folder: Path
    model: Path
    rows: int
    repeats: int
    tell: Tell
    prepared: Config | None = None
    """A configuration whose chat dataset stock has prepared."""


@dataclass(slots=True, kw_only=True)
class Race:
    """The runs of one case."""

    name: str
    command: Sequence[str]
    """Module and first arguments; the configuration is the last."""
    configure: Callable[[str, Path], Path]
    """Writes the configuration of an arm into a folder."""
    difference: Difference
    session: AxolotlSession
    ranks: int = 1
    watch_memory: bool = False
    runs: dict[str, list[Run]] = field(default_factory=lambda: {STOCK: [], OURS: []})
    reason: str | None = None
    """How ours differs from stock, of the first pair that does."""

    def run(self, arm: str, cache: Path | None = None) -> Run:
        return self.session.runner.run(
            arm,
            self.command,
            partial(self.configure, arm),
            ranks=self.ranks,
            watch_memory=self.watch_memory,
            cache=cache,
        )

    def check(self) -> Run:
        """One run of each, compared, not counted; stock's, with its files."""
        self.session.tell(f"{self.name}: checking that the results are equal")
        stock, ours = self.run(STOCK), self.run(OURS)
        self.reason = self.difference(stock, ours)
        if self.reason is not None:
            self.session.tell(f"{self.name}: DIFFERENT RESULTS: {self.reason}")
        shutil.rmtree(ours.folder)
        return stock

    def count(self) -> None:
        """The repeats, by turns."""
        pair: dict[str, Run] = {}
        for arm, repeat in by_turns(self.session.repeats):
            self.session.tell(f"{self.name}: repeat {repeat + 1}, {arm}")
            pair[arm] = self.run(arm)
            self.runs[arm].append(pair[arm])
            if len(pair) == 2:
                self.reason = self.reason or self.difference(pair[STOCK], pair[OURS])
                for run in pair.values():
                    shutil.rmtree(run.folder)
                pair = {}

    def timings(self, rows: int, gives: str, seconds: Callable[[Run], float]) -> tuple[Timing, ...]:
        """Ours, which is compared, and stock."""
        return tuple(
            Timing(
                name=arm,
                output=gives,
                rows=rows,
                seconds=tuple(seconds(run) for run in self.runs[arm]),
                reason=None if arm == STOCK else self.reason,
            )
            for arm in (OURS, STOCK)
        )

    def phases(self) -> list[Measurement]:
        """Where the time went: every name of the ledgers, and the whole."""
        found = []
        for arm, runs in self.runs.items():
            whole = {"whole process": [run.wall_seconds for run in runs]}
            names = dict.fromkeys(name for run in runs for name in run.phases)
            parts = {name: [run.phases.get(name, 0.0) for run in runs] for name in names}
            found += [
                Measurement(name=f"{arm}: {name}", seconds=tuple(values))
                for name, values in {**whole, **parts}.items()
            ]
        return [*found, self.answered()]

    def cold(self, seconds: Callable[[Run], float]) -> Measurement:
        """Ours once more with an empty cache of kernels: what the first run of all pays."""
        self.session.tell(f"{self.name}: once with no kernel compiled before")
        run = self.run(OURS, cache=self.session.folder / f"cold-{self.name}")
        shutil.rmtree(run.folder)
        return Measurement(
            name=COLD,
            seconds=(seconds(run) + run.seconds(COMPILING),),
            values={"compiling_seconds": max(ledger["compiling"] for ledger in run.ledgers)},
        )

    def answered(self) -> Measurement:
        """Which of Axolotl's functions ours answered for, and which calls it left to them."""
        patches = [item for run in self.runs[OURS][:1] for item in run.ledgers[0]["patches"]]
        calls: dict[str, float | int | bool | None] = {}
        for item in patches:
            calls[item["name"]] = int(calls.get(item["name"]) or 0) + item["calls"]
        left = [
            f"{item['name']} ×{count}: {reason}"
            for item in patches
            for reason, count in item["fallbacks"]
        ]
        left += [f"{item['name']}: {item['reason']}" for item in patches if item["reason"]]
        return Measurement(
            name=ANSWERED,
            values=calls,
            reason=f"left to Axolotl: {'; '.join(left)}" if left else None,
        )


def preprocess_case(name: str, session: AxolotlSession) -> Case:
    """``axolotl preprocess`` of one kind of dataset."""
    kind = name.removeprefix("preprocess-")
    data = _data(kind, session)

    def configure(_: str, folder: Path) -> Path:
        config = dataset_config(kind, session.model, data, folder / "prepared")
        return write_config(config, folder / "config.yml")

    def difference(stock: Run, ours: Run) -> str | None:
        return prepared_difference(stock.folder / "prepared", ours.folder / "prepared")

    race = Race(
        name=name,
        command=PREPROCESS_COMMAND,
        configure=configure,
        difference=difference,
        session=session,
    )
    stock = race.check()
    if kind == "chat":
        prepared = stock.folder / "prepared"
        session.prepared = dataset_config(kind, session.model, data, prepared)
    else:
        shutil.rmtree(stock.folder)
    race.count()
    return _as_case(
        race,
        text=f"{session.rows:,} rows, a fifth of them repeated: time after imports",
        rows=session.rows,
        gives="JSON lines → prepared",
        seconds=Run.work_seconds,
    )


def train_case(name: str, session: AxolotlSession) -> Case:
    """``axolotl train`` on the chat dataset that stock prepared."""
    ranks = TRAIN[name]
    prepared = session.prepared or _prepare(session)
    equal_steps: list[int] = []

    def configure(_: str, folder: Path) -> Path:
        config = train_config(prepared, folder / "output")
        if ranks > 1:
            # Axolotl gives every rank a device of its number, even without an accelerator; what is
            # worked out from this overrules that.
            config |= {"max_memory": {"cpu": "8GiB"}, "ddp_backend": "gloo"}
        return write_config(config, folder / "config.yml")

    def difference(stock: Run, ours: Run) -> str | None:
        pairs = zip(logged_losses(stock), logged_losses(ours), strict=False)
        equal_steps.append(sum(first == second for first, second in pairs))
        return losses_difference(stock, ours)

    race = Race(
        name=name,
        command=TRAIN_COMMAND,
        configure=configure,
        difference=difference,
        session=session,
        ranks=ranks,
    )
    shutil.rmtree(race.check().folder)
    race.count()
    case = _as_case(
        race,
        text=f"{session.rows:,} rows, {ranks} rank(s): from the loaded dataset to the first step",
        rows=session.rows,
        gives="dataset → step",
        seconds=partial(Run.work_seconds, since="loaded", until="first step", apart=(WATCHING,)),
    )
    losses = Goal(
        text="logged losses and gradient norms equal to the last digit",
        target=TRAIN_STEPS,
        at_least=True,
        unit="steps",
        measured=min(equal_steps),
        detail="the worst pair of runs",
    )
    return replace(case, goals=(*case.goals, losses))


def _prepare(session: AxolotlSession) -> Config:
    """The chat dataset, prepared by stock."""
    session.tell("train: preparing the dataset")
    data = _data("chat", session)

    def configure(folder: Path) -> Path:
        config = dataset_config("chat", session.model, data, folder / "prepared")
        return write_config(config, folder / "config.yml")

    run = session.runner.run(STOCK, PREPROCESS_COMMAND, configure)
    session.prepared = dataset_config("chat", session.model, data, run.folder / "prepared")
    return session.prepared


def _data(kind: str, session: AxolotlSession) -> Path:
    path = session.folder / f"{kind}.jsonl"
    return path if path.exists() else write_rows(path, session.rows, DATASETS[kind][0])


def _as_case(
    race: Race, *, text: str, rows: int, gives: str, seconds: Callable[[Run], float]
) -> Case:
    timings = race.timings(rows, gives, seconds)
    return Case(
        name=race.name,
        text=text,
        rows=rows,
        unit="rows",
        timings=timings,
        rivals={STOCK: OURS},
        measurements=(*race.phases(), race.cold(seconds)),
        goals=tuple(ratio_goals(race.name, timings)),
    )


# A pretraining run over a stream. Two inputs: documents of 2 kB, where everything is compared; and
# documents of 1 MB, where Axolotl's buffer, which counts rows, holds whatever they weigh, and ours
# is bounded by bytes. There the batches may differ, since the buffers end elsewhere: memory counts,
# and no speed. A stall is the time that the loop waits for its next batch, over that time and the
# steps'. The first batch stands apart: it fills the first buffer.

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
        document_bytes=MEGABYTE,
        steps=20,
        buffer_rows=64,
        share=0.25,
        budget_bytes=256 * 1024**2,
        buffer_bytes=8 * 1024**2,
    ),
}
"""The buffers are smaller than Axolotl's default of 10,000 rows, so that a short run meets some."""


def streaming_case(name: str, session: AxolotlSession, megabytes: int) -> Case:
    """``axolotl train`` on a stream, stock and with our reader."""
    stream = STREAMING[name]
    data = session.folder / f"{name}.jsonl"
    session.tell(f"{name}: writing the documents")
    count = max(1, round(megabytes * MEGABYTE * stream.share) // stream.document_bytes)
    with data.open("w", encoding="utf-8") as file:
        for text in documents(count, stream.document_bytes):
            file.write(f'{{"text": "{text}"}}\n')

    def configure(arm: str, folder: Path) -> Path:
        output, options = folder / "output", {"buffer_rows": stream.buffer_rows}
        config = stream_config(session.model, output, steps=stream.steps, **options)
        config |= text_stream(data, ours=arm == OURS)
        if arm == OURS and stream.budget_bytes is not None:
            config["fast_axolotl_memory_budget"] = stream.budget_bytes // 2
            config["fast_axolotl_buffer_bytes"] = stream.buffer_bytes
        return write_config(config, folder / "config.yml")

    race = Race(
        name=name,
        command=TRAIN_COMMAND,
        configure=configure,
        difference=batches_difference if stream.buffer_bytes is None else lambda *_: None,
        session=session,
        watch_memory=True,
    )
    shutil.rmtree(race.check().folder)
    race.count()
    timings = race.timings(stream.steps, "stream → steps", _training_seconds)
    size = data.stat().st_size
    data.unlink()
    kilobytes = stream.document_bytes // 1000
    return Case(
        name=name,
        text=f"{size / MEGABYTE:,.0f} MB, documents of {kilobytes:,} kB, {stream.steps} steps",
        rows=stream.steps,
        unit="steps",
        timings=timings if stream.buffer_bytes is None else (),
        rivals={STOCK: OURS},
        measurements=(*_measurements(race), race.answered()),
        goals=tuple(_goals(stream, race)),
    )


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
                stream.budget_bytes / MEGABYTE,
                "MB",
                None if above is None else above / MEGABYTE,
            )
        )
    return goals


def _median(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
