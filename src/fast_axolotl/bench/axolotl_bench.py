"""``fast-axolotl bench axolotl``: the real Axolotl as it is and accelerated, in one run.

Reading order: ``axolotl_inputs`` makes model, tokenizer, data and configurations; ``axolotl_runs``
starts Axolotl's command line, through ``axolotl_driver``, which watches it; ``axolotl_prepared``
says whether two runs gave the same; ``axolotl_cases`` and ``axolotl_streaming`` are the cases;
``axolotl_functions`` times single functions (``axolotl_subjects``) in a process of its own;
``axolotl_goals`` holds the targets, ``axolotl_result`` the tables.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fast_axolotl.bench.axolotl_cases import (
    PREPROCESS,
    TRAIN,
    AxolotlSession,
    preprocess_case,
    train_case,
)
from fast_axolotl.bench.axolotl_functions import PROGRESS
from fast_axolotl.bench.axolotl_goals import ratio_goals
from fast_axolotl.bench.axolotl_result import ANSWERED, FUNCTION
from fast_axolotl.bench.axolotl_runs import (
    OURS,
    STOCK,
    RunError,
    Runner,
    child_environment,
    last_line,
)
from fast_axolotl.bench.axolotl_streaming import STREAMING, streaming_case
from fast_axolotl.bench.axolotl_subjects import SUBJECTS
from fast_axolotl.bench.machine import describe_machine
from fast_axolotl.bench.matrix import LeftOut, PeerTiming
from fast_axolotl.bench.operation_result import (
    Measurement,
    OperationCase,
    OperationResult,
    WarmUp,
)
from fast_axolotl.bench.reader import scratch_folder
from fast_axolotl.errors import MissingExtraError, UsageError

__all__ = ["CASES", "FUNCTIONS", "NOTES", "run_axolotl_bench"]

FUNCTIONS = "functions"
CASES = (*PREPROCESS, *TRAIN, FUNCTIONS, *STREAMING)
"""The names of all cases, in the order they run."""

NOTES = (
    "stock is FAST_AXOLOTL=0, accelerated is fast-axolotl run --; both run Axolotl's own command "
    "line through the same watcher, by turns: A B, B A, …",
    "results are compared before anything counts, and again after every pair: prepared datasets "
    "by rows, order, schema and shards; losses and gradient norms by their last digit; batches by "
    "a digest of every tensor",
    "times are those of the main process's work: imports and compilation stand apart, for both; "
    "what Axolotl's workers import and compile is part of its work: it does so at every call",
    "kernels are compiled into a cache before; what a first run pays is told beside",
    "every run has fresh Hugging Face caches; the page cache is warm",
    "PSS is sampled every 0.1 s over the process tree",
)

_PYTHON_MODULE = (sys.executable, "-m")


def run_axolotl_bench(
    *,
    cases: Sequence[str] = (),
    rows: int = 20_000,
    repeats: int = 3,
    stream_megabytes: int = 1200,
    functions: Sequence[str] = (),
    work_dir: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> OperationResult:
    """Runs the cases.

    Args:
        cases: Names from ``CASES``; empty for all of them.
        rows: Rows of every dataset, before dedupe.
        repeats: Timed runs of each, stock and accelerated.
        stream_megabytes: Size of the file that is streamed.
        functions: Only these functions of the case ``functions``; empty for all of them.
        work_dir: Everything is written to a new folder in it, which is removed at the end; ``None``
            takes the system's temporary folder.
        progress: Called with a line before each step.
    """
    chosen, chosen_functions = _choose(cases), _choose_functions(functions)
    if min(rows, repeats, stream_megabytes) < 1:
        raise UsageError(
            "rows, repeats and the size of the stream must be at least 1, not "
            f"{rows}, {repeats} and {stream_megabytes}"
        )
    if find_spec("axolotl") is None:
        raise MissingExtraError("this benchmark runs the real Axolotl: pip install axolotl==0.19.0")
    tell = progress or _silent
    machine = describe_machine()
    with scratch_folder(work_dir) as folder:
        tell("compiling kernels")
        warmth = _warm_up(folder)
        tell("making the model and its tokenizer")
        session = _session(folder, rows, repeats, tell)
        found = [
            case
            for name in chosen
            for case in _run_case(name, session, stream_megabytes, chosen_functions)
        ]
    return OperationResult(
        title="axolotl",
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=_command(cases, rows, repeats, stream_megabytes),
        machine=machine,
        notes=NOTES,
        warm_up=warmth,
        cases=tuple(found),
    )


def _choose(cases: Sequence[str]) -> list[str]:
    unknown = [name for name in cases if name not in CASES]
    if unknown:
        raise UsageError(f"no case is called {unknown[0]!r}: {', '.join(CASES)}")
    return [name for name in CASES if not cases or name in cases]


def _choose_functions(functions: Sequence[str]) -> list[str]:
    unknown = [name for name in functions if name not in SUBJECTS]
    if unknown:
        raise UsageError(f"no function is called {unknown[0]!r}: {', '.join(SUBJECTS)}")
    return [name for name in SUBJECTS if not functions or name in functions]


def _cache(folder: Path) -> Path:
    return folder / "kernels"


def _warm_up(folder: Path) -> WarmUp:
    """Fills the cache of kernels, as ``fast-axolotl warmup`` does, and tells what that takes."""
    done = _child(folder, "fast_axolotl", "warmup", "--json")
    seconds: dict[str, float] = json.loads(done)["seconds"]
    imported = seconds.pop("import of numba")
    return WarmUp(import_seconds=imported, compile_seconds=seconds)


def _session(folder: Path, rows: int, repeats: int, tell: Callable[[str], None]) -> AxolotlSession:
    model = folder / "model"
    _child(folder, "fast_axolotl.bench.axolotl_inputs", str(model))
    return AxolotlSession(
        runner=Runner(folder=folder, cache=_cache(folder)),
        folder=folder,
        model=model,
        rows=rows,
        repeats=repeats,
        tell=tell,
    )


def _child(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [*_PYTHON_MODULE, *command],
        env=child_environment(folder, _cache(folder)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise MissingExtraError(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def _run_case(
    name: str, session: AxolotlSession, megabytes: int, functions: Sequence[str]
) -> Iterator[OperationCase]:
    try:
        if name in PREPROCESS:
            yield preprocess_case(name, session)
        elif name in TRAIN:
            yield train_case(name, session)
        elif name in STREAMING:
            yield streaming_case(name, session, megabytes)
        else:
            yield from _function_cases(session, functions)
    except RunError as error:
        session.tell(f"{name}: {error}")
        reason = str(error).replace(f"{session.folder}/", "")
        left_out = (LeftOut(name=name, reason=reason),)
        yield OperationCase(name=name, text="failed", rows=0, unit="rows", left_out=left_out)


def _function_cases(session: AxolotlSession, names: Sequence[str]) -> Iterator[OperationCase]:
    """The functions, in one process of their own."""
    folder = session.folder / FUNCTIONS
    folder.mkdir()
    settings = {
        "rows": session.rows,
        "repeats": session.repeats,
        "model": str(session.model),
        "folder": str(folder),
        "result": str(folder / "result.json"),
        "names": list(names),
    }
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    log = folder / "log.txt"
    module = "fast_axolotl.bench.axolotl_functions"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*_PYTHON_MODULE, module, str(path)],
            env=child_environment(folder, session.runner.cache),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(PROGRESS):
                session.tell(f"functions: {line.removeprefix(PROGRESS).strip()}")
    if process.returncode:
        raise RunError(last_line(log))
    for found in json.loads((folder / "result.json").read_text()):
        yield _function_case(found)


def _function_case(found: dict[str, Any]) -> OperationCase:
    name = found["name"]
    if "error" in found:
        left_out = (LeftOut(name=name, reason=found["error"]),)
        return OperationCase(
            name=FUNCTION + name, text="failed", rows=0, unit="rows", left_out=left_out
        )
    timings = tuple(
        PeerTiming(
            name=arm,
            version=None,
            output="",
            rows=found["rows"],
            seconds=tuple(found["seconds"][arm]),
            equal=arm == STOCK or found["reason"] is None,
            reason=None if arm == STOCK else found["reason"],
            unbounded=None,
        )
        for arm in (OURS, STOCK)
    )
    return OperationCase(
        name=FUNCTION + name,
        text=found["text"],
        rows=found["rows"],
        unit=found["unit"],
        timings=timings,
        rivals={STOCK: OURS},
        measurements=(*_first_calls(found), _answered(found)),
        goals=tuple(ratio_goals(name, timings)),
    )


def _first_calls(found: dict[str, Any]) -> list[Measurement]:
    return [
        Measurement(name=f"{arm}: first call", seconds=(taken,), values={})
        for arm, taken in found["first"].items()
    ]


def _answered(found: dict[str, Any]) -> Measurement:
    """Whether ours answered at all."""
    reason = "; ".join(found["fallbacks"]) or None
    if not found["answered"]:
        reason = f"nothing replaced it{f': {reason}' if reason else ''}"
    return Measurement(name=ANSWERED, values=found["answered"], reason=reason)


def _command(cases: Sequence[str], rows: int, repeats: int, megabytes: int) -> str:
    command = f"fast-axolotl bench axolotl --rows {rows} --repeats {repeats}"
    command += f" --stream-mb {megabytes}"
    return f"{command} --cases {','.join(cases)}" if cases else command


def _silent(_: str) -> None:
    return None
