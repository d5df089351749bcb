"""The streaming functions of the earlier package, implemented with this package's reader.

``streaming_dataset_reader`` and ``RustStreamingDataset`` keep their signatures and what they yield:
a dict of column name to list of values for each batch. What changes is that rows arrive while the
file is read, that none are lost, and that nested values are values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fast_axolotl._version import RUST_AVAILABLE as RUST_AVAILABLE
from fast_axolotl._version import is_available as is_available
from fast_axolotl.errors import UsageError
from fast_axolotl.reading import OUTPUTS, convert, open_dataset

STREAMING_FILE_BYTES = 1024**3
"""From this size on a file is streamed, as in the earlier package."""

STREAMING_SEQUENCE_LENGTH = 10_000
"""From this ``sequence_len`` on files are streamed, as in the earlier package."""


def streaming_dataset_reader(
    file_path: str,
    dataset_type: str = "",
    batch_size: int = 1000,
    num_threads: int = 4,
    *,
    output: str = "python",
    columns: Sequence[str] | None = None,
    infer: Literal["auto", "scan"] = "auto",
) -> Iterator[Any]:
    """Yield batches of a file as ``python``, ``arrow``, ``numpy`` or ``torch``.

    ``columns`` and ``infer`` are those of ``open_dataset``.

    >>> for batch in streaming_dataset_reader("rows.parquet", "parquet"):  # doctest: +SKIP
    ...     batch["text"]
    """
    if not file_path:
        raise UsageError("file_path cannot be empty; pass a file, a folder, a glob or a URI")
    if output not in OUTPUTS:
        raise UsageError(f"output must be one of {', '.join(OUTPUTS)}, not {output!r}")
    reader = open_dataset(
        file_path,
        format=dataset_type or "auto",
        batch_size=batch_size,
        num_threads=num_threads,
        columns=columns,
        infer=infer,
    )
    return (convert(batch, output) for batch in reader)


@dataclass(eq=False)
class RustStreamingDataset:
    """Iterates over batches of a file; opens the file at the start of each iteration."""

    file_path: str
    dataset_type: str
    batch_size: int = 1000
    num_threads: int = 4
    dataset_keep_in_memory: bool = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return streaming_dataset_reader(
            self.file_path, self.dataset_type, self.batch_size, self.num_threads
        )

    def with_format(self, format: str | None) -> RustStreamingDataset:
        """Returns itself; kept for code that calls it."""
        return self


create_rust_streaming_dataset = RustStreamingDataset
"""The earlier package's other name for it."""


def should_use_rust_streaming(
    file_path: str, dataset_config: Mapping[str, Any], cfg: Mapping[str, Any]
) -> bool:
    """Whether a configuration asks for streaming and this file is large enough for it."""
    if not cfg.get("dataset_use_rust_streaming") or cfg.get("dataset_keep_in_memory"):
        return False
    if (cfg.get("sequence_len") or 0) < STREAMING_SEQUENCE_LENGTH:
        return False
    try:
        return os.path.getsize(file_path) >= STREAMING_FILE_BYTES  # noqa: PTH202 - also for str URIs
    except OSError:
        return True
