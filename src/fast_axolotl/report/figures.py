"""Which figures of a run are shown together, and in which order.

What a figure is called and how it is written comes from the catalogue. A row shows one figure, or
several that belong together under a label of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fast_axolotl.record import RunSummary
from fast_axolotl.record.arithmetic import finite
from fast_axolotl.record.catalogue import FIGURES
from fast_axolotl.record.summary import RankSummary
from fast_axolotl.record.units import format_count, format_seconds, format_share

__all__ = [
    "GROUPS",
    "RANK_COLUMNS",
    "Group",
    "Row",
    "format_row",
    "missing_reason",
    "rank_row",
    "read_figure",
]

RANK_COLUMNS = ("rank", "stall", "host wait", "steps", "step p50", "samples/s", "tokens/s", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of a group."""

    label: str
    fields: tuple[str, ...]
    parts: tuple[str, ...]
    """Names before the values, where there are several."""
    note: str
    """What the figure is, in a few words."""
    source: str
    """Field that tells where the value comes from."""
    is_bare: bool
    """Whether the label says the unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows under a title."""

    title: str
    rows: tuple[Row, ...]


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


def rank_row(rank: RankSummary) -> tuple[str, ...]:
    """A rank as a row of ``RANK_COLUMNS``."""
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


def _row(
    *fields: str,
    label: str = "",
    parts: tuple[str, ...] = (),
    note: str = "",
    source: str = "",
    is_bare: bool = False,
) -> Row:
    return Row(
        label=label or FIGURES[fields[0]].label,
        fields=fields,
        parts=parts,
        note=note,
        source=source,
        is_bare=is_bare,
    )


_SPREAD = ("p50", "p95", "p99", "max")

GROUPS = (
    Group(
        title="Waiting for data",
        rows=(
            _row("stall_fraction", note="of the steady time"),
            _row(
                "device_stall_fraction",
                "host_stall_fraction",
                label="by device / by host",
                parts=("device", "host"),
            ),
            _row(
                *(f"wait_{name}_seconds" for name in _SPREAD),
                label="wait of a fetch",
                parts=_SPREAD,
            ),
            _row("worst_percent_share", note="of all waiting"),
            _row("stall_period_fetches", "stall_period_rows"),
            _row("cached_stall_fraction", note="shorter a step"),
            _row(
                "queue_depth",
                "queue_capacity",
                "queue_drift_per_step",
                label="ready queue",
                parts=("depth", "capacity", "drift a step"),
                is_bare=True,
            ),
            _row(
                "first_batch_seconds",
                "first_step_seconds",
                label="first batch / step after",
                parts=("batch", "step"),
            ),
        ),
    ),
    Group(
        title="Reading",
        rows=(
            _row("rows_per_second", label="rows"),
            _row("samples_per_second"),
            _row("bytes_per_second"),
            _row("free_rows_per_second", note="with no model"),
            _row("demand_rows_per_second"),
            _row("headroom", note="loader alone ÷ what the model would take"),
        ),
    ),
    Group(
        title="Tokens and steps",
        rows=(
            _row("tokens_per_second", note="padding left out"),
            _row("trainable_tokens_per_second", note="label is not −100"),
            _row("padded_tokens_per_second", note="all positions"),
            _row("padding_share", note="of all positions"),
            _row("packing_efficiency"),
            _row("mean_attended_length", note="Σℓ² ÷ Σℓ"),
            _row("steps_per_second"),
            _row(
                *(f"step_{name}_seconds" for name in _SPREAD), label="time of a step", parts=_SPREAD
            ),
        ),
    ),
    Group(
        title="Compute",
        rows=(
            _row("model_flops_per_token"),
            _row("model_flops_per_second"),
            _row("mfu", note="of the peak"),
            _row("hfu", note="recomputed activations counted"),
            _row("matmul_share", note="measured on this device"),
            _row("peak_tflops", source="peak_source"),
        ),
    ),
    Group(
        title="Memory of the process tree",
        rows=(
            _row(
                "working_set_bytes",
                "working_set_peak_bytes",
                label="working set (ΣPSS)",
                parts=("steady", "highest"),
            ),
            _row(
                *("rss_bytes", "anon_bytes", "file_bytes", "shared_bytes"),
                label="resident (ΣRSS)",
                parts=("all", "anonymous", "files", "shared"),
            ),
            _row("hwm_bytes", note="ΣVmHWM"),
            _row("spike_ratio", note="high-water mark ÷ resident; above 2 a spike"),
            _row("limit_bytes", "limit_share", parts=("", "used")),
            _row("psi_memory_full", note="PSI full: every task waited"),
        ),
    ),
    Group(
        title="Disk and swap",
        rows=(
            _row("read_bytes_per_second"),
            _row("read_chars_per_second", note="cached or not"),
            _row("disk_bytes_per_second", "disk_share", parts=("", "used")),
            _row("psi_io_full", note="PSI full: every task waited"),
            _row(
                "swap_in_bytes_per_second",
                "swap_out_bytes_per_second",
                label="swap",
                parts=("in", "out"),
            ),
            _row("is_swap_sustained"),
        ),
    ),
    Group(
        title="GPU (NVML)",
        rows=(
            _row("gpu_utilization", note="a kernel ran; not how well"),
            _row("gpu_memory_bytes", label="memory", note="highest of one device"),
            _row("gpu_power_watts", note="mean of a device"),
            _row("gpu_clock_mhz", note="mean of a device"),
        ),
    ),
    Group(
        title="Profiler window and ranks",
        rows=(
            _row("device_idle_fraction"),
            _row("exposed_communication_fraction"),
            _row("pure_communication_fraction", note="least of all ranks"),
            _row("rank_skew", note="own time: slowest over median"),
        ),
    ),
    Group(
        title="The meter itself",
        rows=(_row("overhead_seconds_per_fetch"), _row("overhead_fraction")),
    ),
)
