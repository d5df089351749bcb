"""The figures of the training loop: its waits and their pattern, the ready queue, throughput.

The stall is that of all ranks together. Waits of fetches, queue and steps are those of the rank
that decides; rows, samples, tokens and bytes are summed over the ranks that fetch. With a
dispatcher that is rank 0, which reads for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fast_axolotl.measure import ready_queue
from fast_axolotl.measure.job import JobStall, others_span_seconds
from fast_axolotl.measure.rank_figures import RankFigures
from fast_axolotl.measure.stall_pattern import Pattern, find_pattern, is_burst_of_accumulation
from fast_axolotl.measure.summary_builder import SummaryBuilder
from fast_axolotl.record.arithmetic import finite, middle, ratio, times, total
from fast_axolotl.record.units import format_share

MOST_SIZE_DIFFERENCE = 0.1
"""How far a cached batch may differ in size from the mean batch, to be compared with it. Ours."""

_MUCH_UNKNOWN = 0.005
"""Of the time: by how much the stall can be higher before a note says so. Ours: as far as shares
are read."""

_FETCHES_FIRST = ("transformers", "axolotl")
"""Trainers that fetch all micro-batches of a step before its first forward pass."""

_PER_GPU = ("tokens/train_per_sec_per_gpu", "tokens_per_second_per_gpu")
"""Tokens per second in Axolotl's log, the newer name first."""
_SINCE_START, _SEEN = "train_tokens_per_second", "num_input_tokens_seen"
"""Names in transformers' log."""
_CLOSE = 0.1
"""Share by which a ratio may miss a factor. Ours: a trainer's clock runs in checkpoints, too."""

_QUANTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))


def add_stall(builder: SummaryBuilder, rank: RankFigures | None, job: JobStall) -> None:
    """How much the job waited; how long the rank that decides did, and in which pattern."""
    steady = rank.steady if rank else None
    blocks = rank.steady_blocks if rank else ()
    builder.values.update(
        steps=steady.steps if steady else 0,
        fetches=steady.fetches if steady else 0,
        warmup_steps=rank.warmup.steps if rank else 0,
        measured_seconds=steady.wall_seconds if steady else 0.0,
        stall_source=job.source,
        span_seconds=rank.spans if rank else {},
    )
    builder.put_steady(
        "first_steady_step",
        blocks[0].first_step if blocks else None,
        "the steady phase has no duration",
    )
    builder.put_steady("stall_fraction", job.stall_fraction)
    builder.put_steady("stall_error", job.error)
    if job.unknown > _MUCH_UNKNOWN:
        builder.values["notes"] += (
            f"the stall is between {format_share(job.stall_fraction)} and "
            f"{format_share((job.stall_fraction or 0.0) + job.unknown)}: the record does not hold "
            "the waits of single steps, so it is not known which ranks waited in the same steps",
        )
    builder.put_steady("host_stall_fraction", job.host_stall_fraction)
    builder.put_steady(
        "device_stall_fraction", job.device_stall_fraction, "", "device_wait_seconds"
    )
    waits = rank.waits if rank else None
    for name, share in _QUANTILES:
        value = waits.quantile(share) if waits else None
        builder.put_steady(f"wait_{name}_seconds", value, "", "host_waits")
    builder.put_steady("worst_percent_share", waits.worst_share() if waits else None)
    pattern = _find_pattern(rank) if rank is not None and rank.steady.fetches else None
    fetches = pattern.period_fetches if pattern else None
    builder.values["stall_pattern"] = pattern.kind if pattern else ""
    builder.values["stall_period_of"] = pattern.period_of if pattern else ""
    builder.put_steady("stall_period_fetches", fetches)
    builder.put_steady(
        "stall_period_rows",
        pattern.period_rows if pattern else None,
        "" if fetches is None else "samples were not counted",
    )
    builder.values["waits_by_cause"] = _share_causes(rank)
    builder.put("cached_stall_fraction", *_compare_cached(rank))
    # Seconds from the begin of the first fetch to a mark; from the start where it has no mark.
    first: dict[str, float] = {}
    for mark in rank.record.marks if rank else ():
        first.setdefault(mark.name, mark.t)
    for name in ("first_batch", "first_step"):
        since = finite(first[name] - first.get("first_fetch", 0.0)) if name in first else None
        builder.put(f"{name}_seconds", since, "", name)


def _find_pattern(rank: RankFigures) -> Pattern:
    steady = rank.steady
    per_fetch = ratio(steady.count("samples"), steady.fetches)
    pattern = find_pattern(
        [slow for block in rank.steady_blocks for slow in block.slow],
        steady.fetches,
        per_fetch or None,
        rank.record.marks,
        accumulation=rank.accumulation,
        waits=rank.waits,
    )
    if pattern.kind != "steady" and pattern.period_of != "step":
        return pattern
    # A loader that keeps up on average, but not with a trainer that fetches a whole step at once,
    # starves it in bursts, unless the queue holds a step. One that is too slow shows waits in the
    # rhythm of the steps, too: the first batches are ready, the others are not.
    accumulation, stall = rank.accumulation, steady.stall_fraction
    capacity = ready_queue.find_capacity(rank.settings)
    own_seconds = ratio(rank.own_seconds, steady.steps)
    is_fetched_first = rank.record.start.source in _FETCHES_FIRST
    if not is_fetched_first or capacity is None or stall is None or own_seconds is None:
        return pattern
    if not 1 <= capacity < accumulation:
        return pattern
    is_burst = is_burst_of_accumulation(
        accumulation=accumulation,
        capacity=capacity,
        wait_seconds=stall * steady.wall_seconds / steady.steps,
        own_seconds=own_seconds,
    )
    if not is_burst:
        return Pattern()
    return Pattern(
        kind="burst",
        period_fetches=accumulation,
        period_rows=accumulation * per_fetch if per_fetch else None,
        period_of="step",
    )


def _share_causes(rank: RankFigures | None) -> dict[str, float]:
    """Of the host's waiting, by what happened meanwhile; the rest is the loader's."""
    waited = rank.steady.host_wait_seconds if rank else 0.0
    causes: dict[str, float] = {}
    for block in rank.steady_blocks if rank and waited > 0 else ():
        for name, seconds in block.waits_by_cause.items():
            causes[name] = causes.get(name, 0.0) + (finite(seconds) or 0.0) / waited
    if not causes:
        return {}
    rest = max(0.0, 1.0 - sum(causes.values()))
    return dict(sorted({**causes, "loader": rest}.items(), key=lambda item: -item[1]))


def _compare_cached(rank: RankFigures | None) -> tuple[float | None, str]:
    """What a step takes with a batch that is there already, against what it took; or why not."""
    real, cached = (rank.steady, rank.replay) if rank else (None, None)
    if real is None or cached is None or not cached.fetches or not real.fetches:
        return None, ""
    for name in ("padded_tokens", "samples", "num_bytes"):
        own = ratio(cached.count(name), cached.fetches)
        mean = ratio(real.count(name), real.fetches)
        size = ratio(own, mean)
        if size is not None:
            if abs(size - 1.0) > MOST_SIZE_DIFFERENCE:
                word = name.replace("padded_", "").replace("num_", "")
                return None, f"the cached batch has {own:,.0f} {word}, the mean batch {mean:,.0f}"
            break
    took = ratio(ratio(cached.wall_seconds, cached.fetches), ratio(real.wall_seconds, real.fetches))
    return None if took is None else 1.0 - took, "the steady phase has no duration"


def add_queue(builder: SummaryBuilder, rank: RankFigures | None) -> None:
    """What the loader's ready queue does."""
    points = ready_queue.read_queue(rank.steady_blocks) if rank else []
    builder.put_steady("queue_depth", ready_queue.mean_depth(points))
    builder.put("queue_capacity", ready_queue.find_capacity(rank.settings) if rank else None)
    short = "the queue was inspected in fewer than three blocks of steps" if points else ""
    builder.put_steady("queue_drift_per_step", ready_queue.find_drift(points), short, "queue_depth")


def add_reading(
    builder: SummaryBuilder,
    ranks: Sequence[RankFigures],
    chosen: RankFigures | None,
    job: JobStall,
    copies: int,
) -> None:
    """What crosses the boundary between loader and model, and what the loader could give.

    ``copies`` ranks see the same samples."""
    readers = find_readers(ranks)
    samples = _sum_rates(readers, "samples", copies) or None
    uncounted = "the batches have no first dimension along which to count samples"
    builder.put_steady("samples_per_second", samples, uncounted, "samples")
    num_bytes = _sum_rates(readers, "num_bytes")
    builder.put_steady("bytes_per_second", num_bytes, _partly(readers, "num_bytes"), "num_bytes")
    rows = _sum_rates(readers, "rows", copies)
    packed = "samples are packed, and the rows in them were not counted"
    is_packed = any(map(_is_packed, ranks))
    if rows is None and not is_packed:
        rows = samples
    no_rows = packed if is_packed else uncounted
    builder.put_steady("rows_per_second", rows, no_rows, "rows", "samples")
    rows_per_sample = ratio(rows, samples)
    # What the model would take if no rank ever waited.
    busy = None if job.stall_fraction is None else 1.0 - job.stall_fraction
    demand = times(ratio(samples, busy), rows_per_sample)
    no_demand = packed if samples is not None else uncounted
    builder.put_steady("demand_rows_per_second", demand, no_demand, "rows")
    free = ratio(total(map(_free_rate, ranks)), copies)
    as_rows = rows_per_sample if rows_per_sample is not None or is_packed else 1.0
    builder.put("free_rows_per_second", times(free, as_rows), "" if free is None else packed)
    taken = ratio(chosen.rate("samples"), busy) if chosen else None
    headroom = ratio(_free_rate(chosen), taken) if chosen else None
    builder.put("headroom", headroom, "" if free is None else builder.unseen or uncounted)
    # Ranks meet at every step, so the slowest reader sets the pace of all.
    reading = [rate for rank in readers if (rate := _reading_rate(rank)) is not None]
    together = len(reading) * min(reading) if reading and len(reading) == len(readers) else None
    reader = times(ratio(together, copies), rows_per_sample)
    has_workers = any(ready_queue.number_of(rank.settings, "num_workers") for rank in readers)
    unknown = "" if has_workers else "it is not known whether the loader reads ahead"
    builder.put_steady("reader_rows_per_second", reader, unknown)
    builder.put_steady("reader_ratio", ratio(reader, rows))


def add_tokens(builder: SummaryBuilder, ranks: Sequence[RankFigures], copies: int) -> None:
    """Tokens of three kinds, and how much of the batches is padding. ``copies`` ranks see the same
    tokens."""
    readers = find_readers(ranks)
    kinds = ("real_tokens", "trainable_tokens", "padded_tokens")
    rates = {kind: _sum_rates(readers, kind, copies) for kind in kinds}
    for kind, value in rates.items():
        name = f"{kind.removeprefix('real_')}_per_second"
        builder.put_steady(name, value, _partly(readers, kind), kind.removeprefix("real_"))
    filled = ratio(rates["real_tokens"], rates["padded_tokens"])
    builder.put_steady("padding_share", None if filled is None else 1.0 - filled)
    is_packed = any(map(_is_packed, ranks))
    unknown = "real or padded tokens were not counted" if is_packed else ""
    builder.put_steady("packing_efficiency", filled if is_packed else None, unknown)
    squares = total(rank.steady.count("sequence_squares") for rank in ranks)
    tokens = total(rank.steady.count("sequence_tokens") for rank in ranks)
    builder.put_steady("mean_attended_length", ratio(squares, tokens), "", "sequence_tokens")


def add_audit(builder: SummaryBuilder, ranks: Sequence[RankFigures]) -> None:
    """The tokens per second that a trainer logs of its own, held against ours.

    Axolotl logs trainable tokens per second and GPU. transformers logs all tokens since the
    training began, with or without padding; since its clock runs from the start, its count per step
    is compared instead. A figure that is off by the number of ranks or of accumulated micro-batches
    is a mistake of definition, and a note names it: Axolotl reported the sum over all GPUs as that
    of one (axolotl#3362), and one micro-batch for a whole step (axolotl#3688).
    """
    figures, world_size = builder.values, builder.values["world_size"]
    name, logs, accumulation = "", [], 1
    for rank in ranks:
        since = (rank.steady_from or math.inf) - rank.record.start.time
        logs = [line for line in rank.record.logs if line.t >= since]
        seen = {name for line in logs for name in line.values}
        name = next((name for name in (*_PER_GPU, _SINCE_START) if name in seen), "")
        if name:
            accumulation = rank.accumulation
            break
    logged = [finite(line.values.get(name)) for line in logs]
    rate, ratios = None, []
    if name in _PER_GPU:
        rate = middle(logged)
        ratios = [ratio(times(rate, world_size), figures["trainable_tokens_per_second"])]
    elif name:
        rate = next((value for value in reversed(logged) if value is not None), None)
        counted = [(line.step, line.values[_SEEN]) for line in logs if _SEEN in line.values]
        (first, before), (last, after) = (counted[0], counted[-1]) if counted else ((0, 0), (0, 0))
        per_second = times(ratio(after - before, last - first), figures["steps_per_second"])
        kinds = ("padded_tokens_per_second", "tokens_per_second")
        ratios = [ratio(per_second, figures[kind]) for kind in kinds]
    builder.put("trainer_tokens_per_second", rate)
    known = [value for value in ratios if value]
    if not known:
        builder.put("trainer_tokens_ratio", None)
        return
    ranks_of, steps_of = f"{world_size} ranks", f"{accumulation} gradient accumulation steps"
    # Factor → what explains it; of equal ones, the later and likelier.
    factors = {
        world_size / accumulation: f"it is the sum over {ranks_of}, for one of {steps_of}",
        float(accumulation): f"it counts each token once for each of {steps_of}",
        1.0 / accumulation: f"it counts only one of {steps_of} (axolotl#3688)",
        1.0 / world_size: f"it counts only one of {ranks_of}",
        float(world_size): f"it is the sum over all {ranks_of}, not per GPU (axolotl#3362)",
        1.0: "",
    }
    # Padding counted or not: the kind that comes closest to a factor.
    _, value, factor = min(
        (abs(math.log(value / factor)), value, factor) for value in known for factor in factors
    )
    builder.put("trainer_tokens_ratio", value)
    if factor != 1.0 and abs(value / factor - 1.0) <= _CLOSE:
        note = f"the trainer's {name} is {value:.3g} × ours: {factors[factor]}"
        builder.values["notes"] += (note,)


def add_steps(builder: SummaryBuilder, rank: RankFigures | None) -> None:
    """The pace, and how long steps take."""
    pace = ratio(rank.steady.steps, rank.steady.wall_seconds) if rank else None
    builder.put_steady("steps_per_second", pace)
    for name, share in _QUANTILES:
        value = rank.step_times.quantile(share) if rank else None
        builder.put_steady(f"step_{name}_seconds", value)


def find_readers(ranks: Sequence[RankFigures]) -> list[RankFigures]:
    """Ranks that fetch: with a dispatcher, rank 0 reads for all."""
    return [rank for rank in ranks if rank.steady.fetches]


def _free_rate(rank: RankFigures) -> float | None:
    runs = rank.record.free_runs
    return ratio(total(run.samples for run in runs), total(run.seconds for run in runs))


def _reading_rate(rank: RankFigures) -> float | None:
    """Samples per second that a rank's loader could deliver on its own."""
    steady, workers = rank.steady, ready_queue.number_of(rank.settings, "num_workers")
    samples = steady.count("samples")
    if workers == 0:
        return ratio(samples, steady.host_wait_seconds)
    per_second = ratio(steady.count("produced") or None, steady.count("producing_seconds"))
    filled = times(per_second, ratio(samples, steady.fetches)) if workers else None
    return _free_rate(rank) if filled is None else filled


def _sum_rates(ranks: Sequence[RankFigures], name: str, copies: int = 1) -> float | None:
    """A rate summed over ranks; ``None`` where one of them did not count."""
    rates = [
        ratio(rank.steady.count(name), rank.steady.wall_seconds - others_span_seconds(rank, ranks))
        for rank in ranks
    ]
    return None if None in rates else ratio(total(rates), copies)


def _partly(ranks: Sequence[RankFigures], name: str) -> str:
    """The reason of a rate that is missing because not everything was counted."""
    is_partial = any(name in rank.steady.counts for rank in ranks)
    return "some batches were not counted, so there is no sum" if is_partial else ""


def _is_packed(rank: RankFigures) -> bool:
    """By a setting, by the model's trainer, or because the batches look like it: of rows that are
    not packed the meter has nothing to explain."""
    return (
        bool(rank.settings.get("sample_packing"))
        or any(model.is_packed for model in rank.record.models)
        or "rows_per_second" in rank.record.reasons
        or (rank.steady.count("rows") or 0) > (rank.steady.count("samples") or 0)
    )
