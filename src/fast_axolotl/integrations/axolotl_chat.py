"""Chat conversations tokenised a batch at a time: ``ChatTemplateStrategy.tokenize_prompt``.

Axolotl renders and tokenises each conversation twice, and for every trained turn renders it twice
more with a placeholder, to see by the difference where the turn is. Here

- a conversation is rendered from its ``Plan`` (see ``axolotl_templates``), or once by the template,
- the texts of a batch are tokenised together, once, with offsets (see ``axolotl_tokenizers``): both
  of Axolotl's tokenisations are of this same text,
- a turn that fills one hole of the plan lies where the hole is. Axolotl's difference to a render
  with a placeholder begins at the hole unless text and placeholder begin alike, and its two
  placeholders do not begin or end alike, so the wider of the two differences is the hole. The
  exception, a text that begins like a whole placeholder or is the beginning of one, and all other
  turns, take Axolotl's way: two texts with placeholders and their differences,
- the search for the end of a turn stops after the four tokens in which it counts.

Log lines are collected and written when the whole batch is done, so an input that turns out to be
unfamiliar has had no effect. Unfamiliar are: subclasses, processors, tools and tool calls, lists as
contents, training details, ``split_thinking``, tokenizers with methods of their own, and turns for
which Axolotl would go back to comparing tokens.

Costs the tokenizer's own time, and a few microseconds a turn.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fast_axolotl.integrations.axolotl_templates import Plan, Renderer, find_renderer
from fast_axolotl.integrations.axolotl_tokenizers import (
    check_tokenizer,
    encode_texts,
    is_set,
    set_truncation,
    too_long,
)
from fast_axolotl.integrations.axolotl_turns import Turn, conversations, difference
from fast_axolotl.integrations.patching import Unfamiliar

__all__ = ["chat_rows", "check_chat", "tokenize_prompt"]

_SENTINELS = ("[[dummy_message]]", "zzdummymessagezz")
"""Axolotl's placeholders: no white space around them, first and last characters all different."""

_IGNORED = -100
_NEAR = 3
"""How many tokens after a turn its end token may come."""

_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that ``apply_chat_template`` would not hand through to the template."""

Offsets = list[tuple[int, int]]


def tokenize_prompt(self: Any, prompt: dict[str, Any]) -> dict[str, list[list[int]]]:
    """Stands in for ``ChatTemplateStrategy.tokenize_prompt``."""
    ids, labels = chat_rows(self, prompt)
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": [[1] * len(row) for row in ids],
    }


def check_chat(strategy: Any) -> None:
    """Unfamiliar, unless ``chat_rows`` can be asked about this strategy's conversations."""
    _Batch.open(strategy)


def chat_rows(strategy: Any, prompt: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids and labels of a batch of conversations."""
    batch = _Batch.open(strategy)
    rows = conversations(strategy, prompt)
    renders = [batch.render(turns) for turns in rows]
    set_truncation(batch.tokenizer, None)
    ids, labels = [], []
    texts = [render.text for render in renders]
    encodings = encode_texts(batch.backend, texts, add_special_tokens=False, offsets=True)
    for turns, render, encoding in zip(rows, renders, encodings, strict=True):
        row = _Row(batch, turns, render, encoding.ids, encoding.offsets)
        ids.append(row.ids)
        labels.append(row.label())
    for log in batch.logs:
        log()
    return ids, labels


@dataclass(frozen=True, slots=True)
class _Render:
    """The text of a conversation, and its plan and what fills it if there is one."""

    text: str
    plan: Plan | None
    contents: list[str]


@dataclass(slots=True)
class _Batch:
    """What is the same for all rows, and the log lines to write when they are done."""

    strategy: Any
    tokenizer: Any
    backend: Any
    renderer: Renderer
    log: Any
    eos: int
    is_mistral: bool
    trains_all_ends: bool
    logs: list[Callable[[], None]]

    @classmethod
    def open(cls, strategy: Any) -> _Batch:
        from axolotl.prompt_strategies import chat_template

        tokenizer, prompter = strategy.tokenizer, strategy.prompter
        backend = check_tokenizer(tokenizer)
        _check_strategy(strategy, chat_template)
        if not is_set(tokenizer, "eos_token"):
            raise Unfamiliar("the tokenizer has no end token")
        options = prompter.chat_template_kwargs
        if not _RESERVED.isdisjoint(options) or type(prompter.chat_template) is not str:
            raise Unfamiliar("the chat template is given arguments of apply_chat_template")
        arguments = {**tokenizer.special_tokens_map, **options}
        template = tokenizer.get_chat_template(prompter.chat_template, None)
        return cls(
            strategy=strategy,
            tokenizer=tokenizer,
            backend=backend,
            renderer=find_renderer(template, arguments),
            log=chat_template.LOG,
            eos=tokenizer.eos_token_id,
            is_mistral="mistral" in tokenizer.name_or_path.lower(),
            trains_all_ends="all" in (strategy.train_on_eos, strategy.train_on_eot),
            logs=[],
        )

    def render(self, turns: list[Turn]) -> _Render:
        plan, contents = None, [turn["content"] for turn in turns]
        # The plan knows messages of a role and a content; a verdict beside them it does not show.
        if all(len(turn) == 2 or (len(turn) == 3 and "training" in turn) for turn in turns):
            shape = tuple([(turn["role"], turn["content"] != "") for turn in turns])
            plan = self.renderer.plan(shape, contents)
        text = self.renderer.render(turns) if plan is None else plan.fill(contents)
        if not text:
            raise Unfamiliar("the chat template renders nothing")
        return _Render(text, plan, contents)

    def warn(self, message: str) -> None:
        self.logs.append(lambda: self.log.warning(message))


@dataclass(slots=True)
class _Row:
    """One conversation, rendered and tokenised."""

    batch: _Batch
    turns: list[Turn]
    render: _Render
    ids: list[int]
    offsets: Offsets

    def label(self) -> list[int]:
        """The ids that are trained on, and -100 for the others: ``_tokenize_single_prompt``."""
        ids, strategy, last = self.ids, self.batch.strategy, len(self.turns) - 1
        if not ids:
            raise Unfamiliar("a conversation has no tokens")
        if too_long(self.batch.tokenizer, len(ids)):
            warn = self.batch.tokenizer._eventual_warn_about_too_long_sequence
            self.batch.logs.append(lambda: warn(ids, None, True))
        labels, last_ends = [_IGNORED] * len(ids), [-1, -1]
        for index, turn in enumerate(self.turns):
            train = turn.get("training")
            if train is None:
                train = strategy.train_on_inputs or turn["role"] in strategy.roles_to_train
            if not train and not self.batch.trains_all_ends:
                if index == last:
                    self.batch.warn(_LAST_IS_NOT_TRAINED)
                continue
            start, end = self.find(index)
            if train and start != -1:
                labels[start:end] = ids[start:end]
            for kind, place in enumerate(self.ends_after(end)):
                if place != -1:
                    last_ends[kind] = place
                    option = strategy.train_on_eos if kind else strategy.train_on_eot
                    if option == "all" or (option == "turn" and train):
                        labels[place] = ids[place]
        for kind, option in enumerate((strategy.train_on_eot, strategy.train_on_eos)):
            if option == "last" and last_ends[kind] != -1:
                labels[last_ends[kind]] = ids[last_ends[kind]]
        return labels

    def ends_after(self, end: int) -> tuple[int, int]:
        """The first end-of-turn and end token that follow a turn closely, or -1.

        A turn that was not found ends at -1, where Axolotl looks at the last token first: if that
        is an end token, it finds the place -1, which counts as none.
        """
        ends, eos = self.batch.strategy._eot_token_ids, self.batch.eos
        near = self.ids[max(end, 0) : end + _NEAR + 1]
        turn_end = next((i for i, token in enumerate(near, max(end, 0)) if token in ends), -1)
        text_end = next((i for i, token in enumerate(near, max(end, 0)) if token == eos), -1)
        if end == -1:
            turn_end = -1 if self.ids[-1] in ends else turn_end
            text_end = -1 if self.ids[-1] == eos else text_end
        return turn_end, text_end

    def find(self, index: int) -> tuple[int, int]:
        """Tokens of a turn, from and to, or twice -1: ``find_turn``."""
        if index == 0 and self.batch.is_mistral and self.turns[0]["role"] == "system":
            return -1, -1
        char_start, char_end = self.find_characters(index)
        if char_end <= char_start:
            return -1, -1
        start = bisect_right(self.offsets, char_start, key=_end_of)
        end = bisect_left(self.offsets, char_end, key=_start_of)
        if start >= len(self.offsets):
            raise Unfamiliar("a turn lies behind the last token")
        if end < start:
            self.batch.warn(f"Content end boundary is before start boundary for turn {index}")
            return -1, -1
        if end == start:
            self.batch.warn(
                f"Content end boundary is the same as start boundary for turn {index}. "
                "This is likely an empty turn."
            )
            return -1, -1
        return start, end

    def find_characters(self, index: int) -> tuple[int, int]:
        """Characters of a turn, from and to: ``_find_turn_from_text``."""
        plan, contents = self.render.plan, self.render.contents
        if plan is not None and plan.holes.count(index) == 1:
            hole = plan.holes.index(index)
            filling = contents if plan.is_plain else plan.filling(contents)
            text = filling[hole]
            if text and not any(text.startswith(s) or s.startswith(text) for s in _SENTINELS):
                start = sum(map(len, filling[:hole])) + sum(map(len, plan.texts[: hole + 1]))
                return start, start + len(text)
        turns, spans = list(self.turns), []
        for sentinel in _SENTINELS:
            turns[index] = {"role": self.turns[index].get("role"), "content": sentinel}
            spans.append(difference(self.render.text, self.batch.render(turns).text))
        return min(start for start, _ in spans), max(end for _, end in spans)


_LAST_IS_NOT_TRAINED = (
    "Last turn is not trainable, skipping having to find the turn indices. "
    "This may cause incorrect last EOT/EOS token to be unmasked."
    "This is likely a dataset design issue. Please ensure last turn is trainable."
)


def _end_of(offset: tuple[int, int]) -> int:
    return offset[1]


def _start_of(offset: tuple[int, int]) -> int:
    return offset[0]


def _check_strategy(strategy: Any, chat_template: Any) -> None:
    prompter = strategy.prompter
    if type(strategy) is not chat_template.ChatTemplateStrategy:
        raise Unfamiliar(f"{type(strategy).__name__} is a strategy of its own")
    if type(prompter) is not chat_template.ChatTemplatePrompter or prompter.processor:
        raise Unfamiliar("the prompter has a processor, or is one of its own")
    if any(hasattr(type(owner), name) for owner in (strategy, prompter) for name in vars(owner)):
        raise Unfamiliar("the strategy or its prompter has been altered")
    if prompter.tokenizer is not strategy.tokenizer:
        raise Unfamiliar("prompter and strategy have different tokenizers")
    if strategy.split_thinking:
        raise Unfamiliar("split_thinking takes contents apart")
    if strategy._SENTINELS != _SENTINELS or strategy._DIFF_BLOCK <= 0:
        raise Unfamiliar("the strategy has placeholders of its own")
    if not (
        strategy.roles_to_train
        or strategy.train_on_eos
        or strategy.train_on_eot
        or prompter.message_field_training
        or prompter.message_field_training_detail
    ):
        raise Unfamiliar("only the last turn is trained, by the legacy way")
    if chat_template.LOG.isEnabledFor(logging.DEBUG):
        raise Unfamiliar("debug messages are written")
