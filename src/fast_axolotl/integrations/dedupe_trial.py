"""Dedupe on its own: Axolotl's function and ours on the rows of a configuration, in one process.

    python -m fast_axolotl.integrations.dedupe_trial TRIAL.json RESULT.json

The rows are those of the files, as Axolotl loads them, before they are tokenised. Which rows are
kept is compared first; then the two take turns, A B B A. Runs with ``FAST_AXOLOTL=0``, so that
Axolotl's function is its own; ours is called by name. The import of Axolotl is not timed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["main", "try_dedupe"]

_MOST_ROWS = 100_000
"""Stock takes some 15 s for so many rows of chat, and its time grows with their number alone."""
_REPEATS = 5
_MOST_SECONDS = 120.0
"""After which no further turn is begun."""


def main(trial: str, result: str) -> None:
    """Reads what to try and writes what was found."""
    given = json.loads(Path(trial).read_text(encoding="utf-8"))
    found = try_dedupe(given)
    Path(result).write_text(json.dumps(found), encoding="utf-8")


def try_dedupe(
    given: Mapping[str, Any], *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Rows, those kept, and the seconds of every turn; or the reason why there are none."""
    from axolotl.utils.data.utils import _deduplicate_dataset

    from fast_axolotl.integrations.axolotl_data import deduplicate_dataset
    from fast_axolotl.integrations.patching import Unfamiliar

    dataset, is_cut = _load(given["datasets"])
    if dataset is None:
        return {"reason": "the configuration has no datasets: to dedupe"}
    wanted = _kept(_deduplicate_dataset(dataset))
    try:
        ours = _kept(deduplicate_dataset(dataset))
    except Unfamiliar as error:
        return {"rows": len(dataset), "reason": f"ours leaves these rows to Axolotl: {error}"}
    found: dict[str, Any] = {
        "rows": len(dataset),
        "is_cut": is_cut,
        "kept": len(wanted),
        "is_equal": ours == wanted,
    }
    if not found["is_equal"]:
        return {**found, "reason": "ours keeps other rows than Axolotl: nothing was timed"}
    turns: dict[str, list[float]] = {"stock": [], "ours": []}
    functions = {"stock": _deduplicate_dataset, "ours": deduplicate_dataset}
    begin = clock()
    for name in _order():
        if name == "stock" and clock() - begin > _MOST_SECONDS and len(turns["ours"]) > 1:
            break
        start = clock()
        functions[name](dataset)
        turns[name].append(clock() - start)
    return {**found, "stock_seconds": turns["stock"], "our_seconds": turns["ours"]}


def _order() -> Iterator[str]:
    for number in range(_REPEATS):
        yield from ("stock", "ours") if number % 2 == 0 else ("ours", "stock")


def _kept(answer: tuple[Any, Any]) -> list[int]:
    chosen = answer[0]
    if chosen._indices is None:
        return list(range(len(chosen)))
    return list(chosen._indices.column(0).to_pylist())


def _load(entries: list[dict[str, Any]]) -> tuple[Any, bool]:
    """All rows together, as far as their columns agree; whether some were left out."""
    from axolotl.utils.data.shared import load_dataset_with_config
    from axolotl.utils.dict import DictDefault
    from datasets import DatasetDict, concatenate_datasets

    loaded = []
    for entry in entries:
        config = DictDefault({**entry, "split": entry.get("split") or "train"})
        rows = load_dataset_with_config(config, use_auth_token=False)
        loaded.append(next(iter(rows.values())) if isinstance(rows, DatasetDict) else rows)
    if not loaded:
        return None, False
    alike = [rows for rows in loaded if rows.features == loaded[0].features]
    merged = concatenate_datasets(alike) if len(alike) > 1 else alike[0]
    is_cut = len(alike) < len(loaded) or len(merged) > _MOST_ROWS
    return merged.select(range(min(len(merged), _MOST_ROWS))), is_cut


if __name__ == "__main__":
    main(*sys.argv[1:])
