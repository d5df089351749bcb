"""Chat conversations tokenised a batch at a time: ``ChatTemplateStrategy.tokenize_prompt``.

Axolotl renders and tokenises each conversation twice, and for every trained turn renders it twice
more with a placeholder, to see by the difference where the turn is. Here

- messages become turns by Axolotl's own methods, or, where they hold a role, a text and nothing
  that these treat in a way of its own, by a shorter way to the same,
- a conversation is rendered from its ``Plan`` (see ``templates``), or once by the template,
- the texts of a batch are tokenised together, once, with offsets (see ``tokenizers``): both
  of Axolotl's tokenisations are of this same text,
- a turn that fills one hole of the plan lies where the hole is. Axolotl's difference to a render
  with a placeholder begins at the hole unless text and placeholder begin alike, and its two
  placeholders do not begin or end alike, so the wider of the two differences is the hole. The
  exceptions, a text that begins like a whole placeholder or is the beginning of one, and a turn
  in whose place the template would not copy a placeholder, take Axolotl's way: two texts with
  placeholders and their differences,
- the search for the end of a turn stops after the four tokens in which it counts.

Until 0.18 Axolotl compares tokens instead: of the conversation up to a turn, and of the same with
a placeholder in the turn. So does ours there, with texts from plans, both tokenised in one call.

Row by row: a row that ours cannot do (it fails, or Axolotl would go back to comparing tokens) goes
through Axolotl's own method when its turn comes. Log lines of a row are collected and written when
it is done, so they come in Axolotl's order, and a row that is given up has had no effect. An error
of Axolotl's own method is the caller's, as it would have been.

The clock is read once per batch, and again if the date has changed when all rows are rendered.
Axolotl reads it several times per row; if the date changes between two of these, it compares texts
of two days, and that is not repeated here.

Unfamiliar, for the whole batch, are: subclasses, processors, tokenizers with methods of their own,
only the last turn trained by the legacy way, and columns that are no rows of messages.

Costs the tokenizer's own time, and a few microseconds a turn.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, takewhile
from operator import itemgetter
from types import FunctionType
from typing import Any

from fast_axolotl.axolotl.patching import Final, Unfamiliar, tally
from fast_axolotl.axolotl.templates import (
    NOT_SHOWN,
    Clock,
    Inputs,
    Plan,
    Renderer,
    find_renderer,
)
from fast_axolotl.axolotl.tokenizers import (
    check_tokenizer,
    encode_texts,
    is_set,
    set_truncation,
    too_long,
)

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
        "sanitize_control_tokens",
        "self",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that ``apply_chat_template`` would not hand through to the template."""

_PLAIN = (str, bool, int, float)
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
        raise Unfamiliar("a text is not a plain str")
    if type(cls._DIFF_BLOCK) is not int or cls._DIFF_BLOCK <= 0:
        raise Unfamiliar("the block size of the comparison is not a positive number")
    return _difference(full_text, dummy_text)


def check_chat(strategy: Any) -> None:
    """Unfamiliar, unless ``chat_rows`` can be asked about this strategy's conversations."""
    _Batch.open(strategy)


def chat_rows(strategy: Any, prompt: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids and labels of a batch of conversations."""
    from axolotl.utils.dict import remove_none_values

    batch = _Batch.open(strategy)
    columns = _columns(strategy.prompter, prompt)
    numbers = range(len(columns[strategy.prompter.field_messages]))
    while True:
        rows = [batch.prepare(columns, number) for number in numbers]
        if batch.clock.is_right():
            break
        batch.clock = batch.renderer.clock()
    set_truncation(batch.tokenizer, None)
    texts = [row.text for row in rows if type(row) is _Row]
    encodings = encode_texts(batch.backend, texts, add_special_tokens=False, offsets=True)
    ids, labels = [], []
    for number, row in zip(numbers, rows, strict=True):
        if type(row) is _Row:
            encoding = next(encodings)
            try:
                row.ids, row.offsets = encoding.ids, encoding.offsets
                labels.append(row.label())
            except Exception as error:  # noqa: BLE001  Axolotl decides what the caller sees
                row = _reason(error)
            else:
                ids.append(row.ids)
                for write in row.lines:
                    write()
                continue
        tally("chat", str(row), 1)
        try:
            result = strategy._tokenize_single_prompt(
                {name: remove_none_values(values[number]) for name, values in columns.items()}
            )
        except Exception as error:
            raise Final(error) from error
        ids.append(result["input_ids"])
        labels.append(result["labels"])
    return ids, labels


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, Unfamiliar) else f"a row raises {type(error).__name__}"


@dataclass(slots=True)
class _Log:
    """Stands in for Axolotl's log: keeps the lines of the row in hand until it is done."""

    log: Any
    lines: list[Callable[[], None]] = field(default_factory=list)

    def warning(self, *message: Any) -> None:
        self.lines.append(partial(self.log.warning, *message))

    def debug(self, *_: Any) -> None:
        pass

    def error(self, *_: Any) -> None:
        """After an error the row is given up, and Axolotl's own method logs it."""


@dataclass(slots=True)
class _Batch:
    """What is the same for all rows."""

    strategy: Any
    tokenizer: Any
    backend: Any
    renderer: Renderer
    eos: int
    is_mistral: bool
    trains_all_ends: bool
    template: str
    compares_tokens: bool
    """Whether turns are found by the tokens before them, as until 0.18."""
    """Keys of a message that newer transformers copy to one another."""
    note: _Log
    to_turns: Any
    """The strategy with methods that log to ``note``, and the prompter so."""
    to_details: Any
    clock: Clock

    @classmethod
    def open(cls, strategy: Any) -> _Batch:
        from axolotl.prompt_strategies import chat_template

        tokenizer, prompter = strategy.tokenizer, strategy.prompter
        backend = check_tokenizer(tokenizer)
        if type(strategy) is not chat_template.ChatTemplateStrategy:
            raise Unfamiliar(f"{type(strategy).__name__} is a custom strategy")
        if type(prompter) is not chat_template.ChatTemplatePrompter or prompter.processor:
            raise Unfamiliar("the prompter has a processor or is custom")
        owners = (strategy, prompter)
        if any(hasattr(type(owner), name) for owner in owners for name in vars(owner)):
            raise Unfamiliar("the strategy or its prompter was modified")
        if prompter.tokenizer is not tokenizer:
            raise Unfamiliar("prompter and strategy have different tokenizers")
        compares_tokens = not hasattr(strategy, "_build_turn_locator")
        if not compares_tokens and (strategy._SENTINELS != _SENTINELS or strategy._DIFF_BLOCK <= 0):
            raise Unfamiliar("the strategy has custom placeholders")
        if not (
            strategy.roles_to_train
            or strategy.train_on_eos
            or strategy.train_on_eot
            or prompter.message_field_training
            or prompter.message_field_training_detail
        ):
            raise Unfamiliar("only the last turn is trained, in the legacy mode")
        if chat_template.LOG.isEnabledFor(logging.DEBUG):
            raise Unfamiliar("debug logging is on")
        if not is_set(tokenizer, "eos_token"):
            raise Unfamiliar("the tokenizer has no EOS token")
        options = prompter.chat_template_kwargs
        if not _RESERVED.isdisjoint(options) or type(prompter.chat_template) is not str:
            raise Unfamiliar("the chat template gets extra arguments")
        arguments = {**tokenizer.special_tokens_map, **options}
        template = tokenizer.get_chat_template(prompter.chat_template, None)
        note = _Log(chat_template.LOG)
        renderer = find_renderer(template, arguments)
        return cls(
            strategy=strategy,
            tokenizer=tokenizer,
            backend=backend,
            renderer=renderer,
            eos=tokenizer.eos_token_id,
            is_mistral="mistral" in tokenizer.name_or_path.lower(),
            trains_all_ends="all" in (strategy.train_on_eos, strategy.train_on_eot),
            template=template,
            compares_tokens=compares_tokens,
            note=note,
            to_turns=_with_log(strategy, chat_template, note),
            to_details=_with_log(prompter, chat_template, note),
            clock=renderer.clock(),
        )

    def prepare(self, columns: dict[str, list[Any]], number: int) -> _Row | str:
        """A row's turns and text; or why it cannot be done."""
        self.note.lines = []
        try:
            turns, tools = self.turns(columns, number)
            inputs = turns, tools, self.clock
            plan, text = self.render(inputs)
        except Exception as error:  # noqa: BLE001  Axolotl decides what the caller sees
            return _reason(error)
        return _Row(self, inputs, plan, text, self.note.lines)

    def turns(self, columns: dict[str, list[Any]], number: int) -> tuple[list[Turn], Any]:
        """``get_conversation_thread`` and ``_get_tools`` after ``remove_none_values``."""
        from axolotl.utils.dict import remove_none_values

        prompter = self.strategy.prompter
        fields = (prompter.field_messages, prompter.field_system, prompter.field_tools)
        row = {name: columns[name][number] for name in fields if name in columns}
        turns = _plain_turns(self.strategy, row[fields[0]])
        if turns is None:
            row = {name: remove_none_values(value) for name, value in row.items()}
            turns = self.to_turns.get_conversation_thread(row)
        else:
            if fields[1] in row and turns[0]["role"] != "system":
                system = remove_none_values(row[fields[1]])
                turns.insert(0, {"role": "system", "content": system})
            if prompter.drop_system_message and turns[0]["role"] == "system":
                del turns[0]
        tools = row.get(fields[2])
        if tools is not None:
            tools = self.to_turns._get_tools({fields[2]: remove_none_values(tools)}) or None
        if not turns or (tools and not all(type(tool) is dict for tool in tools)):
            raise Unfamiliar("a conversation has no turns, or tools that are not dicts")
        return turns, tools

    def render(self, inputs: Inputs, last: int = 0) -> tuple[Plan | None, str]:
        renderer = self.renderer
        if last and "real_last_index" in self.template:
            arguments = {**renderer.arguments, "real_last_index": last}
            renderer = find_renderer(self.template, arguments)
        plan = renderer.plan(inputs)
        text = renderer.render(inputs) if plan is None else plan.fill(inputs)
        if not text:
            raise Unfamiliar("the chat template renders nothing")
        return plan, text


def _with_log(owner: Any, module: Any, log: Any) -> Any:
    """The same object with the methods of its class, but for their log."""
    names, methods = {**vars(module), "LOG": log}, {}
    for name, method in vars(type(owner)).items():
        code = method.__func__ if type(method) is staticmethod else method
        if type(code) is FunctionType:
            copy = FunctionType(code.__code__, names, name, code.__defaults__, code.__closure__)
            methods[name] = staticmethod(copy) if code is not method else copy
    other: Any = object.__new__(type(type(owner).__name__, (type(owner),), methods))
    other.__dict__ = owner.__dict__
    return other


@dataclass(slots=True)
class _Row:
    """One conversation, rendered and tokenised."""

    batch: _Batch
    inputs: Inputs
    plan: Plan | None
    text: str
    lines: list[Callable[[], None]]
    ids: list[int] = field(default_factory=list)
    offsets: list[tuple[int, int]] = field(default_factory=list)
    fillings: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """What fills the holes of the plan, and where they begin; made when first asked for."""

    def label(self) -> list[int]:
        """The ids that are trained on, and -100 for the others: ``_tokenize_single_prompt``."""
        ids, strategy, turns = self.ids, self.batch.strategy, self.inputs[0]
        self.batch.note.lines = self.lines
        thinking, last = strategy.prompter.template_thinking_key, len(turns) - 1
        if not ids:
            raise Unfamiliar("a conversation has no tokens")
        self.note_length(ids)
        labels, last_ends = [_IGNORED] * len(ids), [-1, -1]
        for index, turn in enumerate(turns):
            train = turn.get("training")
            detail = turn.get("training_detail")
            reasoning_detail = turn.get("reasoning_training_detail")
            if train is None:
                if detail is None and reasoning_detail is None:
                    train = strategy.train_on_inputs or turn.get("role") in strategy.roles_to_train
                else:
                    train = bool(detail) or bool(reasoning_detail)
            if not train and not self.batch.trains_all_ends:
                if index == last:
                    self.batch.note.warning(_LAST_IS_NOT_TRAINED)
                continue
            reasons = bool(thinking) and turn.get(thinking) is not None
            start, end = self.find(index, bool((detail or reasoning_detail) and reasons), False)
            if train and start != -1:
                if detail:
                    self.label_details(labels, start, turn["content"], detail)
                elif not reasoning_detail:
                    labels[start:end] = ids[start:end]
            if train and reasoning_detail and reasons:
                reasoning_start, _ = self.find(index, False, True)
                if reasoning_start != -1:
                    self.label_details(labels, reasoning_start, turn[thinking], reasoning_detail)
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

    def note_length(self, ids: list[int]) -> None:
        tokenizer = self.batch.tokenizer
        if too_long(tokenizer, len(ids)):
            warn = tokenizer._eventual_warn_about_too_long_sequence
            self.lines.append(partial(warn, ids, None, True))

    def label_details(self, labels: list[int], first: int, text: Any, details: Any) -> None:
        """Labels of a turn of which parts are trained: ``get_offsets_for_train_detail``."""
        if type(text) is not str:
            raise Unfamiliar("a text with training details is not a str")
        batch = self.batch
        (encoding,) = batch.backend.encode_batch([text], add_special_tokens=False)
        self.note_length(encoding.ids)
        starts = [start for start, _ in encoding.offsets]
        ends = [*[start - 1 for start in starts[1:]], len(text) - 1]
        if starts != sorted(starts):
            raise Unfamiliar("the tokens are not in the order of the text")
        offsets = [*zip(starts, ends, strict=True)]
        for part in batch.to_details.adjust_train_details(details, offsets):
            if part["train"]:
                start = first + bisect_left(starts, part["begin_offset"])
                end = min(first + bisect_right(ends, part["end_offset"]), len(labels))
                labels[start:end] = self.ids[start:end]

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

    def find(self, index: int, content_only: bool, reasoning_only: bool) -> tuple[int, int]:
        """Tokens of a turn, from and to, or twice -1: ``find_turn``."""
        if index == 0 and self.batch.is_mistral and self.inputs[0][0].get("role") == "system":
            return -1, -1
        if self.batch.compares_tokens:
            start, end = self.find_by_tokens(index, content_only, reasoning_only)
            if start == -1:
                return -1, -1
        else:
            char_start, char_end = self.find_characters(index, content_only, reasoning_only)
            if char_end <= char_start:
                return -1, -1
            start = bisect_right(self.offsets, char_start, key=itemgetter(1))
            end = bisect_left(self.offsets, char_end, key=itemgetter(0))
            if start >= len(self.offsets):
                raise Unfamiliar("a turn starts after the last token")
        if end < start:
            self.batch.note.warning(
                f"Content end boundary is before start boundary for turn {index}"
            )
            return -1, -1
        if end == start:
            self.batch.note.warning(
                f"Content end boundary is the same as start boundary for turn {index}. "
                "This is likely an empty turn."
            )
            return -1, -1
        return start, end

    def find_by_tokens(
        self, index: int, content_only: bool, reasoning_only: bool
    ) -> tuple[int, int]:
        """What differs between the conversation up to a turn and the same with a placeholder."""
        turns, batch = self.inputs[0], self.batch
        turn, thinking = turns[index], batch.strategy.prompter.template_thinking_key
        dummy = {"role": turn.get("role"), "content": _SENTINELS[0]}
        if reasoning_only:
            dummy["content"] = turn.get("content", "")
        if (content_only or reasoning_only) and thinking and thinking in turn:
            dummy[thinking] = "[[dummy_reasoning]]" if reasoning_only else turn[thinking]
        texts = [
            batch.render(([*turns[:index], item], *self.inputs[1:]), len(turns) - 1)[1]
            for item in (dummy, turn)
        ]
        is_whole = texts[1] == self.text
        found = batch.backend.encode_batch_fast(
            texts[:1] if is_whole else texts, add_special_tokens=False
        )
        ids, own = found[0].ids, self.ids if is_whole else found[1].ids
        self.note_length(ids)
        self.note_length(own)
        if not ids or not own:
            raise Unfamiliar("a conversation has no tokens")
        start, rest = _num_alike(own, ids), _num_alike(own[::-1], ids[::-1])
        for num_alike, side in ((start, "start"), (rest, "end")):
            if num_alike == min(len(own), len(ids)):
                batch.note.warning(f"Could not find content {side} boundary for turn {index}")
                return -1, -1
        return start, len(own) - rest

    def find_characters(
        self, index: int, content_only: bool, reasoning_only: bool
    ) -> tuple[int, int]:
        """Characters of a turn, from and to: ``_find_turn_from_text``."""
        plan, turns = self.plan, self.inputs[0]
        is_plain = len(turns[index].keys() - NOT_SHOWN) == 2
        if plan is not None and is_plain and all(plan.copies(index, s) for s in _SENTINELS):
            if not self.starts:
                self.fillings = plan.fillings(self.inputs)
                steps = zip(plan.texts, self.fillings, strict=False)
                self.starts = [*accumulate(len(part) for step in steps for part in step)][::2]
            hole = plan.only_holes[index]
            text, start = self.fillings[hole], self.starts[hole]
            if text and not any(text.startswith(s) or s.startswith(text) for s in _SENTINELS):
                return start, start + len(text)
        turns, spans = list(turns), []
        turn = turns[index]
        for sentinel in _SENTINELS:
            turns[index] = self.batch.strategy._build_dummy_turn(
                turn, content_only, reasoning_only, sentinel
            )
            _, text = self.batch.render((turns, *self.inputs[1:]))
            spans.append(_difference(self.text, text))
        return min(start for start, _ in spans), max(end for _, end in spans)


def _columns(prompter: Any, prompt: Any) -> dict[str, list[Any]]:
    """The columns of a batch of rows: ``is_prompt_batched`` after ``remove_none_values``."""
    columns = {name: values for name, values in prompt.items() if values is not None}
    if any(type(values) is not list for values in columns.values()):
        raise Unfamiliar("the prompt is not a batch of rows")
    messages = columns.get(prompter.field_messages)
    if not messages or len({*map(len, columns.values())}) != 1:
        raise Unfamiliar("the batch has no messages")
    if any(type(row) not in (list, str) for row in messages):
        raise Unfamiliar("the messages of a row are neither a list nor text")
    return columns


def _plain_turns(strategy: Any, messages: Any) -> list[Turn] | None:
    """``get_conversation_thread`` for messages with roles, texts and little else; None for others.

    What could be treated in a way of its own: no ``str`` where text belongs, tags of thoughts,
    details, and values that are not plain.
    """
    if type(messages) is not list or not messages:
        return None
    prompter, turns = strategy.prompter, []
    mappings = prompter.message_property_mappings
    mapped, roles = set(mappings.values()), prompter.roles
    training, detail = prompter.message_field_training, prompter.message_field_training_detail
    others = [key for key in prompter.chat_template_msg_variables if key not in mapped]
    for message in messages:
        if type(message) is not dict:
            return None
        turn = {
            key: message[name] for key, name in mappings.items() if message.get(name) is not None
        }
        if type(turn.get("role")) is not str or type(turn.get("content")) is not str:
            return None
        turn["role"] = roles.get(turn["role"], turn["role"])
        if strategy.split_thinking and turn["role"] == "assistant" and "<" in turn["content"]:
            return None
        for key in others:
            if message.get(key) is not None:
                turn[key] = message[key]
        # A key that is mapped from elsewhere may be there under its own name as well.
        if type(turn["role"]) is not str or type(turn["content"]) is not str:
            return None
        if len(turn) > 2 and any(type(value) not in _PLAIN for value in turn.values()):
            return None
        if "tool_calls" in turn or message.get(detail) is not None:
            return None
        if message.get(training) is not None:
            turn["training"] = message[training]
        turns.append(turn)
    return turns


def _num_alike(left: list[int], right: list[int]) -> int:
    """How many tokens both begin with."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return sum(1 for _ in alike)


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
