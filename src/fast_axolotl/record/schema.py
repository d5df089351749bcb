"""The lines of a record, as dataclasses.

Times called ``t`` are seconds since the file's first line, by a clock that never steps; only
``Start.time`` is a date. ``None`` means that something was not measured; the reason stands in
``reasons`` of the start or settings line, under the field's name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from fast_axolotl.record.arithmetic import finite, total

SCHEMA = 1
"""Version of the record's format: readers accept this one and older."""

PhaseName = Literal["warmup", "steady", "replay"]
Reason = Literal["finished", "exception", "interrupted"]
"""How a file was closed."""

COUNTED = ("samples", "rows", "real_tokens", "trainable_tokens", "padded_tokens", "num_bytes")
"""What a block counts of every batch."""
SAMPLED = ("sequence_tokens", "sequence_squares")
"""What it looks at now and then only, so that it is never whole."""

CPU_COLLECTIVES = ("gloo:", "mpi:", "ucc:")
"""How profilers name the ranges on the CPU that carry out communication."""
_COLLECTIVE_KERNEL = re.compile(
    r"nccl|rccl|msccl|nvshmem|nvls|deep_ep|cross_device_reduce|quick_?reduce|multimem_|Memcpy PtoP"
    r"|userbuffers|symm_?mem|symmetric_memory"
    r"|(?<!warp)(?<!warp_)(?<!block)(?<!block_)all_?reduce|all_?gather|reduce_?scatter",
    re.IGNORECASE,
)


@lru_cache(maxsize=1 << 14)
def is_collective(name: str) -> bool:
    """Whether a kernel is communication: of NCCL, RCCL, MSCCL, NVSHMEM, symmetric memory, inference
    engines, Transformer Engine's user buffers, or a copy between devices. Inductor names its own
    kernels after what is around them, and ``all_to_all`` is in the names of permutations."""
    if name.startswith("triton_"):
        return "symm_mem" in name or "nvshmem" in name
    return _COLLECTIVE_KERNEL.search(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """First line of a rank's file."""

    schema: int = SCHEMA
    time: float
    """Seconds since 1970 at ``t = 0``."""
    rank: int = 0
    world_size: int = 1
    pid: int
    pid_namespace: str = ""
    """Where that number is valid; empty where the system does not say."""
    host: str
    version: str
    """Version of this package."""
    source: str = "loop"
    """What the meter is plugged into: loop, torch, transformers, lightning, axolotl."""
    command: tuple[str, ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)
    """Versions and machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is known of the run by now; later lines add to earlier ones."""

    t: float
    values: dict[str, Any] = field(default_factory=dict)
    """``num_workers``, ``prefetch_factor``, ``gradient_accumulation``, ``batch_size``,
    ``dispatcher``, ``persistent_workers``, ``pin_memory``, ``data_paths``, ``config``, …"""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a figure of this rank is ``None``: name of the figure → one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBlock:
    """One or more consecutive optimizer steps, as sums; written about once a second."""

    t: float
    """When the last step of the block ended."""
    phase: PhaseName
    first_step: int
    steps: int
    first_fetch: int
    fetches: int
    wall_seconds: float
    """Fetch start to next fetch start, summed, spans taken out."""
    host_wait_seconds: float
    device_wait_seconds: float | None = None
    samples: int = 0
    """Items along the first dimension of the batches."""
    rows: int | None = None
    """Source rows, where they differ from samples and are known (packing)."""
    real_tokens: int | None = None
    trainable_tokens: int | None = None
    padded_tokens: int | None = None
    """All positions of the batches, padding included."""
    num_bytes: int | None = None
    """Bytes of the batches' arrays."""
    sequence_tokens: int | None = None
    """Tokens of the sequences whose lengths were looked at: those of a sample of the batches."""
    sequence_squares: int | None = None
    """Their squared lengths, summed."""
    spans: dict[str, float] = field(default_factory=dict)
    """Seconds of evaluation, checkpoint, logging, by name."""
    queue_depth: float | None = None
    """Ready batches when a fetch began, mean over the block's fetches."""
    waits_by_cause: dict[str, float] = field(default_factory=dict)
    """Host wait of the fetches in which something happened, by what it was: epoch, or an iterator
    made for one batch."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by what looks at the Python stack saw meanwhile, spans included: see ``Stacks``."""
    step_waits: str = ""
    """The waits of all single steps, condensed to a byte each; see ``waits``."""
    host_waits: dict[str, int] = field(default_factory=dict)
    """Histogram of the fetches' host waits; see ``histogram``."""
    device_waits: dict[str, int] | None = None
    step_times: dict[str, int] = field(default_factory=dict)
    """Histogram of the steps' wall times."""
    walls: tuple[float, ...] | None = None
    """Wall seconds of every single step; left out once the record has grown large."""
    hosts: tuple[float, ...] | None = None
    """Host wait of every single step."""
    devices: tuple[float, ...] | None = None
    """Device wait of every single step."""

    @property
    def begin(self) -> float:
        """When its first step began, spans before it included."""
        return self.t - (total([self.wall_seconds, *self.spans.values()]) or 0.0)

    def wait_seconds(self, *, is_device: bool) -> float:
        """The wait of the device, or of the host; a foreign record's numbers may be none."""
        return finite(self.device_wait_seconds if is_device else self.host_wait_seconds) or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLine:
    """A line of code that time was spent in."""

    phase: str
    """waiting, data, preparing, forward, backward, optimizer, communication, checkpoint,
    evaluation, other; ``backward/idle`` while the thread slept in it, ``waiting/sampler`` and
    ``waiting/start`` (of workers). After ``between/`` and the name of a span what was seen there;
    loading and idle in a process of the loader."""
    file: str
    line: int
    function: str
    call: str = ""
    """The function of a library that it was calling."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """The lines that most time was spent in since the line before, by looks at Python stacks."""

    t: float
    who: Literal["training", "workers"]
    seconds: float = 0.0
    """Of workers: in which they loaded."""
    lines: tuple[StackLine, ...] = ()
    """The largest of each phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at a moment: ``first_fetch``, ``first_batch``, ``first_step``,
    ``epoch``, ``resume``, ``evaluate``, ``error``, ``note``."""

    t: float
    name: str
    fetch: int | None = None
    """Batches until then; of those that were read over before the first step."""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What the trainer logged of its own: loss, gradient norm, learning rate."""

    t: float
    step: int
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The end of a phase of the rank's own process: start, warmup, steady, evaluate, checkpoint."""

    t: float
    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What FLOPs per token are computed from."""

    name: str = ""
    num_parameters: int
    """All weights that multiply an activation, adapters included; without an untied input
    embedding. Of a mixture of experts, those one token passes through."""
    num_frozen: int = 0
    """Those of them that have no gradient."""
    num_adapter: int = 0
    """Those of them that are LoRA adapters."""
    layers: int
    attention_width: int
    """Heads times head size: H·Q."""
    attention_window: int | None = None
    """Most positions that a token attends to in the layers that have a window."""
    window_layers: int = 0
    """How many of the layers have it."""
    window_width: int | None = None
    """Heads times head size in these layers, where it is another."""
    sequence_len: int | None = None
    """Length that attention reaches over when sequence lengths were not seen."""
    is_checkpointed: bool = False
    """Activations are computed twice."""
    is_packed: bool = False
    dtype: str = "bfloat16"
    device_name: str | None = None
    num_devices: int = 1
    peak_tflops: float | None = None
    """Given by the user; else looked up by ``device_name``."""
    config: dict[str, Any] = field(default_factory=dict)
    """What transformers built it from, whole; empty for other models."""
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileWindow:
    """What a short window of torch's profiler saw on one rank."""

    t: float
    first_step: int | None = None
    """Steps before it: windows of ranks that begin at the same one hold the same collectives."""
    steps: int
    wall_seconds: float
    device_idle_seconds: float | None = None
    exposed_communication_seconds: float | None = None
    """Time with a collective under way in which nothing else ran."""
    collectives: tuple[float, ...] = ()
    """Seconds of each collective in the order they were started; ranks are compared one by one."""
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Last line of a file that was closed."""

    t: float
    reason: Reason
    error: str = ""
    overhead_seconds: float = 0.0
    """Host time the meter itself took inside the loop."""
    overhead_fetches: int = 0
    """Fetches over which it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemStart:
    """First line of a watcher's file."""

    schema: int = SCHEMA
    time: float
    host: str
    root_pid: int
    pid_namespace: str = ""
    command: tuple[str, ...] = ()
    memory_bytes: int | None = None
    """Memory of the machine."""
    limit_bytes: int | None = None
    """The least limit of the cgroups above the processes; ``None``: there is none, or unknown."""
    data_path: str | None = None
    disk_bytes_per_second: float | None = None
    """What O_DIRECT reads of the data's own device reached: of a MiB, in order."""
    gpu_names: tuple[str, ...] = ()
    processors: int | None = None
    """Processors that their affinity allows: whose time ``machine_cpu_seconds`` is."""
    source: str = ""
    """Who watches: run (``fast-axolotl run --measure``), watch, meter; empty: not told."""
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One GPU at one moment, by NVML."""

    index: int
    utilization: float | None = None
    """Share of the last sampling period in which a kernel ran, 0 to 1."""
    memory_bytes: int | None = None
    power_watts: float | None = None
    clock_mhz: float | None = None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSample:
    """The process tree and the machine at one moment. Counters only ever grow, children that have
    ended included."""

    t: float
    processes: int
    pss_bytes: int | None = None
    """Sampled less often than the rest; ``None`` in between."""
    pss_anon_bytes: int | None = None
    pss_shared_bytes: int | None = None
    rss_bytes: int | None = None
    anon_bytes: int | None = None
    largest_anon_bytes: int | None = None
    """Of the process that holds most."""
    training_anon_bytes: int | None = None
    """Of the processes that record a training."""
    shared_bytes: int | None = None
    hwm_bytes: int | None = None
    """Highest resident sizes of the living processes, summed."""
    swap_bytes: int | None = None
    read_bytes: int | None = None
    """Counter: read from a device."""
    read_chars: int | None = None
    """Counter: asked for by read calls, cached or not."""
    cpu_seconds: float | None = None
    cpu_wait_seconds: float | None = None
    """Counter: time in which the main thread of the process that waited most was ready to run and
    had no processor."""
    swap_in_bytes: int | None = None
    """Counter of the machine."""
    swap_out_bytes: int | None = None
    psi_memory_full_seconds: float | None = None
    """Counter: time in which every task waited for memory."""
    psi_io_full_seconds: float | None = None
    machine_cpu_seconds: float | None = None
    """Counter: time that all programs took of the processors that the run may use."""
    steal_seconds: float | None = None
    """Counter: processor time that the hypervisor gave to others."""
    throttled_seconds: float | None = None
    """Counter: time in which the cgroup's quota was used up."""
    oom_kills: int | None = None
    """Counter: processes of the cgroup that the kernel killed for memory."""
    machine_oom_kills: int | None = None
    """Counter: the same of the whole machine."""
    device_reads: int | None = None
    """Counter: read requests that the data's device has served, of all programs."""
    device_read_bytes: int | None = None
    gpus: tuple[DeviceSample, ...] = ()

    @property
    def working_set_bytes(self) -> int | None:
        """ΣPSS of what cannot give way: anonymous and shared memory. Mapped files are in it where
        the kernel does not divide the sum."""
        if self.pss_anon_bytes is None or self.pss_shared_bytes is None:
            return self.pss_bytes
        return self.pss_anon_bytes + self.pss_shared_bytes
