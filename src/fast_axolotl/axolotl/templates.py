"""The text that a chat template puts around the messages, found once per sequence of roles.

Axolotl finds each trained turn by rendering the whole conversation twice more, with a placeholder
in place of the turn. Conversations with the same roles differ in their texts alone, so one render
with marks in place of the texts shows what the template writes between them: a ``Skeleton``. Filled
with the texts of a conversation, it is that conversation's render; filled with a placeholder, it
is the render that Axolotl would ask for.

A skeleton is only believed where it is seen to be right:

- every conversation is rendered for real, and must equal its filled skeleton. Templates that
  look into texts (length, thoughts, tool calls), change them or write the date fail here;
- the first fillings with another text at a place, and then one in ``_CHECK_EVERY``, are compared
  with a real render. One difference, and the skeleton is not used any more.

Everything else is rendered by the template, as in Axolotl. Marks have white space on both sides, so
it shows where a template strips a text. Costs one render per skeleton, and then a join of strings.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Turn = dict[str, Any]
Render = Callable[[list[Turn], Any], str]
"""Messages and tools (or None) to the text that the template makes of them."""

NOT_SHOWN = frozenset({"training", "training_detail", "reasoning_training_detail"})
"""Keys of a message that are about training; conversations that differ in them are of a kind."""

_CHECKS = 3
"""Fillings of a place that are compared with a real render at first."""
_CHECK_EVERY = 64
_MOST_SKELETONS = 1024

_SPACE = "\u2003"
"""Stripped by ``str.strip``, and not written by templates."""
_MARK = secrets.token_hex(8)
"""No text and no template can know it."""
_MARKS = re.compile(f"({_SPACE}?){_MARK}x([0-9]+)x{_MARK}({_SPACE}?)")

_STRIPS: dict[tuple[bool, bool], Callable[[str], str]] = {
    (True, True): str,
    (False, True): str.lstrip,
    (True, False): str.rstrip,
    (False, False): str.strip,
}
"""Whether the white space before and after a mark was kept, to what the template does."""


@dataclass(slots=True)
class Skeleton:
    """What a template writes for a kind of conversation: text, hole, text, hole, ..., text."""

    parts: list[str]
    holes: list[tuple[int, int, str, Callable[[str], str]]]
    """Place among the parts, message, its key, and how the template strips the value."""
    checks: Counter[int] = field(default_factory=Counter)
    """Fillings with another text, by message."""
    is_right: bool = True
    """Whether all of these that were compared with a render were equal to it."""

    def fill(self, messages: list[Turn]) -> str:
        """The conversation as the template renders it."""
        parts = self.parts.copy()
        for place, message, key, strip in self.holes:
            parts[place] = strip(messages[message][key])
        return "".join(parts)


class Skeletons:
    """Those of one template with its arguments. ``keys`` name the texts of a message."""

    def __init__(self, render: Render, keys: tuple[str, ...]) -> None:
        self._render = render
        self._keys = frozenset(keys)
        self._made: dict[Any, Skeleton | None] = {}

    def explain(self, messages: list[Turn], tools: Any, text: str) -> bool:
        """Whether the skeleton of a conversation gives its ``text``."""
        skeleton = self._find(messages, tools)
        return skeleton is not None and skeleton.fill(messages) == text

    def render_changed(self, messages: list[Turn], tools: Any, index: int) -> str:
        """The text of an explained conversation after message ``index`` was exchanged."""
        skeleton = self._find(messages, tools)
        if skeleton is None or not skeleton.is_right:
            return self._render(messages, tools)
        filled = skeleton.fill(messages)
        count = skeleton.checks[index]
        skeleton.checks[index] += 1
        if count >= _CHECKS and count % _CHECK_EVERY:
            return filled
        text = self._render(messages, tools)
        skeleton.is_right = text == filled
        return text

    def _find(self, messages: list[Turn], tools: Any) -> Skeleton | None:
        kind = (repr(tools), *map(self._kind, messages))
        if kind not in self._made:
            if len(self._made) >= _MOST_SKELETONS:
                self._made.clear()
            self._made[kind] = self._make(messages, tools)
        return self._made[kind]

    def _kind(self, message: Turn) -> str:
        """All of a message but its texts, and what is not shown of it."""
        if len(message) == 2 and type(message.get("content")) is str:
            return str(message.get("role"))
        return repr(
            {
                key: _MARK if key in self._keys and type(value) is str else value
                for key, value in message.items()
                if key not in NOT_SHOWN
            }
        )

    def _make(self, messages: list[Turn], tools: Any) -> Skeleton | None:
        marked: list[Turn] = []
        names: list[tuple[int, str]] = []
        for index, message in enumerate(messages):
            marked.append(message.copy())
            for key in self._keys & message.keys():
                if type(message[key]) is str:
                    marked[-1][key] = f"{_SPACE}{_MARK}x{len(names)}x{_MARK}{_SPACE}"
                    names.append((index, key))
        try:
            found = _MARKS.split(self._render(marked, tools))
        except Exception:  # noqa: BLE001  a template may refuse a text in any way
            return None
        skeleton = Skeleton([found[0]], [])
        for before, number, after, text in zip(*[iter(found[1:])] * 4, strict=True):
            strip = _STRIPS[bool(before), bool(after)]
            skeleton.holes.append((len(skeleton.parts), *names[int(number)], strip))
            skeleton.parts += ["", text]
        return skeleton
