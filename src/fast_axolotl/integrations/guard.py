"""Catch our own errors in hooks and callbacks, so that they never end a training.

This is the only broad ``except`` of the integrations. Whoever uses it says what happens instead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


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
