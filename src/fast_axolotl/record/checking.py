"""Whether the values of a line are of their fields' types: a record may be cut, edited or foreign.

The checks of a kind of line are made once, from its annotations; a line then costs some 10 µs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = ["check_types"]

Check = Callable[[Any], bool]


def check_types(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """The same values; a ``TypeError`` names the first that does not fit its field."""
    checks = _checks_of(kind)
    for name, value in values.items():
        check = checks.get(name)
        if check is not None and not check(value):
            raise TypeError(f"{name} is {value!r:.50}")
    return values


@cache
def _checks_of(kind: type) -> dict[str, Check]:
    return {name: _make_check(hint) for name, hint in get_type_hints(kind).items()}


def _make_check(hint: Any) -> Check:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if hint in (int, float):
        return _is_number
    if origin is Literal:
        # A later version may know more names.
        return lambda value: isinstance(value, str)
    if origin in (Union, UnionType):
        checks = [_make_check(one) for one in inner]
        return lambda value: any(check(value) for check in checks)
    if origin is dict:
        fits = _make_check(inner[1])
        return lambda value: isinstance(value, dict) and all(map(fits, value.values()))
    if origin is tuple:
        fits = _make_check(inner[0])
        return lambda value: isinstance(value, tuple) and all(map(fits, value))
    return lambda value: isinstance(value, hint)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
