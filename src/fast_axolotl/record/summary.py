"""The figures of a run and its verdict, computed from a record; see ``catalogue``."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    warming, draining, unseen, contradiction."""
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
    forward_seconds_per_step: float | None = None
    gpu_clock_mhz: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSummary:
    """One machine of a run."""

    node: str
    ranks: tuple[int, ...]
    working_set_bytes: int | None = None
    working_set_peak_bytes: int | None = None
    limit_bytes: int | None = None
    limit_share: float | None = None
    cpu_cores: float | None = None
    """Processors that the run used, mean."""
    other_cpu_share: float | None = None
    read_bytes_per_second: float | None = None
    swap_in_bytes_per_second: float | None = None
    psi_cpu_some: float | None = None
    psi_io_full: float | None = None
    psi_memory_full: float | None = None
    gpu_utilization: float | None = None
    gpu_clock_mhz: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """A stretch of a run in which the same thing bounds it."""

    begin_seconds: float
    """Since the run began."""
    end_seconds: float
    first_step: int
    kind: VerdictKind
    stall_fraction: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Every figure of a run. A figure that is ``None`` was not measured, and ``reasons`` says why.

    docs/metrics.md explains each figure. Rates and fractions describe the steady phase, without
    warm-up and spans. With several ranks, tokens, samples and bytes are sums over ranks; step times
    are those of the rank that waits longest (with a dispatcher: of rank 0, which reads for all).
    """

    run_dir: str
    started: float
    is_finished: bool
    end_reason: str
    """finished, exception, interrupted, or cut off."""
    error: str
    duration_seconds: float
    verdict: Verdict

    world_size: int
    ranks: tuple[RankSummary, ...]
    deciding_rank: int | None
    """The rank that causes most of the stall; ``None`` if no rank was recorded."""
    straggler_rank: int | None = None
    straggler_part: str = ""
    """What it is late with: data, compute, tokens, device clock."""
    straggler_fraction: float | None = None
    data_parallel_size: int | None = None

    ledger: dict[str, float] = field(default_factory=dict)
    """Seconds of the whole wall clock by part; they add up to it."""
    goodput_tokens_per_second: float | None = None
    regimes: tuple[Regime, ...] = ()
    nodes: tuple[NodeSummary, ...] = ()
    """Every machine, in the order of its ranks."""
    node: str = ""
    """The machine whose memory, CPU, disk, swap and GPU figures these are: with several, the one
    under most pressure."""
    replacements: tuple[str, ...] | None = None
    """Functions of Axolotl that this package had replaced; ``None``: not recorded."""

    steps: int
    fetches: int
    warmup_steps: int
    first_steady_step: int | None
    """The first step that counts; ``None`` if there is none."""
    measured_seconds: float
    """Wall time of the steady phase."""

    stall_fraction: float | None
    stall_source: Literal["device", "host", ""]
    stall_error: float | None = None
    host_stall_fraction: float | None
    device_stall_fraction: float | None
    wait_p50_seconds: float | None
    wait_p95_seconds: float | None
    wait_p99_seconds: float | None
    wait_max_seconds: float | None
    worst_percent_share: float | None
    stall_pattern: Literal["steady", "burst", "periodic", ""]
    stall_period_fetches: float | None
    stall_period_rows: float | None
    stall_period_of: str
    """What the period follows: rows, shard, epoch, step."""
    waits_by_cause: dict[str, float] = field(default_factory=dict)
    """Share of all waiting by what happened meanwhile: epoch, shard, refill, gc, checkpoint."""
    cached_stall_fraction: float | None
    queue_depth: float | None
    queue_capacity: int | None
    queue_drift_per_step: float | None
    first_batch_seconds: float | None
    first_step_seconds: float | None
    span_seconds: dict[str, float]

    rows_per_second: float | None
    samples_per_second: float | None
    bytes_per_second: float | None
    free_rows_per_second: float | None
    demand_rows_per_second: float | None
    headroom: float | None
    reader_rows_per_second: float | None = None
    reader_ratio: float | None = None

    tokens_per_second: float | None
    trainable_tokens_per_second: float | None
    trainer_tokens_per_second: float | None = None
    trainer_tokens_ratio: float | None = None
    padded_tokens_per_second: float | None
    padding_share: float | None
    packing_efficiency: float | None
    mean_attended_length: float | None
    steps_per_second: float | None
    step_p50_seconds: float | None
    step_p95_seconds: float | None
    step_p99_seconds: float | None
    step_max_seconds: float | None
    global_batch_samples: float | None = None
    gradient_noise_scale: float | None = None
    gradient_noise_scale_low: float | None = None
    gradient_noise_scale_high: float | None = None

    model_flops_per_token: float | None
    model_flops_per_second: float | None
    mfu: float | None
    hfu: float | None
    flops_convention: str
    peak_tflops: float | None
    peak_source: str
    matmul_share: float | None

    working_set_bytes: int | None
    working_set_peak_bytes: int | None
    mapped_file_bytes: int | None = None
    rss_bytes: int | None
    anon_bytes: int | None
    file_bytes: int | None
    shared_bytes: int | None
    hwm_bytes: int | None
    hwm_by_phase: dict[str, int]
    spike_ratio: float | None
    limit_bytes: int | None
    limit_share: float | None
    psi_memory_full: float | None
    psi_io_full: float | None
    psi_cpu_some: float | None = None
    cpu_cores: float | None = None
    other_cpu_share: float | None = None
    cpu_wait_share: float | None = None
    cpu_steal_share: float | None = None
    cpu_throttled_share: float | None = None
    oom_kills: int | None = None

    read_bytes_per_second: float | None
    read_chars_per_second: float | None
    disk_bytes_per_second: float | None
    disk_share: float | None
    disk_request_bytes: float | None = None
    swap_in_bytes_per_second: float | None
    swap_out_bytes_per_second: float | None
    is_swap_sustained: bool | None
    process_swap_bytes: int | None = None

    gpu_utilization: float | None
    gpu_memory_bytes: int | None
    gpu_free_bytes: int | None = None
    gpu_peak_allocated_bytes: int | None = None
    gpu_power_watts: float | None
    gpu_clock_mhz: float | None

    device_idle_fraction: float | None
    exposed_communication_fraction: float | None
    pure_communication_fraction: float | None

    overhead_seconds_per_fetch: float | None
    overhead_fraction: float | None

    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What to know about the record itself: cut off, ranks missing; one sentence each."""
