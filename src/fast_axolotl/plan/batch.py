"""Choose the next micro-batch to try, and the one to use.

Sizes are doubled until memory runs out or the rate falls clearly; then the boundary is halved, down
to neighbours or to an eighth. A constant global batch allows its divisors only. The *knee* is the
smallest micro-batch whose rate is within 3 % of the best, or within 10 % with an interval that
reaches it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from fast_axolotl.errors import UsageError
from fast_axolotl.record.protocol_result import Trial
from fast_axolotl.record.thresholds import DATA_STALL
from fast_axolotl.record.units import format_seconds, format_share

NEAR = 0.03
"""Share of the best rate that is given up for a smaller micro-batch. Ours: twice what runs of one
command differ by on a quiet machine."""
_UNSURE = 0.10
"""The same where the interval reaches the best rate. Ours: a wider one says too little."""
_MOST = 65_536
"""Samples of a micro-batch up to which sizes are doubled where no global batch ends them."""
_SLOW = 0.7
"""Share of the best rate below which a short pass is a pitfall. Ours."""
_CLOSE = 9 / 8
"""A boundary known so exactly is not worth another run. Ours: batches differ by more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a sweep found."""

    knee: int | None = None
    """The micro-batch to use; ``None`` where none ran."""
    best: int | None = None
    """The one with the highest rate."""
    sentences: tuple[str, ...] = ()
    """What to do, and why."""
    warnings: tuple[str, ...] = ()


def find_sizes(share: int, wanted: Sequence[int] = ()) -> Sequence[int]:
    """Micro-batches that can be tried, in ascending order.

    ``share`` is what each rank has of a constant global batch; 0: accumulation stays 1.
    """
    chosen = sorted(set(wanted))
    if others := [size for size in chosen if share % size]:
        raise UsageError(f"micro-batches {others} do not divide the {share:,} samples of a rank")
    return chosen or [size for size in range(1, (share or _MOST) + 1) if share % size == 0]


def choose_next(trials: Sequence[Trial], sizes: Sequence[int], *, is_listed: bool) -> int | None:
    """The next micro-batch to try; ``None``: enough is known.

    ``is_listed``: all sizes are tried, but for those above one that ran out of memory.
    """
    tried = {trial.micro_batch: trial for trial in trials}
    full = [size for size, trial in tried.items() if trial.outcome == "out of memory"]
    if is_listed:
        left = (one for one in sizes if one not in tried and one < min(full, default=one + 1))
        return next(left, None)
    if not trials:
        return sizes[0]
    ran = [trial for trial in trials if trial.outcome == "ran"]
    if not ran or len(ran) + len(full) < len(trials):
        return None
    last = max(ran, key=lambda trial: trial.micro_batch)
    low = last.micro_batch
    if full:
        between = sizes[bisect_right(sizes, low) : bisect_left(sizes, min(full))]
        return between[len(between) // 2] if between and min(full) > _CLOSE * low else None
    best = max(ran, key=lambda trial: trial.rate or 0.0)
    if (last.high or last.rate or 0.0) < (1 - NEAR) * (best.low or best.rate or 0.0):
        return None
    at = bisect_right(sizes, 2 * low) - 1
    at += sizes[at] <= low
    return sizes[at] if at < len(sizes) else None


def advise(trials: Sequence[Trial], *, is_axolotl: bool = False) -> Advice:
    """The knee, the boundary, and what to do, in the words of Axolotl's configuration or ours."""
    key = "micro_batch_size" if is_axolotl else "micro-batch"
    other_key = "gradient_accumulation_steps" if is_axolotl else "accumulation"
    ran = sorted((one for one in trials if one.outcome == "ran"), key=lambda one: one.micro_batch)
    full = min((one.micro_batch for one in trials if one.outcome == "out of memory"), default=None)
    timed = [(one, one.rate) for one in ran if one.rate is not None]
    if not timed:
        text = "No run gave a rate: pass more --steps, or look at a record with fast-axolotl show."
        if full is not None and not ran:
            text = f"{key}: {full} runs out of memory. Shorten the sequences, recompute activations"
            text += " (gradient_checkpointing), train an adapter (LoRA), or shard the model."
        return Advice(sentences=(text,))
    best, top = max(timed, key=lambda one: one[1])
    lows, highs = zip(*((one.low or rate, one.high or rate) for one, rate in timed), strict=True)
    if len(timed) > 1 and max(lows) <= min(highs) and all(one.low for one, _ in timed):
        text = "No size is clearly faster: the intervals of all overlap. Keep the micro-batch that "
        text += "you have, or pass more --steps."
        return Advice(best=best.micro_batch, sentences=(text,))
    knee, own = next(
        (one, rate)
        for one, rate in timed
        if rate >= (1 - NEAR) * top
        or (rate >= (1 - _UNSURE) * top and one.high is not None and one.high >= top)
    )
    first, slowest = timed[0]
    size, together = f"{key}: {knee.micro_batch}", ""
    if is_axolotl or any(one.accumulation > 1 for one in trials):
        together = f" and {other_key}: {knee.accumulation}"
    text = f"{size} is as fast as any size that ran"
    if knee is not first:
        text = f"{size} gives {own / slowest:.2f} × the {knee.unit} of {first.micro_batch}"
    if best is not knee:
        text += f"; {best.micro_batch} gives {format_share(top / own - 1, decimals=0)} more"
    sentences = [f"Set {size}{together}.", f"{text}."]
    if full is not None:
        sentences.append(f"{ran[-1].micro_batch} is the largest that ran; {full} does not fit.")
    warnings = []
    if slowest < _SLOW * top and first.step_seconds:
        pass_seconds = format_seconds(first.step_seconds / first.accumulation)
        warnings.append(
            f"A pass with micro-batch {first.micro_batch} takes only {pass_seconds}, but its "
            f"throughput is {format_share(slowest / top, decimals=0)} of the best: low latency is "
            f"not high throughput. Compare {first.unit}."
        )
    if knee.stall is not None and knee.stall >= DATA_STALL:
        warnings.append(
            f"At {knee.micro_batch}, training waits for data {format_share(knee.stall)} of the "
            "time, so this measures the loader, not the batch. Make the loader faster first."
        )
    sizes = {one.micro_batch * one.accumulation for one in ran}
    if knee.micro_batch * knee.accumulation > min(sizes):
        warnings.append(
            "The global batch grows with the micro-batch. A larger one needs another learning "
            "rate and may generalise worse: compare the losses, or pass --global-batch."
        )
    return Advice(
        knee=knee.micro_batch,
        best=best.micro_batch,
        sentences=tuple(sentences),
        warnings=tuple(warnings),
    )
