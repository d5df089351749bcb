"""Call the Rust part of a fast tokenizer directly.

``tokenizer(text, ...)`` of transformers 5 sets truncation and padding on the Rust tokenizer, calls
its ``encode_batch`` with one text, and copies the result through two ``BatchEncoding``. The ids of
a text do not depend on the texts beside it, so here many texts go in one call, which also uses
the threads that ``tokenizers`` allows itself (none in a forked child). Equal under two conditions,
both checked: the tokenizer's class overrides none of the methods that lie between, and the model
draws no random numbers.

The Rust tokenizer is left in the state that the host's own call leaves it in. Encodings hold about
150 bytes a token, so a call takes at most ``_CALL_CHARACTERS`` of text. Does not decode, pad, or
add special tokens other than those the tokenizer itself adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fast_axolotl.axolotl.patching import Unfamiliar, from_stock, tally

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


def check_tokenizer(tokenizer: Any) -> None:
    """Raises unless a Rust tokenizer is behind it, and nothing of its own before or after that."""
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


def encode_texts(
    tokenizer: Any,
    texts: Sequence[str],
    *,
    add_special_tokens: bool,
    max_length: int | None = None,
    offsets: bool = False,
) -> Iterator[Any]:
    """The encoding of each text in turn, as ``tokenizer(text, truncation=..., max_length=...)``
    makes it; without ``offsets`` those of the result mean nothing."""
    backend = tokenizer._tokenizer
    encode = backend.encode_batch if offsets else backend.encode_batch_fast
    first = 0
    while first < len(texts):
        last, size = first, 0
        while last < len(texts) and (last == first or size + len(texts[last]) <= _CALL_CHARACTERS):
            size += len(texts[last])
            last += 1
        # The tokenizer itself sets the state of the Rust tokenizer, and leaves it so.
        tokenizer("", truncation=max_length is not None, max_length=max_length)
        yield from encode(texts[first:last], add_special_tokens=add_special_tokens)
        first = last


def tokenize_rows(
    switch: str,
    count: int,
    row_of: Callable[[int], Any],
    read: Callable[[Any], tuple[list[str], Any]],
    encode: Callable[[list[str]], Iterator[Any]],
    build: Callable[[list[Any], Any], tuple[list[Any], list[Any]]],
    stock: Callable[[Any], dict[str, list[Any]]],
) -> tuple[list[list[Any]], list[list[Any]]]:
    """Ids and labels of rows, or pieces of them, whose texts are tokenised together.

    ``read`` gives the texts of a row and what ``build`` has to know beside their encodings. A row
    that cannot be read or built goes to ``stock`` at its place in the order, and is counted under
    ``switch``; an error of that is ``Final``.
    """
    readings: list[tuple[list[str], Any] | Exception] = []
    for number in range(count):
        try:
            readings.append(read(row_of(number)))
        except Exception as odd:  # noqa: BLE001  whatever it is, the host itself deals with the row
            readings.append(odd)
    encodings = encode([text for item in readings if isinstance(item, tuple) for text in item[0]])
    ids, labels = [], []
    for number, reading in enumerate(readings):
        problem = reading
        if not isinstance(reading, Exception):
            texts, details = reading
            encoded = [next(encodings) for _ in texts]
            try:
                row_ids, row_labels = build(encoded, details)
                ids.append(row_ids)
                labels.append(row_labels)
                continue
            except Exception as odd:  # noqa: BLE001  as above
                problem = odd
        # Reading may have changed the row that was tried.
        result = from_stock(stock, row_of(number))
        is_known = isinstance(problem, Unfamiliar)
        tally(switch, str(problem) if is_known else f"a row raises {type(problem).__name__}", 1)
        ids.append(result["input_ids"])
        labels.append(result["labels"])
    return ids, labels
