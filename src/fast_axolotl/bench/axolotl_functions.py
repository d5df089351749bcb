"""Function by function in one process: stock's against ours, equal answers first, then by turns.

Run as ``python -m fast_axolotl.bench.axolotl_functions SETTINGS.json``. ``install()`` and
``uninstall()`` say whose function it is. The answers of both are compared value by value and type
by type, and so are the states of the random generators afterwards. The first call of each is timed
apart: it compiles, imports and fills caches. A repeat is one pass, or the median of as many as take
0.2 s. Progress goes to stdout, the result to the file that the settings name.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import fast_axolotl
from fast_axolotl.bench.axolotl_prepared import prepared_difference
from fast_axolotl.bench.axolotl_runs import OURS, STOCK, by_turns
from fast_axolotl.bench.axolotl_subjects import SUBJECTS, Inputs, Stopwatch, Subject
from fast_axolotl.bench.contest import peer_module
from fast_axolotl.bench.timing import one_line

__all__ = ["PROGRESS", "answer_difference", "main"]

PROGRESS = "progress: "
"""How a line begins that is meant for people."""

_LEAST_SECONDS = 0.2
_MOST_PASSES = 20
_ARMS: Mapping[str, Callable[[], bool]] = {
    STOCK: fast_axolotl.uninstall,
    OURS: fast_axolotl.install,
}


def main(path: str) -> None:
    """Measures what the settings ask for."""
    settings = json.loads(Path(path).read_text())
    _behave_as_preprocess()
    fast_axolotl.uninstall()
    inputs = Inputs(settings["rows"], Path(settings["model"]), Path(settings["folder"]))
    found = []
    for name in settings["names"]:
        print(f"{PROGRESS}{name}", flush=True)
        try:
            result = _measure(SUBJECTS[name](inputs), settings["repeats"])
        except Exception as error:  # noqa: BLE001 - another Axolotl may fail in any way; it is told
            result = {"error": one_line(error)}
        found.append({"name": name, **result})
        Path(settings["result"]).write_text(json.dumps(found))


def _behave_as_preprocess() -> None:
    logging.disable(logging.WARNING)
    datasets = peer_module("datasets")
    datasets.disable_caching()
    datasets.disable_progress_bars()
    # Workers that are spawned import the main module: let it be that of ``axolotl preprocess``.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("axolotl.cli.main")


def _measure(subject: Subject, repeats: int) -> dict[str, Any]:
    answers, first = {}, {}
    before = _calls()
    for arm in (STOCK, OURS):
        _ARMS[arm]()
        answers[arm], first[arm] = _call(subject)
    reason = answer_difference(*answers.values())
    answered = {name: calls - before.get(name, 0) for name, calls in _calls().items()}
    fallbacks = _fallbacks()
    answers.clear()
    seconds: dict[str, list[float]] = {STOCK: [], OURS: []}
    for arm, _ in by_turns(repeats):
        _ARMS[arm]()
        seconds[arm].append(_repeat(lambda: _pass(subject)))
    _ARMS[STOCK]()
    return {
        "text": subject.text,
        "rows": subject.rows,
        "unit": subject.unit,
        "reason": reason,
        "seconds": seconds,
        "first": first,
        "answered": {name: calls for name, calls in answered.items() if calls},
        "fallbacks": fallbacks,
    }


def _call(subject: Subject) -> tuple[Any, float]:
    """The answer with the states of the generators after it, and how long it took."""
    _seed()
    given = subject.prepare()
    start = time.perf_counter()
    answer = subject.call(given)
    taken = time.perf_counter() - start
    states = _states()
    return {"answer": subject.look(given, answer), "generators": states}, taken


def _pass(subject: Subject) -> float:
    _seed()
    given = subject.prepare()
    taken = _timed(lambda: subject.call(given))
    if isinstance(given, Stopwatch):
        taken -= given.seconds
    if isinstance(given, Path):
        shutil.rmtree(given)
    return taken


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    answer = call()
    taken = time.perf_counter() - start
    del answer
    return taken


def _repeat(run: Callable[[], float]) -> float:
    # Not before every pass: with all of Axolotl in the process it takes longer than most of them.
    gc.collect()
    passes = [run()]
    while sum(passes) < _LEAST_SECONDS and len(passes) < _MOST_PASSES:
        passes.append(run())
    return median(passes)


def _seed() -> None:
    random.seed(7)
    peer_module("numpy").random.seed(7)
    peer_module("torch").manual_seed(7)


def _states() -> list[str]:
    numpy, torch = peer_module("numpy"), peer_module("torch")
    return [
        repr(random.getstate()),
        repr([numpy.asarray(part).tolist() for part in numpy.random.get_state()]),
        repr(torch.get_rng_state().tolist()),
    ]


def _calls() -> dict[str, int]:
    """Calls that ours answered, by the name of the replacement."""
    found: dict[str, int] = {}
    for patch in fast_axolotl.status().patches:
        found[patch.name] = found.get(patch.name, 0) + patch.calls
    return found


def _fallbacks() -> list[str]:
    return [
        f"{patch.name}: {reason}"
        for patch in fast_axolotl.status().patches
        for reason, _ in patch.fallbacks
    ]


def answer_difference(stock: Any, ours: Any, place: str = "answer") -> str | None:
    """How ours differs from stock's, type or value; ``None`` where it does not."""
    if type(stock) is not type(ours):
        return f"{place}: a {type(ours).__name__} in place of a {type(stock).__name__}"
    if isinstance(stock, Path):
        return prepared_difference(stock, ours)
    if hasattr(stock, "_fingerprint"):
        return _dataset_difference(stock, ours, place)
    if hasattr(stock, "dtype"):
        is_equal = (stock.dtype, stock.shape) == (ours.dtype, ours.shape) and bool(
            (stock == ours).all()
        )
        return None if is_equal else f"{place}: other values, or {ours.dtype} of {ours.shape}"
    if isinstance(stock, Mapping):
        if list(stock) != list(ours):
            return f"{place}: {list(ours)} in place of {list(stock)}"
        return _first(answer_difference(stock[key], ours[key], f"{place} {key}") for key in stock)
    if isinstance(stock, list | tuple):
        return _sequence_difference(stock, ours, place)
    return None if stock == ours else f"{place}: {ours!r} in place of {stock!r}"[:200]


def _sequence_difference(stock: Any, ours: Any, place: str) -> str | None:
    if len(stock) != len(ours):
        return f"{place}: {len(ours):,} items in place of {len(stock):,}"
    kinds, found = ({type(item) for item in items} for items in (stock, ours))
    if kinds != found:
        return f"{place}: items of {found} in place of {kinds}"
    if kinds <= {int, str, float, bool}:
        return None if stock == ours else f"{place}: other values"
    pairs = enumerate(zip(stock, ours, strict=True))
    return _first(answer_difference(*pair, f"{place}[{index}]") for index, pair in pairs)


def _dataset_difference(stock: Any, ours: Any, place: str) -> str | None:
    if stock.features != ours.features or stock.column_names != ours.column_names:
        return f"{place}: {ours.features} in place of {stock.features}"[:200]
    if len(stock) != len(ours):
        return f"{place}: {len(ours):,} rows in place of {len(stock):,}"
    theirs, found = (data.with_format("arrow")[:] for data in (stock, ours))
    other = [name for name in theirs.column_names if not found[name].equals(theirs[name])]
    return f"{place}: other values in {', '.join(other)}" if other else None


def _first(reasons: Any) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


if __name__ == "__main__":
    main(*sys.argv[1:])
