"""Convert dataclasses to JSON and back.

Reading is msgspec's, by the annotations of the dataclass. Fields that a later version added are
passed over, and a value that does not fit is a ``ValueError`` that names its place. What strict
JSON has no word for is mended: a number that is none is null in a sequence of numbers, and records
of earlier versions hold ``NaN`` and whole numbers with a decimal point.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fast_axolotl.errors import DataError

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Dictionaries, lists and numbers; null for NaN, for which JSON has no word."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    return value


def to_json(value: Any, *, indent: int | None = 2) -> str:
    """The text of ``to_plain``; what JSON does not know, such as a path, as its text."""
    separators = (",", ":") if indent is None else None
    plain = to_plain(value)
    return json.dumps(plain, indent=indent, separators=separators, ensure_ascii=False, default=str)


def write_text(path: Path, text: str) -> None:
    """Write a file beside and rename it: no power cut and no full disk leaves half of one."""
    target = path.resolve()  # a link stays one
    beside = target.with_name(f".{target.name}.new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A path in a record may hold bytes that are no text.
        with beside.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text.rstrip("\n") + "\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        cure = "free space or choose another --output"
        raise DataError(
            f"cannot be written: {error.strerror or error}; {cure}", path=str(path)
        ) from error


def from_plain(kind: type[T], data: Mapping[str, Any]) -> T:
    """An object of a dataclass; ``ValueError`` where a value does not fit or is missing."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError:
        return msgspec.convert(_mend(data), kind)


def _mend(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [math.nan if item is None else _mend(item) for item in value]
    if isinstance(value, dict):
        is_table = all(item is None or isinstance(item, float) for item in value.values())
        empty = math.nan if is_table else None
        return {key: empty if item is None else _mend(item) for key, item in value.items()}
    return value
