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

__all__ = ["FIGURES", "LEDGER", "MATRIX", "PRIMARY", "Better", "Figure", "figures_table"]

Better = Literal["higher", "lower", ""]

_UNWATCHED = "nobody sampled the process tree: fast-axolotl measure, or measure(sample_system=True)"
_NOT_COUNTED = "this kernel does not count it, or an earlier version recorded the run"
_NO_WINDOW = "no profiler window was recorded: fast-axolotl measure --profile-steps 5"
_NO_NOISE = "it was not asked for: fast-axolotl measure --gradient-noise"
_NO_TIME = "no time passed in the steady phase"
_NO_IDS = "the batches hold no token ids; tell the meter with meter.tokens(n)"
_NO_LABELS = "the batches hold no labels; tell the meter with meter.tokens(n, trainable=…)"
_NO_PERIOD = "the waits follow no period"
_NO_QUEUE = "the loader has no queue that can be looked into"
_NOT_DRAINED = "the loader was not drained without a model: meter.free_run(loader)"

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
    missing: str = "it was not recorded"
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
            f"{name} over {'fetches, of the source’s waits' if what == 'wait' else 'steps'}",
            "bins of 2 %: within 1 %",
            missing,
            resolution=_BIN_WIDTH,
        )
        for name in ("p50", "p95", "p99", "max")
    )


_ALL = (
    Figure("stall_fraction", "stall", "share", "lower",
           "ΣW ÷ ΣT, W of the device where known for 90 % of T, else of the host; of several ranks "
           "the largest W of each step",
           "on a GPU without events it is the host's, which counts hidden waits", _NO_TIME,
           _SHARE_NEAR_ZERO),
    Figure("stall_error", "stall, error of the estimate", "share", "",
           "how far the stall of several ranks can be off where the times of single steps were "
           "condensed", "", "the times of all steps are known, or there is one rank"),
    Figure("host_stall_fraction", "stall, by the host", "share", "lower",
           "ΣW_host ÷ ΣT, W_host = wall time inside the base iterator's next-data call, the "
           "largest of any rank", "a wait hidden behind queued GPU work counts", _NO_TIME,
           _SHARE_NEAR_ZERO),
    Figure("device_stall_fraction", "stall, by the device", "share", "lower",
           "ΣW_dev ÷ ΣT, W_dev = distance of two CUDA events around that call, the largest of any "
           "rank", "work on other streams that runs meanwhile",
           "no device events were recorded: there was no CUDA device, or the meter did not see it",
           _SHARE_NEAR_ZERO),
    *_quantiles("wait", "wait of a fetch", "no waits of single fetches were recorded"),
    Figure("worst_percent_share", "worst 1 % of fetches", "share", "",
           "waiting in the longest 1 % of fetches ÷ all waiting", "the same bins",
           "no fetch waited longer than a microsecond"),
    Figure("stall_period_fetches", "period of long waits", "fetches", "",
           "distance of the long waits: from the first to the last ÷ periods between",
           "needs three long waits", _NO_PERIOD),
    Figure("stall_period_rows", "period of long waits", "samples", "",
           "the same in samples delivered",
           "equal to the period in fetches where batches have one size", _NO_PERIOD),
    Figure("cached_stall_fraction", "with a cached batch", "share", "",
           "1 − T(one cached batch) ÷ T(real), both per fetch",
           "one batch stands for all: not compared where its tokens (or samples, or bytes) differ "
           "by more than 10 % from the mean",
           "no cached batch was replayed: meter.watch(loader, replay=50)"),
    Figure("queue_depth", "ready queue, depth", "batches", "",
           "ready batches when a fetch begins, mean",
           "only loaders with a queue of their own (torch workers); after it ran dry, of the time "
           "since", _NO_QUEUE),
    Figure("queue_capacity", "ready queue, capacity", "batches", "", "workers · prefetch", "",
           "the loader's workers and prefetch are not known"),
    Figure("queue_drift_per_step", "ready queue, drift", "batches/step", "",
           "slope of a line through depth over steps; 0 where within two standard errors",
           "a queue that swings slowly looks like a drift in a short run", _NO_QUEUE),
    Figure("first_batch_seconds", "first fetch to first batch", "s", "lower",
           "from the begin of the first fetch", "includes the start of workers",
           "that moment was not recorded"),
    Figure("first_step_seconds", "first fetch to first step", "s", "lower",
           "from the begin of the first fetch",
           "not the start of the program: see `start_to_step_seconds`",
           "that moment was not recorded"),
    Figure("start_to_step_seconds", "start to first step", "s", "lower",
           "from the start of the process to the end of the first step; of a protocol's runs",
           "`None` where the meter sampled by itself", "nobody watched the process from its start"),
    Figure("rows_per_second", "reader", "rows/s", "higher",
           "source rows ÷ T, summed over ranks; samples where they are not packed",
           "packed samples: counted where `position_ids` begin anew (Axolotl's do), else `None`; a "
           "row cut in two counts twice"),
    Figure("samples_per_second", "samples", "samples/s", "higher",
           "items along the first dimension ÷ T, summed over ranks"),
    Figure("bytes_per_second", "bytes of the batches", "bytes/s", "higher",
           "bytes of the batches' arrays ÷ T, summed over ranks", "not what the disk gave",
           "the batches hold no arrays"),
    Figure("free_rows_per_second", "loader alone", "rows/s", "higher",
           "rows ÷ seconds with the loader drained and no model",
           "the model's cores are free then: an upper bound", _NOT_DRAINED),
    Figure("demand_rows_per_second", "the model would take", "rows/s", "", "rows ÷ (T − W)",
           "a model slowed down by the loader's threads demands less"),
    Figure("headroom", "headroom", "×", "higher",
           "free-running ÷ demand, in samples, deciding rank", "above 1 and still stalled: bursts",
           _NOT_DRAINED),
    Figure("reader_rows_per_second", "reader could deliver", "rows/s", "higher",
           "without workers rows ÷ W; with workers the rate at which they fill a queue that has "
           "room; else the loader alone",
           "workers share the machine with the model: with fewer steps to feed they may be faster",
           "the workers' queue was full all the time, and the loader has no other rate"),
    Figure("reader_ratio", "reader ÷ consumption", "×", "higher",
           "`reader_rows_per_second` ÷ `rows_per_second`", "",
           "the rate that the reader could reach, or that of the run, is not known"),
    Figure("tokens_per_second", "real tokens", "tokens/s", "higher",
           "attention mask ≠ 0 ÷ T, summed over ranks; ranks of a tensor or context parallel group "
           "count once",
           "too high where such groups are not known: see `data_parallel_size`; `None` if one "
           "rank, or one block of steps, did not count; so for the next two, samples and bytes",
           _NO_IDS),
    Figure("trainable_tokens_per_second", "trainable tokens", "tokens/s", "higher",
           "labels ≠ −100 ÷ T, summed over ranks", "", _NO_LABELS),
    Figure("trainer_tokens_per_second", "tokens/s that the trainer logged", "tokens/s", "",
           "median of what the trainer logged under its own names", "its own definition of a token",
           "the trainer logged no tokens/s of its own"),
    Figure("trainer_tokens_ratio", "trainer's tokens/s ÷ ours", "×", "",
           "`trainer_tokens_per_second` ÷ the rate of the same kind of token",
           "1 is agreement; a factor of the ranks or of accumulation is a mistake of one of the "
           "two", "the trainer logged no tokens/s of its own"),
    Figure("padded_tokens_per_second", "padded tokens", "tokens/s", "higher",
           "all positions ÷ T, summed over ranks", "", _NO_IDS),
    Figure("padding_share", "padding", "share", "lower", "1 − real ÷ padded", "",
           "real or padded tokens were not counted"),
    Figure("packing_efficiency", "packing efficiency", "share", "higher",
           "real ÷ padded, of packed samples", "", "samples are not packed"),
    Figure("mean_attended_length", "attended length", "tokens", "",
           "Σℓ² ÷ Σℓ of the sequences looked at", "a sample of the batches",
           "the lengths of the sequences were not seen"),
    Figure("goodput_tokens_per_second", "goodput", "tokens/s", "higher",
           "real tokens of all steps ÷ the whole wall clock, start-up, evaluation and checkpoints "
           "included", "", _NO_IDS),
    Figure("steps_per_second", "steps", "steps/s", "higher", "steps ÷ T", "", _NO_TIME),
    *_quantiles("step", "step", "no times of single steps were recorded"),
    Figure("global_batch_samples", "global batch", "samples", "",
           "samples ÷ steps, summed over ranks", "a pack of rows is one sample",
           "the batches have no first dimension to count samples along"),
    Figure("gradient_noise_scale", "gradient noise scale", "samples", "",
           "Σtr(Σ) ÷ Σ|G|² of the later half of the steps, by squared norms of the gradients of a "
           "step and of its first micro-batch; tokens weigh as in the loss",
           "a proxy of the critical batch size, doubted by arXiv 2505.23971; wrong where the first "
           "micro-batch is unlike the others, as with batches grouped by length", _NO_NOISE),
    *(
        Figure(f"gradient_noise_scale_{name}", f"gradient noise scale, {name}est", "samples", "",
               f"{name}er end of its 95 % interval", "of this stage of training", _NO_NOISE)
        for name in ("low", "high")
    ),
    Figure("model_flops_per_token", "FLOPs a token", "FLOP", "",
           "6·trained weights + 4·frozen weights + 12·L·H·Q·T: see [FLOPs, MFU and "
           "HFU](#flops-mfu-and-hfu)", "the convention's: a causal mask halves nothing"),
    Figure("model_flops_per_second", "FLOPs a second", "FLOP/s", "higher",
           "`model_flops_per_token` · `tokens_per_second`", "padding is no work"),
    Figure("mfu", "MFU", "share", "higher",
           "`model_flops_per_second` ÷ (devices · dense peak of one device)",
           "`None` where the peak is not known, and above 1, because one of its parts must be "
           "wrong"),
    Figure("hfu", "HFU", "share", "higher", "the same with recomputed activations counted",
           "the convention's recomputation: a whole forward pass"),
    Figure("peak_tflops", "peak of a device", "TFLOP/s", "",
           "of the data sheet, dense, by the device's exact name and the type of the arithmetic; "
           "or `--peak-tflops`", "clocks under load are lower"),
    Figure("matmul_share", "of the matmul rate", "share", "higher",
           "`model_flops_per_second` ÷ (devices · the rate that large square matmuls reach on this "
           "very device: `--matmul`)", "a rate of one second, before the training"),
    Figure("working_set_bytes", "working set, steady", "bytes", "lower",
           "median ΣPSS of anonymous and shared memory of the process tree in the steady phase",
           "sampled seldom: `None` where no sample fell into a short steady phase, or the ranks "
           "did not reach it; so are the resident sizes below. Without ranks (`watch PID`) of the "
           "whole time. Kernels before 5.3 do not divide ΣPSS: mapped files are then in it",
           _UNWATCHED),
    Figure("working_set_peak_bytes", "working set, highest", "bytes", "lower",
           "largest ΣPSS of anonymous and shared memory sampled",
           "peaks between samples; `None` where none was taken after the first step, as in runs of "
           "a second or two: what came before is not the training's", _UNWATCHED),
    Figure("mapped_file_bytes", "mapped files", "bytes", "",
           "median ΣPSS of mapped files in the steady phase", "gives way where memory is short",
           f"mapped files are in the working set: {_NOT_COUNTED}"),
    *(
        Figure(f"{name}_bytes", f"resident (ΣRSS), {label}", "bytes", "lower",
               "median of the sum over the tree", "shared pages count once for each process",
               _UNWATCHED)
        for name, label in (("rss", "all"), ("anon", "anonymous"), ("file", "files"),
                            ("shared", "shared"))
    ),
    Figure("hwm_bytes", "high-water mark", "bytes", "lower",
           "largest ΣVmHWM of the living processes, or of `hwm_by_phase` where that is higher",
           "the processes need not have peaked together: an upper bound", _UNWATCHED),
    Figure("spike_ratio", "spike", "×", "lower",
           "`hwm_bytes` ÷ `rss_bytes`; above 2 a transient spike", "",
           "the high-water mark or the steady resident size is not known"),
    Figure("limit_bytes", "limit", "bytes", "", "the least cgroup limit, else the machine's memory",
           "", "neither a limit nor the machine's memory is known"),
    Figure("limit_share", "limit, used", "share", "lower",
           "`working_set_peak_bytes` (ΣRSS of anonymous and shared memory where PSS cannot be "
           "read) ÷ the limit, or the most anonymous memory of one process, where that is more",
           "mapped files and page cache are not in it: they give way; nor are batches in "
           "`/dev/shm` that no process has mapped; `None` where the highest working set is",
           "the highest working set or the limit is not known"),
    *(
        Figure(f"psi_{name}_full", f"{label} pressure", "share", "lower",
               "growth of the PSI full counter ÷ time",
               "of the control group on cgroup v2, else of the machine, not of the run", _UNWATCHED)
        for name, label in (("memory", "memory"), ("io", "disk"))
    ),
    Figure("psi_cpu_some", "CPU pressure", "share", "lower",
           "growth of the PSI some counter ÷ time",
           "of the control group on cgroup v2, else of the machine", _NOT_COUNTED),
    Figure("cpu_cores", "processors used", "cores", "", "growth of Σ CPU time over the tree ÷ time",
           "", _UNWATCHED),
    Figure("other_cpu_share", "other programs", "share", "lower",
           "CPU time of all programs on the processors that the run may use, less the run's ÷ "
           "(time · these processors)", "the kernel's own work is in it", _NOT_COUNTED,
           _SHARE_NEAR_ZERO),
    Figure("cpu_wait_share", "waiting for a processor", "share", "lower",
           "growth of run_delay of the process that waited most ÷ time, by /proc/PID/schedstat",
           "of main threads alone", _NOT_COUNTED, _SHARE_NEAR_ZERO),
    Figure("cpu_steal_share", "stolen by the hypervisor", "share", "lower",
           "growth of steal in /proc/stat ÷ (steal + CPU time of all programs)", "", _NOT_COUNTED,
           _SHARE_NEAR_ZERO),
    Figure("cpu_throttled_share", "throttled by the quota", "share", "lower",
           "growth of throttled_usec of the cgroup ÷ (throttled_usec + CPU time of the run)",
           "of the whole cgroup", "the cgroup has no CPU quota, or does not count",
           _SHARE_NEAR_ZERO),
    Figure("oom_kills", "killed for memory", "processes", "lower",
           "growth of oom_kill in memory.events of the cgroup",
           "other programs of the cgroup count, too", "there is no memory cgroup here"),
    Figure("read_bytes_per_second", "read from the device", "bytes/s", "",
           "growth of Σ`read_bytes` over the tree ÷ time",
           "0 means cached, not idle; network file systems may not count", _UNWATCHED),
    Figure("read_chars_per_second", "asked for by reads", "bytes/s", "",
           "growth of Σ`rchar` over the tree ÷ time", "mapped files are not in it", _UNWATCHED),
    Figure("disk_bytes_per_second", "capacity of the device", "bytes/s", "",
           "what O_DIRECT reads of the data's own device reached at `disk_request_bytes`: log-log "
           "between random reads of 4 and 64 KiB and reads in order; in order where that is "
           "unknown", "a probe of two seconds, before or beside the run",
           "the device gives more in requests of this size than the probe can ask for"),
    Figure("disk_share", "reads, of the disk's capacity", "share", "",
           "`read_bytes_per_second` ÷ `disk_bytes_per_second`",
           "caches of the device can make it exceed 1",
           "the rate of reads or the capacity of the device is not known", _SHARE_NEAR_ZERO),
    Figure("disk_request_bytes", "read request, mean", "bytes", "",
           "bytes ÷ requests of the data's device, by /proc/diskstats", "of all programs",
           "the data's device is not known, or does not count requests"),
    *(
        Figure(f"swap_{name}_bytes_per_second", f"swap {name}", "bytes/s", "lower",
               f"growth of pswp{name} · page size ÷ time", "of the machine", _UNWATCHED,
               _RATE_NEAR_ZERO)
        for name in ("in", "out")
    ),
    Figure("is_swap_sustained", "swapping sustained", "yes/no", "lower",
           "swap-in of 1 MB/s or more in half of the intervals and three in a row",
           "needs three intervals; of the machine", "3 sampled intervals are needed"),
    Figure("process_swap_bytes", "swapped out of the run", "bytes", "lower",
           "largest ΣVmSwap of the tree", "", _UNWATCHED),
    Figure("gpu_utilization", "utilisation", "share", "",
           "mean over devices and samples of NVML's: share of time with a kernel running",
           "one small kernel counts like a full device", "no GPU was seen"),
    Figure("gpu_memory_bytes", "GPU memory", "bytes", "", "largest of one device",
           "what the allocator holds, used or not", "no GPU was seen"),
    Figure("gpu_free_bytes", "GPU memory, free", "bytes", "",
           "least of one device: its memory less what was used, or reserved by torch, at most", "",
           "no GPU was seen"),
    Figure("gpu_peak_allocated_bytes", "GPU memory, allocated by torch", "bytes", "",
           "largest `max_memory_allocated` of any rank: tensors, without what the allocator keeps",
           "read where the warm-up, a checkpoint and the run end; memory taken past torch is not "
           "in it", "torch used no GPU in the training process, or an earlier version recorded it"),
    Figure("gpu_power_watts", "power", "W", "", "mean of a device", "", "no GPU was seen"),
    Figure("gpu_clock_mhz", "clock", "MHz", "", "mean of a device", "", "no GPU was seen"),
    Figure("device_idle_fraction", "device idle", "share", "lower",
           "window less kernels ÷ window, deciding rank", "a few steps only", _NO_WINDOW),
    Figure("exposed_communication_fraction", "exposed communication", "share", "lower",
           "time with collectives and nothing else ÷ window, of the rank with most", "",
           _NO_WINDOW),
    Figure("pure_communication_fraction", "pure communication", "share", "lower",
           "Σ over collectives of the least duration across ranks ÷ window",
           "needs windows of the same collectives on all ranks", _NO_WINDOW),
    Figure("straggler_fraction", "lost to the slowest rank", "share", "lower",
           "(largest − median of the ranks' forward time) ÷ wall; of data: the part of the stall "
           "that only this rank causes",
           "a rank that is slow in its backward pass alone shows in a profiler window only",
           "there is one rank, or no forward pass was timed"),
    Figure("overhead_seconds_per_fetch", "cost of a fetch", "s", "lower",
           "time inside the meter's own calls ÷ fetches",
           "not the events' cost on the device, nor the sampler's thread; what passes while the "
           "device is busy with queued work delays nothing, and is left out"),
    Figure("overhead_fraction", "share of the time", "share", "lower",
           "`overhead_seconds_per_fetch` · fetches ÷ T", decimals=3),
    Figure("duration_seconds", "the whole run", "s", "lower", "last line of any file",
           "without `run --measure` it counts from `measure()`, not from the start of the process"),
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


def figures_table() -> str:
    """The catalogue as a Markdown table, as the documentation shows it."""
    lines = ["| figure | formula | unit | blind spot |", "| --- | --- | --- | --- |"]
    lines += [f"| `{f.name}` | {f.formula} | {f.unit} | {f.blind_spot} |" for f in _ALL]
    return "\n".join(lines) + "\n"
