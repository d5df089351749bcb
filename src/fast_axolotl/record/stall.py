"""The one sum that makes a stall, of a rank and of a job, and whether it is the device's.

A stall is a ratio of sums: waiting ÷ wall time. It is the device's where device waits are known for
at least 90 % of the wall time, and then over exactly that part of it; else it is the host's. The
meter's running figures, the summary, the live view and the charts all add up steps or blocks here,
so that they cannot disagree.

Ranks meet in a collective at every step, so a step is as late as the rank that waits longest. The
job's stall is Σ over steps of the largest wait of any rank ÷ wall time, over the steps that are
steady on all ranks. Steps are aligned by their number.

The waits of single steps are exact in the first hours of a record, and a byte each after that. A
record of an older version has only the sums of blocks there. Between the largest sum of one rank
and the sum over all ranks lies the truth; the smaller one is reported, with the distance as its
error.

The fold keeps a running maximum per step, some steps at a time: 64 ranks of 1.7 million steps take
about two seconds and 25 MB.
"""

from __future__ import annotations

import base64
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from fast_axolotl.record.arithmetic import finite, ratio
from fast_axolotl.record.schema import StepBlock

StallSource = Literal["device", "host", ""]

LEAST_DEVICE_SHARE = 0.9
"""Share of the wall time over which device waits must be known to stand for all of it."""

WAIT_ERROR = 0.04
"""How far a condensed wait can be off, as a share of it."""
_LEAST_WAIT, _WAIT_GROWTH = 1e-5, 1.08
WAIT_SECONDS = (0.0, *(_LEAST_WAIT * _WAIT_GROWTH**number for number in range(255)))
"""The wait that each byte of condensed waits stands for: none, then 10 µs to 50 minutes."""

_STEPS_AT_ONCE = 1 << 17
LEAST_PRESENCE = 0.9
"""Of the longest rank's steps, that a rank must have recorded to end the common steps."""
_LEAST_STEPS = 20
"""Steps that a rank must have recorded to begin them later, where it has far fewer than others."""
_EXACT, _CONDENSED, _SUMMED = 0, 1, 2


def encode_waits(waits: Iterable[float]) -> str:
    """Waits of single steps as a byte each; longer is larger, so ranks are compared as bytes."""
    growth = math.log(_WAIT_GROWTH)
    return base64.b64encode(
        bytes(
            min(255, max(0, round(math.log(wait / _LEAST_WAIT) / growth) + 1)) if wait > 0 else 0
            for wait in waits
        )
    ).decode()


def decode_waits(text: str) -> bytes:
    """The bytes of condensed waits, of which ``WAIT_SECONDS`` gives the seconds."""
    return base64.b64decode(text)


def join_waits(first: str, second: str) -> str:
    """The condensed waits of two blocks together; none where either has none."""
    if not first or not second:
        return ""
    return base64.b64encode(decode_waits(first) + decode_waits(second)).decode()


@dataclass(slots=True)
class WaitTotals:
    """Wall time and waits, summed over steps or blocks."""

    steps: int = 0
    fetches: int = 0
    wall_seconds: float = 0.0
    host_wait_seconds: float = 0.0
    device_wait_seconds: float = 0.0
    device_wall_seconds: float = 0.0
    """Wall time of the steps whose device waits are known."""

    def add(
        self,
        *,
        wall_seconds: float,
        host_wait_seconds: float,
        device_wait_seconds: float | None,
        steps: int = 1,
        fetches: int = 0,
    ) -> None:
        """Add one step, or several at once."""
        self.steps += steps
        self.fetches += fetches
        self.wall_seconds += wall_seconds
        self.host_wait_seconds += host_wait_seconds
        if device_wait_seconds is not None:
            self.device_wait_seconds += device_wait_seconds
            self.device_wall_seconds += wall_seconds

    def add_block(self, block: StepBlock) -> None:
        """Add the steps of a block; a foreign record's numbers may be none."""
        self.add(
            wall_seconds=finite(block.wall_seconds) or 0.0,
            host_wait_seconds=finite(block.host_wait_seconds) or 0.0,
            device_wait_seconds=finite(block.device_wait_seconds),
            steps=block.steps,
            fetches=block.fetches,
        )

    @property
    def source(self) -> StallSource:
        """Whose waits the stall is made of; empty before the first step."""
        if not self.steps:
            return ""
        known = ratio(self.device_wall_seconds, self.wall_seconds)
        return "device" if known is not None and known >= LEAST_DEVICE_SHARE else "host"

    @property
    def host_stall_fraction(self) -> float | None:
        """Share of the time in which the host waited."""
        return ratio(self.host_wait_seconds, self.wall_seconds)

    @property
    def device_stall_fraction(self) -> float | None:
        """Share of the time in which the device had nothing to run for want of data."""
        if self.source != "device":
            return None
        return ratio(self.device_wait_seconds, self.device_wall_seconds)

    @property
    def stall_fraction(self) -> float | None:
        """The device's where it is known, else the host's."""
        return self.device_stall_fraction if self.source == "device" else self.host_stall_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWaits:
    """The largest wait of any rank in each step, summed over steps."""

    seconds: float
    error_seconds: float
    """How far this can be off."""
    unknown_seconds: float
    """The part of the error that is due to steps whose single waits are not known: the truth is
    higher by that at most."""
    caused: tuple[float, ...]
    """Of each rank: the waits of the steps in which it waited longest."""
    alone: tuple[float, ...]
    """Of each rank: by how much these were longer than the second longest."""


def find_common_steps(ranks: Sequence[Sequence[StepBlock]]) -> range:
    """The steps that all ranks have. One that recorded far fewer than others ends nothing: its
    record was cut off. It may begin them, since its queue may have hidden what came before."""
    spans = [(rank[0].first_step, rank[-1].first_step + rank[-1].steps) for rank in ranks]
    least = LEAST_PRESENCE * max((end - first for first, end in spans), default=0)
    firsts = [first for first, end in spans if end - first >= min(least, _LEAST_STEPS)]
    begin = max(firsts, default=0)
    end = min((end for first, end in spans if end - first >= least), default=begin)
    return range(begin, max(begin, end))


def wall_between(blocks: Sequence[StepBlock], steps: range) -> float:
    """Wall seconds of a rank in these steps; of a block that reaches beyond, its share."""
    seconds = 0.0
    for block in blocks:
        inside = min(steps.stop, block.first_step + block.steps) - max(
            steps.start, block.first_step
        )
        if inside > 0:
            seconds += (finite(block.wall_seconds) or 0.0) * (inside / block.steps)
    return seconds


def fold_waits(
    ranks: Sequence[Sequence[StepBlock]], steps: range, source: Literal["host", "device"]
) -> JobWaits:
    """The job's waits in these steps, by the host or by the device."""
    import numpy as np

    caused, alone = np.zeros(len(ranks)), np.zeros(len(ranks))
    condensed = unknown = 0.0
    for chunk in _fold_chunks(ranks, steps, source):
        is_known = chunk.form < _SUMMED
        held, largest = chunk.holder[is_known], chunk.largest
        caused += np.bincount(held, largest[is_known], len(ranks))
        alone += np.bincount(held, (largest - chunk.second)[is_known], len(ranks))
        condensed += float(largest[chunk.form == _CONDENSED].sum())
        if not is_known.all():
            spreads = (_spread(blocks, chunk.begin, chunk.form, source) for blocks in ranks)
            sums = np.array([waits[~is_known].sum() for waits in spreads])
            caused[sums.argmax()] += sums.max()
            # All that the others waited may have been in the same steps.
            alone[sums.argmax()] += max(0.0, 2 * sums.max() - sums.sum())
            unknown += float(sums.sum() - sums.max())
    return JobWaits(
        seconds=float(caused.sum()),
        error_seconds=WAIT_ERROR * condensed + unknown,
        unknown_seconds=unknown,
        caused=tuple(caused.tolist()),
        alone=tuple(alone.tolist()),
    )


def join_ranks(ranks: Sequence[Sequence[StepBlock]]) -> tuple[int, list[StepBlock]]:
    """The rank that waits most, and its blocks with the waits of the job in the place of its own:
    what the job loses over time. In steps that the ranks do not have in common they stay its
    own."""
    known = [blocks for blocks in ranks if blocks]
    is_device = all(block.device_wait_seconds is not None for blocks in known for block in blocks)
    source: Literal["host", "device"] = "device" if is_device else "host"
    steps = [sum(block.steps for block in blocks) for blocks in ranks]
    waits = [sum(_sum_of(block, source) for block in blocks) for blocks in ranks]
    whole = [number for number, count in enumerate(steps) if count >= max(steps) / 2]
    most = max(whole, key=lambda number: waits[number])
    common = find_common_steps(known)
    if len(known) < 2 or not common:
        return most, list(ranks[most])
    import numpy as np

    largest = [chunk.largest for chunk in _fold_chunks(known, common, source)]
    sums = np.concatenate([[0.0], *largest]).cumsum()
    joined = []
    for block in ranks[most]:
        first, end = block.first_step - common.start, block.first_step + block.steps - common.start
        if first >= 0 and end <= len(common):
            seconds = min(float(sums[end] - sums[first]), block.wall_seconds)
            if is_device:
                block = replace(block, device_wait_seconds=seconds)
            else:
                block = replace(block, host_wait_seconds=seconds)
        joined.append(block)
    return most, joined


class _Chunk(NamedTuple):
    """Some steps, from ``begin`` on."""

    begin: int
    largest: Any
    """Wait of any rank."""
    second: Any
    """The second largest."""
    holder: Any
    """Which rank waited longest."""
    form: Any
    """How well the waits are known: of the rank that knows least."""


def _fold_chunks(
    ranks: Sequence[Sequence[StepBlock]], steps: range, source: str
) -> Iterator[_Chunk]:
    import numpy as np

    for begin in range(steps.start, steps.stop, _STEPS_AT_ONCE):
        count = min(_STEPS_AT_ONCE, steps.stop - begin)
        largest, second = np.zeros(count), np.zeros(count)
        holder, form = np.zeros(count, dtype=np.int32), np.zeros(count, dtype=np.uint8)
        for number, blocks in enumerate(ranks):
            waits = _spread(blocks, begin, form, source)
            np.maximum(second, np.minimum(largest, waits), out=second)
            np.copyto(holder, number, where=waits > largest)
            np.maximum(largest, waits, out=largest)
        yield _Chunk(begin, largest, second, holder, form)


def _spread(blocks: Sequence[StepBlock], begin: int, form: Any, source: str) -> Any:
    """Waits of a rank from step ``begin`` on, and in ``form`` how well they are known. Blocks that
    follow each other and are alike are put down at once."""
    import numpy as np

    waits = np.zeros(len(form))
    runs: list[tuple[int, int, list[Any]]] = []
    end = None
    first = max(0, bisect_right(blocks, begin, key=attrgetter("first_step")) - 1)
    for block in blocks[
        first : bisect_left(blocks, begin + len(form), key=attrgetter("first_step"))
    ]:
        kind, singles = _read_singles(block, source)
        if singles is None:
            continue
        if not runs or runs[-1][0] != kind or block.first_step != end:
            runs.append((kind, block.first_step, []))
        runs[-1][2].append(singles)
        end = block.first_step + block.steps
    for kind, first, pieces in runs:
        if kind == _CONDENSED:
            values = np.array(WAIT_SECONDS)[np.frombuffer(b"".join(pieces), dtype=np.uint8)]
        elif kind == _SUMMED:
            values = np.repeat([mean for mean, _ in pieces], [steps for _, steps in pieces])
        else:
            values = np.fromiter(chain.from_iterable(pieces), dtype=np.float64)
            values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        at = first - begin
        inside = slice(max(0, at), min(len(waits), at + len(values)))
        waits[inside] = values[max(0, -at) : len(waits) - at]
        np.maximum(form[inside], kind, out=form[inside])
    return waits


def _read_singles(block: StepBlock, source: str) -> tuple[int, Any]:
    """How the waits of a block's steps are known, and what they are: where only their sum is known,
    the mean and the number of steps; ``None`` where nothing was waited."""
    singles = block.hosts if source == "host" else block.devices
    if singles is not None and len(singles) == block.steps:
        return _EXACT, singles
    # What is condensed are the device's waits where there are any.
    if block.step_waits and (block.device_wait_seconds is not None) == (source == "device"):
        with suppress(ValueError):  # a damaged line
            codes = decode_waits(block.step_waits)
            if len(codes) == block.steps:
                return _CONDENSED, codes
    seconds = _sum_of(block, source) if block.steps > 0 else 0.0
    return _SUMMED, (seconds / block.steps, block.steps) if seconds else None


def _sum_of(block: StepBlock, source: str) -> float:
    waits = block.host_wait_seconds if source == "host" else block.device_wait_seconds
    return finite(waits) or 0.0
