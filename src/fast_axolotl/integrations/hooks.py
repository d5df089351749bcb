"""Put functions of ours around those of a host library, and never end a training by them.

``guarded`` is the only broad ``except`` of the integrations. Whoever uses it says what happens
instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[..., Any]:
    """Put ``around(original, *arguments, **named)`` in the place of a function of a class or
    module, which stays its ``__wrapped__``; what is there from now on."""
    original = getattr(owner, name)

    @wraps(original)
    def ours(*arguments: Any, **named: Any) -> Any:
        return around(original, *arguments, **named)

    setattr(owner, name, ours)
    return ours


def unwrap(owner: Any, name: str, ours: Callable[..., Any]) -> bool:
    """Put the original back; where someone else has wrapped ours meanwhile it stays. Whether it
    is back."""
    is_ours = getattr(owner, name) is ours
    if is_ours:
        setattr(owner, name, ours.__wrapped__)  # type: ignore[attr-defined]
    return is_ours


def guarded(on_error: Callable[[Any, Exception], None]) -> Callable[[_Function], _Function]:
    """Decorates a function so that it returns ``None`` where it would raise.

    ``on_error`` gets its first argument, which is ``self`` for a method, and the error.
    """

    def decorate(function: _Function) -> _Function:
        @wraps(function)
        def call(subject: Any, *arguments: Any, **named: Any) -> Any:
            try:
                return function(subject, *arguments, **named)
            except Exception as error:  # noqa: BLE001
                with suppress(Exception):  # what was broken may be in the way here, too
                    on_error(subject, error)
                return None

        return call  # type: ignore[return-value]

    return decorate
