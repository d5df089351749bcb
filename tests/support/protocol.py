"""Runs of a protocol without processes: what a child would have left is made up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fast_axolotl.protocol.plan import Plan
from fast_axolotl.protocol.runner import run_protocol
from fast_axolotl.record import End, LineWriter, Log, Mark, RankRecord, SystemRecord
from fast_axolotl.record.folder import next_folder
from fast_axolotl.record.protocol_result import Cell, ProtocolResult
from support.records import make_rank, make_system, steady


def write_record(
    folder: Path, rank: RankRecord | None = None, system: SystemRecord | None = None
) -> None:
    """The files of a made-up run."""
    if rank is not None:
        lines = [rank.start, *rank.settings, *rank.marks, *rank.blocks, *rank.logs, rank.end]
        write_lines(folder / f"rank-{rank.start.rank}.jsonl", *lines)
    if system is not None:
        write_lines(folder / "system.jsonl", system.start, *system.samples, system.end)


def write_lines(path: Path, *lines: object) -> None:
    """A file of a record; lines that are ``None`` are left out."""
    writer = LineWriter(path)
    for line in lines:
        if line is not None:
            writer.write(line)
    writer.close()


@dataclass
class FakeLaunch:
    """Stands for ``launch``: every run takes ``seconds`` by its own clock and leaves a record."""

    step_seconds: Callable[[str, int], float] = lambda arm, run: 0.01
    """Of an arm's model, in its run of this number, from 0."""
    stall: Mapping[str, float] = field(default_factory=dict)
    losses: Callable[[str, int], Sequence[float]] = lambda arm, run: (2.0, 1.5)
    codes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Exit codes of an arm's runs, 0 beyond them."""
    fetches: Mapping[str, int] = field(default_factory=dict)
    """Of an arm's runs, else 600."""
    leave: Callable[[str, RankRecord], RankRecord | None] = lambda arm, rank: rank
    """What becomes of the record of an arm's training; ``None``: it did not train."""
    trials: Mapping[str, int] = field(default_factory=dict)
    """Fetches of a training that comes before the one that counts, by arm."""
    settings: Mapping[str, dict[str, object]] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Of a batch of an arm, else 1,000."""
    times: Callable[[str, int], tuple[float, float]] | None = None
    """Seconds to an arm's first step, and of its whole run."""
    seconds: float = 10.0
    interrupt_at: int | None = None
    """The run, of all, in which Ctrl-C is pressed; from 0."""
    now: float = 0.0
    calls: list[tuple[str, ...]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now

    @property
    def arms(self) -> list[str]:
        """In the order in which they were run."""
        return [folder_of(call).name.partition("-")[2] for call in self.calls]

    def __call__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        tick: Callable[[], None],
    ) -> int:
        folder = folder_of(command)
        arm = folder.name.partition("-")[2]
        if self.interrupt_at == len(self.calls):
            write_record(folder, make_rank(fetches=300, end=None))
            raise KeyboardInterrupt
        self.calls.append(tuple(command))
        run = self.counts.get(arm, 0)
        self.counts[arm] = run + 1
        self.now += self.seconds
        tick()
        code = (*self.codes.get(arm, ()), *[0] * 99)[run]
        log.write_text("a line\nValueError: it went wrong\n" if code else "trained\n")
        if code:
            return code
        own = self.step_seconds(arm, run)
        rank = make_rank(
            own_seconds=own,
            wait=steady(self.stall.get(arm, 0.0), own),
            fetches=self.fetches.get(arm, 600),
            tokens=self.tokens.get(arm, 1000),
            settings=dict(self.settings.get(arm, {})),
        )
        system = make_system(samples=8)
        first, whole = (0.5, None) if self.times is None else self.times(arm, run)
        rank.add(Mark(t=first, name="first_step"))
        if whole is not None:
            system.samples = [replace(one, t=min(one.t, whole)) for one in system.samples]
            system.end = End(t=whole, reason="finished")
        for step, loss in enumerate(self.losses(arm, run)):
            rank.add(Log(t=float(step), step=step, values={"loss": loss}))
        if arm in self.trials:
            trial = make_rank(own_seconds=own, fetches=self.trials[arm])
            write_record(folder, trial, make_system(samples=8))
            write_record(next_folder(folder, 2), rank)
        else:
            write_record(folder, self.leave(arm, rank), system)
        return 0


def folder_of(command: Sequence[str]) -> Path:
    """Where a run was told to record."""
    return Path(command[command.index("--output") + 1])


def run_fake(plan: Plan, folder: Path, launch: FakeLaunch, **named: Any) -> ProtocolResult:
    """A protocol of made-up runs, by the clock that they move; its order is always the same."""
    return run_protocol(
        replace(plan, seed=plan.seed or 0),
        folder,
        environment={"PATH": "bin", "HOME": "home"},
        launch=launch,
        clock=launch.clock,
        **named,
    )


def cell_of(result: Any, name: str, arm: int = 1) -> Cell:
    """The cell of a figure in the matrix of a protocol or of a comparison."""
    [row] = [row for row in result.matrix.rows if row.name == name]
    cell: Cell = row.cells[arm]
    return cell
