"""Reads one file once in a fresh process and prints, as JSON, what that cost in time and memory.

Run as ``python -m fast_axolotl.bench.memory_worker READER FORMAT FILE``. Anonymous resident memory
is what counts (``resident``).
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

from fast_axolotl.bench.resident import ResidentPeak

__all__ = ["main"]

_MODULES = ("pyarrow.csv", "pyarrow.json", "pyarrow.parquet", "fast_axolotl.reading")
"""Every reader starts with the same modules at hand."""


def main(reader: str, file_format: str, path: str) -> None:
    """Imports, then reads, then prints."""
    start = time.perf_counter()
    for name in _MODULES:
        importlib.import_module(name)
    from fast_axolotl.bench.peers import peer_named

    peer = peer_named(reader)
    run = peer.formats[file_format](Path(path))
    imported = time.perf_counter()
    with ResidentPeak() as memory:
        called = time.perf_counter()
        batches = run()
        rows = next(batches).num_rows
        first = time.perf_counter()
        rows += sum(batch.num_rows for batch in batches)
        done = time.perf_counter()
    figures = {
        "rows": rows,
        "seconds": done - called,
        "first_batch_seconds": first - called,
        "import_seconds": imported - start,
        "baseline_bytes": memory.start_bytes,
        "peak_bytes": memory.peak_bytes,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
