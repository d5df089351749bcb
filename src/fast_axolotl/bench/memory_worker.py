"""Reads one file once in a fresh process and prints, as JSON, what that cost in time and memory.

Run as ``python -m fast_axolotl.bench.memory_worker READER FORMAT FILE``. Anonymous resident memory
is what counts: pages of the file itself in the page cache belong to the system and can be dropped.
A thread samples it every two milliseconds.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from pathlib import Path

_SAMPLE_SECONDS = 0.002
_STATUS = Path("/proc/self/status")
_MODULES = ("pyarrow.csv", "pyarrow.json", "pyarrow.parquet", "fast_axolotl.reading")
"""Every reader starts with the same modules at hand."""


def anonymous_bytes(status: Path = _STATUS) -> int:
    """Resident anonymous memory of a process, from its ``/proc`` status."""
    for line in status.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{status} has no RssAnon: this needs Linux 4.5 or later")


class PeakSampler:
    """The most anonymous memory seen while the block ran."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._take()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._take()

    def _take(self) -> None:
        self.peak_bytes = max(self.peak_bytes, anonymous_bytes())


def main(reader: str, file_format: str, path: str) -> None:
    """Imports, then reads, then prints."""
    start = time.perf_counter()
    for name in _MODULES:
        importlib.import_module(name)
    from fast_axolotl.bench.peers import peer_named

    peer = peer_named(reader)
    run = peer.formats[file_format](Path(path))
    imported = time.perf_counter()
    baseline = anonymous_bytes()
    with PeakSampler() as sampler:
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
        "baseline_bytes": baseline,
        "peak_bytes": sampler.peak_bytes,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
