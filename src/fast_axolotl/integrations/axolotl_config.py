"""What of a configuration of Axolotl a record holds, and where its data lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["find_data", "read_telling"]

_TELLING = (
    "adapter",
    "attn_implementation",
    "base_model",
    "dataloader_num_workers",
    "dataloader_prefetch_factor",
    "dataset_use_rust_streaming",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "micro_batch_size",
    "pad_to_sequence_len",
    "pretraining_dataset",
    "sample_packing",
    "sequence_len",
    "streaming",
    "streaming_multipack_buffer_size",
    "torch_compile",
)


def read_telling(cfg: Any) -> dict[str, Any]:
    """What decides how fast the data comes and how long a step takes."""
    return {key: cfg[key] for key in _TELLING if cfg.get(key) is not None}


def find_data(cfg: Any) -> tuple[str, ...]:
    """What training reads: prepared rows where there are any, else the datasets' own files."""
    prepared = cfg.get("dataset_prepared_path")
    if prepared and not cfg.get("streaming") and Path(prepared).is_dir():
        return (str(prepared),)
    sets = [*(cfg.get("datasets") or []), *(cfg.get("pretraining_dataset") or [])]
    found = (item.get("data_files") or item.get("path") for item in sets)
    return tuple(path for path in found if isinstance(path, str) and Path(path).exists())
