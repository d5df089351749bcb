"""Decide what limits a run: rules in order, the first that holds.

    memory → inconclusive → swap → memory that grows → cpu → checkpoint, evaluation → io → data
    → communication → start-up → compute → mixed

The order goes from what makes all other figures worthless to what is left over. A run that was
killed for want of memory is told so, however short it was. A swapping or busy machine also looks
like slow data, a full disk also looks like a slow loader: the cause comes first. Each
verdict prints the figures it rests on with their thresholds and where those come from (see
``evidence``), and names one thing to change (see ``advice``).

Checkpoints and evaluation decide where they cost more than waiting for data or communication does.
Start-up decides where nothing inside the loop does.

A run that cannot be judged (too short, warming up, or its queue draining) is told how much longer
it has to be, where that would help, and what the samples of the machine show all the same. A run
that an error ended is told of the error, not to be longer.

A run that was only watched from outside has no stall. Swap needs none; the disk is judged by the
share of time in which every task waited for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from fast_axolotl.measure import advice
from fast_axolotl.measure.evidence import Evidence
from fast_axolotl.measure.steps import WARMUP_STEPS
from fast_axolotl.record import Verdict, thresholds
from fast_axolotl.record.units import count_words, format_duration, format_seconds, format_share

_MOST_LETTERS = 200
_LEAST_GAIN, _MOST_GAIN = 0.01, 9.0
"""Below it nobody would see it; above it nobody should believe it."""
_MUCH_DRIFT = 1.5
"""Times that steps become longer, for the headline."""
_LOST = {
    "checkpoint": ("checkpoint", "Checkpoints take"),
    "evaluation": ("evaluation", "Evaluation takes"),
    "startup": ("startup", "Start-up takes"),
    "between": ("code", "Code between two loops takes"),
    "resume": ("startup", "Skipping rows that were already trained on takes"),
}


def judge(evidence: Evidence) -> Verdict:
    """The verdict on figures whose own verdict is not looked at."""
    rules: tuple[Callable[[Evidence], Verdict | None], ...] = (
        *(_memory, _unseen, _short, _draining),
        *(_swap, _growing, _cpu),
        lambda evidence: _lost(evidence, "checkpoint", "evaluation", "between"),
        *(_straggler, _code, _io, _data),
        *(_communication, lambda evidence: _lost(evidence, "startup", "resume"), _compute),
    )
    verdict = next(filter(None, (rule(evidence) for rule in rules)), None) or _mixed(evidence)
    figures, action = evidence.figures, verdict.action
    # Other parts of the wall clock that are large.
    lost = (part for part in _LOST if part != (verdict.subtype or verdict.kind))
    large = (part for part in lost if evidence.lost_share(part) >= thresholds.LOST_TIME)
    lines = list(map(evidence.lost_line, large))
    if verdict.gain is not None and verdict.gain >= _LEAST_GAIN:
        # Checkpoints, evaluation and start-up lie outside of the steps that tokens/s are of.
        outside = ("checkpoint", "evaluation", "startup", "between")
        is_outside = verdict.kind in outside or verdict.subtype in outside
        rate = "goodput" if is_outside else "tokens/s" if figures.tokens_per_second else "steps/s"
        action += f" Expect up to +{100 * min(verdict.gain, _MOST_GAIN):,.0f} % {rate}."
    is_near = (figures.limit_share or 0.0) >= thresholds.MEMORY_NEAR
    if verdict.kind != "memory" and figures.end_reason == "cut off" and is_near:
        text = (
            "the record has no end line, and the run used {limit_share} of its memory limit: if "
            "the run is over, it probably ran out of memory"
        )
        lines.append(evidence.say(text))
    if evidence.drift is not None:
        first, last = map(format_seconds, evidence.drift)
        lines.append(f"the work of a step grew from {first} to {last} during the run")
        if evidence.drift[1] >= _MUCH_DRIFT * evidence.drift[0]:
            headline = f"{verdict.headline} Steps became longer: {first}, then {last}."
            verdict = replace(verdict, headline=headline)
    if verdict.kind not in ("swap", "memory", "inconclusive"):
        lines += evidence.memory_lines()
    lines += evidence.growth_lines()
    verdict = replace(verdict, evidence=(*verdict.evidence, *lines), action=action)
    if (verdict.kind == "memory" and not verdict.subtype) or figures.end_reason != "exception":
        return verdict
    # The error comes first if there is no other verdict.
    text = next(iter(figures.error.strip().splitlines()), "no message was recorded")
    error = (text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…").rstrip(".")
    if verdict.kind != "inconclusive":
        line = f"the run ended with an error: {error}"
        return replace(verdict, evidence=(*verdict.evidence, line))
    is_early = verdict.subtype == "unseen" and not figures.steps
    when = "the first step" if is_early else "it could be judged"
    return replace(
        verdict,
        headline=f"The run failed before {when}: {error}.",
        evidence=verdict.evidence if is_early else (verdict.headline, *verdict.evidence),
        action=f"Fix this error first, then measure again: {error}.",
        seconds_needed=None,
    )


# When a run cannot be judged.


def _unseen(evidence: Evidence) -> Verdict | None:
    """No fetch was timed; but for swap and a full disk, which show from outside."""
    figures = evidence.figures
    if figures.fetches or (figures.warmup_steps and not figures.steps):
        return None
    if figures.steps and figures.stall_fraction is not None:
        return None
    if (swapping := _swap(evidence)) is not None:
        return swapping
    pressure, share = figures.psi_io_full or 0.0, figures.disk_share or 0.0
    if pressure >= thresholds.PRESSURE_IO and share >= thresholds.DISK_NEAR:
        line = (
            "every task waited for the disk {psi_io_full} of the time (Linux PSI, used instead of "
            "the stall; {PRESSURE_IO})"
        )
        return _io(evidence, evidence.say(line))
    if not figures.steps and figures.end_reason == "interrupted":
        how = figures.error if figures.error.startswith("stopped") else "interrupted"
        headline = f"The run was {how} before the first step."
        action = "Measure again, and let it train."
        return _verdict(evidence, "inconclusive", headline, (), action, subtype="unseen")
    for python, error in evidence.interpreters.items():
        if error and not figures.ranks:
            headline = f"The training was not measured: {python} cannot load fast-axolotl."
            action = f"Install it into that Python: {python} -m pip install fast-axolotl."
            return _verdict(evidence, "inconclusive", headline, [error], action, subtype="unseen")
    what = "data loader detected: no fetch" if figures.steps else "training loop detected: no step"
    seen = "" if figures.ranks else ", because the process was only watched from outside"
    headline = f"No {what} was recorded{seen}."
    lines = ("0 fetches of a training loop were timed", *evidence.system_lines())
    action = advice.see_fetches(evidence)
    return _verdict(evidence, "inconclusive", headline, lines, action, subtype="unseen")


def _short(evidence: Evidence) -> Verdict | None:
    """All steps are warm-up, or the steady phase is too short."""
    figures = evidence.figures
    if figures.steps and (figures.is_long_enough or evidence.is_settled):
        return None
    fetches, seconds = figures.fetches or figures.steps, figures.measured_seconds
    if not figures.steps:
        pace = figures.duration_seconds / max(1, figures.warmup_steps)
        needed = max(0, WARMUP_STEPS - figures.warmup_steps) * pace + _seconds_to_judge(pace)
        done = count_words(figures.warmup_steps, "step")
        line = f"0 steps after the warm-up, which takes at least {WARMUP_STEPS}"
        headline = f"The run ended during warm-up, after {done}."
        return _run_longer(evidence, "warming", headline, needed, line)
    count = count_words(fetches, "fetch" if figures.fetches else "step")
    count += f" in {format_duration(seconds)}"
    lines = [
        f"the steady phase has {count}; a verdict needs at least {thresholds.LEAST_FETCHES} "
        f"fetches over {thresholds.LEAST_FETCHES_SECONDS:.0f} s, or "
        f"{thresholds.LEAST_SECONDS:.0f} s"
    ]
    if evidence.figures.stall_fraction is not None:
        lines.append(evidence.stall_line())
    needed = _seconds_to_judge(seconds / fetches, fetches, seconds)
    return _run_longer(evidence, "short", f"Too short to judge: {count}.", needed, *lines)


def _draining(evidence: Evidence) -> Verdict | None:
    """The ready queue is running dry, or has just run dry: it hides what the loader lacks."""
    drain, figures = evidence.drain, evidence.figures
    # A stall that is there already only grows when the queue is empty.
    if drain is None or drain.is_over or evidence.stall >= thresholds.DATA_STALL:
        return None
    line = f"{evidence.stall_line()}, so far; waits are hidden until the queue is empty"
    if drain.dry_step is not None:
        headline = "The loader fell behind: its ready queue has just become empty."
        needed = _seconds_to_judge(figures.measured_seconds / max(1, figures.fetches))
        dry = f"the queue was empty by step {drain.dry_step:,}"
        return _run_longer(evidence, "draining", headline, needed, dry, line)
    headline, free = "The loader falls behind: its ready queue is emptying.", thresholds.FREE_STALL
    falls = (
        f"from the first half of the time to the second, the queue lost {format_share(free)} of a "
        "batch per fetch or more"
    )
    action = "Run longer, until the queue is empty or stays as deep as it is."
    told = (falls, line, *evidence.system_lines())
    return _verdict(evidence, "inconclusive", headline, told, action, subtype="draining")


def _run_longer(
    evidence: Evidence, subtype: str, headline: str, needed: float, *lines: str
) -> Verdict:
    # In whole seconds: how much is needed is known no better.
    action = f"Run about {format_duration(max(1.0, float(math.ceil(needed))))} longer."
    all_lines = (*lines, *evidence.system_lines())
    verdict = _verdict(evidence, "inconclusive", headline, all_lines, action, subtype=subtype)
    return replace(verdict, seconds_needed=needed)


def _verdict(
    evidence: Evidence,
    kind: str,
    headline: str,
    lines: Iterable[str],
    action: advice.Action | str,
    *,
    subtype: str = "",
) -> Verdict:
    text, gain = (action, None) if isinstance(action, str) else action
    return Verdict(
        kind=kind,
        subtype=subtype,
        headline=evidence.say(headline),
        evidence=tuple(lines),
        action=text,
        gain=gain,
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
    headline = "Probably out of memory: the run ended at {limit_share} of its memory limit."
    if kills:
        headline = f"Out of memory: the kernel killed {count_words(kills, 'process')}."
    if figures.limit_share is not None:
        line = (
            "the working set reached {limit_share} of its memory limit, {limit_bytes} "
            "({MEMORY_NEAR})"
        )
        lines.append(evidence.say(line))
    return _verdict(evidence, "memory", headline, lines, advice.lower_working_set(evidence))


def _swap(evidence: Evidence) -> Verdict | None:
    """The machine is short of memory."""
    figures, lines = evidence.figures, [*evidence.memory_lines()]
    # A short pressure of the whole machine does not explain a long wait; where the run fills the
    # memory itself, less is enough.
    is_full = (figures.limit_share or 0.0) >= thresholds.MEMORY_NEAR
    least = thresholds.PRESSURE_MEMORY if is_full else thresholds.BOUND_PRESSURE
    is_pressed = (figures.psi_memory_full or 0.0) >= max(
        least, evidence.stall / 2, evidence.beside / 2
    )
    if not lines or not (is_pressed or evidence.is_swapping):
        return None
    how = "it is swapping" if figures.is_swap_sustained else "its tasks wait for memory to be freed"
    if figures.limit_share is not None:
        line = "the working set reached {limit_share} of the memory available to it"
        lines.append(evidence.say(line))
    headline = (
        f"The machine is short of memory: {how}. Ignore the other figures until this is fixed."
    )
    return _verdict(evidence, "swap", headline, lines, advice.lower_working_set(evidence))


def _growing(evidence: Evidence) -> Verdict | None:
    """Memory grows with every step, and is full within a day."""
    first = next(iter(evidence.figures.growth), None)
    if first is None or (first.full_in_seconds or math.inf) > thresholds.FULL_SECONDS:
        return None
    full = format_duration(first.full_in_seconds or 0.0)
    return _verdict(
        evidence,
        "memory",
        f"Memory grows with every step, and is full in about {full}.",
        [evidence.stall_line()],
        f"Find what is kept from step to step in {first.part}: losses as tensors (use "
        "loss.item()), lists, caches, batches.",
        subtype="growing",
    )


def _cpu(evidence: Evidence) -> Verdict | None:
    """The run does not get the processors it asks for. One that fills them by itself does."""
    figures = evidence.figures
    # A small loss does not explain a long stall, nor what the loop itself does. A GPU that never
    # pauses has lost nothing, nor has a run that hardly asks for a processor.
    least = max(thresholds.CPU_LOST, evidence.stall / 2, evidence.beside)
    subtype = next((name for name, share in evidence.cpu_losses.items() if share >= least), "")
    if (figures.gpu_utilization or 0.0) > 1.0 - thresholds.CPU_LOST or not subtype:
        return None
    if subtype == "others" and (figures.cpu_cores or 0.0) < thresholds.LEAST_OWN_CORES:
        return None
    lines = [*evidence.cpu_lines()]
    if figures.cpu_cores is not None:
        lines.append(f"the run itself used {figures.cpu_cores:.1f} CPU cores on average")
    if figures.stall_fraction is not None:
        lines.append(evidence.stall_line())
    headlines = {
        "quota": "The CPU quota slows the run down.",
        "steal": "The hypervisor slows the run down: it gives CPU time to other machines.",
        "others": "The machine is busy: other programs take the CPU cores.",
    }
    action = advice.FREE_PROCESSORS[subtype]
    return _verdict(evidence, "cpu", headlines[subtype], lines, action, subtype=subtype)


def _io(evidence: Evidence, waiting: str = "") -> Verdict | None:
    """The loop waits for data, and the disk is full, or every task waits for it."""
    if not waiting and evidence.stall < thresholds.DATA_STALL:
        return None
    figures, waiting = evidence.figures, waiting or evidence.stall_line("{DATA_STALL}")
    share, subtype = figures.disk_share or 0.0, "random" if evidence.is_random else ""
    line = "{read_bytes_per_second} read from the disk"
    if figures.disk_request_bytes is not None:
        line += " in requests of {disk_request_bytes} on average"
    if share >= thresholds.DISK_NEAR:
        subtype = subtype or ("near" if share < thresholds.DISK_FULL else "")
        headline = "The disk is the limit: reads use {disk_share} of its capacity."
        line += (
            ", {disk_share} of the {disk_bytes_per_second} the disk reached in a test with "
            f"O_DIRECT ({{DISK_NEAR}}; {100 * thresholds.DISK_FULL:.0f} % is full: queueing makes "
            "a read take 1 ÷ (1 − share) times as long)"
        )
    elif (figures.psi_io_full or 0.0) >= thresholds.PRESSURE_IO:
        headline = "The disk is the limit: every task waits for it {psi_io_full} of the time."
        line += "; waits by Linux PSI ({PRESSURE_IO})"
    else:
        return None
    gain = advice.possible_gain(evidence.stall) if evidence.stall else None
    action = advice.Action(advice.read_less(evidence), gain)
    lines = (waiting, evidence.say(line))
    return _verdict(evidence, "io", headline, lines, action, subtype=subtype)


# What costs the wall clock beside the steps.


def _lost(evidence: Evidence, *parts: str) -> Verdict | None:
    """Training stands still for checkpoints or evaluation, longer than it waits for data. Or much
    of the time goes before the first step, and nothing inside the loop is the limit."""
    seconds = evidence.figures.ledger
    part = max(parts, key=lambda name: seconds.get(name, 0.0))
    share, (kind, what) = evidence.lost_share(part), _LOST[part]
    least = thresholds.LEAST_STARTUP_SECONDS
    if kind != "startup":
        larger = ("data", "communication", "preparing", "code")
        least = max(seconds.get(name, 0.0) for name in larger)
    if share < thresholds.LOST_TIME or seconds[part] < least:
        return None
    headline = f"{what} {format_share(share)} of the wall clock."
    line = evidence.say(f"{evidence.lost_line(part)} ({{LOST_TIME}})")
    action = advice.lose_less(evidence, part)
    lines, subtype = (line, evidence.stall_line()), "" if kind == part else part
    return _verdict(evidence, kind, headline, lines, action, subtype=subtype)


# What bounds a run that can be judged.


def _straggler(evidence: Evidence) -> Verdict | None:
    """One rank takes longer than the others for something else than data."""
    lost = evidence.figures.straggler_fraction or 0.0
    if not evidence.holds_up or lost < max(thresholds.DATA_STALL, evidence.stall):
        return None
    lines = [*evidence.rank_lines(), *evidence.window_lines(), evidence.stall_line()]
    lines += evidence.phase_lines()
    headline, action = _straggling(evidence), advice.even_out(evidence)
    return _verdict(evidence, "communication", headline, lines, action, subtype="skew")


def _code(evidence: Evidence) -> Verdict | None:
    """The loop does something else than to load, to prepare and to train."""
    share, data = evidence.phases.cost("other"), evidence.stall + evidence.phases.cost("preparing")
    if share < thresholds.LOST_TIME or share < max(data, evidence.exposed):
        return None
    place = evidence.line_of("other")
    headline = f"Code beside the model takes {format_share(share)} of the time"
    lines = [*evidence.phase_lines(), evidence.stall_line(), *evidence.cpu_lines()]
    action = advice.Action(
        f"Look at {place or 'the loop'}: do it less often, in another thread, or not at all.",
        advice.possible_gain(share),
    )
    return _verdict(evidence, "code", f"{headline}{place and ': '}{place}.", lines, action)


def _data(evidence: Evidence) -> Verdict | None:
    """The loop waits for data, or prepares it."""
    figures, prepared = evidence.figures, evidence.phases.cost("preparing")
    if evidence.stall + prepared < thresholds.DATA_STALL:
        return None
    if prepared > evidence.stall:
        place = evidence.line_of("preparing")
        headline = f"Preparing batches in the loop takes {format_share(prepared)} of the time"
        action = advice.prepare_in_workers(evidence, place, prepared)
        lines = [*evidence.phase_lines(), evidence.stall_line(), *evidence.cpu_lines()]
        return _verdict(
            *(evidence, "data", f"{headline}{place and ': '}{place}.", lines, action),
            subtype="prepare",
        )
    what = {
        "rate": "The loader is too slow",
        "burst": "Data arrives in bursts",
        "periodic": "Data is occasionally very late",
    }[evidence.pattern]
    queue = []
    if figures.queue_depth is not None and figures.queue_capacity:
        text = (
            "{depth:.1f} of {capacity} batches are ready when a fetch begins; the median fetch "
            "takes {wait_p50_seconds}"
        )
        depth, capacity = figures.queue_depth, figures.queue_capacity
        queue.append(evidence.say(text, depth=depth, capacity=capacity))
    headline = f"{what}: {{stall_fraction}} of the time is spent waiting for data."
    if figures.straggler_part == "data":
        place = evidence.line_of("loading") or evidence.line_of("waiting")
        headline = f"{evidence.compare_ranks('wait')}: {what[:1].lower()}{what[1:]} there"
        headline += f"{place and ', at '}{place}."
    lines = [evidence.stall_line("{DATA_STALL}"), *evidence.rank_lines()]
    lines += [*evidence.pattern_lines(), *queue, *evidence.phase_lines()]
    lines += [*evidence.hidden_lines(), *evidence.cpu_lines()]
    action = advice.feed(evidence)
    return _verdict(evidence, "data", headline, lines, action, subtype=evidence.pattern)


def _communication(evidence: Evidence) -> Verdict | None:
    """Ranks wait for the network."""
    if evidence.exposed < thresholds.BOUND_COMMUNICATION:
        return None
    lines = [*evidence.window_lines(), evidence.stall_line()]
    headline = "Communication between the ranks is the limit."
    action = advice.talk_less(evidence)
    return _verdict(evidence, "communication", headline, lines, action, subtype="network")


def _compute(evidence: Evidence) -> Verdict | None:
    """The model hardly waits, and it is what takes the time."""
    figures = evidence.figures
    if figures.stall_fraction is None or evidence.stall >= thresholds.FREE_STALL:
        return None
    phases, lines = evidence.phases, []
    is_unprofiled = figures.world_size > 1 and figures.exposed_communication_fraction is None
    is_model = phases.model >= thresholds.MOST_COMPUTE if phases.step else not is_unprofiled
    if evidence.exposed >= thresholds.FREE_COMMUNICATION or not is_model:
        return None
    if is_unprofiled:
        lines.append(
            f"how much of it is communication of the {figures.world_size} ranks was not measured: "
            "use fast-axolotl measure --profile-steps 5"
        )
    if figures.world_size == 1 and figures.device_stall_fraction is not None:
        lines.append(
            "one GPU has no communication, so N GPUs will give less than N times its tokens/s; "
            "fast-axolotl plan predicts how much less"
        )
    elif figures.exposed_communication_fraction is not None:
        lines.append(_EXPOSED)
    if figures.mfu is not None:
        lines.append("MFU {mfu}")
    if figures.device_idle_fraction is not None:
        lines.append("the profiler saw the GPU idle {device_idle_fraction} of the time")
    what = "What the loop does with a batch" if phases.is_foreign else "The model"
    headline = f"{what} is the limit: it hardly ever waits for data."
    better = advice.even_out if evidence.holds_up else advice.compute_better
    told = [evidence.stall_line("{FREE_STALL}"), *map(evidence.say, lines)]
    told += [*evidence.phase_lines(), *evidence.hidden_lines(), *evidence.rank_lines()]
    told += evidence.cpu_lines()
    headline = _straggling(evidence) if evidence.holds_up else headline
    return _verdict(evidence, "compute", headline, told, better(evidence))


def _straggling(evidence: Evidence) -> str:
    place = evidence.line_of(evidence.slow_phase)
    headline = f"{evidence.compare_ranks('work')}: it costs them {{straggler_fraction}} of the time"
    return f"{headline}{place and ', at '}{place}."


_EXPOSED = "exposed communication {exposed_communication_fraction} ({FREE_COMMUNICATION})"


def _mixed(evidence: Evidence) -> Verdict:
    """Something of everything: the larger part is named and acted on."""
    figures = evidence.figures
    lines = []
    if figures.exposed_communication_fraction is not None:
        lines.append(evidence.say(_EXPOSED))
    is_waiting = evidence.stall >= thresholds.FREE_STALL
    is_talking = evidence.exposed >= thresholds.FREE_COMMUNICATION
    lost = figures.straggler_fraction or 0.0
    if evidence.holds_up and lost >= max(evidence.stall, evidence.exposed):
        headline, action = _straggling(evidence), advice.even_out(evidence)
    elif figures.stall_fraction is None:
        headline = "No single limit: the stall was not measured."
        action = advice.Action(advice.see_fetches(evidence))
    elif is_talking and not (is_waiting and evidence.stall >= evidence.exposed):
        headline = "No single limit: {exposed_communication_fraction} of the time is spent only "
        headline += "on communication."
        action = advice.talk_less(evidence)
    elif is_waiting:
        headline = "No single limit: {stall_fraction} of the time is spent waiting for data."
        action = advice.feed(evidence)
    else:
        headline = "Data is not the limit: the model or the communication is (not measured which)."
        why = figures.reasons.get("exposed_communication_fraction", "no profiler window")
        lines.append(f"communication of the {figures.world_size} ranks was not measured: {why}")
        text = "Record a profiler window: fast-axolotl measure --profile-steps 5 -- COMMAND."
        if not why.startswith("no profiler window"):
            # A window that saw no communication is not asked for again.
            text = f"Also measure one rank, and compare both with fast-axolotl scale: {why}."
        action = advice.Action(text)
    limits = f"under {100 * thresholds.FREE_STALL:.0f} % is fine; "
    limits += f"{100 * thresholds.DATA_STALL:.0f} % or more is data-bound"
    told = [evidence.stall_line(limits), *lines, *evidence.rank_lines()]
    told += [*evidence.pattern_lines(), *evidence.hidden_lines()]
    return _verdict(evidence, "mixed", headline, told, action)
