"""Full validation against pyarrow's own, on data damaged at random."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl.kernels import utf8
from fast_axolotl.reading import kernel_loader, open_dataset, validation

TEXTS = ["", "plain text " * 9, "naïve – 引用", "😀" * 3, "q" * 5000, None]
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.large_string()), ("n", pa.int32())])
KINDS: dict[str, pa.DataType] = {
    "text": pa.string(),
    "large text": pa.large_string(),
    "bytes": pa.binary(),
    "views": pa.string_view(),
    "numbers": pa.list_(pa.int64()),
    "lists": pa.list_(pa.string()),
    "nested": pa.large_list(pa.list_(pa.large_string())),
    "messages": pa.list_(MESSAGE),
    "struct": MESSAGE,
    "dictionary": pa.dictionary(pa.int8(), pa.string()),
    "fixed": pa.list_(pa.string(), 2),
    "map": pa.map_(pa.string(), pa.string()),
    "decimal": pa.decimal128(5, 2),
    "times": pa.time32("s"),
    "runs": pa.run_end_encoded(pa.int32(), pa.string()),
    "union": pa.dense_union([pa.field("0", pa.string()), pa.field("1", pa.int64())]),
}


@pytest.fixture(autouse=True, params=["numpy", "kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small data counts, and text is checked either way."""
    monkeypatch.setattr(validation, "_SMALL_BYTES", 0)
    monkeypatch.setattr(kernel_loader._utf8, "_turns", [])
    kernels = utf8 if request.param == "kernel" else None
    monkeypatch.setattr(kernel_loader._utf8, "kernels", kernels)
    return str(request.param)


def value(rng: random.Random, kind: pa.DataType) -> Any:
    types = pa.types
    if types.is_dictionary(kind):
        return rng.choice(TEXTS[:3])
    if types.is_map(kind):
        return [(f"key {at}", rng.choice(TEXTS)) for at in range(rng.randrange(3))]
    if types.is_fixed_size_list(kind):
        return [value(rng, kind.value_type) for _ in range(kind.list_size)]
    if types.is_list(kind) or types.is_large_list(kind):
        many = [value(rng, kind.value_type) for _ in range(rng.randrange(4))]
        return rng.choice([many, many, None])
    if types.is_struct(kind):
        row = {field.name: value(rng, field.type) for field in kind}
        return rng.choice([row, row, row, None])
    if types.is_integer(kind) or types.is_decimal(kind) or types.is_time(kind):
        return rng.choice([rng.randrange(99), None])
    text = rng.choice(TEXTS)
    return text.encode() if types.is_binary(kind) and text is not None else text


def column(rng: random.Random, kind: pa.DataType) -> pa.Array:
    count = rng.choice([1, 8, 60])
    if pa.types.is_run_end_encoded(kind):
        ends = pa.array(range(3, 3 * count + 3, 3), pa.int32())
        texts = pa.array([rng.choice(TEXTS) for _ in range(count)])
        return pa.RunEndEncodedArray.from_arrays(ends, texts)
    if pa.types.is_union(kind):
        tags = pa.array([at % 2 for at in range(2 * count)], pa.int8())
        offsets = pa.array([at // 2 for at in range(2 * count)], pa.int32())
        texts = pa.array([rng.choice(TEXTS) for _ in range(count)])
        return pa.UnionArray.from_dense(tags, offsets, [texts, pa.array(range(count))])
    return pa.array([value(rng, kind) for _ in range(count)], kind)


def refusal(check: Any) -> str | None:
    try:
        check()
    except (pa.ArrowException, UnicodeDecodeError) as error:
        return type(error).__name__
    return None


def agrees(batch: pa.RecordBatch) -> bool:
    """Whether ours and pyarrow's say the same; returns whether the batch was refused."""
    expected = refusal(lambda: batch.validate(full=True))
    assert refusal(lambda: validation.validate(batch)) == expected
    assert refusal(lambda: validation.validate(pa.Table.from_batches([batch]))) == expected
    return expected is not None


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_damaged_batches_are_refused_where_full_validation_refuses_them(kind: pa.DataType) -> None:
    rng, refused, passed = random.Random(0), 0, 0
    for _ in range(150):
        batch = pa.record_batch({"c": column(rng, kind)})
        assert not agrees(batch)
        assert not agrees(batch.slice(1, 5))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        stream, start = sink.getvalue().to_pybytes(), batch.schema.serialize().size
        for _ in range(4):
            damaged = bytearray(stream)
            for _ in range(rng.choice([1, 1, 3])):
                at = rng.randrange(start + 8, len(damaged))
                damaged[at] = rng.choice([0, 1, 0x7F, 0x80, 0xC3, 0xFF, damaged[at] ^ 1 << 5])
            try:
                read = pa.ipc.open_stream(bytes(damaged)).read_next_batch()
                read.validate()
            except (pa.ArrowException, OSError, MemoryError, StopIteration):
                continue
            if agrees(read):
                refused += 1
            else:
                passed += 1
    assert passed
    assert refused


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=6),
            st.text(max_size=4).map(str.encode),
            st.integers(0, 9000).map(lambda size: b"a" * size),
        ),
        min_size=1,
        max_size=30,
    ),
    st.integers(0, 3),
)
@settings(max_examples=300, deadline=None)
def test_text_of_any_bytes_is_judged_as_python_judges_it(values: list[bytes], skip: int) -> None:
    text = pa.array(values, pa.binary()).view(pa.string())
    batch = pa.record_batch({"c": text}).slice(skip)
    expected = False
    for one in values[skip:]:
        try:
            one.decode()
        except UnicodeDecodeError:
            expected = True
    validation_refuses = refusal(lambda: validation.validate(batch)) is not None
    assert validation_refuses == expected


def test_a_character_cut_in_two_by_an_offset_is_refused() -> None:
    data = "é".encode() + b"a" * 20_000
    values = [data[:1], data[1:]]
    batch = pa.record_batch({"c": pa.array(values, pa.binary()).view(pa.string())})
    with pytest.raises(pa.ArrowInvalid, match="UTF8"):
        validation.validate(batch)


def test_mixed_text_is_judged_without_the_slow_way(way: str) -> None:
    rows = ["a" * 300 for _ in range(500)]
    rows[7], rows[400] = "naïve – 引用", "😀" * 9
    column = pa.array(rows)
    assert validation._is_valid(column)
    assert validation._is_valid(pa.array([[row, None] for row in rows]))
    assert validation._is_valid(pa.array(["引用" * 50] * 500)) == (way == "kernel")


def test_an_arrow_file_is_read_in_the_order_of_its_index(tmp_path: Path) -> None:
    table = pa.table({"n": list(range(40))})
    path = tmp_path / "rows.arrow"
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    assert [n for batch in open_dataset(path) for n in batch["n"].to_pylist()] == [*range(40)]
    data = path.read_bytes()
    size = int.from_bytes(data[-10:-6], "little")
    footer = data[-10 - size : -10]
    first = data.index(b"\xff\xff\xff\xff", 12)
    at = footer.index(first.to_bytes(8, "little"))
    swapped = footer[:at] + footer[at + 24 : at + 48] + footer[at : at + 24] + footer[at + 48 :]
    path.write_bytes(data[: -10 - size] + swapped + data[-10:])
    expected = pa.ipc.open_file(path).read_all()["n"].to_pylist()
    assert expected[:20] == [*range(10, 20), *range(10)]
    assert [n for batch in open_dataset(path) for n in batch["n"].to_pylist()] == expected
