"""Divide the time of a step, and the time between loops, by what looks at the Python stack saw.

The wait for data is known exactly, by the clock of each fetch; the looks divide the rest. In a loop
without fetches, the looks tell the waits, too. About twenty looks a second: after a minute a share
of 10 % is known to within two points, and a line of code by its share of its phase.

On a GPU the host's stack tells what the *host* did. That costs time only while the device idles:
``Phases.cost`` counts of what the host did beside the model no more than the device's idle time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from fast_axolotl.measure.ranks import RankFigures, add_up_looks
from fast_axolotl.measure.stacks import RATE
from fast_axolotl.record.arithmetic import ratio
from fast_axolotl.record.catalogue import STEP
from fast_axolotl.record.figures import CodeLine

MODEL = ("forward", "backward", "optimizer")
_BESIDE = ("preparing", "checkpoint", "evaluation", "other")
"""Those that a GPU may hide."""
_SAME = {"backward/idle": "backward", "evaluate": "evaluation", "waiting/sampler": "sampler"}
_LEAST_SECONDS = 0.5
"""Of looks, to divide anything by."""
_TOLD = ("waiting", "sampler", "preparing", "checkpoint", "evaluation", "other", "between")
_MOST_LINES = 3
_LEAST_LINE = 0.05
"""Of its phase, for a line to be told."""


@dataclass(frozen=True, slots=True)
class Phases:
    """What the looks at one rank come to; empty where there were none."""

    step: dict[str, float] = field(default_factory=dict)
    """Share of the time of a step, in its order; they add up to 1."""
    between: dict[str, float] = field(default_factory=dict)
    """Share of the time between loops, by what was seen there."""
    waiting: dict[str, float] = field(default_factory=dict)
    """Share of the waiting that no worker can take over: the sampler, the start of workers."""
    loading: float | None = None
    """Share of their time in which the workers loaded; ``None``: nobody looked, or none."""
    workers: float = 0.0
    """That were at work on average: those that start or end are not."""
    visible: float = 1.0
    """Share of what the host did beside the model that the device did not hide."""
    lines: tuple[CodeLine, ...] = ()
    is_foreign: bool = False
    """Whether the model is none of torch's: then nothing tells it from other code."""

    def cost(self, phase: str) -> float:
        """Share of the time of a step that a phase costs."""
        share = self.step.get(phase, 0.0)
        if phase == "other" and self.is_foreign:
            return 0.0
        return share * self.visible if phase in _BESIDE else share

    @property
    def model(self) -> float:
        """Share of the time that forward, backward and optimizer take; of a GPU, what it hides."""
        hidden = sum(self.step.get(phase, 0.0) - self.cost(phase) for phase in _BESIDE)
        return sum(self.step.get(phase, 0.0) for phase in MODEL) + hidden


def fold_phases(rank: RankFigures, stall: float | None, idle: float | None, also: str) -> Phases:
    """Divide the steady phase of one rank.

    ``stall`` is the share of it that the host waited for data; ``idle`` that in which the device
    was idle beside its own waits for data, ``None`` where there is no device. The lines of the
    phase ``also`` are told, too.
    """
    inside = add_up_looks(rank.steady_blocks)
    inside["backward"] += add_up_looks(rank.steady_blocks, "backward")["idle"]
    if sum(inside.values()) < _LEAST_SECONDS:
        return Phases()
    waited = inside.pop("data", 0.0)
    if rank.is_fed_unseen:
        inside["waiting"] = inside.get("waiting", 0.0) + waited
        stall = inside["waiting"] / sum(inside.values())
    else:  # a queue of the loop's own, behind the loader
        inside["preparing"] = inside.get("preparing", 0.0) + waited
    own = add_up_looks(rank.steady_blocks, "waiting")
    waited = inside.get("waiting", 0.0) + sum(own.values())
    wait = min(1.0, stall or 0.0)
    rest = sum(seconds for name, seconds in inside.items() if name != "waiting")
    step = {name: (1.0 - wait) * inside.get(name, 0.0) / (rest or 1.0) for name in STEP}
    step["waiting"] = wait if rest else 1.0
    outside = add_up_looks(rank.record.blocks, "between")
    whole = sum(outside.values()) or 1.0
    beside = sum(step[name] for name in _BESIDE)
    blocks, (loaded, idled) = rank.record.blocks, rank.worker_seconds
    wall = sum(block.wall_seconds + sum(block.spans.values()) for block in blocks)
    return Phases(
        step={name: share for name, share in step.items() if share > 0},
        between={name: seconds / whole for name, seconds in outside.items()},
        waiting={name: seconds / (waited or 1.0) for name, seconds in own.items()},
        loading=rank.loading,
        workers=ratio(loaded + idled, wall) or 0.0,
        visible=1.0 if idle is None or not beside else min(1.0, max(0.0, idle) / beside),
        lines=tuple(_find_lines(rank, also)),
        is_foreign=rank.record.start.source == "loop" and not any(map(inside.get, MODEL)),
    )


def _find_lines(rank: RankFigures, also: str) -> Iterator[CodeLine]:
    """The lines that most of each phase was spent in. Of waits for workers, what these did."""
    phases: dict[str, dict[tuple[str, int, str], dict[str, float]]] = {}
    same = _SAME | {"data": "waiting" if rank.is_fed_unseen else "preparing"}
    for stacks in rank.record.stacks:
        for line in stacks.lines:
            outer = line.phase.partition("/")[0]
            phase = same.get(line.phase, same.get(outer, outer))
            where = (line.file, line.line, line.function)
            calls = phases.setdefault(phase, {}).setdefault(where, defaultdict(float))
            calls[line.call] += line.seconds
    if "loading" in phases:
        phases.pop("waiting", None)
    for phase in dict.fromkeys(("loading", *_TOLD, also)):
        lines = phases.get(phase, {})
        sums = {where: sum(calls.values()) for where, calls in lines.items()}
        whole = sum(sums.values())
        for where in sorted(sums, key=lambda where: -sums[where])[:_MOST_LINES]:
            if sums[where] < _LEAST_LINE * whole:
                continue
            file, number, function = where
            yield CodeLine(
                phase=phase,
                file=file,
                line=number,
                function=function,
                call=max(lines[where], key=lines[where].__getitem__),
                seconds=sums[where],
                share=sums[where] / whole,
            )


def looks_error(share: float, seconds: float) -> float:
    """Half of the 95 % interval of a share that the looks of so many seconds tell."""
    return 2.0 * math.sqrt(max(share * (1.0 - share), 0.01) / (RATE * max(seconds, 1.0)))
