"""Bring sequences of different lengths into rows of one length: pack several into one, or pad each.

Reading order: ``sequences`` reads every form of sequences, says what a token is, and gives lists,
numpy or torch. ``plan`` decides which sequences share a row; ``rows`` fills rows in order; ``pad``
gives each sequence its own row.
"""

from fast_axolotl.packing.pad import create_padding_mask, pad_sequences
from fast_axolotl.packing.plan import PackPlan, plan_packs
from fast_axolotl.packing.rows import concatenate_and_pack, pack_sequences

__all__ = [
    "PackPlan",
    "concatenate_and_pack",
    "create_padding_mask",
    "pack_sequences",
    "pad_sequences",
    "plan_packs",
]
