"""Run a function of Axolotl's or TRL's on a dataset that answers some of its passes by ours.

Both libraries prepare a dataset in passes of ``map`` and ``filter`` over rows. Their own function
runs here as it is, with its conditions, errors and log lines, on a ``Watched`` dataset. That knows
the row functions by name, and gives what the pass with one of them gives, made from Arrow tables.

A pass that is unknown, or unfamiliar to ours, is the library's own, from its first row. Passes are
cached in the same files, under fingerprints of stock's own functions and arguments: caches made
with and without us serve both, and a prepared dataset names the same fingerprint.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pyarrow as pa

from fast_axolotl.axolotl.data import column_of, require_integers, require_no_decoding
from fast_axolotl.axolotl.patching import Final, Unfamiliar, tally
from fast_axolotl.errors import MissingExtraError

try:
    from datasets import Dataset
except ImportError as error:
    raise MissingExtraError("datasets need their package: pip install datasets") from error

_TOKENS = ("input_ids", "attention_mask", "labels", "position_ids")
"""Columns of a token each."""

Pass = Callable[..., Any]
"""Takes a dataset, ``map`` or ``filter``, a row function and options; gives the new dataset."""


def run_watched(
    switch: str, function: Any, passes: Mapping[str, Pass], *args: Any, **kwargs: Any
) -> Any:
    """What a function of the host gives; ``passes`` are ours, by the name of a row function.

    Rows of the host's own passes are counted under ``switch``.
    """
    given = [
        Watched.of(value, switch, passes) if isinstance(value, Dataset) else value for value in args
    ]
    try:
        result = inspect.unwrap(function)(*given, **kwargs)
    except Exception as error:
        # A pass that could not be ours was the host's by then, and so is the error.
        raise Final(error) from error
    if isinstance(result, tuple):
        return tuple(map(_plain, result))
    return _plain(result)


class Watched(Dataset):  # type: ignore[misc]
    """A dataset that knows the host's row functions; never seen outside of ``run_watched``."""

    switch: str
    passes: Mapping[str, Pass]
    kind: type
    """Of the dataset as it was given."""

    @classmethod
    def of(cls, dataset: Any, switch: str, passes: Mapping[str, Pass]) -> Any:
        """The same rows, watched."""
        watched = copy.copy(dataset)
        vars(watched).update(switch=switch, passes=passes, kind=type(dataset))
        watched.__class__ = cls
        return watched

    def map(self, function: Any = None, *args: Any, **options: Any) -> Any:
        return self._answer("map", function, *args, **options)

    def filter(self, function: Any = None, *args: Any, **options: Any) -> Any:
        return self._answer("filter", function, *args, **options)

    def _answer(self, name: str, function: Any, *args: Any, **options: Any) -> Any:
        dataset, result = _plain(self), None
        inner = function.func if isinstance(function, partial) else function
        answer = self.passes.get(getattr(inner, "__qualname__", ""))
        if answer is not None:
            try:
                result = answer(dataset, name, function, *args, **options)
            except Final as final:
                raise final.error from None
            except Exception as error:  # noqa: BLE001  whatever it was, the host's own pass decides
                kind = "" if isinstance(error, Unfamiliar) else f"{type(error).__name__}: "
                tally(self.switch, f"{inner.__name__}: {kind}{error}", len(dataset))
        if result is None:
            result = getattr(dataset, name)(function, *args, **options)
        return Watched.of(result, self.switch, self.passes)


def _plain(value: Any) -> Any:
    """A watched dataset as it would be otherwise."""
    if type(value) is not Watched:
        return value
    dataset = copy.copy(value)
    dataset.__class__ = value.kind
    for name in ("switch", "passes", "kind"):
        delattr(dataset, name)
    return dataset


def pass_fingerprint(
    dataset: Any, name: str, function: Callable[..., Any], batched: bool, given: dict[str, Any]
) -> str:
    """That of ``map`` or ``filter`` with stock's arguments, without those at their defaults."""
    from datasets.fingerprint import update_fingerprint

    transform = "datasets.arrow_dataset.Dataset."
    transform += "_map_single" if name == "map" else "filter@2.0.1"
    given = {**given, "function": function, "fingerprint_name": "new_fingerprint"}
    if batched:
        given["batched"] = True
    return str(update_fingerprint(dataset._fingerprint, transform, given))


def require_unchanging(dataset: Any, columns: dict[str, Any]) -> None:
    """Raises where stock's way through Python objects could give a column another type."""
    from datasets.features.features import generate_from_arrow_type, get_nested_type

    require_no_decoding(dataset)
    for field in dataset._data.schema:
        if _is_fragile(field.type) or (
            get_nested_type(generate_from_arrow_type(field.type)) != field.type
        ):
            raise Unfamiliar(f"column {field.name!r} is of type {field.type}")
        if field.name in columns and dataset.features[field.name] != columns[field.name]:
            raise Unfamiliar(f"column {field.name!r} already exists with type {field.type}")
    for name in _TOKENS:
        if name in dataset.column_names:
            require_integers(column_of(dataset, name).type)


def _is_fragile(kind: pa.DataType) -> bool:
    """Times, dates and decimals, which may lose something on stock's way through Python."""
    if isinstance(kind, pa.StructType):
        return any(_is_fragile(field.type) for field in kind)
    if hasattr(kind, "value_type"):
        return _is_fragile(kind.value_type)
    return bool(pa.types.is_temporal(kind) or pa.types.is_decimal(kind))


def set_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """A table with a column, in its place if there is one of this name."""
    if name not in table.column_names:
        return table.append_column(name, values)
    return table.set_column(table.column_names.index(name), name, values)
