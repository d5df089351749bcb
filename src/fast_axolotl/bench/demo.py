"""A quick look for ``make demo``: every format read, and the table of the earlier package's README.

Small inputs, against pyarrow and plain Python. The four jobs are those of the earlier package, in
its sizes; its published ratios stand beside ours, which are against plain Python on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fast_axolotl.bench.contest import AXOLOTL, Contest, Session, run_contest
from fast_axolotl.bench.corpus import SAMPLE_ROWS, write_inputs, write_sample
from fast_axolotl.bench.earlier import EARLIER
from fast_axolotl.bench.hashing import hash_contest
from fast_axolotl.bench.machine import describe_machine
from fast_axolotl.bench.matrix import (
    OURS_ARROW,
    OURS_PYTHON,
    BenchResult,
    LeftOut,
    Machine,
    Table,
    matrix_rows,
    show_ratio,
    show_time,
)
from fast_axolotl.bench.operation_goals import (
    ARROW,
    HASHLIB,
    LISTS,
    PLAIN,
    PLAIN_TENSORS,
    TENSORS,
    TO_NUMPY,
)
from fast_axolotl.bench.operation_result import OperationCase, OperationResult
from fast_axolotl.bench.packing import pack_operation
from fast_axolotl.bench.padding import pad_operation
from fast_axolotl.bench.peers import BATCH_ROWS, PEERS, PLAIN_PYTHON, Pass, Peer
from fast_axolotl.bench.reader import TimedCase, run_timed_case, scratch_folder
from fast_axolotl.bench.tokens import token_contest
from fast_axolotl.bench.warming import warm_up
from fast_axolotl.bench.workloads import json_rows

__all__ = ["DemoResult", "demo_tables", "run_demo"]

DEMO_ROWS = 20_000
DEMO_REPEATS = 3
JOB_REPEATS = 1
"""Each is the median of as many passes as take 0.2 s."""

HF_LOAD = "HF load + rows"

_KERNELS = ("sha256.hash_rows", "sha256.write_hex", "fill.place", "fill.lay", "fill.mark")
"""What the four jobs use; compiling all would take twice as long."""

_NOTES = (
    "rows are compared with ours before anything is timed",
    "one warm-up pass each, then interleaved repeats; ratios are of medians, in rows per second",
    "small inputs, to see it run: fast-axolotl bench reader is the real comparison",
)
_JOB_NOTES = (
    "answers are compared before anything is timed; medians of as many passes as take 0.2 s",
    "published: the earlier package against plain Python on 16 cores, as in its README; streaming "
    "against Hugging Face's load_dataset, where plain Python here is pyarrow, row by row",
    "real comparisons: fast-axolotl bench hash, dedupe, pack, pad and reader",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Both halves of the demo."""

    reader: BenchResult
    jobs: OperationResult

    def to_json(self) -> dict[str, Any]:
        return {"reader": self.reader.to_json(), "jobs": self.jobs.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A row of the table: which contestants stand in which column."""

    case: str
    text: str
    plain: str
    lists: str
    arrays: str
    published: float


_JOBS = (
    _Job(
        case="sample-parquet",
        text="stream {:,} rows of Parquet",
        plain=PLAIN,
        lists=OURS_PYTHON,
        arrays=OURS_ARROW,
        published=77.26,
    ),
    _Job(
        case="pack",
        text="pack {:,} sequences into 512",
        plain=PLAIN,
        lists=LISTS,
        arrays=TO_NUMPY,
        published=0.42,
    ),
    _Job(
        case="hash",
        text="hash {:,} rows",
        plain=HASHLIB,
        lists=LISTS,
        arrays=ARROW,
        published=1.90,
    ),
    _Job(
        case="pad",
        text="pad {:,} sequences to 256",
        plain=PLAIN,
        lists=LISTS,
        arrays=TO_NUMPY,
        published=0.53,
    ),
)


def run_demo(
    work_dir: Path | None = None,
    progress: Callable[[str], None] | None = None,
    *,
    rows: int = DEMO_ROWS,
    repeats: int = DEMO_REPEATS,
    job_scale: float = 1.0,
) -> DemoResult:
    """Reads conversations in five formats, then does the four jobs; less ``job_scale`` is less."""
    tell = progress or (lambda _: None)
    machine = describe_machine()
    with scratch_folder(work_dir) as folder:
        reader = _run_reader(folder, rows, repeats, machine, tell)
        jobs = _run_jobs(folder, job_scale, machine, tell)
    return DemoResult(reader=reader, jobs=jobs)


def demo_tables(result: DemoResult) -> list[Table]:
    """The tables of the formats, and that of the four jobs."""
    return [*matrix_rows(result.reader), _job_table(result.jobs)]


def _run_reader(
    folder: Path, rows: int, repeats: int, machine: Machine, tell: Callable[[str], None]
) -> BenchResult:
    peers = [peer for peer in PEERS if peer.name == "pyarrow"] + [PLAIN_PYTHON]
    tell(f"writing {rows:,} conversations in {len(_CASES)} formats")
    paths = write_inputs(folder, [case.file for case in _CASES], rows)
    cases = tuple(
        run_timed_case(case, paths[case.file], peers, (), repeats, tell) for case in _CASES
    )
    return BenchResult(
        title="demo",
        date=_now(),
        command="make demo",
        machine=machine,
        notes=_NOTES,
        cases=cases,
    )


def _run_jobs(
    folder: Path, scale: float, machine: Machine, tell: Callable[[str], None]
) -> OperationResult:
    tell("compiling kernels")
    warmth = warm_up(_KERNELS)
    reason = "it needs an environment of its own: see fast-axolotl bench hash --help"
    session = Session(
        folder=folder,
        repeats=JOB_REPEATS,
        earlier=LeftOut(name=EARLIER, reason=reason),
        axolotl=lambda: LeftOut(name=AXOLOTL, reason="not asked in the demo"),
        progress=tell,
    )
    stream = _stream_case(folder, round(SAMPLE_ROWS * scale), tell)
    cases = (stream, *(run_contest(contest, session) for contest in _contests(scale, session)))
    return OperationResult(
        title="demo",
        date=_now(),
        command="make demo",
        machine=machine,
        notes=_JOB_NOTES,
        warm_up=warmth,
        cases=cases,
    )


def _contests(scale: float, session: Session) -> Iterator[Contest]:
    """The three jobs beside reading, without torch, which is not needed here."""
    for operation, count in ((pack_operation(), 10_000), (pad_operation(), 10_000)):
        contest = token_contest(operation, round(count * scale), session)
        entries = [entry for entry in contest.entries if entry.name not in (TENSORS, PLAIN_TENSORS)]
        yield replace(contest, name=operation.name, entries=entries)
    yield hash_contest("hash", json_rows(round(100_000 * scale)), "rows", session)


def _stream_case(folder: Path, rows: int, tell: Callable[[str], None]) -> OperationCase:
    """The reader on the earlier package's file, with Hugging Face where it is installed."""
    path = write_sample(folder / "sample.parquet", rows)
    plain = Peer(name=PLAIN, package=None, output="rows", formats={"parquet": _parquet_rows})
    peers = [plain, *(peer for peer in PEERS if peer.name == HF_LOAD)]
    case = TimedCase(name="sample-parquet", file=path.name, format="parquet")
    found = run_timed_case(case, path, peers, (), JOB_REPEATS, tell)
    return OperationCase(
        name=found.name,
        text=f"{rows:,} rows of Parquet",
        rows=found.rows,
        unit="rows",
        timings=found.timings,
        rivals={peer.name: OURS_PYTHON for peer in peers},
        left_out=found.left_out,
    )


def _parquet_rows(path: Path) -> Pass:
    import pyarrow.parquet as pq

    def run() -> Iterator[Any]:
        for batch in pq.ParquetFile(path).iter_batches(BATCH_ROWS):
            yield from batch.to_pylist()

    return run


def _job_table(result: OperationResult) -> Table:
    cases = {case.name: case for case in result.cases}
    header = ("", "plain Python", "ours, as lists", "", "ours, as arrays", "", "published")
    rows = [_job_cells(job, cases[job.case]) for job in _JOBS]
    wrong = [
        f"{case.name}, {timing.name}: another answer: {timing.reason}"
        for case in result.cases
        for timing in case.timings
        if not timing.equal
    ]
    absent = dict.fromkeys(
        f"{item.name}: left out: {item.reason}" for case in result.cases for item in case.left_out
    )
    against = cases["sample-parquet"].ratio(OURS_PYTHON, HF_LOAD)
    compiled = result.warm_up.compile_seconds
    notes = (
        *(
            []
            if against is None
            else [f"streaming, as lists over {HF_LOAD}: {show_ratio(against)}"]
        ),
        *wrong,
        *absent,
        f"before the first call, timed apart: imports {show_time(result.warm_up.import_seconds)}, "
        f"{len(compiled)} kernels compiled or loaded in {show_time(sum(compiled.values()))}; "
        "compiled once, they are kept on disk",
        *result.notes,
    )
    title = "the four jobs of the earlier package's README"
    return Table(title=title, header=header, rows=tuple(rows), notes=notes)


def _job_cells(job: _Job, case: OperationCase) -> tuple[str, ...]:
    def time_of(name: str) -> str:
        timing = case.timing(name)
        return "–" if timing is None else show_time(timing.median_seconds)

    return (
        job.text.format(case.rows),
        time_of(job.plain),
        time_of(job.lists),
        show_ratio(case.ratio(job.lists, job.plain)),
        time_of(job.arrays),
        show_ratio(case.ratio(job.arrays, job.plain)),
        f"{job.published:.2f}×",
    )


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
