"""What tests that call the real Axolotl share: tokenizers, datasets, log lines, child processes."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings

from fast_axolotl.axolotl.fingerprints import ABSENT, fingerprint
from fast_axolotl.axolotl.patches import REPLACEMENTS
from support import children

AGAINST_AXOLOTL = [
    pytest.mark.skipif(
        importlib.util.find_spec("axolotl") is None,
        reason="Axolotl is not installed: pip install axolotl==0.19.0",
    ),
    # Axolotl and what it imports warn as they please; forking after threads warns as well.
    pytest.mark.filterwarnings("default"),
]
"""Marks for tests that call the real Axolotl."""

STOCK_AXOLOTL = [*AGAINST_AXOLOTL, pytest.mark.usefixtures("stock")]
"""Marks for tests that import the real Axolotl, with none of our patches in it."""

VERSION = importlib.metadata.version("axolotl") if importlib.util.find_spec("axolotl") else "0.0"
RELEASE = tuple(map(int, VERSION.split(".")[:2]))
"""Major and minor number of the Axolotl that is installed."""

ON_A_PROCESSOR = {"sdpa_varlen": False} if RELEASE == (0, 18) else {}
"""Keys with which a release trains without a GPU."""

TOLD_LESS = "fast-axolotl: WARNING: "
"""How the line about replacements begins where a release leaves some of them out."""

PLUGIN = "fast_axolotl.integrations.axolotl.FastAxolotlPlugin"

EQUAL_TO_STOCK = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def needs(name: str) -> pytest.MarkDecorator:
    """A mark for tests of a replacement whose functions not every release has."""
    targets = [item.target for item in REPLACEMENTS if item.name == name]
    missing = [target for target in targets if fingerprint(target) in (ABSENT, "")]
    return pytest.mark.skipif(bool(missing), reason=f"this release has no {', '.join(missing)}")


class Later:
    """A module that is imported when something is asked of it, by a test in which it is stock."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if "PYTEST_CURRENT_TEST" not in os.environ:
            # pytest collects tests, and asks every name in their modules what it is.
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def run_child(
    *command: str, folders: tuple[Path, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command that finds this package, and what else is in ``folders``, without our switches."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    variables = {"PATH": programs, **environment}
    return children.run_child(
        *command, environment=children.clean_environment(*folders, **variables), timeout=600
    )


@contextmanager
def log_lines(*names: str, level: int | None = None) -> Iterator[list[tuple[int, str]]]:
    """Level and message of all that these loggers write, handed on to the root logger or not."""
    lines: list[tuple[int, str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.levelno, record.getMessage()))

    handler, loggers = Keep(), [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        if level is not None:
            logger.setLevel(level)
    try:
        yield lines
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(before)


def config(keys: dict[str, Any]) -> Any:
    """A configuration, as Axolotl's functions take it."""
    return Later("axolotl.utils.dict").DictDefault(keys)


def byte_tokenizer(*, adds_bos: bool = False, **options: Any) -> Any:
    """A byte-level BPE of 400 tokens, as GPT-2, Llama 3 and Qwen have them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["hello world, what a day it is", "user assistant system", "Instruction Response"]
    rust.train_from_iterator(texts * 3, trainer)
    if adds_bos:
        rust.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    names = {"bos_token": "<s>", "eos_token": "</s>", **options}
    return PreTrainedTokenizerFast(tokenizer_object=rust, **names)


def word_tokenizer(**options: Any) -> Any:
    """A token for each of the words w0 to w49."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{n}": n + 4 for n in range(50)}
    rust = Tokenizer(models.WordLevel({"<u>": 0, "<s>": 1, "</s>": 2, "<p>": 3, **words}, "<u>"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>", "unk_token": "<u>"}
    return PreTrainedTokenizerFast(tokenizer_object=rust, **names, **options)


def tokenised(count: int, kind: Any = None, width: str = "int32", seed: int = 5) -> Any:
    """Few different short rows, so that many are repeated and some are empty."""
    from datasets import Dataset, Features, Sequence, Value

    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, 3, rng.integers(0, 5)).tolist() for _ in range(count)]
    columns = {
        "input_ids": ids,
        "attention_mask": [[1] * len(row) for row in ids],
        "labels": [[-100 if token == 0 else token for token in row] for row in ids],
    }
    kinds = zip(columns, (width, "int8", "int64"), strict=True)
    features = Features({name: (kind or Sequence)(Value(value)) for name, value in kinds})
    return Dataset.from_dict(columns, features=features)


def subclassed(dataset: Any) -> Any:
    """What Axolotl has after tokenising: its own kind of dataset."""
    from axolotl.datasets import TokenizedPromptDataset

    class Strategy:
        supports_batched = False

        def tokenize_prompt(self, row: dict[str, Any]) -> dict[str, Any]:
            return dict(row)

    return TokenizedPromptDataset(Strategy(), dataset)


VARIANTS: dict[str, Callable[[Any, Any], Any]] = {
    "in memory": lambda memory, disk: memory,
    "on disk": lambda memory, disk: disk,
    "shuffled": lambda memory, disk: disk.shuffle(seed=3),
    "repeated rows": lambda memory, disk: memory.select([5, 3, 3, 5, 0, 89]),
    "sliced": lambda memory, disk: disk.select(range(11, 60)),
    "shuffled and sliced": lambda memory, disk: disk.shuffle(seed=1).select(range(11, 60)),
    "concatenated": lambda memory, disk: Later("datasets").concatenate_datasets(
        [disk, memory.shuffle(seed=2), disk.select([3])]
    ),
    "chunks": lambda memory, disk: Later("datasets").Dataset(
        pa.concat_tables([memory.data.table.slice(start, 7) for start in range(0, 90, 7)])
    ),
    "large lists": lambda memory, disk: tokenised(40, Later("datasets").LargeList, "int64"),
    "subclass": lambda memory, disk: subclassed(memory),
    "one row": lambda memory, disk: memory.select([1]),
    "no rows": lambda memory, disk: memory.select([]),
}
"""The many ways in which a dataset can hold rows, made of one in memory and its copy on disk."""


def variant(name: str, folder: Path) -> Any:
    """One set of rows in one of the ways."""
    from datasets import load_from_disk

    memory = tokenised(90)
    memory.save_to_disk(str(folder / "plain"), num_shards=3)
    return VARIANTS[name](memory, load_from_disk(str(folder / "plain")))


def assert_same_dataset(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    assert ours.features == theirs.features
    assert list(ours.features) == list(theirs.features)
    assert ours._fingerprint == theirs._fingerprint
    assert (ours.format, ours.split, ours.info) == (theirs.format, theirs.split, theirs.info)
    assert (ours._indices is None) == (theirs._indices is None)
    assert ours._data.schema.equals(theirs._data.schema)
    left, right = (item.with_format("arrow")[:] for item in (ours, theirs))
    assert left.schema.equals(right.schema)
    assert repr(left.to_pylist()) == repr(right.to_pylist())
