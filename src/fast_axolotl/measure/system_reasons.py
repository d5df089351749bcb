"""Why a figure of the system is missing: one sentence for each, under the field's name."""

from __future__ import annotations

from fast_axolotl.record import SystemSample

__all__ = ["explain_missing"]

_NO_PROCFS = "only Linux tells: there is no procfs here"
_DENIED = "a process of the tree may not be read: watch it as its own user or as root"
_ENDED = "the process had ended before it was looked at"
_NO_PRESSURE = "this kernel does not count pressure (PSI)"

_MEMORY = (
    "pss_bytes",
    "rss_bytes",
    "anon_bytes",
    "file_bytes",
    "shared_bytes",
    "hwm_bytes",
    "swap_bytes",
)
_READING = ("read_bytes", "read_chars")
_PRESSURE = ("psi_memory_full_seconds", "psi_io_full_seconds")


def explain_missing(
    sample: SystemSample,
    *,
    has_procfs: bool,
    limit_bytes: int | None,
    disk_reason: str,
    gpu_reason: str,
) -> dict[str, str]:
    """Field of ``SystemSample`` or ``SystemStart`` to the reason why it is ``None``."""
    unread = _DENIED if has_procfs else _NO_PROCFS
    reasons = dict.fromkeys((*_MEMORY, *_READING), unread if sample.processes else _ENDED)
    reasons |= dict.fromkeys(_PRESSURE, _NO_PRESSURE if has_procfs else _NO_PROCFS)
    reasons |= dict.fromkeys(
        ("swap_in_bytes", "swap_out_bytes"), "/proc/vmstat has no swap counters"
    )
    reasons["cgroup_bytes"] = "there is no memory cgroup here"
    missing = {name: text for name, text in reasons.items() if getattr(sample, name) is None}
    if limit_bytes is None:
        missing["limit_bytes"] = "no cgroup above the process sets a memory limit"
    if disk_reason:
        missing["disk_bytes_per_second"] = disk_reason
    if gpu_reason:
        missing["gpus"] = gpu_reason
    return missing
