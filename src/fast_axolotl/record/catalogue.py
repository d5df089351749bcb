"""The catalogue of figures: what each is called, its unit, and why it can be missing.

A figure is declared here once. The matrix of a protocol, the report and the reasons for missing
values read it from here. docs/metrics.md says of each what it tells, how it is measured, and when
it misleads; a test compares the page with this file. Names are fields of ``RunSummary``, but for
``start_to_step_seconds``: it counts from the start of the process, which only a protocol sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fast_axolotl.record.units import format_value

__all__ = ["FIGURES", "LEDGER", "MATRIX", "PRIMARY", "Better", "Figure"]

Better = Literal["higher", "lower", ""]

_UNWATCHED = "processes were not sampled; use fast-axolotl measure, or measure(sample_system=True)"
_NOT_COUNTED = "this kernel does not report it, or an earlier version recorded the run"
_NO_WINDOW = "no profiler window was recorded; use fast-axolotl measure --profile-steps 5"
_NO_NOISE = "it was not requested; use fast-axolotl measure --gradient-noise"
_NO_TIME = "the steady phase has no duration"
_NO_IDS = "the batches hold no token ids; report the number with meter.tokens(n)"
_NO_LABELS = "the batches hold no labels; report the number with meter.tokens(n, trainable=…)"
_NO_PERIOD = "the long waits are not periodic"
_NO_QUEUE = "the loader has no queue that can be inspected"
_NOT_DRAINED = "the loader was not measured without a model; use meter.free_run(loader)"

_SHARE_NEAR_ZERO = 0.01
"""One point: ten times what the meter resolves."""
_RATE_NEAR_ZERO = 1e6
"""1 MB/s: less than any disk or swap device would notice."""
_BIN_WIDTH = 0.02
"""Of the histograms that quantiles come from: two runs on both sides of an edge are so far
apart."""


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
    """Of figures that can be 0: below this a value has no meaningful ratio."""
    resolution: float = 0.0
    """Share by which a ratio can be off for how the figure is recorded, however many pairs."""
    decimals: int = 1
    """Of a share, in percent."""

    def format(self, value: float | None) -> str:
        """A value with its unit; a dash for what was not measured."""
        return format_value(value, self.unit, decimals=self.decimals)


def _quantiles(what: str, label: str, missing: str) -> tuple[Figure, ...]:
    return tuple(
        Figure(f"{what}_{name}_seconds", f"{label}, {name}", "s", "lower", missing,
               resolution=_BIN_WIDTH)
        for name in ("p50", "p95", "p99", "max")
    )  # fmt: skip


_ALL = (
    Figure("stall_fraction", "stall", "share", "lower", _NO_TIME, _SHARE_NEAR_ZERO),
    Figure("stall_error", "stall, possible error", "share", "",
           "the times of all steps are known, or there is only one rank"),
    Figure("host_stall_fraction", "CPU-side wait", "share", "lower", _NO_TIME, _SHARE_NEAR_ZERO),
    Figure("device_stall_fraction", "GPU idle while waiting for data", "share", "lower",
           "no CUDA events were recorded: there was no CUDA GPU, or the meter did not detect it",
           _SHARE_NEAR_ZERO),
    *_quantiles("wait", "wait per fetch", "the waits of single fetches were not recorded"),
    Figure("worst_percent_share", "slowest 1 % of fetches", "share", "",
           "no fetch waited longer than a microsecond"),
    Figure("stall_period_fetches", "period of long waits", "fetches", "", _NO_PERIOD),
    Figure("stall_period_rows", "period of long waits", "samples", "", _NO_PERIOD),
    Figure("cached_stall_fraction", "cached batch saves", "share", "",
           "no cached batch was replayed; use meter.watch(loader, replay=50)"),
    Figure("queue_depth", "ready queue, depth", "batches", "", _NO_QUEUE),
    Figure("queue_capacity", "ready queue, capacity", "batches", "",
           "the number of workers and the prefetch factor are not known"),
    Figure("queue_drift_per_step", "ready queue, drift", "batches/step", "", _NO_QUEUE),
    Figure("first_batch_seconds", "first fetch to first batch", "s", "lower",
           "the first batch was not recorded"),
    Figure("first_step_seconds", "first fetch to first step", "s", "lower",
           "the first step was not recorded"),
    Figure("start_to_step_seconds", "time to first step", "s", "lower",
           "the process was not watched from its start"),
    Figure("rows_per_second", "rows", "rows/s", "higher"),
    Figure("samples_per_second", "samples", "samples/s", "higher"),
    Figure("bytes_per_second", "batch bytes", "bytes/s", "higher", "the batches hold no arrays"),
    Figure("free_rows_per_second", "loader alone", "rows/s", "higher", _NOT_DRAINED),
    Figure("demand_rows_per_second", "model could consume", "rows/s", ""),
    Figure("headroom", "headroom", "×", "higher", _NOT_DRAINED),
    Figure("reader_rows_per_second", "reader could deliver", "rows/s", "higher",
           "the queue of the workers was always full, and no other rate of the loader was "
           "measured"),
    Figure("reader_ratio", "reader ÷ consumption", "×", "higher",
           "the rate that the reader could reach, or the rate of the run, is not known"),
    Figure("tokens_per_second", "real tokens", "tokens/s", "higher", _NO_IDS),
    Figure("trainable_tokens_per_second", "trainable tokens", "tokens/s", "higher", _NO_LABELS),
    Figure("trainer_tokens_per_second", "trainer's own tokens/s", "tokens/s", "",
           "the trainer did not log tokens/s"),
    Figure("trainer_tokens_ratio", "trainer's tokens/s ÷ ours", "×", "",
           "the trainer did not log tokens/s"),
    Figure("padded_tokens_per_second", "padded tokens", "tokens/s", "higher", _NO_IDS),
    Figure("padding_share", "padding", "share", "lower", "real or padded tokens were not counted"),
    Figure("packing_efficiency", "packing efficiency", "share", "higher",
           "samples are not packed"),
    Figure("mean_attended_length", "attended length", "tokens", "",
           "the lengths of the sequences were not recorded"),
    Figure("goodput_tokens_per_second", "goodput", "tokens/s", "higher", _NO_IDS),
    Figure("steps_per_second", "steps", "steps/s", "higher", _NO_TIME),
    *_quantiles("step", "step time", "the times of single steps were not recorded"),
    Figure("global_batch_samples", "global batch", "samples", "",
           "the batches have no first dimension along which to count samples"),
    Figure("gradient_noise_scale", "gradient noise scale", "samples", "", _NO_NOISE),
    *(
        Figure(f"gradient_noise_scale_{name}", f"gradient noise scale, {name}er end", "samples", "",
               _NO_NOISE)
        for name in ("low", "high")
    ),
    Figure("model_flops_per_token", "FLOPs per token", "FLOP", ""),
    Figure("model_flops_per_second", "FLOPs per second", "FLOP/s", "higher"),
    Figure("mfu", "MFU", "share", "higher"),
    Figure("hfu", "HFU", "share", "higher"),
    Figure("peak_tflops", "peak of one GPU", "TFLOP/s", ""),
    Figure("matmul_share", "share of the matmul rate", "share", "higher"),
    Figure("working_set_bytes", "working set, steady", "bytes", "lower", _UNWATCHED),
    Figure("working_set_peak_bytes", "working set, peak", "bytes", "lower", _UNWATCHED),
    Figure("mapped_file_bytes", "mapped files", "bytes", "",
           f"the working set includes mapped files: {_NOT_COUNTED}"),
    *(
        Figure(f"{name}_bytes", f"resident memory, {label}", "bytes", "lower", _UNWATCHED)
        for name, label in (("rss", "all"), ("anon", "anonymous"), ("file", "files"),
                            ("shared", "shared"))
    ),
    Figure("hwm_bytes", "peak resident memory", "bytes", "lower", _UNWATCHED),
    Figure("spike_ratio", "spike", "×", "lower",
           "the peak or the steady resident memory is not known"),
    Figure("limit_bytes", "limit", "bytes", "",
           "neither a limit nor the memory of the machine is known"),
    Figure("limit_share", "limit, used", "share", "lower",
           "the peak working set or the limit is not known"),
    *(
        Figure(f"psi_{name}_full", f"{label} pressure", "share", "lower", _UNWATCHED)
        for name, label in (("memory", "memory"), ("io", "disk"))
    ),
    Figure("psi_cpu_some", "CPU pressure", "share", "lower", _NOT_COUNTED),
    Figure("cpu_cores", "CPU cores used", "cores", "", _UNWATCHED),
    Figure("other_cpu_share", "other programs", "share", "lower", _NOT_COUNTED, _SHARE_NEAR_ZERO),
    Figure("cpu_wait_share", "waiting for a CPU core", "share", "lower", _NOT_COUNTED,
           _SHARE_NEAR_ZERO),
    Figure("cpu_steal_share", "stolen by the hypervisor", "share", "lower", _NOT_COUNTED,
           _SHARE_NEAR_ZERO),
    Figure("cpu_throttled_share", "throttled by the quota", "share", "lower",
           "the cgroup has no CPU quota, or does not count it", _SHARE_NEAR_ZERO),
    Figure("oom_kills", "out-of-memory kills", "processes", "lower",
           "there is no memory cgroup here"),
    Figure("read_bytes_per_second", "read from the disk", "bytes/s", "", _UNWATCHED),
    Figure("read_chars_per_second", "requested by reads", "bytes/s", "", _UNWATCHED),
    Figure("disk_bytes_per_second", "capacity of the disk", "bytes/s", "",
           "at this request size, the disk is faster than the test can measure"),
    Figure("disk_share", "disk capacity used", "share", "",
           "the read rate or the capacity of the disk is not known", _SHARE_NEAR_ZERO),
    Figure("disk_request_bytes", "mean read request", "bytes", "",
           "the data's disk is not known, or does not count requests"),
    *(
        Figure(f"swap_{name}_bytes_per_second", f"swap {name}", "bytes/s", "lower", _UNWATCHED,
               _RATE_NEAR_ZERO)
        for name in ("in", "out")
    ),
    Figure("is_swap_sustained", "sustained swapping", "yes/no", "lower",
           "at least 3 sampled intervals are needed"),
    Figure("process_swap_bytes", "run's memory in swap", "bytes", "lower", _UNWATCHED),
    Figure("gpu_utilization", "utilisation", "share", "", "no GPU was detected"),
    Figure("gpu_memory_bytes", "GPU memory", "bytes", "", "no GPU was detected"),
    Figure("gpu_free_bytes", "GPU memory, free", "bytes", "", "no GPU was detected"),
    Figure("gpu_peak_allocated_bytes", "GPU memory, allocated by torch", "bytes", "",
           "torch used no GPU in the training process, or an earlier version recorded the run"),
    Figure("gpu_power_watts", "power", "W", "", "no GPU was detected"),
    Figure("gpu_clock_mhz", "clock", "MHz", "", "no GPU was detected"),
    Figure("device_idle_fraction", "GPU idle", "share", "lower", _NO_WINDOW),
    Figure("exposed_communication_fraction", "exposed communication", "share", "lower",
           _NO_WINDOW),
    Figure("pure_communication_fraction", "pure communication", "share", "lower", _NO_WINDOW),
    Figure("straggler_fraction", "lost to the slowest rank", "share", "lower",
           "there is only one rank, or no forward pass was timed"),
    Figure("overhead_seconds_per_fetch", "cost per fetch", "s", "lower"),
    Figure("overhead_fraction", "share of the time", "share", "lower", decimals=3),
    Figure("duration_seconds", "whole run", "s", "lower"),
)  # fmt: skip

FIGURES: dict[str, Figure] = {figure.name: figure for figure in _ALL}
"""Every figure by its name."""

MATRIX: tuple[Figure, ...] = tuple(
    FIGURES[name]
    for name in (
        "rows_per_second", "reader_rows_per_second", "reader_ratio", "samples_per_second",
        "working_set_bytes", "working_set_peak_bytes", "host_stall_fraction",
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
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "logging": "logging",
    "startup": "start-up",
    "resume": "resume",
    "first_step": "first step (compilation)",
    "other": "other",
}
"""The parts of the wall clock in their order, and what they are called."""

PRIMARY = ("tokens_per_second", "samples_per_second", "rows_per_second", "duration_seconds")
"""Which figure answers whether an arm is faster: the first that both arms have."""
