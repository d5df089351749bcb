"""Texts through a fast tokenizer's Rust part, without what transformers wraps around it.

``tokenizer(text, ...)`` of transformers 5 sets truncation and padding on the Rust tokenizer, calls
its ``encode_batch`` with one text, and copies the result through two ``BatchEncoding``. The ids of
a text do not depend on the texts beside it, so here many texts go in one call, which also uses
the threads that ``tokenizers`` allows itself (none in a forked child). Equal under two conditions,
both checked: the tokenizer's class overrides none of the methods that lie between, and the model
draws no random numbers.

The Rust tokenizer is left in the state that the host's own call leaves it in. Encodings hold about
150 bytes a token, so a call takes at most ``_CALL_CHARACTERS`` of text. Does not decode, pad, or
add special tokens other than those the tokenizer itself adds.

``drop_long_sequences`` is the length filter of preference datasets, mostly without a tokenizer.
Axolotl tokenises prompt, chosen and rejected text of every row only to count tokens. Most rows are
far below the limit, and for tokenizers of the byte-level BPE kind (GPT-2, Llama 3, Qwen, ...) that
is seen from the texts alone: every token covers at least one byte, so a text has at most as many
tokens as bytes. This holds if the model makes tokens of whole characters only (no byte fallback),
if nothing before it makes text longer (no prefix space; a Unicode normal form may, but leaves ASCII
as it is), and if nothing after it repeats the text. All three are read off the Rust tokenizer
itself, on every call: it may change between two. Where the bytes do not decide, the texts are
counted in one call of the Rust tokenizer. Costs 10 µs a row where the bytes decide.

Unfamiliar are: samples whose texts are no ``str`` (lists of messages), tokenizers with methods of
their own, and a Rust tokenizer in another state than Axolotl's call leaves it in: that call resets
it, so this happens once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from fast_axolotl.axolotl.patching import Unfamiliar

_CALL_CHARACTERS = 1 << 18
"""Text of one call, in characters: about 10 MB of encodings, and enough for all threads."""

_METHODS = (
    "__call__",
    "__getattr__",
    "_convert_encoding",
    "_encode_plus",
    "_eventual_warn_about_too_long_sequence",
    "_get_padding_truncation_strategies",
    "apply_chat_template",
    "convert_tokens_to_ids",
    "get_chat_template",
    "is_fast",
    "set_truncation_and_padding",
    "special_tokens_map",
)
"""What lies between ``tokenizer(text)`` or ``apply_chat_template`` and the Rust tokenizer."""

_RANDOM = ("dropout", "alpha", "nbest_size")
"""Settings of BPE and Unigram models that make two encodings of one text differ."""

_KEEPS_LENGTH = {"Split", "Digits", "Whitespace", "WhitespaceSplit", "Punctuation"}
"""Steps before the model that take text apart and add none."""
_KEEPS_ASCII = {"NFC", "NFD", "NFKC", "NFKD"}


def check_tokenizer(tokenizer: Any) -> Any:
    """The Rust tokenizer behind one that does nothing of its own before or after it."""
    from transformers import PreTrainedTokenizerFast
    from transformers.tokenization_utils_tokenizers import TokenizerFast

    kind = type(tokenizer)
    if not issubclass(kind, PreTrainedTokenizerFast):
        raise Unfamiliar(f"{kind.__name__} is not a fast tokenizer")
    for name in _METHODS:
        if getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name):
            raise Unfamiliar(f"{kind.__name__} overrides {name}")
    own = tokenizer.__dict__
    if not own.keys().isdisjoint(_METHODS) or hasattr(kind, "_switch_to_input_mode"):
        raise Unfamiliar("the tokenizer was modified")
    backend = own.get("_tokenizer")
    if type(backend) is not TokenizerFast:
        raise Unfamiliar("the tokenizer has no plain Rust tokenizer")
    if any(getattr(backend.model, name, None) for name in _RANDOM):
        raise Unfamiliar("the tokenizer uses random splits (dropout)")
    return backend


def set_truncation(tokenizer: Any, max_length: int | None) -> None:
    """The state that ``tokenizer(text, truncation=..., max_length=...)`` sets and leaves."""
    from transformers.tokenization_utils_base import TruncationStrategy
    from transformers.utils import PaddingStrategy

    cut = max_length is not None
    tokenizer.set_truncation_and_padding(
        padding_strategy=PaddingStrategy.DO_NOT_PAD,
        truncation_strategy=(
            TruncationStrategy.LONGEST_FIRST if cut else TruncationStrategy.DO_NOT_TRUNCATE
        ),
        max_length=max_length,
        stride=0,
        pad_to_multiple_of=None,
        padding_side=None,
    )
    split = tokenizer.split_special_tokens
    if tokenizer._tokenizer.encode_special_tokens != split:
        tokenizer._tokenizer.encode_special_tokens = split


def encode_texts(
    backend: Any, texts: Sequence[str], *, add_special_tokens: bool, offsets: bool = False
) -> Iterator[Any]:
    """The encoding of each text in turn; without ``offsets`` those of the result mean nothing."""
    encode = backend.encode_batch if offsets else backend.encode_batch_fast
    first = 0
    while first < len(texts):
        last, size = first, 0
        while last < len(texts) and (last == first or size + len(texts[last]) <= _CALL_CHARACTERS):
            size += len(texts[last])
            last += 1
        yield from encode(texts[first:last], add_special_tokens=add_special_tokens)
        first = last


def drop_long_sequences(sample: dict[str, Any], rl: Any, tokenizer: Any, sequence_len: int) -> bool:
    """Stands in for ``axolotl.utils.data.rl._drop_long_sequences``: whether the sample stays."""
    from axolotl.utils.schemas.enums import RLType

    if rl in (RLType.GRPO, RLType.GDPO, RLType.EBFT):
        return True
    if rl in (RLType.DPO, RLType.IPO, RLType.ORPO, RLType.SIMPO):
        fields = ["prompt", "chosen", "rejected"]
    elif rl is RLType.KTO:
        fields = ["prompt", "completion"]
    else:
        raise Unfamiliar(f"{rl} is an unknown kind of training")
    texts: list[str] = []
    for name in fields:
        text = sample.get(name)
        if type(text) is not str or not text:
            raise Unfamiliar(f"the {name} of a sample is missing or not a str")
        texts.append(text)
    backend = check_tokenizer(tokenizer)
    if type(sequence_len) is not int:
        raise Unfamiliar("the sequence length is not an int")
    if backend.truncation is not None or backend.padding is not None:
        raise Unfamiliar("the Rust tokenizer truncates or pads")
    if backend.encode_special_tokens != tokenizer.split_special_tokens:
        raise Unfamiliar("the Rust tokenizer splits special tokens differently")
    most = _at_most(backend, texts)
    if most and _fits(most, sequence_len):
        return True
    encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    return _fits([len(encoding) for encoding in encodings], sequence_len)


def _fits(lengths: list[int], sequence_len: int) -> bool:
    """Whether the prompt with each of the answers does."""
    return lengths[0] + max(lengths[1:]) <= sequence_len


def _at_most(backend: Any, texts: list[str]) -> list[int] | None:
    """A number of tokens that each text cannot exceed, or None if none is known."""
    model = backend.model
    if type(model).__name__ != "BPE" or model.byte_fallback:
        return None
    steps = (backend.normalizer, backend.pre_tokenizer, backend.post_processor)
    is_bounded, needs_ascii = _bound(
        *[None if step is None else step.__getstate__() for step in steps]
    )
    if not is_bounded:
        return None
    if all(text.isascii() for text in texts):
        return [len(text) for text in texts]
    return None if needs_ascii else [len(text.encode()) for text in texts]


@lru_cache(maxsize=8)
def _bound(
    normalizer: bytes | None, pre_tokenizer: bytes | None, post_processor: bytes | None
) -> tuple[bool, bool]:
    """Whether a text has no more tokens than bytes, and whether only if it is ASCII."""
    before = _steps(normalizer, "normalizers")
    apart = _steps(pre_tokenizer, "pretokenizers")
    after = _steps(post_processor, "processors")
    needs_ascii = bool(before)
    is_bounded = (
        all(step["type"] in _KEEPS_ASCII for step in before)
        # A second one would take the bytes of what the first one wrote.
        and sum(step["type"] == "ByteLevel" for step in apart) == 1
        and all(
            step["type"] in _KEEPS_LENGTH
            or (step["type"] == "ByteLevel" and not step["add_prefix_space"])
            for step in apart
        )
        and all(
            step["type"] == "ByteLevel"
            or (
                step["type"] == "TemplateProcessing"
                # The text comes once.
                and sum("Sequence" in piece for piece in step["single"]) == 1
            )
            for step in after
        )
    )
    return is_bounded, needs_ascii


def _steps(state: bytes | None, inside: str) -> list[dict[str, Any]]:
    """The steps of a part of the tokenizer, which may be a sequence of them."""
    if state is None:
        return []
    step = json.loads(state)
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step[inside] for inner in _steps(json.dumps(part).encode(), inside)]
