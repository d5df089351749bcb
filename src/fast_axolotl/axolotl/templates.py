"""Chat templates rendered once per kind of conversation instead of once per conversation.

Most of what a template does is decided by roles and places; where it looks into a text, it asks few
questions (does it contain ``</think>``, is it empty). Both are found out by running the template
itself, by jinja, on a conversation in which each text, each JSON value and the list of tools is a
``_Hole``. A hole knows what it stands for and how to find that in any conversation of the same
shape. Operations on it give another hole (``strip``, ``split``, ``tojson``, a key of a dict, ...);
what has to be answered now (truth, length, ``in``, ``==``, the keys of a dict, ...) is answered by
the real value, and the question is noted with its answer; all else raises. The clock is a question,
too. What the run wrote is text and holes: a ``Plan``. It holds for every conversation of the shape
that answers the noted questions alike: fill in what the holes stand for and you have what the
template renders.

Why: by induction over the run, each value in it is the value that a real run on such a conversation
has, or a hole that stands for it, since a way can only be chosen by an answer. Ways out are closed:
holes are no ``str``, so C code refuses them, and their methods are those given here; output that
is captured (macros, block assignments) becomes a hole again in ``_concat``, through which jinja's
compiler sends it; ``~`` is compiled as ``+``; filters that make ``Markup`` do not exist in the
run, nor does random choice; a message shows only the values of its keys. Besides, the first plans
are compared with real renders, and then every sixteenth.

Plans of a shape lie in a tree: a question, its answers, and below each the next question or a plan.
Where a run does not end, the template renders the conversation, as it does in transformers.

Costs about three renders per plan; then a microsecond per question and a join of strings. Does not
do documents, and dates with hours: a template that asks for the time is unfamiliar.
"""

from __future__ import annotations

import operator
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial, partialmethod
from itertools import count
from typing import Any, NoReturn

from fast_axolotl.axolotl.patching import Unfamiliar

Inputs = tuple[list[dict[str, Any]], Any, Callable[[str], str]]
"""What a template sees of a conversation: its messages, tools or None, and the clock."""

_Get = Callable[[Inputs], Any]
_Part = tuple[_Get, int]
"""How a value is found in a conversation, and the messages it is made of, as bits of a number."""

_UNSTEADY = ("random", "lipsum")
"""Names in a template that make two renders of one conversation differ."""

_MARKUP = ("e", "escape", "forceescape", "safe", "urlize", "xmlattr", "tojson")
"""Filters that give ``Markup``, in which ``+`` escapes."""

_ELSEWHERE = ("Block", "EvalContextModifier", "Extends", "FromImport", "Import", "Include")
"""Nodes of a template that bring in other templates, or turn on escapes."""

_JINJA = "3.1."
"""The releases whose compiler was read: output goes through ``finalize`` or is a macro's result,
and is joined by ``environment.concat``."""

_MARK = f"\x00\ue0a1{secrets.token_hex(8)}"
"""Begins a hole in what a template writes; no text and no template can know it."""
_WRITTEN = re.compile(f"{_MARK}([^\x00]*)\x00")

NOT_SHOWN = frozenset({"label", "training", "training_detail", "reasoning_training_detail"})
"""Keys of a message that its stand-in does not have; a template that reads them is no plan."""

_DATES = re.compile(r"(?:[^%]|%-?[aAbBdeFhjmuUVwWxyYGg%])*")
"""Formats of the clock that do not change within a day."""

_KINDS: dict[Any, type] = {"str": str, "dict": dict, "list": list}
_PLAIN = (str, bool, int, float, type(None))

_TEXT_METHODS = (
    "capitalize count endswith find isalnum isalpha isdigit islower isspace isupper lower lstrip"
    " partition removeprefix removesuffix replace rfind rpartition rsplit rstrip split splitlines"
    " startswith strip swapcase title upper"
)

_UNLESS_TEXT = "fast_axolotl_unless_text"
"""Name of a filter."""

_MOST_PLANS = 1024
_MOST_RENDERERS = 64
_COMPARED = 256
"""Plans of a template that are all compared with a real render; later ones now and then."""
_TRIES = 64
"""Runs that may fail before a template is given up, unless more succeed; plans likewise that are
not used again."""


@dataclass(slots=True)
class Clock:
    """``strftime_now``, but with the same date however long the run takes."""

    now: Any
    told: dict[str, str] = field(default_factory=dict)

    def __call__(self, form: str) -> str:
        if type(form) is not str or not _DATES.fullmatch(form):
            raise Unfamiliar("the chat template uses the current time")
        if form not in self.told:
            self.told[form] = self.now(form)
        return self.told[form]

    def is_right(self) -> bool:
        """Whether all that it told still holds."""
        return all(self.now(form) == date for form, date in self.told.items())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a template writes for a kind of conversation: text, hole, text, hole, ..., text."""

    texts: tuple[str, ...]
    """What is the same in all; one more than there are holes."""
    holes: tuple[_Part, ...]
    questions: tuple[tuple[_Get, Any, int], ...]
    """What was asked in the run, in order, with the answer and the messages it is about."""
    is_plain: bool
    """Whether the holes are the contents of the messages in order, each once."""
    _copied: dict[tuple[int, str], bool] = field(default_factory=dict)

    def fillings(self, inputs: Inputs) -> list[str]:
        """The text in each hole."""
        if self.is_plain:
            return [message["content"] for message in inputs[0]]
        return [get(inputs) for get, _ in self.holes]

    def fill(self, inputs: Inputs) -> str:
        """The conversation as the template renders it."""
        parts = [""] * (2 * len(self.texts) - 1)
        parts[::2] = self.texts
        parts[1::2] = self.fillings(inputs)
        return "".join(parts)

    @cached_property
    def only_holes(self) -> dict[int, int]:
        """The hole of each message that fills one, alone."""
        return {
            messages.bit_length() - 1: place
            for place, (_, messages) in enumerate(self.holes)
            if messages.bit_count() == 1
            and sum(bool(messages & others) for _, others in self.holes) == 1
        }

    def copies(self, message: int, text: str) -> bool:
        """Whether this message could say ``text``, all else equal, and its only hole would, too."""
        if (message, text) not in self._copied:
            place, bit = self.only_holes.get(message), 1 << message
            questions = [question for question in self.questions if question[2] & bit]
            # Only the role may be asked about beside the content, and it is part of the shape.
            inputs: Any = [{"content": text}] * (message + 1), None, None
            self._copied[message, text] = (
                place is not None
                and all(messages == bit for _, _, messages in questions)
                and all(get(inputs) == answer for get, answer, _ in questions)
                and self.holes[place][0](inputs) == text
            )
        return self._copied[message, text]


@dataclass(slots=True)
class _Question:
    """A place in the tree of plans."""

    get: _Get
    answers: dict[Any, _Question | Plan | None] = field(default_factory=dict)


@dataclass(slots=True)
class Renderer:
    """A chat template with its constants: ``apply_chat_template(..., tokenize=False)``."""

    template: Any
    arguments: dict[str, Any]
    stand_in: Any
    """The template in an environment that can write holes; None if it is refused."""
    asks_clock: bool
    aliases: tuple[str, ...]
    """Keys of messages that transformers, from 5.22 on, copies to one another."""
    trees: dict[Any, _Question | Plan | None] = field(default_factory=dict)
    num_plans: int = 0
    num_failed: int = 0
    num_used: int = 0
    """How often a plan was found that another conversation had made."""

    def clock(self) -> Clock:
        """The clock that the template would look at."""
        return Clock(self.template.environment.globals.get("strftime_now"))

    def render(self, inputs: Inputs) -> str:
        """The conversation as the template renders it."""
        if self._is_altered(inputs):
            raise Unfamiliar("transformers passes reasoning fields under several names")
        text: str = self._run(self.template, inputs)
        return text

    def plan(self, inputs: Inputs) -> Plan | None:
        """The plan of a conversation, if it has one."""
        shape = _shape(inputs)
        if self.stand_in is None or shape is None or self._is_altered(inputs):
            return None
        answers, key = self.trees, shape
        while True:
            place: Any = answers.get(key, _MISSING)
            if place is _MISSING:
                return self._make_plan(shape, inputs)
            if type(place) is not _Question:
                plan: Plan | None = place
                self.num_used += 1
                return plan
            answers, key = place.answers, place.get(inputs)

    def _is_altered(self, inputs: Inputs) -> bool:
        """Whether transformers would change messages before the template sees them."""
        return any(name in message for name in self.aliases for message in inputs[0])

    def _run(self, template: Any, inputs: Inputs) -> Any:
        messages, tools, clock = inputs
        return template.render(
            messages=messages,
            tools=tools,
            documents=None,
            **({"strftime_now": clock} if self.asks_clock else {}),
            **{"add_generation_prompt": False, **self.arguments},
        )

    def _make_plan(self, shape: Any, inputs: Inputs) -> Plan | None:
        if self.num_failed > max(_TRIES, self.num_plans):
            return None
        if self.num_plans > _TRIES + self.num_used:
            return None  # every conversation is of a kind of its own: a plan costs three renders
        if (self.num_plans + self.num_failed) % _MOST_PLANS == _MOST_PLANS - 1:
            self.trees.clear()
        run = _Run(inputs)
        plan = None
        try:
            made = run.plan(self._run(self.stand_in, run.stand_ins()))
            is_compared = self.num_plans < _COMPARED or self.num_plans % 16 == 0
            if not is_compared or made.fill(inputs) == self.render(inputs):
                plan = made
        except (_LooksInside, Exception):  # noqa: BLE001  a template may fail in any way
            pass
        finally:
            del _RUNS[run.number]
        self.num_plans += plan is not None
        self.num_failed += plan is None
        answers, key = self.trees, shape
        for get, answer, _ in run.questions:
            place = answers.setdefault(key, _Question(get))
            if type(place) is not _Question:
                return None
            answers, key = place.answers, answer
        answers[key] = plan
        return plan


_MISSING: Any = object()


def find_renderer(chat_template: str, arguments: dict[str, Any]) -> Renderer:
    """The renderer of a template, which remembers its plans."""
    for name, value in arguments.items():
        if type(value) not in _PLAIN:
            raise Unfamiliar(f"the chat template gets {name}, which is not a plain value")
    # By what is written, since 0.0 equals -0.0.
    key = (
        chat_template,
        tuple((name, type(value), repr(value)) for name, value in arguments.items()),
    )
    if key not in _RENDERERS:
        if any(name in chat_template for name in _UNSTEADY):
            raise Unfamiliar("the chat template uses a random choice")
        if len(_RENDERERS) >= _MOST_RENDERERS:
            _RENDERERS.clear()
        _RENDERERS[key] = _make_renderer(chat_template, arguments)
    return _RENDERERS[key]


_RENDERERS: dict[Any, Renderer] = {}


def _make_renderer(chat_template: str, arguments: dict[str, Any]) -> Renderer:
    from transformers.utils import chat_template_utils

    template = chat_template_utils._compile_jinja_template(chat_template)
    environment, jinja2 = template.environment, chat_template_utils.jinja2
    aliases = tuple(getattr(chat_template_utils, "_REASONING_FIELDS", ()))
    renderer = Renderer(template, arguments, None, "strftime_now" in chat_template, aliases)
    if not jinja2.__version__.startswith(_JINJA):
        return renderer
    nodes = jinja2.nodes
    parsed = environment.parse(chat_template)
    elsewhere = next(parsed.find_all(tuple(getattr(nodes, name) for name in _ELSEWHERE)), None)
    recursive = any(loop.recursive for loop in parsed.find_all(nodes.For))
    marked = any("\ue0a1" in str(value) for value in (chat_template, *arguments.values()))
    if elsewhere or recursive or marked or environment.finalize or environment.autoescape:
        return renderer
    beside = environment.overlay(finalize=_written)
    beside.concat = _concat
    beside.filters = {k: v for k, v in environment.filters.items() if k not in _UNSTEADY + _MARKUP}
    beside.filters |= {"tojson": partial(_tojson, environment.filters["tojson"]), "join": _join}
    beside.filters |= {"length": _length, "count": _length, _UNLESS_TEXT: _unless_text}
    beside.globals = {k: v for k, v in environment.globals.items() if k not in _UNSTEADY}
    beside.tests = {k: v for k, v in environment.tests.items() if k != "sameas"}
    for name in ("sequence", "iterable"):
        beside.tests[name] = partial(_is_sequence, environment.tests[name])

    class CodeGenerator(beside.code_generator_class):  # type: ignore[name-defined,misc]
        """``a ~ b`` as a sum of texts."""

        def visit_Concat(self, node: Any, frame: Any) -> None:
            for index, term in enumerate(node.nodes):
                self.write(f"{' + ' if index else '('}environment.filters['string'](")
                self.visit(term, frame)
                self.write(")")
            self.write(")")

    beside.code_generator_class = CodeGenerator
    parsed = beside.parse(chat_template)
    for output in parsed.find_all(nodes.Output):
        # Nothing is escaped, so what is safe is written as it is.
        output.nodes = [
            node.node if isinstance(node, nodes.Filter) and node.name == "safe" else node
            for node in output.nodes
        ]
    for loop in parsed.find_all(nodes.For):
        if _asks_for_keys(loop, nodes):
            loop.iter = nodes.Filter(loop.iter, _UNLESS_TEXT, [], [], None, None, lineno=1)
    with suppress(Exception):  # it may name something that the stand-in lacks
        renderer.stand_in = beside.from_string(parsed)
    return renderer


def _asks_for_keys(loop: Any, nodes: Any) -> bool:
    """Whether a loop does nothing unless its items have a key: characters of a text have none.

    It is ``{% for item in x %}{% if item['key'] == 'value' %}...{% endif %}{% endfor %}``.
    """
    if len(loop.body) != 1 or type(loop.body[0]) is not nodes.If or loop.else_ or loop.test:
        return False
    (branch,) = loop.body
    test = branch.test
    return (
        not (branch.elif_ or branch.else_)
        and type(test) is nodes.Compare
        and [(part.op, type(part.expr)) for part in test.ops] == [("eq", nodes.Const)]
        and type(test.ops[0].expr.value) is str
        and type(test.expr) is nodes.Getitem
        and test.expr.node == nodes.Name(getattr(loop.target, "name", None), "load")
        and type(test.expr.arg) is nodes.Const
        and type(test.expr.arg.value) is str
    )


def _kind(value: Any) -> str:
    """What a template may know of a value without a question."""
    kind = type(value)
    if kind in (str, dict, list):
        return kind.__name__
    return f"{kind.__name__} {value!r}" if kind in _PLAIN else "unknown"


def _shape(inputs: Inputs) -> Any:
    """Roles, and the keys of messages and kinds of their values; None if a value has no kind."""
    shape: list[Any] = [inputs[1] is not None]
    for message in inputs[0]:
        role = message.get("role")
        if len(message) == 2 and type(role) is type(message.get("content")) is str:
            shape.append(role)
            continue
        kinds = [(k, _kind(v)) for k, v in message.items() if k not in NOT_SHOWN]
        if type(role) is not str or ("unknown" in [kind for _, kind in kinds]):
            return None
        shape.append(role if len(kinds) == 2 and ("content", "str") in kinds else (role, *kinds))
    return tuple(shape)


class _Run:
    """A run of the template on stand-ins of a conversation."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.questions: list[tuple[_Get, Any, int]] = []
        self.written: list[_Part] = []
        self.contents: list[_Get] = []
        self.number = next(_NUMBERS)
        _RUNS[self.number] = self

    def ask(self, get: _Get, messages: int) -> Any:
        answer = get(self.inputs)
        self.questions.append((get, answer, messages))
        return answer

    def find(self, get: _Get, messages: int) -> Any:
        """A value in the conversation: itself if it is plain, or a hole."""
        kind = self.ask(lambda inputs: _kind(get(inputs)), messages)
        if kind in _KINDS:
            return _Hole(self, _KINDS[kind], ((get, messages),))
        if kind == "unknown":
            raise _LooksInside
        return get(self.inputs)

    def stand_ins(self) -> Inputs:
        messages: list[dict[str, Any]] = []
        for index, message in enumerate(self.inputs[0]):
            stand_in = _Message(self, index)
            for key, value in message.items():
                get = partial(_message_value, index, key)
                self.contents += [get] if key == "content" else []
                if key in NOT_SHOWN:
                    continue
                kind = type(value)
                is_plain = key == "role" or kind not in (str, dict, list)
                dict.__setitem__(
                    stand_in, key, value if is_plain else _Hole(self, kind, ((get, 1 << index),))
                )
            messages.append(stand_in)
        tools = None if self.inputs[1] is None else _Hole(self, list, ((lambda row: row[1], 0),))
        return messages, tools, lambda form: self.ask(lambda row: row[2](form), 0)

    def plan(self, output: Any) -> Plan:
        texts, holes = [""], []
        for part in _parts(output):
            if type(part) is str:
                texts[-1] += part
            else:
                texts.append("")
                holes.append(part)
        return Plan(
            texts=tuple(texts),
            holes=tuple(holes),
            questions=tuple(self.questions),
            is_plain=[get for get, _ in holes] == self.contents
            and all(type(message.get("content")) is str for message in self.inputs[0]),
        )


_RUNS: dict[int, _Run] = {}
_NUMBERS = count()


def _message_value(index: int, key: str, inputs: Inputs) -> Any:
    return inputs[0][index][key]


def _written(value: Any) -> Any:
    """What is written for a value: jinja calls this for each output."""
    if type(value) is not _Hole:
        return value
    run, kind, parts = _inside(value)
    if kind is not str:
        get, messages = parts[0]
        parts = ((lambda inputs: str(get(inputs)), messages),)
    text = ""
    for part in parts:
        if type(part) is str:
            text += part
        else:
            text += f"{_MARK}{run.number}.{len(run.written)}\x00"
            run.written.append(part)
    return text


def _concat(pieces: Iterable[Any]) -> Any:
    """Output joined: text, or a hole if there are some in it. Macros' results come as holes."""
    text = "".join([_written(piece) for piece in pieces])
    if _MARK not in text:
        return text
    parts: list[Any] = _WRITTEN.split(text)
    for place in range(1, len(parts), 2):
        number, _, index = parts[place].partition(".")
        run = _RUNS[int(number)]
        parts[place] = run.written[int(index)]
    return _Hole(run, str, tuple(part for part in parts if part != ""))


class _LooksInside(BaseException):
    """The template did what holes cannot do; no ``Exception``, so that jinja lets it through."""


def _look_inside(*_: Any, **__: Any) -> NoReturn:
    raise _LooksInside


class _Hole:
    """Stands for a ``str``, ``dict`` or ``list`` of the conversation, or for what is made of one.

    A text is a row of parts, each text or a ``_Part``; other values have one part.
    """

    __slots__ = ("kind", "parts", "run")
    __hash__ = _look_inside

    def __init__(self, run: _Run, kind: type, parts: tuple[Any, ...]) -> None:
        self.run = run
        self.kind = kind
        self.parts = parts

    def __getattribute__(self, name: str) -> Any:
        _, kind, _ = _inside(self)
        if name == "__class__":
            return kind  # for isinstance, and so jinja's ``is string``
        if kind is str and name in _TEXT_METHODS.split():
            return partial(_call, self, name)
        if kind is dict and name == "get":
            return partial(_get, self)
        if kind is dict and name in ("items", "keys", "values"):
            return lambda: getattr({key: self[key] for key in self}, name)()
        if name.startswith("_") or hasattr(kind, name):
            raise _LooksInside
        raise AttributeError(name)

    def __add__(self, other: Any) -> _Hole:
        return _Hole(_inside(self)[0], str, _parts(self) + _parts(other))

    def __radd__(self, other: Any) -> _Hole:
        return _Hole(_inside(self)[0], str, _parts(other) + _parts(self))

    def __bool__(self) -> bool:
        if any(type(part) is str for part in _inside(self)[2]):
            return True
        return bool(_ask(self, bool))

    def __len__(self) -> int:
        return int(_ask(self, len))

    def __contains__(self, item: Any) -> bool:
        return bool(_ask(self, operator.contains, item))

    def __getitem__(self, key: Any) -> Any:
        run, kind, _ = _inside(self)
        get, messages = _part(self)
        if type(key) is slice and kind in (str, list):
            bounds = key.start, key.stop, key.step
            if any(type(bound) not in (int, type(None)) for bound in bounds) or key.step == 0:
                raise _LooksInside
            return _Hole(run, kind, ((lambda inputs: get(inputs)[key], messages),))
        if kind is not dict and type(key) is str:
            raise TypeError("indices are numbers")
        if type(key) not in (_PLAIN if kind is dict else (int,)):
            raise _LooksInside

        def has(value: Any) -> bool:
            return key in value if kind is dict else -len(value) <= key < len(value)

        if not _ask(self, has):
            raise KeyError(key) if kind is dict else IndexError(key)
        return run.find(lambda inputs: get(inputs)[key], messages)

    def __iter__(self) -> Iterator[Any]:
        _, kind, _ = _inside(self)
        if kind is str:
            raise _LooksInside
        if kind is dict:
            yield from _ask(self, _keys)
        else:
            yield from [self[index] for index in range(len(self))]


def _keys(value: Any) -> tuple[Any, ...]:
    keys = tuple(value)
    return keys if all(type(key) is str for key in keys) else (_MISSING,)


def _get(hole: _Hole, key: Any, default: Any = None) -> Any:
    try:
        return hole[key]
    except KeyError:
        return default


def _call(hole: _Hole, name: str, *args: Any, **kwargs: Any) -> Any:
    """A method of a text."""
    if any(type(arg) not in _PLAIN for arg in (*args, *kwargs.values())):
        raise _LooksInside
    run, (get, messages) = _inside(hole)[0], _part(hole)

    def call(inputs: Inputs) -> Any:
        return getattr(get(inputs), name)(*args, **kwargs)

    result = call(run.inputs)
    if type(result) is str:
        return _Hole(run, str, ((call, messages),))
    if type(result) in (bool, int):
        return run.ask(call, messages)
    return type(result)(
        _Hole(run, str, ((lambda inputs, index=index: call(inputs)[index], messages),))
        for index in range(run.ask(lambda inputs: len(call(inputs)), messages))
    )


def _ask(hole: _Hole, question: Callable[..., Any], *other: Any) -> Any:
    """The answer to a question about a hole, or about a hole and another or a plain value."""
    run, (get, messages) = _inside(hole)[0], _part(hole)
    if not other:
        return run.ask(lambda inputs: question(get(inputs)), messages)
    if type(other[0]) is _Hole:
        get_other, others = _part(other[0])
    elif type(other[0]) in _PLAIN:
        get_other, others = (lambda _: other[0]), 0
    else:
        raise _LooksInside
    return run.ask(lambda inputs: question(get(inputs), get_other(inputs)), messages | others)


def _tojson(tojson: Callable[..., str], value: Any, *args: Any, **options: Any) -> Any:
    if type(value) is not _Hole:
        return tojson(value, *args, **options)  # refuses holes inside
    if any(type(option) not in _PLAIN for option in (*args, *options.values())):
        raise _LooksInside
    get, messages = _part(value)
    part = (lambda inputs: tojson(get(inputs), *args, **options)), messages
    return _Hole(_inside(value)[0], str, (part,))


def _join(values: Iterable[Any], d: str = "", attribute: Any = None) -> Any:
    if attribute is not None or type(d) is not str:
        raise _LooksInside
    whole: Any = ""
    for index, value in enumerate(values):
        whole = whole + (d if index else "") + (value if type(value) is _Hole else str(value))
    return whole


def _unless_text(value: Any) -> Any:
    return () if type(value) is _Hole and _inside(value)[1] is str else value


def _length(value: Any) -> Any:
    """A number to be compared: a question that most texts answer alike."""
    if type(value) is not _Hole:
        return len(value)
    get, messages = _part(value)
    return _Hole(_inside(value)[0], int, ((lambda inputs: len(get(inputs)), messages),))


def _is_sequence(test: Callable[[Any], bool], value: Any) -> bool:
    return _inside(value)[1] is not int if type(value) is _Hole else test(value)


def _inside(hole: _Hole) -> tuple[_Run, type, tuple[Any, ...]]:
    get = object.__getattribute__
    return get(hole, "run"), get(hole, "kind"), get(hole, "parts")


def _part(hole: _Hole) -> _Part:
    """A hole as one part."""
    parts = _inside(hole)[2]
    if len(parts) == 1 and type(parts[0]) is not str:
        return parts[0]  # type: ignore[no-any-return]
    messages = 0
    for part in parts:
        messages |= 0 if type(part) is str else part[1]

    def join(inputs: Inputs) -> str:
        return "".join([part if type(part) is str else part[0](inputs) for part in parts])

    return join, messages


def _parts(value: Any) -> tuple[Any, ...]:
    """A text as parts."""
    if type(value) is str:
        return (value,) if value else ()
    if type(value) is not _Hole or _inside(value)[1] is not str:
        raise _LooksInside
    return _inside(value)[2]


class _Message(dict[str, Any]):
    """A message of which only the values of known keys can be seen."""

    __slots__ = ("_index", "_run")

    def __init__(self, run: _Run, index: int) -> None:
        super().__init__()
        self._run = run
        self._index = index

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_shown(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_shown(key), default)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(_shown(key))

    def __eq__(self, other: object) -> bool:
        if type(other) is not _Message:
            raise _LooksInside
        left, right = self._index, other._index
        messages = 1 << left | 1 << right
        return bool(self._run.ask(lambda inputs: inputs[0][left] == inputs[0][right], messages))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return True


def _shown(key: Any) -> str:
    if type(key) is not str or key in NOT_SHOWN:
        raise _LooksInside
    return key


_ABOUT_VALUES = (
    "str repr format mod rmod mul rmul reversed"
    " int float complex index bytes round trunc floor ceil abs neg pos invert"
)
_ABOUT_KEYS = "str repr format len iter reversed or ror ior"
for _name in _ABOUT_VALUES.split():
    setattr(_Hole, f"__{_name}__", _look_inside)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(_Hole, f"__{_name}__", partialmethod(_ask, getattr(operator, _name)))
for _name in _ABOUT_KEYS.split():
    setattr(_Message, f"__{_name}__", _look_inside)
for _name in ("keys", "values", "items", "copy", "setdefault", "pop", "popitem", "update"):
    setattr(_Message, _name, _look_inside)
