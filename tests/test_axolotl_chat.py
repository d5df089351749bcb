"""Conversations come out of ``tokenize_prompt`` exactly as from Axolotl's own."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from fast_axolotl.axolotl.chat import difference, tokenize_prompt
from fast_axolotl.axolotl.patching import Final, Unfamiliar
from fast_axolotl.axolotl.templates import Skeletons
from support.axolotl import STOCK_AXOLOTL, Later, byte_tokenizer, log_lines, needs

pytestmark = [*STOCK_AXOLOTL, needs("chat")]

WORDS = [
    *("hello", "world", "[[dummy_message]]", "[[dummy", "zz", "zzdummymessagezz", "]]", "a", "7"),
    *("<|im_end|>", "</s>", " ", "\n", "  ", "ünï", "🙂", "日本", "</think>", "<think>", "<s>"),
    *("{{", "{% if %}", "<tool_response>", "</tool_response>", "<|channel>", "<channel|>", "\x00"),
    *("'", '"', "<reasoning>", "</reasoning>", "<|begin_of_thought|>", "<|end_of_thought|>"),
    *("<|begin_of_solution|>", "<|end_of_solution|>"),
]
CONTENTS = st.lists(st.sampled_from(WORDS), max_size=5).map("".join)

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
)

OTHERS = {
    "length": "{% if m.content|length > 6 %}long{% endif %}{{ m.content }}",
    "contains": "{% if 'h' in m.content %}h{% endif %}{{ m.content }}",
    "truth": "{% if m.content %}{{ m.content }}{% else %}nothing{% endif %}",
    "sorted": "{% for x in messages|sort(attribute='content') %}{{ x.content }}{% endfor %}",
    "tojson": "{{ m.content|tojson }}",
    "date": "{{ strftime_now('%d %b %Y') }}{{ m.content }}",
    "same message": "{% if m == messages[0] %}h{% endif %}{{ m.content }}",
    "is contained": "{% if m.content in 'hello world' %}h{% endif %}{{ m.content }}",
    "format": "{% set x = '%s'|format(m.content) %}{% if 'h' in x %}h{% endif %}{{ x }}",
    "any character": "{% for c in m.content %}{% if c == 'h' %}h{% endif %}{% endfor %}",
    "dict key": "{% set d = {'hello': 'h'} %}{{ d.get(m.content, '') }}{{ m.content }}",
    "repeats": "{{ m.content * 2 }}",
    "message": "{{ m }}",
    "place by length": "{{ m.content[messages[0].content|length] }}{{ m.content }}",
}

COPIES = {
    "plain": "{{ m.content }}",
    "trim": "{{ m.content|trim }}",
    "strips": "{{ m.content.lstrip() + '|' + m.content.rstrip() }}",
    "twice": "{{ m.content + m.content }}",
    "variable": "{% set c = 'x' + m['content'] %}{% if loop.first %}{% set c = bos_token + c %}"
    "{% endif %}{{ c }}",
    "only some": "{% if m.role == 'assistant' %}{{ m.content }}{% endif %}",
    "others": "{{ messages[-1].content + m.role }}",
    "keys of characters": "{% for c in m.content %}{% if c['type'] == 'image' %}h{% endif %}"
    "{% endfor %}{{ m.content }}",
    "no key": "{% if m.tool_calls %}h{% endif %}{{ m.content }}{{ m.get('name', '') }}",
}


TEMPLATES = {
    name: "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' }}" + body + "</s>\n{% endfor %}"
    for name, body in {**COPIES, **OTHERS}.items()
}

chat = Later("axolotl.prompt_strategies.chat_template")


@cache
def plain_tokenizer() -> Any:
    return make_tokenizer()


def make_tokenizer(**options: Any) -> Any:
    return byte_tokenizer(**{"eos_token": "<|im_end|>", **options})


def make_strategy(
    template: str = CHATML, prompter: Any = None, tokenizer: Any = None, **options: Any
) -> Any:
    tokenizer = tokenizer or plain_tokenizer()
    options = {"roles_to_train": ["assistant"], "train_on_eos": "turn", **options}
    prompter = {"message_field_training": "train", "field_system": "system", **(prompter or {})}
    return chat.ChatTemplateStrategy(
        chat.ChatTemplatePrompter(tokenizer, template, **prompter),
        tokenizer=tokenizer,
        train_on_inputs=options.pop("train_on_inputs", False),
        sequence_len=64,
        **options,
    )


def outcome(call: Callable[[Any], Any], batch: Any) -> tuple[Any, list[tuple[int, str]]]:
    """What the caller gets, value or error, and the log lines."""
    with log_lines("axolotl") as lines:
        try:
            return call(batch), lines
        except Final as final:
            return (type(final.error), str(final.error)), lines
        except Unfamiliar:
            raise
        except Exception as error:  # noqa: BLE001
            return (type(error), str(error)), lines


def check(strategy: Any, batch: dict[str, Any]) -> Any:
    """Values, order of keys, types, errors and kinds of log lines are those of stock's function."""
    before = repr(batch)
    runs = []
    for call in (strategy.tokenize_prompt, partial(tokenize_prompt, strategy)):
        strategy.__dict__.pop("_logged_fallbacks", None)
        runs.append(outcome(call, batch))
        assert repr(batch) == before
    (want, want_log), (got, got_log) = runs
    assert got == want
    assert sorted(got_log) == sorted(want_log)
    if isinstance(got, dict):
        assert list(got) == list(want)
        assert {type(x) for rows in got.values() for row in rows for x in row} <= {int}
    return got


@contextmanager
def rows_of_stock(num_rows: int) -> Iterator[None]:
    """So many rows inside are left to the stock function, and counted."""
    with pytest.MonkeyPatch.context() as patch:
        counts: list[int] = []
        name = "fast_axolotl.axolotl.tokenizers.tally"
        patch.setattr(name, lambda *told: counts.append(told[-1]))
        yield
    assert sum(counts) == num_rows


def refused(strategy: Any, batch: Any = None, match: str | None = None) -> None:
    """Ours refuses, has changed nothing and logged nothing."""
    batch = {"messages": [TALK]} if batch is None else batch
    before = repr(batch), repr(strategy.__dict__)
    with log_lines("axolotl", "transformers") as lines, pytest.raises(Unfamiliar, match=match):
        tokenize_prompt(strategy, batch)
    assert lines == []
    assert (repr(batch), repr(strategy.__dict__)) == before


def turn(role: str, content: Any, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


TALK = [turn("user", "hello world"), turn("assistant", "what a day")]


def shipped_templates() -> list[str]:
    found = importlib.util.find_spec("axolotl")
    if found is None:
        return []
    folder = Path(found.submodule_search_locations[0]) / "utils/chat_templates/templates"
    return sorted(path.stem for path in folder.glob("*.jinja"))


def shipped(name: str) -> str:
    folder = Path(chat.__file__).parents[1] / "utils/chat_templates/templates"
    return (folder / f"{name}.jinja").read_text()


VALUES = st.recursive(
    CONTENTS | st.sampled_from([1, 2.5, True, False, None]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=4,
)
DETAILS = st.lists(
    st.fixed_dictionaries(
        {
            "begin_offset": st.integers(0, 9),
            "end_offset": st.integers(0, 12),
            "train": st.booleans(),
        }
    ),
    max_size=2,
)
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("text"), "text": CONTENTS},
        optional={"train": st.booleans(), "weight": st.sampled_from([0, 1])},
    ),
    max_size=2,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "function": st.fixed_dictionaries(
                {
                    "name": st.sampled_from("fg"),
                    "arguments": VALUES
                    | st.dictionaries(st.sampled_from("ab"), VALUES).map(json.dumps)
                    | st.dictionaries(st.sampled_from("ab"), CONTENTS),
                }
            )
        },
        optional={"id": st.just("123456789"), "type": st.just("function")},
    ),
    max_size=2,
)
FIELDS = {"a": {"type": "string", "description": "[[dummy_message]]"}, "b": {"type": "array"}}
PARAMETERS = {"type": "object", "properties": FIELDS, "required": ["a"]}
FUNCTION = st.fixed_dictionaries(
    {
        "name": st.sampled_from("fg"),
        "description": CONTENTS,
        "parameters": st.just(PARAMETERS) | VALUES.map(json.dumps),
    }
)
TOOLS = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION}), max_size=2
)


@st.composite
def conversations(draw: Any) -> Any:
    """Mostly with roles in an order that templates allow; half of them hold texts only."""
    pair = ["user", "assistant"]
    orders = [pair, pair * 2, ["system", *pair], [*pair, "tool", "assistant"], ["human", "gpt"]]
    roles = draw(st.sampled_from(orders) | st.lists(st.sampled_from([*pair, "system"]), min_size=1))
    is_plain, turns = draw(st.booleans()), []
    for role in roles:
        message = turn(role, draw(CONTENTS if is_plain else CONTENTS | CONTENTS | PARTS))
        if role == "tool":
            message |= {"tool_call_id": "123456789", "name": "f"}
        beside = {"train": st.sampled_from([True, False, None, 0]), "name": st.just("ann")}
        if not is_plain:
            beside |= {"detail": DETAILS, "reasoning_content": CONTENTS | PARTS}
            beside |= {"tool_calls": CALLS} if role == "assistant" else {}
        turns.append(message | draw(st.fixed_dictionaries({}, optional=beside)))
    return turns


OPTIONS = st.fixed_dictionaries(
    {
        "train_on_eos": st.sampled_from(["turn", "all", "last", "none", None]),
        "train_on_eot": st.sampled_from([None, "turn", "all", "last"]),
        "roles_to_train": st.sampled_from([["assistant"], ["assistant"], ["human", "gpt"], []]),
        "train_on_inputs": st.booleans(),
        "split_thinking": st.booleans(),
    }
)
PROMPTER = st.fixed_dictionaries(
    {"message_field_training_detail": st.just("detail")},
    optional={
        "drop_system_message": st.just(True),
        "chat_template_kwargs": st.sampled_from([{"enable_thinking": True}, {"skip_think": False}]),
        "template_thinking_key": st.just("thinking"),
        "roles": st.just({"user": ["human"], "assistant": ["gpt", "user"]}),
        "message_property_mappings": st.just({"role": "from", "content": "value"}),
    },
)


@pytest.mark.parametrize("name", [*TEMPLATES, *shipped_templates()])
def test_all_templates_with_hostile_contents_and_all_options(name: str) -> None:
    """``FAST_AXOLOTL_FUZZ=500`` tries so many examples for each template."""
    text = TEMPLATES.get(name) or shipped(name)

    @settings(
        max_examples=int(os.environ.get("FAST_AXOLOTL_FUZZ", "5")),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],  # to shrink an example takes minutes
    )
    @given(
        rows=st.lists(st.tuples(conversations(), st.none() | TOOLS), min_size=1, max_size=2),
        system=st.none() | CONTENTS,
        options=OPTIONS,
        prompter=PROMPTER,
    )
    @example(
        rows=[([turn("assistant", PARTS_TRAINED)], None), ([turn("user", [])], None)],
        system=None,
        options={"roles_to_train": ["assistant"], "train_on_eot": "last", "train_on_eos": "none"},
        prompter={"message_field_training_detail": "detail"},
    )
    def compare(rows: Any, system: Any, options: Any, prompter: Any) -> None:
        strategy = make_strategy(text, prompter=prompter, eot_tokens=["</s>"], **options)
        batch: dict[str, Any] = {"messages": [messages for messages, _ in rows]}
        if "message_property_mappings" in prompter:
            names = {"role": "from", "content": "value"}
            batch["messages"] = [
                [{names.get(key, key): value for key, value in message.items()} for message in row]
                for row in batch["messages"]
            ]
        if any(tools for _, tools in rows):
            batch["tools"] = [tools for _, tools in rows]
        if system is not None:
            batch["system"] = [system] * len(rows)
        check(strategy, batch)

    compare()


def explained(strategy: Any, rows: list[Any]) -> list[bool]:
    """Whether each conversation is its filled skeleton."""

    def render(messages: list[Any], tools: Any) -> str:
        text: str = strategy.prompter.build_prompt_text(messages, tools=tools)
        return text

    skeletons = Skeletons(render, ("content", "reasoning_content"))
    return [skeletons.explain(row, None, render(row, None)) for row in rows]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_explained_only_where_the_template_copies_its_texts(name: str) -> None:
    rows = [
        [turn("user", "hello"), turn("assistant", first), turn("user", "x"), turn("assistant", "h")]
        for first in ("hello", "world", " 7 ", "Hello [[dummy_message]]", "zz 7", "HELLO", "7", "")
    ]
    strategy = make_strategy(TEMPLATES[name], train_on_inputs=True)
    check(strategy, {"messages": rows * 3})
    assert all(explained(strategy, rows)) or name not in COPIES


@pytest.mark.parametrize("name", shipped_templates())
def test_every_template_that_axolotl_ships(name: str) -> None:
    rows = [
        [turn("user", f"{word} hello"), turn("assistant", f"day {word}")] * (1 + index % 2)
        for index, word in enumerate(WORDS)
    ]
    with rows_of_stock(0):
        check(make_strategy(shipped(name)), {"messages": rows})


def test_the_rust_tokenizer_is_left_as_axolotl_leaves_it() -> None:
    strategy = make_strategy()
    rust = strategy.tokenizer._tokenizer
    for call in (strategy.tokenize_prompt, lambda batch: tokenize_prompt(strategy, batch)):
        rust.enable_truncation(3)
        rust.enable_padding(length=9)
        rust.encode_special_tokens = True
        result = call({"messages": [TALK]})
        assert (rust.truncation, rust.padding, rust.encode_special_tokens) == (None, None, False)
        assert len(result["input_ids"][0]) > 9


CALL = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DETAIL = [{"begin_offset": 0, "end_offset": 2, "train": True}]


def with_call(arguments: Any) -> list[Any]:
    function = {"name": "f", "arguments": arguments}
    return [turn("user", "a"), turn("assistant", "b", tool_calls=[{"function": function}])]


PARTS_TRAINED = [{"text": "abc ", "train": True}, {"text": "def", "weight": 0}]
REASONED = turn("assistant", "abc", reasoning_content=PARTS_TRAINED[:1], detail=DETAIL)
RARE_ROWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tools as text": (TALK, {"tools": json.dumps([TOOL])}),
    "trained parts": ([turn("assistant", PARTS_TRAINED)], {}),
    "no content": ([turn("user", "a"), {"role": "assistant", "tool_calls": [CALL]}], {}),
    "text": ('[{"role": "user", "content": "a"}]', {}),
    "detail beyond": ([turn("assistant", "abc", detail=[{**DETAIL[0], "begin_offset": 9}])], {}),
    "reasoning and detail": ([REASONED], {}),
    "thinking": ([turn("assistant", "<think> a </think> b")], {}),
    "null system": (TALK, {"system": None}),
}
"""Rows that are rare in a dataset: messages, and other columns."""

BAD_ROWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "no role": ([{"content": "a"}], {}),
    "no messages": ([], {}),
    "no dict": (["a"], {}),
    "bad tools": (TALK, {"tools": ""}),
    "odd tools": (TALK, {"tools": ["f"]}),
    "bad call": (with_call("{"), {}),
    "half a detail": ([turn("assistant", "a", detail=[{"begin_offset": 0}])], {}),
    "parts and half a detail": (
        [turn("assistant", PARTS_TRAINED), turn("assistant", "a", detail=[{"begin_offset": 0}])],
        {},
    ),
    "text that is no JSON": ("[", {}),
}
"""Rows that Axolotl fails on."""

REASONS = (
    "{% for t in tools or [] %}{{ t|tojson }}{% endfor %}{% for message in messages %}<|im_start|>"
    "{{ message.role }}{% if message.reasoning_content %}({{ message.reasoning_content }})"
    "{% endif %} {{ message.content }}"
    "{% if message.tool_calls %}{% for c in message.tool_calls %}{{ c.function.name }}"
    "{{ c.function.arguments|tojson }}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
)


def among_others(name: str) -> dict[str, list[Any]]:
    """A batch with such a row in the middle."""
    messages, others = {**RARE_ROWS, **BAD_ROWS}[name]
    last, beside = [turn("assistant", PARTS_TRAINED)], {"system": "be good", "tools": None}
    return {
        "messages": [TALK, messages, last],
        **{column: [beside[column], value, beside[column]] for column, value in others.items()},
    }


@pytest.mark.parametrize("name", [*RARE_ROWS, *BAD_ROWS])
def test_rare_rows_are_done_like_the_others_and_errors_come_in_their_place(name: str) -> None:
    prompter = {"message_field_training_detail": "detail"}
    if name in BAD_ROWS:
        assert isinstance(check(make_strategy(REASONS, prompter), among_others(name)), tuple)
        return
    for template, split in itertools.product((CHATML, REASONS), (False, True)):
        strategy = make_strategy(template, prompter, split_thinking=split)
        with rows_of_stock(0):
            check(strategy, among_others(name))


def test_one_odd_row_costs_one_row_and_warnings_come_as_often() -> None:
    """Axolotl goes back to comparing tokens where nothing is rendered."""
    template = "{% for m in messages %}{{ m.content|replace('abc def', '') }}{% endfor %}"
    strategy = make_strategy(template)
    rows = [[turn("user", "")], TALK, [turn("user", ""), turn("user", "")], TALK]
    rows.append([turn("assistant", PARTS_TRAINED, train=False)])
    with rows_of_stock(3):
        check(strategy, {"messages": rows})
    rows = [
        [turn("user", "hello " * 9), turn("assistant", "")],
        [*TALK, turn("user", "x")],
        [turn("assistant", " "), turn("assistant", "")],
    ]
    check(make_strategy(), {"messages": rows})


def test_odd_batches_strategies_and_tokenizers_are_unfamiliar() -> None:
    from transformers import PreTrainedTokenizerFast

    batches: list[dict[str, Any]] = [
        {"messages": []},
        {"messages": TALK},
        {"conversations": [TALK]},
        {"messages": [TALK, None]},
        {"messages": [TALK], "system": ["a", "b"]},
    ]
    for batch in batches:
        refused(make_strategy(), batch)

    class OwnTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _encode_plus(self, *args: Any, **kwargs: Any) -> Any:
            return super()._encode_plus(*args, **kwargs)

    class Mine(chat.ChatTemplateStrategy):  # type: ignore[name-defined,misc]
        pass

    plain = make_strategy()
    odd = [
        make_strategy(prompter={"processor": print}),
        make_strategy("{{ messages|map(attribute='content')|random }}</s>"),
        make_strategy(
            roles_to_train=[],
            train_on_eos=None,
            prompter={"message_field_training": None},
        ),
        Mine(plain.prompter, plain.tokenizer, False, 64, ["assistant"], "turn"),
    ]
    for strategy in odd:
        refused(strategy)
    modified = make_strategy()
    modified.transform_message = lambda value: value
    refused(modified, match="modified")
    own = OwnTokenizer(tokenizer_object=make_tokenizer()._tokenizer, eos_token="<|im_end|>")
    altered, random = make_tokenizer(), make_tokenizer()
    altered.__dict__["apply_chat_template"] = print
    random._tokenizer.model.dropout = 0.5
    for tokenizer in (own, altered, random):
        strategy = make_strategy(tokenizer=make_tokenizer())
        strategy.tokenizer = strategy.prompter.tokenizer = tokenizer
        refused(strategy)


def test_texts_longer_than_one_call_takes() -> None:
    rows = [[turn("user", "hello " * 20_000), turn("assistant", f"day {i}")] for i in range(5)]
    check(make_strategy(), {"messages": rows})


PIECES = st.text(alphabet="ab🙂é\n", max_size=12)


@settings(max_examples=200, deadline=None)
@given(start=PIECES, left=PIECES, right=PIECES, end=PIECES, times=st.integers(1, 40))
@example(start="", left="", right="", end="", times=1)
@example(start="", left="a" * 9000, right="b", end="", times=1)
@example(start="ab", left="", right="ab", end="ab", times=2500)
def test_differences_are_found_at_the_same_characters(
    start: str, left: str, right: str, end: str, times: int
) -> None:
    stock = chat.ChatTemplateStrategy._diff_char_span
    full, dummy = (start * times + text + end * times for text in (left, right))
    assert difference(full, dummy) == stock(full, dummy)
    assert difference(dummy, full) == stock(dummy, full)
