"""Whether two functions do the same with the same arguments, as far as it can be seen.

``run_both`` calls the host's own function with the caller's arguments and ours with a copy of them,
from the same random state, and compares: results with types, dtypes, order of keys, and which parts
are one object; what became of the arguments; the random numbers drawn from Python, numpy and torch.
The host's function goes first and for real: its result, its error and its random state are what the
caller gets, whatever ours does. Ours does not write to the log here.

A copy is made by pickling. What is immutable or too large is not copied but shared: classes,
functions, Arrow data, models, and the Rust part of tokenizers, whose settings are put back instead.
Arguments that cannot be pickled (generators, files) cannot be tried. Not seen: what a function does
elsewhere, which is why only functions without such effects may be tried.

Cost: both calls, and some 0.1 µs a value to copy and compare.
"""

from __future__ import annotations

import io
import logging
import math
import pickle
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa

_PLAIN = frozenset({int, str, bytes, bool, type(None)})
"""Types whose values are the same if they are equal and of the same type."""

_SHARED = (
    *(ModuleType, type, FunctionType, BuiltinFunctionType, logging.Logger),
    *(pa.Table, pa.RecordBatch, pa.Array, pa.ChunkedArray, pa.Schema, pa.DataType),
)
_LARGE = {"torch.nn": "Module", "datasets.table": "Table", "tokenizers": "Tokenizer"}


class Outcome(NamedTuple):
    """What came of a call of both functions."""

    result: Any
    """Of the host's function."""
    error: Exception | None
    """What the host's function raised instead."""
    refusal: Exception | None = None
    """Why ours did not answer."""
    difference: str = ""
    """Where ours differs; empty where it does not, or did not answer."""
    num_values: int = 0
    """How many numbers, texts and the like the equal results have; 0: nothing is proven."""


def run_both(
    stock: Callable[..., Any],
    ours: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Outcome:
    """Call both with the same arguments; the world is left as ``stock`` leaves it."""
    given = [list(args), dict(kwargs)]
    result = error = refusal = None
    copier = _Copier()
    try:
        copies = copier.copy(given)
        before = copier.state()
    except Exception as reason:  # noqa: BLE001
        refusal = TypeError(f"the arguments cannot be copied for a trial: {reason}")
    try:
        result = stock(*args, **kwargs)
    except Exception as raised:  # noqa: BLE001
        error = raised
    if refusal is not None:
        return Outcome(result, error, refusal)
    disabled = logging.root.manager.disable
    try:
        after = copier.state()
        copier.restore(before)
        logging.disable(sys.maxsize)
        try:
            answer = ours(*copies[0], **copies[1])
            drawn = copier.state()
        finally:
            logging.disable(disabled)
            copier.restore(after)
    except Exception as reason:  # noqa: BLE001
        return Outcome(result, error, reason)
    met: dict[int, Any] = {}
    try:
        _compare(repr(error), repr(None), "error", met)
        num_values = _compare(result, answer, "result", met)
        _compare(given, copies, "arguments", met)
        _compare(after, drawn, "state of random generators and tokenizers", met)
    except Exception as reason:  # noqa: BLE001 - what cannot be compared is not the same
        return Outcome(result, error, difference=str(reason))
    return Outcome(result, error, num_values=0 if result is None else num_values)


class _Copier(pickle.Pickler):
    """Copies arguments, but for what both functions may share, and knows the state around them."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, protocol=5)
        self._shared: list[Any] = []
        loaded = [(sys.modules[key], name) for key, name in _LARGE.items() if key in sys.modules]
        self._kinds = (*_SHARED, *(getattr(module, name) for module, name in loaded))

    def copy(self, value: Any) -> Any:
        self.dump(value)
        self._file.seek(0)
        paster = pickle.Unpickler(self._file)
        paster.persistent_load = self._shared.__getitem__  # type: ignore[method-assign]
        return paster.load()

    def persistent_id(self, value: Any) -> int | None:
        if type(value) in _PLAIN or not isinstance(value, self._kinds):
            return None
        self._shared.append(value)
        return len(self._shared) - 1

    def state(self) -> list[Any]:
        """Of the random generators, and of the tokenizers that are shared."""
        torch, tokenizers = sys.modules.get("torch"), sys.modules.get("tokenizers")
        rust = [it for it in self._shared if tokenizers and isinstance(it, tokenizers.Tokenizer)]
        return [
            random.getstate(),
            np.random.get_state(),
            None if torch is None else torch.get_rng_state(),
            [(it, it.truncation, it.padding, it.encode_special_tokens) for it in rust],
        ]

    def restore(self, state: list[Any]) -> None:
        random.setstate(state[0])
        np.random.set_state(state[1])
        if state[2] is not None:
            sys.modules["torch"].set_rng_state(state[2])
        for item, truncation, padding, split in state[3]:
            item.no_truncation() if truncation is None else item.enable_truncation(**truncation)
            item.no_padding() if padding is None else item.enable_padding(**padding)
            item.encode_special_tokens = split


def _compare(stock: Any, ours: Any, path: str, met: dict[int, Any]) -> int:
    """The number of values in what is the same; ``ValueError`` says where something is not.

    ``met`` has the pairs of objects so far: where one is found again, so must the other be.
    """
    kind = type(stock)
    if kind is not type(ours):
        _differ(path, kind.__name__, type(ours).__name__)
    if kind in _PLAIN or kind in (float, complex):
        # Minus zero is not zero, and one NaN is like another.
        if (stock != ours) if kind in _PLAIN else (repr(stock) != repr(ours)):
            _differ(path, stock, ours)
        return 1
    if not isinstance(stock, (tuple, frozenset, np.generic, *_SHARED)):
        known = met.get(id(stock)), met.get(id(ours))
        if known[0] is not known[1]:
            raise ValueError(f"{path}: one result shares an object where the other has copies")
        if known[0] is not None:
            return 0
        met[id(stock)] = met[id(ours)] = stock, ours
    if stock is ours:
        return 0
    keys: Any = range(sys.maxsize)
    parts: list[Any] = [stock, ours]
    if kind is dict:
        _compare(list(stock), list(ours), f"{path}: keys", met)
        keys, parts = list(stock), [list(item.values()) for item in parts]
    elif kind not in (list, tuple):
        parts = [_parts(item) for item in parts]
    if len(parts[0]) != len(parts[1]):
        _differ(path, f"{len(parts[0])} items", len(parts[1]))
    types = [list(map(type, item)) for item in parts]
    if types[0] == types[1] and _PLAIN.issuperset(types[0]) and list(parts[0]) == list(parts[1]):
        num_values = len(parts[0])
    else:
        triples = zip(keys, *parts, strict=False)
        num_values = sum(_compare(one, two, f"{path}[{key!r}]", met) for key, one, two in triples)
    if isinstance(getattr(stock, "shape", None), tuple):
        return math.prod(stock.shape)
    # Of other objects, nothing is asked that they may do more for than be pickled.
    return 0 if isinstance(stock, dict | list | set) and not len(stock) else num_values


def _parts(value: Any) -> list[Any]:
    """What an object consists of: of arrays their bytes, of others what they are pickled as."""
    if isinstance(value, np.ndarray | np.generic):
        content = value.tolist() if value.dtype.hasobject else value.tobytes()
        return [value.dtype.str, value.shape, content]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        names = ("dtype", "shape", "device", "layout", "requires_grad")
        return [*(str(getattr(value, name)) for name in names), flat.tobytes()]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    parts = list(value.__reduce_ex__(4))
    # The items of lists and of dicts are iterators.
    parts[3:5] = [item and list(item) for item in parts[3:5]]
    return parts


def _differ(path: str, stock: object, ours: object) -> NoReturn:
    texts = [" ".join(str(value).split())[:80] for value in (stock, ours)]
    raise ValueError(f"{path} is {texts[0]} in stock and {texts[1]} in fast-axolotl")
