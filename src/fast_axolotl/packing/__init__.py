"""Put several sequences into one row of fixed length.

Reading order: ``plan`` decides which sequences share a row; ``rows`` fills rows in order.
"""

from fast_axolotl.packing.plan import PackPlan, plan_packs
from fast_axolotl.packing.rows import concatenate_and_pack, pack_sequences

__all__ = ["PackPlan", "concatenate_and_pack", "pack_sequences", "plan_packs"]
