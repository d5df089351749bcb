"""``fast-axolotl bench reader``: our reader and its peers on the same inputs, in one run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from fast_axolotl.bench.corpus import MESSAGE_ROWS, SAMPLE_ROWS, write_inputs, write_sample
from fast_axolotl.bench.earlier import EARLIER, EarlierPackage, start_earlier
from fast_axolotl.bench.goals import timing_goals
from fast_axolotl.bench.machine import describe_machine
from fast_axolotl.bench.matrix import BenchResult, CaseResult, LeftOut, PeerTiming
from fast_axolotl.bench.memory import MEMORY_CASES, run_memory_case
from fast_axolotl.bench.peers import OURS, PEERS, Peer
from fast_axolotl.bench.timing import (
    Contestant,
    EarlierContestant,
    compare,
    local_contestants,
)
from fast_axolotl.errors import UsageError

__all__ = [
    "CASES",
    "NOTES",
    "TimedCase",
    "result_name",
    "run_reader_bench",
    "run_timed_case",
    "scratch_folder",
]

NOTES = (
    "rows are compared with ours before anything is timed: their number, and a digest of each "
    "column over canonical JSON in reading order",
    "one warm-up pass each, then interleaved repeats, each the median of as many passes as take "
    "0.2 s; ratios are of medians, in rows per second",
    "the page cache is warm: files have just been written and read",
    "batches of 1000 rows; pyarrow's JSON, CSV and text blocks are sliced to that without a copy",
    "the earlier package runs in a process of its own, started beforehand, timed inside it",
    "HF load + rows includes load_dataset with a prepared cache, as in the earlier package's "
    "benchmark; HF streaming includes opening and stops after 20,000 rows, which in a check put "
    "its rows per second up to a sixth too low",
    "a memory case is a fresh process: RssAnon sampled every 2 ms, above its value after imports",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCase:
    """An input that every reader is timed on."""

    name: str
    file: str
    """Its file name in the corpus."""
    format: str
    """What the peers know it as."""


_TIMED = tuple(
    TimedCase(name=name, file=file, format=file_format)
    for name, file, file_format in (
        ("sample-parquet", "sample.parquet", "parquet"),
        ("messages-parquet", "messages.parquet", "parquet"),
        ("messages-parquet-one-group", "messages-one-group.parquet", "parquet"),
        ("messages-jsonl", "messages.jsonl", "jsonl"),
        ("messages-csv", "messages.csv", "csv"),
        ("messages-arrow", "messages.arrow", "arrow"),
        ("messages-arrow-stream", "messages-stream.arrows", "arrow-stream"),
        ("messages-text", "messages.txt", "text"),
        ("messages-jsonl-zst", "messages.jsonl.zst", "jsonl"),
        ("messages-jsonl-gz", "messages.jsonl.gz", "jsonl"),
    )
)

CASES = (*(case.name for case in _TIMED), *MEMORY_CASES)
"""The names of all cases, in the order they run."""


def run_reader_bench(
    *,
    cases: Sequence[str],
    repeats: int,
    scale: float,
    peer_python: str | None,
    work_dir: Path | None,
    progress: Callable[[str], None] | None,
) -> BenchResult:
    """Runs the cases.

    Args:
        cases: Names from ``CASES``; empty for all of them.
        repeats: Timed passes of each reader.
        scale: 1 for the full sizes; less shrinks every input.
        peer_python: The interpreter of an environment with the earlier package.
        work_dir: Inputs are written to a new folder in it, which is removed at the end; ``None``
            takes the system's temporary folder.
        progress: Called with a line before each step.
    """
    chosen = _choose(cases)
    if repeats < 1 or not 0 < scale <= 1:
        raise UsageError(f"repeats must be at least 1 and scale in (0, 1], not {repeats}, {scale}")
    tell = progress or _silent
    machine = describe_machine()
    results = []
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder(work_dir))
        timed = [case for case in _TIMED if case.name in chosen]
        earlier = start_earlier(peer_python, folder, stack) if timed else None
        if isinstance(earlier, EarlierPackage):
            versions = {**machine.versions, EARLIER: earlier.version}
            machine = replace(machine, versions=versions)
        paths = _write(timed, folder, scale, tell)
        for case in timed:
            results.append(_run_timed(case, paths[case.name], earlier, repeats, tell))
            paths[case.name].unlink()
        results += [
            run_memory_case(name, repeats=repeats, scale=scale, work_dir=folder, progress=tell)
            for name in chosen
            if name in MEMORY_CASES
        ]
    return BenchResult(
        title="reader",
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=_command(cases, repeats, scale, peer_python),
        machine=machine,
        notes=NOTES,
        cases=tuple(_without_path(result, folder) for result in results),
    )


def run_timed_case(
    case: TimedCase,
    path: Path,
    peers: Sequence[Peer],
    more: Sequence[Contestant],
    repeats: int,
    progress: Callable[[str], None],
) -> CaseResult:
    """Our reader, then ``more``, then ``peers``, on one file."""

    def tell(text: str) -> None:
        progress(f"{case.name}: {text}")

    ours, _ = local_contestants(OURS, case.name, case.format, path)
    others, missing = local_contestants(peers, case.name, case.format, path)
    timings, failed = compare(ours[0], [*ours[1:], *more, *others], repeats, tell)
    return CaseResult(
        name=case.name,
        rows=timings[0].rows,
        num_bytes=path.stat().st_size,
        timings=tuple(timings),
        goals=tuple(timing_goals(case.name, timings)),
        left_out=(*missing, *failed),
    )


@contextmanager
def scratch_folder(parent: Path | None) -> Iterator[Path]:
    """A new folder in ``parent``, or in the system's temporary folder, removed at the end."""
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="fast-axolotl-bench-", dir=parent)).absolute()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def result_name(result: BenchResult) -> str:
    """The dated file name that a result is kept under."""
    return f"{result.date[:10]}-{result.title}.json"


def _run_timed(
    case: TimedCase,
    path: Path,
    earlier: EarlierPackage | LeftOut | None,
    repeats: int,
    progress: Callable[[str], None],
) -> CaseResult:
    more: list[Contestant] = []
    if isinstance(earlier, EarlierPackage):
        kind = _earlier_format(case)
        more.append(
            EarlierContestant(package=earlier, path=path, format=kind, version=earlier.version)
        )
    result = run_timed_case(case, path, PEERS, more, repeats, progress)
    if isinstance(earlier, LeftOut):
        result = replace(result, left_out=(earlier, *result.left_out))
    return result


def _earlier_format(case: TimedCase) -> str:
    """The name that the earlier package has for it; it detects compression only by itself."""
    if case.file.endswith((".gz", ".zst")):
        return ""
    return "arrow" if case.format == "arrow-stream" else case.format


def _write(
    timed: Sequence[TimedCase], folder: Path, scale: float, progress: Callable[[str], None]
) -> dict[str, Path]:
    paths: dict[str, Path] = {}
    files = [case.file for case in timed if case.file != "sample.parquet"]
    if files:
        progress(f"writing {len(files)} inputs")
    written = write_inputs(folder, files, max(100, round(MESSAGE_ROWS * scale)))
    for case in timed:
        if case.file == "sample.parquet":
            rows = max(100, round(SAMPLE_ROWS * scale))
            paths[case.name] = write_sample(folder / case.file, rows)
        else:
            paths[case.name] = written[case.file]
    return paths


def _choose(cases: Sequence[str]) -> tuple[str, ...]:
    unknown = [name for name in cases if name not in CASES]
    if unknown:
        raise UsageError(f"no case is called {unknown[0]!r}; choose from {', '.join(CASES)}")
    return tuple(name for name in CASES if not cases or name in cases)


def _command(cases: Sequence[str], repeats: int, scale: float, peer_python: str | None) -> str:
    parts = ["fast-axolotl bench reader", *([f"--cases {','.join(cases)}"] if cases else [])]
    parts += [f"--repeats {repeats}", f"--scale {scale:g}"]
    if peer_python is not None:
        parts.append("--peer-python PYTHON")
    return " ".join(parts)


def _without_path(result: CaseResult, folder: Path) -> CaseResult:
    """Messages of peers name the input; the folder it was in means nothing to a reader."""

    def clean(text: str | None) -> str | None:
        return None if text is None else text.replace(f"{folder}/", "")

    def clean_timing(timing: PeerTiming) -> PeerTiming:
        return replace(timing, reason=clean(timing.reason))

    return replace(
        result,
        timings=tuple(clean_timing(timing) for timing in result.timings),
        left_out=tuple(replace(item, reason=clean(item.reason) or "") for item in result.left_out),
    )


def _silent(_: str) -> None:
    return None
