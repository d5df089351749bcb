"""Make a document of named values: the result of a command that works on data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fast_axolotl.record.units import format_bytes, format_duration, format_seconds, format_share
from fast_axolotl.report.document import Document, Table

_MOST_LINES = 20
"""Of a list, such as the rows that could not be read."""


def summary_document(found: Mapping[str, Any], *before: Table, title: str = "") -> Document:
    """The values of a summary by their names, each in its unit, without those that are empty."""
    rows = []
    for name, value in found.items():
        if value is not None and value not in ("", [], (), {}):
            label = re.sub(r"^num_|_(bytes|seconds)$", "", name.replace("_per_second", "/s"))
            rows.append((label.replace("_", " "), _in_words(name, value)))
    return Document(title=title, blocks=[*before, Table(rows=rows)])


def _in_words(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {_in_words('', item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        lines = [_describe_rejection(one) if isinstance(one, dict) else one for one in value]
        more = [f"… {len(lines) - _MOST_LINES} more; --json lists them"]
        return "\n".join([*lines[:_MOST_LINES], *(more if len(lines) > _MOST_LINES else [])])
    if value is None or isinstance(value, str):
        return value or "–"
    if name.endswith("share"):
        return format_share(value)
    if "bytes" in name:
        return format_bytes(value) + ("/s" if name.endswith("_per_second") else "")
    if name.endswith("seconds"):
        return format_seconds(value) if value < 60 else format_duration(value)
    return f"{value:,.0f}"


def _describe_rejection(rejection: Mapping[str, Any]) -> str:
    """Where and why. How to skip a row is left out, since that was done."""
    reason = re.sub(r"; [^;]*on_error=.*", "", rejection["reason"])
    unknown = " (an unknown number of rows)" if rejection["num_rows"] is None else ""
    return f"{rejection['path']}, {rejection['place']}: {reason}{unknown}"
