"""Chat templates rendered once per shape of a conversation instead of once per conversation.

Most templates only copy what a message says: they look at roles and at the place of a message,
never into its text. Whether that is so for a list of roles is found out by running the template
itself, by jinja, with a ``_Hole`` where each text would be. A hole can be added to text, stripped
and written out; its truth is that of a text that is not empty; everything else that could tell
one text from another (comparing, searching, measuring, hashing, turning into ``str``, ...) raises.
A run that ends has therefore taken a way that no text can change, and what it wrote is the
conversation with holes, a ``Plan``: fill the texts in and you have what the template renders. By
induction over the run: each value in it is the value of a real run, or a hole that stands for the
text there. Ways out are closed: constructs that capture output as text are refused when parsed
(macros, block assignments, ...), the clock and random choice do not exist in the run, and a message
shows only its role and content. The first conversation of a shape is rendered for real, too, and
has to be equal.

Where it does not end (the template inspects texts, or is refused) the template renders every
conversation, as it does in transformers. Templates with a clock or random choice are unfamiliar.

Costs two renders per shape and a join of strings per conversation. Does not do tools or documents.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from fast_axolotl.axolotl.patching import Unfamiliar

__all__ = ["Plan", "Renderer", "Shape", "find_renderer"]

Shape = tuple[tuple[str, bool], ...]
"""For each message its role, and whether it says anything."""

_UNSTEADY = ("strftime_now", "random", "lipsum")
"""Names in a template that make two renders of one conversation differ."""

_CAPTURES = (
    "AssignBlock",
    "Block",
    "CallBlock",
    "EvalContextModifier",
    "Extends",
    "FilterBlock",
    "FromImport",
    "Import",
    "Include",
    "Macro",
)
"""Nodes of a template that turn output into text again, or bring in other templates."""

_JINJA = "3.1."
"""The releases whose compiler was read: output goes through ``finalize``, and nothing else does."""

_MARK = f"\x00\ue0a1{secrets.token_hex(8)}"
"""Begins a hole in what a template writes; no text and no template can know it."""
_HOLE = re.compile(f"{_MARK}([^\x00]*)\x00")

_NOT_SHOWN = ("training", "training_detail", "reasoning_training_detail")
"""Keys of a message that its stand-in does not have; a template that reads them is no plan."""

_MOST_SHAPES = 4096
_MOST_RENDERERS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """A rendered shape: text, hole, text, hole, ..., text."""

    texts: tuple[str, ...]
    """What the template wrote itself; one more than there are holes."""
    holes: tuple[int, ...]
    """Which message each hole takes its text from."""
    strips: tuple[str, ...]
    """How the text of each hole is stripped: empty, or names of ``str`` methods."""
    is_plain: bool
    """Whether no hole strips and the holes are the messages in order, each once."""

    def fill(self, contents: Sequence[str]) -> str:
        """The conversation that says this."""
        parts = [""] * (2 * len(self.texts) - 1)
        parts[::2] = self.texts
        parts[1::2] = contents if self.is_plain else self.filling(contents)
        return "".join(parts)

    def filling(self, contents: Sequence[str]) -> list[str]:
        """The text in each hole."""
        return [
            _strip(contents[message], strips)
            for message, strips in zip(self.holes, self.strips, strict=True)
        ]


@dataclass(slots=True)
class Renderer:
    """A chat template with its constants: ``apply_chat_template(..., tokenize=False)``."""

    template: Any
    arguments: dict[str, Any]
    stand_in: Any
    """The template in an environment that can write holes; None if it is refused."""
    plans: dict[Shape, Plan | None] = field(default_factory=dict)

    def render(self, messages: list[dict[str, Any]], template: Any = None) -> str:
        """The conversation as the template renders it."""
        text: str = (template or self.template).render(
            messages=messages,
            tools=None,
            documents=None,
            **{"add_generation_prompt": False, **self.arguments},
        )
        return text

    def plan(self, shape: Shape, contents: Sequence[str]) -> Plan | None:
        """How conversations of a shape are rendered, if texts cannot change it.

        Args:
            shape: Of the conversation; its messages have a role, a content, and nothing that
                the template could see beside.
            contents: What this conversation says, to prove the plan on.
        """
        if shape not in self.plans:
            if len(self.plans) >= _MOST_SHAPES:
                self.plans.clear()
            plan = _make_plan(self, shape)
            if plan is not None:
                messages = [
                    {"role": role, "content": content}
                    for (role, _), content in zip(shape, contents, strict=True)
                ]
                if plan.fill(contents) != self.render(messages):
                    plan = None
            self.plans[shape] = plan
        return self.plans[shape]


def find_renderer(chat_template: str, arguments: dict[str, Any]) -> Renderer:
    """The renderer of a template, which remembers its plans."""
    for name, value in arguments.items():
        if type(value) not in (str, bool, int, float, type(None)):
            raise Unfamiliar(f"the chat template is given {name}, which is no plain value")
    # By what is written, since 0.0 equals -0.0.
    key = (
        chat_template,
        tuple((name, type(value), repr(value)) for name, value in arguments.items()),
    )
    if key not in _RENDERERS:
        if any(name in chat_template for name in _UNSTEADY):
            raise Unfamiliar("the chat template uses the clock or random choice")
        if len(_RENDERERS) >= _MOST_RENDERERS:
            _RENDERERS.clear()
        _RENDERERS[key] = _make_renderer(chat_template, arguments)
    return _RENDERERS[key]


_RENDERERS: dict[Any, Renderer] = {}


def _make_renderer(chat_template: str, arguments: dict[str, Any]) -> Renderer:
    from transformers.utils import chat_template_utils

    template = chat_template_utils._compile_jinja_template(chat_template)
    environment, jinja2 = template.environment, chat_template_utils.jinja2
    if not jinja2.__version__.startswith(_JINJA):
        return Renderer(template, arguments, None)
    nodes = jinja2.nodes
    parsed = environment.parse(chat_template)
    captures = next(parsed.find_all(tuple(getattr(nodes, name) for name in _CAPTURES)), None)
    recursive = any(loop.recursive for loop in parsed.find_all(nodes.For))
    marked = any("\ue0a1" in str(value) for value in (chat_template, *arguments.values()))
    if captures or recursive or marked or environment.finalize or environment.autoescape:
        return Renderer(template, arguments, None)
    beside = environment.overlay(finalize=_written)
    beside.filters = {k: v for k, v in environment.filters.items() if k not in _UNSTEADY}
    beside.globals = {k: v for k, v in environment.globals.items() if k not in _UNSTEADY}
    beside.tests = {k: v for k, v in environment.tests.items() if k != "sameas"}
    try:
        return Renderer(template, arguments, beside.from_string(chat_template))
    except Exception:  # noqa: BLE001  it names a filter or test that the stand-in lacks
        return Renderer(template, arguments, None)


def _make_plan(renderer: Renderer, shape: Shape) -> Plan | None:
    if renderer.stand_in is None or any("\ue0a1" in role for role, _ in shape):
        return None
    messages: list[dict[str, Any]] = [
        _Message(role=role, content=_Hole(((index, ""),)) if says_something else "")
        for index, (role, says_something) in enumerate(shape)
    ]
    try:
        written = _HOLE.split(renderer.render(messages, renderer.stand_in))
    except (_LooksInside, Exception):  # noqa: BLE001  a template may fail in any way
        return None
    holes = tuple(int(mark.partition(":")[0]) for mark in written[1::2])
    strips = tuple(mark.partition(":")[2] for mark in written[1::2])
    is_plain = not any(strips) and holes == tuple(range(len(shape)))
    return Plan(tuple(written[::2]), holes, strips, is_plain)


def _strip(text: str, strips: str) -> str:
    for name in strips.split():
        text = getattr(text, name)()
    return text


def _written(value: Any) -> Any:
    """What is written for a value: jinja calls this for each output, and only there."""
    if type(value) is not _Hole:
        return value
    return "".join(
        part if type(part) is str else f"{_MARK}{part[0]}:{part[1]}\x00" for part in _parts(value)
    )


class _LooksInside(BaseException):
    """The template asked what a message says; no ``Exception``, so that jinja lets it through."""


def _look_inside(*_: Any, **__: Any) -> NoReturn:
    raise _LooksInside


class _Hole:
    """A ``str`` that nobody knows: text and messages' contents, one after the other."""

    __slots__ = ("parts",)
    __hash__ = _look_inside

    def __init__(self, parts: tuple[str | tuple[int, str], ...]) -> None:
        self.parts = parts

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What ``isinstance`` is told, and so jinja's ``is string``."""
        return str

    def __add__(self, other: Any) -> _Hole:
        return _Hole(_parts(self) + _parts(other))

    def __radd__(self, other: Any) -> _Hole:
        return _Hole(_parts(other) + _parts(self))

    def __bool__(self) -> bool:
        # A message that says nothing has no hole; one that says something may strip to nothing.
        if any(part if type(part) is str else not part[1] for part in _parts(self)):
            return True
        raise _LooksInside

    def strip(self, characters: None = None) -> _Hole:
        return _stripped(self, "strip", characters)

    def lstrip(self, characters: None = None) -> _Hole:
        return _stripped(self, "lstrip", characters)

    def rstrip(self, characters: None = None) -> _Hole:
        return _stripped(self, "rstrip", characters)

    def __getattribute__(self, name: str) -> Any:
        if name not in ("strip", "lstrip", "rstrip", "__class__"):
            raise _LooksInside
        return object.__getattribute__(self, name)


def _stripped(hole: _Hole, name: str, characters: None) -> _Hole:
    parts = _parts(hole)
    if characters is not None or len(parts) != 1 or type(parts[0]) is str:
        raise _LooksInside
    index, strips = parts[0]
    return _Hole(((index, f"{strips} {name}".strip()),))


def _parts(value: Any) -> tuple[Any, ...]:
    if type(value) is _Hole:
        parts: tuple[Any, ...] = object.__getattribute__(value, "parts")
        return parts
    if type(value) is str:
        return (value,)
    raise _LooksInside


class _Message(dict[str, Any]):
    """A message of which only the values of known keys can be seen."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_shown(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_shown(key), default)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(_shown(key))

    def __bool__(self) -> bool:
        return True


def _shown(key: Any) -> str:
    if type(key) is not str or key in _NOT_SHOWN:
        raise _LooksInside
    return key


_ABOUT_TEXT = (
    "str repr format eq ne lt le gt ge len iter contains getitem mod rmod mul rmul reversed"
    " int float complex index bytes round trunc floor ceil abs neg pos invert"
)
_ABOUT_KEYS = "str repr format eq ne len iter reversed or ror ior"
for _name in _ABOUT_TEXT.split():
    setattr(_Hole, f"__{_name}__", _look_inside)
for _name in _ABOUT_KEYS.split():
    setattr(_Message, f"__{_name}__", _look_inside)
for _name in ("keys", "values", "items", "copy", "setdefault", "pop", "popitem", "update"):
    setattr(_Message, _name, _look_inside)
