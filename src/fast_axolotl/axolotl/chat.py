"""Tokenise chat conversations in batches: ``ChatTemplateStrategy.tokenize_prompt``.

Axolotl renders and tokenises each conversation twice, and for every trained turn renders it twice
more with a placeholder, to see by the difference where the turn is. Here

- messages become turns, and turns a text, by Axolotl's own methods,
- the texts of a batch are tokenised together, once, with offsets (see ``tokenizers``): both
  of Axolotl's tokenisations are of this same text,
- renders with a placeholder are filled skeletons (see ``templates``), or renders of the template,
- the difference to them is found by comparing pieces, not characters,
- the search for the end of a turn stops after the four tokens in which it counts.

Row by row: a row that ours cannot do (it fails, or Axolotl would go back to comparing tokens) goes
through Axolotl's own method when its turn comes, and is counted. An error of that is the caller's,
as it would have been. Log lines are Axolotl's, in an order of their own: those of a row are kept
back until ours has done it, because Axolotl's own method writes them itself.

Unfamiliar, for the whole batch, are: subclasses, processors, tokenizers with methods of their own,
only the last turn trained by the legacy way, columns that are no rows of messages, and Axolotl
before 0.19, which finds turns by comparing tokens.

Costs the tokenizer's own time, a render, and a few microseconds a turn.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

from fast_axolotl.axolotl.patching import Unfamiliar
from fast_axolotl.axolotl.templates import Skeletons, Turn
from fast_axolotl.axolotl.tokenizers import check_tokenizer, encode_texts, tokenize_rows

_SENTINELS = ("[[dummy_message]]", "zzdummymessagezz")
"""Axolotl's placeholders: no white space around them, first and last characters all different."""

IGNORED = -100
_NEAR = 3
"""How many tokens after a turn its end token may come."""

_UNSTEADY = ("random", "lipsum")
"""Names in a template that make two renders of one conversation differ."""

_LAST_IS_NOT_TRAINED = (
    "Last turn is not trainable, skipping having to find the turn indices. "
    "This may cause incorrect last EOT/EOS token to be unmasked."
    "This is likely a dataset design issue. Please ensure last turn is trainable."
)

_LOG = logging.getLogger("axolotl.prompt_strategies.chat_template")

_SKELETONS: WeakKeyDictionary[Any, Skeletons] = WeakKeyDictionary()
"""Of each strategy."""


def tokenize_prompt(self: Any, prompt: dict[str, Any]) -> dict[str, list[list[int]]]:
    """Stands in for ``ChatTemplateStrategy.tokenize_prompt``."""
    ids, labels = chat_rows(self, prompt)
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": [[1] * len(row) for row in ids],
    }


def check_chat(strategy: Any) -> None:
    """Raises unless ``chat_rows`` can do this strategy's conversations."""
    from axolotl.prompt_strategies import chat_template

    tokenizer, prompter = strategy.tokenizer, strategy.prompter
    check_tokenizer(tokenizer)
    if type(strategy) is not chat_template.ChatTemplateStrategy:
        raise Unfamiliar(f"{type(strategy).__name__} is a custom strategy")
    if type(prompter) is not chat_template.ChatTemplatePrompter or prompter.processor:
        raise Unfamiliar("the prompter has a processor or is custom")
    owners = (strategy, prompter)
    if any(hasattr(type(owner), name) for owner in owners for name in vars(owner)):
        raise Unfamiliar("the strategy or its prompter was modified")
    if prompter.tokenizer is not tokenizer:
        raise Unfamiliar("prompter and strategy have different tokenizers")
    if getattr(strategy, "_SENTINELS", None) != _SENTINELS:
        raise Unfamiliar("this Axolotl does not find turns by these placeholders")
    if not (
        strategy.roles_to_train
        or strategy.train_on_eos
        or strategy.train_on_eot
        or prompter.message_field_training
        or prompter.message_field_training_detail
    ):
        raise Unfamiliar("only the last turn is trained, in the legacy mode")
    if any(name in str(prompter.chat_template) for name in _UNSTEADY):
        raise Unfamiliar("the chat template uses a random choice")


def chat_rows(strategy: Any, prompt: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids and labels of a batch of conversations."""
    from axolotl.utils.dict import remove_none_values

    check_chat(strategy)
    columns = {name: values for name, values in prompt.items() if values is not None}
    lengths = {*map(len, columns.values())}
    if not strategy.is_prompt_batched(columns) or len(lengths) != 1 or not any(lengths):
        raise Unfamiliar("the prompt is not a batch of rows with messages")
    return tokenize_rows(
        "chat",
        max(lengths),
        lambda number: {name: remove_none_values(found[number]) for name, found in columns.items()},
        partial(_prepare, strategy),
        partial(encode_texts, strategy.tokenizer, add_special_tokens=False, offsets=True),
        _build,
        strategy._tokenize_single_prompt,
    )


def _prepare(strategy: Any, row: dict[str, Any]) -> tuple[list[str], _Row]:
    """A row's text, and its turns."""
    prompter = strategy.prompter
    if strategy not in _SKELETONS:
        keys = ("content", prompter.template_thinking_key)
        _SKELETONS[strategy] = Skeletons(partial(_render, prompter), keys)
    lines: list[logging.LogRecord] = []
    with _keep_back(lines):
        turns = strategy.get_conversation_thread(row)
        tools = strategy._get_tools(row)
    text = _render(prompter, turns, tools)
    # A turn that is a placeholder itself may be found elsewhere than in its place.
    is_explained = not any(sentinel in text for sentinel in _SENTINELS)
    is_explained = is_explained and _SKELETONS[strategy].explain(turns, tools, text)
    return [text], _Row(strategy, turns, tools, text, is_explained, lines)


def _build(encodings: list[Any], row: _Row) -> tuple[list[int], list[int]]:
    """A row's ids and labels; nothing can fail any more, so its log lines are written."""
    ids = encodings[0].ids
    with _keep_back(row.lines):
        labels = row.label(ids, encodings[0].offsets)
    for line in row.lines:
        _LOG.callHandlers(line)
    return ids, labels


@contextmanager
def _keep_back(lines: list[logging.LogRecord]) -> Iterator[None]:
    """What this thread writes to Axolotl's log inside goes to ``lines`` instead."""
    thread = get_ident()

    def keep(line: logging.LogRecord) -> bool:
        if line.thread == thread:
            lines.append(line)
        return line.thread != thread

    _LOG.addFilter(keep)
    try:
        yield
    finally:
        _LOG.removeFilter(keep)


def _render(prompter: Any, turns: list[Turn], tools: Any) -> str:
    text = prompter.build_prompt_text(turns, tools=tools)
    if not text or type(text) is not str:
        raise Unfamiliar("the chat template renders nothing")
    return text


@dataclass(slots=True)
class _Row:
    """One conversation, rendered."""

    strategy: Any
    turns: list[Turn]
    tools: Any
    text: str
    is_explained: bool
    """Whether its skeleton gives its text."""
    lines: list[logging.LogRecord]
    """For the log, once it is certain that stock does not write them."""

    def label(self, ids: list[int], offsets: list[tuple[int, int]]) -> list[int]:
        """The ids that are trained on, and -100 for the others: ``_tokenize_single_prompt``."""
        from axolotl.prompt_strategies.chat_template import LOG

        strategy, turns = self.strategy, self.turns
        prompter, thinking = strategy.prompter, strategy.prompter.template_thinking_key
        finds_all_ends = "all" in (strategy.train_on_eos, strategy.train_on_eot)
        ends = [
            (strategy.train_on_eot, strategy._eot_token_ids),
            (strategy.train_on_eos, {strategy.tokenizer.eos_token_id}),
        ]
        if not ids:
            raise Unfamiliar("a conversation has no tokens")
        labels, last_ends = [IGNORED] * len(ids), [-1, -1]
        for index, turn in enumerate(turns):
            train = turn.get("training")
            detail = turn.get("training_detail")
            reasoning_detail = turn.get("reasoning_training_detail")
            if train is None:
                if detail is None and reasoning_detail is None:
                    train = strategy.train_on_inputs or turn.get("role") in strategy.roles_to_train
                else:
                    train = bool(detail) or bool(reasoning_detail)
            if not train and not finds_all_ends:
                if index == len(turns) - 1:
                    LOG.warning(_LAST_IS_NOT_TRAINED)
                continue
            reasons = bool(thinking) and turn.get(thinking) is not None
            content_only = bool((detail or reasoning_detail) and reasons)
            start, end = self.find(offsets, index, content_only=content_only)
            details = []
            if train and start != -1:
                if detail:
                    details.append((start, turn["content"], detail))
                elif not reasoning_detail:
                    labels[start:end] = ids[start:end]
            if train and reasoning_detail and reasons:
                first, _ = self.find(offsets, index, reasoning_only=True)
                if first != -1:
                    details.append((first, turn[thinking], reasoning_detail))
            for first, text, parts in details:
                if type(text) is not str:
                    raise Unfamiliar("a text with training details is not a str")
                trained = prompter.get_offsets_for_train_detail(text, parts)
                for place, offset in enumerate(trained[: len(ids) - first], first):
                    if offset != IGNORED:
                        labels[place] = ids[place]
            for number, (option, tokens) in enumerate(ends):
                place = _end_after(ids, end, tokens)
                if place != -1:
                    last_ends[number] = place
                    if option == "all" or (option == "turn" and train):
                        labels[place] = ids[place]
        for (option, _), place in zip(ends, last_ends, strict=True):
            if option == "last" and place != -1:
                labels[place] = ids[place]
        return labels

    def find(
        self,
        offsets: list[tuple[int, int]],
        index: int,
        *,
        content_only: bool = False,
        reasoning_only: bool = False,
    ) -> tuple[int, int]:
        """Tokens of a turn, from and to, or twice -1: ``find_turn``."""
        from axolotl.prompt_strategies.chat_template import LOG

        strategy, turns, spans = self.strategy, self.turns, []
        is_mistral = "mistral" in strategy.tokenizer.name_or_path.lower()
        if index == 0 and is_mistral and turns[0].get("role") == "system":
            return -1, -1
        for sentinel in _SENTINELS:
            changed = turns.copy()
            changed[index] = strategy._build_dummy_turn(
                turns[index], content_only, reasoning_only, sentinel
            )
            if self.is_explained:
                text = _SKELETONS[strategy].render_changed(changed, self.tools, index)
            else:
                text = _render(strategy.prompter, changed, self.tools)
            spans.append(difference(self.text, text))
        first, last = min(first for first, _ in spans), max(last for _, last in spans)
        if last <= first:
            return -1, -1
        start = bisect_right(offsets, first, key=itemgetter(1))
        end = bisect_left(offsets, last, key=itemgetter(0))
        if start >= len(offsets):
            raise Unfamiliar("a turn starts after the last token")
        if end < start:
            LOG.warning(f"Content end boundary is before start boundary for turn {index}")
            return -1, -1
        if end == start:
            LOG.warning(
                f"Content end boundary is the same as start boundary for turn {index}. "
                "This is likely an empty turn."
            )
            return -1, -1
        return start, end


def _end_after(ids: list[int], end: int, tokens: set[int]) -> int:
    """The first of some tokens that follows a turn closely, or -1.

    A turn that was not found ends at -1, where Axolotl looks at the last token first: if that is an
    end token, it finds the place -1, which counts as none.
    """
    if end == -1 and ids[-1] in tokens:
        return -1
    start = max(end, 0)
    near = enumerate(ids[start : end + _NEAR + 1], start)
    return next((place for place, token in near if token in tokens), -1)


def difference(left: str, right: str) -> tuple[int, int]:
    """Where ``left`` differs from ``right``: after a common beginning, before a common end."""
    start = _common(left, right)
    return start, len(left) - _common(left[start:][::-1], right[start:][::-1])


def _common(left: str, right: str) -> int:
    """How many characters two texts begin with alike; each is compared about once."""
    same, limit = 0, min(len(left), len(right))
    while same < limit:
        middle = (same + limit + 1) // 2
        if left[same:middle] == right[same:middle]:
            same = middle
        else:
            limit = middle - 1
    return same
