"""The kernel for JSON lines gives the rows that ``json.loads`` gives, or gives up."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl.errors import DataError
from fast_axolotl.kernels import json_rows as kernels
from fast_axolotl.reading import json_fast, json_kernel, open_dataset
from fast_axolotl.reading.json_kernel import read_known

pytestmark = pytest.mark.kernels

MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
SCHEMA = pa.schema(
    {"id": pa.int64(), "score": pa.float64(), "ok": pa.bool_(), "messages": MESSAGES}
)
ROW = {"id": 1, "score": 0.5, "ok": True, "messages": [{"role": "user", "content": "hé"}]}
MOST_BYTES = 1 << 24
SPARE = b"#" * kernels.PADDING
"""Behind the rows: the kernel is given at least so much data, and must not read it as theirs."""

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
kinds = st.recursive(
    st.sampled_from([pa.string(), pa.int64(), pa.float64(), pa.bool_()]),
    lambda inner: inner.map(pa.list_) | st.dictionaries(names, inner, max_size=4).map(pa.struct),
    max_leaves=6,
)
schemas = st.dictionaries(names, kinds, min_size=1, max_size=5).map(pa.schema)
floats = st.floats(allow_nan=False, allow_infinity=False).filter(lambda item: abs(item) < 2**53)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=150)


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """A value of a type, or ``None``."""
    found: st.SearchStrategy[Any]
    if pa.types.is_struct(kind):
        found = rows(kind)
    elif pa.types.is_list(kind):
        found = st.lists(values(kind.value_type), max_size=5)
    elif kind == pa.string():
        found = texts
    elif kind == pa.int64():
        found = st.integers(-(2**63), 2**63 - 1)
    else:
        found = floats if kind == pa.float64() else st.booleans()
    return found | st.none()


def rows(fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the fields, in any order."""
    found = {field.name: values(field.type) for field in fields}
    return st.fixed_dictionaries({}, optional=found).flatmap(
        lambda row: st.permutations(list(row.items())).map(dict)
    )


def parse(
    text: str | bytes, schema: pa.Schema = SCHEMA, before: int = 0, *, skip: bool = False
) -> pa.Table | None:
    raw = text if isinstance(text, bytes) else text.encode()
    data = b"{" * before + raw + SPARE
    num_rows = raw.count(b"\n") + 1
    return read_known(
        kernels,
        data,
        before,
        before + len(raw),
        schema,
        most_rows=num_rows,
        most_bytes=MOST_BYTES,
        are_others_skipped=skip,
    )


def table_of(lines: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist(lines, schema)


@given(data=st.data(), before=st.integers(0, 130), is_ascii=st.booleans(), indent=st.booleans())
def test_rows_of_any_type_are_those_that_were_written(
    data: st.DataObject, before: int, is_ascii: bool, indent: bool
) -> None:
    schema = data.draw(schemas)
    written = data.draw(st.lists(rows(schema), max_size=8))
    separators = (" ,\t", " : ") if indent else (",", ":")
    lines = [json.dumps(row, ensure_ascii=is_ascii, separators=separators) for row in written]
    end = data.draw(st.sampled_from(["\n", "\r\n", " \n\n", "\n \t\r\n"]))
    found = parse("".join(line + end for line in lines), schema, before)
    if found is None:  # a key with an escape, in the file or in the type
        names = all_names(schema)
        assert any(json.dumps(name, ensure_ascii=is_ascii) != f'"{name}"' for name in names)
        return
    found.validate(full=True)
    assert found.equals(table_of(written, schema))


def all_names(fields: Any) -> list[str]:
    found = []
    for field in fields:
        found.append(field.name)
        kind = field.type
        while pa.types.is_list(kind):
            kind = kind.value_type
        if pa.types.is_struct(kind):
            found += all_names(kind)
    return found


ANYTHING = {
    "a": [1.5, -2, True, False, None, "x" * 80, [], {}, [[{"b": 'q"\\'}]]],
    "c d": {"e": {}},
}


def test_fields_that_are_not_wanted_are_skipped_if_they_are_json() -> None:
    schema = pa.schema({"id": pa.int64()})
    for row in ({"id": 1, **ANYTHING}, {**ANYTHING, "id": 1}, {"x": {"id": 2}, "id": 1}):
        text = json.dumps(row)
        assert parse(text, schema) is None
        for line in (text, text + "\n" + text.replace(" ", ""), text.replace(":", " :\t")):
            found = parse(line, schema, skip=True)
            assert found is not None
            assert found["id"].to_pylist() == [1] * (1 + line.count("\n"))
    for bad in (
        '{"i\\u0064":1}',
        '{"x":[[]}',
        '{"x":{"a"}}',
        '{"x":{1:2}}',
        '{"x":[1,]}',
        '{"x":01}',
    ):
        assert parse(bad, schema, skip=True) is None
    deep = "[" * 100 + "]" * 100
    assert parse(f'{{"x":{deep}}}', schema, skip=True) is None


@given(
    place=st.integers(0, 400),
    change=st.sampled_from([*'{}[]",:\\ \n\t0-+.eEtfnul/é\x00\x1f', "", '""', "null", "\\u", ", "]),
    cut=st.integers(0, 3),
)
def test_text_that_was_changed_anywhere_is_read_as_json_or_not_at_all(
    place: int, change: str, cut: int
) -> None:
    row = {**ROW, "messages": [{"role": "a\\n", "content": 'say "x" ' * 9}, {"role": None}]}
    text = json.dumps(row) + "\n" + json.dumps(ROW)
    place %= len(text)
    text = text[:place] + change + text[place + cut :]
    for schema, skip in ((SCHEMA, False), (pa.schema([SCHEMA.field("ok")]), True)):
        found = parse(text, schema, skip=skip)
        if found is not None:
            written = [json.loads(line) for line in text.split("\n") if line.strip()]
            assert found.equals(table_of(written, schema))


@pytest.mark.parametrize(
    "text",
    [
        '{"id":1} {"id":2}',
        '{"id":1}{"id":2}',
        "null",
        "[]",
        '{"id":1,"id":2}',
        '{"other":1}',
        '{"id":1.0}',
        '{"id":"1"}',
        '{"id":01}',
        '{"id":1e3}',
        '{"id":9223372036854775808}',
        '{"score":9007199254740993}',
        '{"score":1e400}',
        '{"score":.5}',
        '{"score":1.}',
        '{"score":NaN}',
        '{"score":-}',
        '{"ok":True}',
        '{"ok":1}',
        '{"ok":tru',
        '{"messages":{}}',
        '{"messages":[null,]}',
        '{"messages":[[]]}',
        '{"messages":[{"role":"\\ud800"}]}',
        '{"messages":[{"role":"\\udc00\\ud800"}]}',
        '{"messages":[{"role":"\\ud83dx"}]}',
        '{"messages":[{"role":"\\x41"}]}',
        '{"messages":[{"role":"\\u00g0"}]}',
        '{"messages":[{"role":"a\tb"}]}',
        '{"messages":[{"role":"a\nb"}]}',
        '{"id":1,}',
        '{"id":1',
        '{"id":1}]',
        '{"id"1}',
        "{id:1}",
    ],
)
def test_what_is_not_of_the_type_is_left_to_others(text: str) -> None:
    assert parse(text + "\n") is None
    assert parse(json.dumps(ROW) + "\n" + text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-0", 0.0),
        ("-0.0", -0.0),
        ("3", 3.0),
        ("0.1", 0.1),
        ("1e-22", 1e-22),
        ("123456789.123456789", 123456789.123456789),
        ("0.12345678901234567890123", 0.12345678901234567890123),
        ("9007199254740991", 9007199254740991.0),
        ("4.9e-324", 4.9e-324),
        ("1E+2", 100.0),
        ("2.2250738585072011e-308", 2.2250738585072011e-308),
    ],
)
def test_floats_are_those_of_python(text: str, expected: float) -> None:
    found = parse(f'{{"score": {text}}}')
    assert found is not None
    (number,) = found["score"].to_pylist()
    assert repr(number) == repr(expected)


@pytest.mark.parametrize("number", [0, -1, 2**53 + 1, 10**18 - 1, 10**18, 2**63 - 1, -(2**63)])
def test_integers_of_64_bits_are_exact(number: int) -> None:
    found = parse(f'{{"id":{number}}}')
    assert found is not None
    assert found["id"].to_pylist() == [number]


def test_escapes_stand_for_their_characters_wherever_blocks_of_64_bytes_end() -> None:
    schema = pa.schema({"text": pa.string()})
    for length in range(140):
        text = "x" * length + '"\\/\b\f\n\r\té引😀\x00' + "y" * (length % 7)
        for line in (json.dumps({"text": text}), json.dumps({"text": text}, ensure_ascii=False)):
            found = parse(line, schema, before=length % 64)
            assert found is not None
            assert found["text"].to_pylist() == [text]


def test_room_for_items_grows_until_they_fit_and_no_further_than_allowed() -> None:
    schema = pa.schema({"ids": pa.list_(pa.int64())})
    json_kernel._shape_of.cache_clear()
    for count in (1, 5_000, 3):
        row = {"ids": list(range(count))}
        found = parse(json.dumps(row, separators=(",", ":")), schema)
        assert found is not None
        assert found.to_pylist() == [row]
    many = b'{"ids":[' + b"1," * 100_000 + b"1]}" + SPARE
    end = len(many) - len(SPARE)
    assert read_known(kernels, many, 0, end, schema, most_rows=1, most_bytes=1 << 16) is None


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([]),
        pa.schema({"a": pa.int32()}),
        pa.schema({"a": pa.null()}),
        pa.schema({"a": pa.timestamp("s")}),
        pa.schema({'a"b': pa.int64()}),
        pa.schema([("a", pa.struct([("b", pa.int64()), ("b", pa.int64())]))]),
        pa.schema({f"c{number}": pa.int64() for number in range(70)}),
    ],
)
def test_types_without_a_kernel_are_left_to_others(schema: pa.Schema) -> None:
    assert parse("{}", schema) is None


def test_files_read_alike_with_and_without_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for number in range(4_000):
            row: dict[str, Any] = {**ROW, "id": number, "score": rng.random()}
            if number % 500 == 499:
                row["messages"] = None
            if number == 3_000:
                row["late"] = [1, None]
            if number == 3_500:
                row["id"] = None
            file.write(json.dumps(row) + "\n" * (1 + (number % 97 == 0)))
    monkeypatch.setattr(json_fast._loader, "_turns", [])
    tables = []
    for module in (None, kernels):
        monkeypatch.setattr(json_fast._loader, "kernels", module)
        for columns in (None, ["messages", "id"]):
            batches = list(open_dataset(path, batch_size=100, columns=columns, infer="scan"))
            tables.append(pa.Table.from_batches(batches))
    assert tables[:2] == tables[2:]
    assert [table.num_rows for table in tables] == [4_000] * 4


def test_a_broken_line_is_named_alike_with_and_without_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({**ROW, "id": number}) for number in range(300)]
    lines[217] = lines[217][:-5]
    path.write_text("\n".join(lines))
    monkeypatch.setattr(json_fast._loader, "_turns", [])
    messages = []
    for module in (None, kernels):
        monkeypatch.setattr(json_fast._loader, "kernels", module)
        with pytest.raises(DataError, match="line 218") as caught:
            list(open_dataset(path))
        messages.append(str(caught.value))
        skipping = open_dataset(path, on_error="skip")
        assert sum(batch.num_rows for batch in skipping) == 299
    assert messages[0] == messages[1]
