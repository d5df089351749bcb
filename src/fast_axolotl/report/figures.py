"""Which figures of a run are shown together, and in which order.

What a figure is called and how it is written comes from the catalogue. A row shows one figure, or
several that belong together under a label of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fast_axolotl.record import NodeSummary, RunSummary
from fast_axolotl.record.arithmetic import finite
from fast_axolotl.record.catalogue import FIGURES
from fast_axolotl.record.figures import RankSummary
from fast_axolotl.record.units import format_count, format_seconds, format_share

_RANK_COLUMNS = ("rank", "stall", "CPU-side wait", "steps", "step p50", "samples/s", "tokens/s", "")
_NODE_FIGURES = {
    "working set": "working_set_bytes",
    "of limit": "limit_share",
    "CPU": "cpu_cores",
    "swap in": "swap_in_bytes_per_second",
    "memory pressure": "psi_memory_full",
    "disk pressure": "psi_io_full",
    "GPU busy": "gpu_utilization",
    "GPU clock": "gpu_clock_mhz",
}

MemberTable = tuple[str, Sequence[str], list[tuple[str, ...]]]
"""A title, the names of the columns, and the rows."""


class Row:
    """A line of a group."""

    def __init__(
        self,
        *fields: str,
        label: str = "",
        parts: tuple[str, ...] = (),
        note: str = "",
        source: str = "",
        is_bare: bool = False,
    ) -> None:
        self.fields = fields
        self.label = label or FIGURES[fields[0]].label
        self.parts = parts
        """Names before the values, where there are several."""
        self.note = note
        """What the figure is, in a few words."""
        self.source = source
        """Field that tells where the value comes from."""
        self.is_bare = is_bare
        """Whether the label says the unit."""


def read_figure(summary: RunSummary, name: str) -> Any:
    """A field of a summary; ``None`` for a number that is none."""
    value = getattr(summary, name)
    return finite(value) if isinstance(value, float) else value


def missing_reason(summary: RunSummary, name: str) -> str:
    """Why a figure has no value."""
    return summary.reasons.get(name) or FIGURES[name].missing


def format_row(summary: RunSummary, row: Row) -> str:
    """The values of a row under their names, and where they come from; a dash for none at all."""
    values = [read_figure(summary, name) for name in row.fields]
    if all(value is None for value in values):
        return "–"
    shown = [
        format_count(value) if row.is_bare else FIGURES[name].format(value)
        for name, value in zip(row.fields, values, strict=True)
    ]
    if row.parts:
        shown = [f"{part} {text}".strip() for part, text in zip(row.parts, shown, strict=True)]
    source = getattr(summary, row.source) if row.source else ""
    return " · ".join(shown) + (f"  ({source})" if source else "")


def describe_value(value: Any) -> str:
    """A setting, whatever it is, in one line."""
    if isinstance(value, Mapping):
        return " · ".join(f"{name} {describe_value(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(describe_value, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def member_tables(summary: RunSummary) -> list[MemberTable]:
    """The nodes of a run, and its ranks, where there are several."""
    tables: list[MemberTable] = [
        ("Nodes", ("node", "ranks", *_NODE_FIGURES), [*map(_node_row, summary.nodes)]),
        ("Ranks", _RANK_COLUMNS, [*map(_rank_row, summary.ranks)]),
    ]
    return [table for table in tables if len(table[2]) > 1]


def _node_row(node: NodeSummary) -> tuple[str, ...]:
    ranks = ", ".join(map(str, node.ranks)) or "–"
    if len(node.ranks) > 2 and node.ranks[-1] - node.ranks[0] == len(node.ranks) - 1:
        ranks = f"{node.ranks[0]}–{node.ranks[-1]}"
    figures = [FIGURES[name].format(getattr(node, name)) for name in _NODE_FIGURES.values()]
    return node.node, ranks, *figures


def _rank_row(rank: RankSummary) -> tuple[str, ...]:
    return (
        str(rank.rank),
        format_share(rank.stall_fraction),
        format_share(rank.host_stall_fraction),
        f"{rank.steps:,}",
        format_seconds(rank.step_p50_seconds),
        format_count(rank.samples_per_second),
        format_count(rank.tokens_per_second),
        "" if rank.is_finished else "unfinished",
    )


_SPREAD = ("p50", "p95", "p99", "max")
_BOUNDS = {"": "", "_low": "a proxy; at least", "_high": "at most"}

GROUPS: dict[str, tuple[Row, ...]] = {
    "Waiting for data": (
        Row("stall_fraction", "stall_error", note="of the time after warm-up", parts=("", "±")),
        Row(
            "device_stall_fraction",
            "host_stall_fraction",
            label="GPU idle / CPU-side",
            parts=("GPU idle", "CPU-side wait"),
        ),
        Row(*(f"wait_{name}_seconds" for name in _SPREAD), label="wait per fetch", parts=_SPREAD),
        Row("worst_percent_share", note="of all waiting"),
        Row("stall_period_fetches", "stall_period_rows"),
        Row("cached_stall_fraction", note="time saved per step if data were free"),
        Row(
            "queue_depth",
            "queue_capacity",
            "queue_drift_per_step",
            label="ready queue",
            parts=("depth", "capacity", "change per step"),
            is_bare=True,
        ),
        Row(
            "first_batch_seconds",
            "first_step_seconds",
            label="first batch / first step",
            parts=("batch", "step"),
        ),
    ),
    "Reading": (
        Row("rows_per_second", label="rows"),
        Row("samples_per_second"),
        Row("bytes_per_second"),
        Row("free_rows_per_second", note="without the model"),
        Row("demand_rows_per_second"),
        Row("headroom", note="loader alone ÷ what the model could consume"),
        Row("reader_rows_per_second", "reader_ratio", parts=("", "of the consumption")),
    ),
    "Tokens and steps": (
        Row("tokens_per_second", note="without padding"),
        Row("trainable_tokens_per_second", note="tokens with a label"),
        Row("padded_tokens_per_second", note="all positions"),
        Row("trainer_tokens_per_second", "trainer_tokens_ratio", parts=("", "of our count")),
        Row("goodput_tokens_per_second", note="over the whole wall clock"),
        Row("padding_share", note="of all positions"),
        Row("packing_efficiency"),
        Row("mean_attended_length", note="mean over tokens"),
        Row("steps_per_second"),
        Row(*(f"step_{name}_seconds" for name in _SPREAD), label="time per step", parts=_SPREAD),
        Row("global_batch_samples", note="per optimizer step"),
        Row(*(f"gradient_noise_scale{end}" for end in _BOUNDS), parts=tuple(_BOUNDS.values())),
    ),
    "Compute": (
        Row("model_flops_per_token"),
        Row("model_flops_per_second"),
        Row("mfu", note="of the GPU's peak"),
        Row("hfu", note="MFU plus recomputed activations"),
        Row("matmul_share", note="measured on this GPU"),
        Row("peak_tflops", source="peak_source"),
    ),
    "Memory of all processes": (
        Row(
            "working_set_bytes",
            "working_set_peak_bytes",
            label="working set",
            parts=("steady", "peak"),
            note="shared pages counted once",
        ),
        Row(
            *("rss_bytes", "anon_bytes", "file_bytes", "shared_bytes"),
            label="resident (sum of RSS)",
            parts=("all", "anonymous", "files", "shared"),
        ),
        Row("mapped_file_bytes", note="can be reclaimed"),
        Row("hwm_bytes", note="sum of each process's own peak"),
        Row("spike_ratio", note="peak resident ÷ resident; above 2 is a spike"),
        Row("limit_bytes", "limit_share", parts=("", "used")),
        Row("psi_memory_full", note="share of time in which every task waited"),
        Row("oom_kills"),
    ),
    "CPU": (
        Row("cpu_cores", note="mean over all processes"),
        Row("other_cpu_share", note="of the machine's cores"),
        Row("cpu_wait_share", note="of the process that waited most"),
        Row("psi_cpu_some", note="share of time in which a task waited for a core"),
        Row(
            "cpu_steal_share",
            "cpu_throttled_share",
            label="stolen / throttled",
            parts=("stolen", "throttled"),
        ),
    ),
    "Disk and swap": (
        Row("read_bytes_per_second"),
        Row("read_chars_per_second", note="page cache included"),
        Row("disk_bytes_per_second", "disk_share", parts=("", "used")),
        Row("disk_request_bytes", note="on the disk of the data"),
        Row("psi_io_full", note="share of time in which every task waited"),
        Row(
            "swap_in_bytes_per_second",
            "swap_out_bytes_per_second",
            label="swap",
            parts=("in", "out"),
        ),
        Row("is_swap_sustained"),
        Row("process_swap_bytes", note="peak"),
    ),
    "GPU": (
        Row("gpu_utilization", note="share of time with a kernel running, not how efficient"),
        Row(
            "gpu_memory_bytes",
            "gpu_free_bytes",
            label="memory",
            parts=("", "free"),
            note="peak used and least free of one GPU",
        ),
        Row("gpu_peak_allocated_bytes", label="allocated by torch", note="peak of any rank"),
        Row("gpu_power_watts", note="mean per GPU"),
        Row("gpu_clock_mhz", note="mean per GPU"),
    ),
    "Profiler window and ranks": (
        Row("device_idle_fraction"),
        Row("exposed_communication_fraction"),
        Row("pure_communication_fraction", note="lowest of all ranks"),
        Row("straggler_fraction"),
    ),
    "Cost of measuring": (Row("overhead_seconds_per_fetch"), Row("overhead_fraction")),
}
