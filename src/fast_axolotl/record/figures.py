"""The figures and the verdict of a run, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from html import escape
from pathlib import PurePath
from typing import Any, Literal

from fast_axolotl.record import thresholds
from fast_axolotl.record.catalogue import FIGURES

VERDICTS: dict[str, tuple[str, Literal["good", "warn", "bad", "plain"]]] = {
    "inconclusive": ("Inconclusive", "plain"),
    "memory": ("Memory", "bad"),
    "swap": ("Swap-bound", "bad"),
    "cpu": ("CPU-bound", "bad"),
    "io": ("I/O-bound", "bad"),
    "data": ("Data-bound", "bad"),
    "checkpoint": ("Checkpoint-bound", "bad"),
    "evaluation": ("Evaluation-bound", "bad"),
    "communication": ("Communication-bound", "warn"),
    "startup": ("Start-up-bound", "warn"),
    "code": ("Code-bound", "bad"),
    "compute": ("Compute-bound", "good"),
    "mixed": ("Mixed", "warn"),
}
"""Title and tone of each kind of verdict."""
_MAIN = ("tokens_per_second", "stall_fraction", "step_p50_seconds", "mfu", "working_set_bytes")
"""The figures that a notebook shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What limits a run, why, and what to change."""

    kind: str
    """Of ``VERDICTS``."""
    subtype: str = ""
    """Of data: rate, burst, periodic, prepare. Of code: between. Of communication: network, skew.
    Of memory: growing. Of inconclusive: short, warming, draining, unseen."""
    headline: str
    """One sentence."""
    evidence: tuple[str, ...] = ()
    """Figures with their thresholds, and where each threshold comes from."""
    action: str = ""
    """One next action, with the exact setting to change."""
    seconds_needed: float | None = None
    """How much longer the run has to be; of inconclusive only."""
    gain: float | None = None
    """Share by which tokens/s can grow at most if the action works; ``None``: not known."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory that a run takes more of with every step."""

    part: str
    """Who takes it, as text."""
    bytes_per_second: float
    bytes_per_step: float
    full_in_seconds: float | None
    """Until what was free at the end is taken; ``None``: the limit is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank of a run."""

    rank: int
    steps: int
    fetches: int
    stall_fraction: float | None
    host_stall_fraction: float | None
    step_p50_seconds: float | None
    tokens_per_second: float | None
    samples_per_second: float | None
    is_finished: bool
    node: str = ""
    """The machine it ran on."""
    wait_seconds: float | None = None
    """For data, in a step on average."""
    work_seconds: float | None = None
    """In a step on average, without waits for data and for other ranks, by looks at the stack;
    ``None`` with a GPU, whose work the host does not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLine:
    """A line of code that much of a phase was spent in."""

    phase: str
    """waiting, preparing, checkpoint, evaluation, other, between; loading in the workers."""
    file: str
    line: int
    function: str
    call: str = ""
    """The function of a library that it was calling most."""
    seconds: float
    share: float
    """Of its phase."""

    @property
    def place(self) -> str:
        """As it stands in a sentence: of a library with its package, else the file alone."""
        path = PurePath(self.file)
        _, is_library, inside = path.as_posix().partition("/site-packages/")
        return f"{inside if is_library else path.name}:{self.line} {self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The summary of a record: every figure by its name, and what else is known of the run.

    A figure is read like a field, ``summary.stall_fraction``; one that is ``None`` was not
    measured, and ``reasons`` says why. docs/metrics.md and docs/metrics-machine.md explain each.
    Rates and fractions describe the steady phase, without warm-up and spans. With several ranks,
    tokens, samples and bytes are sums over ranks; step times are those of the rank that waits
    longest (with a dispatcher: of rank 0, which reads for all).
    """

    run_dir: str
    started: float
    is_finished: bool
    end_reason: str
    """finished, exception, interrupted, or cut off."""
    error: str
    verdict: Verdict
    figures: Mapping[str, Any]
    """All figures of the ``catalogue``."""

    world_size: int
    ranks: tuple[RankSummary, ...]
    deciding_rank: int | None
    """The rank that causes most of the stall; ``None`` if no rank was recorded."""
    straggler_rank: int | None = None
    straggler_part: str = ""
    """What it is late with: data or compute."""
    data_parallel_size: int | None = None

    phases: dict[str, float] = field(default_factory=dict)
    """Share of the time of a step by phase, in its order, as the host's stack was seen; they add up
    to 1. Empty where nobody looked."""
    where: tuple[CodeLine, ...] = ()
    """The lines of code in which the time beside the model was spent."""
    ledger: dict[str, float] = field(default_factory=dict)
    """Seconds of the whole wall clock by part; they add up to it."""
    nodes: tuple[Mapping[str, Any], ...] = ()
    """Every machine, in the order of its ranks: its name, its ranks, its figures."""
    node: str = ""
    """The machine whose memory, CPU, disk, swap and GPU figures these are: with several, the one
    under most pressure."""
    growth: tuple[Growth, ...] = ()
    """The parts of the memory that grow; first that which is full first."""
    replacements: tuple[str, ...] | None = None
    """Functions of Axolotl that this package had replaced; ``None``: not recorded."""

    steps: int
    fetches: int
    warmup_steps: int
    first_steady_step: int | None
    """The first step that counts; ``None`` if there is none."""
    measured_seconds: float
    """Wall time of the steady phase."""
    stall_source: Literal["device", "host", "stacks", ""]
    stall_pattern: Literal["steady", "burst", "periodic", ""]
    stall_period_of: str
    """What the period follows: rows or epoch."""
    waits_by_cause: dict[str, float] = field(default_factory=dict)
    """Share of all waiting by what happened meanwhile: epoch, iterator."""
    flops_convention: str
    peak_source: str

    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What to know about the record itself: cut off, ranks missing; one sentence each."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self.figures:
            return self.figures[name]
        raise AttributeError(f"a summary has no figure {name!r}")

    def __repr__(self) -> str:
        return f"<RunSummary of {self.run_dir}: {self.verdict.headline}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict, the advice and the main figures."""
        rows = [
            f"<tr><td>{escape(figure.label)}</td><td>{escape(figure.format(value))}</td></tr>"
            for figure in map(FIGURES.__getitem__, _MAIN)
            if (value := self.figures.get(figure.name)) is not None
        ]
        head = f"<b>{escape(self.verdict.headline)}</b><br>{escape(self.verdict.action)}"
        return f"{head}<table>{''.join(rows)}</table>"

    @property
    def is_long_enough(self) -> bool:
        """Whether so much of a steady phase can be judged whatever its figures are."""
        count = self.fetches or self.steps
        return thresholds.is_long_enough(count, self.measured_seconds)

    def as_dict(self) -> dict[str, Any]:
        """Everything by name, figures beside the rest."""
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        figures = own.pop("figures")
        return own | dict(figures)
