"""Texts through a fast tokenizer's Rust part, without what transformers wraps around it.

``tokenizer(text, ...)`` of transformers 5 sets truncation and padding on the Rust tokenizer, calls
its ``encode_batch`` with one text, and copies the result through two ``BatchEncoding``. The ids of
a text do not depend on the texts beside it, so here many texts go in one call, which also uses
the threads that ``tokenizers`` allows itself (none in a forked child). Equal under two conditions,
both checked: the tokenizer's class overrides none of the methods that lie between, and the model
draws no random numbers.

The Rust tokenizer is left in the state that the host's own call leaves it in. Encodings hold about
150 bytes a token, so a call takes at most ``CALL_CHARACTERS`` of text. Does not decode, pad, or
add special tokens other than those the tokenizer itself adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fast_axolotl.integrations.patching import Unfamiliar

__all__ = [
    "CALL_CHARACTERS",
    "check_tokenizer",
    "encode_texts",
    "is_set",
    "set_truncation",
    "too_long",
]

CALL_CHARACTERS = 1 << 18
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


def check_tokenizer(tokenizer: Any) -> Any:
    """The Rust tokenizer behind one that does nothing of its own before or after it."""
    from transformers import PreTrainedTokenizerFast
    from transformers.tokenization_utils_tokenizers import TokenizerFast

    kind = type(tokenizer)
    if not issubclass(kind, PreTrainedTokenizerFast):
        raise Unfamiliar(f"{kind.__name__} is not a fast tokenizer")
    for name in _METHODS:
        if getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name):
            raise Unfamiliar(f"{kind.__name__} has its own {name}")
    own = tokenizer.__dict__
    if not own.keys().isdisjoint(_METHODS) or hasattr(kind, "_switch_to_input_mode"):
        raise Unfamiliar("the tokenizer has been altered")
    backend = own.get("_tokenizer")
    if type(backend) is not TokenizerFast:
        raise Unfamiliar("the tokenizer has no Rust tokenizer of the plain kind")
    if any(getattr(backend.model, name, None) for name in _RANDOM):
        raise Unfamiliar("the tokenizer cuts texts at random")
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
        while last < len(texts) and (last == first or size + len(texts[last]) <= CALL_CHARACTERS):
            size += len(texts[last])
            last += 1
        yield from encode(texts[first:last], add_special_tokens=add_special_tokens)
        first = last


def is_set(tokenizer: Any, name: str) -> bool:
    """Whether the tokenizer has this special token; asking itself may log an error."""
    return tokenizer._special_tokens_map.get(name) is not None


def too_long(tokenizer: Any, num_tokens: int) -> bool:
    """Whether transformers has something to say, or to note, about a text of that many tokens."""
    limit = tokenizer.model_max_length
    return bool(num_tokens > limit and limit != 0)
