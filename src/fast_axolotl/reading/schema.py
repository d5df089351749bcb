"""Join Arrow types that differ, and convert values to the joined type.

While types are inferred they only widen: null becomes anything, int becomes float, a struct gains
fields. ``join`` finds the common type or raises ``TypeClash`` with the path inside the column, such
as ``messages[].content``. Once batches are given out they are *settled*: a column may still come
late, a struct gain a field, what was only null get its type, and any other change is a clash, too.
``conform`` casts a table to the joined schema; a cast that would change a value (an integer past
2**53 into a float) is refused.

JSON brings a type of its own. A column that holds a mixed array such as ``[1, "a"]`` has no Arrow
type and travels as Arrow's canonical JSON extension, which the Python output turns back into
values.

Of a schema's metadata, what Hugging Face ``datasets`` says of its columns is kept, so that labels,
images and audio are still such in a ``Dataset`` made of the batches.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from fast_axolotl.errors import ConflictError, ResumeError

MIXED = pa.json_()
"""The type of a column with arrays of mixed kinds: JSON text that decodes to values."""

_FEATURES = b"huggingface"


class TypeClash(Exception):
    """Two types with no common one, or with one that comes too late."""

    def __init__(
        self, path: str, known: pa.DataType, found: pa.DataType, *, is_late: bool = False
    ) -> None:
        super().__init__(path, known, found)
        self.path = path
        """Where in the column: ``a``, ``a.b``, ``a[].b``."""
        self.known = known
        """The type seen first."""
        self.found = found
        """The type that does not fit it."""
        self.is_late = is_late
        """Whether there is a common type, but batches of the known one were given out before."""

    def error(self, path: str, place: str = "") -> ConflictError:
        found: Any = self.found
        if found == MIXED:
            found = "an array of mixed types, or an integer past 64 bits,"
        cure = "or read only other columns"
        if self.is_late:
            cure = 'or pass infer="scan" to read everything once and settle the types first'
        return ConflictError(
            f"column {self.path!r} has the type {self.known} in earlier rows and {found} here; "
            f"make the types equal, {cure}",
            path=path,
            place=place,
        )


def join(known: pa.DataType, found: pa.DataType, path: str) -> pa.DataType:
    """The narrowest type that holds both."""
    if known.equals(found) or pa.types.is_null(found):
        return known
    if pa.types.is_null(known):
        return found
    if MIXED in (known, found):
        return MIXED
    if pa.types.is_struct(known) and pa.types.is_struct(found):
        return pa.struct(_join_fields(list(known), list(found), f"{path}."))
    if _is_list(known) and _is_list(found):
        inner = join(known.value_type, found.value_type, f"{path}[]")
        large = pa.types.is_large_list(known) or pa.types.is_large_list(found)
        return pa.large_list(inner) if large else pa.list_(inner)
    is_dictionary = pa.types.is_dictionary
    kinds = [kind.value_type if is_dictionary(kind) else kind for kind in (known, found)]
    schemas = [pa.schema([("", kind)]) for kind in kinds]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        raise TypeClash(path, *kinds) from None


def join_schemas(
    known: pa.Schema,
    found: pa.Schema,
    *,
    text_wins: bool = False,
    settled: pa.Schema | None = None,
    source: str | None = None,
) -> pa.Schema:
    """Known columns in their order, then new ones; types joined.

    ``text_wins`` makes text of a column that is text on one side and a number on the other, as
    CSV files want it. ``settled`` is what batches were given out with: its first columns stay.
    With ``source``, where ``found`` comes from, a clash is an error for the user.
    """
    if known.equals(found, check_metadata=True):
        return known
    features = _join_features(known, found)
    if text_wins:
        found = pa.schema([_text_over_number(known, field) for field in found])
        known = pa.schema([_text_over_number(found, field) for field in known])
    try:
        fields = _join_fields(list(known), list(found), "")
        for before, after in zip(settled or (), fields, strict=False):
            _require_growth(before.type, after.type, before.name)
    except TypeClash as clash:
        if source is None:
            raise
        raise clash.error(source) from None
    return pa.schema(fields, metadata=features)


def _join_features(known: pa.Schema, found: pa.Schema) -> dict[bytes, bytes] | None:
    """The metadata by which ``datasets`` knows its features: those that both agree on."""
    kept, names = dict(_features(known)), {*known.names}
    for name, feature in _features(found).items():
        if name not in names:
            kept[name] = feature
        elif kept.get(name) != feature:
            kept.pop(name, None)
    return {_FEATURES: json.dumps({"info": {"features": kept}}).encode()} if kept else None


def _features(schema: pa.Schema) -> dict[str, Any]:
    try:
        features = json.loads((schema.metadata or {})[_FEATURES])["info"]["features"]
        return {name: features[name] for name in schema.names if name in features}
    except (KeyError, TypeError, ValueError):
        return {}


def _require_growth(known: pa.DataType, joined: pa.DataType, path: str) -> None:
    if known.equals(joined) or pa.types.is_null(known):
        return
    if pa.types.is_struct(known) and pa.types.is_struct(joined):
        for before, after in zip(known, joined, strict=False):
            _require_growth(before.type, after.type, f"{path}.{before.name}")
    elif _is_list(known) and known.id == joined.id:
        _require_growth(known.value_type, joined.value_type, f"{path}[]")
    else:
        raise TypeClash(path, known, joined, is_late=True)


def _text_over_number(other: pa.Schema, field: pa.Field) -> pa.Field:
    index = other.get_field_index(field.name)
    beside_text = index >= 0 and pa.types.is_string(other.field(index).type)
    return field.with_type(pa.string()) if is_number(field.type) and beside_text else field


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The same rows under a wider schema: missing columns are null, types are cast."""
    if table.schema.equals(schema, check_metadata=True):
        return table
    found = dict(zip(table.schema.names, table.columns, strict=True))
    missing = {field.type for field in schema if field.name not in found}
    # Columns without a value share their nulls, whatever their number.
    nulls = {kind: pa.chunked_array([pa.nulls(table.num_rows, kind)]) for kind in missing}
    columns = []
    for field in schema:
        column = found.get(field.name)
        if column is None:
            column = nulls[field.type]
        elif field.type == MIXED and column.type != MIXED:
            texts = [
                None if value is None else json.dumps(value, ensure_ascii=False, default=str)
                for value in column.to_pylist()
            ]
            column = pa.ExtensionArray.from_storage(MIXED, pa.array(texts, type=pa.string()))
        elif not column.type.equals(field.type):
            try:
                cast = column.cast(field.type)
            except pa.ArrowException:
                raise TypeClash(field.name, field.type, column.type) from None
            try:
                cast.validate()
            except pa.ArrowInvalid:
                # pyarrow 26 loses the nulls of a list of nulls in a struct that grows.
                cast = pa.chunked_array([pa.array(column.to_pylist(), field.type)])
            column = cast
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema) if columns else table.select([])


def _join_fields(
    known: Sequence[pa.Field], found: Sequence[pa.Field], prefix: str
) -> list[pa.Field]:
    fields = {field.name: field for field in known}
    for field in found:
        before = fields.get(field.name)
        if before is None:
            fields[field.name] = field
        else:
            joined = join(before.type, field.type, f"{prefix}{field.name}")
            nullable = before.nullable or field.nullable
            fields[field.name] = before.with_type(joined).with_nullable(nullable)
    return list(fields.values())


def is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def schema_text(schema: pa.Schema) -> str:
    """A schema as text, for a state."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def schema_of(text: str) -> pa.Schema:
    """The schema that a text stands for."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
    except (pa.ArrowException, ValueError):
        raise ResumeError("the state has a corrupt schema; use an older one") from None
