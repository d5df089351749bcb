"""The table: which function of Axolotl is replaced by which of ours, and what ours relies on.

``relies_on`` names what a replacement calls or reproduces beside its target: a change there takes
the replacement out as much as a change of the target itself.
"""

from __future__ import annotations

from fast_axolotl.integrations.patching import Replacement

__all__ = ["REPLACEMENTS"]

_OURS = "fast_axolotl.integrations"
_UTILS = "axolotl.utils.data.utils"
_SHARED = "axolotl.utils.data.shared"
_TRAINER = "axolotl.utils.trainer"
_MULTIPACK = "axolotl.utils.samplers.multipack"
_LENGTHS = "axolotl.utils.samplers.utils"
_COLLATORS = "axolotl.utils.collators.batching"
_FETCHER = "axolotl.monkeypatch.data.batch_dataset_fetcher"
_STREAMING = "axolotl.utils.data.streaming"
_CHAT = "axolotl.prompt_strategies.chat_template"
_RL = "axolotl.utils.data.rl"
_CONFIG = "axolotl.cli.config"

REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement(
        name="dedupe",
        target=f"{_UTILS}:_deduplicate_dataset",
        ours=f"{_OURS}.axolotl_data:deduplicate_dataset",
        relies_on=(f"{_UTILS}:sha256", f"{_UTILS}:deduplicate_and_log_datasets"),
    ),
    Replacement(
        name="save",
        target=f"{_SHARED}:save_preprocessed_dataset",
        ours=f"{_OURS}.axolotl_data:save_preprocessed_dataset",
    ),
    Replacement(
        name="lengths",
        target=f"{_LENGTHS}:get_dataset_lengths",
        ours=f"{_OURS}.axolotl_data:get_dataset_lengths",
    ),
    Replacement(
        name="packing",
        target=f"{_TRAINER}:process_datasets_for_packing",
        ours=f"{_OURS}.axolotl_data:process_datasets_for_packing",
    ),
    Replacement(
        name="long",
        target=f"{_UTILS}:handle_long_seq_in_dataset",
        ours=f"{_OURS}.axolotl_data:handle_long_seq_in_dataset",
    ),
    Replacement(
        name="pack",
        target=f"{_MULTIPACK}:pack_parallel",
        ours=f"{_OURS}.axolotl_sampler:pack_parallel",
    ),
    Replacement(
        name="sampler",
        target=f"{_MULTIPACK}:MultipackBatchSampler.generate_batches",
        ours=f"{_OURS}.axolotl_sampler:generate_batches",
    ),
    Replacement(
        name="sampler",
        target=f"{_MULTIPACK}:MultipackBatchSampler.__len__",
        ours=f"{_OURS}.axolotl_sampler:batches_length",
    ),
    Replacement(
        name="chat",
        target=f"{_CHAT}:ChatTemplateStrategy._diff_char_span",
        ours=f"{_OURS}.axolotl_prompts:diff_char_span",
    ),
    Replacement(
        name="rl",
        target=f"{_RL}:_drop_long_sequences",
        ours=f"{_OURS}.axolotl_rl:drop_long_sequences",
    ),
    Replacement(
        name="encode",
        target=f"{_STREAMING}:encode_streaming",
        ours=f"{_OURS}.axolotl_encode:encode_streaming",
    ),
    Replacement(
        name="encode",
        target=f"{_STREAMING}:encode_packed_streaming",
        ours=f"{_OURS}.axolotl_encode:encode_packed_streaming",
    ),
    Replacement(
        name="keys",
        target=f"{_CONFIG}:prepare_plugins",
        ours=f"{_OURS}.axolotl_plugin:prepare_plugins",
    ),
)
"""In the order in which a run meets them, more or less."""
