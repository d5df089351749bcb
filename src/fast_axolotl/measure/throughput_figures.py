"""The figures of throughput: rows, samples and bytes at the loader, tokens, steps."""

from __future__ import annotations

from collections.abc import Sequence

from fast_axolotl.measure.findings import Findings
from fast_axolotl.measure.ranks import RankFigures
from fast_axolotl.record.arithmetic import ratio, times, total

__all__ = ["add_reading", "add_steps", "add_tokens", "find_readers"]


def add_reading(found: Findings, ranks: Sequence[RankFigures], chosen: RankFigures | None) -> None:
    """What crosses the boundary between loader and model."""
    readers = find_readers(ranks)
    samples = _sum_rates(readers, "samples") or None
    uncounted = "the batches have no first dimension to count samples along"
    found.put_steady("samples_per_second", samples, uncounted, "samples")
    nbytes = _sum_rates(readers, "num_bytes")
    empty = _explain(readers, "num_bytes", "the batches hold no arrays")
    found.put_steady("bytes_per_second", nbytes, empty, "num_bytes")
    rows = _sum_rates(readers, "rows")
    packed = "samples are packed, and the rows inside were not counted"
    is_packed = any(_is_packed(rank) for rank in ranks)
    if rows is None and not is_packed:
        rows = samples
    found.put_steady("rows_per_second", rows, packed if is_packed else uncounted, "rows", "samples")
    rows_per_sample = ratio(rows, samples)
    demand = total(_demand(rank) for rank in readers)
    found.put_steady(
        "demand_rows_per_second",
        times(demand, rows_per_sample),
        packed if samples is not None else uncounted,
        "rows",
    )
    free = total(_free_rate(rank) for rank in ranks)
    drained = "the loader was not drained without a model: meter.free_run(loader)"
    found.put(
        "free_rows_per_second",
        times(free, rows_per_sample if rows_per_sample is not None or is_packed else 1.0),
        drained if free is None else packed,
    )
    headroom = ratio(_free_rate(chosen), _demand(chosen)) if chosen else None
    found.put("headroom", headroom, drained if free is None else found.unseen or uncounted)


def _demand(rank: RankFigures) -> float | None:
    """Samples a second that the model would take if it never waited."""
    return ratio(rank.steady.count("samples") or None, rank.own_seconds)


def _free_rate(rank: RankFigures) -> float | None:
    runs = rank.record.free_runs
    return ratio(total(one.samples for one in runs), total(one.seconds for one in runs))


def find_readers(ranks: Sequence[RankFigures]) -> list[RankFigures]:
    """Ranks that fetch: with a dispatcher, rank 0 reads for all."""
    return [rank for rank in ranks if rank.steady.fetches]


def _sum_rates(ranks: Sequence[RankFigures], name: str) -> float | None:
    """A rate summed over ranks; ``None`` where one of them did not count."""
    rates = [rank.rate(name) for rank in ranks]
    return None if None in rates else total(rates)


def _explain(ranks: Sequence[RankFigures], name: str, otherwise: str) -> str:
    """Why something has no rate: nobody counted it, or not everything was counted."""
    is_partial = any(name in rank.steady.counts for rank in ranks)
    return "a part of the batches was not counted, so there is no sum" if is_partial else otherwise


def _is_packed(rank: RankFigures) -> bool:
    """By a setting, by the model's trainer, or because the batches look like it: of rows that are
    not packed the meter has nothing to explain."""
    return (
        bool(rank.settings.get("sample_packing"))
        or any(model.is_packed for model in rank.record.models)
        or "rows_per_second" in rank.record.reasons
        or (rank.steady.count("rows") or 0) > (rank.steady.count("samples") or 0)
    )


def add_tokens(found: Findings, ranks: Sequence[RankFigures]) -> None:
    readers = find_readers(ranks)
    real = _sum_rates(readers, "real_tokens")
    padded = _sum_rates(readers, "padded_tokens")
    trainable = _sum_rates(readers, "trainable_tokens")
    no_ids = "the batches hold no token ids; tell the meter with meter.tokens(n)"
    no_labels = "the batches hold no labels; tell the meter with meter.tokens(n, trainable=…)"
    found.put_steady(
        "tokens_per_second",
        real,
        _explain(readers, "real_tokens", no_ids),
        "tokens",
    )
    found.put_steady(
        "trainable_tokens_per_second",
        trainable,
        _explain(readers, "trainable_tokens", no_labels),
        "trainable_tokens",
    )
    found.put_steady(
        "padded_tokens_per_second",
        padded,
        _explain(readers, "padded_tokens", no_ids),
        "padded_tokens",
    )
    filled = ratio(real, padded)
    unknown = "real or padded tokens were not counted"
    found.put_steady("padding_share", None if filled is None else 1.0 - filled, unknown)
    is_packed = any(_is_packed(rank) for rank in ranks)
    loose = "samples are not packed" if not is_packed else unknown
    found.put_steady("packing_efficiency", filled if is_packed else None, loose)
    squares, tokens = (
        total(rank.steady.count(name) for rank in ranks)
        for name in ("sequence_squares", "sequence_tokens")
    )
    found.put_steady(
        "mean_attended_length",
        ratio(squares, tokens),
        "the lengths of the sequences were not seen",
        "sequence_tokens",
    )


def add_steps(found: Findings, rank: RankFigures | None) -> None:
    steady = rank.steady if rank else None
    pace = ratio(steady.steps, steady.wall_seconds) if steady else None
    found.put_steady("steps_per_second", pace, "no time passed in the steady phase")
    times = rank.step_times if rank else None
    for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)):
        found.put_steady(
            f"step_{name}_seconds",
            times.quantile(share) if times else None,
            "no times of single steps were recorded",
        )
