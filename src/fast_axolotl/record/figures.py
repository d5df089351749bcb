"""The figures and the verdict of a run, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

VerdictKind = Literal[
    "inconclusive",
    "memory",
    "swap",
    "cpu",
    "io",
    "data",
    "checkpoint",
    "evaluation",
    "communication",
    "startup",
    "compute",
    "mixed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What limits a run, why, and what to change."""

    kind: VerdictKind
    subtype: str = ""
    """Of data: rate, burst, periodic. Of communication: network, skew. Of inconclusive: short,
    warming, draining, unseen. Of memory: growing."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a record comes to: the figures by their names, and what is no figure.

    A figure is read like a field, ``summary.stall_fraction``; one that is ``None`` was not
    measured, and ``reasons`` says why. docs/metrics.md explains each. Rates and fractions describe
    the steady phase, without warm-up and spans. With several ranks, tokens, samples and bytes are
    sums over ranks; step times are those of the rank that waits longest (with a dispatcher: of rank
    0, which reads for all).
    """

    run_dir: str
    started: float
    is_finished: bool
    end_reason: str
    """finished, exception, interrupted, or cut off."""
    error: str
    verdict: Verdict
    figures: Mapping[str, Any]
    """All figures of the ``catalogue`` but those that only a protocol sees."""

    world_size: int
    ranks: tuple[RankSummary, ...]
    deciding_rank: int | None
    """The rank that causes most of the stall; ``None`` if no rank was recorded."""
    straggler_rank: int | None = None
    straggler_part: str = ""
    """What it is late with: data or compute."""
    data_parallel_size: int | None = None

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
    stall_source: Literal["device", "host", ""]
    stall_pattern: Literal["steady", "burst", "periodic", ""]
    stall_period_of: str
    """What the period follows: rows, shard or epoch."""
    waits_by_cause: dict[str, float] = field(default_factory=dict)
    """Share of all waiting by what happened meanwhile: epoch, shard."""
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

    def as_dict(self) -> dict[str, Any]:
        """Everything by name, figures beside the rest."""
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        figures = own.pop("figures")
        return own | dict(figures)
