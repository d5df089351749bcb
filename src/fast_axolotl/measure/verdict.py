"""What bounds a run: one rule after the other, the first that holds decides.

    inconclusive → swap → io → data → communication → compute → mixed

The order goes from what makes all other figures worthless to what is left over. A swapping machine
also looks like slow data, a full disk also looks like a slow loader: the cause comes first. Each
verdict prints the figures it rests on with their thresholds and where those come from, and names
one thing to change (see ``actions``). A run that cannot be judged is told how long it has to be.

A run that was only watched from outside has no stall. Swap needs none; the disk is judged by the
share of time in which every task waited for it.
"""

from __future__ import annotations

from collections.abc import Callable

from fast_axolotl.measure import actions
from fast_axolotl.measure.evidence import (
    BOUND_COMMUNICATION,
    DATA_STALL,
    DISK_FULL,
    DISK_NEAR,
    FREE_COMMUNICATION,
    FREE_STALL,
    LEAST_SKEW_SHARE,
    MLPERF,
    Evidence,
    hidden_lines,
    loader_lines,
    memory_lines,
    pattern_lines,
    rank_lines,
    stall_line,
    swap_lines,
    system_lines,
)
from fast_axolotl.measure.inconclusive import (
    find_contradiction,
    find_draining,
    find_short,
    find_warming,
)
from fast_axolotl.measure.wording import percent, rate
from fast_axolotl.record import RunSummary, Verdict

__all__ = ["judge"]


def judge(
    figures: RunSummary,
    *,
    source: str = "",
    decided_by: int | None = None,
    skew_share: float | None = None,
    slow_rank: int | None = None,
) -> Verdict:
    """The verdict on figures whose own verdict is not looked at."""
    given = Evidence(
        figures=figures,
        source=source,
        decided_by=decided_by,
        skew_share=skew_share,
        slow_rank=slow_rank,
    )
    rules: tuple[Callable[[Evidence], Verdict | None], ...] = (
        _unseen,
        find_warming,
        find_short,
        find_draining,
        find_contradiction,
        _swap,
        _io,
        _data,
        _communication,
        _compute,
    )
    for rule in rules:
        found = rule(given)
        if found is not None:
            return found
    return _mixed(given)


def _unseen(given: Evidence) -> Verdict | None:
    one = given.figures
    if one.fetches or (one.warmup_steps and not one.steps):
        return None
    known = _swap(given) or _io_unseen(given)
    if known is not None:
        return known
    what = "no step was" if not one.steps else "steps were seen, but no fetch was"
    seen = "" if one.ranks else ", and the process was watched from outside only"
    return Verdict(
        kind="inconclusive",
        subtype="unseen",
        headline=f"There is nothing to judge the data by: {what} recorded{seen}.",
        evidence=("0 fetches of a training loop were timed", *system_lines(given)),
        action=actions.see_fetches(given.source),
    )


def _swap(given: Evidence) -> Verdict | None:
    lines = swap_lines(given.figures)
    if not lines:
        return None
    return Verdict(
        kind="swap",
        headline="The machine is short of memory: it swaps, and every other figure is worthless.",
        evidence=(*lines, *memory_lines(given.figures)),
        action=actions.lower_working_set(given.figures),
    )


def _io(given: Evidence) -> Verdict | None:
    if given.stall < DATA_STALL:
        return None
    return _full_disk(given, stall_line(given, f"threshold 10 %: {MLPERF}"))


def _io_unseen(given: Evidence) -> Verdict | None:
    pressure = given.figures.psi_io_full
    if pressure is None or pressure < DATA_STALL:
        return None
    line = (
        f"in {percent(pressure)} of the time every task waited for a disk (Linux PSI io full; it "
        f"stands in for the stall, threshold 10 %: {MLPERF})"
    )
    return _full_disk(given, line)


def _full_disk(given: Evidence, waiting: str) -> Verdict | None:
    one = given.figures
    if one.disk_share is None or one.disk_share < DISK_NEAR:
        return None
    is_near = one.disk_share < DISK_FULL
    word = "nearly as fast as" if is_near else "as fast as"
    return Verdict(
        kind="io",
        subtype="near" if is_near else "",
        headline=f"The disk is the limit: data is read {word} its device gives it.",
        evidence=(
            waiting,
            f"{rate(one.read_bytes_per_second)} from the device, {percent(one.disk_share)} of the "
            f"{rate(one.disk_bytes_per_second)} that O_DIRECT reads reached (threshold 70 %, "
            "and 90 % is full: by queueing a read takes 1 ÷ (1 − share) as long)",
        ),
        action=actions.read_less(one),
    )


def _data(given: Evidence) -> Verdict | None:
    one = given.figures
    if given.stall < DATA_STALL:
        return None
    subtype = {"burst": "burst", "periodic": "periodic"}.get(one.stall_pattern, "rate")
    stall = percent(one.stall_fraction)
    headlines = {
        "rate": f"The loader is too slow: {stall} of the time goes into waiting for data.",
        "burst": f"The data comes in bursts: {stall} of the time goes into waiting for it.",
        "periodic": f"Now and then the data is late by much: {stall} of the time goes into it.",
    }
    return Verdict(
        kind="data",
        subtype=subtype,
        headline=headlines[subtype],
        evidence=(
            stall_line(given, f"threshold 10 %: {MLPERF}"),
            *rank_lines(given),
            *pattern_lines(one),
            *loader_lines(one),
            *hidden_lines(one),
        ),
        action=actions.feed(one, subtype),
    )


def _communication(given: Evidence) -> Verdict | None:
    one = given.figures
    if given.exposed < BOUND_COMMUNICATION:
        return None
    is_skew = given.skew_share is not None and given.skew_share >= LEAST_SKEW_SHARE
    exposed = (
        f"in {percent(one.exposed_communication_fraction)} of the profiled time only "
        "communication ran (threshold 20 %: ours, twice the line of data)"
    )
    lines = [exposed]
    if one.pure_communication_fraction is not None:
        lines.append(
            f"every collective at its shortest across ranks takes "
            f"{percent(one.pure_communication_fraction)}; {percent(given.skew_share)} of the "
            "communication is waiting for the last rank"
        )
    who = f"rank {given.slow_rank}"
    return Verdict(
        kind="communication",
        subtype="skew" if is_skew else "network",
        headline=f"The ranks wait for {who}, which comes last to their collectives."
        if is_skew
        else "Communication between the ranks is the limit.",
        evidence=(*lines, stall_line(given)),
        action=actions.even_out(one, given.slow_rank) if is_skew else actions.talk_less(one),
    )


def _compute(given: Evidence) -> Verdict | None:
    one = given.figures
    if one.stall_fraction is None or given.stall >= FREE_STALL:
        return None
    if given.exposed >= FREE_COMMUNICATION or _is_unprofiled(one):
        return None
    lines = [stall_line(given, "threshold 5 %: ours, half of MLPerf Storage's 10 %")]
    if one.exposed_communication_fraction is not None:
        lines.append(
            f"exposed communication {percent(given.exposed)} (threshold 10 %: ours, half of bound)"
        )
    if one.mfu is not None:
        lines.append(f"MFU {percent(one.mfu)}")
    if one.device_idle_fraction is not None:
        lines.append(f"the profiler saw the device idle {percent(one.device_idle_fraction)}")
    return Verdict(
        kind="compute",
        headline="The model is the limit: it hardly ever waits for data.",
        evidence=(*lines, *hidden_lines(one), *rank_lines(given)),
        action=actions.compute_better(one),
    )


def _mixed(given: Evidence) -> Verdict:
    one = given.figures
    stall, exposed = percent(one.stall_fraction), percent(one.exposed_communication_fraction)
    lines = [stall_line(given, "5 % or less is free of it, 10 % or more is bound by it")]
    if one.exposed_communication_fraction is not None:
        lines.append(f"exposed communication {exposed} (10 % or less is free, 20 % or more bound)")
    headline = f"No single limit: {stall} of the time goes into waiting for data."
    action = actions.feed(
        one, {"burst": "burst", "periodic": "periodic"}.get(one.stall_pattern, "rate")
    )
    if one.stall_fraction is None:
        headline, action = (
            "No single limit: the stall is not known.",
            actions.see_fetches(given.source),
        )
    elif given.stall < FREE_STALL and given.exposed >= FREE_COMMUNICATION:
        headline = f"No single limit: {exposed} of the time only communication runs."
        action = actions.talk_less(one)
    elif given.stall < FREE_STALL:
        headline = "Not the data: the model or the communication, which were not told apart."
        lines.append(
            f"{one.world_size} ranks, and no profiler window that shows their communication"
        )
        action = actions.profile()
    return Verdict(
        kind="mixed",
        headline=headline,
        evidence=(*lines, *rank_lines(given), *pattern_lines(one), *hidden_lines(one)),
        action=action,
    )


def _is_unprofiled(one: RunSummary) -> bool:
    return one.world_size > 1 and one.exposed_communication_fraction is None
