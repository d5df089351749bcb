"""A quick look at the reader for ``make demo``: small inputs, against pyarrow and plain Python."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from fast_axolotl.bench.corpus import write_inputs
from fast_axolotl.bench.machine import describe_machine
from fast_axolotl.bench.matrix import BenchResult
from fast_axolotl.bench.peers import PEERS, PLAIN_PYTHON
from fast_axolotl.bench.reader import TimedCase, run_timed_case, scratch_folder

__all__ = ["run_demo"]

DEMO_ROWS = 20_000
DEMO_REPEATS = 3

_NOTES = (
    "rows are compared with ours before anything is timed",
    "one warm-up pass each, then interleaved repeats; ratios are of medians, in rows per second",
    "small inputs, to see it run: fast-axolotl bench reader is the real comparison",
)

_CASES = tuple(
    TimedCase(name=name, file=file, format=name)
    for name, file in (
        ("parquet", "messages.parquet"),
        ("jsonl", "messages.jsonl"),
        ("csv", "messages.csv"),
        ("arrow", "messages.arrow"),
        ("text", "messages.txt"),
    )
)


def run_demo(
    work_dir: Path | None = None,
    progress: Callable[[str], None] | None = None,
    *,
    rows: int = DEMO_ROWS,
    repeats: int = DEMO_REPEATS,
) -> BenchResult:
    """Reads conversations in five formats with ours, pyarrow, and the standard library."""
    tell = progress or (lambda _: None)
    peers = [peer for peer in PEERS if peer.name == "pyarrow"] + [PLAIN_PYTHON]
    machine = describe_machine()
    with scratch_folder(work_dir) as folder:
        tell(f"writing {rows:,} conversations in {len(_CASES)} formats")
        paths = write_inputs(folder, [case.file for case in _CASES], rows)
        cases = tuple(
            run_timed_case(case, paths[case.file], peers, (), repeats, tell) for case in _CASES
        )
    return BenchResult(
        title="demo",
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command="make demo",
        machine=machine,
        notes=_NOTES,
        cases=cases,
    )
