"""What bounds a run: one rule after the other, the first that holds decides.

    memory → inconclusive → swap → cpu → checkpoint, evaluation → io → data → communication
    → start-up → compute → mixed

The order goes from what makes all other figures worthless to what is left over. A run that was
killed for want of memory is told so, however short it was. A swapping or busy machine also looks
like slow data, a full disk also looks like a slow loader: the cause comes first. Each
verdict prints the figures it rests on with their thresholds and where those come from (see
``evidence``), and names one thing to change (see ``advice``).

Checkpoints and evaluation decide where they cost more than waiting for data or communication does.
Start-up decides where nothing inside the loop does. ``judge_change`` is for runs that changed.

A run that cannot be judged (too short, warming up, or its queue draining) is told how much longer
it has to be, where that would help, and what the samples of the machine show all the same. A run
that an error ended is told of the error, not to be longer.

A run that was only watched from outside has no stall. Swap needs none; the disk is judged by the
share of time in which every task waited for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from fast_axolotl.measure import advice
from fast_axolotl.measure.evidence import MLPERF, Evidence, below
from fast_axolotl.measure.stall_pattern import LateChange
from fast_axolotl.measure.steps import WARMUP_STEPS
from fast_axolotl.record import RunSummary, Verdict, thresholds
from fast_axolotl.record.figures import VerdictKind
from fast_axolotl.record.units import (
    count_words,
    format_bytes,
    format_duration,
    format_rate,
    format_share,
)

_MOST_LETTERS = 200
_LEAST_GAIN = 0.01
"""Below it nobody would see it."""
_LOST: dict[str, tuple[VerdictKind, str, Callable[[Evidence], str]]] = {
    "checkpoint": ("checkpoint", "Checkpoints take", advice.save_less),
    "evaluation": ("evaluation", "Evaluation takes", advice.evaluate_less),
    "startup": ("startup", "Start-up takes", advice.start_faster),
    "resume": ("startup", "Skipping rows that were already trained on takes", advice.resume_faster),
}
_OF_THE_LOOP = ("io", "data", "communication", "compute", "mixed")
"""Verdicts that a change of the stall sets aside, and that may take their place."""


def judge(evidence: Evidence) -> Verdict:
    """The verdict on figures whose own verdict is not looked at."""
    rules: tuple[Callable[[Evidence], Verdict | None], ...] = (
        *(_memory, _unseen, _warming, _short, _draining),
        *(_swap, _cpu, _interruption, _io, _data, _communication, _startup, _compute),
    )
    verdicts = (verdict for rule in rules if (verdict := rule(evidence)) is not None)
    verdict = next(verdicts, None) or _mixed(evidence)
    lines = evidence.lost_lines(but=verdict.subtype or verdict.kind)
    verdict = replace(verdict, evidence=(*verdict.evidence, *lines))
    figures = evidence.figures
    if verdict.gain is not None and verdict.gain >= _LEAST_GAIN:
        # Checkpoints, evaluation and start-up lie outside of the steps that tokens/s are of.
        is_outside = verdict.kind in ("checkpoint", "evaluation", "startup")
        rate = "goodput" if is_outside else "tokens/s" if figures.tokens_per_second else "steps/s"
        expected = f"Expect up to +{100 * verdict.gain:,.0f} % {rate}."
        verdict = replace(verdict, action=f"{verdict.action} {expected}")
    if verdict.kind == "memory":
        return verdict
    if figures.end_reason == "cut off" and (figures.limit_share or 0.0) >= thresholds.MEMORY_NEAR:
        line = (
            f"the record has no end line, and the run used {format_share(figures.limit_share)} of "
            "its memory limit: if the run is over, it probably ran out of memory"
        )
        return replace(verdict, evidence=(*verdict.evidence, line))
    return _tell_error(verdict, figures) if figures.end_reason == "exception" else verdict


def _tell_error(verdict: Verdict, figures: RunSummary) -> Verdict:
    """The verdict on a run that an error ended; the error comes first if there is no other."""
    text = next(iter(figures.error.strip().splitlines()), "no message was recorded")
    error = (text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…").rstrip(".")
    if verdict.kind != "inconclusive":
        line = f"the run ended with an error: {error}"
        return replace(verdict, evidence=(*verdict.evidence, line))
    return replace(
        verdict,
        headline=f"The run failed before it could be judged: {error}.",
        evidence=(verdict.headline, *verdict.evidence),
        action=f"Fix this error first, then measure again: {error}.",
        seconds_needed=None,
    )


# When a run cannot be judged.


def _unseen(evidence: Evidence) -> Verdict | None:
    """No fetch was timed; but for swap and a full disk, which show from outside."""
    figures = evidence.figures
    if figures.fetches or (figures.warmup_steps and not figures.steps):
        return None
    swapping = _swap(evidence)
    if swapping is not None:
        return swapping
    pressure, share = figures.psi_io_full or 0.0, figures.disk_share or 0.0
    if pressure >= thresholds.PRESSURE_IO and share >= thresholds.DISK_NEAR:
        line = (
            f"every task waited for the disk {format_share(pressure)} of the time (Linux PSI, "
            f"used instead of the stall; {below(thresholds.PRESSURE_IO)})"
        )
        return _slow_disk(evidence, line)
    what = "data loader detected: no fetch" if figures.steps else "training loop detected: no step"
    seen = "" if figures.ranks else ", because the process was only watched from outside"
    headline = f"No {what} was recorded{seen}."
    lines = ("0 fetches of a training loop were timed",)
    return _inconclusive(evidence, "unseen", headline, lines, action=advice.see_fetches(evidence))


def _warming(evidence: Evidence) -> Verdict | None:
    """All steps are warm-up."""
    figures = evidence.figures
    if figures.fetches:
        return None
    pace = evidence.warmup_step_seconds
    if pace is None:
        pace = figures.duration_seconds / max(1, figures.warmup_steps)
    needed = max(0, WARMUP_STEPS - figures.warmup_steps) * pace + _seconds_to_judge(pace)
    headline = f"The run ended during warm-up, after {count_words(figures.warmup_steps, 'step')}."
    lines = (f"0 steps after the warm-up, which takes at least {WARMUP_STEPS}",)
    return _inconclusive(evidence, "warming", headline, lines, needed=needed)


def _short(evidence: Evidence) -> Verdict | None:
    """The steady phase is too short."""
    figures = evidence.figures
    fetches, seconds = figures.fetches, figures.measured_seconds
    if thresholds.is_long_enough(fetches, seconds):
        return None
    count = f"{count_words(fetches, 'fetch')} in {format_duration(seconds)}"
    lines = [
        f"the steady phase has {count}; a verdict needs at least {thresholds.LEAST_FETCHES} "
        f"fetches over {thresholds.LEAST_FETCHES_SECONDS:.0f} s, or "
        f"{thresholds.LEAST_SECONDS:.0f} s"
    ]
    if figures.stall_fraction is not None:
        lines.append(evidence.stall_line())
    needed = _seconds_to_judge(seconds / fetches, fetches, seconds)
    headline = f"Too short to judge: {count}."
    return _inconclusive(evidence, "short", headline, lines, needed=needed)


def _draining(evidence: Evidence) -> Verdict | None:
    """The ready queue is running dry, or has just run dry: it hides what the loader lacks."""
    drain, figures = evidence.drain, evidence.figures
    # A stall that is there already only grows when the queue is empty.
    if drain is None or drain.is_over or evidence.stall >= thresholds.DATA_STALL:
        return None
    pace = figures.measured_seconds / max(1, figures.fetches)
    if drain.dry_step is None:
        steps = drain.left / drain.batches_per_step
        needed = steps * figures.measured_seconds / max(1, figures.steps) + _seconds_to_judge(pace)
        in_steps = count_words(round(steps), "step")
        headline = f"The loader falls behind: its ready queue will be empty in {in_steps}."
        now = f"holds about {drain.left:,.1f}"
    else:
        since = drain.fetches_since
        pace = drain.seconds_since / since if since else pace
        needed = _seconds_to_judge(pace, since, drain.seconds_since)
        headline = "The loader fell behind: its ready queue has just become empty."
        now = f"was empty by step {drain.dry_step:,}"
    lines = (
        f"the queue shrinks by {drain.batches_per_step:.3g} batches per step and {now}",
        f"{evidence.stall_line()}, so far; waits are hidden until the queue is empty",
    )
    return _inconclusive(evidence, "draining", headline, lines, needed=needed)


def _inconclusive(
    evidence: Evidence,
    subtype: str,
    headline: str,
    lines: Sequence[str],
    *,
    action: str = "",
    needed: float | None = None,
) -> Verdict:
    if needed is not None:
        # In whole seconds: how much is needed is known no better.
        longer = format_duration(max(1.0, float(math.ceil(needed))))
        action = f"Run about {longer} longer."
    return Verdict(
        kind="inconclusive",
        subtype=subtype,
        headline=headline,
        evidence=(*lines, *evidence.system_lines()),
        action=action,
        seconds_needed=needed,
    )


def _seconds_to_judge(pace: float, fetches: int = 0, seconds: float = 0.0) -> float:
    """Until a steady phase with these fetches can be judged, at this pace in seconds a fetch."""
    by_fetches = (thresholds.LEAST_FETCHES - fetches) * pace
    return min(
        thresholds.LEAST_SECONDS - seconds,
        max(by_fetches, thresholds.LEAST_FETCHES_SECONDS - seconds),
    )


# What the machine does to a run.


def _memory(evidence: Evidence) -> Verdict | None:
    """The run, or a part of it, was killed for want of memory."""
    figures = evidence.figures
    kills, share = figures.oom_kills or 0, figures.limit_share or 0.0
    if evidence.killed and figures.oom_kills is None:
        # Without a cgroup of the run's own, the kernel counts for the whole machine.
        kills = evidence.machine_oom_kills
    if not kills and not (evidence.killed and share >= thresholds.MEMORY_NEAR):
        return None
    lines = [evidence.killed] if evidence.killed else []
    used = f"{format_share(share)} of its memory limit"
    headline = f"Probably out of memory: the run ended at {used}."
    if kills:
        headline = f"Out of memory: the kernel killed {count_words(kills, 'process')}."
    if figures.limit_share is not None:
        lines.append(
            f"the working set reached {used}, {format_bytes(figures.limit_bytes)} "
            f"({below(thresholds.MEMORY_NEAR)})"
        )
    if evidence.memory_growth:
        lines.append(f"memory that grew: {evidence.memory_growth}")
    return Verdict(
        kind="memory",
        headline=headline,
        evidence=tuple(lines),
        action=advice.lower_working_set(evidence),
    )


def _swap(evidence: Evidence) -> Verdict | None:
    """The machine is short of memory."""
    figures = evidence.figures
    lines = evidence.memory_lines()
    if not lines:
        return None
    how = "it is swapping" if figures.is_swap_sustained else "its tasks wait for memory to be freed"
    if figures.limit_share is not None:
        share = format_share(figures.limit_share)
        lines.append(f"the working set reached {share} of the memory available to it")
    return Verdict(
        kind="swap",
        headline=f"The machine is short of memory: {how}. Ignore the other figures until this "
        "is fixed.",
        evidence=tuple(lines),
        action=advice.lower_working_set(evidence),
    )


def _cpu(evidence: Evidence) -> Verdict | None:
    """The run does not get the processors it asks for. One that fills them by itself does."""
    figures = evidence.figures
    # A small loss does not explain a long stall, and a GPU that never pauses has lost nothing.
    least = max(thresholds.CPU_LOST, evidence.stall / 2)
    subtype = next((name for name, share in evidence.cpu_losses.items() if share >= least), "")
    is_gpu_busy = (figures.gpu_utilization or 0.0) > 1.0 - thresholds.CPU_LOST
    if is_gpu_busy or not subtype:
        return None
    lines = evidence.cpu_lines()
    if figures.cpu_cores is not None:
        lines.append(f"the run itself used {figures.cpu_cores:.1f} CPU cores on average")
    if figures.stall_fraction is not None:
        lines.append(evidence.stall_line())
    headlines = {
        "quota": "The CPU quota slows the run down.",
        "steal": "The hypervisor slows the run down: it gives CPU time to other machines.",
        "others": "The machine is busy: other programs take the CPU cores.",
    }
    return Verdict(
        kind="cpu",
        subtype=subtype,
        headline=headlines[subtype],
        evidence=tuple(lines),
        action=advice.FREE_PROCESSORS[subtype],
    )


def _io(evidence: Evidence) -> Verdict | None:
    """The loop waits for data, and the disk is full, or every task waits for it."""
    if evidence.stall < thresholds.DATA_STALL:
        return None
    return _slow_disk(evidence, evidence.stall_line(below(thresholds.DATA_STALL, MLPERF)))


def _slow_disk(evidence: Evidence, waiting: str) -> Verdict | None:
    figures = evidence.figures
    share, pressure = figures.disk_share or 0.0, figures.psi_io_full or 0.0
    size, subtype = figures.disk_request_bytes, "random" if evidence.is_random else ""
    reads = f"{format_rate(figures.read_bytes_per_second)} read from the disk"
    reads += "" if size is None else f" in requests of {format_bytes(size)} on average"
    if share >= thresholds.DISK_NEAR:
        subtype = subtype or ("near" if share < thresholds.DISK_FULL else "")
        headline = f"The disk is the limit: reads use {format_share(share)} of its capacity."
        line = (
            f"{reads}, {format_share(share)} of the {format_rate(figures.disk_bytes_per_second)} "
            f"the disk reached in a test with O_DIRECT ({below(thresholds.DISK_NEAR, '')}; "
            f"{100 * thresholds.DISK_FULL:.0f} % is full: queueing makes a read take "
            "1 ÷ (1 − share) times as long)"
        )
    elif pressure >= thresholds.PRESSURE_IO:
        waited = format_share(pressure)
        headline = f"The disk is the limit: every task waits for it {waited} of the time."
        line = f"{reads}; waits by Linux PSI ({below(thresholds.PRESSURE_IO)})"
    else:
        return None
    return Verdict(
        kind="io",
        subtype=subtype,
        headline=headline,
        evidence=(waiting, line),
        action=advice.read_less(evidence),
        gain=advice.possible_gain(evidence.stall) if evidence.stall else None,
    )


# What costs the wall clock beside the steps, and when that changed.


def _interruption(evidence: Evidence) -> Verdict | None:
    """Training stands still for checkpoints or evaluation, longer than it waits for data."""
    seconds = evidence.figures.ledger
    part = max(("checkpoint", "evaluation"), key=lambda name: seconds.get(name, 0.0))
    losses = (seconds.get(name, 0.0) for name in ("data", "communication"))
    is_largest = seconds.get(part, 0.0) > max(losses)
    return _lost(evidence, part) if is_largest else None


def _startup(evidence: Evidence) -> Verdict | None:
    """Much of the time goes before the first step, and nothing inside the loop is the limit."""
    seconds = evidence.figures.ledger
    part = max(("startup", "resume"), key=lambda name: seconds.get(name, 0.0))
    is_long = seconds.get(part, 0.0) >= thresholds.LEAST_STARTUP_SECONDS
    return _lost(evidence, part) if is_long else None


def _lost(evidence: Evidence, part: str) -> Verdict | None:
    share = evidence.lost_share(part)
    if share < thresholds.LOST_TIME:
        return None
    kind, what, advise = _LOST[part]
    return Verdict(
        kind=kind,
        subtype="" if kind == part else part,
        headline=f"{what} {format_share(share)} of the wall clock.",
        evidence=(
            f"{evidence.lost_line(part)} ({below(thresholds.LOST_TIME)})",
            evidence.stall_line(),
        ),
        action=advise(evidence),
        gain=share / (1.0 - share) if share < 1.0 else None,
    )


def judge_change(
    verdict: Verdict, figures: RunSummary, change: LateChange, late: RunSummary
) -> Verdict:
    """The verdict on a run whose stall changed; ``late`` is the summary since then."""
    if verdict.kind not in _OF_THE_LOOP or late.verdict.kind not in _OF_THE_LOOP:
        return verdict
    headline = late.verdict.headline
    if late.verdict.kind != verdict.kind:
        headline = f"Since step {change.first_step:,}, {headline[:1].lower()}{headline[1:]}"
    line = (
        f"these figures are for the last {format_duration(late.duration_seconds)}; before, the "
        f"stall was {format_share(change.stall_before)}, and that of the whole run is "
        f"{format_share(figures.stall_fraction)}"
    )
    return replace(late.verdict, headline=headline, evidence=(*late.verdict.evidence, line))


# What bounds a run that can be judged.


def _data(evidence: Evidence) -> Verdict | None:
    """The loop waits for data."""
    figures = evidence.figures
    if evidence.stall < thresholds.DATA_STALL:
        return None
    what = {
        "rate": "The loader is too slow",
        "burst": "Data arrives in bursts",
        "periodic": "Data is occasionally very late",
    }[evidence.pattern]
    action, gain = advice.feed(evidence)
    stall = format_share(figures.stall_fraction)
    return Verdict(
        kind="data",
        subtype=evidence.pattern,
        headline=f"{what}: {stall} of the time is spent waiting for data.",
        evidence=(
            evidence.stall_line(below(thresholds.DATA_STALL, MLPERF)),
            *evidence.rank_lines(),
            *evidence.pattern_lines(),
            *evidence.loader_lines(),
            *evidence.hidden_lines(),
            *evidence.cpu_lines(),
        ),
        action=action,
        gain=gain,
    )


def _communication(evidence: Evidence) -> Verdict | None:
    """Ranks wait for the network, or for one of them."""
    figures = evidence.figures
    if evidence.exposed < thresholds.BOUND_COMMUNICATION:
        return None
    lines = [
        f"in {format_share(evidence.exposed)} of the profiled time, only communication ran "
        f"({below(thresholds.BOUND_COMMUNICATION)})"
    ]
    if figures.pure_communication_fraction is not None:
        pure, skew = figures.pure_communication_fraction, evidence.skew_share
        lines.append(
            f"the transfers alone (each collective on its fastest rank) take {format_share(pure)} "
            f"of the time; {format_share(skew)} of the communication is waiting for the last rank"
        )
    headline = "Communication between the ranks is the limit."
    if evidence.is_skewed:
        headline = (
            f"The ranks wait for rank {evidence.slow_rank}, which reaches their collectives last."
        )
    action, gain = _communicate_better(evidence)
    return Verdict(
        kind="communication",
        subtype="skew" if evidence.is_skewed else "network",
        headline=headline,
        evidence=(*lines, evidence.stall_line()),
        action=action,
        gain=gain,
    )


def _communicate_better(evidence: Evidence) -> advice.Action:
    return advice.even_out(evidence) if evidence.is_skewed else advice.talk_less(evidence)


def _compute(evidence: Evidence) -> Verdict | None:
    """The model never waits."""
    figures = evidence.figures
    if figures.stall_fraction is None or evidence.stall >= thresholds.FREE_STALL:
        return None
    is_unprofiled = figures.world_size > 1 and figures.exposed_communication_fraction is None
    if evidence.exposed >= thresholds.FREE_COMMUNICATION or is_unprofiled:
        return None
    lines = [evidence.stall_line(below(thresholds.FREE_STALL))]
    if figures.world_size == 1 and figures.device_stall_fraction is not None:
        lines.append(
            "one GPU has no communication, so N GPUs will give less than N times its tokens/s; "
            "fast-axolotl plan predicts how much less"
        )
    elif figures.exposed_communication_fraction is not None:
        limit = below(thresholds.FREE_COMMUNICATION)
        lines.append(f"exposed communication {format_share(evidence.exposed)} ({limit})")
    if figures.mfu is not None:
        lines.append(f"MFU {format_share(figures.mfu)}")
    if figures.device_idle_fraction is not None:
        idle = format_share(figures.device_idle_fraction)
        lines.append(f"the profiler saw the GPU idle {idle} of the time")
    headline = "The model is the limit: it hardly ever waits for data."
    small = evidence.small_batch_lines()
    if small:
        headline = "The batch is too small for the GPU: steps are short, and throughput is low."
    better = advice.even_out if evidence.holds_up else advice.compute_better
    action, gain = better(evidence)
    return Verdict(
        kind="compute",
        headline=_straggling(evidence) if evidence.holds_up else headline,
        evidence=(
            *lines,
            *small,
            *evidence.hidden_lines(),
            *evidence.rank_lines(),
            *evidence.cpu_lines(),
        ),
        action=action,
        gain=gain,
    )


def _straggling(evidence: Evidence) -> str:
    lost = format_share(evidence.figures.straggler_fraction)
    return (
        f"Rank {evidence.figures.straggler_rank} is slow: it costs the others {lost} of the time."
    )


def _mixed(evidence: Evidence) -> Verdict:
    """Something of everything: the larger part is named and acted on."""
    figures = evidence.figures
    stall, exposed = format_share(evidence.stall), format_share(evidence.exposed)
    free, bound = (100 * share for share in (thresholds.FREE_STALL, thresholds.DATA_STALL))
    lines = [
        evidence.stall_line(f"under {free:.0f} % is fine; {bound:.0f} % or more is data-bound")
    ]
    if figures.exposed_communication_fraction is not None:
        lines.append(f"exposed communication {exposed} ({below(thresholds.FREE_COMMUNICATION)})")
    is_waiting = evidence.stall >= thresholds.FREE_STALL
    is_talking = evidence.exposed >= thresholds.FREE_COMMUNICATION
    lost = figures.straggler_fraction or 0.0
    if evidence.holds_up and lost >= max(evidence.stall, evidence.exposed):
        headline, action = _straggling(evidence), advice.even_out(evidence)
    elif figures.stall_fraction is None:
        headline = "No single limit: the stall was not measured."
        action = advice.Action(advice.see_fetches(evidence))
    elif is_talking and not (is_waiting and evidence.stall >= evidence.exposed):
        headline = f"No single limit: {exposed} of the time is spent only on communication."
        action = _communicate_better(evidence)
    elif is_waiting:
        headline = f"No single limit: {stall} of the time is spent waiting for data."
        action = advice.feed(evidence)
    else:
        headline = "Data is not the limit: the model or the communication is (not measured which)."
        why = figures.reasons.get("exposed_communication_fraction", "no profiler window")
        lines.append(f"communication of the {figures.world_size} ranks was not measured: {why}")
        action = advice.Action(advice.profile(evidence))
    return Verdict(
        kind="mixed",
        headline=headline,
        evidence=(
            *lines,
            *evidence.rank_lines(),
            *evidence.pattern_lines(),
            *evidence.hidden_lines(),
        ),
        action=action.text,
        gain=action.gain,
    )
