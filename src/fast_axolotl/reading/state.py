"""Saved positions: found wherever they are nested, checked before they are trusted.

A state is plain JSON. It fits the same files (name, size, format, order) read with the same
columns; anything else is refused with the reason.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from fast_axolotl.errors import ResumeError
from fast_axolotl.reading.order import Position
from fast_axolotl.reading.schema import TypeClash, join_or_mark

__all__ = [
    "STATE_VERSION",
    "check_complete",
    "check_states",
    "find_states",
    "joined_schema",
    "write_schema",
]

STATE_VERSION = 1

_MARK = "fast_axolotl_reader"
_KEYS = {
    _MARK,
    "fingerprint",
    "columns",
    "seed",
    "epoch",
    "shard",
    "position",
    "generations",
    "plan",
    "schema",
}


def find_states(value: Any) -> list[dict[str, Any]]:
    """Every reader state inside nested dicts, lists and tuples."""
    if isinstance(value, Mapping):
        if _MARK in value:
            return [dict(value)]
        return [state for item in value.values() for state in find_states(item)]
    if isinstance(value, (list, tuple)):
        return [state for item in value for state in find_states(item)]
    return []


def check_states(
    states: Sequence[Mapping[str, Any]], fingerprint: str, columns: Sequence[str] | None
) -> None:
    """Refuses states of another version, of other files, or of different runs."""
    if not states:
        raise ResumeError("no state of a reader in what was given; pass what state_dict gave")
    if any(item[_MARK] != STATE_VERSION for item in states):
        raise ResumeError("the state was written by another version of fast-axolotl")
    if not all(item.keys() >= _KEYS for item in states):
        raise ResumeError("the state is damaged; take an older one")
    if any(item["fingerprint"] != fingerprint for item in states):
        raise ResumeError(
            "the state belongs to other files: names, sizes, formats and their order must be "
            "the same as when it was taken"
        )
    wanted = None if columns is None else list(columns)
    if any(item["columns"] != wanted for item in states):
        raise ResumeError(f"the state was taken with other columns than {wanted}; use the same")
    shards = [tuple(item["shard"]) for item in states]
    if twice := next((shard for shard in shards if shards.count(shard) > 1), None):
        raise ResumeError(f"the state of shard {twice[0]} of {twice[1]} was given twice")
    for key in ("seed", "epoch", "generations", "plan"):
        if any(item[key] != states[0][key] for item in states):
            raise ResumeError(f"the states do not belong together: their {key} differs")


def check_complete(states: Sequence[dict[str, Any]]) -> dict[int, Position]:
    """The position of every shard of one generation; all of them must be there, once."""
    count = int(states[0]["shard"][1])
    positions: dict[int, Position] = {}
    for state in states:
        index, other = state["shard"]
        if other != count:
            raise ResumeError(f"the states come from {count} and from {other} shards")
        positions[index] = Position(*state["position"])
    missing = sorted(set(range(count)) - set(positions))
    if missing:
        raise ResumeError(
            f"the state of shard {missing[0]} of {count} is missing; to continue on another number "
            "of ranks or workers, pass the states of all of them"
        )
    return positions


def write_schema(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def joined_schema(states: Sequence[Mapping[str, Any]], on_conflict: str) -> pa.Schema:
    """What was known of the columns, over all states."""
    schema = pa.schema([])
    for state in states:
        try:
            found = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(state["schema"])))
        except (pa.ArrowException, ValueError):
            raise ResumeError("the schema in the state is damaged; take an older one") from None
        try:
            schema = join_or_mark(schema, found, on_conflict, text_wins=True)
        except TypeClash as clash:
            raise clash.error("the data of several ranks") from None
    return schema
