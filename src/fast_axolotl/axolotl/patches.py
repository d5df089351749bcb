"""The table: which function of Axolotl is replaced by which of ours, and what ours relies on.

``relies_on`` names what a replacement calls or reproduces beside its target: a change there takes
the replacement out as much as a change of the target itself. ``KNOWN`` has the fingerprints of all
these sources; ``tools/fingerprints.py`` adds those of the Axolotl that is installed.
"""

from __future__ import annotations

from fast_axolotl.axolotl.patching import Replacement

__all__ = ["KNOWN", "REPLACEMENTS"]

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
_TOKENIZERS = "axolotl.prompt_tokenizers"
_RL = "axolotl.utils.data.rl"
_CONFIG = "axolotl.cli.config"

_DATASET = "datasets.arrow_dataset:Dataset"
_WRITER = "datasets.arrow_writer:ArrowWriter"
_FORMATTING = "datasets.formatting.formatting"
_TOKENIZER_BASE = "transformers.tokenization_utils_base:PreTrainedTokenizerBase"
_TOKENIZER_FAST = "transformers.tokenization_utils_tokenizers:TokenizersBackend"


def _methods(owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{owner}.{name}" for name in names)


_MAP_AND_FILTER = (
    *_methods(_DATASET, "map", "_map_single", "filter", "remove_columns", "_get_cache_file_path"),
    "datasets.arrow_dataset:transmit_format",
    "datasets.arrow_dataset:get_indices_from_mask_function",
    "datasets.arrow_dataset:_concatenate_map_style_datasets",
    "datasets.fingerprint:update_fingerprint",
    "datasets.fingerprint:format_kwargs_for_fingerprint",
    *_methods(_WRITER, "write_table", "write_batch"),
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

_CHAT_ROWS = (
    *_TOKENIZER,
    *_methods(_TOKENIZER_BASE, "apply_chat_template", "get_chat_template", "special_tokens_map"),
    "transformers.utils.chat_template_utils:render_jinja_template",
    "transformers.utils.chat_template_utils:_compile_jinja_template",
    "transformers.utils.chat_template_utils:_cached_compile_jinja_template",
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
    *_methods(f"{_CHAT}:ChatTemplatePrompter", "__init__", "build_prompt", "build_prompt_text"),
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
            *_methods(_WRITER, "write_table", "finalize", "_build_schema"),
        ),
    ),
    Replacement(
        name="lengths",
        target=f"{_LENGTHS}:get_dataset_lengths",
        ours=f"{_OURS}.data:get_dataset_lengths",
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
        relies_on=(f"{_MULTIPACK}:pack_group", f"{_MULTIPACK}:_process_group"),
    ),
    Replacement(
        name="sampler",
        target=f"{_MULTIPACK}:MultipackBatchSampler.generate_batches",
        ours=f"{_OURS}.sampler:generate_batches",
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
        relies_on=_PADDING,
    ),
    Replacement(
        name="collators",
        target=_PACK_COLLATOR,
        ours=f"{_OURS}.collators:collate_packs",
        relies_on=(_PLAIN_COLLATOR, *_PADDING),
    ),
    Replacement(
        name="collators",
        target=_V2_COLLATOR,
        ours=f"{_OURS}.collators:collate_packs_v2",
        relies_on=(_PLAIN_COLLATOR, *_PADDING),
    ),
    Replacement(
        name="collators",
        target=_PRETRAINING_COLLATOR,
        ours=f"{_OURS}.collators:collate_pretraining",
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
    ),
    Replacement(
        name="chat",
        target=f"{_CHAT}:ChatTemplateStrategy.tokenize_prompt",
        ours=f"{_OURS}.chat:tokenize_prompt",
        relies_on=_CHAT_ROWS,
    ),
    Replacement(
        name="completion",
        target=f"{_COMPLETION}:CompletionPromptTokenizingStrategy.tokenize_prompt",
        ours=f"{_OURS}.prompts:tokenize_completions",
        relies_on=_COMPLETIONS,
    ),
    Replacement(
        name="tokenize",
        target="axolotl.datasets:TokenizedPromptDataset.process",
        ours=f"{_OURS}.prompts:process",
        relies_on=(
            *_CHAT_ROWS,
            *(name for name in _COMPLETIONS if name not in _TOKENIZER),
            f"{_CHAT}:ChatTemplateStrategy.tokenize_prompt",
            f"{_COMPLETION}:CompletionPromptTokenizingStrategy.tokenize_prompt",
            f"{_TOKENIZERS}:InstructionPromptTokenizingStrategy.tokenize_prompt",
            "axolotl.prompt_strategies.alpaca_w_system:"
            "InstructionWSystemPromptTokenizingStrategy.tokenize_prompt",
            "datasets.arrow_writer:ArrowWriter.write_batch",
            "datasets.arrow_writer:ArrowWriter.write_table",
            "datasets.arrow_writer:OptimizedTypedSequence.__init__",
            "datasets.arrow_dataset:Dataset._map_single",
        ),
    ),
    Replacement(
        name="rl",
        target=f"{_RL}:_drop_long_sequences",
        ours=f"{_OURS}.tokenizers:drop_long_sequences",
        relies_on=(*_TOKENIZER, "axolotl.utils.schemas.enums:RLType"),
    ),
    Replacement(
        name="encode",
        target=f"{_STREAMING}:encode_streaming",
        ours=f"{_OURS}.encoders:encode_streaming",
    ),
    Replacement(
        name="encode",
        target=f"{_STREAMING}:encode_packed_streaming",
        ours=f"{_OURS}.encoders:encode_packed_streaming",
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

_FINGERPRINTS = {
    "accelerate.data_loader:DataLoaderDispatcher.__iter__": "92b5f19f337dbc12",
    "accelerate.data_loader:DataLoaderDispatcher._fetch_batches": "6b392913d80d7291",
    "accelerate.data_loader:DataLoaderShard.__iter__": "bbf187b7d568b393",
    "accelerate.data_loader:skip_first_batches": "a4a40cc4dba3a82b",
    "axolotl.cli.config:prepare_plugins": "89c433f65d3b6812",
    "axolotl.datasets:TokenizedPromptDataset.process": "765557d487ad8fe3",
    "axolotl.monkeypatch.data.batch_dataset_fetcher:_MapDatasetFetcher.fetch": "8d352d104fc07503",
    "axolotl.prompt_strategies.alpaca_w_system:InstructionWSystemPromptTokenizingStrategy.tokenize_prompt": "c66aeda268afb918",
    "axolotl.prompt_strategies.chat_template:ChatTemplatePrompter.__init__": "b00fcc5a8622bc78",
    "axolotl.prompt_strategies.chat_template:ChatTemplatePrompter.build_prompt": "6740f25bd2874e66",
    "axolotl.prompt_strategies.chat_template:ChatTemplatePrompter.build_prompt_text": "b2355b21bef7a93a",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy.__init__": "8ad0151bac2c224b",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy._build_dummy_turn": "d9c54520107157e1",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy._build_turn_locator": "346edda59ddaeb4d",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy._convert_content_parts": "4262ace86a7cbecc",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy._diff_char_span": "bb094b1fdc3813c6",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy._find_turn_from_text": "7ce1007ab81ba37d",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy._get_messages": "a1687fde4caa78ff",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy._get_tools": "6ae60de79899290d",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy._tokenize_single_prompt": "ac12655fa46ebb1b",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy.find_first_eos_token": "d90f4d465fd7a8c1",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy.find_first_eot_token": "f10411675b66be67",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy.find_turn": "32997da23d0cfbd2",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy.get_conversation_thread": "bcf6f3f62bb5fe06",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy.is_prompt_batched": "6bc832f1a0831db4",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy.supports_batched": "102a2584b843ff93",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy.tokenize_prompt": "c013c9f35312c483",
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy.transform_message": "115aa73618cd81f5",
    "axolotl.prompt_strategies.completion:CompletionPromptTokenizingStrategy._build_full_prompt": "6b436ca19c994c66",
    "axolotl.prompt_strategies.completion:CompletionPromptTokenizingStrategy.parse_instruction_fields": "d454c3758e93bbb3",
    "axolotl.prompt_strategies.completion:CompletionPromptTokenizingStrategy.tokenize_prompt": "62a43d4e2494f904",
    "axolotl.prompt_strategies.completion:CompletionPrompter.build_prompt": "6d0bddbc62f3fe3a",
    "axolotl.prompt_tokenizers:InstructionPromptTokenizingStrategy.tokenize_prompt": "067c5e1ded1b28e1",
    "axolotl.prompt_tokenizers:PromptTokenizingStrategy._tokenize": "ff742768d10f76bf",
    "axolotl.utils.collators.batching:BatchSamplerDataCollatorForSeq2Seq.__call__": "594a23a24206f146",
    "axolotl.utils.collators.batching:DataCollatorForSeq2Seq.__call__": "0d33ae582b150474",
    "axolotl.utils.collators.batching:PretrainingBatchSamplerDataCollatorForSeq2Seq.__call__": "fa938b1e190e440c",
    "axolotl.utils.collators.batching:PretrainingBatchSamplerDataCollatorForSeq2Seq.__init__": "49facc9082f75ead",
    "axolotl.utils.collators.batching:V2BatchSamplerDataCollatorForSeq2Seq.__call__": "8c243e1017b15892",
    "axolotl.utils.data.rl:_drop_long_sequences": "478bcb5db99541c2",
    "axolotl.utils.data.sft:_extract_pretraining_config": "1373801f49f849c6",
    "axolotl.utils.data.sft:_load_and_process_single_dataset": "cf63f84e1c868abd",
    "axolotl.utils.data.sft:_load_streaming_dataset": "a1bc6d3ebdb3a94a",
    "axolotl.utils.data.sft:_parse_dataset_type": "e512d9346236ca3b",
    "axolotl.utils.data.shared:get_prepared_dataset_path": "2cb2dd5291f91598",
    "axolotl.utils.data.shared:load_dataset_with_config": "13d3e2e261dcec48",
    "axolotl.utils.data.shared:load_preprocessed_dataset": "14379039decc3502",
    "axolotl.utils.data.shared:merge_datasets": "2aceb6693979259c",
    "axolotl.utils.data.shared:save_preprocessed_dataset": "3a139c93a443cb3f",
    "axolotl.utils.data.streaming:encode_packed_streaming": "6d63f7f24fc4eabc",
    "axolotl.utils.data.streaming:encode_streaming": "609c86a13d1ebb8c",
    "axolotl.utils.data.streaming:wrap_streaming_dataset": "91c2f57b0b3f2c6a",
    "axolotl.utils.data.utils:_build_filter_kwargs": "91e90aa161564d4b",
    "axolotl.utils.data.utils:_deduplicate_dataset": "f605f227f8fe142c",
    "axolotl.utils.data.utils:_drop_outside_range": "20f33d60a7f103a8",
    "axolotl.utils.data.utils:_filter_short_sequences": "dd085eff59e2d625",
    "axolotl.utils.data.utils:_log_dataset_stats": "2e65d6e9a458716d",
    "axolotl.utils.data.utils:_should_skip_processing": "944ce136f89bca29",
    "axolotl.utils.data.utils:_truncate_long_sequences": "cee828b05feadc90",
    "axolotl.utils.data.utils:deduplicate_and_log_datasets": "862043de403e8aa5",
    "axolotl.utils.data.utils:handle_long_seq_in_dataset": "b6878bcb7b5f3020",
    "axolotl.utils.data.utils:keep_min_len": "949740604313be76",
    "axolotl.utils.data.utils:sha256": "ddb60f6fa918dcda",
    "axolotl.utils.data.utils:truncate_long_seq": "d05d39a7635073f5",
    "axolotl.utils.datasets:get_default_process_count": "a183e28820cf3957",
    "axolotl.utils.dict:remove_none_values": "6a962d80b609d604",
    "axolotl.utils.samplers.multipack:MultipackBatchSampler.__init__": "fc9111aa8e42b02c",
    "axolotl.utils.samplers.multipack:MultipackBatchSampler.__iter__": "61e1e5b4367df61b",
    "axolotl.utils.samplers.multipack:MultipackBatchSampler.__len__": "1bad9f034155085a",
    "axolotl.utils.samplers.multipack:MultipackBatchSampler.gather_len_batches": "ffb01595d2be6057",
    "axolotl.utils.samplers.multipack:MultipackBatchSampler.generate_batches": "ccadc141945dc4a3",
    "axolotl.utils.samplers.multipack:_process_group": "e17c99fbbe9f4663",
    "axolotl.utils.samplers.multipack:allocate_sequentially": "52300e40041c1128",
    "axolotl.utils.samplers.multipack:pack_group": "205f13c763c8f4d3",
    "axolotl.utils.samplers.multipack:pack_parallel": "42c360d60acc4c81",
    "axolotl.utils.samplers.utils:get_dataset_lengths": "58ebaeb15457bd28",
    "axolotl.utils.schemas.enums:RLType": "794559b0b524f12c",
    "axolotl.utils.trainer:add_length": "47469f19facd8d87",
    "axolotl.utils.trainer:add_position_ids": "d52441ba5fcb47fe",
    "axolotl.utils.trainer:filter_sequences_by_length": "046cd3021859e92a",
    "axolotl.utils.trainer:process_datasets_for_packing": "65b416b671e3bae2",
    "axolotl.utils.trainer:process_pretraining_datasets_for_packing": "a387b91b29c54b85",
    "datasets.arrow_dataset:Column.__iter__": "df4e3bfc0019c8da",
    "datasets.arrow_dataset:Dataset.__getitem__": "fc69f09590bca0d1",
    "datasets.arrow_dataset:Dataset.__getitems__": "41e6379cb2954966",
    "datasets.arrow_dataset:Dataset.__iter__": "5d999f20c775a447",
    "datasets.arrow_dataset:Dataset._estimate_nbytes": "2db932500afe0f00",
    "datasets.arrow_dataset:Dataset._get_cache_file_path": "ec4fdffda27a05fe",
    "datasets.arrow_dataset:Dataset._getitem": "3bf5962ff890ce92",
    "datasets.arrow_dataset:Dataset._map_single": "b3b8f6a8d212863d",
    "datasets.arrow_dataset:Dataset._save_to_disk_single": "658ff48ce81fe25a",
    "datasets.arrow_dataset:Dataset.filter": "beaef970cdbbf570",
    "datasets.arrow_dataset:Dataset.map": "c573276ffa17bc29",
    "datasets.arrow_dataset:Dataset.remove_columns": "bde38b1b4c09dcc4",
    "datasets.arrow_dataset:Dataset.save_to_disk": "80d5c3a332537161",
    "datasets.arrow_dataset:Dataset.select": "038071a2c6d51134",
    "datasets.arrow_dataset:Dataset.shard": "6a5fac29fe734042",
    "datasets.arrow_dataset:_concatenate_map_style_datasets": "63f1472d802d9db9",
    "datasets.arrow_dataset:get_indices_from_mask_function": "b2700c8e4e68397a",
    "datasets.arrow_dataset:transmit_format": "c5c41caece734d85",
    "datasets.arrow_writer:ArrowWriter._build_schema": "0a350cb62db99e59",
    "datasets.arrow_writer:ArrowWriter.finalize": "d2d77764fdc0056a",
    "datasets.arrow_writer:ArrowWriter.write_batch": "367553643d7678f8",
    "datasets.arrow_writer:ArrowWriter.write_table": "17f70fe13901e85b",
    "datasets.arrow_writer:OptimizedTypedSequence.__init__": "5bd174809ef1902c",
    "datasets.fingerprint:format_kwargs_for_fingerprint": "245543f2057f3372",
    "datasets.fingerprint:update_fingerprint": "63db0161cbcf0910",
    "datasets.formatting.formatting:PythonArrowExtractor.extract_batch": "73c10287e324282c",
    "datasets.formatting.formatting:PythonFormatter.format_batch": "cec595f7a28bbc09",
    "datasets.formatting.formatting:_query_table": "812e0da7b2bb39b9",
    "datasets.formatting.formatting:_query_table_with_indices_mapping": "2fd7f99f2271f9ed",
    "datasets.formatting.formatting:format_table": "bafbea9fcf9cfbf9",
    "datasets.formatting.formatting:query_table": "da38bd537b3187ae",
    "datasets.iterable_dataset:ArrowExamplesIterable": "08c7f5f0bb6889cc",
    "datasets.iterable_dataset:BufferShuffledExamplesIterable": "3baa15984a191e95",
    "datasets.iterable_dataset:FilteredExamplesIterable": "2b32c6ca11806af0",
    "datasets.iterable_dataset:FormattedExamplesIterable": "a81bee6bd84fba85",
    "datasets.iterable_dataset:IterableDataset.__init__": "c1e3209b5d364c15",
    "datasets.iterable_dataset:IterableDataset.filter": "f67815a0b20e9950",
    "datasets.iterable_dataset:IterableDataset.map": "53edb9692ec078a0",
    "datasets.iterable_dataset:IterableDataset.shuffle": "f413b0cc7c0dd02b",
    "datasets.iterable_dataset:IterableDataset.skip": "3afea073fd22bd0b",
    "datasets.iterable_dataset:MappedExamplesIterable": "0513f0ec8ac9a5fc",
    "datasets.iterable_dataset:RebatchedArrowExamplesIterable": "97887de7f3b08727",
    "datasets.iterable_dataset:SkipExamplesIterable": "ad5c5113a52b2c15",
    "datasets.iterable_dataset:_BaseExamplesIterable": "c9cd9a0e21a50450",
    "datasets.iterable_dataset:_batch_to_examples": "abec25e9e91d9c16",
    "datasets.iterable_dataset:_examples_to_batch": "22ab62edc64aefa2",
    "datasets.packaged_modules.arrow.arrow:Arrow": "42412f8329b9f9ed",
    "datasets.packaged_modules.json.json:Json": "b6191f0102aac4af",
    "datasets.packaged_modules.parquet.parquet:Parquet": "68a39b2a983b4fe3",
    "datasets.packaged_modules.text.text:Text": "e812a6990b40a0a0",
    "datasets.table:IndexedTableMixin.fast_gather": "8c808d9f57799917",
    "datasets.utils.file_utils:_prepare_path_and_storage_options": "a326a315a2f58261",
    "datasets.utils.sharding:_merge_gen_kwargs": "d85b2f9858d6ed77",
    "datasets.utils.sharding:_shuffle_gen_kwargs": "2b65c945a2710b1d",
    "datasets.utils.sharding:_split_gen_kwargs": "2c173bba6bb626a2",
    "torch.utils.data.sampler:RandomSampler.__iter__": "3e7e349920b09a00",
    "torch.utils.data.sampler:RandomSampler.num_samples": "7fa9768c1f88aeb7",
    "torch.utils.data.sampler:SequentialSampler.__iter__": "1012c87711e15b75",
    "transformers.tokenization_utils_base:BatchEncoding.__init__": "52b44e3363d0d650",
    "transformers.tokenization_utils_base:BatchEncoding.convert_to_tensors": "7d43be6c6beca3c6",
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase.__call__": "dfd1d8df55c226b7",
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase.__getattr__": "7ed80287ab0283dc",
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase._eventual_warn_about_too_long_sequence": "98e4c6f4f26fb03e",
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase._get_padding_truncation_strategies": "25b2bd7744f68d9e",
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase._pad": "a8a1a5c419dab8a7",
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase.apply_chat_template": "992886c83a362c99",
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase.convert_tokens_to_ids": "0b323d32b6ac3441",
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase.get_chat_template": "afdf41bc3a785a67",
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase.pad": "93c2c93b7d9df5ca",
    "transformers.tokenization_utils_base:PreTrainedTokenizerBase.special_tokens_map": "0d1deecf3fcb2ebb",
    "transformers.tokenization_utils_tokenizers:TokenizersBackend._convert_encoding": "9ae5a78b4b27fe12",
    "transformers.tokenization_utils_tokenizers:TokenizersBackend._encode_plus": "27c0d1ccf8b2240a",
    "transformers.tokenization_utils_tokenizers:TokenizersBackend.set_truncation_and_padding": "d8d014735313efcb",
    "transformers.trainer:Trainer._init_training_state": "302638585ad3fee5",
    "transformers.trainer:Trainer._inner_training_loop": "28b340bd0b4deb71",
    "transformers.trainer:Trainer._run_epoch": "47107d86dc2c1f65",
    "transformers.utils.chat_template_utils:_cached_compile_jinja_template": "d2876aeafd4ca687",
    "transformers.utils.chat_template_utils:_compile_jinja_template": "1bc249cd809fe00c",
    "transformers.utils.chat_template_utils:render_jinja_template": "4937b4a56bd9f12b",
    "transformers.utils.generic:to_py_obj": "82078644b2d1e8f6",
}
"""``module:qualname`` → the fingerprints that are familiar, with spaces between."""

KNOWN = {name: tuple(familiar.split()) for name, familiar in _FINGERPRINTS.items()}
"""``module:qualname`` → the fingerprints of the sources that ours was proven equal to."""
