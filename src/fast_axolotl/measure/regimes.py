"""When what bounds a run changed: a run that was fine for hours can stall at its end.

The steady steps are cut into at most 60 windows, each long enough to be judged. Three shares are
known of a window: waiting for data, evaluation and checkpoints. A median over five neighbours drops
what lasts less than three windows, such as the start of an epoch. The run is then divided once, at
the place that explains most by least squares, if that explains clearly more than the noise of
neighbours does: a run whose waits come and go is one stretch.

Both parts are judged by their own sums. If they are bound by the same thing, or differ by less than
five points, the run has one regime. A change is seen once it has lasted for a twentieth of the run,
and for three windows at least; its place is known to a sixtieth of the run. Of several changes, the
largest is found.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

from fast_axolotl.measure.rank_figures import RankFigures
from fast_axolotl.record import Regime, StepBlock, thresholds
from fast_axolotl.record.arithmetic import finite, ratio, times, total
from fast_axolotl.record.figures import VerdictKind

_MOST_WINDOWS = 60
_LEAST_WINDOWS = 3
"""Of a regime."""
_NEIGHBOURS = 5
_LEAST_CHANGE = 0.05
"""Points. Ours: the distance between free of a loss and bound by it."""
_LEAST_NOISE = 0.02
"""Share of time. Below it a difference does not matter."""
_PRICE = 40.0
"""Of a change, in squares of the noise. By simulation with noise of nine kinds: less than one
steady run in a hundred is divided, and a stall of 45 % is seen in the last three windows of 60."""


@dataclass(slots=True)
class _Stretch:
    """Sums over consecutive steps."""

    begin: float
    """Seconds since 1970."""
    end: float
    first_step: int
    num_steps: int = 0
    fetches: int = 0
    wall_seconds: float = 0.0
    span_seconds: float = 0.0
    tokens: float = 0.0
    """No number where some were not counted."""
    waits: float = 0.0
    """What the job lost to data, by the rank that waited longest; so the next two."""
    evaluation: float = 0.0
    checkpoint: float = 0.0

    @property
    def steps(self) -> tuple[int, int]:
        """The first, and the first that follows."""
        return self.first_step, self.first_step + self.num_steps

    @property
    def seconds(self) -> float:
        return self.wall_seconds + self.span_seconds

    @property
    def stall(self) -> float | None:
        return ratio(min(self.waits, self.wall_seconds), self.wall_seconds)

    @property
    def shares(self) -> tuple[float, ...]:
        spans = (ratio(seconds, self.seconds) for seconds in (self.evaluation, self.checkpoint))
        return tuple(share or 0.0 for share in (self.stall, *spans))

    def join(self, other: _Stretch) -> _Stretch:
        """Both as one."""
        sums = {
            item.name: getattr(self, item.name) + getattr(other, item.name)
            for item in fields(self)[3:]
        }
        return _Stretch(self.begin, other.end, self.first_step, **sums)

    def name(self, exposed: float) -> VerdictKind:
        """What bounds it, as the verdict has it on a whole run with this exposed communication."""
        lost = max(self.evaluation, self.checkpoint)
        if lost > self.waits and lost >= thresholds.LOST_TIME * self.seconds:
            return "checkpoint" if self.checkpoint == lost else "evaluation"
        stall = self.stall or 0.0
        if stall >= thresholds.DATA_STALL:
            return "data"
        if stall < thresholds.FREE_STALL and exposed >= thresholds.BOUND_COMMUNICATION:
            return "communication"
        is_free = stall < thresholds.FREE_STALL and exposed < thresholds.FREE_COMMUNICATION
        return "compute" if is_free else "mixed"


def find_regimes(
    ranks: Sequence[RankFigures],
    chosen: RankFigures | None,
    figures: Mapping[str, Any],
    begin: float,
    course: Sequence[tuple[float, float]] = (),
) -> tuple[tuple[Regime, ...], bool]:
    """The regimes of a run, and whether the last is another than that of the steady phase at large.

    ``figures`` are the whole run's, ``course`` is its exposed communication over time; ``begin`` is
    when it began, in seconds since 1970.
    """
    blocks = [one for one in chosen.steady_blocks if finite(one.t) is not None] if chosen else []
    if chosen is None or not blocks:
        return (), False
    usual = figures["exposed_communication_fraction"]
    if usual is None:
        # Of several ranks it is neither the limit nor free, as far as anybody knows.
        usual = thresholds.FREE_COMMUNICATION if ranks[1:] else 0.0

    def name(stretch: _Stretch) -> VerdictKind:
        within = [share for t, share in course if stretch.begin <= t <= stretch.end]
        return stretch.name(statistics.median(within or [usual]))

    if chosen.settings.get("dispatcher"):
        ranks = [chosen]
    windows = _cut(blocks, chosen)
    _add_losses(windows, ranks, is_device=chosen.steady.source == "device")
    whole = _join(windows)
    # Ranks that wait in different steps cost the job more than any of them waited.
    scale = ratio(times(figures["stall_fraction"], whole.wall_seconds), whole.waits) or 0.0
    for window in windows:
        window.waits *= max(1.0, scale)
    stretches = [_join(windows)]
    bound = _find_change(windows)
    if bound is not None:
        parts = [_join(windows[:bound]), _join(windows[bound:])]
        if name(parts[0]) != name(parts[1]) and _distance(*parts) >= _LEAST_CHANGE:
            stretches = parts
    # The deciding rank's tokens stand for those of all.
    all_ranks = ratio(figures["tokens_per_second"], chosen.rate("real_tokens"))
    regimes = tuple(
        Regime(
            begin_seconds=max(0.0, stretch.begin - begin),
            end_seconds=max(0.0, stretch.end - begin),
            first_step=stretch.first_step,
            kind=name(stretch),
            stall_fraction=stretch.stall,
            tokens_per_second=times(ratio(stretch.tokens, stretch.wall_seconds), all_ranks),
        )
        for stretch in stretches
    )
    end, whole = stretches[-1], _join(windows)
    is_changed = name(end) != name(whole) or _distance(end, whole) >= _LEAST_CHANGE
    return regimes, is_changed


def _distance(one: _Stretch, other: _Stretch) -> float:
    return max(abs(a - b) for a, b in zip(one.shares, other.shares, strict=True))


def _cut(blocks: Sequence[StepBlock], chosen: RankFigures) -> list[_Stretch]:
    """At most 60 windows of about equal length, each long enough to be judged."""
    windows: list[_Stretch] = []
    is_open = False
    spans = [sum(finite(one) or 0.0 for one in block.spans.values()) for block in blocks]
    walls = [finite(block.wall_seconds) or 0.0 for block in blocks]
    length = (sum(walls) + sum(spans)) / _MOST_WINDOWS
    for block, wall_seconds, span_seconds in zip(blocks, walls, spans, strict=True):
        end = chosen.record.start.time + block.t
        window = _Stretch(
            begin=end - wall_seconds - span_seconds,
            end=end,
            first_step=block.first_step,
            num_steps=block.steps,
            fetches=block.fetches,
            wall_seconds=wall_seconds,
            span_seconds=span_seconds,
            tokens=math.nan if block.real_tokens is None else block.real_tokens,
        )
        if is_open:
            window = windows.pop().join(window)
        windows.append(window)
        is_long = thresholds.is_long_enough(window.fetches, window.seconds)
        is_open = window.seconds < length or not is_long
    if is_open and windows[1:]:
        windows[-2:] = [windows[-2].join(windows[-1])]
    return windows


def _add_losses(
    windows: Sequence[_Stretch], ranks: Sequence[RankFigures], *, is_device: bool
) -> None:
    """What the job lost in each window: as much as the rank that lost most."""
    for window in windows:
        losses: list[tuple[float, ...]] = []
        for rank in ranks:
            own = rank.steady_blocks
            ends = (bisect_left(own, at, key=attrgetter("first_step")) for at in window.steps)
            within = own[slice(*ends)]
            waits = (b.device_wait_seconds if is_device else b.host_wait_seconds for b in within)
            spans = [block.spans for block in within if block.spans]
            sums = (total(one.get(name) for one in spans) for name in ("evaluate", "checkpoint"))
            losses.append(tuple(seconds or 0.0 for seconds in (total(waits), *sums)))
        window.waits, window.evaluation, window.checkpoint = map(max, zip(*losses, strict=True))


def _join(stretches: Sequence[_Stretch]) -> _Stretch:
    *_, joined = accumulate(stretches, _Stretch.join)
    return joined


def _find_change(windows: Sequence[_Stretch]) -> int | None:
    """The first window after the one change that explains most; ``None``: none explains enough."""
    count = len(windows)
    if count < 2 * _LEAST_WINDOWS:
        return None
    gains = [0.0] * count
    for share in zip(*(window.shares for window in windows), strict=True):
        firsts = (min(max(0, at - _NEIGHBOURS // 2), count - _NEIGHBOURS) for at in range(count))
        calm = [statistics.median(share[first : first + _NEIGHBOURS]) for first in firsts]
        jumps = sum((after - before) ** 2 for before, after in pairwise(share)) / (count - 1)
        noise = max(_LEAST_NOISE, (jumps / 2) ** 0.5)
        before, whole = 0.0, sum(calm) / noise
        for at, value in enumerate(calm[:-1], start=1):
            before += value / noise
            apart = before / at - (whole - before) / (count - at)
            gains[at] += apart**2 * at * (count - at) / count
    bounds = range(_LEAST_WINDOWS, count - _LEAST_WINDOWS + 1)
    best = max(bounds, key=gains.__getitem__)
    return best if gains[best] >= _PRICE else None
