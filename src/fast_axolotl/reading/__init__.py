"""The streaming reader: files in, record batches out.

Reading order of the modules: ``files`` finds what the caller means, ``storage`` gets its bytes,
``formats`` tells what a file is; ``lines``, ``json_lines``, ``json_documents``, ``csv_files`` and
``columnar`` cut it into units and blocks and decode them; ``order`` says which of them come when,
and to whom; ``prefetch`` decodes ahead; ``unify_types`` and ``rows`` make one stream of batches of
it, and ``outputs`` turns these into Python values, arrays or tensors;
``reader`` is the door, ``mixing`` puts several readers together.
"""

from __future__ import annotations

from fast_axolotl.reading.blocks import CsvDialect, Rejection
from fast_axolotl.reading.formats import (
    FormatWarning,
    detect_format,
    format_of_name,
    list_supported_formats,
)
from fast_axolotl.reading.outputs import OUTPUTS, convert
from fast_axolotl.reading.reader import Reader, ReadStats, open_dataset

__all__ = [
    "OUTPUTS",
    "CsvDialect",
    "FormatWarning",
    "ReadStats",
    "Reader",
    "Rejection",
    "convert",
    "detect_format",
    "format_of_name",
    "list_supported_formats",
    "open_dataset",
]
