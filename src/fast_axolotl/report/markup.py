"""HTML that cannot be broken by what it shows: everything is escaped unless it is ``Safe``."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

from fast_axolotl.record.codec import to_plain

__all__ = ["Child", "Safe", "embed_json", "join", "named", "plain_name", "tag"]


class Safe(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | Iterable[str] | None
"""Text, HTML, several of them, or nothing."""

_DIRECTIONS = dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F))
"""Characters that turn the direction of the text behind them."""

_VOID = {"meta", "link", "br", "hr", "input"}


def tag(name: str, /, *children: Child, **attributes: str | bool | None) -> Safe:
    """An element; ``class_`` is ``class``, ``aria_label`` is ``aria-label``, ``None`` left out."""
    shown = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Safe(f"<{name}{shown}>")
    return Safe(f"<{name}{shown}>{join(*children)}</{name}>")


def join(*children: Child) -> Safe:
    """Children one after the other, text escaped."""
    found: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, str):
            found.append(child if isinstance(child, Safe) else html.escape(child))
        else:
            found += [join(one) for one in child]
    return Safe("".join(found))


def named(name: str) -> Safe:
    """A name of the user's; whatever its direction, the text around it keeps its own."""
    return tag("bdi", name)


def plain_name(name: str) -> str:
    """The same for a sentence, where there are no elements."""
    return name.translate(_DIRECTIONS)


def _attribute(key: str, value: str | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(value)}"'


def embed_json(identity: str, value: Any) -> Safe:
    """Data inside the page. No ``<`` is left in it, so that nothing can end the script."""
    found = to_plain(value)
    text = json.dumps(found, separators=(",", ":"), allow_nan=False, default=str)
    escaped = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Safe(f'<script type="application/json" id="{html.escape(identity)}">{escaped}</script>')
