"""Charts of the process tree and the machine: working set, disk, swap, GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from fast_axolotl.record.units import format_bytes, format_duration, format_share
from fast_axolotl.report.plot import (
    Chart,
    Curves,
    Figure,
    Legend,
    Panel,
    across,
    area,
    axis,
    choose_scale,
    dots_if,
    largest,
    line,
    phase_shapes,
    time_axes,
    words,
)

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


def _add_limit(layout: Figure, value: float, text: str) -> None:
    """A dashed line over the whole width, and the words on it."""
    label = words(text, "limit", 1, value, xref="paper", yref="y", xanchor="right")
    layout["shapes"].append(across(value, "limit", width=1.2, dash="dash"))
    layout["annotations"].append(label)


def memory_chart(runs: Sequence[Curves]) -> Chart | None:
    """Working set, anonymous memory, high-water mark and the limit."""
    shown = [run for run in runs if run.has("memory")]
    if not shown:
        return None
    times, axes = time_axes(runs, "memory")
    highest = largest(run.series["memory"].get(name, []) for run in shown for name, _, _ in _MEMORY)
    limits = [run.summary.limit_bytes for run in shown if run.summary.limit_bytes]
    near = [limit for limit in limits if limit <= _NEAR * highest]
    top = 1.1 * max([highest, *near]) or 1.0
    scale = choose_scale("bytes", top)
    panels = []
    for run, time in zip(runs, axes, strict=True):
        if not run.has("memory"):
            panels.append(Panel(name=run.name, text=_UNWATCHED))
            continue
        memory, traces = run.series["memory"], []
        for name, role, label in _MEMORY:
            if name in memory:
                # The working set is sampled more seldom than the rest.
                draw = area if name == "pss_bytes" else line
                x, y = run.ref("memory", "t", times.by), run.ref("memory", name, scale.by)
                is_single = sum(value is not None for value in memory[name]) == 1
                more = {"unit": f" {scale.unit}", "connectgaps": True, **dots_if(is_single)}
                traces.append(draw(x, y, role, label, **more))
        layout: Figure = {
            "xaxis": time,
            "yaxis": axis("memory", scale.unit, range=[0, top * scale.by]),
            "shapes": phase_shapes(run, times),
            "annotations": [],
        }
        limit = run.summary.limit_bytes
        if limit and limit <= top:
            _add_limit(layout, limit * scale.by, "limit")
        figure = {"traces": traces, "layout": layout, "height": 260}
        summary = run.summary
        parts = []
        if summary.working_set_bytes is not None:
            parts.append(
                f"Working set {format_bytes(summary.working_set_bytes)}, at most "
                f"{format_bytes(summary.working_set_peak_bytes)}."
            )
        if parts and summary.limit_bytes is not None and summary.limit_share is not None:
            share = format_share(summary.limit_share)
            parts.append(f"That is {share} of the limit, {format_bytes(summary.limit_bytes)}.")
        if summary.hwm_bytes is not None:
            spike = summary.spike_ratio
            ratio = "" if spike is None else f", {spike:.2f} × the resident size"
            parts.append(f"High-water mark {format_bytes(summary.hwm_bytes)}{ratio}.")
        # Reading the working set costs time, so that it may be sampled seldom.
        samples = zip(memory["t"], memory.get("pss_bytes", []), strict=False)
        sampled = [t for t, value in samples if value is not None]
        if sampled and sampled[-1] < _LEAST_SAMPLED * memory["t"][-1]:
            last, end = format_duration(sampled[-1]), format_duration(memory["t"][-1])
            parts.append(f"The working set was last sampled at {last} of {end}.")
        text = " ".join(parts) or "No size was sampled."
        panels.append(Panel(name=run.name, text=text, figure=figure))
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


def disk_chart(runs: Sequence[Curves]) -> Chart | None:
    """Reads against the capacity of the device, and swap where there was any."""
    shown = [run for run in runs if run.has("disk")]
    if not shown:
        return None
    times, axes = time_axes(runs, "disk")
    device = largest(run.series["disk"].get("read_bytes_per_second", []) for run in shown)
    calls = largest(run.series["disk"].get("read_chars_per_second", []) for run in shown)
    capacity = max(run.summary.disk_bytes_per_second or 0.0 for run in shown)
    # Calls that the page cache answers can be many times what any disk gives.
    asked = min(calls, _NEAR * max(device, capacity)) if capacity else calls
    top = 1.12 * max(device, capacity, asked) or 1e6
    swap = max(map(_highest_swap, shown))
    reads, swaps = choose_scale("rate", top), choose_scale("rate", swap)
    drawn = (
        ("read_chars_per_second", line, "calls", "read calls", reads, "y"),
        ("read_bytes_per_second", area, "step", "from the device", reads, "y"),
        ("swap_in_bytes_per_second", area, "wait", "swap in", swaps, "y2"),
        ("swap_out_bytes_per_second", line, "hwm", "swap out", swaps, "y2"),
    )
    panels = []
    for run, time in zip(runs, axes, strict=True):
        if not run.has("disk"):
            panels.append(Panel(name=run.name, text=_UNWATCHED))
            continue
        x = run.ref("disk", "t", times.by)
        traces = [
            draw(
                x, run.ref("disk", name, scale.by), role, label, unit=f" {scale.unit}", yaxis=yaxis
            )
            for name, draw, role, label, scale, yaxis in drawn
            if name in run.series["disk"] and (swap or yaxis == "y")
        ]
        domain = [0.5 if swap else 0, 1]
        layout: Figure = {
            "xaxis": {**time, "anchor": "y2" if swap else "y"},
            "yaxis": axis("reads", reads.unit, range=[0, top * reads.by], domain=domain),
            "shapes": phase_shapes(run, times),
            "annotations": [],
        }
        if run.summary.disk_bytes_per_second:
            _add_limit(layout, run.summary.disk_bytes_per_second * reads.by, "capacity")
        if swap:
            ends = [0, 1.12 * swap * swaps.by]
            layout["yaxis2"] = axis("swap", swaps.unit, range=ends, domain=[0, 0.4])
        figure = {"traces": traces, "layout": layout, "height": 320 if swap else 240}
        summary = run.summary
        parts = []
        if summary.read_bytes_per_second is not None:
            share = ""
            if summary.disk_share is not None and summary.disk_bytes_per_second is not None:
                most = format_bytes(summary.disk_bytes_per_second)
                used = format_share(summary.disk_share)
                share = f", {used} of the {most}/s that the device gives"
            parts.append(f"{format_bytes(summary.read_bytes_per_second)}/s from the device{share}.")
        if summary.read_chars_per_second is not None:
            parts.append(f"{format_bytes(summary.read_chars_per_second)}/s asked for by reads.")
        is_sampled = any(
            run.series["disk"].get(f"swap_{way}_bytes_per_second") for way in ("in", "out")
        )
        if is_sampled and not _highest_swap(run):
            parts.append("The machine did not swap.")
        elif summary.swap_in_bytes_per_second is not None:
            parts.append(f"Swapped in {format_bytes(summary.swap_in_bytes_per_second)}/s.")
        text = " ".join(parts) or "Nothing was counted."
        panels.append(Panel(name=run.name, text=text, figure=figure))
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


def _highest_swap(run: Curves) -> float:
    return largest(
        run.series["disk"].get(f"swap_{way}_bytes_per_second", []) for way in ("in", "out")
    )


def gpu_chart(runs: Sequence[Curves]) -> Chart | None:
    """Utilisation and memory as NVML tells; none where no run had a GPU."""
    shown = [run for run in runs if run.has("gpus")]
    if not shown:
        return None
    times, axes = time_axes(runs, "gpus")
    memory = largest(run.series["gpus"]["memory_bytes"] for run in shown)
    scale = choose_scale("bytes", memory)
    panels = []
    for run, time in zip(runs, axes, strict=True):
        summary = run.summary
        if not run.has("gpus"):
            reason = summary.reasons.get("gpu_utilization", "no GPU was sampled")
            panels.append(Panel(name=run.name, text=f"Nothing to draw: {reason}."))
            continue
        x, used = run.ref("gpus", "t", times.by), run.ref("gpus", "memory_bytes", scale.by)
        below = {"yaxis": "y2", "unit": f" {scale.unit}"}
        traces = [
            area(x, run.ref("gpus", "utilization"), "step", "utilisation", form=".0%", alpha=0.16),
            area(x, used, "anon", "memory", alpha=0.16, **below),
        ]
        ends = [0, 1.12 * memory * scale.by or 1.0]
        layout = {
            "xaxis": {**time, "anchor": "y2"},
            "yaxis": axis("utilisation", range=[0, 1.03], tickformat=".0%", domain=[0.5, 1]),
            "yaxis2": axis("memory", scale.unit, range=ends, domain=[0, 0.4]),
            "shapes": phase_shapes(run, times),
        }
        parts = []
        if summary.gpu_utilization is not None:
            parts.append(f"A kernel ran for {format_share(summary.gpu_utilization)} of the time.")
        if summary.gpu_memory_bytes is not None:
            parts.append(f"At most {format_bytes(summary.gpu_memory_bytes)} on one device.")
        if summary.gpu_power_watts is not None:
            parts.append(f"{summary.gpu_power_watts:,.0f} W a device.")
        text = " ".join(parts) or "Devices were seen, and no figure of them."
        figure = {"traces": traces, "layout": layout, "height": 320}
        panels.append(Panel(name=run.name, text=text, figure=figure))
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
