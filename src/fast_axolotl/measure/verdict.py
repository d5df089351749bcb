"""What bounds a run: one rule after the other, the first that holds decides.

    inconclusive → swap → io → data → communication → compute → mixed

The order goes from what makes all other figures worthless to what is left over. A swapping machine
also looks like slow data, a full disk also looks like a slow loader: the cause comes first. Each
verdict prints the figures it rests on with their thresholds and where those come from, and names
one thing to change (see ``actions`` and ``feeding``). A run that cannot be judged is told how long
it has to be (see ``inconclusive``).

A run that was only watched from outside has no stall. Swap needs none; the disk is judged by the
share of time in which every task waited for it.
"""

from __future__ import annotations

from collections.abc import Callable

from fast_axolotl.measure import actions
from fast_axolotl.measure.evidence import (
    MLPERF,
    Evidence,
    drain_lines,
    hidden_lines,
    loader_lines,
    memory_lines,
    pattern_lines,
    pressure_lines,
    rank_lines,
    stall_line,
    swap_lines,
)
from fast_axolotl.measure.feeding import feed
from fast_axolotl.measure.inconclusive import (
    find_contradiction,
    find_draining,
    find_short,
    find_unseen,
    find_warming,
    name_error,
)
from fast_axolotl.measure.ready_queue import Drain
from fast_axolotl.measure.wording import percent, rate
from fast_axolotl.record import RunSummary, Verdict
from fast_axolotl.record.thresholds import (
    BOUND_COMMUNICATION,
    DATA_STALL,
    DISK_FULL,
    DISK_NEAR,
    FREE_COMMUNICATION,
    FREE_STALL,
    LEAST_SKEW_SHARE,
)

__all__ = ["judge"]


def judge(
    figures: RunSummary,
    *,
    source: str = "",
    decided_by: int | None = None,
    skew_share: float | None = None,
    slow_rank: int | None = None,
    local_ranks: int | None = None,
    warmup_step_seconds: float | None = None,
    drain: Drain | None = None,
) -> Verdict:
    """The verdict on figures whose own verdict is not looked at."""
    given = Evidence(
        figures=figures,
        source=source,
        decided_by=decided_by,
        skew_share=skew_share,
        slow_rank=slow_rank,
        local_ranks=local_ranks,
        warmup_step_seconds=warmup_step_seconds,
        drain=drain,
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
    found = (verdict for rule in rules if (verdict := rule(given)) is not None)
    return name_error(figures, next(found, None) or _mixed(given))


def _unseen(given: Evidence) -> Verdict | None:
    unseen = find_unseen(given)
    return unseen and (_swap(given) or _io_unseen(given) or unseen)


def _swap(given: Evidence) -> Verdict | None:
    figures = given.figures
    swapped, pressed = swap_lines(figures), pressure_lines(figures)
    if not swapped and not pressed:
        return None
    how = "it swaps" if swapped else "its tasks wait for memory to be freed"
    return Verdict(
        kind="swap",
        headline=f"The machine is short of memory: {how}, and every other figure is worthless.",
        evidence=(*swapped, *pressed, *memory_lines(figures)),
        action=actions.lower_working_set(given),
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
    figures = given.figures
    if figures.disk_share is None or figures.disk_share < DISK_NEAR:
        return None
    is_near = figures.disk_share < DISK_FULL
    word = "nearly as fast as" if is_near else "as fast as"
    return Verdict(
        kind="io",
        subtype="near" if is_near else "",
        headline=f"The disk is the limit: data is read {word} its device gives it.",
        evidence=(
            waiting,
            f"{rate(figures.read_bytes_per_second)} from the device, "
            f"{percent(figures.disk_share)} of the {rate(figures.disk_bytes_per_second)} that "
            "O_DIRECT reads reached (threshold 70 %, and 90 % is full: by queueing a read takes "
            "1 ÷ (1 − share) as long)",
        ),
        action=actions.read_less(given),
    )


def _data(given: Evidence) -> Verdict | None:
    figures = given.figures
    if given.stall < DATA_STALL:
        return None
    stall = percent(figures.stall_fraction)
    headlines = {
        "rate": f"The loader is too slow: {stall} of the time goes into waiting for data.",
        "burst": f"The data comes in bursts: {stall} of the time goes into waiting for it.",
        "periodic": f"Now and then the data is late by much: {stall} of the time goes into it.",
    }
    return Verdict(
        kind="data",
        subtype=given.pattern,
        headline=headlines[given.pattern],
        evidence=(
            stall_line(given, f"threshold 10 %: {MLPERF}"),
            *rank_lines(given),
            *drain_lines(given),
            *pattern_lines(figures),
            *loader_lines(figures),
            *hidden_lines(figures),
        ),
        action=feed(given),
    )


def _communication(given: Evidence) -> Verdict | None:
    figures = given.figures
    if given.exposed < BOUND_COMMUNICATION:
        return None
    exposed = (
        f"in {percent(figures.exposed_communication_fraction)} of the profiled time only "
        "communication ran (threshold 20 %: ours, twice the line of data)"
    )
    lines = [exposed]
    if figures.pure_communication_fraction is not None:
        lines.append(
            f"every collective at its shortest across ranks takes "
            f"{percent(figures.pure_communication_fraction)}; {percent(given.skew_share)} of the "
            "communication is waiting for the last rank"
        )
    who = f"rank {given.slow_rank}"
    return Verdict(
        kind="communication",
        subtype="skew" if _is_skewed(given) else "network",
        headline=f"The ranks wait for {who}, which comes last to their collectives."
        if _is_skewed(given)
        else "Communication between the ranks is the limit.",
        evidence=(*lines, stall_line(given)),
        action=_communicate_better(given),
    )


def _is_skewed(given: Evidence) -> bool:
    return given.skew_share is not None and given.skew_share >= LEAST_SKEW_SHARE


def _communicate_better(given: Evidence) -> str:
    return actions.even_out(given) if _is_skewed(given) else actions.talk_less(given)


def _compute(given: Evidence) -> Verdict | None:
    figures = given.figures
    if figures.stall_fraction is None or given.stall >= FREE_STALL:
        return None
    is_unprofiled = figures.world_size > 1 and figures.exposed_communication_fraction is None
    if given.exposed >= FREE_COMMUNICATION or is_unprofiled:
        return None
    lines = [stall_line(given, "threshold 5 %: ours, half of MLPerf Storage's 10 %")]
    if figures.exposed_communication_fraction is not None:
        lines.append(
            f"exposed communication {percent(given.exposed)} (threshold 10 %: ours, half of bound)"
        )
    if figures.mfu is not None:
        lines.append(f"MFU {percent(figures.mfu)}")
    if figures.device_idle_fraction is not None:
        lines.append(f"the profiler saw the device idle {percent(figures.device_idle_fraction)}")
    return Verdict(
        kind="compute",
        headline="The model is the limit: it hardly ever waits for data.",
        evidence=(
            *lines,
            *hidden_lines(figures),
            *rank_lines(given),
            *drain_lines(given),
        ),
        action=actions.compute_better(given),
    )


def _mixed(given: Evidence) -> Verdict:
    """Something of everything: the larger part is named and acted on."""
    figures = given.figures
    lines = [stall_line(given, "less than 5 % is free of it, 10 % or more is bound by it")]
    if figures.exposed_communication_fraction is not None:
        exposed = percent(given.exposed)
        lines.append(
            f"exposed communication {exposed} (less than 10 % is free, 20 % or more is bound)"
        )
    is_waiting = given.stall >= FREE_STALL
    is_talking = given.exposed >= FREE_COMMUNICATION
    if figures.stall_fraction is None:
        headline = "No single limit: the stall is not known."
        action = actions.see_fetches(given)
    elif is_talking and not (is_waiting and given.stall >= given.exposed):
        headline = f"No single limit: {percent(given.exposed)} of the time only communication runs."
        action = _communicate_better(given)
    elif is_waiting:
        headline = (
            f"No single limit: {percent(given.stall)} of the time goes into waiting for data."
        )
        action = feed(given)
    else:
        headline = "Not the data: the model or the communication, which were not told apart."
        lines.append(
            f"{figures.world_size} ranks, and no profiler window that shows their communication"
        )
        action = actions.profile()
    return Verdict(
        kind="mixed",
        headline=headline,
        evidence=(
            *lines,
            *rank_lines(given),
            *drain_lines(given),
            *pattern_lines(figures),
            *hidden_lines(figures),
        ),
        action=action,
    )
