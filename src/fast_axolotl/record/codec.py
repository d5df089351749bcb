"""Dataclasses to JSON and back: the one codec of records, summaries and protocol results.

Reading is by the annotations of the dataclass, which are turned into readers once. A value whose
type shows that it fits is taken as it is, so a line of a record costs some 10 µs. Fields that a
later version added are passed over. A value that does not fit its field is a ``TypeError`` that
names it: a record may be cut, edited or foreign.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[Any], Any]
_NUMBERS: frozenset[type] = frozenset({int, float})


def to_plain(value: Any) -> Any:
    """Dictionaries, lists and numbers; null for NaN, for which JSON has no word."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    return value


def to_json(value: Any, *, indent: int | None = 2) -> str:
    """The text of ``to_plain``; what JSON does not know, such as a path, as its text."""
    return json.dumps(to_plain(value), indent=indent, ensure_ascii=False, default=str)


def from_plain(kind: type[T], data: Mapping[str, Any]) -> T:
    """An object of a dataclass; ``TypeError`` where a value does not fit or is missing."""
    readers = _readers_of(kind)  # type: ignore[arg-type]
    values = {}
    for name, value in data.items():
        if name in readers:
            fitting, reader = readers[name]
            if type(value) in fitting:
                values[name] = value
                continue
            try:
                values[name] = reader(value)
            except _Misfit:
                raise TypeError(f"{name} is {value!r:.50}") from None
    return kind(**values)


class _Misfit(Exception):
    """A value is not of its field's type."""


@cache
def _readers_of(kind: type) -> dict[str, tuple[frozenset[type], Reader]]:
    """Of every field the types that need no reader, and the reader of the others."""
    hints = get_type_hints(kind)
    return {name: (_fitting(hint), _make_reader(hint)) for name, hint in hints.items()}


def _fitting(hint: Any) -> frozenset[type]:
    if hint in (int, float):
        return _NUMBERS
    if get_origin(hint) is Literal:
        return frozenset({str})
    if get_origin(hint) in (Union, UnionType):
        return frozenset().union(*map(_fitting, get_args(hint)))
    return frozenset({hint} if hint in (str, bool, type(None)) else ())


def _make_reader(hint: Any) -> Reader:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if hint in (int, float):
        return _read_number
    if origin in (Union, UnionType):
        # Every union here is ``X | None``.
        (other,) = (item for item in inner if item is not type(None))
        read = _make_reader(other)
        return lambda value: None if value is None else read(value)
    if origin in (dict, Mapping):
        fitting, read_item = _fitting(inner[1]), _make_reader(inner[1])

        def read_dict(value: Any) -> dict[str, Any]:
            if fitting.issuperset(map(type, _check(value, dict).values())):
                return value  # type: ignore[no-any-return]
            return {key: read_item(item) for key, item in value.items()}

        return read_dict
    if origin is tuple:
        # A sequence of measurements may hold a NaN, which was written as null.
        all_fit = _fitting(inner[0])
        read_one = _read_number_or_nan if inner[0] is float else _make_reader(inner[0])

        def read_tuple(value: Any) -> tuple[Any, ...]:
            if all_fit.issuperset(map(type, _check(value, (list, tuple)))):
                return tuple(value)
            return tuple(map(read_one, value))

        return read_tuple
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: from_plain(hint, _check(value, dict))
    # A later version may know more names of a Literal.
    kind = str if origin is Literal else hint
    return lambda value: _check(value, kind)


def _check(value: Any, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value, kind):
        raise _Misfit
    return value


def _read_number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Misfit
    return value


def _read_number_or_nan(value: Any) -> Any:
    return math.nan if value is None else _read_number(value)
