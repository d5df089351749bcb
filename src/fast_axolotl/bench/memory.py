"""Memory and first batch on large files, each pass in a fresh process.

Nothing about the parent reaches the figures: the child imports, notes its memory, reads the file
once and reports. The file is in the page cache, since it has just been written; "cold" means the
process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fast_axolotl.bench.corpus import write_large_jsonl, write_large_parquet
from fast_axolotl.bench.goals import memory_goals
from fast_axolotl.bench.matrix import OURS_ARROW, CaseResult, LeftOut, MemoryRun
from fast_axolotl.bench.peers import PEERS

__all__ = ["MEMORY_CASES", "run_memory_case"]

_GIGABYTE = 1_000_000_000
_LEAST_BYTES = 100_000
_MOST_REPEATS = 3
_TIMEOUT_SECONDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class _LargeFile:
    label: str
    format: str
    suffix: str
    num_bytes: int
    write: Callable[[Path, int], int]


_JSONL = partial(_LargeFile, format="jsonl", suffix=".jsonl", write=write_large_jsonl)
_PARQUET = partial(_LargeFile, format="parquet", suffix=".parquet")

MEMORY_CASES: dict[str, tuple[_LargeFile, ...]] = {
    "memory-jsonl": (
        _JSONL(label="JSON lines, small", num_bytes=_GIGABYTE // 2),
        _JSONL(label="JSON lines", num_bytes=2 * _GIGABYTE),
    ),
    "memory-parquet": (
        _PARQUET(
            label="Parquet",
            num_bytes=2 * _GIGABYTE,
            write=partial(write_large_parquet, one_group=False),
        ),
    ),
    "memory-parquet-one-group": (
        _PARQUET(
            label="Parquet, one row group",
            num_bytes=_GIGABYTE,
            write=partial(write_large_parquet, one_group=True),
        ),
    ),
}
"""Case to its files, the largest last."""


def run_memory_case(
    name: str, *, repeats: int, scale: float, work_dir: Path, progress: Callable[[str], None]
) -> CaseResult:
    """Reads each file of the case with ours, some times, and with each Arrow peer once."""
    runs: list[MemoryRun] = []
    left_out: dict[str, LeftOut] = {}
    for file in MEMORY_CASES[name]:
        path = work_dir / f"large{file.suffix}"
        progress(f"{name}: writing {file.label}")
        file.write(path, max(_LEAST_BYTES, round(file.num_bytes * scale)))
        try:
            for reader in [OURS_ARROW] * min(repeats, _MOST_REPEATS) + _rivals(file.format):
                progress(f"{name}: {reader} reads {file.label}")
                run = _run_child(reader, file, path)
                if isinstance(run, LeftOut):
                    left_out[reader] = run
                else:
                    runs.append(run)
        finally:
            path.unlink(missing_ok=True)
    return CaseResult(
        name=name,
        rows=max((run.rows for run in runs), default=0),
        num_bytes=max((run.num_bytes for run in runs), default=0),
        memory=tuple(runs),
        goals=tuple(memory_goals([run for run in runs if run.name == OURS_ARROW])),
        left_out=tuple(left_out.values()),
    )


def _rivals(file_format: str) -> list[str]:
    return [peer.name for peer in PEERS if peer.output == "arrow" and file_format in peer.formats]


def _run_child(reader: str, file: _LargeFile, path: Path) -> MemoryRun | LeftOut:
    module = "fast_axolotl.bench.memory_worker"
    command: Sequence[str] = (sys.executable, "-m", module, reader, file.format, str(path))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True
        )
    except subprocess.TimeoutExpired:
        return LeftOut(name=reader, reason=f"not done after {_TIMEOUT_SECONDS} s")
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        return LeftOut(name=reader, reason=last[:200])
    figures = json.loads(done.stdout)
    return MemoryRun(file=file.label, num_bytes=path.stat().st_size, name=reader, **figures)
