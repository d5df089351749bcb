"""A race between programs that must give the same answer: equality first, then alternating repeats.

Every contender runs in a process of its own, so that its memory is its own. The process builds the
contender twice: on a few rows, which imports and compiles, timed apart; then on all of them. It
makes one pass under a memory watcher, which is the warm-up, and one that is digested. Whoever gives
another answer than ours is not timed. The others make their repeats interleaved, A B C, A B C: what
else the machine does falls on all alike. A repeat is one pass, or the median of as many passes as
take 0.2 s; garbage is collected before it, outside the timing.

This file needs the standard library alone to be imported, so that a process of another environment
can use ``serve`` and the digests.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import subprocess
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, TextIO

LEAST_SECONDS = 0.2
MOST_PASSES = 50
_FEW_ROWS = 200
_BLOCK = 4096
_SAMPLE_CHARACTERS = 60
_CLOSE_SECONDS = 10

_encode = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, check_circular=False, default=repr
).encode


@dataclass(frozen=True)
class Digest:
    """An answer, small enough to compare and to send between processes."""

    rows: int
    columns: dict[str, str]
    """Column to the SHA-256 of its values in order."""
    first: dict[str, str]
    """Column to the beginning of its first value, to show where columns differ."""


def digest_items(items: Iterable[Any], kind: str, limit: int | None = None) -> Digest:
    """What a reader gives: ``arrow`` batches, ``python`` dicts of lists, or single ``rows``.

    A column's digest is over the canonical JSON of its values, so it does not depend on where
    batches end. Costs about 8 µs for a row of a kilobyte.
    """
    hashes: dict[str, Any] = {}
    first: dict[str, str] = {}
    rows = 0
    iterator = iter(items)
    while limit is None or rows < limit:
        columns: Mapping[str, list[Any]] = {}
        if kind == "rows":
            block = list(islice(iterator, 1000))
            columns = {name: [row.get(name) for row in block] for name in block[0]} if block else {}
        elif kind == "python":
            columns = next(iterator, {})
        elif (batch := next(iterator, None)) is not None:
            columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
        count = max((len(values) for values in columns.values()), default=0)
        if not count:
            break
        count = count if limit is None else min(count, limit - rows)
        for name, values in columns.items():
            if name not in hashes:
                hashes[name] = hashlib.sha256()
                first[name] = _encode(values[0])[:_SAMPLE_CHARACTERS]
            text = _encode(values[:count])[1:-1]
            hashes[name].update(text.encode("utf-8", "surrogatepass") + b",")
        rows += count
    return Digest(rows, {name: item.hexdigest() for name, item in hashes.items()}, first)


def digest_columns(columns: Mapping[str, Any], rows: int) -> Digest:
    """An answer of texts, integers or rows of integers, whatever holds them.

    Integers count as 64 bits each, and the lengths of rows count, too. Costs some 15 ns for a
    number of a list, and 2 for one of an array.
    """
    digests, first = {}, {}
    for name, column in columns.items():
        values = column.numpy() if hasattr(column, "numpy") else column
        content, lengths, count, sample = hashlib.sha256(), hashlib.sha256(), 0, "nothing"
        for block in _blocks(values):
            head = block[0]
            if isinstance(head, str):
                content.update("\n".join([*block, ""]).encode("utf-8", "surrogatepass"))
            elif hasattr(block, "ndim"):
                content.update(block.astype("int64").tobytes())
                if block.ndim > 1:
                    lengths.update((array("q", [block.shape[1]]) * len(block)).tobytes())
            elif hasattr(head, "__len__"):
                sequences = [array("q", row) for row in block]
                content.update(b"".join(row.tobytes() for row in sequences))
                lengths.update(array("q", map(len, sequences)).tobytes())
            else:
                content.update(array("q", block).tobytes())
            if not count:
                begin = head[:_SAMPLE_CHARACTERS] if hasattr(head, "__len__") else head
                sample = str(begin.tolist() if hasattr(begin, "tolist") else begin)
            count += len(block)
        digests[name] = hashlib.sha256(content.digest() + lengths.digest()).hexdigest()
        first[name] = f"{count:,}: {sample[:_SAMPLE_CHARACTERS]}"
    return Digest(rows, digests, first)


def difference(ours: Digest, other: Digest) -> str | None:
    """How the other answer differs from ours, in one line; ``None`` where they are equal."""
    if (ours.rows, ours.columns) == (other.rows, other.columns):
        return None
    if ours.rows != other.rows:
        return f"{other.rows:,} of {ours.rows:,} rows"
    if ours.columns.keys() != other.columns.keys():
        return f"columns {sorted(other.columns)} in place of {sorted(ours.columns)}"
    names = [name for name in ours.columns if ours.columns[name] != other.columns[name]]
    name = next((name for name in names if ours.first[name] != other.first[name]), names[0])
    if ours.first[name] == other.first[name]:
        return f"column {name} differs after its first row"
    return f"column {name} begins {other.first[name]} in place of {ours.first[name]}"


def _blocks(values: Any) -> Iterator[Any]:
    if hasattr(values, "ndim"):
        yield from (values[start : start + _BLOCK] for start in range(0, len(values), _BLOCK))
        return
    source = iter(values)
    while block := list(islice(source, _BLOCK)):
        yield block


# The child's side.


class WorkerError(Exception):
    """A process cannot be run, or fails on its input; never leaves a race."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What a process runs."""

    run: Callable[[], Any]
    """One pass: gives the answer, or an iterator that makes it."""
    digest: Callable[[Any], Digest]
    is_stream: bool = False
    """Whether ``run`` gives an iterator, whose first item has a time of its own."""
    version: str | None = None


def one_line(error: BaseException) -> str:
    """Why somebody takes no part."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, NotImplementedError | WorkerError):
        return text
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {error.name}"
    return f"{type(error).__name__}: {text}"


def take_stdout() -> TextIO:
    """Where answers go; whatever else is printed from now on goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(
    answers: TextIO,
    hello: Mapping[str, Any],
    tasks: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]],
) -> None:
    """Answers requests, a JSON line each, until there are no more; failures are answers, too."""
    gc.freeze()
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        gc.collect()
        request = json.loads(line)
        try:
            reply = tasks[request["task"]](request)
        except BaseException as error:  # noqa: BLE001 - panics are BaseExceptions; all are reported
            reply = {"error": one_line(error)}
        print(json.dumps(reply), file=answers, flush=True)


def main(task: Path) -> None:
    """``python -m fast_axolotl.cli.race TASK``: one contender, asked over its pipes."""
    from fast_axolotl.cli.resident_peak import ResidentPeak

    answers = take_stdout()
    request = json.loads(task.read_text())
    module, _, name = request["build"].partition(":")
    hello: dict[str, Any] = {}
    tasks: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {}
    try:
        start = time.perf_counter()
        build = getattr(importlib.import_module(module), name)
        few = build({**request, "rows": min(request["rows"], _FEW_ROWS)})
        timed_pass(few)
        hello["first_call_seconds"] = time.perf_counter() - start
        contender: Contender = build(request)
        hello["version"] = contender.version
        gc.collect()
        with ResidentPeak() as memory:
            timed_pass(contender)
        hello["peak_bytes"] = memory.above_start_bytes
        tasks["digest"] = lambda _: asdict(contender.digest(contender.run()))
        tasks["seconds"] = lambda _: dict(
            zip(("seconds", "first"), timed_pass(contender), strict=True)
        )
    except Exception as error:  # noqa: BLE001 - a contender may fail in any way; it is reported
        hello = {"error": one_line(error)}
    serve(answers, hello, tasks)


def timed_pass(contender: Contender) -> tuple[float, float | None]:
    """Seconds of one pass, and until its first item; the answer is freed after the clock stops."""
    first = None
    start = time.perf_counter()
    answer = contender.run()
    if contender.is_stream:
        next(answer, None)
        first = time.perf_counter() - start
        deque(answer, maxlen=0)
    return time.perf_counter() - start, first


# The parent's side.


class Worker:
    """A process that ``serve`` answers in, kept alive and asked by JSON lines."""

    def __init__(
        self, command: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None
    ) -> None:
        self._log = log
        self._errors = log.open("w")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                cwd=log.parent,
                env=env,
            )
        except OSError as error:
            self._errors.close()
            raise WorkerError(f"its interpreter cannot be started: {error.strerror}") from None
        try:
            self.hello = self._receive()
        except WorkerError:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, task: str, **request: Any) -> dict[str, Any]:
        """The answer to one request."""
        assert self._process.stdin is not None
        try:
            print(json.dumps({"task": task, **request}), file=self._process.stdin, flush=True)
        except OSError:
            raise WorkerError("its process has ended") from None
        return self._receive()

    def close(self) -> None:
        """Ends the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                # A process that has died leaves what was not sent to it.
                with suppress(OSError):
                    stream.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise WorkerError(f"its process ended without an answer{': '.join(['', *said])}"[:300])
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply


def child_environment(*places: Path) -> dict[str, str]:
    """This one, with our package, and what is in these places, importable from any folder."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sources = [*places, Path(__file__).parents[2], *map(os.path.abspath, given)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))}


def interleave(
    timed: Mapping[str, Callable[[], float]], repeats: int, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    """Seconds of every repeat, by turns: each the median of as many passes as take 0.2 s."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for repeat in range(repeats):
        progress(f"repeat {repeat + 1} of {repeats}")
        for name, run in timed.items():
            passes = [run()]
            while sum(passes) < LEAST_SECONDS and len(passes) < MOST_PASSES:
                passes.append(run())
            seconds[name].append(median(passes))
    return seconds


@dataclass(frozen=True)
class Entry:
    """Somebody who may take part."""

    build: Callable[[Mapping[str, Any]], Contender]
    """Takes the request, gives the contender; imported by its name, in the process."""
    who: str
    """Which of those that it builds."""
    name: str
    gives: str
    against: str | None = None
    """Which of ours does the same work; ``None`` for ours."""
    needs: str | None = None
    """A package that has to be installed."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one contender came to."""

    name: str
    gives: str
    version: str | None
    against: str | None
    reason: str | None
    """How its answer differs from ours: then it is not timed."""
    seconds: tuple[float, ...]
    """Every repeat, in the order run."""
    first_seconds: tuple[float, ...]
    """Until the first batch, of every pass; empty where there is none."""
    first_call_seconds: float
    """Imports, compiling or loading kernels, and a pass over a few rows: before all of it."""
    peak_bytes: int | None
    """Resident anonymous memory above where the process stood, in one pass."""
    ratio: tuple[float, float, float] | None = None
    """Our speed over its, repeat by repeat: median, least, most; above 1 we are faster."""


@dataclass(frozen=True, kw_only=True)
class RaceResult:
    """Who was timed, and who took no part with the reason."""

    timings: tuple[Timing, ...]
    left_out: dict[str, str]


def run_race(
    entries: Sequence[Entry],
    request: Mapping[str, Any],
    folder: Path,
    *,
    repeats: int,
    progress: Callable[[str], None],
) -> RaceResult:
    """Checks and times everybody who can take part; raises where ours cannot."""
    from fast_axolotl.errors import DataError

    env = child_environment()
    env |= {"FAST_AXOLOTL": "0", "AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    workers: dict[str, Worker] = {}
    digests: dict[str, Digest] = {}
    left_out: dict[str, str] = {}
    reasons: dict[str, str | None] = {}
    with ExitStack() as stack:
        for number, entry in enumerate(entries):
            progress(f"{entry.name}: loading, first pass, checking the result")
            if entry.needs is not None and find_spec(entry.needs) is None:
                left_out[entry.name] = f"{entry.needs} is not installed"
                continue
            build = f"{entry.build.__module__}:{entry.build.__name__}"
            # In a file: the names of a thousand shards are too long for an argument.
            task = folder / f"{number}.json"
            task.write_text(json.dumps({**request, "build": build, "who": entry.who}))
            command = [sys.executable, "-m", "fast_axolotl.cli.race", str(task)]
            try:
                worker = stack.enter_context(Worker(command, folder / f"{number}.txt", env=env))
                digests[entry.name] = Digest(**worker.ask("digest"))
            except WorkerError as error:
                if entry.against is None:
                    raise DataError(f"{entry.name} failed: {error}") from None
                left_out[entry.name] = str(error)
                continue
            workers[entry.name] = worker
            expected = digests[entry.against or entry.name]
            reasons[entry.name] = difference(expected, digests[entry.name])
        firsts: dict[str, list[float]] = {name: [] for name in reasons}

        def timed(name: str) -> Callable[[], float]:
            def run() -> float:
                reply = workers[name].ask("seconds")
                if reply["first"] is not None:
                    firsts[name].append(reply["first"])
                return float(reply["seconds"])

            return run

        equal = {name: timed(name) for name, reason in reasons.items() if reason is None}
        try:
            seconds = interleave(equal, repeats, progress)
        except WorkerError as error:
            raise DataError(f"a contender failed while it was timed: {error}") from None

    def timing(entry: Entry) -> Timing:
        own, ours = seconds.get(entry.name, []), seconds.get(entry.against or "", [])
        ratios = [theirs / mine for theirs, mine in zip(own, ours, strict=False)]
        return Timing(
            **workers[entry.name].hello,
            name=entry.name,
            gives=entry.gives,
            against=entry.against,
            reason=reasons[entry.name],
            seconds=tuple(own),
            first_seconds=tuple(firsts[entry.name]),
            ratio=(median(ratios), min(ratios), max(ratios)) if ratios else None,
        )

    timings = tuple(timing(entry) for entry in entries if entry.name in reasons)
    return RaceResult(timings=timings, left_out=left_out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
