"""The figures of the training loop: its waits and their pattern, the ready queue, throughput.

The stall is that of all ranks together. Waits of fetches, queue and steps are those of the rank
that decides; rows, samples, tokens and bytes are summed over the ranks that fetch. With a
dispatcher that is rank 0, which reads for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fast_axolotl.measure import ready_queue
from fast_axolotl.measure.job import JobStall, others_span_seconds
from fast_axolotl.measure.rank_figures import RankFigures
from fast_axolotl.measure.stall_pattern import Pattern, find_pattern
from fast_axolotl.measure.summary_builder import SummaryBuilder
from fast_axolotl.record.arithmetic import finite, ratio, times, total
from fast_axolotl.record.units import format_share

_MUCH_UNKNOWN = 0.005
"""Of the time: by how much the stall can be higher before a note says so. Ours: as far as shares
are read."""

_FETCHES_FIRST = ("transformers", "axolotl")
"""Trainers that fetch all micro-batches of a step before its first forward pass."""

_QUANTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))


def add_stall(builder: SummaryBuilder, rank: RankFigures | None, job: JobStall) -> None:
    """How much the job waited; how long the rank that decides did, in which pattern, and its
    ready queue and steps."""
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
        value = rank.step_times.quantile(share) if rank else None
        builder.put_steady(f"step_{name}_seconds", value)
    pace = ratio(steady.steps, steady.wall_seconds) if steady else None
    builder.put_steady("steps_per_second", pace)
    builder.put_steady("worst_percent_share", waits.worst_share() if waits else None)
    causes = builder.values["waits_by_cause"] = _share_causes(rank)
    pattern = _find_pattern(rank, causes) if rank is not None and rank.steady.fetches else None
    fetches = pattern.period_fetches if pattern else None
    builder.values["stall_pattern"] = pattern.kind if pattern else ""
    builder.values["stall_period_of"] = pattern.period_of if pattern else ""
    builder.put_steady("stall_period_fetches", fetches)
    per_fetch = ratio(steady.count("samples"), steady.fetches) if steady else None
    no_rows = "" if fetches is None else "samples were not counted"
    builder.put_steady("stall_period_rows", times(fetches, per_fetch or None), no_rows)
    points = ready_queue.read_queue(blocks)
    builder.put_steady("queue_depth", ready_queue.mean_depth(points))
    builder.put("queue_capacity", ready_queue.find_capacity(rank.settings) if rank else None)
    # Seconds from the begin of the first fetch to a mark; from the start where it has no mark.
    first: dict[str, float] = {}
    for mark in rank.record.marks if rank else ():
        first.setdefault(mark.name, mark.t)
    for name in ("first_batch", "first_step"):
        since = finite(first[name] - first.get("first_fetch", 0.0)) if name in first else None
        builder.put(f"{name}_seconds", since, "", name)


def _find_pattern(rank: RankFigures, causes: Mapping[str, float]) -> Pattern:
    slow = [slow for block in rank.steady_blocks for slow in block.slow]
    accumulation, steady = rank.accumulation, rank.steady
    pattern = find_pattern(slow, rank.waits, causes, accumulation)
    capacity, own_seconds = ready_queue.find_capacity(rank.settings), rank.own_seconds
    if (
        pattern.kind != "steady" and pattern.period_of != "step"
    ) or rank.record.start.source not in _FETCHES_FIRST:
        return pattern
    if own_seconds is None or capacity is None or not 1 <= capacity < accumulation:
        return pattern
    # A full queue serves the first batches of a step at once, the others come as fast as the reader
    # is. If a whole step's batches are read in less than the model's own time per step, the reader
    # is fast enough on average, and a deeper queue would hide the wait. One that is too slow shows
    # waits in the rhythm of the steps, too.
    reading = (steady.wall_seconds - own_seconds) / (accumulation - capacity) * accumulation
    if reading > own_seconds:
        return Pattern()
    return Pattern(kind="burst", period_fetches=accumulation, period_of="step")


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


def add_reading(
    builder: SummaryBuilder,
    ranks: Sequence[RankFigures],
    job: JobStall,
    copies: int,
) -> None:
    """What crosses the boundary between loader and model, and what the loader could give.

    ``copies`` ranks see the same samples."""
    readers = find_readers(ranks)
    samples = _sum_rates(readers, "samples", copies) or None
    uncounted = "the batches have no first dimension along which to count samples"
    builder.put_steady("samples_per_second", samples, uncounted, "samples")
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
    squares = total(rank.steady.count("sequence_squares") for rank in ranks)
    tokens = total(rank.steady.count("sequence_tokens") for rank in ranks)
    builder.put_steady("mean_attended_length", ratio(squares, tokens), "", "sequence_tokens")


def find_readers(ranks: Sequence[RankFigures]) -> list[RankFigures]:
    """Ranks that fetch: with a dispatcher, rank 0 reads for all."""
    return [rank for rank in ranks if rank.steady.fetches]


def _reading_rate(rank: RankFigures) -> float | None:
    """Samples per second that a rank's loader could deliver on its own."""
    steady, workers = rank.steady, ready_queue.number_of(rank.settings, "num_workers")
    samples = steady.count("samples")
    if workers == 0:
        return ratio(samples, steady.host_wait_seconds)
    per_second = ratio(steady.count("produced") or None, steady.count("producing_seconds"))
    return times(per_second, ratio(samples, steady.fetches)) if workers else None


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
