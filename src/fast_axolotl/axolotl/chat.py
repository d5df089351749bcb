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
which Axolotl would go back to comparing tokens. Every message has a role and a content of type
``str`` and beside them plain values at most.

Costs the tokenizer's own time, and a few microseconds a turn.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from fast_axolotl.axolotl.patching import Unfamiliar
from fast_axolotl.axolotl.templates import Plan, Renderer, find_renderer
from fast_axolotl.axolotl.tokenizers import (
    check_tokenizer,
    encode_texts,
    is_set,
    set_truncation,
    too_long,
)

__all__ = ["chat_rows", "check_chat", "diff_char_span", "tokenize_prompt"]

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

_PLAIN = (str, bool, int, float)
_DETAILS = ("tool_calls", "training_detail", "reasoning_training_detail")
"""What a turn may hold that Axolotl treats in a way of its own."""

_LAST_IS_NOT_TRAINED = (
    "Last turn is not trainable, skipping having to find the turn indices. "
    "This may cause incorrect last EOT/EOS token to be unmasked."
    "This is likely a dataset design issue. Please ensure last turn is trainable."
)

Turn = dict[str, Any]


def tokenize_prompt(self: Any, prompt: dict[str, Any]) -> dict[str, list[list[int]]]:
    """Stands in for ``ChatTemplateStrategy.tokenize_prompt``."""
    ids, labels = chat_rows(self, prompt)
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": [[1] * len(row) for row in ids],
    }


def diff_char_span(cls: Any, full_text: str, dummy_text: str) -> tuple[int, int]:
    """Stands in for ``ChatTemplateStrategy._diff_char_span``.

    The stock function compares blocks of ``cls._DIFF_BLOCK`` characters, then one by one, and the
    end on reversed copies. This one halves the distance; the result does not depend on blocks.
    """
    if type(full_text) is not str or type(dummy_text) is not str:
        raise Unfamiliar("a text is no plain str")
    if type(cls._DIFF_BLOCK) is not int or cls._DIFF_BLOCK <= 0:
        raise Unfamiliar("the block size of the comparison is no positive number")
    return _difference(full_text, dummy_text)


def check_chat(strategy: Any) -> None:
    """Unfamiliar, unless ``chat_rows`` can be asked about this strategy's conversations."""
    _Batch.open(strategy)


def chat_rows(strategy: Any, prompt: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids and labels of a batch of conversations."""
    batch = _Batch.open(strategy)
    rows = _conversations(strategy.prompter, prompt)
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
        if type(strategy) is not chat_template.ChatTemplateStrategy:
            raise Unfamiliar(f"{type(strategy).__name__} is a strategy of its own")
        if type(prompter) is not chat_template.ChatTemplatePrompter or prompter.processor:
            raise Unfamiliar("the prompter has a processor, or is one of its own")
        owners = (strategy, prompter)
        if any(hasattr(type(owner), name) for owner in owners for name in vars(owner)):
            raise Unfamiliar("the strategy or its prompter has been altered")
        if prompter.tokenizer is not tokenizer:
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
    offsets: list[tuple[int, int]]

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
        start = bisect_right(self.offsets, char_start, key=itemgetter(1))
        end = bisect_left(self.offsets, char_end, key=itemgetter(0))
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
            spans.append(_difference(self.render.text, self.batch.render(turns).text))
        return min(start for start, _ in spans), max(end for _, end in spans)


def _conversations(prompter: Any, prompt: Any) -> list[list[Turn]]:
    """The turns of each row: ``get_conversation_thread`` after ``remove_none_values``."""
    columns = {name: values for name, values in prompt.items() if values is not None}
    if any(type(values) is not list for values in columns.values()):
        raise Unfamiliar("the prompt is no batch of rows")
    if not columns.get(prompter.field_messages) or len({*map(len, columns.values())}) != 1:
        raise Unfamiliar("the batch has no messages")
    if any(tools is not None and tools != [] for tools in columns.get(prompter.field_tools, ())):
        raise Unfamiliar("conversations have tools")
    systems = columns.get(prompter.field_system)
    rows = []
    for number, messages in enumerate(columns[prompter.field_messages]):
        if type(messages) is not list or not messages:
            raise Unfamiliar("a conversation is no list of messages")
        turns = list(_turns(prompter, messages))
        if systems is not None and turns[0]["role"] != "system":
            if type(systems[number]) is not str:
                raise Unfamiliar("a system message is no str")
            turns.insert(0, {"role": "system", "content": systems[number]})
        if prompter.drop_system_message and turns[0]["role"] == "system":
            del turns[0]
        if not turns:
            raise Unfamiliar("a conversation has no turns")
        rows.append(turns)
    return rows


def _turns(prompter: Any, messages: list[Any]) -> Iterator[Turn]:
    mappings = prompter.message_property_mappings
    mapped, roles = set(mappings.values()), prompter.roles
    training, detail = prompter.message_field_training, prompter.message_field_training_detail
    others = [key for key in prompter.chat_template_msg_variables if key not in mapped]
    for message in messages:
        if type(message) is not dict:
            raise Unfamiliar("a message is no dict")
        turn = {
            key: message[name] for key, name in mappings.items() if message.get(name) is not None
        }
        if type(turn.get("role")) is not str or type(turn.get("content")) is not str:
            raise Unfamiliar("a message has no role or no content, or one that is no str")
        turn["role"] = roles.get(turn["role"], turn["role"])
        for key in others:
            if message.get(key) is not None:
                turn[key] = message[key]
        # A key that is mapped from elsewhere may be there under its own name as well.
        if type(turn["role"]) is not str or type(turn["content"]) is not str:
            raise Unfamiliar("a message has a second role or content that is no str")
        if len(turn) > 2 and (
            any(type(value) not in _PLAIN for value in turn.values())
            or not turn.keys().isdisjoint(_DETAILS)
        ):
            raise Unfamiliar("a message has tool calls, details, or values that are no plain ones")
        if message.get(detail) is not None:
            raise Unfamiliar("a message has training details")
        if message.get(training) is not None:
            if type(message[training]) is not bool:
                raise Unfamiliar("whether a message is trained on is no bool")
            turn["training"] = message[training]
        yield turn


def _difference(left: str, right: str) -> tuple[int, int]:
    """Where ``left`` differs from ``right``: after what they begin with, before what they end with.

    The invariant of both loops: the first ``same`` characters are equal, the first ``limit + 1``
    are not (or there are only ``limit``). Steps double, so a difference after k characters costs
    about 3 k character comparisons.
    """
    limit = shorter = min(len(left), len(right))
    same, step = 0, 16
    while same < limit:
        step = min(step, limit - same)
        if left[same : same + step] == right[same : same + step]:
            same += step
            step *= 2
        else:
            limit = same + step - 1
            step = max(1, step // 2)
    start = same
    same, limit, step = 0, shorter - start, 16
    while same < limit:
        step = min(step, limit - same)
        left_end, right_end = len(left) - same, len(right) - same
        if left[left_end - step : left_end] == right[right_end - step : right_end]:
            same += step
            step *= 2
        else:
            limit = same + step - 1
            step = max(1, step // 2)
    return start, len(left) - same
