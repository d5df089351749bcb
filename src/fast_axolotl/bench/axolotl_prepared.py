"""Whether two runs gave the same: prepared datasets, logged losses, batches.

A difference is told in one line. Of a prepared dataset everything counts but its fingerprint, which
datasets draws at random: rows, their order, shards, the schema with its metadata, the features.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from fast_axolotl.bench.axolotl_runs import Run

__all__ = [
    "batches_difference",
    "logged_losses",
    "losses_difference",
    "prepared_difference",
]

_MOST_CHARACTERS = 200


def prepared_difference(stock: Path, ours: Path) -> str | None:
    """How the dataset that ours prepared differs from stock's; ``None`` where they are equal."""
    theirs, found = _files(stock), _files(ours)
    if not theirs:
        return "stock prepared nothing"
    if theirs != found:
        return f"files {sorted(found)} in place of {sorted(theirs)}"[:_MOST_CHARACTERS]
    for name in sorted(theirs):
        reason = _file_difference(stock / name, ours / name)
        if reason is not None:
            return f"{Path(name).name}: {reason}"[:_MOST_CHARACTERS]
    return _loaded_difference(stock, ours)


def _files(folder: Path) -> set[str]:
    """What datasets wrote; Axolotl's lock stays beside it."""
    paths = (path for path in folder.rglob("*") if path.suffix in (".arrow", ".json"))
    return {str(path.relative_to(folder)) for path in paths}


def _file_difference(stock: Path, ours: Path) -> str | None:
    if stock.suffix == ".arrow":
        return _table_difference(_read(stock), _read(ours))
    theirs, found = json.loads(stock.read_text()), json.loads(ours.read_text())
    for content in (theirs, found):
        content.pop("_fingerprint", None)
    if theirs == found:
        return None
    keys = sorted(key for key in {*theirs, *found} if theirs.get(key) != found.get(key))
    return f"{', '.join(keys)}: {found.get(keys[0])} in place of {theirs.get(keys[0])}"


def _read(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_stream(source).read_all()


def _table_difference(stock: pa.Table, ours: pa.Table) -> str | None:
    if not ours.schema.equals(stock.schema, check_metadata=True):
        return f"schema {ours.schema} in place of {stock.schema}"
    if ours.num_rows != stock.num_rows:
        return f"{ours.num_rows:,} rows in place of {stock.num_rows:,}"
    other = [name for name in stock.column_names if not ours[name].equals(stock[name])]
    return f"other values in {', '.join(other)}" if other else None


def _loaded_difference(stock: Path, ours: Path) -> str | None:
    """As Axolotl loads it for training."""
    from datasets import load_from_disk

    for state in stock.rglob("state.json"):
        folder = state.parent
        theirs = load_from_disk(str(folder))
        found = load_from_disk(str(ours / folder.relative_to(stock)))
        if (found.features, found.split) != (theirs.features, theirs.split):
            return f"loaded: {found.features} in place of {theirs.features}"[:_MOST_CHARACTERS]
        if len(found) != len(theirs):
            return f"loaded: {len(found):,} rows in place of {len(theirs):,}"
    return None


def logged_losses(run: Run) -> list[tuple[str, str]]:
    """Loss and norm of the gradient of every step, to the last digit."""
    states = sorted(run.folder.glob("output/checkpoint-*/trainer_state.json"))
    history: list[dict[str, Any]] = json.loads(states[-1].read_text())["log_history"]
    return [(repr(item["loss"]), repr(item["grad_norm"])) for item in history if "loss" in item]


def losses_difference(stock: Run, ours: Run) -> str | None:
    """The first step that differs; ``None`` where all are equal, and the batches too."""
    theirs, found = logged_losses(stock), logged_losses(ours)
    if len(theirs) != len(found):
        return f"{len(found)} logged steps in place of {len(theirs)}"
    for step, (expected, got) in enumerate(zip(theirs, found, strict=True), start=1):
        if expected != got:
            return f"step {step}: loss {got[0]} in place of {expected[0]}"
    return batches_difference(stock, ours)


def batches_difference(stock: Run, ours: Run) -> str | None:
    """The first batch that differs; ranks are compared whatever their processes' numbers."""
    theirs, found = (sorted(ledger["batches"] for ledger in run.ledgers) for run in (stock, ours))
    for expected, got in zip(theirs, found, strict=True):
        if len(expected) != len(got):
            return f"{len(got)} batches in place of {len(expected)}"
        pairs = enumerate(zip(expected, got, strict=True), start=1)
        other = [number for number, (first, second) in pairs if first != second]
        if other:
            return f"batch {other[0]} differs, and {len(other) - 1} more of {len(expected)}"
    return None
