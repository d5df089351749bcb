"""Arrow arrays of any type, for property tests."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

_LEAF_TYPES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int8(), st.integers(-128, 127)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(max_size=5)),
    (pa.large_string(), st.text(max_size=5)),
    (pa.string_view(), st.text(max_size=20)),
    (pa.binary(), st.binary(max_size=5)),
    (pa.null(), st.none()),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.decimal128(10, 2), st.decimals(-1000, 1000, places=2)),
    (pa.dictionary(pa.int32(), pa.string()), st.sampled_from(["a", "b"])),
]

_Typed = tuple[pa.DataType, st.SearchStrategy[Any]]


def _nested(inner: st.SearchStrategy[_Typed]) -> st.SearchStrategy[_Typed]:
    def lists(typed: _Typed, kind: Any = pa.list_) -> _Typed:
        return kind(typed[0]), st.lists(st.none() | typed[1], max_size=3)

    def fixed_lists(typed: _Typed) -> _Typed:
        values = st.lists(st.none() | typed[1], min_size=2, max_size=2)
        return pa.list_(typed[0], 2), values

    def structs(fields: list[_Typed]) -> _Typed:
        kinds = [pa.field(f"f{index}", kind) for index, (kind, _) in enumerate(fields)]
        values = {f"f{index}": st.none() | value for index, (_, value) in enumerate(fields)}
        return pa.struct(kinds), st.fixed_dictionaries(values)

    def maps(typed: _Typed) -> _Typed:
        pairs = st.tuples(st.text(max_size=3), st.none() | typed[1])
        return pa.map_(pa.string(), typed[0]), st.lists(pairs, max_size=2)

    return st.one_of(
        inner.map(lists),
        inner.map(partial(lists, kind=pa.large_list)),
        inner.map(fixed_lists),
        inner.map(maps),
        st.lists(inner, max_size=3).map(structs),
    )


def _arrays(typed: _Typed) -> st.SearchStrategy[pa.Array]:
    kind, values = typed
    return st.lists(st.none() | values, max_size=8).map(lambda found: pa.array(found, kind))


ARRAYS = (
    st.recursive(st.sampled_from(_LEAF_TYPES), _nested, max_leaves=4)
    # Some releases of pyarrow make no arrays of these.
    .filter(lambda typed: "fixed_size_list<item: dictionary" not in str(typed[0]))
    .flatmap(_arrays)
)
"""Arrays of any type, with nulls at every level."""
