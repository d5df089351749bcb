"""When a run cannot be judged: too short, warming up, its queue draining, or contradicting itself.

Each answer says how much longer the run has to be, where that would help, and what the samples of
the machine show all the same. A run that an error ended is told of the error, not to be longer.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fast_axolotl.measure import actions
from fast_axolotl.measure.evidence import Evidence, stall_line, system_lines
from fast_axolotl.measure.ready_queue import Drain
from fast_axolotl.measure.steps import count_warmup
from fast_axolotl.measure.wording import percent, seconds
from fast_axolotl.record import RunSummary, Verdict
from fast_axolotl.record.thresholds import (
    DATA_STALL,
    LEAST_FETCHES,
    LEAST_FETCHES_SECONDS,
    LEAST_SECONDS,
    MOST_CONTRADICTION,
    is_long_enough,
)

__all__ = [
    "find_contradiction",
    "find_draining",
    "find_short",
    "find_unseen",
    "find_warming",
    "name_error",
]

_ASKED = (
    f"{LEAST_FETCHES} fetches in {LEAST_FETCHES_SECONDS:.0f} s or more, or {LEAST_SECONDS:.0f} s"
)
_MOST_LETTERS = 200


def find_unseen(given: Evidence) -> Verdict | None:
    figures = given.figures
    if figures.fetches or (figures.warmup_steps and not figures.steps):
        return None
    what = "no step was" if not figures.steps else "steps were seen, but no fetch was"
    seen = "" if figures.ranks else ", and the process was watched from outside only"
    return Verdict(
        kind="inconclusive",
        subtype="unseen",
        headline=f"There is nothing to judge the data by: {what} recorded{seen}.",
        evidence=("0 fetches of a training loop were timed", *system_lines(figures)),
        action=actions.see_fetches(given),
    )


def find_warming(given: Evidence) -> Verdict | None:
    figures = given.figures
    if figures.fetches:
        return None
    pace = given.warmup_step_seconds
    if pace is None:
        pace = figures.duration_seconds / max(1, figures.warmup_steps)
    asked = count_warmup(figures.settings)
    needed = max(0, asked - figures.warmup_steps) * pace + _least_time(pace, 1.0)
    done = _steps(figures.warmup_steps)
    return Verdict(
        kind="inconclusive",
        subtype="warming",
        headline=f"The run was still warming up when it ended, after {done}.",
        evidence=(
            f"0 steps of the steady phase; warm-up takes {asked}, until all batches read ahead at "
            "the start are used up",
            *system_lines(figures),
        ),
        action=_run_longer(needed),
        seconds_needed=needed,
    )


def find_short(given: Evidence) -> Verdict | None:
    figures = given.figures
    if is_long_enough(figures.fetches, figures.measured_seconds):
        return None
    needed = _seconds_left(figures.fetches, figures.measured_seconds)
    stalled = f"; {stall_line(given)}" if figures.stall_fraction is not None else ""
    took = seconds(figures.measured_seconds)
    count = "1 fetch" if figures.fetches == 1 else f"{figures.fetches:,} fetches"
    return Verdict(
        kind="inconclusive",
        subtype="short",
        headline=f"Too short to judge: {count} in {took}.",
        evidence=(
            f"{count} and {took} of the steady phase: {_ASKED}, are asked for{stalled}",
            *system_lines(figures),
        ),
        action=_run_longer(needed),
        seconds_needed=needed,
    )


def _run_longer(needed: float) -> str:
    """In whole seconds: how much is needed is known no better."""
    return f"Let it run about {seconds(max(1.0, float(math.ceil(needed))))} longer."


def find_draining(given: Evidence) -> Verdict | None:
    drain = given.drain
    # A stall that is there already only grows when the queue is empty.
    if drain is None or drain.is_over or given.stall >= DATA_STALL:
        return None
    is_dry = drain.dry_step is not None
    return _just_dry(given, drain) if is_dry else _still_draining(given, drain)


def _steps(count: float) -> str:
    text = f"{count:,.0f}"
    return f"{text} step" if text == "1" else f"{text} steps"


def _still_draining(given: Evidence, drain: Drain) -> Verdict:
    figures = given.figures
    steps = drain.left / drain.batches_per_step
    pace = figures.measured_seconds / max(1, figures.steps)
    needed = steps * pace + _least_time(pace, figures.fetches / max(1, figures.steps))
    return Verdict(
        kind="inconclusive",
        subtype="draining",
        headline=f"The queue of ready batches is running dry: it is empty in {_steps(steps)}.",
        evidence=(
            f"the queue falls by {drain.batches_per_step:.3g} batches a step; about "
            f"{drain.left:,.1f} are left: {drain.left:,.1f} ÷ {drain.batches_per_step:.3g} = "
            f"{_steps(steps)}, {seconds(steps * pace)}",
            f"{stall_line(given)}, so far: waits are hidden until the queue is empty",
            *system_lines(figures),
        ),
        action=f"Let it run about {seconds(needed)} longer, {seconds(steps * pace)} to empty the "
        "queue and the rest to see what follows.",
        seconds_needed=needed,
    )


def _just_dry(given: Evidence, drain: Drain) -> Verdict:
    figures = given.figures
    fetches, lasted = drain.fetches_since, drain.seconds_since
    if not fetches:
        pace = figures.measured_seconds / max(1, figures.fetches)
        needed = _least_time(pace, 1.0)
    else:
        needed = _seconds_left(fetches, lasted)
    return Verdict(
        kind="inconclusive",
        subtype="draining",
        headline="The queue of ready batches has just run dry: what it hid has yet to show.",
        evidence=(
            f"the queue fell by {drain.batches_per_step:.3g} batches a step and was empty by step "
            f"{drain.dry_step:,}; {fetches:,} fetches and {seconds(lasted)} since: {_ASKED}, are "
            "asked for",
            f"{stall_line(given)}, so far: waits were hidden until the queue was empty",
            *system_lines(figures),
        ),
        action=f"Let it run about {seconds(needed)} longer.",
        seconds_needed=needed,
    )


def find_contradiction(given: Evidence) -> Verdict | None:
    figures = given.figures
    if figures.cached_stall_fraction is None or figures.stall_fraction is None:
        return None
    apart = figures.cached_stall_fraction - figures.stall_fraction
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
            f"by the waits the stall is {percent(figures.stall_fraction)}; with a cached batch a "
            f"step is {percent(figures.cached_stall_fraction)} shorter",
            f"more than {100 * MOST_CONTRADICTION:.0f} points apart (ours: half of MLPerf "
            f"Storage's 10 %): {why}",
            *system_lines(figures),
        ),
        action=actions.resolve_contradiction(given, apart),
    )


def name_error(figures: RunSummary, verdict: Verdict) -> Verdict:
    """The same verdict, if no error ended the run; else one that names it."""
    if figures.end_reason != "exception":
        return verdict
    error = _shorten(figures.error)
    if verdict.kind != "inconclusive" or verdict.subtype == "contradiction":
        line = f"the run ended with an error: {error}"
        return replace(verdict, evidence=(*verdict.evidence, line))
    return replace(
        verdict,
        headline=f"An error ended the run before it could be judged: {error}.",
        evidence=(verdict.headline, *verdict.evidence),
        action=f"Mend the error first, then measure again: {error}.",
        seconds_needed=None,
    )


def _shorten(error: str) -> str:
    lines = error.strip().splitlines()
    text = lines[0] if lines else "it left no message"
    return (text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…").rstrip(".")


def _seconds_left(fetches: int, lasted: float) -> float:
    """Until a steady phase of this pace can be judged."""
    by_fetches = (LEAST_FETCHES - fetches) * lasted / fetches
    return min(LEAST_SECONDS - lasted, max(by_fetches, LEAST_FETCHES_SECONDS - lasted))


def _least_time(pace: float, fetches_per_step: float) -> float:
    """How long a steady phase takes at this pace, in seconds a step."""
    by_fetches = LEAST_FETCHES * pace / max(1.0, fetches_per_step)
    return min(LEAST_SECONDS, max(by_fetches, LEAST_FETCHES_SECONDS))
