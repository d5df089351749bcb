"""Read profiler traces (Kineto JSON, plain or gzip).

A trace costs its own text and what is kept of it: 32 bytes for each event of the device, 16 for
each launch, and an object for each collective. Times are whole nanoseconds, so
that sums are exact.

Communication is recognised by name: see ``is_collective``. Traces without kernels are refused.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from array import array
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from fast_axolotl.errors import DataError
from fast_axolotl.record.schema import is_collective
from fast_axolotl.record.units import count_words

COMPUTE, COMMUNICATION, COPY = 0, 1, 2
"""What an event of the device does."""

_DEVICE = {"kernel": COMPUTE}
_DEVICE |= dict.fromkeys(("gpu_memcpy", "gpu_memset", "memcpy", "memset"), COPY)
_HOST = {"cpu_op", "operator", "user_annotation"}
_LAUNCHES = ("runtime", "driver")
"""Categories of events, in lower case; older traces have no ``gpu_``."""

_RANK_IN_NAME = re.compile(r"rank[-_.]?(\d+)", re.IGNORECASE)
_STEP = re.compile(r"ProfilerStep#(\d+)")
_KINDS = (
    *("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send_recv", "broadcast"),
    *("barrier", "reduce", "gather", "scatter", "send", "recv"),
)
"""Looked for in a name, letters only; the first that fits counts."""


@dataclass(slots=True, kw_only=True)
class Collective:
    """One communication kernel of one rank."""

    kind: str
    start: int
    end: int
    message: str = ""
    """Numbers and their type, in or out, whichever are more."""
    group: str | None = None
    """Name and ranks of its group; ``None`` where the trace does not tell: torch before 2.4."""
    group_size: int | None = None
    sequence: int | None = None
    """Its number within the group."""
    step: int | None = None
    waiting: int | None = None
    """Nanoseconds of waiting for peers; ``None`` where it is not matched with theirs."""


@dataclass(slots=True, kw_only=True)
class Trace:
    """What is kept of a trace; times are in nanoseconds."""

    path: str
    rank: int | None = None
    world_size: int | None = None
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """Number, start and end of each profiler step, on the CPU."""
    device: array[int] = field(default_factory=lambda: array("q"))
    """Start, end, class and correlation of each event of the device."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Nanoseconds by name."""
    launches: array[int] = field(default_factory=lambda: array("q"))
    """Correlation and start of each call on the CPU that started something."""
    collectives: list[Collective] = field(default_factory=list)
    """In the order of the file."""


def read_trace(path: Path) -> Trace:
    """Read one file; ``DataError`` with the place where it is cut, foreign or empty."""
    trace, events = Trace(path=str(path)), 0

    def keep(value: dict[str, Any]) -> dict[str, Any] | None:
        """Take an event apart as soon as it is read, so that never all of them are held."""
        nonlocal events
        if "ph" not in value:
            return value
        events += 1
        try:
            if value["ph"] == "X":
                _take(trace, value)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            message = f"cannot read {value.get('name')!r:.60}: {error!r}"
            raise DataError(message, path=trace.path, place=f"event {events:,}") from None
        return None

    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
        content = json.loads(data.decode(errors="replace"), strict=False, object_hook=keep)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"the file cannot be read: {error}", path=trace.path) from None
    except (json.JSONDecodeError, RecursionError) as error:
        message = f"the file is truncated here, or this is not JSON: {error}"
        place = f"after {count_words(events, 'event')}"
        raise DataError(message, path=trace.path, place=place) from None
    header = content if isinstance(content, dict) else {"traceEvents": content}
    if not isinstance(header.get("traceEvents"), list):
        message = "this JSON has no list of traceEvents; is it a trace of torch.profiler?"
        raise DataError(message, path=trace.path)
    if not trace.device:
        raise DataError(
            "no GPU kernels: the time of a step is read from them; profile at least one step on a "
            "GPU with ProfilerActivity.CUDA",
            path=trace.path,
        )
    if isinstance(info := header.get("distributedInfo"), dict):
        known = {k: v for k, v in info.items() if type(v) is int and 0 <= v < 1 << 20}
        trace.rank, trace.world_size = known.get("rank"), known.get("world_size")
    if trace.rank is None and (in_name := _RANK_IN_NAME.search(path.name)):
        trace.rank = int(in_name[1])
    trace.steps.sort(key=lambda step: step[1])
    return trace


def _take(trace: Trace, event: dict[str, Any]) -> None:
    """Keep what the sums need of one event."""
    category = event.get("cat", "").lower()
    if category not in _DEVICE and category not in _HOST and not category.endswith(_LAUNCHES):
        return
    name, args = event["name"], event.get("args") or {}
    start = round(event["ts"] * 1000)
    end = start + max(round(event.get("dur", 0) * 1000), 0)
    if category in _DEVICE:
        kind = COMMUNICATION if is_collective(name) else _DEVICE[category]
        trace.kernels[name] += end - start
        trace.device.extend((start, end, kind, args.get("correlation", -1)))
        if kind != COMMUNICATION:
            return
        item = Collective(kind=_kind_of(args.get("Collective name") or name), start=start, end=end)
        trace.collectives.append(item)
        group, ranks = args.get("Process Group Name"), args.get("Process Group Ranks")
        if group not in (None, ""):
            item.group = f"{group} {ranks}" if ranks else str(group)
        size, sequence = args.get("Group size"), args.get("Seq", args.get("seq"))
        item.group_size = size if isinstance(size, int) and size > 0 else None
        item.sequence = sequence if isinstance(sequence, int) and sequence >= 0 else None
        counts = [args.get(key) for key in ("In msg nelems", "Out msg nelems")]
        if known := [count for count in counts if isinstance(count, int)]:
            item.message = f"{max(known):,} {args.get('dtype', '')}"
    elif category.endswith(_LAUNCHES):
        if "correlation" in args:
            trace.launches.extend((args["correlation"], start))
    elif step := _STEP.match(name):
        trace.steps.append((int(step[1]), start, end))


@lru_cache(maxsize=1 << 14)
def _kind_of(name: str) -> str:
    letters = re.sub("[^a-z]", "", name.lower())
    if "userbuffers" in letters:
        letters = re.sub("_rs_|_rs$", "reduce_scatter", re.sub("_ag_|_ag$", "all_gather", name))
        letters = letters.replace("_", "")
    return next((kind for kind in _KINDS if kind.replace("_", "") in letters), "other")
