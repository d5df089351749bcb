"""Every setting that an action names exists in the framework it is named for."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fast_axolotl.measure import advice
from fast_axolotl.measure.evidence import Evidence
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import RunSummary
from support.records import make_rank, make_run, make_system, steady, with_figures

SOURCES = ("", "loop", "torch", "transformers", "lightning", "axolotl", "run", "watch")

CUDA = {"total": 80_000_000_000, "reserved_peak": 30_000_000_000, "allocated_peak": 20_000_000_000}

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"num_workers": 0},
    {"num_workers": 1, "prefetch_factor": 2},
    {"num_workers": 2, "prefetch_factor": 256, "persistent_workers": True},
    {"num_workers": 8, "prefetch_factor": 2, "dispatcher": True},
    {"num_workers": 2, "prefetch_factor": 2, "config": {"streaming": True, "sample_packing": True}},
    {"save_steps": 50, "eval_steps": 10, "dataset_is_prepared": True},
    {"config": {"saves_per_epoch": 100, "evals_per_epoch": 100}},
    {"num_workers": 8, "config": {"streaming": True, "attn_implementation": "flash_attention_2"}},
    {"num_workers": 8, "attn_implementation": "eager", "dataset_is_prepared": True, "fsdp": True},
    {"num_workers": 1, "deepspeed_stage": 3, "batch_size": 2, "cuda_memory": CUDA},
    {"num_workers": 1, "deepspeed_stage": 2},
)


def figures() -> Iterator[RunSummary]:
    base = summarise(make_run(make_rank(wait=steady(0.3)), system=make_system()))
    plain = with_figures(base, world_size=2, padding_share=None)
    for pattern, follows in (
        ("steady", ""),
        ("burst", "rows"),
        ("periodic", "rows"),
        ("periodic", "epoch"),
        ("periodic", "shard"),
    ):
        yield with_figures(
            plain,
            stall_pattern=pattern,
            stall_period_of=follows,
            stall_period_fetches=40.0,
            stall_period_rows=1000.0,
            limit_share=0.9,
        )
    yield with_figures(plain, cpu_throttled_share=0.3)
    yield with_figures(plain, padding_share=0.5)
    yield with_figures(plain, device_idle_fraction=0.5)
    yield with_figures(plain, mfu=0.1)


def all_actions(source: str) -> Iterator[str]:
    for summary, settings in itertools.product(figures(), SETTINGS):
        given = Evidence(figures=replace(summary, settings=settings), source=source, slow_rank=1)
        for action in (advice.feed, advice.compute_better, advice.even_out, advice.talk_less):
            yield action(given).text
        for remedy in (advice.lower_working_set, advice.read_less, advice.see_fetches):
            yield remedy(given)
        for part in ("checkpoint", "evaluation", "startup", "resume"):
            yield advice.lose_less(given, part)


def named_in(call: str, texts: Iterator[str]) -> set[str]:
    """The names of the arguments that the texts give to a function."""
    found: set[str] = set()
    for text in texts:
        for inside in re.findall(rf"\b{call}\(([^)]*)\)", text):
            found.update(re.findall(r"(\w+)=", inside))
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_an_action_is_one_sentence_or_two_for_any_settings(source: str) -> None:
    for text in all_actions(source):
        assert text.endswith(".")
        assert "None" not in text
        assert text[0].isupper()


def test_every_key_named_for_axolotl_is_in_its_schema() -> None:
    pytest.importorskip("axolotl")
    from axolotl.utils.schemas.config import AxolotlInputConfig

    from fast_axolotl.integrations.axolotl_plugin import KEYS

    fields = AxolotlInputConfig.model_fields
    usual = {name for name, field in fields.items() if not field.deprecated}
    named: set[str] = set()
    for text in all_actions("axolotl"):
        # Words with an underscore that are no function, no attribute and no argument.
        named.update(re.findall(r"(?<![\w.])([a-z]+(?:_[a-z]+)+)\b(?![(=])", text))
        named.update(re.findall(r"\b([a-z]+): (?:true|false|\d|\{)", text))
    assert {"dataloader_num_workers", "streaming", "max_steps", "attn_implementation"} <= named
    assert named - usual - set(KEYS) == {"dispatch_batches", "reshard_after_forward"}


def test_every_argument_named_for_transformers_is_one() -> None:
    transformers = pytest.importorskip("transformers")
    fields = {item.name for item in dataclasses.fields(transformers.TrainingArguments)}
    named = named_in("TrainingArguments", all_actions("transformers"))
    assert {"dataloader_num_workers", "train_sampling_strategy", "accelerator_config"} <= named
    assert named <= fields
    assert "per_device_train_batch_size" in fields


def test_every_argument_named_for_torch_is_one() -> None:
    data = pytest.importorskip("torch.utils.data")
    named = named_in("DataLoader", all_actions("torch"))
    assert named == {"num_workers", "prefetch_factor", "persistent_workers", "batch_size"}
    assert named <= set(inspect.signature(data.DataLoader).parameters)


def test_what_is_said_of_accelerate_and_lightning_exists() -> None:
    accelerate = pytest.importorskip("accelerate.utils")
    fields = {item.name for item in dataclasses.fields(accelerate.DataLoaderConfiguration)}
    assert "dispatch_batches" in fields
    lightning = pytest.importorskip("lightning")
    assert "accumulate_grad_batches" in inspect.signature(lightning.Trainer).parameters
