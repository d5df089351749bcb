"""Compute all figures of a run from its record.

Every figure is a ratio of sums over the steady phase; nothing here looks at the machine it runs on.
The stall is the job's, and one rank decides about the data (see ``ranks``): waits of fetches, queue
and steps are its own. Rows, samples, tokens and bytes are summed over the ranks that fetch.
Whatever is missing is ``None`` with one sentence in ``reasons``: the one that the meter or the
watcher wrote down, else what the record lacks.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from typing import Any

from fast_axolotl.measure.evidence import Evidence
from fast_axolotl.measure.flops import utilisation
from fast_axolotl.measure.ledger import fold_ledger
from fast_axolotl.measure.machine import find_growth, fold_machines, growth
from fast_axolotl.measure.phases import MODEL, Phases, fold_phases, looks_error
from fast_axolotl.measure.ranks import (
    Job,
    RankFigures,
    find_capacity,
    find_drift,
    find_pattern,
    fold_job,
    fold_rank,
    mean_depth,
    number_of,
    others_span_seconds,
)
from fast_axolotl.measure.verdict import judge
from fast_axolotl.record import RunRecord, RunSummary, Verdict
from fast_axolotl.record.arithmetic import finite, ratio, times, total
from fast_axolotl.record.catalogue import FIGURES

_NOTED = ("error", "clock_step", "note")
"""Marks that a reader of the figures should know of."""
_MOST_NOTES = 5
_LATE = ("meter", "watch")
"""Who begins to sample when the process has already run for a while."""
_KILLED = ("exit code -9", "exit code 137")
"""How a command ends that signal 9 ended, or whose shell tells so."""
_LOST_CHILD = re.compile(
    "killed by signal: Killed|exited unexpectedly|SIGKILL|exitcode: -9|EOFError|ConnectionReset"
)
"""How torch tells of a worker or a rank that was killed: by its signal, or by its end of a pipe."""
_SIGNALLED = re.compile(r"exit code (-\d+|1[3-5]\d)")


def summarise(record: RunRecord, *, since: float | None = None) -> RunSummary:
    """Every figure of a run, its verdict, and a reason for every figure that is missing.

    ``since`` leaves out the steps that ended before it, in seconds since 1970.
    """
    if since is not None:
        later = {}
        for number, rank in record.ranks.items():
            begin = since - rank.start.time + 1e-3
            blocks = [block for block in rank.blocks if block.t > begin]
            phases = [phase for phase in rank.phases if phase.t > begin]
            later[number] = replace(rank, blocks=blocks, phases=phases)
        record = replace(record, ranks=later)
    job = fold_job([fold_rank(record.ranks[number]) for number in sorted(record.ranks)])
    fold = _Fold(record, job)
    fold.add_course()
    fold.add_stall()
    fold.add_reading()
    fold.add_flops()
    fold.add_machines()
    fold.add_job()
    divided = fold.add_phases()
    for name, value in fold_ledger(record, job, divided, since).items():
        fold.put(name, value, "", "tokens")
    figures = {name: fold.values.pop(name) for name in FIGURES}
    nothing = Verdict(kind="inconclusive", headline="")
    draft = RunSummary(verdict=nothing, figures=figures, reasons=fold.reasons, **fold.values)
    chosen = job.chosen
    system = record.systems.get(draft.node)
    source = "" if record.system is None else record.system.start.source
    error = chosen.stall_error
    if draft.stall_source == "stacks":
        error = looks_error(draft.stall_fraction or 0.0, draft.measured_seconds)
    # Any queue that is emptying, else the one of the rank that decides.
    drains = (one.drain for one in job.ranks if one.drain is not None and not one.drain.is_over)
    verdict = judge(
        Evidence(
            figures=draft,
            phases=divided,
            source=chosen.record.start.source if job.ranks else source,
            stall_error=error,
            drift=find_drift(chosen.steady_blocks),
            skew_share=job.skew_share,
            slow_phase=job.straggler_phase if job.straggler_part == "compute" else "",
            drain=next(drains, chosen.drain),
            interpreters=record.interpreters,
            killed=_find_kill(record),
            machine_oom_kills=growth(system.samples, "machine_oom_kills") or 0 if system else 0,
        )
    )
    return replace(draft, verdict=verdict)


class _Fold:
    """The fields of a summary while it is made: figures as they are found, and a reason for each
    that is missing."""

    def __init__(self, record: RunRecord, job: Job) -> None:
        self.record, self.job, self.rank = record, job, job.chosen
        self.values: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}
        ranks = [*record.ranks.values(), self.rank.record]
        self._recorded = {name: text for rank in ranks for name, text in rank.reasons.items()}
        self.unseen = ""
        """Why there is no steady phase, if there is none."""
        if not self.rank.steady.steps:
            self.unseen = "no step of the steady phase was recorded"

    def put(
        self, name: str, value: Any, reason: str = "", *sources: str, is_system: bool = False
    ) -> None:
        """Set a field. Where the value is missing, the reason is the one that the meter recorded
        under the field's name or that of one of its sources, else the one given here, else the
        catalogue's."""
        self.values[name] = value
        if value is not None:
            return
        recorded = [self._recorded[key] for key in (name, *sources) if key in self._recorded]
        if recorded and not is_system:
            self.reasons[name] = recorded[0]
        elif not self.record.ranks and not is_system:
            self.reasons[name] = "the training process was not measured from inside"
        elif reason or name in FIGURES:
            self.reasons[name] = reason or FIGURES[name].missing

    def put_steady(self, name: str, value: Any, reason: str = "", *sources: str) -> None:
        """Set a field that takes steps of the steady phase."""
        self.put(name, value, self.unseen or reason, *sources)

    def add_course(self) -> None:
        """What ran, when, how it ended, and what to know of it."""
        record, job, ranks = self.record, self.job, self.job.ranks
        system = record.system
        starts = [rank.record.start for rank in ranks]
        dates = [start.time for start in starts] or ([system.start.time] if system else [0.0])
        environment: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        for rank in reversed(ranks):
            environment.update(rank.record.start.environment)
            settings.update(rank.settings)

        ends = [rank.record.end for rank in ranks] or ([system.end] if system else [])
        errors: dict[str, str] = {} if ranks else {end.reason: end.error for end in ends if end}
        # An error of one rank becomes one of all: the earliest counts.
        ended = [
            (rank.record.start.time + rank.record.end.t, rank.rank, rank.record.end)
            for rank in ranks
            if rank.record.end
        ]
        for _, number, end in sorted(ended):
            is_named = end.error and end.reason == "exception" and job.world_size > 1
            text = f"rank {number}: {end.error}" if is_named else end.error
            errors.setdefault(end.reason, text)
        reason = "cut off" if None in ends or not ends else "finished"
        reason = next((name for name in ("exception", "interrupted") if name in errors), reason)
        if ranks and reason in ("cut off", "finished"):
            # Who supervised the command knows its exit code, also where a rank could not tell.
            commands = [node.end for node in record.systems.values() if node.start.source == "run"]
            failed = [end for end in commands if end is not None and end.reason != "finished"]
            if failed:
                reason, errors[failed[0].reason] = failed[0].reason, failed[0].error
            elif commands and None not in commands:
                reason = "finished"

        notes = [*record.notes, *filter(None, [_find_kill(record)])]
        if ranks and len(ranks) < job.world_size:
            found = f"only {len(ranks)} of {job.world_size} ranks"
            text = f"{found} left a record, and sums cover only those"
            most = max(Counter(start.host for start in starts).values())
            if job.world_size - len(ranks) >= most:
                text += (
                    "; if other nodes recorded on their own disks, copy their rank-*.jsonl and "
                    "system-*.jsonl files into this folder"
                )
            notes.append(text)
        for rank in ranks:
            texts = [mark.text or mark.name for mark in rank.record.marks if mark.name in _NOTED]
            notes += [f"rank {rank.rank}: {text}" for text in dict.fromkeys(texts[:_MOST_NOTES])]
        if self.rank.is_long_enough:
            # Ranks that recorded too little to decide, where another decides.
            notes += [
                f"rank {rank.rank} is too short to judge: its steady phase has "
                f"{rank.steady.fetches:,} fetches"
                for rank in job.readers
                if not rank.is_long_enough
            ]
        settings.pop("replacements", None)
        replaced = [one.settings["replacements"] for one in ranks if "replacements" in one.settings]
        names = tuple(dict.fromkeys(itertools.chain(*replaced))) if replaced else None
        self.put("replacements", names, "the record does not name them")
        self.put("deciding_rank", self.rank.rank if ranks else None, "no rank left a record")
        self.values.update(
            run_dir=record.path,
            started=min(dates),
            is_finished=reason == "finished",
            end_reason=reason,
            error="" if reason == "finished" else errors.get(reason, ""),
            world_size=job.world_size,
            settings=settings,
            environment=environment,
            notes=tuple(notes),
            ranks=tuple(rank.summary() for rank in ranks),
        )

    def add_stall(self) -> None:
        """How much the job waited; how long the rank that decides did, in which pattern, and its
        ready queue and steps."""
        rank, job = self.rank, self.job
        steady, blocks, waits = rank.steady, rank.steady_blocks, rank.waits
        self.values.update(
            steps=steady.steps,
            fetches=steady.fetches,
            warmup_steps=rank.warmup.steps,
            measured_seconds=steady.wall_seconds,
            stall_source=job.source,
        )
        first_step = blocks[0].first_step if blocks else None
        self.put_steady("first_steady_step", first_step, "the steady phase has no duration")
        self.put_steady("stall_fraction", job.stall_fraction)
        self.put_steady("host_stall_fraction", job.host_stall_fraction)
        self.put_steady(
            "device_stall_fraction", job.device_stall_fraction, "", "device_wait_seconds"
        )
        for name, share in {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}.items():
            self.put_steady(f"wait_{name}_seconds", waits.quantile(share), "", "host_waits")
            self.put_steady(f"step_{name}_seconds", rank.step_times.quantile(share))
        self.put_steady("steps_per_second", ratio(steady.steps, steady.wall_seconds))
        # Shares of the host's waiting, by what happened meanwhile; the rest is the loader's.
        causes: dict[str, float] = {}
        waited = steady.host_wait_seconds
        for block in blocks if waited > 0 else ():
            for name, seconds in block.waits_by_cause.items():
                causes[name] = causes.get(name, 0.0) + (finite(seconds) or 0.0) / waited
        if causes:
            causes["loader"] = max(0.0, 1.0 - sum(causes.values()))
        kind, fetches, follows = find_pattern(waits, causes) if steady.fetches else ("", None, "")
        self.values.update(
            waits_by_cause=dict(sorted(causes.items(), key=lambda item: -item[1])),
            stall_pattern=kind,
            stall_period_of=follows,
        )
        self.put_steady("stall_period_fetches", fetches)
        per_fetch = ratio(steady.count("samples"), steady.fetches)
        no_rows = "" if fetches is None else "samples were not counted"
        self.put_steady("stall_period_rows", times(fetches, per_fetch or None), no_rows)
        self.put_steady("queue_depth", mean_depth(blocks))
        self.put("queue_capacity", find_capacity(rank.settings))
        # Seconds from the begin of the first fetch to a mark; from the start where it has no mark.
        first: dict[str, float] = {}
        for mark in rank.record.marks:
            first.setdefault(mark.name, mark.t)
        for name in ("first_batch", "first_step"):
            since = finite(first[name] - first.get("first_fetch", 0.0)) if name in first else None
            self.put(f"{name}_seconds", since, "", name)
        # From the start of the process: imports and prepared data come before the first fetch.
        record, reason, taken = self.record, "", None
        own, system = record.ranks.get(min(record.ranks, default=0)), record.system
        steps = [mark.t for mark in own.marks if mark.name == "first_step"] if own else []
        if not record.is_first_training:
            reason = "an earlier training of the same run"
        elif system is not None and system.start.source not in _LATE:
            reason = "no step was recorded"
            if own is not None and steps:
                taken = own.start.time + steps[0] - system.start.time
        self.put("start_to_step_seconds", taken, reason, is_system=True)

    def add_reading(self) -> None:
        """What crosses the boundary between loader and model, and what the loader could give."""
        readers, copies = self.job.readers, self.job.copies
        kinds = ("samples", "rows", "real_tokens", "trainable_tokens", "padded_tokens")
        walls = [one.steady.wall_seconds - others_span_seconds(one, readers) for one in readers]

        def sum_rates(kind: str) -> float | None:
            """Over ranks, of which so many see the same; ``None`` where one did not count."""
            counts = [rank.steady.count(kind) for rank in readers]
            known = list(map(ratio, counts, walls))
            return None if None in known else ratio(total(known), copies)

        rates = {kind: sum_rates(kind) for kind in kinds}
        # Where some batches could not be counted, there is no sum.
        samples = None if "samples" in self._recorded else rates["samples"] or None
        rows = rates["rows"]
        uncounted = "the batches have no first dimension along which to count samples"
        packed = "samples are packed, and the rows in them were not counted"
        is_packed = any(map(_is_packed, self.job.ranks))
        rows = samples if rows is None and not is_packed else rows
        self.put_steady("samples_per_second", samples, uncounted, "samples")
        no_rows = packed if is_packed else uncounted
        self.put_steady("rows_per_second", rows, no_rows, "rows", "samples")
        rows_per_sample = ratio(rows, samples)
        # What the model would take if no rank ever waited.
        stall = self.job.stall_fraction
        demand = times(ratio(samples, None if stall is None else 1.0 - stall), rows_per_sample)
        self.put_steady("demand_rows_per_second", demand, no_rows, "rows", "samples")
        # Ranks meet at every step, so the slowest reader sets the pace of all.
        reading = []
        for rank in readers:
            steady, workers = rank.steady, number_of(rank.settings, "num_workers")
            # The share of the time in which what reads is at work: the loop itself, or workers.
            # Workers idle while a model is evaluated, too, but never while the loop waits.
            busy = None if workers is None else rank.loading
            busy = steady.host_stall_fraction if workers == 0 else busy
            busy = busy and max(busy, steady.host_stall_fraction or 0.0)
            reading.append(ratio(ratio(steady.count("samples"), steady.wall_seconds), busy))
        slowest = None if None in reading else min(filter(None, reading), default=None)
        reader = times(ratio(times(slowest, len(readers)), copies), rows_per_sample)
        has_workers = any(number_of(rank.settings, "num_workers") for rank in readers)
        unknown = "" if has_workers else "it is not known whether the loader reads ahead"
        if reader is not None and rows is not None:
            reader = max(reader, rows)  # what was consumed has been delivered
        self.put_steady("reader_rows_per_second", reader, unknown)
        self.put_steady("reader_ratio", ratio(reader, rows))
        for kind in kinds[2:]:
            name = kind.removeprefix("real_")
            is_partial = any(kind in rank.steady.counts for rank in readers)
            reason = "some batches were not counted, so there is no sum" if is_partial else ""
            self.put_steady(f"{name}_per_second", rates[kind], reason, name)
        filled = ratio(rates["real_tokens"], rates["padded_tokens"])
        self.put_steady("padding_share", None if filled is None else 1.0 - filled)
        squares, tokens = (
            total(rank.steady.count(f"sequence_{name}") for rank in readers)
            for name in ("squares", "tokens")
        )
        self.put_steady("mean_attended_length", ratio(squares, tokens), "", "sequence_tokens")

    def add_flops(self) -> None:
        """The model's arithmetic, and how much of the hardware it uses."""
        ranks, job = self.job.ranks, self.job
        shapes = [rank.record.models[-1] for rank in ranks if rank.record.models]
        # Devices of the ranks whose tokens are counted: all, where rank 0 reads for all.
        num_devices = None
        if shapes and job.is_dispatched:
            num_devices = job.world_size * shapes[0].num_devices
        elif shapes:
            missing = max(0, len(job.readers) - len(shapes))
            num_devices = sum(shape.num_devices for shape in shapes)
            num_devices += missing * shapes[0].num_devices
        figures, reasons = utilisation(
            shapes[0] if shapes else None,
            tokens_per_second=self.values["tokens_per_second"],
            attended_length=self.values["mean_attended_length"],
            num_devices=num_devices,
        )
        for name, value in figures.items():
            sources = ("mfu", "model") if name == "peak_tflops" else ("model",)
            self.put(name, value, reasons.get(name, ""), *sources)

    def add_machines(self) -> None:
        """Memory, processors, disk, swap and GPUs."""
        values, reasons, notes = fold_machines(self.record, self.job.ranks)
        for name, value in values.items():
            self.put(name, value, reasons.get(name, ""), is_system=True)
        self.values["notes"] += tuple(notes)
        system = self.record.systems.get(values["node"])
        self.values["growth"] = find_growth(system, self.rank)

    def add_phases(self) -> Phases:
        """Where the time of a step goes, by looks at the stack of the rank that decides, or of the
        one that works longer than the others."""
        values, slow = self.values, self.job.figures["straggler_rank"]
        is_slow = self.job.straggler_part == "compute"
        late = (one for one in self.job.ranks if is_slow and one.rank == slow)
        rank = next(late, self.rank)
        idle = None
        if "cuda_memory" in values["settings"]:
            busy = values["gpu_utilization"]
            idle = values["device_idle_fraction"] if busy is None else 1.0 - busy
            idle = (idle or 0.0) - (self.job.device_stall_fraction or 0.0)
        also = self.job.straggler_phase if is_slow else ""
        phases = fold_phases(rank, self.job.host_stall_fraction, idle, also)
        for phase in ("preparing", *MODEL, "other"):
            share = phases.step.get(phase, 0.0) if phases.step else None
            self.put_steady(f"{phase}_fraction", share, "", "phases")
        values.update(phases=phases.step, where=phases.lines)
        if rank.is_fed_unseen:
            # Then the stall is what the looks at the stack say.
            share = phases.step.get("waiting", 0.0) if phases.step else None
            if share is not None and idle is not None:
                share = min(share, max(0.0, idle))
            self.job.host_stall_fraction = share
            values["stall_source"] = "stacks" if phases.step else ""
            if why := self._recorded.get("stall_fraction"):
                values["notes"] += (why,)
            why = "no DataLoader was seen, and the stack was not looked at"
            for name in ("stall_fraction", "host_stall_fraction"):
                self.reasons.pop(name, None)
                self.put(name, share, why)
        return phases

    def add_job(self) -> None:
        """What ranks lose to each other, and what the meter itself costs."""
        job, rank, end = self.job, self.rank, self.rank.record.end
        unknown = "the sizes of tensor and context parallel groups are not known"
        for name, value in job.figures.items():
            put = self.put_steady if name.startswith("straggler") else self.put
            reason = unknown if name == "data_parallel_size" else ""
            put(name, value, job.reasons.get(name, reason))
        self.values["straggler_part"] = job.straggler_part
        self.values["notes"] += tuple(filter(None, [job.reasons.get("data_parallel_size")]))

        per_fetch = ratio(end.overhead_seconds, end.overhead_fetches) if end else None
        reason = "the record ends before the meter wrote its own cost"
        if end is not None:
            reason = "the meter timed no fetch"
        self.put("overhead_seconds_per_fetch", per_fetch, reason)
        share = ratio(times(per_fetch, rank.steady.fetches), rank.steady.wall_seconds)
        no_share = reason if per_fetch is None else self.unseen or reason
        self.put("overhead_fraction", share, no_share)


def _is_packed(rank: RankFigures) -> bool:
    """By a setting, by the model's trainer, or because the batches look like it: of rows that are
    not packed the meter has nothing to explain."""
    return (
        bool(rank.settings.get("sample_packing"))
        or any(model.is_packed for model in rank.record.models)
        or "rows_per_second" in rank.record.reasons
        or (rank.steady.count("rows") or 0) > (rank.steady.count("samples") or 0)
    )


def _find_kill(record: RunRecord) -> str:
    """What of the run was killed by signal 9, or ended without a word; empty where nothing was."""
    commands = [system.end for system in record.systems.values() if system.end is not None]
    for end in commands:
        if end.error in _KILLED:
            return f"signal 9 (SIGKILL) ended the command: {end.error}"
    ends = {number: rank.end for number, rank in record.ranks.items()}
    for number, own in ends.items():
        if own is not None and _LOST_CHILD.search(own.error):
            return f"rank {number} lost a process: {own.error.strip().splitlines()[0]}"
    # A launcher that has lost a rank ends with a plain error; a signal of its own is no loss.
    all_ends = [*commands, *(own for own in ends.values() if own is not None)]
    has_failed = any(end.reason == "exception" for end in all_ends)
    lost = [number for number, own in ends.items() if own is None]
    if lost and has_failed and not any(_SIGNALLED.fullmatch(end.error) for end in commands):
        return f"rank {lost[0]} stopped without a message while the run ended with an error"
    return ""
