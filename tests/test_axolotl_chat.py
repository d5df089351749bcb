"""Conversations come out of ``tokenize_prompt`` exactly as from Axolotl's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl.axolotl.chat import tokenize_prompt
from fast_axolotl.axolotl.patching import Unfamiliar
from fast_axolotl.axolotl.templates import find_renderer
from support.axolotl import STOCK_AXOLOTL, Later, byte_tokenizer, log_lines

pytestmark = STOCK_AXOLOTL

WORDS = [
    *("hello", "world", "[[dummy_message]]", "[[dummy", "zz", "zzdummymessagezz", "]]", "a"),
    *("<|im_end|>", "</s>", " ", "\n", "  ", "ünï", "🙂", "日本", "</think>", "<think>"),
]
CONTENTS = st.lists(st.sampled_from(WORDS), max_size=5).map("".join)

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
)

LOOKS_INSIDE = {
    "length": "{% if m.content|length > 6 %}long{% endif %}{{ m.content }}",
    "contains": "{% if 'h' in m.content %}h{% endif %}{{ m.content }}",
    "is contained": "{% if m.content in 'hello world' %}h{% endif %}{{ m.content }}",
    "equals": "{% if m.content == 'hello' %}h{% endif %}{{ m.content }}",
    "is listed": "{% if m.content in ['hello'] %}h{% endif %}{{ m.content }}",
    "startswith": "{% if m.content.startswith('h') %}h{% endif %}{{ m.content }}",
    "index": "{{ m.content[:1] }}",
    "upper": "{{ m.content|upper }}",
    "tilde": "{% set x = 'a' ~ m.content %}{% if 'h' in x %}h{% endif %}{{ x }}",
    "join": "{% set x = [m.content]|join('') %}{% if 'h' in x %}h{% endif %}{{ x }}",
    "format": "{% set x = '%s'|format(m.content) %}{% if 'h' in x %}h{% endif %}{{ x }}",
    "modulo": "{% set x = '%s' % m.content %}{% if 'h' in x %}h{% endif %}{{ x }}",
    "block": "{% set x %}{{ m.content }}{% endset %}{% if 'h' in x %}h{% endif %}{{ x }}",
    "macro": "{% macro f(x) %}{{ x }}{% endmacro %}{% if 'h' in f(m.content) %}h{% endif %}"
    "{{ m.content }}",
    "filter block": "{% filter upper %}{{ m.content }}{% endfilter %}",
    "int": "{{ m.content|int }}{{ m.content }}",
    "float": "{{ m.content|float }}{{ m.content }}",
    "lower test": "{% if m.content is lower %}h{% endif %}{{ m.content }}",
    "iterates": "{% for c in m.content %}{{ c }}.{% endfor %}",
    "json": "{{ m|tojson }}",
    "keys": "{% for k in m %}{{ k }}{% endfor %}{{ m.content }}",
    "items": "{% for k, v in m.items() %}{{ k }}{% endfor %}{{ m.content }}",
    "sorted": "{% for x in messages|sort(attribute='content') %}{{ x.content }}{% endfor %}",
    "dict key": "{% set d = {'hello': 'h'} %}{{ d.get(m.content, '') }}{{ m.content }}",
    "trimmed truth": "{% if m.content|trim %}h{% endif %}{{ m.content }}",
    "other strip": "{{ m.content.strip('h') }}",
    "split": "{{ m.content.split(' ')[0] }}",
    "replace": "{{ m.content|replace('h', 'j') }}",
    "repeats": "{{ m.content * 2 }}",
    "list": "{{ [m.content] }}",
    "message": "{{ m }}",
    "changed": "{% if loop.changed(m.content) %}h{% endif %}{{ m.content }}",
    "training": "{% if m.training is defined %}h{% endif %}{{ m.content }}",
    "generation": "{% generation %}{{ m.content }}{% endgeneration %}",
    "attribute": "{% if m.content.parts is defined %}h{% endif %}{{ m.content }}",
    "escaped": "{% if m.content is escaped %}h{% endif %}{{ m.content }}",
}

COPIES = {
    "plain": "{{ m.content }}",
    "plus": "{{ 'x' + m.content + 'y' }}",
    "trim": "{{ m.content|trim }}",
    "strips": "{{ m.content.lstrip() + '|' + m.content.rstrip() }}",
    "twice": "{{ m.content + m.content }}",
    "truth": "{% if m.content %}{{ m.content }}{% else %}nothing{% endif %}",
    "string": "{% if m.content is string %}s{% endif %}{{ m.content }}",
    "default": "{{ m.content|default('none', true) }}",
    "string filter": "{{ m.content|string }}",
    "variable": "{% set c = 'x' + m['content'] %}{% if loop.first %}{% set c = bos_token + c %}"
    "{% endif %}{{ c }}",
    "only some": "{% if m.role == 'assistant' %}{{ m.content }}{% endif %}",
    "others": "{{ messages[-1].content + m.role }}",
    "callable": "{% if m.content is callable %}h{% endif %}{{ m.content }}",
    "mapping": "{% if m.content is mapping %}h{% endif %}{{ m.content }}",
    "no key": "{% if m.tool_calls %}h{% endif %}{{ m.content }}{{ m.get('name', '') }}",
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


def logged(call: Callable[[Any], Any], batch: Any) -> tuple[Any, list[tuple[int, str]]]:
    with log_lines("axolotl", "transformers") as lines:
        return call(batch), lines


def check(strategy: Any, batch: dict[str, Any]) -> None:
    """Values, order of keys, types and log lines are those of the stock function."""
    want, want_log = logged(strategy.tokenize_prompt, batch)
    got, got_log = logged(partial(tokenize_prompt, strategy), batch)
    assert got == want
    assert list(got) == list(want)
    assert {type(x) for rows in got.values() for row in rows for x in row} <= {int}
    assert got_log == want_log


def refused(strategy: Any, batch: Any = None, match: str | None = None) -> None:
    """Ours refuses, has changed nothing and logged nothing."""
    batch = {"messages": [TALK]} if batch is None else batch
    before = repr(batch), repr(strategy.__dict__)
    with log_lines("axolotl", "transformers") as lines, pytest.raises(Unfamiliar, match=match):
        tokenize_prompt(strategy, batch)
    assert lines == []
    assert (repr(batch), repr(strategy.__dict__)) == before


def turn(role: str, content: str, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


TALK = [turn("user", "hello world"), turn("assistant", "what a day")]

CONVERSATIONS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "human", "system"]), "content": CONTENTS},
        optional={"train": st.sampled_from([True, False, None]), "name": st.just("ann")},
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(CONVERSATIONS, min_size=1, max_size=4),
    eos=st.sampled_from(["turn", "all", "last", "none"]),
    eot=st.sampled_from(["turn", "all", "last", "none"]),
    template=st.sampled_from([*COPIES.values(), *LOOKS_INSIDE.values(), ""]),
)
def test_random_conversations_under_random_templates(
    rows: Any, eos: str, eot: str, template: str
) -> None:
    body = "{{ '<|im_start|>' + m.role + ' ' }}" + template + "<|im_end|>\n"
    whole = "{% for m in messages %}" + body + "{% endfor %}" if template else CHATML
    strategy = make_strategy(whole, train_on_eos=eos, train_on_eot=eot, eot_tokens=["</s>"])
    batch = {"messages": rows}
    try:
        got = tokenize_prompt(strategy, batch)
    except Unfamiliar:
        return  # turns that Axolotl looks for by comparing tokens
    assert got == strategy.tokenize_prompt(batch)


@pytest.mark.parametrize("name", [*LOOKS_INSIDE, *COPIES])
def test_a_template_has_a_plan_only_if_it_never_looks_inside(name: str) -> None:
    body = LOOKS_INSIDE.get(name) or COPIES[name]
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' }}" + body + "</s>{% endfor %}"
    )
    rows = [
        [turn("user", "hello"), turn("assistant", first), turn("user", "x"), turn("assistant", "h")]
        for first in ("hello", "world", " 7 ", "Hello [[dummy_message]]", "zz 7", "HELLO", "7")
    ]
    strategy = make_strategy(template)
    check(strategy, {"messages": rows})
    renderer = find_renderer(template, strategy.tokenizer.special_tokens_map)
    plans = list(renderer.plans.values())
    assert [plan is not None for plan in plans] == [name in COPIES] * len(plans)


def shipped_templates() -> list[str]:
    found = importlib.util.find_spec("axolotl")
    if found is None:
        return []
    folder = Path(found.submodule_search_locations[0]) / "utils/chat_templates/templates"
    return sorted(path.stem for path in folder.glob("*.jinja"))


@pytest.mark.parametrize("name", shipped_templates())
def test_every_template_that_axolotl_ships(name: str) -> None:
    text = (
        Path(chat.__file__).parents[1] / f"utils/chat_templates/templates/{name}.jinja"
    ).read_text()
    strategy = make_strategy(text)
    rows = [
        [turn("user", f"{word} hello"), turn("assistant", f"day {word}")] * (1 + index % 2)
        for index, word in enumerate(WORDS)
    ]
    if any(unsteady in text for unsteady in ("strftime_now", "random", "lipsum")):
        refused(strategy, {"messages": rows}, "clock")
        return
    check(strategy, {"messages": rows})


@pytest.mark.parametrize(
    ("prompter", "options"),
    [
        ({}, {"train_on_inputs": True}),
        ({}, {"roles_to_train": ["human", "gpt"], "train_on_eos": "all"}),
        ({}, {"roles_to_train": [], "train_on_eos": "last"}),
        ({}, {"train_on_eos": None}),
        ({"drop_system_message": True}, {}),
        ({"message_property_mappings": {"role": "from", "content": "value"}}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {}),
        ({"roles": {"user": ["human"], "assistant": ["user"]}}, {}),
    ],
)
def test_settings_of_a_dataset(prompter: Any, options: Any) -> None:
    strategy = make_strategy(prompter=prompter, **options)
    rows = [
        [
            {**turn(role, text), "from": role, "value": text, "train": None, "unused": [1]}
            for role, text in (("user", "hello"), ("assistant", "day"), ("user", "world"))
        ],
        [{**turn("system", "a"), "from": "system", "value": "a", "train": True}, *TALK][: 1 + 2],
    ]
    for message in rows[1]:
        message.setdefault("from", message["role"])
        message.setdefault("value", message["content"])
    batch = {"messages": rows, "system": ["be good", "be bad"], "id": [1, 2]}
    check(strategy, batch)


def test_reasoning_and_other_keys_of_messages_are_rendered_by_the_template() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}"
        "({{ m.reasoning_content }}){% endif %}{% if m.name %}{{ m.name }}{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}"
    )
    strategy = make_strategy(template)
    rows = [
        [turn("user", "hello", name="ann"), turn("assistant", "day", reasoning_content="what")],
        TALK,
    ]
    check(strategy, {"messages": rows})


def test_log_lines_come_as_often_and_in_the_same_order(stock: Any) -> None:
    tokenizer = make_tokenizer(model_max_length=12)
    strategy = make_strategy(tokenizer=tokenizer, train_on_eos="turn")
    rows = [
        [turn("user", "a")],
        TALK,
        [turn("user", "hello " * 9), turn("assistant", "")],
        [*TALK, turn("user", "x")],
        [turn("assistant", " "), turn("assistant", "")],
    ]
    batch = {"messages": rows}
    want, want_log = logged(strategy.tokenize_prompt, batch)
    assert tokenizer.deprecation_warnings
    tokenizer.deprecation_warnings.clear()
    got, got_log = logged(partial(tokenize_prompt, strategy), batch)
    assert got == want
    assert got_log == want_log
    assert sum("longer than" in line for _, line in got_log) == 1
    assert sum("Last turn" in line for _, line in got_log) == 2
    assert tokenizer.deprecation_warnings


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


ODD_BATCHES = {
    "tools": {"messages": [TALK], "tools": [[{"type": "function"}]]},
    "empty tools": {"messages": [TALK], "tools": [""]},
    "list as content": {"messages": [[turn("user", [{"type": "text", "text": "a"}])]]},  # type: ignore[arg-type]
    "no content": {"messages": [[{"role": "user"}]]},
    "no role": {"messages": [[{"content": "a"}]]},
    "no messages": {"messages": [[]]},
    "no rows": {"messages": []},
    "one row": {"messages": TALK},
    "text": {"messages": ['[{"role": "user", "content": "a"}]']},
    "other column": {"conversations": [TALK]},
    "null system": {"messages": [TALK], "system": [None]},
    "odd verdict": {"messages": [[turn("user", "a", train="yes")]]},
    "detail": {"messages": [[turn("user", "a", detail=[{"begin_offset": 0}])]]},
    "no dict": {"messages": [["a"]]},
}


@pytest.mark.parametrize("name", ODD_BATCHES)
def test_odd_rows_are_unfamiliar_and_nothing_was_logged(name: str) -> None:
    prompter = {"message_field_training_detail": "detail"}
    strategy = make_strategy(prompter=prompter)
    batch = dict(ODD_BATCHES[name])
    if name not in ("one row", "no rows", "other column"):
        batch = {key: [[turn("user", "x")], *rows] if key == "messages" else [None, *rows]
                 for key, rows in batch.items()}  # fmt: skip
    refused(strategy, batch)


def test_odd_strategies_are_unfamiliar() -> None:
    class Mine(chat.ChatTemplateStrategy):  # type: ignore[name-defined,misc]
        pass

    plain = make_strategy()
    odd = [
        make_strategy(split_thinking=True),
        make_strategy(prompter={"processor": print}),
        make_strategy(prompter={"chat_template_kwargs": {"documents": []}}),
        make_strategy(prompter={"chat_template_kwargs": {"x": [1]}}),
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
    for name in ("transform_message", "get_conversation_thread"):
        altered = make_strategy()
        setattr(altered, name, lambda value: value)
        refused(altered, match="altered")
    chat.LOG.setLevel("DEBUG")
    try:
        refused(plain, match="debug")
    finally:
        chat.LOG.setLevel("INFO")


def test_a_tokenizer_with_methods_of_its_own_is_unfamiliar() -> None:
    from transformers import PreTrainedTokenizerFast

    class Mine(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _encode_plus(self, *args: Any, **kwargs: Any) -> Any:
            return super()._encode_plus(*args, **kwargs)

    own = Mine(tokenizer_object=make_tokenizer()._tokenizer, eos_token="<|im_end|>")
    altered = make_tokenizer()
    altered.__dict__["apply_chat_template"] = print
    random = make_tokenizer()
    random._tokenizer.model.dropout = 0.5
    for tokenizer in (own, altered, random, make_tokenizer(eos_token=None)):
        strategy = make_strategy(tokenizer=make_tokenizer())
        strategy.tokenizer = strategy.prompter.tokenizer = tokenizer
        refused(strategy)


def test_texts_longer_than_one_call_takes() -> None:
    rows = [[turn("user", "hello " * 20_000), turn("assistant", f"day {i}")] for i in range(5)]
    check(make_strategy(), {"messages": rows})


def test_a_second_content_beside_the_mapped_one_is_unfamiliar_unless_it_is_text() -> None:
    template = (
        "{% macro f(x) %}{{ x }}{% endmacro %}{% for message in messages %}<|im_start|>"
        "{{ message['role'] }} {{ f(message['content']) }}<|im_end|>{% endfor %}"
    )
    mappings = {"role": "from", "content": "value"}
    strategy = make_strategy(template, prompter={"message_property_mappings": mappings})
    row = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello", "content": "world"}]
    check(strategy, {"messages": [row]})
    row[1]["content"] = [{"type": "text", "text": "world"}]  # type: ignore[assignment]
    refused(strategy, {"messages": [row]}, "second role or content")


def test_a_tokenizer_that_samples_is_unfamiliar() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = [("<unk>", 0.0), ("a", -1.0), ("b", -1.0), ("ab", -1.5), ("<|im_end|>", -2.0)]
    rust = Tokenizer(models.Unigram(words, unk_id=0))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|im_end|>")
    strategy = make_strategy(tokenizer=tokenizer)
    model = tokenizer._tokenizer.model
    if not hasattr(model, "alpha"):
        pytest.skip("this release of tokenizers does not sample")
    model.alpha, model.nbest_size = 0.3, 8
    refused(strategy, match="at random")


def test_signs_of_zero_are_two_templates() -> None:
    template = "{{ x }}" + CHATML
    for value in (0.0, -0.0):
        prompter = {"chat_template_kwargs": {"x": value}}
        strategy = make_strategy(template, prompter=prompter)
        check(strategy, {"messages": [TALK]})


def test_marks_of_holes_written_by_a_template_are_text() -> None:
    forged = "\x00\ue0a10:\x00"
    template = "{{ '\\x00\\ue0a10:\\x00' }}" + CHATML
    strategy = make_strategy(template)
    rows = [[turn("user", text), turn("assistant", "a day")] for text in (forged, "hello", "b")]
    check(strategy, {"messages": rows})
