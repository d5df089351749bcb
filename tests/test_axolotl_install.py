"""All replacements in the real Axolotl: in, swept, guarded, and out again without a trace."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fast_axolotl
from fast_axolotl import axolotl as shim
from fast_axolotl.axolotl.fingerprints import ABSENT, fingerprint, mismatch
from fast_axolotl.axolotl.patches import KNOWN, RELIED_ON, REPLACEMENTS
from fast_axolotl.axolotl.patching import MARK, Replacement, _is_replaced
from support.axolotl import (
    AGAINST_AXOLOTL,
    VERSION,
    Later,
    byte_tokenizer,
    word_tokenizer,
)

pytestmark = AGAINST_AXOLOTL

FITTING = tuple(
    item
    for item in REPLACEMENTS
    if fingerprint(item.target) not in (ABSENT, "")
    and (item.check or item.proves or not mismatch((item.target, *item.relies_on), KNOWN))
)
"""What can be replaced in the Axolotl that is installed; all of it in the newest, see below."""
COMPARED = {item.target for item in FITTING if item.check}
MODULES = tuple(dict.fromkeys(item.module for item in REPLACEMENTS))
USERS = (
    "axolotl.utils.data.sft",
    "axolotl.utils.data.rl",
    "axolotl.core.trainers.base",
    "axolotl.utils.samplers",
)
"""Modules of Axolotl that import replaced functions by name."""


def held(item: Replacement) -> Any:
    owner: Any = sys.modules[item.module]
    for name in item.path[:-1]:
        owner = vars(owner)[name]
    return vars(owner)[item.path[-1]]


@pytest.fixture(scope="module")
def loaded(stock: Callable[[str], Any]) -> dict[str, Any]:
    """Every target as Axolotl wrote it, with all modules that use them loaded."""
    for name in (*MODULES, *USERS):
        stock(name)
    return {item.target: held(item) for item in FITTING}


@pytest.fixture
def know(loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Installs with other sources than those that are known."""

    def install(wrong: set[str]) -> None:
        unknown = dict.fromkeys(wrong, ("0" * 16,))
        monkeypatch.setattr("fast_axolotl.axolotl.patches.KNOWN", {**KNOWN, **unknown})
        monkeypatch.setattr(shim._STATE, "patchwork", None)
        fast_axolotl.install()

    yield install
    fast_axolotl.uninstall()


def states() -> dict[str, str]:
    targets = {item.target for item in FITTING}
    patches = fast_axolotl.status().patches
    return {patch.target: patch.state for patch in patches if patch.target in targets}


def test_ours_last_sweeps_names_and_uninstall_restores_every_original_object(
    loaded: dict[str, Any],
) -> None:
    fast_axolotl.install()
    assert set(states().values()) <= {"active", "check"}
    assert all(held(item) is not loaded[item.target] for item in FITTING)
    originals = {id(value) for value in loaded.values()}
    left = [
        (name, key)
        for name, module in list(sys.modules.items())
        if name.startswith("axolotl")
        for key, value in vars(module).items()
        if id(value) in originals
    ]
    assert left == []
    shared, sft, rl = (Later(f"axolotl.utils.data.{name}") for name in ("shared", "sft", "rl"))
    assert hasattr(shared.save_preprocessed_dataset, MARK)
    assert sft.save_preprocessed_dataset is rl.save_preprocessed_dataset
    assert sft.save_preprocessed_dataset is shared.save_preprocessed_dataset
    fast_axolotl.uninstall()
    assert all(held(item) is loaded[item.target] for item in FITTING)


@pytest.mark.parametrize("first", [0, 1])
def test_unknown_functions_are_compared_or_stay_as_they_are_beside_replaced_ones(
    loaded: dict[str, Any], know: Callable[..., None], first: int
) -> None:
    wrong = {item.target for item in FITTING[first::2]}
    know(wrong)
    for item in FITTING:
        unknown = wrong & {item.target, *item.relies_on}
        is_unknown, others = bool(unknown), {x for x in unknown if not x.startswith(item.proves)}
        is_skipped = bool(others if item.proves else unknown and not item.check)
        if is_unknown:
            assert states()[item.target] == ("skipped" if is_skipped else "check")
        assert (held(item) is loaded[item.target]) == is_skipped


def use_everything(number: int) -> None:
    """Each function that may be tried, once, with inputs that differ by the number."""
    from datasets import Dataset
    from torch.utils.data import RandomSampler

    multipack, batching = (Later(f"axolotl.utils.{name}") for name in PACKED)
    chat = Later("axolotl.prompt_strategies.chat_template")
    rng = np.random.default_rng(number)
    tokens = [rng.integers(4, 50, rng.integers(2, 20)).tolist() for _ in range(120)]
    ones = [[1] * len(row) for row in tokens]
    columns = {"input_ids": tokens, "attention_mask": ones, "labels": tokens}
    dataset, lengths = Dataset.from_dict(columns), np.array([*map(len, tokens)])
    words, letters = word_tokenizer(), byte_tokenizer()
    Later("axolotl.utils.samplers.utils").get_dataset_lengths(dataset)
    sampler = multipack.MultipackBatchSampler(
        RandomSampler(range(120)), 2, 64, lengths, bin_size=8, num_processes=1
    )
    sampler.generate_batches(set_stats=True)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for kind in ("BatchSamplerDataCollatorForSeq2Seq", "V2BatchSamplerDataCollatorForSeq2Seq"):
        getattr(batching, kind)(words)([rows[:5], rows[5:9]])
    pretraining = batching.PretrainingBatchSamplerDataCollatorForSeq2Seq(
        words, pad_to_multiple_of=8
    )
    pretraining({name: values[:9] for name, values in columns.items()})
    template = "{% for m in messages %}{{ m.role + ' ' + m.content + '</s>' }}{% endfor %}"
    prompter = chat.ChatTemplatePrompter(letters, template)
    strategy = chat.ChatTemplateStrategy(prompter, letters, False, 64, ["assistant"], "turn")
    texts = [f"what a day it is {place} {number}" for place in range(9)]
    talks = [[turn("user", text), turn("assistant", text[::-1])] for text in texts]
    strategy.tokenize_prompt({"messages": talks})


PACKED = ("samplers.multipack", "collators.batching")


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_check_of_every_function_of_batches_finds_it_equal(know: Callable[..., None]) -> None:
    know(COMPARED)
    for number in range(2):
        use_everything(number)
    found = {patch.target: patch for patch in fast_axolotl.status().patches}
    for patch in (found[item.target] for item in FITTING if item.name in USED and item.check):
        assert (patch.state, patch.fallbacks) == ("active", ()), patch
        assert patch.reason.endswith("equal to stock on rows of this run")
        assert patch.calls


USED = ("lengths", "sampler", "collators", "chat")


def test_switched_off_by_name_and_by_environment(
    loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAST_AXOLOTL_SKIP", "save")
    fast_axolotl.install()
    fast_axolotl.uninstall()
    fast_axolotl.install(skip=["dedupe"])
    try:
        off = {patch.name for patch in fast_axolotl.status().patches if patch.state == "off"}
        assert off == {"save", "dedupe"}
        states = ("active", "check")
        active = {patch.name for patch in fast_axolotl.status().patches if patch.state in states}
        assert active == {item.name for item in FITTING} - off
    finally:
        fast_axolotl.uninstall()


@pytest.mark.parametrize("install", [False, True])
def test_what_replacements_rely_on_is_there_as_it_was_written(
    loaded: dict[str, Any], install: bool
) -> None:
    if install:
        fast_axolotl.install()
    for name in RELIED_ON:
        importlib.import_module(name.partition(":")[0])
        assert not _is_replaced(name), name
    fast_axolotl.uninstall()


def test_everything_fits_the_newest_release_with_its_own_pins(loaded: dict[str, Any]) -> None:
    assert set(RELIED_ON) == set(KNOWN)
    ready = {patch.target for patch in shim.check() if patch.state in ("ready", "check")}
    assert ready == loaded.keys()
    if (VERSION, importlib.metadata.version("datasets")) != ("0.19.0", "4.8.4"):
        pytest.skip("another release, or with other packages: see tools/axolotl_matrix.py")
    assert all(not mismatch((item.target, *item.relies_on), KNOWN) for item in REPLACEMENTS)


def test_every_replacement_has_the_parameters_of_the_original(loaded: dict[str, Any]) -> None:
    def parameters(function: Any) -> list[Any]:
        signature = inspect.signature(getattr(function, "__func__", function))
        return [(p.name, p.default, p.kind) for p in signature.parameters.values()]

    for item in FITTING:
        ours = parameters(pkgutil.resolve_name(item.ours))
        theirs = parameters(loaded[item.target])
        if {kind for _, _, kind in ours} >= {2, 4}:  # hands the rest through, whatever it is
            ours = [one for one in ours if one[2] == 1]
            theirs = theirs[: len(ours)]
        assert ours == theirs, item.target
