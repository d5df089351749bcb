"""The table of replaced functions, and what each replacement depends on.

``relies_on`` names what a replacement calls or reproduces beside its target: modules where both
functions can be compared, since any change there costs no more than that; single functions where
they cannot, since there a change leaves the host's own function in place. ``self_check`` says how they
are compared. ``KNOWN`` has the fingerprints of all these sources; ``tools/fingerprints.py`` adds
those of the Axolotl that is installed.
"""

from __future__ import annotations

import json
from pathlib import Path

from fast_axolotl.axolotl.patching import Replacement

_UTILS = "axolotl.utils.data.utils"
_SHARED = "axolotl.utils.data.shared"
_SFT = "axolotl.utils.data.sft"
_TRAINER = "axolotl.utils.trainer"
_MULTIPACK = "axolotl.utils.samplers.multipack"
_LENGTHS = "axolotl.utils.samplers.utils"
_COLLATORS = "axolotl.utils.collators.batching"
_STREAMING = "axolotl.utils.data.streaming"
_STRATEGIES = "axolotl.prompt_strategies"
_CHAT = f"{_STRATEGIES}.chat_template"
_TOKENIZERS = "axolotl.prompt_tokenizers"


def _of(owner: str, names: str) -> tuple[str, ...]:
    """Functions of a module, which ends with a colon, or methods of a class."""
    return tuple(f"{owner}{'' if owner.endswith(':') else '.'}{name}" for name in names.split())


_HF_DATASET = "datasets.arrow_dataset"
_MAP = (_HF_DATASET, "datasets.arrow_writer", "datasets.fingerprint")
"""Hugging Face's ``map`` and ``filter``, with their caches and fingerprints."""

_TOKENIZER = (
    "transformers.tokenization_utils_base",
    "transformers.tokenization_utils_tokenizers",
)
_TEMPLATES = ("transformers.tokenization_utils_base", "transformers.utils.chat_template_utils")
_CHAT_ROWS = (*_TOKENIZER, *_TEMPLATES, _CHAT, "axolotl.utils.dict")
"""A conversation on its way to tokens and labels."""

_COLLATION = (_COLLATORS, "transformers.tokenization_utils_base", "transformers.utils.generic")
_PACKS = (_MULTIPACK, "torch.utils.data.sampler")

STREAMS = _of(
    "datasets.iterable_dataset:",
    "ArrowExamplesIterable BufferShuffledExamplesIterable FilteredExamplesIterable "
    "FormattedExamplesIterable IterableDataset.__init__ IterableDataset.filter "
    "IterableDataset.map IterableDataset.shuffle IterableDataset.skip MappedExamplesIterable "
    "RebatchedArrowExamplesIterable SkipExamplesIterable _BaseExamplesIterable "
    "_batch_to_examples _examples_to_batch",
)
"""Hugging Face's streams: what is exchanged in them, and what is put around them."""


def _replace(name: str, target: str, ours: str, *relies_on: str, **options: str) -> Replacement:
    ours = f"fast_axolotl.{ours}" if "." in ours else f"fast_axolotl.axolotl.{ours}"
    return Replacement(name=name, target=target, ours=ours, relies_on=relies_on, **options)


REPLACEMENTS: tuple[Replacement, ...] = (
    _replace(
        "dedupe",
        f"{_UTILS}:deduplicate_and_log_datasets",
        "data:deduplicate_and_log_datasets",
        *(_UTILS, _HF_DATASET),
        check="rows:dataset",
    ),
    _replace(
        "save",
        f"{_SHARED}:save_preprocessed_dataset",
        "data:save_preprocessed_dataset",
        *(_SHARED, "axolotl.utils.datasets", *_MAP),
        check="folder:dataset",
    ),
    _replace(
        "lengths",
        f"{_LENGTHS}:get_dataset_lengths",
        "data:get_dataset_lengths",
        _HF_DATASET,
        check="rows:dataset",
    ),
    _replace(
        "packing",
        f"{_TRAINER}:process_datasets_for_packing",
        "passes:process_datasets_for_packing",
        *(_TRAINER, *_MAP),
        check="rows:train_dataset",
    ),
    _replace(
        "long",
        f"{_UTILS}:handle_long_seq_in_dataset",
        "passes:handle_long_seq_in_dataset",
        *(_UTILS, _TRAINER, _LENGTHS, *_MAP),
        check="rows:dataset",
    ),
    _replace(
        "sampler",
        f"{_MULTIPACK}:MultipackBatchSampler.generate_batches",
        "sampler:generate_batches",
        *_PACKS,
        check="state:self",
    ),
    _replace(
        "sampler",
        f"{_MULTIPACK}:MultipackBatchSampler.__len__",
        "sampler:batches_length",
        *_of(f"{_MULTIPACK}:", "pack_parallel pack_group _process_group"),
        *_of(f"{_MULTIPACK}:MultipackBatchSampler", "__init__ generate_batches gather_len_batches"),
        *_of("torch.utils.data.sampler:RandomSampler", "__iter__ num_samples"),
        "torch.utils.data.sampler:SequentialSampler.__iter__",
    ),
    *(
        _replace(
            "collators",
            f"{_COLLATORS}:{kind}DataCollatorForSeq2Seq.__call__",
            f"collators:{ours}",
            *_COLLATION,
            check="rows:features",
        )
        for kind, ours in (
            ("BatchSampler", "collate_packs"),
            ("V2BatchSampler", "collate_packs_v2"),
            ("PretrainingBatchSampler", "collate_pretraining"),
        )
    ),
    _replace(
        "chat",
        f"{_CHAT}:ChatTemplateStrategy.tokenize_prompt",
        "chat:tokenize_prompt",
        *_CHAT_ROWS,
        check="rows:prompt",
    ),
    _replace(
        "tokenize",
        "axolotl.datasets:TokenizedPromptDataset.process",
        "prompts:process",
        *(*_CHAT_ROWS, _TOKENIZERS, f"{_STRATEGIES}.completion", f"{_STRATEGIES}.alpaca_w_system"),
        *(_HF_DATASET, "datasets.arrow_writer"),
        check="in order:dataset",
    ),
    _replace(
        "rl",
        "axolotl.utils.data.rl:_map_dataset",
        "prompts:map_dataset",
        *(*_TEMPLATES, f"{_STRATEGIES}.dpo.chat_template", f"{_STRATEGIES}.orpo.chat_template"),
        *("axolotl.utils.chat_templates.base", "datasets.formatting.formatting", *_MAP),
        check="in order:dataset",
    ),
    _replace(
        "stream",
        f"{_SFT}:_load_streaming_dataset",
        "streaming:load_streaming_dataset",
        *(f"{_STREAMING}:wrap_streaming_dataset", f"{_SFT}:_extract_pretraining_config"),
        *STREAMS,
        proves="datasets",
    ),
    _replace(
        "stream",
        f"{_SFT}:_load_and_process_single_dataset",
        "streaming:load_and_process_single_dataset",
        *(f"{_SHARED}:load_dataset_with_config", f"{_SFT}:_parse_dataset_type", *STREAMS),
        proves="datasets",
    ),
    _replace(
        "stream",
        f"{_SHARED}:merge_datasets",
        "streaming:merge_datasets",
        *STREAMS,
        proves="datasets",
    ),
    *(
        _replace(
            f"trl-{trainer.lower()}",
            f"trl.trainer.{trainer.lower()}_trainer:{trainer}Trainer._prepare_dataset",
            "trl_datasets:prepare_dataset",
            *("trl.data_utils", *_MAP, *_TOKENIZER, *_TEMPLATES),
            check="rows:dataset",
        )
        for trainer in ("SFT", "DPO", "KTO", "Reward")
    ),
    _replace(
        "resume",
        "transformers.trainer:Trainer._init_training_state",
        "resume:init_training_state",
        *_of("transformers.trainer:Trainer", "_run_epoch _inner_training_loop"),
        "accelerate.data_loader:DataLoaderShard.__iter__",
        proves="transformers",
    ),
    _replace(
        "keys",
        "axolotl.cli.config:prepare_plugins",
        "integrations.axolotl_plugin:prepare_plugins",
    ),
)
"""In the order in which a run meets them, more or less."""

KNOWN = {
    name: tuple(versions)
    for name, versions in json.loads(
        Path(__file__).with_name("fingerprints.json").read_text(encoding="utf-8")
    ).items()
}
"""Module, or ``module:qualname`` → the fingerprints of the sources that ours was proven equal to."""

RELIED_ON = sorted({name for item in REPLACEMENTS for name in (item.target, *item.relies_on)})
"""Every function and module of the hosts whose behaviour matters."""
