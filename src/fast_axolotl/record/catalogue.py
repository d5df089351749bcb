"""The catalogue of figures: what each is called, its unit, its formula, and what it cannot see.

A figure is declared here once. The matrix of a protocol, the report, the documentation and the
reasons for missing values read it from here. T is the wall time of the steady phase, summed over
its steps; W is the waiting inside T. Names are fields of ``RunSummary``, but for
``start_to_step_seconds``: it counts from the start of the process, which only a protocol sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fast_axolotl.record.units import format_value

Better = Literal["higher", "lower", ""]

_UNREADABLE = "it could not be read; watch the run as its own user or as root"
_NOT_COUNTED = "this kernel does not report it, or an earlier version recorded the run"
_NO_GPU = "no GPU was detected"
_NO_WINDOW = "no profiler window was recorded; use fast-axolotl measure --profile-steps 5"
_NO_TIME = "the steady phase has no duration"
_NO_IDS = "the batches hold no token ids; report the number with meter.tokens(n)"
_NO_LABELS = "the batches hold no labels; report the number with meter.tokens(n, trainable=…)"
_NO_PERIOD = "the waits are all about as long"
_NO_QUEUE = "the loader has no queue that can be inspected"

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
    formula: str
    blind_spot: str = ""
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
        Figure(
            f"{what}_{name}_seconds",
            f"{label}, {name}",
            "s",
            "lower",
            f"{name} over all {'fetches, of waits in the stall' if what == 'wait' else 'steps'}",
            "histogram bins of 2 %, so accurate to 1 %",
            missing,
            resolution=_BIN_WIDTH,
        )
        for name in ("p50", "p95", "p99", "max")
    )


def _pressure(name: str, label: str) -> Figure:
    formula = "share of time in which every task waited for it: growth of the Linux PSI counter "
    formula += "`full` ÷ time"
    blind_spot = "measured for the control group on cgroup v2, otherwise for the whole machine, "
    blind_spot += "not for the run"
    title = f"{label} pressure"
    missing = "this kernel does not report pressure (PSI)"
    return Figure(f"psi_{name}_full", title, "share", "lower", formula, blind_spot, missing)


_GROUPS: dict[str, tuple[Figure, ...]] = {
    "Waiting for data": (
        Figure("stall_fraction", "stall", "share", "lower",
            "ΣW ÷ ΣT. W is measured on the GPU if that covers 90 % of T, otherwise on the CPU; "
            "with several ranks, W is the longest wait of each step",
            "on a GPU without CUDA events it is measured on the CPU, which also counts hidden "
            "waits", _NO_TIME, _SHARE_NEAR_ZERO),
        Figure("device_stall_fraction", "GPU idle while waiting for data", "share", "lower",
            "ΣW_dev ÷ ΣT, W_dev = time between two CUDA events around that call, the longest of "
            "any rank", "work that runs on other CUDA streams meanwhile",
            "no CUDA events were recorded: there was no CUDA GPU, or the meter did not detect it",
            _SHARE_NEAR_ZERO),
        Figure("host_stall_fraction", "CPU-side wait", "share", "lower",
            "ΣW_host ÷ ΣT, W_host = wall time inside the next-batch call of the loader, the "
            "longest of any rank", "also counts waits that are hidden behind queued GPU work",
            _NO_TIME, _SHARE_NEAR_ZERO),
        *_quantiles("wait", "wait per fetch", "the waits of single fetches were not recorded"),
        Figure("worst_percent_share", "slowest 1 % of fetches", "share", "",
            "waiting in the slowest 1 % of fetches ÷ all waiting", "same histogram bins",
            "no fetch waited longer than a microsecond"),
        Figure("stall_period_fetches", "period of long waits", "fetches", "",
            "fetches ÷ number of long waits", "needs two long waits", _NO_PERIOD),
        Figure("stall_period_rows", "period of long waits", "samples", "",
            "the same, in samples delivered",
            "equal to the period in fetches if all batches have the same size",
            _NO_PERIOD),
        Figure("queue_depth", "ready queue, depth", "batches", "",
            "mean number of ready batches when a fetch begins",
            "only for loaders with their own queue (torch workers); if the queue ran empty, only "
            "the time after that", _NO_QUEUE),
        Figure("queue_capacity", "ready queue, capacity", "batches", "",
            "workers · prefetch factor", "",
            "the number of workers and the prefetch factor are not known"),
        Figure("first_batch_seconds", "first fetch to first batch", "s", "lower",
            "from the start of the first fetch", "includes the start of the workers",
            "the first batch was not recorded"),
        Figure("first_step_seconds", "first fetch to first step", "s", "lower",
            "from the start of the first fetch",
            "does not start with the program: see `start_to_step_seconds`",
            "the first step was not recorded"),
    ),
    "Reading": (
        Figure("rows_per_second", "rows", "rows/s", "higher",
            "source rows ÷ T, summed over ranks; samples if they are not packed",
            "packed samples: rows are counted where `position_ids` restart (as Axolotl's do), "
            "otherwise `None`; a row that is cut in two counts twice"),
        Figure("samples_per_second", "samples", "samples/s", "higher",
            "items along the first dimension ÷ T, summed over ranks"),
        Figure("demand_rows_per_second", "model could consume", "rows/s", "", "rows ÷ (T − W)",
            "lower if the loader's threads slow the model down"),
        Figure("reader_rows_per_second", "reader could deliver", "rows/s", "higher",
            "without workers rows ÷ W; with workers the rate at which they fill a queue that has "
            "room",
            "workers share the machine with the model: with less to deliver they may be faster",
            "the queue of the workers was always full, so their rate was not seen"),
        Figure("reader_ratio", "reader ÷ consumption", "×", "higher",
            "`reader_rows_per_second` ÷ `rows_per_second`", "",
            "the rate that the reader could reach, or the rate of the run, is not known"),
    ),
    "Tokens and steps": (
        Figure("tokens_per_second", "real tokens", "tokens/s", "higher",
            "positions with attention mask ≠ 0 ÷ T, summed over ranks; ranks of a tensor or "
            "context parallel group count once",
            "too high if these groups are not known: see `data_parallel_size`; `None` if one "
            "rank, or one block of steps, was not counted. The same holds for the next two "
            "figures, samples and bytes", _NO_IDS),
        Figure("trainable_tokens_per_second", "trainable tokens", "tokens/s", "higher",
            "positions with label ≠ −100 ÷ T, summed over ranks", "", _NO_LABELS),
        Figure("padded_tokens_per_second", "padded tokens", "tokens/s", "higher",
            "all positions ÷ T, summed over ranks", "", _NO_IDS),
        Figure("goodput_tokens_per_second", "goodput", "tokens/s", "higher",
            "real tokens of all steps ÷ the whole wall clock, including start-up, evaluation and "
            "checkpoints", "", _NO_IDS),
        Figure("padding_share", "padding", "share", "lower", "1 − real ÷ padded", "",
            "real or padded tokens were not counted"),
        Figure("mean_attended_length", "attended length", "tokens", "",
            "Σℓ² ÷ Σℓ of the inspected sequences", "from a part of the batches",
            "the lengths of the sequences were not recorded"),
        Figure("steps_per_second", "steps", "steps/s", "higher", "steps ÷ T", "", _NO_TIME),
        *_quantiles("step", "step time", "the times of single steps were not recorded"),
    ),
    "Compute": (
        Figure("model_flops_per_token", "FLOPs per token", "FLOP", "",
            "6·trained weights + 4·frozen weights + 12·L·H·Q·T: see [FLOPs, MFU and "
            "HFU](#flops-mfu-and-hfu)", "by convention: causal masking not discounted"),
        Figure("model_flops_per_second", "FLOPs per second", "FLOP/s", "higher",
            "`model_flops_per_token` · `tokens_per_second`", "padding does not count as work"),
        Figure("mfu", "MFU", "share", "higher",
            "`model_flops_per_second` ÷ (GPUs · dense peak of one GPU)",
            "`None` if the peak is not known, or if the result is above 1, because then one of "
            "its parts must be wrong"),
        Figure("hfu", "HFU", "share", "higher", "the same, with recomputed activations counted",
            "by convention: recomputation costs one whole forward pass"),
        Figure("peak_tflops", "peak of one GPU", "TFLOP/s", "",
            "from the data sheet, dense, by the exact name of the GPU and the data type; or "
            "`--peak-tflops`", "clocks are lower under load"),
    ),
    "Memory of all processes": (
        Figure("working_set_bytes", "working set, steady", "bytes", "lower",
            "median over the steady phase of the anonymous and shared memory of all processes, "
            "shared pages counted once (sum of PSS)",
            "sampled rarely: `None` if no sample fell into a short steady phase, or if the ranks "
            "did not reach it; the same holds for the resident memory. Without ranks (`watch "
            "PID`) it covers the whole time. Kernels before 5.3 do not divide PSS by kind, so it "
            "includes mapped files there", _UNREADABLE),
        Figure("working_set_peak_bytes", "working set, peak", "bytes", "lower",
            "largest sample of the same memory",
            "misses peaks between samples; `None` if no sample was taken after the first step, as "
            "in runs of a second or two: earlier samples do not belong to the training",
            _UNREADABLE),
        Figure("rss_bytes", "resident memory", "bytes", "lower",
            "median of the sum of RSS over all processes", "a shared page counts once per process",
            _UNREADABLE),
        Figure("hwm_bytes", "peak resident memory", "bytes", "lower",
            "largest sum of the peaks (VmHWM) of the living processes",
            "an upper bound, because the processes need not have peaked at the same time",
            _UNREADABLE),
        Figure("limit_bytes", "limit", "bytes", "",
            "the lowest cgroup limit, otherwise the memory of the machine", "",
            "neither a limit nor the memory of the machine is known"),
        Figure("limit_share", "limit, used", "share", "lower",
            "`working_set_peak_bytes` (if PSS cannot be read: the sum of RSS of anonymous and "
            "shared memory) ÷ the limit, or the largest anonymous memory of one process if that "
            "is more",
            "leaves out mapped files and page cache, which the kernel can reclaim, and batches in "
            "`/dev/shm` that no process has mapped; `None` if the peak working set is",
            "the peak working set or the limit is not known"),
        _pressure("memory", "memory"),
        Figure("oom_kills", "out-of-memory kills", "processes", "lower",
            "growth of oom_kill in memory.events of the cgroup",
            "includes other programs of the cgroup", "there is no memory cgroup here"),
    ),
    "CPU": (
        Figure("cpu_cores", "CPU cores used", "cores", "",
            "growth of the CPU time of all processes ÷ time", "", _UNREADABLE),
        Figure("other_cpu_share", "other programs", "share", "lower",
            "(CPU time of all programs on the cores that the run may use − CPU time of the run) ÷ "
            "(time · these cores)", "includes the kernel's own work", _NOT_COUNTED,
            _SHARE_NEAR_ZERO),
        Figure("cpu_wait_share", "waiting for a CPU core", "share", "lower",
            "growth of run_delay in /proc/PID/schedstat ÷ time, for the process that waited most",
            "counts main threads only", _NOT_COUNTED, _SHARE_NEAR_ZERO),
        Figure("cpu_steal_share", "stolen by the hypervisor", "share", "lower",
            "growth of steal in /proc/stat ÷ (steal + CPU time of all programs)", "", _NOT_COUNTED,
            _SHARE_NEAR_ZERO),
        Figure("cpu_throttled_share", "throttled by the quota", "share", "lower",
            "growth of throttled_usec of the cgroup ÷ (throttled_usec + CPU time of the run)",
            "measured for the whole cgroup", "the cgroup has no CPU quota, or does not count it",
            _SHARE_NEAR_ZERO),
    ),
    "Disk and swap": (
        Figure("read_bytes_per_second", "read from the disk", "bytes/s", "",
            "growth of `read_bytes` of all processes ÷ time",
            "0 means cached, not idle; network file systems may not be counted", _UNREADABLE),
        Figure("disk_bytes_per_second", "capacity of the disk", "bytes/s", "",
            "what sequential O_DIRECT reads of the data's own disk reached",
            "a test of two seconds, before or during the run; `None` if the run reads in requests "
            "under 128 KiB",
            "the run reads in small requests, for which the disk was not tested"),
        Figure("disk_share", "disk capacity used", "share", "",
            "`read_bytes_per_second` ÷ `disk_bytes_per_second`",
            "caches of the disk can make it exceed 1",
            "the read rate or the capacity of the disk is not known", _SHARE_NEAR_ZERO),
        Figure("disk_request_bytes", "mean read request", "bytes", "",
            "bytes ÷ requests of the data's disk, from /proc/diskstats", "counts all programs",
            "the data's disk is not known, or does not count requests"),
        _pressure("io", "disk"),
        *(
            Figure(f"swap_{name}_bytes_per_second", f"swap {name}", "bytes/s", "lower",
                f"growth of pswp{name} · page size ÷ time", "counts the whole machine",
                "/proc/vmstat has no swap counters", _RATE_NEAR_ZERO)
            for name in ("in", "out")
        ),
        Figure("is_swap_sustained", "sustained swapping", "yes/no", "lower",
            "swap-in of 1 MB/s or more in half of the intervals and in three in a row",
            "needs three intervals; counts the whole machine",
            "at least 3 sampled intervals are needed"),
        Figure("process_swap_bytes", "run's memory in swap", "bytes", "lower",
            "largest sum of VmSwap over all processes", "", _UNREADABLE),
    ),
    "GPU": (
        Figure("gpu_utilization", "utilisation", "share", "",
            "mean over GPUs and samples of NVML utilisation: share of time in which a kernel was "
            "running", "one small kernel counts as much as a full GPU", _NO_GPU),
        Figure("gpu_memory_bytes", "GPU memory", "bytes", "", "highest of any GPU",
            "what the allocator holds, whether used or not", _NO_GPU),
        Figure("gpu_free_bytes", "GPU memory, free", "bytes", "",
            "lowest of any GPU: its memory − the peak that was used, or reserved by torch", "",
            _NO_GPU),
        Figure("gpu_peak_allocated_bytes", "GPU memory, allocated by torch", "bytes", "",
            "largest `max_memory_allocated` of any rank: tensors only, without memory that the "
            "allocator keeps",
            "read at the end of the warm-up, of each checkpoint and of the run; does not include "
            "memory allocated outside torch",
            "torch used no GPU in the training process, or an earlier version recorded the run"),
        Figure("gpu_power_watts", "power", "W", "", "mean over GPUs", "", _NO_GPU),
        Figure("gpu_clock_mhz", "clock", "MHz", "", "mean over GPUs", "", _NO_GPU),
    ),
    "Profiler window and ranks": (
        Figure("device_idle_fraction", "GPU idle", "share", "lower",
            "(window − time with a kernel) ÷ window, of the rank that waits longest",
            "covers a few steps only", _NO_WINDOW),
        Figure("exposed_communication_fraction", "exposed communication", "share", "lower",
            "time in which only collectives run ÷ window, highest of any rank", "", _NO_WINDOW),
        Figure("pure_communication_fraction", "pure communication", "share", "lower",
            "Σ over collectives of the shortest duration on any rank ÷ window",
            "needs windows with the same collectives on all ranks", _NO_WINDOW),
        Figure("straggler_fraction", "lost to the slowest rank", "share", "lower",
            "the part of the stall that only this rank causes; or, in a profiler window, what the "
            "others wait for it in collectives ÷ window",
            "a rank that computes longer shows only in a profiler window",
            "there is only one rank"),
    ),
    "Cost of measuring": (
        Figure("overhead_seconds_per_fetch", "cost per fetch", "s", "lower",
            "time inside the meter's own calls ÷ fetches",
            "leaves out the cost of CUDA events on the GPU and of the sampling thread, and time "
            "in which the GPU is busy with queued work, because it delays nothing"),
        Figure("overhead_fraction", "share of the time", "share", "lower",
            "`overhead_seconds_per_fetch` · fetches ÷ T", decimals=3),
    ),
    "": (
        Figure("start_to_step_seconds", "time to first step", "s", "lower",
            "from the start of the process to the end of the first step; only for runs of a "
            "protocol", "`None` if the process was not watched from its start",
            "the process was not watched from its start"),
        Figure("duration_seconds", "whole run", "s", "lower", "up to the last line of any file",
            "without `run --measure`, it starts at `measure()`, not at the start of the process"),
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
