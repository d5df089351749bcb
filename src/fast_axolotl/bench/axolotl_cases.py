"""``axolotl preprocess`` and ``axolotl train``, stock and accelerated, by turns.

A case begins with one run of each that is compared and not counted; every counted pair is compared
as well. What is timed is the work: the process less its imports and less compilation, both of which
stand apart in the result, as does the same run with no kernel compiled before.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from fast_axolotl.bench.axolotl_driver import COMPILING, WATCHING
from fast_axolotl.bench.axolotl_goals import losses_goal, ratio_goals
from fast_axolotl.bench.axolotl_inputs import (
    DATASETS,
    TRAIN_STEPS,
    Config,
    preprocess_config,
    train_config,
    write_config,
    write_rows,
)
from fast_axolotl.bench.axolotl_prepared import (
    logged_losses,
    losses_difference,
    prepared_difference,
)
from fast_axolotl.bench.axolotl_result import ANSWERED, COLD
from fast_axolotl.bench.axolotl_runs import OURS, STOCK, Run, Runner, by_turns
from fast_axolotl.bench.matrix import PeerTiming
from fast_axolotl.bench.operation_result import Measurement, OperationCase

__all__ = [
    "PREPROCESS",
    "TRAIN",
    "TRAIN_COMMAND",
    "AxolotlSession",
    "Race",
    "preprocess_case",
    "train_case",
]

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
    tell: Callable[[str], None]
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

    def timings(
        self, rows: int, gives: str, seconds: Callable[[Run], float]
    ) -> tuple[PeerTiming, ...]:
        """Ours, which is compared, and stock."""
        return tuple(
            PeerTiming(
                name=arm,
                version=None,
                output=gives,
                rows=rows,
                seconds=tuple(seconds(run) for run in self.runs[arm]),
                equal=arm == STOCK or self.reason is None,
                reason=None if arm == STOCK else self.reason,
                unbounded=None,
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
                Measurement(name=f"{arm}: {name}", seconds=tuple(values), values={})
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


def preprocess_case(name: str, session: AxolotlSession) -> OperationCase:
    """``axolotl preprocess`` of one kind of dataset."""
    kind = name.removeprefix("preprocess-")
    data = _data(kind, session)

    def configure(_: str, folder: Path) -> Path:
        config = preprocess_config(kind, session.model, data, folder / "prepared")
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
        session.prepared = preprocess_config(kind, session.model, data, prepared)
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


def train_case(name: str, session: AxolotlSession) -> OperationCase:
    """``axolotl train`` on the chat dataset that stock prepared."""
    ranks = TRAIN[name]
    prepared = session.prepared or _prepare(session)
    equal_steps: list[int] = []

    def configure(_: str, folder: Path) -> Path:
        config = train_config(prepared, folder / "output", ranks=ranks)
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
    return replace(case, goals=(*case.goals, losses_goal(min(equal_steps), TRAIN_STEPS)))


def _prepare(session: AxolotlSession) -> Config:
    """The chat dataset, prepared by stock."""
    session.tell("train: preparing the dataset")
    data = _data("chat", session)

    def configure(folder: Path) -> Path:
        config = preprocess_config("chat", session.model, data, folder / "prepared")
        return write_config(config, folder / "config.yml")

    run = session.runner.run(STOCK, PREPROCESS_COMMAND, configure)
    session.prepared = preprocess_config("chat", session.model, data, run.folder / "prepared")
    return session.prepared


def _data(kind: str, session: AxolotlSession) -> Path:
    path = session.folder / f"{kind}.jsonl"
    return path if path.exists() else write_rows(kind, path, session.rows)


def _as_case(
    race: Race, *, text: str, rows: int, gives: str, seconds: Callable[[Run], float]
) -> OperationCase:
    timings = race.timings(rows, gives, seconds)
    return OperationCase(
        name=race.name,
        text=text,
        rows=rows,
        unit="rows",
        timings=timings,
        rivals={STOCK: OURS},
        measurements=(*race.phases(), race.cold(seconds)),
        goals=tuple(ratio_goals(race.name, timings)),
    )
