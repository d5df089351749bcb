"""When a run cannot be judged: too short, warming up, its queue draining, or contradicting itself.

Each answer says how much longer the run has to be, where that would help.
"""

from __future__ import annotations

from fast_axolotl.measure import actions
from fast_axolotl.measure.evidence import (
    DATA_STALL,
    LEAST_FETCHES,
    LEAST_SECONDS,
    MOST_CONTRADICTION,
    Evidence,
    stall_line,
    system_lines,
)
from fast_axolotl.measure.wording import percent, seconds
from fast_axolotl.record import Verdict

__all__ = ["find_contradiction", "find_draining", "find_short", "find_warming"]


def find_warming(given: Evidence) -> Verdict | None:
    one = given.figures
    if one.fetches:
        return None
    pace = (one.duration_seconds - (one.first_batch_seconds or 0.0)) / max(1, one.warmup_steps)
    left = max(0, actions.warmup_steps(one.settings) - one.warmup_steps)
    needed = left * pace + _least_time(pace, 1.0)
    return Verdict(
        kind="inconclusive",
        subtype="warming",
        headline=f"The run was still warming up when it ended, after {one.warmup_steps} steps.",
        evidence=(
            f"0 steps of the steady phase; warm-up takes {actions.warmup_steps(one.settings)}, "
            "until all batches read ahead at the start are used up",
        ),
        action=f"Let it run about {seconds(needed)} longer.",
        seconds_needed=needed,
    )


def find_short(given: Evidence) -> Verdict | None:
    one = given.figures
    if one.fetches >= LEAST_FETCHES or one.measured_seconds >= LEAST_SECONDS:
        return None
    pace = one.measured_seconds / one.fetches
    needed = min(LEAST_SECONDS - one.measured_seconds, (LEAST_FETCHES - one.fetches) * pace)
    stalled = f"; {stall_line(given)}" if one.stall_fraction is not None else ""
    return Verdict(
        kind="inconclusive",
        subtype="short",
        headline=f"Too short to judge: {one.fetches:,} fetches in {seconds(one.measured_seconds)}.",
        evidence=(
            f"{one.fetches:,} fetches and {seconds(one.measured_seconds)} of the steady phase: "
            f"{LEAST_FETCHES} fetches or {LEAST_SECONDS:.0f} s are asked for{stalled}",
            *system_lines(given),
        ),
        action=f"Let it run about {seconds(needed)} longer.",
        seconds_needed=needed,
    )


def find_draining(given: Evidence) -> Verdict | None:
    one = given.figures
    depth, drift = one.queue_depth, one.queue_drift_per_step
    # A stall that is there already only grows when the queue is empty.
    if depth is None or drift is None or drift >= 0 or given.stall >= DATA_STALL:
        return None
    fallen = -drift * one.steps
    left = depth - fallen / 2
    if fallen < max(2.0, 0.1 * (one.queue_capacity or 0)) or left < 1:
        return None
    steps = left / -drift
    pace = one.measured_seconds / max(1, one.steps)
    needed = steps * pace + _least_time(pace, one.fetches / max(1, one.steps))
    return Verdict(
        kind="inconclusive",
        subtype="draining",
        headline=f"The queue of ready batches is running dry: it is empty in {steps:,.0f} steps.",
        evidence=(
            f"the queue falls by {-drift:.3g} batches a step; about {left:,.1f} are left: "
            f"{left:,.1f} ÷ {-drift:.3g} = {steps:,.0f} steps, {seconds(steps * pace)}",
            f"{stall_line(given)}, so far: waits are hidden until the queue is empty",
        ),
        action=f"Let it run about {seconds(needed)} longer, {seconds(steps * pace)} to empty the "
        "queue and the rest to see what follows.",
        seconds_needed=needed,
    )


def find_contradiction(given: Evidence) -> Verdict | None:
    one = given.figures
    if one.cached_stall_fraction is None or one.stall_fraction is None:
        return None
    apart = one.cached_stall_fraction - one.stall_fraction
    if abs(apart) <= MOST_CONTRADICTION:
        return None
    why = (
        "reading slows the model down without making it wait: it shares cores, memory or the "
        "interpreter's lock with it"
        if apart > 0
        else "the waits hide work that is done anyway, or other batches cost less than the cached"
    )
    return Verdict(
        kind="inconclusive",
        subtype="contradiction",
        headline="Two ways of measuring the stall contradict each other.",
        evidence=(
            f"by the waits the stall is {percent(one.stall_fraction)}; with a cached batch a step "
            f"is {percent(one.cached_stall_fraction)} shorter",
            f"more than {100 * MOST_CONTRADICTION:.0f} points apart (ours: half of MLPerf "
            f"Storage's 10 %): {why}",
        ),
        action=actions.resolve_contradiction(one, apart),
    )


def _least_time(pace: float, fetches_per_step: float) -> float:
    """How long a steady phase takes at this pace, in seconds a step."""
    return min(LEAST_SECONDS, LEAST_FETCHES * pace / max(1.0, fetches_per_step))
