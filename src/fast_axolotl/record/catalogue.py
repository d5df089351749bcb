"""The catalogue of figures: name, unit, direction, and why a figure may be missing.

A figure is declared here once. The matrix of a protocol, the report and the reasons for missing
values read it from here; docs/metrics.md and docs/metrics-machine.md explain how each is measured
and when it is misleading, and a test compares both. Names are fields of ``RunSummary``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fast_axolotl.record.units import format_value

Better = Literal["higher", "lower", ""]

_UNREADABLE = "it could not be read; watch the run as its own user or as root"
_NOT_COUNTED = "this kernel does not report it, or an earlier version recorded the run"
_NO_PRESSURE = "this kernel does not report pressure (PSI)"
_NO_GPU = "no GPU was detected"
_NO_WINDOW = "no profiler window was recorded; use fast-axolotl measure --profile-steps 5"
_NO_TIME = "the steady phase has no duration"
_NO_IDS = "the batches hold no token ids; report the number with meter.tokens(n)"
_NO_LABELS = "the batches hold no labels; report the number with meter.tokens(n, trainable=…)"
_NO_PERIOD = "the waits are all about as long"
_NO_STACKS = "the Python stack was not looked at, or an earlier version recorded the run"
_NO_SWAP = "/proc/vmstat has no swap counters"
_NO_QUEUE = "the loader has no queue that can be inspected"

_SHARE_NEAR_ZERO = 0.01
"""One point: ten times what the meter resolves."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a run."""

    name: str
    """Field of ``RunSummary``."""
    label: str
    unit: str
    """``share`` is shown in percent; ``s``, ``bytes`` and ``FLOP`` with a fitting prefix."""
    better: Better
    missing: str = "not recorded"
    """Why there is no value, where nobody gave a more exact reason."""
    near_zero: float | None = None
    """Of figures that can be 0: below this a value has no meaningful ratio. Of swap 1 MB/s: less
    than any device would notice."""
    resolution: float = 0.0
    """Share by which a ratio can be off for how the figure is recorded, however many pairs: the
    width of a histogram's bins, where quantiles come from."""
    decimals: int = 1
    """Of a share, in percent."""

    def format(self, value: float | None) -> str:
        """A value with its unit; a dash for what was not measured."""
        return format_value(value, self.unit, decimals=self.decimals)


def _quantiles(what: str, label: str, missing: str) -> tuple[Figure, ...]:
    return tuple(
        Figure(f"{what}_{name}_seconds", f"{label}, {name}", "s", "lower", missing, None, 0.02)
        for name in ("p50", "p95", "p99", "max")
    )


_GROUPS: dict[str, tuple[Figure, ...]] = {
    "Waiting for data": (
        Figure("stall_fraction", "stall", "share", "lower", _NO_TIME, _SHARE_NEAR_ZERO),
        Figure("device_stall_fraction", "GPU idle while waiting for data", "share", "lower",
            "no CUDA events were recorded: there was no CUDA GPU, or the meter did not detect it",
            _SHARE_NEAR_ZERO),
        Figure("host_stall_fraction", "CPU-side wait", "share", "lower", _NO_TIME,
            _SHARE_NEAR_ZERO),
        *_quantiles("wait", "wait per fetch", "the waits of single fetches were not recorded"),
        Figure("stall_period_fetches", "period of long waits", "fetches", "", _NO_PERIOD),
        Figure("stall_period_rows", "period of long waits", "samples", "", _NO_PERIOD),
        Figure("queue_depth", "ready queue, depth", "batches", "", _NO_QUEUE),
        Figure("queue_capacity", "ready queue, capacity", "batches", "",
            "the number of workers and the prefetch factor are not known"),
        Figure("first_batch_seconds", "first fetch to first batch", "s", "lower",
            "the first batch was not recorded"),
        Figure("first_step_seconds", "first fetch to first step", "s", "lower",
            "the first step was not recorded"),
    ),
    "Where the time of a step goes": (
        Figure("preparing_fraction", "preparing batches", "share", "lower", _NO_STACKS,
            _SHARE_NEAR_ZERO),
        Figure("forward_fraction", "forward", "share", "", _NO_STACKS),
        Figure("backward_fraction", "backward", "share", "", _NO_STACKS),
        Figure("optimizer_fraction", "optimizer", "share", "", _NO_STACKS),
        Figure("other_fraction", "other code", "share", "lower", _NO_STACKS, _SHARE_NEAR_ZERO),
    ),
    "Reading": (
        Figure("rows_per_second", "rows", "rows/s", "higher"),
        Figure("samples_per_second", "samples", "samples/s", "higher"),
        Figure("demand_rows_per_second", "model could consume", "rows/s", ""),
        Figure("reader_rows_per_second", "reader could deliver", "rows/s", "higher",
            "the workers of the loader were not looked at"),
        Figure("reader_ratio", "reader ÷ consumption", "×", "higher",
            "the rate that the reader could reach, or the rate of the run, is not known"),
    ),
    "Tokens and steps": (
        Figure("tokens_per_second", "real tokens", "tokens/s", "higher", _NO_IDS),
        Figure("trainable_tokens_per_second", "trainable tokens", "tokens/s", "higher", _NO_LABELS),
        Figure("padded_tokens_per_second", "padded tokens", "tokens/s", "higher", _NO_IDS),
        Figure("goodput_tokens_per_second", "goodput", "tokens/s", "higher", _NO_IDS),
        Figure("padding_share", "padding", "share", "lower",
            "real or padded tokens were not counted"),
        Figure("mean_attended_length", "attended length", "tokens", "",
            "the lengths of the sequences were not recorded"),
        Figure("steps_per_second", "steps", "steps/s", "higher", _NO_TIME),
        *_quantiles("step", "step time", "the times of single steps were not recorded"),
    ),
    "Compute": (
        Figure("model_flops_per_token", "FLOPs per token", "FLOP", ""),
        Figure("model_flops_per_second", "FLOPs per second", "FLOP/s", "higher"),
        Figure("mfu", "MFU", "share", "higher"),
        Figure("hfu", "HFU", "share", "higher"),
        Figure("peak_tflops", "peak of one GPU", "TFLOP/s", ""),
    ),
    "Memory of all processes": (
        Figure("working_set_bytes", "working set, steady", "bytes", "lower", _UNREADABLE),
        Figure("working_set_peak_bytes", "working set, peak", "bytes", "lower", _UNREADABLE),
        Figure("rss_bytes", "resident memory", "bytes", "lower", _UNREADABLE),
        Figure("hwm_bytes", "peak resident memory", "bytes", "lower", _UNREADABLE),
        Figure("limit_bytes", "memory limit", "bytes", "",
            "neither a limit nor the memory of the machine is known"),
        Figure("limit_share", "memory limit, used", "share", "lower",
            "the peak working set or the limit is not known"),
        Figure("psi_memory_full", "memory pressure", "share", "lower", _NO_PRESSURE),
        Figure("oom_kills", "out-of-memory kills", "processes", "lower",
            "there is no memory cgroup here"),
    ),
    "CPU": (
        Figure("cpu_cores", "CPU cores used", "cores", "", _UNREADABLE),
        Figure("other_cpu_share", "other programs", "share", "lower", _NOT_COUNTED,
            _SHARE_NEAR_ZERO),
        Figure("cpu_wait_share", "waiting for a CPU core", "share", "lower", _NOT_COUNTED,
            _SHARE_NEAR_ZERO),
        Figure("cpu_steal_share", "stolen by the hypervisor", "share", "lower", _NOT_COUNTED,
            _SHARE_NEAR_ZERO),
        Figure("cpu_throttled_share", "throttled by the quota", "share", "lower",
            "the cgroup has no CPU quota, or does not count it", _SHARE_NEAR_ZERO),
    ),
    "Disk and swap": (
        Figure("read_bytes_per_second", "read from the disk", "bytes/s", "", _UNREADABLE),
        Figure("disk_bytes_per_second", "capacity of the disk", "bytes/s", "",
            "the run reads in small requests, for which the disk was not tested"),
        Figure("disk_share", "disk capacity used", "share", "",
            "the read rate or the capacity of the disk is not known", _SHARE_NEAR_ZERO),
        Figure("disk_request_bytes", "mean read request", "bytes", "",
            "the data's disk is not known, or does not count requests"),
        Figure("psi_io_full", "disk pressure", "share", "lower", _NO_PRESSURE),
        Figure("swap_in_bytes_per_second", "swap in", "bytes/s", "lower", _NO_SWAP, 1e6),
        Figure("swap_out_bytes_per_second", "swap out", "bytes/s", "lower", _NO_SWAP, 1e6),
        Figure("is_swap_sustained", "sustained swapping", "yes/no", "lower",
            "at least 3 sampled intervals are needed"),
        Figure("process_swap_bytes", "run's memory in swap", "bytes", "lower", _UNREADABLE),
    ),
    "GPU": (
        Figure("gpu_utilization", "GPU utilisation", "share", "", _NO_GPU),
        Figure("gpu_memory_bytes", "GPU memory", "bytes", "", _NO_GPU),
        Figure("gpu_free_bytes", "GPU memory, free", "bytes", "", _NO_GPU),
        Figure("gpu_peak_allocated_bytes", "GPU memory, allocated by torch", "bytes", "",
            "torch used no GPU in the training process, or an earlier version recorded the run"),
        Figure("gpu_power_watts", "GPU power", "W", "", _NO_GPU),
        Figure("gpu_clock_mhz", "GPU clock", "MHz", "", _NO_GPU),
    ),
    "Profiler window and ranks": (
        Figure("device_idle_fraction", "GPU idle", "share", "lower", _NO_WINDOW),
        Figure("exposed_communication_fraction", "exposed communication", "share", "lower",
            _NO_WINDOW),
        Figure("pure_communication_fraction", "pure communication", "share", "lower", _NO_WINDOW),
        Figure("straggler_fraction", "lost to the slowest rank", "share", "lower",
            "there is only one rank"),
    ),
    "Cost of measuring": (
        Figure("overhead_seconds_per_fetch", "cost per fetch", "s", "lower"),
        Figure("overhead_fraction", "share of the time", "share", "lower", decimals=3),
    ),
    "": (
        Figure("start_to_step_seconds", "time to first step", "s", "lower",
            "the process was not watched from its start"),
        Figure("duration_seconds", "whole run", "s", "lower"),
    ),
}  # fmt: skip

FIGURES: dict[str, Figure] = {
    figure.name: figure for figures in _GROUPS.values() for figure in figures
}
"""Every figure by its name."""

GROUPS: dict[str, tuple[str, ...]] = {
    title: tuple(figure.name for figure in figures) for title, figures in _GROUPS.items() if title
}
"""Figures that a report shows together, in their order. Neighbours whose labels are the same up to
the comma share a line."""

MATRIX: tuple[Figure, ...] = tuple(
    FIGURES[name]
    for name in (
        "rows_per_second", "reader_rows_per_second", "reader_ratio", "samples_per_second",
        "working_set_bytes", "working_set_peak_bytes", "stall_fraction", "host_stall_fraction",
        "device_stall_fraction", "tokens_per_second", "trainable_tokens_per_second",
        "padded_tokens_per_second", "mfu", "step_p50_seconds", "step_p95_seconds",
        "start_to_step_seconds", "first_step_seconds", "disk_share", "swap_in_bytes_per_second",
        "swap_out_bytes_per_second", "duration_seconds",
    )
)  # fmt: skip
"""The rows of a matrix, in their order."""


LEDGER: dict[str, str] = {
    "compute": "compute",
    "compute_and_communication": "compute and communication",
    "communication": "exposed communication",
    "data": "waiting for data",
    "preparing": "preparing batches",
    "code": "other code in steps",
    "between": "between loops",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "logging": "logging",
    "startup": "start-up",
    "resume": "resume",
    "first_step": "first step (compilation)",
    "other": "other",
}
"""The parts of the wall clock in their order, and what they are called."""

STEP = (
    *("waiting", "preparing", "forward", "backward", "optimizer"),
    *("communication", "checkpoint", "evaluation", "other"),
)
"""The phases of a step, in their order."""

PRIMARY = ("tokens_per_second", "samples_per_second", "rows_per_second", "duration_seconds")
"""Which figure answers whether an arm is faster: the first that both arms have."""
