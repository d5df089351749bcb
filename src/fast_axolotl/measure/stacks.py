"""Where the time of a thread goes: looks at its Python stack, about 20 times per second.

A look costs some ten microseconds: it walks the frames of one thread, and each code object is
classified once. It counts for the time since the look before, so that a call which holds the
interpreter's lock counts in full. No signals, no tracing, no locks.

The phase of a look is read off the frames: the outermost one that is evidence decides, so that a
tokeniser inside of ``forward`` is part of forward; only an optimizer gives way to what runs inside
of it, because some take the whole step as a closure. Where no frame is evidence, the place in the
loop decides: between the line that fetches and the line that calls the model, a batch is being
prepared. What is left is *other*. In the record stand files, lines and functions, and no data.

``StackSampler`` looks at the training's thread. A loader's worker looks at its own main thread and
appends what it saw to ``RUN/workers/RANK-PID.jsonl``: after a second, then ever more rarely, and as
it ends. It is killed without notice, so nothing is left for its end. The training process takes
these files away and adds them up. A worker that cannot write, loses its looks alone. Workers start
in three ways (fork, forkserver, spawn), so what they are told travels as an object that can be
pickled, in the place of the loader's ``worker_init_fn``, which it calls.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from fast_axolotl.record.schema import StackLine

RATE, _FIRST_RATE, _FIRST_SECONDS = 20, 50, 5.0
"""Looks a second, on average; those of the first seconds, in which the lines of the loop are
learned."""
WORKER = "worker"
"""The place of all looks at a loader's worker."""
_MOST_KEYS, _MOST_LINES = 2000, 8
"""Lines that are told apart, and those of a phase that are written."""
_MOST_CODES = 20_000
_LEAST_WRITE_SECONDS, _MOST_WRITE_SECONDS = 1.0, 15.0
"""Between two writes of a worker; in between a tenth of the worker's age."""
_MOST_WORKER_LINES = 12
_BUSY_SHARE = 0.5
"""Of a thread's time on a processor, from which on it is at work."""
_LIBRARIES = tuple(
    {f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib")}
)
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"

_BY_PATH: tuple[tuple[str, str], ...] = (
    (r"/torch/utils/data/|/torchdata/|/streaming/base/|/litdata/|/webdataset/", "data"),
    (r"/fast_axolotl/(reading|integrations/torch\.py)", "data"),
    (r"/torch/autograd/(__init__|graph)\.py", "backward"),
    (r"/torch/(optim|amp/grad_scaler|nn/utils/clip)|/accelerate/optimizer\.py", "optimizer"),
    (r"/torch/(nn/functional|cuda/graphs)\.py", "forward"),
    (r"/torch/distributed/checkpoint/|/torch/serialization\.py|/safetensors/", "checkpoint"),
    (r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py", "communication"),
    (r"/datasets/|/tokenizers/|/transformers/(tokenization|data/)|/torchvision/", "preparing"),
)
"""Part of a file's path → what a frame of it is evidence of."""
_BY_NAME: tuple[tuple[str, str], ...] = (
    (r"_?(wrapped_)?call_impl|forward|compute_loss", "forward"),
    (r"backward", "backward"),
    (r"_*(save|write_checkpoint|dump_checkpoint)\w*", "checkpoint"),
    (r"_*(eval|evaluat|validat)\w*|estimate_loss", "evaluation"),
    (r"\w*(collat|tokeni[sz]e|preprocess|augment)\w*", "preparing"),
    (r"_*(get|next|load|fetch|read|make|sample|prepare)_(\w+_)?batch(es)?", "preparing"),
)
"""Name of a function → likewise."""
_INSIDE_A_WAIT = {
    "_next_index": (r"/torch/utils/data/dataloader\.py", "waiting/sampler"),
    "start": (r"/multiprocessing/process\.py", "waiting/start"),
}
"""Name of a function, and its file → the part of a wait that no worker can take over."""
_QUEUES = re.compile(
    r"/(queue|selectors|multiprocessing/\w+|concurrent/futures/_base|asyncio/\w+)\.py$"
)
_QUEUE_CALLS = ("get", "recv", "recv_bytes", "poll", "select", "result", "_recv", "wait")
_TRAINERS = re.compile(r"/(transformers/trainer|lightning/|pytorch_lightning/|axolotl/|trl/)")
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\]+)")
_NEVER_TOLD = re.compile(r"/torch/|/(fast_axolotl|wrapt)/(?!reading)|^<")


class Place(NamedTuple):
    """What looks are counted by: the fields of a ``StackLine``."""

    phase: str
    file: str
    line: int
    function: str
    call: str


class _Code:
    """What is known of a function: what its frame is evidence of, and the lines it was seen at."""

    __slots__ = (
        *("code", "evidence", "inside", "lines"),
        *("is_fetcher", "is_library", "is_queue", "is_told", "is_trainer"),
    )

    def __init__(self, code: CodeType) -> None:
        self.code = code
        path, name = code.co_filename.replace(os.sep, "/"), code.co_name
        is_installed = _INSTALLED.search(path) is not None
        own = (*_LIBRARIES, _PACKAGE, "<frozen")
        self.is_library = is_installed or code.co_filename.startswith(own)
        may_be_told = is_installed or "/fast_axolotl/reading" in path
        self.is_told = not self.is_library or (may_be_told and not _NEVER_TOLD.search(path))
        self.is_trainer = self.is_library and _TRAINERS.search(path) is not None
        self.is_fetcher = path.endswith("/torch/utils/data/_utils/fetch.py")
        self.is_queue = self.is_library and name in _QUEUE_CALLS and bool(_QUEUES.search(path))
        self.evidence = self._find_evidence(path, name)
        pattern, inside = _INSIDE_A_WAIT.get(name, ("", ""))
        self.inside = inside if re.search(pattern, path) else ""
        self.lines: dict[str, tuple[int, int]] = {}
        """The first and the last line below which something of the loop was under way: fetch,
        model, step."""

    def _find_evidence(self, path: str, name: str) -> str:
        if self.is_library:
            for pattern, phase in _BY_PATH:
                if re.search(pattern, path):
                    return phase
            # Of a library's own names only those of the model count: a trainer's ``_save`` and
            # ``evaluate`` are spans, and ``get_batch_samples`` fetches.
            if "/torch/nn/modules/" not in path and name not in ("forward", "backward"):
                return ""
        return next((phase for pattern, phase in _BY_NAME if re.fullmatch(pattern, name)), "")

    def see(self, phase: str, line: int) -> None:
        """Something was under way below this line."""
        first, last = self.lines.get(phase, (line, line))
        self.lines[phase] = (min(first, line), max(last, line))

    def is_preparing(self, line: int, is_calling: bool) -> bool | None:
        """Whether a batch is prepared at a line, by its place; ``None``: this frame cannot tell.

        On the model's own line only what is called there can be preparing.
        """
        fetch, model = self.lines.get("fetch"), self.lines.get("model")
        if fetch is not None and fetch[0] <= line <= fetch[1]:
            # A generator around the loader, unless the line calls the whole loop.
            known = {model, self.lines.get("step")}
            return None if known == {None} or fetch in known else True
        if model is None:
            return None
        is_before = line < model[0] or (line == model[0] and is_calling)
        return is_before and (fetch is None or line > fetch[1])


class Looks:
    """Reads stacks, and counts the seconds of each phase and line until they are taken."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        """Seconds by phase, and by line, since they were taken."""
        self.lines: dict[Place, float] = {}
        self._codes: dict[int, _Code] = {}

    def count(self, frame: FrameType, seconds: float, place: str = "", busy: bool = True) -> None:
        """Count a look.

        ``place`` is what the meter knows: nothing inside of a step, ``waiting`` in a fetch,
        ``between`` loops, or the name of a span; in a worker ``WORKER``. ``busy`` is whether the
        thread was at work.
        """
        seen = self._read(frame, place, busy)
        self.phases[seen.phase] = self.phases.get(seen.phase, 0.0) + seconds
        if seen in self.lines or len(self.lines) < _MOST_KEYS:
            self.lines[seen] = self.lines.get(seen, 0.0) + seconds

    def learn(self, kind: str, frame: FrameType) -> None:
        """A fetch begins, or a step has ended, below these lines."""
        for outer, line in traceback.walk_stack(frame):
            self._know(outer.f_code).see(kind, line or 0)

    def take_phases(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        taken, self.phases = self.phases, {}
        return taken

    def take_lines(self, most: int = _MOST_LINES) -> tuple[StackLine, ...]:
        """The lines of each phase that most was spent in since the last call."""
        taken, self.lines = self.lines, {}
        return tuple(largest_lines(taken, most))

    def _read(self, frame: FrameType, place: str, busy: bool) -> Place:
        stack: list[tuple[_Code, int]] = []
        evidence, at = "", 0
        for current, line in traceback.walk_stack(frame):
            known = self._know(current.f_code)
            if known.evidence and not (known.evidence == "optimizer" and evidence):
                evidence, at = known.evidence, len(stack)
            stack.append((known, line or 0))
        if place == WORKER:
            is_loading = any(known.is_fetcher for known, _ in stack)
            return Place("loading" if is_loading else "idle", *_find_line(stack))
        if not evidence and any(known.is_queue for known, _ in stack[:4]):
            evidence = "data"
        phase = "waiting" if place == "waiting" else evidence
        if phase in ("waiting", "data", "forward"):
            kind = "model" if phase == "forward" else "fetch"
            for known, line in stack[at + 1 :]:
                known.see(kind, line)
        elif not phase:
            answers = (known.is_preparing(line, n > 0) for n, (known, line) in enumerate(stack))
            is_preparing = next((answer for answer in answers if answer is not None), False)
            phase = "preparing" if is_preparing else "other"
        if phase == "waiting":
            phase = next((known.inside for known, _ in stack if known.inside), phase)
        if phase == "backward" and not busy and all(known.is_library for known, _ in stack[:at]):
            phase = "backward/idle"
        if place not in ("", "waiting"):
            phase = f"{place}/{phase}"
        return Place(phase, *_find_line(stack))

    def _know(self, code: CodeType) -> _Code:
        known = self._codes.get(id(code))
        if known is None:
            if len(self._codes) >= _MOST_CODES:  # a program that makes code at run time
                self._codes.clear()
            known = self._codes[id(code)] = _Code(code)
        return known


def _find_line(stack: list[tuple[_Code, int]]) -> tuple[str, int, str, str]:
    """The user's innermost line and the library call below it. A line that only starts a trainer
    tells nothing: then that of the library inside of the trainer."""
    chosen = next((n for n, (known, _) in enumerate(stack) if not known.is_library), None)
    inner = stack if chosen is None else stack[:chosen]
    if chosen is None or any(known.is_trainer for known, _ in inner):
        told = next((n for n, (known, _) in enumerate(inner) if known.is_told), None)
        chosen = chosen or 0 if told is None else told
    code, line = stack[chosen][0].code, stack[chosen][1]
    below = [known for known, _ in stack[:chosen] if not known.code.co_filename.startswith("<")]
    call = ""
    if below and not below[-1].code.co_filename.startswith(_PACKAGE):
        called = below[-1].code
        call = f"{_package(called.co_filename)}.{called.co_name}"
    return code.co_filename, line, code.co_name, call


def _package(path: str) -> str:
    """The package or module that a file of a library belongs to."""
    if installed := _INSTALLED.search(path):
        return installed[1].removesuffix(".py")
    parts = re.split(r"[/\\]", path)
    is_module = path.removesuffix(parts[-1]) in _LIBRARIES
    return parts[-1 if is_module else -2].removesuffix(".py")


def largest_lines(lines: dict[Place, float], most: int) -> Iterator[StackLine]:
    """The largest of each phase, the largest first."""
    taken = Counter[str]()
    for place, seconds in sorted(lines.items(), key=lambda item: -item[1]):
        taken[place.phase] += 1
        if taken[place.phase] <= most:
            yield StackLine(**place._asdict(), seconds=round(seconds, 3))


class StackSampler:
    """Looks at one thread until it is stopped.

    Args:
        looks: Where looks are counted.
        place: What the meter knows of the moment; see ``Looks.count``.
        on_look: Called after each look.
    """

    def __init__(
        self,
        looks: Looks,
        place: Callable[[], str] = lambda: "",
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        self.looks = looks
        self.thread = threading.get_ident()
        """The thread looked at; may be set at any time."""
        self.num_looks, self.cpu_seconds = 0, 0.0
        """Looks so far, and the processor time that they took."""
        self._place = place
        self._on_look = on_look
        self._is_over = False
        self._own = threading.Thread(target=self._run, name="fast-axolotl-stacks", daemon=True)
        self._clock_of: tuple[int, int | None] = (0, None)

    def start(self) -> None:
        """Begin to look."""
        self._own.start()

    def stop(self) -> None:
        """Look no more; the thread ends within a tenth of a second."""
        self._is_over = True

    def _run(self) -> None:
        jitter = random.Random(os.getpid())
        begin = last = time.perf_counter()
        used, rate = 0.0, _FIRST_RATE
        with suppress(Exception):  # whatever it is, it must not end the training
            while not self._is_over:
                time.sleep(jitter.uniform(0.5, 1.5) / rate)
                frame = sys._current_frames().get(self.thread)
                now = time.perf_counter()
                if frame is not None:
                    cpu = self._thread_seconds()
                    busy = cpu is None or cpu - used >= _BUSY_SHARE * (now - last)
                    used = cpu or 0.0
                    self.looks.count(frame, now - last, self._place(), busy=busy)
                    del frame
                last = now
                rate = RATE if now > begin + _FIRST_SECONDS else _FIRST_RATE
                self._on_look()
                self.num_looks += 1
                self.cpu_seconds = time.thread_time()

    def _thread_seconds(self) -> float | None:
        """Processor time of the thread looked at, which must be alive."""
        if not hasattr(time, "pthread_getcpuclockid"):
            return None
        if self._clock_of[0] != self.thread:
            self._clock_of = (self.thread, time.pthread_getcpuclockid(self.thread))
        clock = self._clock_of[1]
        return None if clock is None else time.clock_gettime(clock)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Called in a worker before it loads: starts the looks, then does what the loader wanted."""

    folder: str
    rank: int
    original: Callable[[int], Any] | None

    def __call__(self, number: int) -> None:
        """Worker ``number`` starts."""
        with suppress(Exception):  # whatever it is, the worker has to load
            _look_at_worker(Path(self.folder) / f"{self.rank}-{os.getpid()}.jsonl")
        if self.original is not None:
            self.original(number)


def _look_at_worker(path: Path) -> None:
    """Look at the main thread of this process, and append what the looks add up to."""
    looks, begin = Looks(), time.monotonic()
    due = begin + _LEAST_WRITE_SECONDS

    def write() -> None:
        lines = list(map(astuple, looks.take_lines(_MOST_WORKER_LINES)))
        seen = {"seconds": looks.take_phases().get("loading", 0.0), "lines": lines}
        with suppress(OSError), path.open("a") as file:  # the run has ended, or a full disk
            file.write(json.dumps(seen) + "\n")

    def write_when_due() -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + min(max(_LEAST_WRITE_SECONDS, (now - begin) / 10), _MOST_WRITE_SECONDS)
            write()

    StackSampler(looks, lambda: WORKER, write_when_due).start()
    Finalize(None, write, exitpriority=10)


class WorkerLines:
    """Adds up, in the training process, what its workers have written."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.folder = run_dir / "workers"
        self._rank = rank

    def start_before(self, original: Callable[[int], Any] | None) -> WorkerStart:
        """What a loader of this process has its workers call first."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
        return WorkerStart(str(self.folder), self._rank, original)

    def take(self, most: int = 8) -> tuple[float, tuple[StackLine, ...]]:
        """Seconds of loading, and its lines, since the last call."""
        new: dict[Place, float] = defaultdict(float)
        new_seconds = 0.0
        for path in self.folder.glob(f"{self._rank}-*.jsonl"):
            with suppress(OSError, ValueError):
                taken = path.replace(path.with_suffix(".taken"))
                for text in taken.read_text().splitlines():
                    data = json.loads(text)
                    new_seconds += data["seconds"]
                    for *where, seconds in data["lines"]:
                        new[Place(*where)] += seconds
                taken.unlink()
        return new_seconds, tuple(largest_lines(new, most))

    def close(self) -> None:
        """Remove what is left of this rank's workers."""
        with suppress(OSError):
            for path in self.folder.glob(f"{self._rank}-*"):
                path.unlink()
            self.folder.rmdir()  # of the last rank
