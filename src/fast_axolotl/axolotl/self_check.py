"""Run both functions on the same rows and compare: the check for unknown versions of Axolotl.

Where a source is unknown, ``before`` runs the host's function and ours on 32 rows of the call in
hand: the first ones, the longest of up to 512, random ones, and the first ones again, as repeated
rows. It compares results with types, dtypes and the order of keys, what became of the rows, and the
random numbers drawn. This happens in the process that makes the call, before rows are handed out to
workers; forked workers inherit the answer.

A dataset is looked at in every call. A batch, of which there are many, is looked at in the first
call, and then a few of its rows in every 64th. Where the result has the rows in the same order, as
tokenising has, ``after`` looks at a few rows of every 64,000 of it. What has no rows, as a sampler,
is compared as a whole in the same calls. The first difference is final: the caller gets what the
host's function gives.

How a replacement is compared, its ``check``, is one of

- ``call``: the whole call; the function changes none of its arguments,
- ``rows:NAME``: rows of the argument NAME, which may be a dataset, columns of lists, or a list, and
  of all other arguments that are datasets,
- ``in order:NAME``: the same, and row n of the result comes from row n of the argument,
- ``state:NAME``: the whole call on a shallow copy of the argument NAME, whose attributes count too,
- ``folder:NAME``: rows as above, and the files that a call writes below ``dataset_prepared_path``.

Cost: two calls with 36 rows, and 1 µs for a number in their results.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

_FIRST = 8
_LONGEST = 8
_ROWS = 32
_REPEATED = 4
_CANDIDATES = 512
_FEW = 4
_EVERY = 64
"""Calls, or thousands of rows, between two later looks."""

_PLAIN = frozenset({int, float, complex, str, bytes, bool, type(None)})


class Different(Exception):
    """Ours gave another result than the host's function."""


class StockFails(Exception):
    """The host's function raises an error on the rows to compare, as it will on the whole."""


class Check:
    """Compares one replacement with the host's function, in one process."""

    def __init__(self, how: str, stock: Callable[..., Any]) -> None:
        self._kind, _, self._name = how.partition(":")
        self._stock = stock
        self._signature = inspect.signature(stock)
        self._calls = 0

    def before(self, ours: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """``Different`` where ours is; whatever either function raises."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        rows = bound.arguments.get(self._name)
        if self._calls % _EVERY and not _is_dataset(rows):
            self._calls += 1
            return
        places: dict[str, list[int]] = {}
        for name, value in bound.arguments.items():
            if _is_dataset(value) or (name == self._name and self._kind != "state"):
                is_whole = _is_dataset(value) or not self._calls
                places[name] = _choose(value, _ROWS if is_whole else _FEW)
        self._compare(ours, bound, places)
        # Not sooner: a call in which either of them fails decides nothing, and the next one counts.
        self._calls += 1

    def after(self, result: Any, args: Any, kwargs: Any) -> None:
        """``Different`` where a few rows of a large result are."""
        bound = self._signature.bind(*args, **kwargs)
        rows: Any = bound.arguments.get(self._name)
        if self._kind != "in order" or not _is_dataset(rows) or len(rows) != len(result):
            return
        starts = range(1000 * _EVERY, len(rows), 1000 * _EVERY)
        places = [place for start in starts for place in range(start, start + _FEW)]
        places = [place for place in places if place < len(rows)]
        if not places:
            return
        bound.arguments[self._name] = _take(rows, places)
        with _unseen(bound):
            wanted = self._stock(*bound.args, **bound.kwargs)
        _require_equal(wanted, _take(result, places))

    def _compare(
        self, ours: Callable[..., Any], bound: inspect.BoundArguments, places: dict[str, list[int]]
    ) -> None:
        outcomes: list[list[Any]] = []
        for function in (self._stock, ours):
            given = self._signature.bind(*bound.args, **bound.kwargs)
            for name, chosen in places.items():
                given.arguments[name] = _take(bound.arguments[name], chosen)
            if self._kind == "state":
                given.arguments[self._name] = copy.copy(bound.arguments[self._name])
            value = given.arguments.get(self._name)
            own = tempfile.TemporaryDirectory() if self._kind == "folder" else nullcontext("")
            with _unseen(given), own as folder:
                if folder:
                    cfg = given.arguments["cfg"]
                    changed = {"dataset_prepared_path": folder, "push_dataset_to_hub": None}
                    given.arguments["cfg"] = type(cfg)({**cfg, **changed})
                    if _is_dataset(value):
                        vars(value)["save_to_disk"] = functools.partial(_save_here, value)
                try:
                    result = function(*given.args, **given.kwargs)
                except Exception as error:
                    if function is self._stock:
                        raise StockFails("stock fails on rows of this call") from error
                    raise
                files = sorted(Path(folder).rglob("*") if folder else ())
                written = {
                    str(path.relative_to(folder)): path.read_bytes()
                    for path in files
                    if path.is_file()
                }
                state = vars(value) if self._kind == "state" else value
                sampler = getattr(given.arguments.get("self"), "sampler", None)
                outcomes.append([result, state, written, random_state(sampler)])
        for wanted, found in zip(*outcomes, strict=True):
            _require_equal(wanted, found)


def _require_equal(wanted: Any, found: Any) -> None:
    pairs = zip_longest(_describe(wanted, "result"), _describe(found, "result"), fillvalue="")
    for one, other in pairs:
        if one != other:
            raise Different(f"{one[:120]!r} in stock and {other[:120]!r} in fast-axolotl")


def _describe(value: Any, path: str) -> Iterator[str]:
    """What a value consists of, line by line; two values are the same if all lines are."""
    torch, kind = sys.modules.get("torch"), type(value)
    name = f"{path}: {kind.__module__}.{kind.__qualname__}"
    if kind in _PLAIN:
        yield f"{name} {value!r}"
    elif isinstance(value, np.ndarray | np.generic):
        content = value.tolist() if value.dtype.hasobject else value.tobytes()
        yield f"{name} {value.dtype} {value.shape} {content!r}"
    elif torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        yield f"{name} {value.dtype} {value.device} {tuple(value.shape)} {flat.tobytes()!r}"
    elif _is_dataset(value):
        table = value.with_format("arrow")[:]
        # Metadata repeat the features, and name the parts that several processes made.
        schema = table.schema.remove_metadata()
        yield f"{name} {value.features} {value.split} {schema.to_string()}"
        for place, row in enumerate(table.to_pylist()):
            yield f"{path}[{place}]: {row!r}"
    elif isinstance(value, Mapping):
        yield name
        for key, item in value.items():
            yield from _describe(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        if _PLAIN.issuperset(map(type, value)):
            yield f"{name} {value!r}"
            return
        yield f"{name} of {len(value)}"
        for place, item in enumerate(value):
            yield from _describe(item, f"{path}[{place}]")
    else:
        yield name


def _choose(rows: Any, count: int) -> list[int]:
    """Places of rows: the first, the longest of some, random ones, and the first ones again."""
    num_rows = len(next(iter(rows.values()))) if isinstance(rows, Mapping) else len(rows)
    chance, some = random.Random(num_rows), range(num_rows)

    def shortness(place: int) -> int:
        is_columns = isinstance(rows, Mapping)
        row = [values[place] for values in rows.values()] if is_columns else rows[place]
        return -len(str(row))

    tried = some if num_rows <= _CANDIDATES else chance.sample(some, _CANDIDATES)
    longest = sorted(tried, key=shortness)[:_LONGEST]
    chosen = [*some[:_FIRST], *longest, *chance.sample(tried, min(count, len(tried)))]
    places = list(dict.fromkeys(chosen))[:count]
    return places + places[:_REPEATED]


def _take(rows: Any, places: list[int]) -> Any:
    """Some rows as their own copy, in memory."""
    if _is_dataset(rows):
        from datasets import Dataset

        # In memory, so that nothing is cached; of the usual kind, as ``select`` gives it.
        table = rows.select(places).with_format("arrow")[:]
        return Dataset(table, info=rows.info.copy(), split=rows.split)
    if isinstance(rows, Mapping):
        return {name: _take(values, places) for name, values in rows.items()}
    return copy.deepcopy([rows[place] for place in places])


def _is_dataset(value: Any) -> bool:
    """Whether it is one with rows: Axolotl's class tokenises before it is a dataset itself."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(value, datasets.Dataset) and "_data" in vars(value)


def _save_here(rows: Any, *args: Any, num_proc: int | None = None, **options: Any) -> None:
    """Its ``save_to_disk`` without processes, each of which would import all of Axolotl."""
    type(rows).save_to_disk(rows, *args, **options)


@contextmanager
def _unseen(bound: inspect.BoundArguments) -> Iterator[None]:
    """What is drawn from random generators is put back, and nothing is logged."""
    sampler = getattr(bound.arguments.get("self"), "sampler", None)
    before, disabled = random_state(sampler), logging.root.manager.disable
    logging.disable(sys.maxsize)
    try:
        yield
    finally:
        logging.disable(disabled)
        restore_random_state(sampler, before)


def random_state(sampler: Any = None) -> list[Any]:
    """Of all generators that may be drawn from, a sampler's own and its epoch included."""
    torch, own = sys.modules.get("torch"), getattr(sampler, "generator", None)
    return [
        random.getstate(),
        np.random.get_state(),
        None if torch is None else torch.get_rng_state(),
        None if own is None else own.get_state(),
        getattr(sampler, "epoch", None),
    ]


def restore_random_state(sampler: Any, state: list[Any]) -> None:
    """Puts back what was drawn since ``state`` was taken."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    if state[2] is not None:
        sys.modules["torch"].set_rng_state(state[2])
    if state[3] is not None:
        sampler.generator.set_state(state[3])
    if state[4] is not None:
        vars(sampler)["epoch"] = state[4]
