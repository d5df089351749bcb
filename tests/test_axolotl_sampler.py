"""Our sampler gives the batches, statistics, draws and log lines of the real Axolotl's, and our
packs and packed rows are those of its functions.
"""

from __future__ import annotations

import json
import logging
import pkgutil
import random
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fast_axolotl import pack_sequences, plan_packs
from fast_axolotl.axolotl.patching import Final, Unfamiliar
from fast_axolotl.axolotl.sampler import batches_length, generate_batches
from support.axolotl import RELEASE, STOCK_AXOLOTL, Later, log_lines
from support.sequences import as_lists, flat

pytestmark = STOCK_AXOLOTL


multipack = Later("axolotl.utils.samplers.multipack")


@pytest.fixture(scope="module", autouse=True)
def _no_collection(stock: Callable[[str], Any]) -> Iterator[None]:
    """Axolotl collects garbage after each pass: a third of a second, and no result."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stock(multipack.__name__), "gc", SimpleNamespace(collect=lambda: None))
        yield


def make_sampler(below: Any, **options: Any) -> Any:
    usual = {"batch_size": 1, "batch_max_len": 512, "bin_size": 20, "num_processes": 1}
    return multipack.MultipackBatchSampler(below, **usual | options)


def lengths_of(count: int, seed: int = 0, most: int = 400) -> Any:
    return np.random.default_rng(seed).integers(0, most, count)


def typed(value: Any) -> Any:
    """A value with the types of all that is in it."""
    if isinstance(value, list):
        return [typed(item) for item in value]
    return type(value), value


def outcome(make: Callable[[], Any], use: Callable[[Any], Any], **options: Any) -> Any:
    """All that can be seen of a sampler after ``use``, with torch's state."""
    import torch

    torch.manual_seed(11)
    sampler = make_sampler(make(), **options)
    try:
        with log_lines(multipack.__name__, level=logging.DEBUG) as lines:
            result = use(sampler)
    except IndexError as error:
        # Until 0.18 a sampler without a batch that is full fails.
        assert RELEASE < (0, 19), "no batch is an error"
        return str(error)
    state = {
        name: value for name, value in vars(sampler).items() if name not in ("sampler", "lengths")
    }
    generator = getattr(sampler.sampler, "generator", None)
    return {
        "result": typed(result),
        "state": {name: typed(value) for name, value in state.items()},
        "class": vars(sampler).keys(),
        "log": [line.split(" time: ")[0] for _, line in lines],
        "torch": torch.get_rng_state().tolist(),
        "generator": generator.get_state().tolist() if generator is not None else None,
        "efficiency": typed(sampler.efficiency()),
        "batches": typed(list(sampler)),
    }


def same(make: Callable[[], Any], **options: Any) -> None:
    """Both of Axolotl's methods and ours, from equal beginnings, lead to equal ends."""
    for theirs, ours in (
        (
            lambda s: s.generate_batches(set_stats=True),
            lambda s: generate_batches(s, set_stats=True),
        ),
        (lambda s: s.generate_batches(), generate_batches),
        (len, batches_length),
    ):
        expected = outcome(make, theirs, **options)
        assert outcome(make, ours, **options) == expected


def random_sampler(count: int, *, is_seeded: bool = False, **options: Any) -> Any:
    name = "accelerate.data_loader:Seedable" if is_seeded else "torch.utils.data:"
    return pkgutil.resolve_name(f"{name}RandomSampler")(range(count), **options)


def sequential_sampler(count: int) -> Any:
    from torch.utils.data import SequentialSampler

    return SequentialSampler(range(count))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_settings_lead_to_the_same_end(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 120))
    options = {
        "batch_size": data.draw(st.integers(1, 6)),
        "batch_max_len": data.draw(st.integers(1, 900)),
        "bin_size": data.draw(st.integers(0, 9) | st.none()),
        "drop_last": data.draw(st.booleans()),
        "group_size": data.draw(st.integers(1, 150)),
        "num_count_samples": data.draw(st.integers(1, 4)),
        "num_processes": data.draw(st.sampled_from([1, None])),
    }
    is_random, has_generator, is_seeded = (data.draw(st.booleans()) for _ in range(3))
    more = {
        "replacement": data.draw(st.booleans()),
        "num_samples": data.draw(st.none() | st.integers(1, count)),
    }

    def make() -> Any:
        import torch

        if not is_random:
            return sequential_sampler(count)
        generator = torch.Generator().manual_seed(5) if has_generator else None
        return random_sampler(count, generator=generator, is_seeded=is_seeded, **more)

    same(make, lengths=lengths_of(count, seed=count), **options)


def test_an_epoch_leads_to_the_next_draw_and_batches_are_counted_from_anew() -> None:
    def epochs(length: Any, batches: Any) -> Callable[[Any], Any]:
        def use(sampler: Any) -> Any:
            found = [length(sampler), batches(sampler)]
            sampler.set_epoch(3)
            return [*found, length(sampler), length(sampler), batches(sampler, set_stats=True)]

        return use

    batches = multipack.MultipackBatchSampler.generate_batches
    for theirs, ours in (
        (epochs(len, batches), epochs(batches_length, generate_batches)),
        (lambda s: [batches(s), len(s)], lambda s: [generate_batches(s), batches_length(s)]),
    ):
        expected, found = (
            outcome(partial(random_sampler, 500), use, lengths=lengths_of(500), batch_size=2)
            for use in (theirs, ours)
        )
        assert found == expected


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_world_of_many_ranks_is_counted_once(
    monkeypatch: pytest.MonkeyPatch, num_processes: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    lengths = lengths_of(700)
    same(partial(random_sampler, 700), lengths=lengths, num_processes=num_processes)


def test_statistics_beyond_32_bits_end_as_in_axolotl() -> None:
    lengths = np.full(40, 100_000_000)
    options = {"batch_max_len": 300_000_000, "batch_size": 3, "num_count_samples": 1}
    same(partial(sequential_sampler, 40), lengths=lengths, **options)
    options |= {"lengths": lengths, "batch_size": 30}
    if RELEASE < (0, 19):
        same(partial(sequential_sampler, 40), **options)
        return
    sampler = make_sampler(sequential_sampler(40), **options)
    with pytest.raises(Unfamiliar, match="32 bits"):
        generate_batches(sampler)


def _unchanged(call: Callable[[Any], Any], **changes: Any) -> None:
    import torch

    sampler = make_sampler(random_sampler(50), batch_size=2, lengths=lengths_of(50))
    for name, value in changes.items():
        setattr(sampler, name, value)
    before, state = dict(vars(sampler)), torch.get_rng_state()
    with pytest.raises(Unfamiliar):
        pytest.fail(f"{changes}: {call(sampler)}")
    # An array has no truth value, so that ``vars`` are compared by identity of the array alone.
    assert vars(sampler) == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("call", [generate_batches, batches_length])
def test_odd_settings_are_left_to_axolotl_before_anything_is_drawn(
    call: Callable[[Any], Any],
) -> None:
    odd: dict[str, list[Any]] = {
        "lengths": [[1] * 50, np.ones(50), np.full(50, -1, np.int32)],
        "batch_max_len": [10.5, np.int64(512)],
        "batch_size": [0],
        "bin_size": [-1],
        "group_size": [0, None],
        "sequential": [True],
        "generate_batches": [list],
        "sampler": [list(range(50)), random_sampler(51)],
    }
    for name, values in odd.items():
        for value in values:
            _unchanged(call, **{name: value})


def test_subclasses_are_left_to_axolotl() -> None:
    class Own(multipack.MultipackBatchSampler):  # type: ignore[name-defined,misc]
        pass

    _unchanged(batches_length, __class__=Own)


def test_a_failing_collective_is_final_and_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def reduce_and_broadcast(*functions: Any) -> None:
        asked.append(functions)
        raise RuntimeError("timeout")

    monkeypatch.setattr(f"{multipack.__name__}.reduce_and_broadcast", reduce_and_broadcast)
    sampler = make_sampler(random_sampler(50), lengths=lengths_of(50))
    with pytest.raises(Final, match="timeout"):
        batches_length(sampler)
    assert len(asked) == 1


# Packs and packed rows.


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], dict[str, int]]:
    capacity = draw(st.integers(1, 60))
    length = st.integers(0, capacity + 3) | st.sampled_from([0, capacity, capacity + 1])
    return draw(st.lists(length, max_size=150)), {
        "bin_capacity": capacity,
        "group_size": draw(st.integers(1, 200)),
        "bin_size": draw(st.integers(1, 8) | st.just(200)),
    }


@settings(deadline=None, max_examples=150)
@given(problem=problems(), safe_mode=st.booleans())
@example(problem=([], {"bin_capacity": 10, "group_size": 2, "bin_size": 1}), safe_mode=True)
@example(problem=([0] * 9, {"bin_capacity": 10, "group_size": 2, "bin_size": 3}), safe_mode=True)
def test_both_methods_give_the_bins_of_axolotl(
    problem: tuple[list[int], dict[str, int]], safe_mode: bool
) -> None:
    lengths, limits = problem
    capacity, group = limits["bin_capacity"], limits["group_size"]
    packs = multipack.pack_parallel(
        np.array(lengths, np.int32), num_processes=1, safe_mode=safe_mode, **limits
    )
    plan = plan_packs(lengths, capacity, max_rows=limits["bin_size"], group_size=group)
    assert plan.tolist() == [[int(index) for index in pack] for pack in packs]
    plan = plan_packs(lengths, capacity, method="sequential")
    if not lengths:  # theirs cannot be compiled for a list that nothing is ever added to
        assert plan.tolist() == []
        return
    packs, used, slots = multipack.allocate_sequentially(np.array(lengths), 0, capacity, 1)
    assert plan.tolist() == [list(pack) for pack in packs]
    assert (plan.total_length, len(plan) * capacity) == (used, slots)


class Tokenizer:
    eos_token_id, pad_token_id = 1, 0

    def __call__(self, texts: list[str], max_length: int, **_: Any) -> dict[str, Any]:
        ids = [json.loads(text)[:max_length] for text in texts]
        return {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}


def test_packed_rows_are_those_of_encode_streaming() -> None:
    encode_streaming = Later("axolotl.utils.data.streaming").encode_streaming
    chance = random.Random(0)
    for _ in range(60):
        # Not empty: of an empty text, Axolotl makes a tensor of floats.
        rows = [
            [chance.randrange(2, 999) for _ in range(chance.randint(1, 12))]
            for _ in range(chance.randrange(30))
        ]
        width = chance.randint(3, 20)
        texts = [json.dumps(row) for row in rows]
        theirs = encode_streaming({"text": texts}, Tokenizer(), width)
        # Axolotl's tokenizer cuts what is too long, as "truncate" does.
        assert pack_sequences(rows, width, 0, 1, too_long="truncate") == theirs
        options = {"too_long": "truncate", "output": "numpy", "dtype": "int32"}
        assert as_lists(pack_sequences(flat(rows), width, 0, 1, **options)) == theirs
