"""The streaming reader: files in, record batches out.

Reading order of the modules: ``formats`` and ``storage`` find out what a file is and where its
bytes are; ``lines``, ``text_lines``, ``json_files``, ``csv_files`` and ``columnar`` cut
it into blocks and decode them; ``order`` says which blocks come when, and to whom; ``prefetch``
decodes ahead; ``settle`` and ``batching`` make one stream of batches of it; ``reader`` is the door.
"""

from __future__ import annotations

from fast_axolotl.reading.batching import held_bytes
from fast_axolotl.reading.blocks import CsvDialect, Rejection
from fast_axolotl.reading.convert import OUTPUTS, convert
from fast_axolotl.reading.files import FormatWarning
from fast_axolotl.reading.formats import detect_format, format_of_name, list_supported_formats
from fast_axolotl.reading.reader import Reader, ReadStats, open_dataset
from fast_axolotl.reading.schema import MIXED, TypeClash, conform, is_json_text, join_schemas
from fast_axolotl.reading.state import find_states

__all__ = [
    "MIXED",
    "OUTPUTS",
    "CsvDialect",
    "FormatWarning",
    "ReadStats",
    "Reader",
    "Rejection",
    "TypeClash",
    "conform",
    "convert",
    "detect_format",
    "find_states",
    "format_of_name",
    "held_bytes",
    "is_json_text",
    "join_schemas",
    "list_supported_formats",
    "open_dataset",
]
