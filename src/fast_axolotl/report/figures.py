"""Which figures of a run are shown, in which order, under which names and units.

A group is a list of rows; a row shows one field of the summary, or several that belong together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fast_axolotl.record import RunSummary
from fast_axolotl.report.downsampling import finite
from fast_axolotl.report.terminal import format_bytes, format_seconds, format_share

__all__ = ["DATA_STALL", "FREE_STALL", "GROUPS", "Group", "Row", "format_row", "read_figure"]

FREE_STALL, DATA_STALL = 0.05, 0.10
"""As in the verdict: below the first a run is free of data, from the second on bound by it."""

Format = Callable[[Any], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of a group."""

    label: str
    fields: tuple[str, ...]
    formats: tuple[Format, ...]
    """How each of them is written."""
    parts: tuple[str, ...] = ()
    """Names of the values, where there are several."""
    is_part_behind: bool = False
    """Whether those names stand behind the values."""
    note: str = ""
    """What the figure is, in a few words."""
    source: str = ""
    """Field that tells where the value comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows under a title."""

    title: str
    rows: tuple[Row, ...]


def read_figure(summary: RunSummary, name: str) -> Any:
    """A field of a summary; ``None`` for a number that is none."""
    value = getattr(summary, name)
    return finite(value) if isinstance(value, float) else value


def format_row(summary: RunSummary, row: Row) -> str:
    """The values of a row under their names, and where they come from; a dash for none at all."""
    values = [read_figure(summary, name) for name in row.fields]
    if all(value is None for value in values):
        return "–"
    forms = zip(row.formats, values, strict=True)
    shown = ["–" if value is None else form(value) for form, value in forms]
    named = zip(row.parts or ("",) * len(shown), shown, strict=True)
    both = ((value, part) if row.is_part_behind else (part, value) for part, value in named)
    text = " · ".join(" ".join(filter(None, words)) for words in both)
    source = getattr(summary, row.source) if row.source else ""
    return f"{text}  ({source})" if source else text


def _plain(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _unit(unit: str) -> Format:
    return lambda value: f"{_plain(value)} {unit}"


def _duration(value: float) -> str:
    return format_seconds(value) if value >= 0.001 else f"{1e6 * value:,.0f} µs"


def _bytes_rate(value: float) -> str:
    return f"{format_bytes(value)}/s"


def _flops(value: float) -> str:
    for size, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{_plain(value / size)} {name}FLOP"
    return f"{_plain(value)} FLOP"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _row(label: str, field: str, form: Format, note: str = "") -> Row:
    return Row(label=label, fields=(field,), formats=(form,), note=note)


_SPREAD = ("p50", "p95", "p99", "max")

GROUPS = (
    Group(
        title="Waiting for data",
        rows=(
            _row("stall", "stall_fraction", format_share, "of the steady time"),
            Row(
                label="by device / by host",
                fields=("device_stall_fraction", "host_stall_fraction"),
                formats=(format_share, format_share),
                parts=("device", "host"),
            ),
            Row(
                label="wait of a fetch",
                fields=tuple(f"wait_{name}_seconds" for name in _SPREAD),
                formats=4 * (_duration,),
                parts=_SPREAD,
            ),
            _row("worst 1 % of fetches", "worst_percent_share", format_share, "of all waiting"),
            Row(
                label="period of long waits",
                fields=("stall_period_fetches", "stall_period_rows"),
                formats=(_plain, _plain),
                parts=("fetches", "samples"),
                is_part_behind=True,
            ),
            _row("with a cached batch", "cached_stall_fraction", format_share, "shorter a step"),
            Row(
                label="ready queue",
                fields=("queue_depth", "queue_capacity", "queue_drift_per_step"),
                formats=3 * (_plain,),
                parts=("depth", "capacity", "drift a step"),
            ),
            Row(
                label="first batch / step after",
                fields=("first_batch_seconds", "first_step_seconds"),
                formats=(format_seconds, format_seconds),
                parts=("batch", "step"),
            ),
        ),
    ),
    Group(
        title="Reading",
        rows=(
            _row("rows", "rows_per_second", _unit("rows/s")),
            _row("samples", "samples_per_second", _unit("samples/s")),
            _row("bytes of the batches", "bytes_per_second", _bytes_rate),
            _row("loader alone", "free_rows_per_second", _unit("rows/s"), "with no model"),
            _row("the model would take", "demand_rows_per_second", _unit("rows/s")),
            _row("headroom", "headroom", _unit("×"), "loader alone ÷ what the model would take"),
        ),
    ),
    Group(
        title="Tokens and steps",
        rows=(
            _row("real tokens", "tokens_per_second", _unit("tokens/s"), "padding left out"),
            _row(
                "trainable tokens",
                "trainable_tokens_per_second",
                _unit("tokens/s"),
                "label is not −100",
            ),
            _row("padded tokens", "padded_tokens_per_second", _unit("tokens/s"), "all positions"),
            _row("padding", "padding_share", format_share, "of all positions"),
            _row("packing efficiency", "packing_efficiency", format_share),
            _row("attended length", "mean_attended_length", _unit("tokens"), "Σℓ² ÷ Σℓ"),
            _row("steps", "steps_per_second", _unit("steps/s")),
            Row(
                label="time of a step",
                fields=tuple(f"step_{name}_seconds" for name in _SPREAD),
                formats=4 * (format_seconds,),
                parts=_SPREAD,
            ),
        ),
    ),
    Group(
        title="Compute",
        rows=(
            _row("FLOPs a token", "model_flops_per_token", _flops),
            _row("FLOPs a second", "model_flops_per_second", _flops),
            _row("MFU", "mfu", format_share, "of the peak"),
            _row("HFU", "hfu", format_share, "recomputed activations counted"),
            _row("of the matmul rate", "matmul_share", format_share, "measured on this device"),
            Row(
                label="peak of a device",
                fields=("peak_tflops",),
                formats=(_unit("TFLOP/s"),),
                source="peak_source",
            ),
        ),
    ),
    Group(
        title="Memory of the process tree",
        rows=(
            Row(
                label="working set (ΣPSS)",
                fields=("working_set_bytes", "working_set_peak_bytes"),
                formats=(format_bytes, format_bytes),
                parts=("steady", "highest"),
            ),
            Row(
                label="resident (ΣRSS)",
                fields=("rss_bytes", "anon_bytes", "file_bytes", "shared_bytes"),
                formats=4 * (format_bytes,),
                parts=("all", "anonymous", "files", "shared"),
            ),
            _row("high-water mark", "hwm_bytes", format_bytes, "ΣVmHWM"),
            _row("spike", "spike_ratio", _unit("×"), "high-water mark ÷ resident; above 2 a spike"),
            Row(
                label="limit",
                fields=("limit_bytes", "limit_share"),
                formats=(format_bytes, format_share),
                parts=("", "used"),
            ),
            _row("memory pressure", "psi_memory_full", format_share, "PSI full: every task waited"),
        ),
    ),
    Group(
        title="Disk and swap",
        rows=(
            _row("read from the device", "read_bytes_per_second", _bytes_rate),
            _row("asked for by reads", "read_chars_per_second", _bytes_rate, "cached or not"),
            Row(
                label="capacity of the device",
                fields=("disk_bytes_per_second", "disk_share"),
                formats=(_bytes_rate, format_share),
                parts=("", "used"),
            ),
            _row("disk pressure", "psi_io_full", format_share, "PSI full: every task waited"),
            Row(
                label="swap",
                fields=("swap_in_bytes_per_second", "swap_out_bytes_per_second"),
                formats=(_bytes_rate, _bytes_rate),
                parts=("in", "out"),
            ),
            _row("swapping sustained", "is_swap_sustained", _yes),
        ),
    ),
    Group(
        title="GPU (NVML)",
        rows=(
            _row("utilisation", "gpu_utilization", format_share, "a kernel ran; not how well"),
            _row("memory", "gpu_memory_bytes", format_bytes, "highest of one device"),
            _row("power", "gpu_power_watts", _unit("W"), "mean of a device"),
            _row("clock", "gpu_clock_mhz", _unit("MHz"), "mean of a device"),
        ),
    ),
    Group(
        title="Profiler window and ranks",
        rows=(
            _row("device idle", "device_idle_fraction", format_share),
            _row("exposed communication", "exposed_communication_fraction", format_share),
            _row(
                "pure communication",
                "pure_communication_fraction",
                format_share,
                "least of all ranks",
            ),
            _row("skew of ranks", "rank_skew", format_share, "own time: slowest over median"),
        ),
    ),
    Group(
        title="The meter itself",
        rows=(
            _row("cost of a fetch", "overhead_seconds_per_fetch", lambda v: f"{1e6 * v:,.1f} µs"),
            _row("share of the time", "overhead_fraction", lambda v: f"{100 * v:.3f} %"),
        ),
    ),
)
