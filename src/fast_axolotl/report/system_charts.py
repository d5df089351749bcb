"""Charts of the process tree and the machine: working set, disk, swap, GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from fast_axolotl.report.charts import (
    Chart,
    Curves,
    Figure,
    Legend,
    Panel,
    Scale,
    area,
    axis,
    choose_scale,
    known,
    largest,
    level,
    line,
    phase_shapes,
    time_axes,
    time_scale,
)
from fast_axolotl.report.terminal import format_bytes, format_share
from fast_axolotl.report.values import format_length

__all__ = ["disk_chart", "gpu_chart", "memory_chart"]

_NEAR = 3.0
"""A limit is drawn to scale where it is at most this many times the highest curve."""

_LEAST_SAMPLED = 0.7
"""Share of the run up to which a working set has to be sampled to be called that of the run."""

_MEMORY = (
    ("hwm_bytes", "hwm", "high-water mark"),
    ("pss_bytes", "pss", "working set"),
    ("anon_bytes", "anon", "anonymous"),
)
_UNWATCHED = "Nobody sampled the process tree: fast-axolotl run --measure -- COMMAND does."


def memory_chart(runs: Sequence[Curves]) -> Chart | None:
    """Working set, anonymous memory, high-water mark and the limit."""
    shown = [run for run in runs if run.has("memory")]
    if not shown:
        return None
    times = time_scale(shown, "memory")
    axes = time_axes(runs, "memory", times)
    highest = largest(run.series["memory"].get(name, []) for run in shown for name, _, _ in _MEMORY)
    limits = [run.summary.limit_bytes for run in shown if run.summary.limit_bytes]
    near = [limit for limit in limits if limit <= _NEAR * highest]
    top = 1.1 * max([highest, *near]) or 1.0
    scale = choose_scale("bytes", top)
    panels = [
        _memory_panel(run, time, times, scale, top) for run, time in zip(runs, axes, strict=True)
    ]
    legend = [
        Legend(role="pss", label="working set (ΣPSS)", shape="area"),
        Legend(role="anon", label="anonymous"),
        Legend(role="hwm", label="high-water mark (ΣVmHWM)"),
    ]
    if near:
        legend.append(Legend(role="limit", label="limit", shape="dashed"))
    return Chart(
        name="memory",
        title="Working set",
        text="Memory of the whole process tree. Shared pages count once in the working set; a "
        "high-water mark far above it is a spike.",
        legend=tuple(legend),
        panels=tuple(panels),
    )


def _memory_panel(run: Curves, time: Figure, times: Scale, scale: Scale, top: float) -> Panel:
    if not run.has("memory"):
        return Panel(name=run.name, text=_UNWATCHED, figure=None)
    x = run.ref("memory", "t", times.by)
    unit = f" {scale.unit}"
    traces = []
    for name, role, label in _MEMORY:
        if name not in run.series["memory"]:
            continue
        # The working set is sampled more seldom than the rest.
        y, more = run.ref("memory", name, scale.by), {"unit": unit, "connectgaps": True}
        if len(known(run.series["memory"][name])) == 1:
            more |= {"mode": "lines+markers"}
        draw = area if name == "pss_bytes" else line
        traces.append(draw(x, y, role, label, **more))
    layout: Figure = {
        "xaxis": time,
        "yaxis": axis("memory", scale.unit, range=[0, top * scale.by]),
        "shapes": phase_shapes(run, times),
        "annotations": [],
    }
    limit = run.summary.limit_bytes
    if limit and limit <= top:
        shape, words = level(limit * scale.by, "limit", text="limit")
        layout["shapes"].append(shape)
        layout["annotations"].append(words)
    figure = {"traces": traces, "layout": layout, "height": 260}
    return Panel(name=run.name, text=_memory_text(run), figure=figure)


def _memory_text(run: Curves) -> str:
    one = run.summary
    parts = []
    if one.working_set_bytes is not None:
        parts.append(
            f"Working set {format_bytes(one.working_set_bytes)}, at most "
            f"{format_bytes(one.working_set_peak_bytes)}."
        )
    if parts and one.limit_bytes is not None and one.limit_share is not None:
        share = format_share(one.limit_share)
        parts.append(f"That is {share} of the limit, {format_bytes(one.limit_bytes)}.")
    if one.hwm_bytes is not None:
        ratio = "" if one.spike_ratio is None else f", {one.spike_ratio:.2f} × the resident size"
        parts.append(f"High-water mark {format_bytes(one.hwm_bytes)}{ratio}.")
    return " ".join([*parts, *_sampled_until(run)]) or "No size was sampled."


def _sampled_until(run: Curves) -> list[str]:
    """Reading the working set costs time, so that it may be sampled seldom."""
    memory = run.series["memory"]
    rows = zip(memory["t"], memory.get("pss_bytes", []), strict=False)
    times = [t for t, value in rows if value is not None]
    if not times or times[-1] >= _LEAST_SAMPLED * memory["t"][-1]:
        return []
    last, end = format_length(times[-1]), format_length(memory["t"][-1])
    return [f"The working set was last sampled at {last} of {end}."]


def disk_chart(runs: Sequence[Curves]) -> Chart | None:
    """Reads against the capacity of the device, and swap where there was any."""
    shown = [run for run in runs if run.has("disk")]
    if not shown:
        return None
    times = time_scale(shown, "disk")
    axes = time_axes(runs, "disk", times)
    device = largest(run.series["disk"].get("read_bytes_per_second", []) for run in shown)
    calls = largest(run.series["disk"].get("read_chars_per_second", []) for run in shown)
    capacities = [run.summary.disk_bytes_per_second for run in shown]
    capacity = max((one for one in capacities if one is not None), default=0.0)
    # Calls that the page cache answers can be many times what any disk gives.
    asked = min(calls, _NEAR * max(device, capacity)) if capacity else calls
    top = 1.12 * max(device, capacity, asked) or 1e6
    swap = _swap_top(shown)
    scales = choose_scale("rate", top), choose_scale("rate", swap)
    panels = [
        _disk_panel(run, time, times, scales, top, swap)
        for run, time in zip(runs, axes, strict=True)
    ]
    legend = [
        Legend(role="step", label="read from the device", shape="area"),
        Legend(role="calls", label="asked for by reads, cached or not"),
    ]
    if capacity:
        legend.append(Legend(role="limit", label="capacity of the device", shape="dashed"))
    if swap:
        legend.append(Legend(role="wait", label="swapped in", shape="area"))
        legend.append(Legend(role="hwm", label="swapped out"))
    return Chart(
        name="disk",
        title="Disk and swap",
        text="Reads of the process tree against what the data's own device gives. No device reads "
        "means that the page cache had the data.",
        legend=tuple(legend),
        panels=tuple(panels),
    )


def _swap_top(shown: Sequence[Curves]) -> float:
    names = ("swap_in_bytes_per_second", "swap_out_bytes_per_second")
    return largest(run.series["disk"].get(name, []) for run in shown for name in names)


def _disk_panel(
    run: Curves, time: Figure, times: Scale, scales: tuple[Scale, Scale], top: float, swap: float
) -> Panel:
    if not run.has("disk"):
        return Panel(name=run.name, text=_UNWATCHED, figure=None)
    x = run.ref("disk", "t", times.by)
    reads, swaps = scales
    layout: Figure = {
        "xaxis": {**time, "anchor": "y2" if swap else "y"},
        "yaxis": axis(
            "reads", reads.unit, range=[0, top * reads.by], domain=[0.5 if swap else 0, 1]
        ),
        "shapes": phase_shapes(run, times),
        "annotations": [],
    }
    unit = f" {reads.unit}"
    drawn = (
        ("read_chars_per_second", line, "calls", "read calls", unit, reads.by, "y"),
        ("read_bytes_per_second", area, "step", "from the device", unit, reads.by, "y"),
        ("swap_in_bytes_per_second", area, "wait", "swap in", f" {swaps.unit}", swaps.by, "y2"),
        ("swap_out_bytes_per_second", line, "hwm", "swap out", f" {swaps.unit}", swaps.by, "y2"),
    )
    traces = [
        draw(x, run.ref("disk", name, by), role, label, unit=words, yaxis=place)
        for name, draw, role, label, words, by, place in drawn
        if name in run.series["disk"] and (swap or place == "y")
    ]
    capacity = run.summary.disk_bytes_per_second
    if capacity:
        shape, words = level(capacity * reads.by, "limit", text="capacity")
        layout["shapes"].append(shape)
        layout["annotations"].append(words)
    if swap:
        layout["yaxis2"] = axis(
            "swap", swaps.unit, range=[0, 1.12 * swap * swaps.by], domain=[0, 0.4]
        )
    figure = {"traces": traces, "layout": layout, "height": 320 if swap else 240}
    return Panel(name=run.name, text=_disk_text(run), figure=figure)


def _disk_text(run: Curves) -> str:
    one = run.summary
    parts = []
    if one.read_bytes_per_second is not None:
        share = ""
        if one.disk_share is not None and one.disk_bytes_per_second is not None:
            capacity = format_bytes(one.disk_bytes_per_second)
            share = f", {format_share(one.disk_share)} of the {capacity}/s that the device gives"
        parts.append(f"{format_bytes(one.read_bytes_per_second)}/s from the device{share}.")
    if one.read_chars_per_second is not None:
        parts.append(f"{format_bytes(one.read_chars_per_second)}/s asked for by reads.")
    columns = [run.series["disk"].get(f"swap_{way}_bytes_per_second", []) for way in ("in", "out")]
    if any(columns) and not largest(columns):
        parts.append("The machine did not swap.")
    elif one.swap_in_bytes_per_second is not None:
        parts.append(f"Swapped in {format_bytes(one.swap_in_bytes_per_second)}/s.")
    return " ".join(parts) or "Nothing was counted."


def gpu_chart(runs: Sequence[Curves]) -> Chart | None:
    """Utilisation and memory as NVML tells; none where no run had a GPU."""
    shown = [run for run in runs if run.has("gpus")]
    if not shown:
        return None
    times = time_scale(shown, "gpus")
    axes = time_axes(runs, "gpus", times)
    memory = largest(run.series["gpus"]["memory_bytes"] for run in shown)
    panels = [_gpu_panel(run, time, times, memory) for run, time in zip(runs, axes, strict=True)]
    return Chart(
        name="gpu",
        title="GPU",
        text="Above, the share of time in which a kernel ran, which says nothing of how well; "
        "below, the memory that is taken.",
        legend=(
            Legend(role="step", label="utilisation, mean of the devices", shape="area"),
            Legend(role="anon", label="memory of the fullest device", shape="area"),
        ),
        panels=tuple(panels),
    )


def _gpu_panel(run: Curves, time: Figure, times: Scale, memory: float) -> Panel:
    if not run.has("gpus"):
        reason = run.summary.reasons.get("gpu_utilization", "no GPU was sampled")
        return Panel(name=run.name, text=f"Nothing to draw: {reason}.", figure=None)
    scale = choose_scale("bytes", memory)
    x = run.ref("gpus", "t", times.by)
    more = {"yaxis": "y2", "unit": f" {scale.unit}"}
    traces = [
        area(x, run.ref("gpus", "utilization"), "step", "utilisation", form=".0%", alpha=0.16),
        area(x, run.ref("gpus", "memory_bytes", scale.by), "anon", "memory", alpha=0.16, **more),
    ]
    layout = {
        "xaxis": {**time, "anchor": "y2"},
        "yaxis": axis("utilisation", range=[0, 1.03], tickformat=".0%", domain=[0.5, 1]),
        "yaxis2": axis(
            "memory", scale.unit, range=[0, 1.12 * memory * scale.by or 1.0], domain=[0, 0.4]
        ),
        "shapes": phase_shapes(run, times),
    }
    one = run.summary
    parts = []
    if one.gpu_utilization is not None:
        parts.append(f"A kernel ran for {format_share(one.gpu_utilization)} of the time.")
    if one.gpu_memory_bytes is not None:
        parts.append(f"At most {format_bytes(one.gpu_memory_bytes)} on one device.")
    if one.gpu_power_watts is not None:
        parts.append(f"{one.gpu_power_watts:,.0f} W a device.")
    text = " ".join(parts) or "Devices were seen, and no figure of them."
    figure = {"traces": traces, "layout": layout, "height": 320}
    return Panel(name=run.name, text=text, figure=figure)
