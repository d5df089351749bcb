"""Fingerprints of the sources that the replacements were proven equal to.

``tools/fingerprints.py`` adds those of the Axolotl that is installed.
"""

from __future__ import annotations

__all__ = ["KNOWN"]

KNOWN: dict[str, tuple[str, ...]] = {
    "axolotl.cli.config:prepare_plugins": ("89c433f65d3b6812",),
    "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy._diff_char_span": (
        "bb094b1fdc3813c6",
    ),
    "axolotl.utils.data.rl:_drop_long_sequences": ("478bcb5db99541c2",),
    "axolotl.utils.data.shared:save_preprocessed_dataset": ("3a139c93a443cb3f",),
    "axolotl.utils.data.streaming:encode_packed_streaming": ("6d63f7f24fc4eabc",),
    "axolotl.utils.data.streaming:encode_streaming": ("609c86a13d1ebb8c",),
    "axolotl.utils.data.utils:_deduplicate_dataset": ("f605f227f8fe142c",),
    "axolotl.utils.data.utils:deduplicate_and_log_datasets": ("862043de403e8aa5",),
    "axolotl.utils.data.utils:handle_long_seq_in_dataset": ("b6878bcb7b5f3020",),
    "axolotl.utils.data.utils:sha256": ("ddb60f6fa918dcda",),
    "axolotl.utils.samplers.multipack:MultipackBatchSampler.__len__": ("1bad9f034155085a",),
    "axolotl.utils.samplers.multipack:MultipackBatchSampler.generate_batches": (
        "ccadc141945dc4a3",
    ),
    "axolotl.utils.samplers.multipack:pack_parallel": ("42c360d60acc4c81",),
    "axolotl.utils.samplers.utils:get_dataset_lengths": ("58ebaeb15457bd28",),
    "axolotl.utils.trainer:process_datasets_for_packing": ("65b416b671e3bae2",),
}
"""``module:qualname`` → the fingerprints that are familiar."""
