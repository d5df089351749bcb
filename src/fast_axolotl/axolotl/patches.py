"""The table: which function of Axolotl is replaced by which of ours, and what ours relies on.

``relies_on`` names what a replacement calls or reproduces beside its target: a change there takes
the replacement out as much as a change of the target itself. ``KNOWN`` has the fingerprints of all
these sources; ``tools/fingerprints.py`` adds those of the Axolotl that is installed.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from fast_axolotl.axolotl.patching import Reliance, Replacement, Unfamiliar, mismatch

_OURS = "fast_axolotl.axolotl"
_UTILS = "axolotl.utils.data.utils"
_SHARED = "axolotl.utils.data.shared"
_SFT = "axolotl.utils.data.sft"
_TRAINER = "axolotl.utils.trainer"
_MULTIPACK = "axolotl.utils.samplers.multipack"
_LENGTHS = "axolotl.utils.samplers.utils"
_COLLATORS = "axolotl.utils.collators.batching"
_FETCHER = "axolotl.monkeypatch.data.batch_dataset_fetcher"
_STREAMING = "axolotl.utils.data.streaming"
_CHAT = "axolotl.prompt_strategies.chat_template"
_COMPLETION = "axolotl.prompt_strategies.completion"
_ORPO = "axolotl.prompt_strategies.orpo.chat_template"
_REWARD = "axolotl.prompt_strategies.bradley_terry.chat_template"
_TOKENIZERS = "axolotl.prompt_tokenizers"
_RL = "axolotl.utils.data.rl"
_CONFIG = "axolotl.cli.config"

_TRL = "trl.trainer"
_TRL_DATA = "trl.data_utils"

_DATASET = "datasets.arrow_dataset:Dataset"
_WRITER = "datasets.arrow_writer:ArrowWriter"
_FORMATTING = "datasets.formatting.formatting"
_TOKENIZER_BASE = "transformers.tokenization_utils_base:PreTrainedTokenizerBase"
_TOKENIZER_FAST = "transformers.tokenization_utils_tokenizers:TokenizersBackend"


def _methods(owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{owner}.{name}" for name in names)


_WRITES = _methods(_WRITER, "write_table", "write_batch", "_write_table", "_write_batch")
_MAP_AND_FILTER = (
    *_methods(_DATASET, "map", "_map_single", "filter", "remove_columns", "_get_cache_file_path"),
    "datasets.arrow_dataset:transmit_format",
    "datasets.arrow_dataset:get_indices_from_mask_function",
    "datasets.arrow_dataset:_concatenate_map_style_datasets",
    "datasets.fingerprint:update_fingerprint",
    "datasets.fingerprint:format_kwargs_for_fingerprint",
    *_WRITES,
)
"""Hugging Face's ``map`` and ``filter``, with their caches and fingerprints."""

_TOKENIZER = (
    *_methods(
        _TOKENIZER_BASE,
        "__call__",
        "_get_padding_truncation_strategies",
        "_eventual_warn_about_too_long_sequence",
        "__getattr__",
        "convert_tokens_to_ids",
    ),
    *_methods(_TOKENIZER_FAST, "_encode_plus", "_convert_encoding", "set_truncation_and_padding"),
)
"""A call of a tokenizer."""

_TEMPLATES = (
    *_methods(_TOKENIZER_BASE, "apply_chat_template", "get_chat_template", "special_tokens_map"),
    "transformers.utils.chat_template_utils:render_jinja_template",
    "transformers.utils.chat_template_utils:_alias_reasoning_fields",
    "transformers.utils.chat_template_utils:_plain_template_data",
    "transformers.utils.chat_template_utils:_compile_jinja_template",
    "transformers.utils.chat_template_utils:_cached_compile_jinja_template",
)
"""A conversation on its way to text."""

_CHAT_ROWS = (
    *_TOKENIZER,
    *_TEMPLATES,
    *_methods(
        f"{_CHAT}:ChatTemplateStrategy",
        "__init__",
        "supports_batched",
        "is_prompt_batched",
        "_tokenize_single_prompt",
        "find_first_eos_token",
        "find_first_eot_token",
        "_build_turn_locator",
        "_diff_char_span",
        "_find_turn_from_text",
        "_build_dummy_turn",
        "find_turn",
        "_convert_content_parts",
        "get_conversation_thread",
        "transform_message",
        "_get_tools",
        "_get_messages",
    ),
    *_methods(
        f"{_CHAT}:ChatTemplatePrompter",
        "__init__",
        "build_prompt",
        "build_prompt_text",
        "get_offsets_for_train_detail",
        "adjust_train_details",
    ),
    "axolotl.utils.dict:remove_none_values",
)
"""A conversation on its way to tokens and labels."""

_COMPLETIONS = (
    *_TOKENIZER,
    f"{_TOKENIZERS}:PromptTokenizingStrategy._tokenize",
    f"{_COMPLETION}:CompletionPromptTokenizingStrategy.parse_instruction_fields",
    f"{_COMPLETION}:CompletionPromptTokenizingStrategy._build_full_prompt",
    f"{_COMPLETION}:CompletionPrompter.build_prompt",
)
"""A text on its way to tokens and labels."""

_BATCHES = (
    f"{_MULTIPACK}:MultipackBatchSampler.__init__",
    f"{_MULTIPACK}:pack_parallel",
    f"{_MULTIPACK}:pack_group",
    f"{_MULTIPACK}:_process_group",
    f"{_MULTIPACK}:allocate_sequentially",
    "torch.utils.data.sampler:RandomSampler.__iter__",
    "torch.utils.data.sampler:RandomSampler.num_samples",
    "torch.utils.data.sampler:SequentialSampler.__iter__",
)
"""How the sampler packs, and how it draws."""

_PLAIN_COLLATOR = f"{_COLLATORS}:DataCollatorForSeq2Seq.__call__"
_PACK_COLLATOR = f"{_COLLATORS}:BatchSamplerDataCollatorForSeq2Seq.__call__"
_V2_COLLATOR = f"{_COLLATORS}:V2BatchSamplerDataCollatorForSeq2Seq.__call__"
_PRETRAINING_COLLATOR = f"{_COLLATORS}:PretrainingBatchSamplerDataCollatorForSeq2Seq.__call__"

_PADDING = (
    *_methods(_TOKENIZER_BASE, "pad", "_pad", "_get_padding_truncation_strategies"),
    "transformers.tokenization_utils_base:BatchEncoding.__init__",
    "transformers.tokenization_utils_base:BatchEncoding.convert_to_tensors",
    "transformers.utils.generic:to_py_obj",
)
"""A tokenizer's ``pad``, and the batch it makes."""

_STREAMS = (
    *(
        f"datasets.iterable_dataset:{name}"
        for name in (
            "ArrowExamplesIterable",
            "BufferShuffledExamplesIterable",
            "FilteredExamplesIterable",
            "FormattedExamplesIterable",
            "IterableDataset.__init__",
            "IterableDataset.filter",
            "IterableDataset.map",
            "IterableDataset.shuffle",
            "IterableDataset.skip",
            "MappedExamplesIterable",
            "RebatchedArrowExamplesIterable",
            "SkipExamplesIterable",
            "_BaseExamplesIterable",
            "_batch_to_examples",
            "_examples_to_batch",
        )
    ),
    "datasets.packaged_modules.arrow.arrow:Arrow",
    "datasets.packaged_modules.json.json:Json",
    "datasets.packaged_modules.parquet.parquet:Parquet",
    "datasets.packaged_modules.text.text:Text",
    "datasets.utils.file_utils:_prepare_path_and_storage_options",
    "datasets.utils.sharding:_merge_gen_kwargs",
    "datasets.utils.sharding:_shuffle_gen_kwargs",
    "datasets.utils.sharding:_split_gen_kwargs",
)
"""Hugging Face's streams: what is exchanged in them, and what is put around them."""

STRATEGIES = {
    "chat_template:ChatTemplateStrategy": (
        *_CHAT_ROWS,
        f"{_CHAT}:ChatTemplateStrategy.tokenize_prompt",
    ),
    "completion:CompletionPromptTokenizingStrategy": (
        *_COMPLETIONS,
        f"{_COMPLETION}:CompletionPromptTokenizingStrategy.tokenize_prompt",
    ),
    "input_output:RawInputOutputStrategy": (
        "axolotl.prompt_strategies.input_output:RawInputOutputStrategy.tokenize_prompt",
    ),
    "stepwise_supervised:StepwiseSupervisedPromptTokenizingStrategy": (
        "axolotl.prompt_strategies.stepwise_supervised:"
        "StepwiseSupervisedPromptTokenizingStrategy.tokenize_prompt",
    ),
    "orpo.chat_template:ORPOTokenizingStrategy": (
        *_TEMPLATES,
        f"{_ORPO}:ORPOTokenizingStrategy.tokenize_prompt",
        *_methods(f"{_ORPO}:ORPOPrompter", "__init__", "build_prompt"),
        f"{_TOKENIZER_BASE}.encode",
    ),
    "bradley_terry.chat_template:BTChatTemplateStrategy": (
        *_CHAT_ROWS,
        f"{_REWARD}:BTChatTemplateStrategy",
    ),
    "instructions": (
        f"{_TOKENIZERS}:PromptTokenizingStrategy._tokenize",
        f"{_TOKENIZERS}:InstructionPromptTokenizingStrategy.tokenize_prompt",
        "axolotl.prompt_strategies.alpaca_w_system:"
        "InstructionWSystemPromptTokenizingStrategy.tokenize_prompt",
    ),
}
"""What ``tokenize`` relies on for each of Axolotl's strategies, beside what it does for all."""

_TRL_ROWS = (
    f"{_TRL_DATA}:_tokenize",
    f"{_TRL_DATA}:is_conversational",
    f"{_TRL_DATA}:extract_prompt",
    *_MAP_AND_FILTER,
    "datasets.arrow_writer:OptimizedTypedSequence.__init__",
    *_TOKENIZER,
    *_methods(_TOKENIZER_BASE, "apply_chat_template", "get_chat_template", "special_tokens_map"),
    "transformers.utils.chat_template_utils:render_jinja_template",
    "transformers.utils.chat_template_utils:_compile_jinja_template",
    "transformers.utils.chat_template_utils:_cached_compile_jinja_template",
)
"""A row of TRL's trainers on its way to tokens."""

REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement(
        name="dedupe",
        target=f"{_UTILS}:_deduplicate_dataset",
        ours=f"{_OURS}.data:deduplicate_dataset",
        relies_on=(
            f"{_UTILS}:sha256",
            f"{_UTILS}:deduplicate_and_log_datasets",
            *_methods(_DATASET, "select", "__iter__"),
        ),
    ),
    Replacement(
        name="save",
        target=f"{_SHARED}:save_preprocessed_dataset",
        ours=f"{_OURS}.data:save_preprocessed_dataset",
        relies_on=(
            f"{_SHARED}:get_prepared_dataset_path",
            f"{_SHARED}:load_preprocessed_dataset",
            "axolotl.utils.datasets:get_default_process_count",
            *_methods(
                _DATASET, "save_to_disk", "_save_to_disk_single", "_estimate_nbytes", "shard"
            ),
            "datasets.arrow_writer:get_writer_batch_size_from_data_size",
            *_methods(_WRITER, "write_table", "_write_table", "finalize", "_build_schema"),
        ),
    ),
    Replacement(
        name="lengths",
        target=f"{_LENGTHS}:get_dataset_lengths",
        ours=f"{_OURS}.data:get_dataset_lengths",
        is_pure=True,
        relies_on=("datasets.arrow_dataset:Column.__iter__",),
    ),
    Replacement(
        name="packing",
        target=f"{_TRAINER}:process_datasets_for_packing",
        ours=f"{_OURS}.filters:process_datasets_for_packing",
        relies_on=(f"{_TRAINER}:add_position_ids", f"{_TRAINER}:add_length", *_MAP_AND_FILTER),
    ),
    Replacement(
        name="long",
        target=f"{_UTILS}:handle_long_seq_in_dataset",
        ours=f"{_OURS}.filters:handle_long_seq_in_dataset",
        relies_on=(
            f"{_UTILS}:_should_skip_processing",
            f"{_UTILS}:_log_dataset_stats",
            f"{_UTILS}:_build_filter_kwargs",
            f"{_UTILS}:_filter_short_sequences",
            f"{_UTILS}:_truncate_long_sequences",
            f"{_UTILS}:_drop_outside_range",
            f"{_UTILS}:keep_min_len",
            f"{_UTILS}:truncate_long_seq",
            f"{_TRAINER}:filter_sequences_by_length",
            f"{_LENGTHS}:get_dataset_lengths",
            *_MAP_AND_FILTER,
        ),
    ),
    Replacement(
        name="pack",
        target=f"{_MULTIPACK}:pack_parallel",
        ours=f"{_OURS}.sampler:pack_parallel",
        is_pure=True,
        relies_on=(f"{_MULTIPACK}:pack_group", f"{_MULTIPACK}:_process_group"),
    ),
    Replacement(
        name="sampler",
        target=f"{_MULTIPACK}:MultipackBatchSampler.generate_batches",
        ours=f"{_OURS}.sampler:generate_batches",
        is_pure=True,
        relies_on=_BATCHES,
    ),
    Replacement(
        name="sampler",
        target=f"{_MULTIPACK}:MultipackBatchSampler.__len__",
        ours=f"{_OURS}.sampler:batches_length",
        relies_on=(
            *_BATCHES,
            f"{_MULTIPACK}:MultipackBatchSampler.generate_batches",
            f"{_MULTIPACK}:MultipackBatchSampler.gather_len_batches",
        ),
    ),
    Replacement(
        name="collators",
        target=_PLAIN_COLLATOR,
        ours=f"{_OURS}.collators:collate",
        is_pure=True,
        relies_on=_PADDING,
    ),
    Replacement(
        name="collators",
        target=_PACK_COLLATOR,
        ours=f"{_OURS}.collators:collate_packs",
        is_pure=True,
        relies_on=(_PLAIN_COLLATOR, *_PADDING),
    ),
    Replacement(
        name="collators",
        target=_V2_COLLATOR,
        ours=f"{_OURS}.collators:collate_packs_v2",
        is_pure=True,
        relies_on=(_PLAIN_COLLATOR, *_PADDING),
    ),
    Replacement(
        name="collators",
        target=_PRETRAINING_COLLATOR,
        ours=f"{_OURS}.collators:collate_pretraining",
        is_pure=True,
        relies_on=(
            _PLAIN_COLLATOR,
            f"{_COLLATORS}:PretrainingBatchSamplerDataCollatorForSeq2Seq.__init__",
            *_PADDING,
        ),
    ),
    Replacement(
        name="fetch",
        target=f"{_FETCHER}:_MapDatasetFetcher.fetch",
        ours=f"{_OURS}.collators:fetch",
        is_pure=True,
        relies_on=(
            _PLAIN_COLLATOR,
            _PACK_COLLATOR,
            _V2_COLLATOR,
            *_PADDING,
            *_methods(_DATASET, "__getitem__", "__getitems__", "_getitem"),
            f"{_FORMATTING}:query_table",
            f"{_FORMATTING}:_query_table",
            f"{_FORMATTING}:_query_table_with_indices_mapping",
            f"{_FORMATTING}:format_table",
            f"{_FORMATTING}:PythonFormatter.format_batch",
            f"{_FORMATTING}:PythonArrowExtractor.extract_batch",
            "datasets.table:IndexedTableMixin.fast_gather",
        ),
    ),
    Replacement(
        name="spans",
        target=f"{_CHAT}:ChatTemplateStrategy._diff_char_span",
        ours=f"{_OURS}.chat:diff_char_span",
        is_pure=True,
    ),
    Replacement(
        name="chat",
        target=f"{_CHAT}:ChatTemplateStrategy.tokenize_prompt",
        ours=f"{_OURS}.chat:tokenize_prompt",
        is_pure=True,
        relies_on=_CHAT_ROWS,
    ),
    Replacement(
        name="completion",
        target=f"{_COMPLETION}:CompletionPromptTokenizingStrategy.tokenize_prompt",
        ours=f"{_OURS}.prompts:tokenize_completions",
        is_pure=True,
        relies_on=_COMPLETIONS,
    ),
    Replacement(
        name="tokenize",
        target="axolotl.datasets:TokenizedPromptDataset.process",
        ours=f"{_OURS}.prompts:process",
        relies_on=(
            *_TOKENIZER,
            *_WRITES,
            "datasets.arrow_writer:OptimizedTypedSequence.__init__",
            "datasets.arrow_dataset:Dataset._map_single",
        ),
    ),
    Replacement(
        name="rl",
        target=f"{_RL}:_map_dataset",
        ours=f"{_OURS}.preferences:map_dataset",
        relies_on=(
            *_TEMPLATES,
            "axolotl.prompt_strategies.dpo.chat_template:default",
            "axolotl.prompt_strategies.dpo.chat_template:argilla_chat",
            f"{_ORPO}:argilla",
            "axolotl.utils.chat_templates.base:get_chat_template",
            *_methods(_DATASET, "map", "_map_single", "_get_cache_file_path"),
            "datasets.fingerprint:update_fingerprint",
            *_methods(f"{_FORMATTING}:LazyRow", "format"),
            *_methods(f"{_FORMATTING}:LazyDict", "__init__", "__getitem__", "__setitem__"),
            *_methods(_WRITER, "write", "write_examples_on_file", "write_batch"),
        ),
    ),
    Replacement(
        name="rl",
        target=f"{_RL}:_drop_long_sequences",
        ours=f"{_OURS}.tokenizers:drop_long_sequences",
        is_pure=True,
        relies_on=(*_TOKENIZER, "axolotl.utils.schemas.enums:RLType"),
    ),
    Replacement(
        name="encode",
        target=f"{_STREAMING}:encode_streaming",
        ours=f"{_OURS}.encoders:encode_streaming",
        is_pure=True,
    ),
    Replacement(
        name="encode",
        target=f"{_STREAMING}:encode_packed_streaming",
        ours=f"{_OURS}.encoders:encode_packed_streaming",
        is_pure=True,
        relies_on=(
            *_BATCHES,
            f"{_MULTIPACK}:MultipackBatchSampler.generate_batches",
            f"{_MULTIPACK}:MultipackBatchSampler.__iter__",
            f"{_TRAINER}:process_pretraining_datasets_for_packing",
            f"{_TRAINER}:filter_sequences_by_length",
            f"{_TRAINER}:add_position_ids",
            f"{_LENGTHS}:get_dataset_lengths",
            _PRETRAINING_COLLATOR,
            f"{_COLLATORS}:PretrainingBatchSamplerDataCollatorForSeq2Seq.__init__",
            _PLAIN_COLLATOR,
            *_PADDING,
        ),
    ),
    Replacement(
        name="stream",
        target=f"{_SFT}:_load_streaming_dataset",
        ours=f"{_OURS}.streaming:load_streaming_dataset",
        relies_on=(
            f"{_STREAMING}:wrap_streaming_dataset",
            f"{_SFT}:_extract_pretraining_config",
            *_STREAMS,
        ),
    ),
    Replacement(
        name="stream",
        target=f"{_SFT}:_load_and_process_single_dataset",
        ours=f"{_OURS}.streaming:load_and_process_single_dataset",
        relies_on=(
            f"{_SHARED}:load_dataset_with_config",
            f"{_SFT}:_parse_dataset_type",
            *_STREAMS,
        ),
    ),
    Replacement(
        name="stream",
        target=f"{_SHARED}:merge_datasets",
        ours=f"{_OURS}.streaming:merge_datasets",
        relies_on=_STREAMS,
    ),
    *(
        Replacement(
            name=f"trl-{trainer.lower()}",
            target=f"{_TRL}.{trainer.lower()}_trainer:{trainer}Trainer._prepare_dataset",
            ours=f"{_OURS}.trl_datasets:prepare_dataset",
            relies_on=_TRL_ROWS,
        )
        for trainer in ("SFT", "DPO", "KTO", "Reward")
    ),
    Replacement(
        name="resume",
        target="transformers.trainer:Trainer._init_training_state",
        ours=f"{_OURS}.resume:init_training_state",
        relies_on=(
            *_methods("transformers.trainer:Trainer", "_run_epoch", "_inner_training_loop"),
            *_methods("accelerate.data_loader:DataLoaderShard", "__iter__"),
            *_methods("accelerate.data_loader:DataLoaderDispatcher", "__iter__", "_fetch_batches"),
        ),
    ),
    Replacement(
        name="resume",
        target="accelerate.data_loader:skip_first_batches",
        ours=f"{_OURS}.resume:skip_first_batches",
    ),
    Replacement(
        name="keys",
        target=f"{_CONFIG}:prepare_plugins",
        ours="fast_axolotl.integrations.axolotl_plugin:prepare_plugins",
    ),
)
"""In the order in which a run meets them, more or less."""

KNOWN = {
    name: tuple(versions)
    for name, versions in json.loads(
        Path(__file__).with_name("fingerprints.json").read_text(encoding="utf-8")
    ).items()
}
"""``module:qualname`` → the fingerprints of the sources that ours was proven equal to."""

RELIED_ON = sorted(
    {name for item in REPLACEMENTS for name in (item.target, *item.relies_on)}.union(
        *STRATEGIES.values()
    )
)
"""Every function of the hosts whose behaviour matters."""


def require_strategy(name: str) -> None:
    """Unfamiliar, unless a strategy of Axolotl's is one that ours was proven equal to."""
    reason, reliance = _strategy(name)
    if reason:
        raise Unfamiliar(reason)
    reliance.check()


@cache
def _strategy(name: str) -> tuple[str, Reliance]:
    names = STRATEGIES[name]
    return mismatch(names, KNOWN), Reliance(names, "axolotl.datasets")
