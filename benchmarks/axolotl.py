"""The real Axolotl as it is and accelerated, in one run: ``make bench-axolotl``.

Reading order: ``axolotl_inputs`` makes data and configurations; ``axolotl_runs`` starts Axolotl's
command line, through ``axolotl_driver``, which watches it, and says whether two runs gave the same;
``axolotl_cases`` are the cases; ``axolotl_functions`` times single functions in a process of its
own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.axolotl_cases import (
    ANSWERED,
    COLD,
    PREPROCESS,
    STREAMING,
    TRAIN,
    AxolotlSession,
    preprocess_case,
    ratio_goals,
    streaming_case,
    train_case,
)
from benchmarks.axolotl_driver import COMPILING, IMPORTS
from benchmarks.axolotl_functions import PROGRESS, SUBJECTS
from benchmarks.axolotl_model import write_model
from benchmarks.axolotl_runs import OURS, STOCK, Runner
from benchmarks.children import RunError, last_error, offline_environment, run_child
from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.result import (
    Body,
    Case,
    LeftOut,
    Measurement,
    Table,
    Timing,
    case_tables,
    show_ratio,
    show_time,
)
from fast_axolotl.errors import MissingExtraError, UsageError

FUNCTIONS = "functions"
FUNCTION = "functions: "
"""How the name of a case begins that is one function."""
CASES = (*PREPROCESS, *TRAIN, FUNCTIONS, *STREAMING)
"""The names of all cases, in the order they run."""

NOTES = (
    "stock is FAST_AXOLOTL=0, accelerated is fast-axolotl run --; both run Axolotl's own command "
    "line through the same watcher, in alternating order: A B, B A, …",
    "results are compared before anything counts, and again after every pair: prepared datasets "
    "by rows, order, schema and shards; losses and gradient norms by their last digit; batches by "
    "a digest of every tensor",
    "times are those of the main process's work: imports and compilation stand apart, for both; "
    "what Axolotl's workers import and compile is part of its work: it does so at every call",
    "kernels are compiled into a cache before; what a first run pays stands beside",
    "every run has fresh Hugging Face caches; the page cache is warm",
    "PSS is sampled every 0.1 s over the process tree",
)

_FIRST_PHASES = ("whole process", IMPORTS, COMPILING)
_LEAST_SHOWN_SECONDS = 0.005


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("axolotl", __doc__)
    parser.add_argument("--cases", type=names, default=[], help=f"of {', '.join(CASES)}")
    parser.add_argument("--rows", type=int, default=20_000, help="rows of every dataset")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each arm")
    parser.add_argument("--stream-mb", type=int, default=1200, help="size of the streamed file")
    parser.add_argument("--functions", type=names, default=[], help="only these functions")
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Body:
    """The chosen cases."""
    chosen = check_names("case", options.cases, CASES)
    functions = check_names("function", options.functions, tuple(SUBJECTS))
    if min(options.rows, options.repeats, options.stream_mb) < 1:
        raise UsageError("rows, repeats and the size of the stream must be at least 1")
    if find_spec("axolotl") is None:
        raise MissingExtraError("this race runs the real Axolotl: pip install axolotl==0.19.0")
    cache, model = folder / "kernels", folder / "model"
    environment = offline_environment(folder, cache)
    tell("compiling kernels")
    seconds = json.loads(run_child("fast_axolotl", "warmup", "--json", env=environment))["seconds"]
    imported = seconds.pop("import of numba")
    tell("making the model and its tokenizer")
    run_child("benchmarks.axolotl", "--model", str(model), env=environment)
    session = AxolotlSession(
        runner=Runner(folder=folder, cache=cache),
        folder=folder,
        model=model,
        rows=options.rows,
        repeats=options.repeats,
        tell=tell,
    )
    cases: list[Case] = []
    for name in chosen:
        try:
            if name in PREPROCESS:
                cases.append(preprocess_case(name, session))
            elif name in TRAIN:
                cases.append(train_case(name, session))
            elif name in STREAMING:
                cases.append(streaming_case(name, session, options.stream_mb))
            else:
                cases += _function_cases(session, functions)
        except RunError as error:
            tell(f"{name}: {error}")
            cases.append(_failed(name, str(error).replace(f"{folder}/", "")))
    warm_up = {"import_seconds": imported, "compile_seconds": seconds}
    tables = tuple(axolotl_tables(cases))
    return Body(cases=tuple(cases), facts={"warm_up": warm_up}, notes=NOTES, tables=tables)


def _failed(name: str, reason: str) -> Case:
    return Case(name=name, text="failed", rows=0, left_out=(LeftOut(name=name, reason=reason),))


def _function_cases(session: AxolotlSession, functions: Sequence[str]) -> Iterator[Case]:
    """The functions, in one process of their own."""
    folder = session.folder / FUNCTIONS
    folder.mkdir()
    settings = {
        "rows": session.rows,
        "repeats": session.repeats,
        "model": str(session.model),
        "folder": str(folder),
        "result": str(folder / "result.json"),
        "names": list(functions),
    }
    path, log = folder / "settings.json", folder / "log.txt"
    path.write_text(json.dumps(settings))
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.axolotl_functions", str(path)],
            env=offline_environment(folder, session.runner.cache),
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
        raise RunError(last_error(log.read_text(errors="replace")))
    for found in json.loads((folder / "result.json").read_text()):
        yield _function_case(found)


def _function_case(found: dict[str, Any]) -> Case:
    name = found["name"]
    if "error" in found:
        return _failed(FUNCTION + name, found["error"])
    timings = tuple(
        Timing(
            name=arm,
            rows=found["rows"],
            seconds=tuple(found["seconds"][arm]),
            reason=None if arm == STOCK else found["reason"],
        )
        for arm in (OURS, STOCK)
    )
    first_calls = [
        Measurement(name=f"{arm}: first call", seconds=(taken,))
        for arm, taken in found["first"].items()
    ]
    reason = "; ".join(found["fallbacks"]) or None
    if not found["answered"]:
        reason = f"nothing replaced it{f': {reason}' if reason else ''}"
    return Case(
        name=FUNCTION + name,
        text=found["text"],
        rows=found["rows"],
        unit=found["unit"],
        timings=timings,
        rivals={STOCK: OURS},
        measurements=(
            *first_calls,
            Measurement(name=ANSWERED, values=found["answered"], reason=reason),
        ),
        goals=tuple(ratio_goals(name, timings)),
    )


def axolotl_tables(cases: Sequence[Case]) -> Iterator[Table]:
    """What is wrong, the runs with their phases, the functions."""
    wrong = tuple(
        (case.name, timing.reason)
        for case in cases
        for timing in case.timings
        if timing.reason is not None
    )
    if wrong:
        yield Table(
            title="axolotl: INVALID, results differ from stock's",
            header=("case", "difference"),
            rows=wrong,
            notes=("a case whose results differ has no speed: its goals are not met",),
        )
    functions = [case for case in cases if case.name.startswith(FUNCTION)]
    for case in cases:
        if case not in functions:
            yield from _run_tables(case)
    if functions:
        yield _function_table(functions)


def _run_tables(case: Case) -> list[Table]:
    """Who was faster, what each run measured, and where the time goes, stock beside ours."""
    seconds: dict[str, dict[str, float]] = {}
    rest, notes = [], []
    for item in case.measurements:
        arm, _, phase = item.name.partition(": ")
        if item.name == COLD:
            compiling = show_time(item.values["compiling_seconds"] or 0.0)
            whole = show_time(median(item.seconds))
            notes.append(f"{COLD}: {whole}, {compiling} of compiling, all threads")
        elif item.name == ANSWERED:
            calls = ", ".join(f"{name} ×{count}" for name, count in item.values.items() if count)
            notes.append(f"{ANSWERED}, forked workers apart: {calls or 'none'}")
            notes += [item.reason] if item.reason else []
        elif item.seconds and arm in (STOCK, OURS):
            seconds.setdefault(phase, {})[arm] = median(item.seconds)
        else:
            rest.append(item)
    tables = case_tables("axolotl", replace(case, measurements=()))
    name = f"{case.name}, run by run"
    tables += case_tables("axolotl", replace(case, name=name, timings=(), measurements=tuple(rest)))
    order = [name for name in _FIRST_PHASES if name in seconds]
    rows = []
    for phase in (*order, *(name for name in seconds if name not in order)):
        stock, ours = seconds[phase].get(STOCK), seconds[phase].get(OURS)
        if max(stock or 0.0, ours or 0.0) >= _LEAST_SHOWN_SECONDS:
            times = ("–" if value is None else show_time(value) for value in (stock, ours))
            rows.append((phase, *times, show_ratio(stock / ours if stock and ours else None)))
    if rows:
        title = f"axolotl: {case.name}: where the time goes, medians"
        tables.append(Table(title=title, header=("", STOCK, OURS, "ratio"), rows=tuple(rows)))
    if tables:
        tables[-1] = replace(tables[-1], notes=(*tables[-1].notes, *notes))
    return tables


def _function_table(cases: Sequence[Case]) -> Table:
    rows, notes = [], []
    for case in cases:
        cells = []
        for timing in map(case.timing, (STOCK, OURS)):
            if timing is None:
                cells.append("–")
                continue
            spread = f"{show_time(min(timing.seconds))} – {show_time(max(timing.seconds))}"
            cells.append(f"{show_time(timing.median_seconds)} ({spread})")
        timing = case.timing(OURS)
        is_equal = "–" if timing is None else "yes" if timing.equal else "no"
        name = case.name.removeprefix(FUNCTION)
        ratio = show_ratio(case.ratio(OURS, STOCK))
        rows.append((f"{name}: {case.rows:,} {case.unit}", *cells, ratio, is_equal))
        notes += [f"{name}: {item.reason}" for item in case.measurements if item.reason]
    return Table(
        title="axolotl: function by function, medians and spread",
        header=("", STOCK, OURS, "ratio", "equal"),
        rows=tuple(rows),
        notes=tuple(notes),
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--model"]:
        write_model(Path(sys.argv[2]))
    else:
        main()
