"""Run some rows through Axolotl's own pipeline, up to the point where rows depend on each other.

Axolotl's ``_load_raw_datasets`` and ``_load_split`` load, tokenise, merge, filter, dedupe and save.
Here the very same functions run on a few rows of one dataset, with four of their helpers replaced:
loading gives these rows, merging gives each row its number, dedupe does nothing, and what would be
saved is the result. Everything else, in this release or the next, is done as Axolotl does it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest import mock

import pyarrow as pa

from fast_axolotl.axolotl import install, names_to_skip
from fast_axolotl.axolotl.patching import Unfamiliar
from fast_axolotl.axolotl.tokenized_shards import describe
from fast_axolotl.errors import DataError, UsageError

_NUMBER = "__fast_axolotl_row"
_UNSUPPORTED = (
    *("skip_prepare_dataset", "pretraining_dataset", "streaming"),
    *("use_pose", "processor_type", "push_dataset_to_hub", "_synthetic"),
)
_NOTHING_LEFT = "trainable tokens"
"""In what Axolotl says where no row is left; here it may be just these rows."""


@dataclass(slots=True)
class Made:
    """What became of some rows."""

    table: pa.Table | None = None
    """The rows that are kept; ``None`` where there are none."""
    numbers: Any = ()
    """Which of the merged rows each of them was."""
    num_merged: int = 0
    num_dropped: int = 0


def load_configuration(config: str) -> tuple[Any, Any]:
    """Axolotl's configuration as ``axolotl preprocess`` sees it, and its tokenizer."""
    _make_ready()
    try:
        from axolotl.cli.config import load_cfg
        from axolotl.integrations.base import BasePlugin, PluginManager
        from axolotl.loaders import load_tokenizer
    except ImportError as error:
        raise UsageError(f"prepare needs Axolotl: pip install axolotl ({error})") from None
    try:
        cfg = load_cfg(config, is_preprocess=True)
        tokenizer = load_tokenizer(cfg)
    except Exception as error:  # noqa: BLE001  Axolotl and its libraries raise what they like
        raise UsageError(f"Axolotl rejects {config}: {error}") from None
    cfg.is_preprocess = True
    _quieten(logging.WARNING)
    types = [str(entry.type) for entry in [*(cfg.datasets or ()), *(cfg.test_datasets or ())]]
    for key in _UNSUPPORTED:
        if cfg.get(key) or key in types:
            raise UsageError(f"{config} sets {key}, unsupported here; use Axolotl without prepare")
    for plugin in PluginManager.get_instance().plugins.values():
        if type(plugin).load_datasets is not BasePlugin.load_datasets:
            name = type(plugin).__name__
            raise UsageError(f"plugin {name} loads datasets itself; use axolotl preprocess")
    return cfg, tokenizer


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Axolotl's pipeline for one configuration, in this process."""

    cfg: Any
    tokenizer: Any
    configs: list[Any]
    """Its datasets of one split."""

    def to_text(self) -> str:
        """As data, from which ``open_pipeline`` makes it in another process."""
        digest = tokenizer_digest(self.tokenizer)
        found = {"cfg": self.cfg, "configs": self.configs, "tokenizer": digest}
        return json.dumps(found, default=str)

    def make(self, index: int, split: str, rows: pa.Table) -> Made:
        """Rows of a dataset, by its number, as they are in the prepared dataset, in their order."""
        from axolotl.utils.data import rl, sft
        from datasets import Dataset, Features
        from datasets.table import InMemoryTable

        dataset = Dataset(InMemoryTable(rows))
        made = Made()
        cfg = type(self.cfg)({**self.cfg})
        uncut = {"shards": None, "preprocess_shards": None}
        config = type(self.cfg)({**self.configs[index], **uncut})
        cfg.datasets = cfg.test_datasets = [config]
        if cfg.rl and split == "test":
            # Axolotl reads the fields of preferences from the entry of this number to train on.
            cfg.datasets = self.cfg.datasets[index : index + 1]
        # One process, and nothing left in a cache: the job's folder has what is finished.
        cfg.dataset_num_proc, cfg.dataset_keep_in_memory = None, True
        saved: list[Any] = []
        try:
            with self._replaced(rl if cfg.rl else sft, dataset, made, saved):
                if cfg.rl:
                    rl._load_split(cfg, split)
                else:
                    sft._load_raw_datasets(cfg, [config], self.tokenizer, split)
        except ValueError as error:
            if _NOTHING_LEFT not in str(error):
                raise
            made.num_dropped += made.num_merged
            return made
        [result] = saved
        made.num_dropped += made.num_merged - len(result)
        if len(result) and _NUMBER in result.column_names:
            table = result.with_format("arrow")[:]
            features = {key: kind for key, kind in result.features.items() if key != _NUMBER}
            made.numbers = table.column(_NUMBER).to_numpy()
            schema = Features(features).arrow_schema
            made.table = table.drop_columns([_NUMBER]).replace_schema_metadata(schema.metadata)
        return made

    @contextmanager
    def _replaced(self, module: Any, dataset: Any, made: Made, saved: list[Any]) -> Iterator[None]:
        """Axolotl's helpers that look beyond these rows, replaced for one call."""

        def merge(datasets: list[Any], _cfg: Any) -> Any:
            [merged] = datasets
            made.num_merged = len(merged)
            made.num_dropped = max(0, len(dataset) - len(merged))  # a row may become several
            return merged.add_column(_NUMBER, list(range(len(merged)))) if len(merged) else merged

        replacements = {
            "load_dataset_with_config": lambda *_, **__: dataset,
            "merge_datasets": merge,
            "deduplicate_and_log_datasets": lambda dataset, **_: (dataset, None),
            "save_preprocessed_dataset": lambda _cfg, result, *_: saved.append(result),
        }
        if module.__name__.endswith("rl"):
            replacements["load_tokenizer"] = lambda _cfg: self.tokenizer
        with ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, function in replacements.items():
                stack.enter_context(mock.patch.object(module, name, function))
            yield


@lru_cache(maxsize=2)
def open_pipeline(text: str) -> Pipeline:
    """The pipeline that ``Pipeline.to_text`` has described, made once in each process."""
    _make_ready()
    from axolotl.loaders import load_tokenizer
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.schemas.enums import RLType

    found = json.loads(text)
    cfg = DictDefault(found["cfg"])
    if cfg.rl:
        cfg.rl = RLType(cfg.rl)  # Axolotl compares by identity
    name = cfg.tokenizer_config or cfg.base_model
    try:
        tokenizer = load_tokenizer(cfg)
    except Exception as error:  # noqa: BLE001  Axolotl and its libraries raise what they like
        raise DataError(
            f"the tokenizer {name} cannot be loaded on this node: {error}; it must be there under "
            "this name, on a shared disk or from the Hub"
        ) from None
    if tokenizer_digest(tokenizer) != found["tokenizer"]:
        raise DataError(f"the tokenizer {name} is another one where the job was started")
    # Whatever is wrong with rows was told of the first rows, where the job was started.
    _quieten(logging.ERROR)
    return Pipeline(cfg, tokenizer, [DictDefault(config) for config in found["configs"]])


def tokenizer_digest(tokenizer: Any) -> str:
    """The same on all nodes for tokenizers that give the same tokens."""
    try:
        text = describe(tokenizer)
    except Unfamiliar:
        text = type(tokenizer).__name__
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _make_ready() -> None:
    """Our replacements in this process, less the one that loads datasets itself."""
    os.environ["AXOLOTL_IS_PREPROCESS"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # every core has a process already
    os.environ.setdefault("AXOLOTL_LOG_LEVEL", "WARNING")
    install(skip=[*names_to_skip(), "stream"])


def _quieten(level: int) -> None:
    """Nothing of single slices is told or kept."""
    import datasets
    from datasets.utils import disable_progress_bars

    datasets.disable_caching()
    disable_progress_bars()
    logging.getLogger("axolotl").setLevel(level)
