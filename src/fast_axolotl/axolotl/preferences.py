"""Preference datasets brought into shape a batch at a time.

Axolotl maps the rows of a DPO, KTO or ORPO dataset one by one to prompt, chosen and rejected text.
Most of the time goes into fetching a row from its Arrow table, column by column. ``map_dataset``
stands in for ``_map_dataset``: the same ``map`` over batches, in which Axolotl's own transform is
called with row after row. Rows (``lazy_row``) are those that HF datasets would have made, but take
their values from columns that were fetched once.

Unfamiliar are: transforms that are not Axolotl's, formatted or indexed datasets, and rows that end
in different columns. Costs 10 to 30 µs a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

from fast_axolotl.axolotl.data import require_plain
from fast_axolotl.axolotl.filters import stock_fingerprint
from fast_axolotl.axolotl.patching import Unfamiliar

_BATCH_ROWS = 1000
"""As many as ``map`` writes to disk at once in any case."""

_TRANSFORMS = tuple(f"axolotl.prompt_strategies.{name}." for name in ("dpo", "kto", "orpo"))


@dataclass(frozen=True, slots=True)
class _Cell:
    """One row's table and formatter, as a ``LazyRow`` asks them: a value is in its column."""

    batch: Mapping[str, Any]
    column_names: list[str]
    index: int

    def select(self, names: list[str]) -> list[str]:
        return names

    def format_column(self, names: list[str]) -> list[Any]:
        return [self.batch[names[0]][self.index]]


def lazy_row(batch: Mapping[str, Any], index: int) -> Any:
    """A row of a batch, as ``map`` would hand it over."""
    from datasets.formatting.formatting import LazyRow

    cell = _Cell(batch, list(batch), index)
    return LazyRow(cell, cell)


def map_dataset(
    cfg: Any,
    dataset: Any,
    ds_transform_fn: Callable[..., Any],
    tokenizer: Any | None = None,
    **map_kwargs: Any,
) -> Any:
    """Stands in for ``axolotl.utils.data.rl._map_dataset``."""
    from datasets import DatasetDict

    function = ds_transform_fn
    if type(function) is not FunctionType or not function.__module__.startswith(_TRANSFORMS):
        raise Unfamiliar("the transform is not one of Axolotl's")
    if "tokenizer" in inspect.signature(function).parameters:
        ds_transform_fn = partial(function, tokenizer=tokenizer)
    else:
        tokenizer = None
    if isinstance(dataset, DatasetDict):
        dataset = dataset["train"]
    require_plain(dataset)
    if not len(dataset):
        raise Unfamiliar("the dataset is empty")
    if not map_kwargs.keys() <= {"remove_columns"} or (map_kwargs and tokenizer is None):
        raise Unfamiliar("the dataset is mapped with other options")
    # The fingerprint is that of the map which is not made, so a cache serves both.
    transform = "datasets.arrow_dataset.Dataset._map_single"
    given = {"fn_kwargs": {}, **map_kwargs}
    return dataset.map(
        partial(transform_rows, function=function, tokenizer=tokenizer),
        num_proc=cfg.dataset_num_proc,
        load_from_cache_file=not cfg.is_preprocess,
        desc="Mapping RL Dataset",
        batched=True,
        batch_size=_BATCH_ROWS,
        new_fingerprint=stock_fingerprint(dataset, transform, ds_transform_fn, False, given),
        **map_kwargs,
    )


def transform_rows(
    batch: Mapping[str, Any], function: Callable[..., Any], tokenizer: Any
) -> dict[str, list[Any]]:
    """A batch of rows transformed one after the other, for ``map``."""
    from datasets.formatting.formatting import LazyDict

    given = {} if tokenizer is None else {"tokenizer": tokenizer}
    results = []
    for index in range(len(next(iter(batch.values())))):
        result = function(lazy_row(batch, index), **given)
        if isinstance(result, LazyDict):
            untouched = result.keys_to_format
            result = {name: value for name, value in result.data.items() if name not in untouched}
        results.append(result)
    names = list(results[0])
    if any(list(result) != names for result in results):
        raise Unfamiliar("rows produce different columns")
    return {name: [result[name] for result in results] for name in names}
