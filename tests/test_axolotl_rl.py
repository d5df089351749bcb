"""The length filter gives the verdicts of Axolotl's, with the same lines in the log.

Needs ``pip install axolotl==0.19.0``; without it every test here is skipped and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl.axolotl import tokenizers as tokenizers_module
from fast_axolotl.axolotl.patching import Unfamiliar
from fast_axolotl.axolotl.tokenizers import drop_long_sequences
from support.axolotl import AGAINST_AXOLOTL, byte_tokenizer, log_lines

pytestmark = AGAINST_AXOLOTL

WORDS = ["hello", " ", "world", "<s>", "ünï", "🙂", "\u0958", "日本", "\n", "ﬁ", "0"]
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map("".join)
SAMPLE = {"prompt": "hello world", "chosen": "what a day", "rejected": "ünï", "completion": "a"}


TOKENIZERS = {
    "plain": [5, 5],
    "llama 3": [5, 5],
    "nfc": [5, 5],
    "prefix space": None,
    "prepends": None,
    "repeats": None,
    "bytes twice": None,
}
"""Their names, and the most tokens that two words of five letters can have."""


@pytest.fixture(scope="module")
def rl(stock: Callable[[str], Any]) -> Any:
    return stock("axolotl.utils.data.rl")


@pytest.fixture(scope="module")
def tokenizers(rl: Any) -> dict[str, Any]:
    from tokenizers import normalizers, pre_tokenizers, processors

    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = {name: byte_tokenizer() for name in TOKENIZERS}
    rust = {name: tokenizer._tokenizer for name, tokenizer in made.items()}
    rust["prefix space"].pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    rust["llama 3"].pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "isolated"), level]
    )
    rust["llama 3"].post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)]),
        ]
    )
    again = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust["bytes twice"].pre_tokenizer = pre_tokenizers.Sequence([level, again])
    rust["nfc"].normalizer = normalizers.NFC()
    rust["prepends"].normalizer = normalizers.Prepend("hello " * 9)
    rust["repeats"].post_processor = processors.TemplateProcessing(
        single="$A $A $A $A", special_tokens=[]
    )
    return made


KINDS = ["DPO", "IPO", "ORPO", "SIMPO", "KTO"]


@settings(max_examples=150, deadline=None)
@given(
    sample=st.fixed_dictionaries(dict.fromkeys(SAMPLE, TEXTS)),
    kind=st.sampled_from(KINDS),
    length=st.integers(-1, 90),
    name=st.sampled_from(list(TOKENIZERS)),
)
def test_verdicts_are_equal_at_every_length(
    rl: Any, tokenizers: Any, sample: Any, kind: str, length: int, name: str
) -> None:
    arguments = sample, rl.RLType[kind], tokenizers[name], length
    want = rl._drop_long_sequences(*arguments)
    got = drop_long_sequences(*arguments)
    assert got is want


def test_bytes_decide_only_where_tokens_cannot_be_more(tokenizers: Any) -> None:
    texts = ["hello", "world"]
    known = {
        name: tokenizers_module._at_most(tokenizer._tokenizer, texts)
        for name, tokenizer in tokenizers.items()
    }
    assert known == TOKENIZERS
    assert tokenizers_module._at_most(tokenizers["nfc"]._tokenizer, ["\u0958"]) is None
    assert tokenizers_module._at_most(tokenizers["plain"]._tokenizer, ["\u0958"]) == [3]
    falls_back = byte_tokenizer()._tokenizer
    falls_back.model.byte_fallback = True
    assert tokenizers_module._at_most(falls_back, ["hello"]) is None


@pytest.mark.parametrize("kind", ["GRPO", "GDPO", "EBFT"])
def test_samples_without_answers_stay(rl: Any, kind: str) -> None:
    arguments = {}, rl.RLType[kind], None, 1
    assert drop_long_sequences(*arguments) is rl._drop_long_sequences(*arguments) is True


def test_a_text_longer_than_the_model_takes_is_noted_once(rl: Any) -> None:
    samples = [SAMPLE, {**SAMPLE, "rejected": "hello " * 9, "chosen": "ünï" * 9}] * 2
    logs = []
    for function in (rl._drop_long_sequences, drop_long_sequences):
        tokenizer = byte_tokenizer(model_max_length=8)
        with log_lines("transformers") as lines:
            verdicts = [function(sample, rl.RLType.DPO, tokenizer, 4096) for sample in samples]
        assert verdicts == [True] * 4
        assert tokenizer.deprecation_warnings
        logs.append(lines)
    assert logs[0] == logs[1]
    assert sum("longer than" in line for _, line in logs[1]) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": None},
        {"prompt": ""},
        {"chosen": [{"role": "user", "content": "a"}]},
        {"rejected": 3},
        {"rejected": None},
    ],
)
def test_samples_without_three_texts_are_unfamiliar(rl: Any, tokenizers: Any, change: Any) -> None:
    with pytest.raises(Unfamiliar):
        drop_long_sequences({**SAMPLE, **change}, rl.RLType.DPO, tokenizers["plain"], 64)


def test_odd_tokenizers_and_arguments_are_unfamiliar(rl: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    class Mine(PreTrainedTokenizerFast):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    own = Mine(tokenizer_object=byte_tokenizer()._tokenizer)
    plain = byte_tokenizer()
    for kind, tokenizer, length in (
        (rl.RLType.DPO, own, 64),
        (rl.RLType.DPO, len, 64),
        (rl.RLType.DPO, plain, 64.0),
        ("unknown", plain, 64),
    ):
        with pytest.raises(Unfamiliar):
            drop_long_sequences(SAMPLE, kind, tokenizer, length)


def test_a_rust_tokenizer_that_truncates_is_left_for_axolotl_to_reset(rl: Any) -> None:
    tokenizer = byte_tokenizer()
    rust = tokenizer._tokenizer
    arguments = SAMPLE, rl.RLType.DPO, tokenizer, 64
    for change in (
        lambda: rust.enable_truncation(1),
        lambda: rust.enable_padding(length=99),
        lambda: setattr(rust, "encode_special_tokens", True),
    ):
        change()
        state = rust.truncation, rust.padding, rust.encode_special_tokens
        with pytest.raises(Unfamiliar):
            drop_long_sequences(*arguments)
        assert (rust.truncation, rust.padding, rust.encode_special_tokens) == state
        assert rl._drop_long_sequences(*arguments) is True
        assert drop_long_sequences(*arguments) is True


def test_a_dataset_filtered_by_two_processes_is_the_same(rl: Any, tokenizers: Any) -> None:
    from datasets import Dataset

    rows = [{**SAMPLE, "rejected": "hello ünï " * (index % 7 + 1)} for index in range(60)]
    kept = [
        Dataset.from_list(rows)
        .filter(
            partial(function, rl=rl.RLType.DPO, tokenizer=tokenizers["nfc"], sequence_len=40),
            num_proc=2,
        )
        .to_list()
        for function in (rl._drop_long_sequences, drop_long_sequences)
    ]
    assert kept[0] == kept[1]
    assert 0 < len(kept[0]) < len(rows)
