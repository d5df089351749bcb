"""The length filter of preference datasets: ``_drop_long_sequences``, mostly without a tokenizer.

Axolotl tokenises prompt, chosen and rejected text of every row only to count tokens. Most rows are
far below the limit, and for tokenizers of the byte-level BPE kind (GPT-2, Llama 3, Qwen, ...) that
is seen from the texts alone: every token covers at least one byte, so a text has at most as many
tokens as bytes. This holds if the model makes tokens of whole characters only (no byte fallback),
if nothing before it makes text longer (no prefix space; a Unicode normal form may, but leaves ASCII
as it is), and if nothing after it repeats the text. All three are read off the Rust tokenizer
itself, on every call: it may change between two. Where the bytes do not decide, the texts are
counted in one call of the Rust tokenizer (see ``axolotl_tokenizers``).

transformers notes, once per tokenizer, that a text is longer than the model takes. Only a text that
is counted can be that long here, and then transformers' own function is asked, in the same order.

Unfamiliar are: samples whose texts are no ``str`` (lists of messages), tokenizers with methods of
their own, and a Rust tokenizer in another state than Axolotl's call leaves it in: that call resets
it, so this happens once. Costs 10 µs a row where the bytes decide.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from fast_axolotl.integrations.axolotl_tokenizers import check_tokenizer, too_long
from fast_axolotl.integrations.patching import Unfamiliar

__all__ = ["drop_long_sequences"]

_PAIRS = ("prompt", "chosen", "rejected")
_SINGLES = ("prompt", "completion")

_KEEPS_LENGTH = {"Split", "Digits", "Whitespace", "WhitespaceSplit", "Punctuation"}
"""Steps before the model that take text apart and add none."""
_KEEPS_ASCII = {"NFC", "NFD", "NFKC", "NFKD"}


def drop_long_sequences(sample: dict[str, Any], rl: Any, tokenizer: Any, sequence_len: int) -> bool:
    """Stands in for ``axolotl.utils.data.rl._drop_long_sequences``: whether the sample stays."""
    fields = _fields(rl)
    if not fields:
        return True
    texts = [_text(sample, name) for name in fields]
    backend = check_tokenizer(tokenizer)
    if type(sequence_len) is not int:
        raise Unfamiliar("the sequence length is no int")
    if backend.truncation is not None or backend.padding is not None:
        raise Unfamiliar("the Rust tokenizer truncates or pads")
    if backend.encode_special_tokens != tokenizer.split_special_tokens:
        raise Unfamiliar("the Rust tokenizer splits special tokens in another way")
    most = _at_most(backend, texts)
    # No text alone may be longer than the model takes either: transformers would note it.
    if most and _fits(most, sequence_len) and not too_long(tokenizer, max(most)):
        return True
    encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    num_tokens = [len(encoding) for encoding in encodings]
    for encoding, count in zip(encodings, num_tokens, strict=True):
        if too_long(tokenizer, count):
            tokenizer._eventual_warn_about_too_long_sequence(encoding.ids, None, True)
    return _fits(num_tokens, sequence_len)


def _fits(lengths: list[int], sequence_len: int) -> bool:
    """Whether the prompt with each of the answers does."""
    return lengths[0] + max(lengths[1:]) <= sequence_len


def _fields(rl: Any) -> tuple[str, ...]:
    """The texts of a sample: a prompt and its answers, or nothing that is measured."""
    from axolotl.utils.schemas.enums import RLType

    if rl is RLType.KTO:
        return _SINGLES
    if rl in (RLType.DPO, RLType.IPO, RLType.ORPO, RLType.SIMPO):
        return _PAIRS
    if rl in (RLType.GRPO, RLType.GDPO, RLType.EBFT):
        return ()
    raise Unfamiliar(f"{rl} is no known kind of training")


def _text(sample: dict[str, Any], name: str) -> str:
    text = sample.get(name)
    if type(text) is not str or not text:
        raise Unfamiliar(f"the {name} of a sample is missing or no str")
    return text


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
        and all(step["type"] == "ByteLevel" or _takes_text_once(step) for step in after)
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


def _takes_text_once(step: dict[str, Any]) -> bool:
    pieces = step.get("single", ())
    return step["type"] == "TemplateProcessing" and (
        [next(iter(piece)) for piece in pieces].count("Sequence") == 1
    )
