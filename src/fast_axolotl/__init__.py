"""fast-axolotl: measure a fine-tune honestly, accelerate its data path, prove the difference.

Names resolve on first use (PEP 562), so that ``import fast_axolotl`` loads neither numpy nor
pyarrow. Importing the package installs the post-import hooks for Axolotl and does nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fast_axolotl._version import RUST_AVAILABLE, __version__, get_version, is_available
from fast_axolotl.axolotl import install, status, uninstall

if TYPE_CHECKING:
    from fast_axolotl.dedupe import (
        DedupeSummary,
        SeenRows,
        dedupe_files,
        deduplicate_indices,
        parallel_hash_rows,
        unique_rows,
    )
    from fast_axolotl.errors import FastAxolotlError
    from fast_axolotl.measure import Meter, measure
    from fast_axolotl.packing import (
        PackPlan,
        concatenate_and_pack,
        create_padding_mask,
        pack_sequences,
        pad_sequences,
        plan_packs,
    )
    from fast_axolotl.reading import (
        CsvDialect,
        Reader,
        detect_format,
        list_supported_formats,
        open_dataset,
    )
    from fast_axolotl.reading.mixing import MixedReader, mix_datasets
    from fast_axolotl.record import RunSummary, Verdict
    from fast_axolotl.streaming import (
        RustStreamingDataset,
        create_rust_streaming_dataset,
        should_use_rust_streaming,
        streaming_dataset_reader,
    )

__all__ = [
    "RUST_AVAILABLE",
    "CsvDialect",
    "DedupeSummary",
    "FastAxolotlError",
    "Meter",
    "MixedReader",
    "PackPlan",
    "Reader",
    "RunSummary",
    "RustStreamingDataset",
    "SeenRows",
    "Verdict",
    "__version__",
    "concatenate_and_pack",
    "create_padding_mask",
    "create_rust_streaming_dataset",
    "dedupe_files",
    "deduplicate_indices",
    "detect_format",
    "get_version",
    "install",
    "is_available",
    "list_supported_formats",
    "measure",
    "mix_datasets",
    "open_dataset",
    "pack_sequences",
    "pad_sequences",
    "parallel_hash_rows",
    "plan_packs",
    "should_use_rust_streaming",
    "status",
    "streaming_dataset_reader",
    "uninstall",
    "unique_rows",
]

_HOMES = {
    "CsvDialect": "reading",
    "FastAxolotlError": "errors",
    "MixedReader": "reading.mixing",
    "Reader": "reading",
    "detect_format": "reading",
    "list_supported_formats": "reading",
    "mix_datasets": "reading.mixing",
    "open_dataset": "reading",
    "RustStreamingDataset": "streaming",
    "create_rust_streaming_dataset": "streaming",
    "should_use_rust_streaming": "streaming",
    "streaming_dataset_reader": "streaming",
    "PackPlan": "packing",
    "concatenate_and_pack": "packing",
    "create_padding_mask": "packing",
    "pack_sequences": "packing",
    "pad_sequences": "packing",
    "plan_packs": "packing",
    "DedupeSummary": "dedupe",
    "SeenRows": "dedupe",
    "dedupe_files": "dedupe",
    "deduplicate_indices": "dedupe",
    "parallel_hash_rows": "dedupe",
    "unique_rows": "dedupe",
    "Meter": "measure",
    "RunSummary": "record",
    "Verdict": "record",
}


def __getattr__(name: str) -> Any:
    if name == "measure":
        # The package of that name, which can be called: one name cannot be both.
        return importlib.import_module("fast_axolotl.measure")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'fast_axolotl' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fast_axolotl.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


install()
