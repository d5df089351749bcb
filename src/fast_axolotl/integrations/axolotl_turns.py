"""What a row of messages says, turn by turn, and where two renders of it differ.

``conversations`` is Axolotl's ``get_conversation_thread`` for the rows that need nothing special:
every message has a role and a content of type ``str`` and beside them plain values at most. All
else is unfamiliar. ``diff_char_span`` finds the same characters as Axolotl's, by halving the
distance instead of one character after the other, and without reversed copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fast_axolotl.integrations.patching import Unfamiliar

__all__ = ["Turn", "conversations", "diff_char_span", "difference"]

Turn = dict[str, Any]

_PLAIN = (str, bool, int, float)
_DETAILS = ("tool_calls", "training_detail", "reasoning_training_detail")
"""What a turn may hold that Axolotl treats in a way of its own."""


def conversations(strategy: Any, prompt: Any) -> list[list[Turn]]:
    """The turns of each row: ``get_conversation_thread`` after ``remove_none_values``."""
    columns = {name: values for name, values in prompt.items() if values is not None}
    prompter = strategy.prompter
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
        if len(turn) > 2 and not _is_plain(turn):
            raise Unfamiliar("a message has tool calls, details, or values that are no plain ones")
        if message.get(detail) is not None:
            raise Unfamiliar("a message has training details")
        if message.get(training) is not None:
            if type(message[training]) is not bool:
                raise Unfamiliar("whether a message is trained on is no bool")
            turn["training"] = message[training]
        yield turn


def _is_plain(turn: Turn) -> bool:
    return all(type(value) in _PLAIN for value in turn.values()) and not any(
        name in turn for name in _DETAILS
    )


def diff_char_span(cls: Any, full_text: str, dummy_text: str) -> tuple[int, int]:
    """Stands in for ``ChatTemplateStrategy._diff_char_span``.

    The stock function compares blocks of ``cls._DIFF_BLOCK`` characters, then one by one, and the
    end on reversed copies. This one halves the distance; the result does not depend on blocks.
    """
    if type(full_text) is not str or type(dummy_text) is not str:
        raise Unfamiliar("a text is no plain str")
    if type(cls._DIFF_BLOCK) is not int or cls._DIFF_BLOCK <= 0:
        raise Unfamiliar("the block size of the comparison is no positive number")
    return difference(full_text, dummy_text)


def difference(left: str, right: str) -> tuple[int, int]:
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
