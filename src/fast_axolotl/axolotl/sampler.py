"""Axolotl's multipack sampler: the same packs in the same random order, in less time.

Axolotl's ``pack_parallel`` is first-fit in the order given; ``plan_packs`` finds the same packs in
O(n log packs) where Axolotl searches O(n · packs), and in this process where Axolotl forks a pool
whose children compile the search anew at every call.

``len()`` of the sampler packs once, then ``num_count_samples`` times more, to learn how many
batches there are. Each pass draws from the sampler below, and a random one draws from torch's
global generator. ``batches_length`` makes the same draws in the same order, but of all passes
except the last it only counts the packs. Axolotl's ``gc.collect()`` after each pass is left out: it
has no result, and takes a second where a process holds many objects.

Cost at 100,000 lengths: 2.7 ms for the packs, 1.9 ms to make lists of them.

Samplers other than torch's random and sequential ones and accelerate's seeded one, subclasses,
lengths of another type and settings that Axolotl would stumble over are left to Axolotl before
anything is drawn. What turns out later leaves the generators as they were.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fast_axolotl.axolotl.patching import Unfamiliar, from_stock
from fast_axolotl.axolotl.self_check import random_state, restore_random_state
from fast_axolotl.packing.plan import PackPlan, cut, plan_packs

_Batches = list[list[list[int]]]

_MOST_INT32 = np.iinfo(np.int32).max
"""Axolotl adds the lengths of dropped rows as int32, and so does not get beyond this."""

_SEEDED = ("accelerate.data_loader", "SeedableRandomSampler")
"""The sampler that the trainer puts below: a random one that seeds itself by the epoch."""

_MOST_INT64 = np.iinfo(np.int64).max


class _Packed(NamedTuple):
    """One pass over the sampler."""

    num_batches: int
    used: Any
    """The tokens in these batches, of the type that Axolotl counts them in."""
    slots: int
    """The places in these batches."""
    make: Callable[[], _Batches]
    """Makes the batches."""


def generate_batches(self: Any, set_stats: bool = False) -> Any:
    """The batches of one pass, each a list of packs, each a list of indices."""
    if self._batches is not None:
        return self._batches
    from axolotl.utils.samplers import multipack

    _check_sampler(self, multipack)
    states = random_state(self.sampler)
    try:
        packed = _pack(self, multipack)
    except Exception:
        restore_random_state(self.sampler, states)
        raise
    if set_stats:
        self.total_tokens_used += packed.used
        self.total_token_slots += packed.slots
    self._batches = packed.make()
    return self._batches


def batches_length(self: Any) -> Any:
    """The number of batches: the least of several passes, and of all ranks."""
    if self._batches is not None and self._len_across_ranks is not None:
        return self._len_across_ranks
    from axolotl.utils.samplers import multipack

    _check_sampler(self, multipack)
    _check_counts(num_count_samples=self.num_count_samples)
    before = self._batches, self.total_tokens_used, self.total_token_slots
    states = random_state(self.sampler)
    packed: _Packed | None = None
    sampled = []
    try:
        if self._batches is None:
            packed = _pack(self, multipack)
            self.total_tokens_used += packed.used
            self.total_token_slots += packed.slots
        if self._len_across_ranks is None:
            for _ in range(self.num_count_samples):
                start_time = time.time()
                packed = _pack(self, multipack)
                sampled.append(packed.num_batches)
                multipack.LOG.debug(f"generate_batches time: {time.time() - start_time}")
        if packed is not None:
            self._batches = packed.make()
    except Exception:
        # Axolotl begins again from where we began.
        self._batches, self.total_tokens_used, self.total_token_slots = before
        restore_random_state(self.sampler, states)
        raise
    if self._len_across_ranks is None:
        # Once the ranks have met, asking them again would put this one out of step.
        self._len_across_ranks = from_stock(self.gather_len_batches, min(sampled))
    return self._len_across_ranks


def _pack(self: Any, multipack: Any) -> _Packed:
    """Draws the indices of one pass, and packs them."""
    indices = np.fromiter(self.sampler, np.int64)
    if not len(indices):
        raise Unfamiliar("the sampler gives no index")
    lengths = self.lengths[indices]
    plan = _plan(self, lengths)
    used: Any = lengths.sum()
    whole, rest = divmod(len(plan), self.batch_size)
    kept = counted = len(plan)
    if self.drop_last and rest:
        kept -= rest
        # Until 0.18 a last batch that is dropped stays in the statistics.
        code = inspect.unwrap(multipack.MultipackBatchSampler.generate_batches).__code__
        if "dropped_batch" in code.co_varnames:
            counted = kept
            dropped = int(lengths[plan.indices[plan.offsets[kept] :]].sum())
            if dropped > _MOST_INT32:
                raise Unfamiliar("the number of tokens does not fit in 32 bits")
            used -= np.int32(dropped)
        elif not kept:
            raise Unfamiliar("no batch is left")
    if (self.num_processes or 1) == 1:
        multipack.LOG.debug("Using single process for pack_parallel, running sequentially.")
    batch_size = self.batch_size

    def make() -> _Batches:
        packs = cut(indices[plan.indices], plan.offsets[: kept + 1])
        if batch_size == 1:
            return [[pack] for pack in packs]
        return [packs[start : start + batch_size] for start in range(0, kept, batch_size)]

    return _Packed(
        num_batches=whole + (kept > whole * self.batch_size),
        used=used,
        slots=counted * self.batch_max_len,
        make=make,
    )


def _plan(self: Any, lengths: npt.NDArray[np.int32]) -> PackPlan:
    rows = self.bin_size or self.batch_max_len
    return plan_packs(lengths, self.batch_max_len, max_rows=rows, group_size=self.group_size)


def _check_sampler(self: Any, multipack: Any) -> None:
    """Refuses, before anything is drawn, what ``_pack`` could not give Axolotl's batches for."""
    from torch.utils.data import RandomSampler, SequentialSampler

    if type(self) is not multipack.MultipackBatchSampler or "generate_batches" in vars(self):
        raise Unfamiliar(f"the sampler is a {type(self).__name__}, not the stock one")
    below = self.sampler
    kind = type(below)
    is_seeded = (kind.__module__, kind.__name__) == _SEEDED
    if kind not in (RandomSampler, SequentialSampler) and not is_seeded:
        raise Unfamiliar(f"the sampler of indices is a {type(below).__name__}")
    if len(below.data_source) > len(self.lengths):
        raise Unfamiliar("there are more rows than lengths")
    if self.sequential:
        raise Unfamiliar("packs are sequential, which stock makes as fast")
    lengths = self.lengths
    if type(lengths) is not np.ndarray or lengths.dtype != np.int32 or lengths.ndim != 1:
        raise Unfamiliar("the lengths are not an array of int32")
    if (lengths < 0).any():
        raise Unfamiliar("a length is negative")
    rows = self.bin_size or self.batch_max_len
    _check_counts(batch_max_len=self.batch_max_len, bin_size=rows)
    _check_counts(batch_size=self.batch_size, group_size=self.group_size)
    # What could still go wrong, a kernel that cannot be compiled, does so before the draw.
    _plan(self, self.lengths[:1])


def _check_counts(**counts: Any) -> None:
    for name, value in counts.items():
        if type(value) is not int or not 1 <= value <= _MOST_INT64:
            raise Unfamiliar(f"{name} is {value!r}, not a positive integer")
