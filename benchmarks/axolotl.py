"""The real Axolotl as it is and accelerated, in one run: ``make bench-axolotl``.

A case begins with one run of each that is compared and not counted; every counted pair is compared
as well. What is timed is the work: the process less its imports and less compilation, both of which
stand apart in the result, as does the same run with no kernel compiled before.

``axolotl_inputs`` makes data and configurations; ``axolotl_runs`` starts Axolotl's command line,
through ``axolotl_driver``, which watches it, and says whether two runs gave the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.axolotl_driver import COMPILING, IMPORTS, WATCHING
from benchmarks.axolotl_inputs import (
    DATASETS,
    TRAIN_STEPS,
    Config,
    documents,
    preprocess_config,
    stream_config,
    text_stream,
    train_config,
    write_model,
    write_rows,
)
from benchmarks.axolotl_runs import (
    ANSWERED,
    COLD,
    OURS,
    STOCK,
    AxolotlSession,
    Race,
    Run,
    batches_difference,
    logged_losses,
    losses_difference,
    prepared_difference,
)
from benchmarks.children import RunError, offline_environment, run_child
from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.result import (
    MEGABYTE,
    Case,
    Goal,
    Measurement,
    Result,
    Table,
    case_tables,
    format_ratio,
)
from fast_axolotl.errors import MissingExtraError, UsageError
from fast_axolotl.record.units import format_seconds

PREPROCESS = tuple(f"preprocess-{kind}" for kind in DATASETS)
_LEAST: Mapping[str, Sequence[float]] = {
    # What is asked for, and what is aimed at.
    **dict.fromkeys(PREPROCESS, (2.0, 3.0)),
    "train": (4.0,),
    "train-2-ranks": (4.0,),
}
"""Case to the least ratios of ours over stock's speed."""

_PREPROCESS_COMMAND = ("axolotl.cli.main", "preprocess")
"""As the console script runs it. It matters: workers that stock spawns import this main module, in
a third of the time that ``axolotl.cli.preprocess`` takes."""
_TRAIN_COMMAND = ("axolotl.cli.train",)
"""What ``axolotl train`` has ``accelerate launch`` run."""
TRAIN = {"train": 1, "train-2-ranks": 2}
"""Case to its number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    document_bytes: int
    steps: int
    buffer_rows: int
    """``streaming_multipack_buffer_size`` of both."""
    share: float
    """Of the asked-for size of the file."""
    budget_bytes: int | None = None
    """What ours may take for the first batch, beyond what it held before."""
    buffer_bytes: int | None = None
    """At which ours ends a buffer; ``None`` leaves that to the rows, as stock does."""


STREAMING: Mapping[str, _Stream] = {
    "streaming": _Stream(document_bytes=2000, steps=60, buffer_rows=100, share=1.0),
    "streaming-1mb": _Stream(
        document_bytes=MEGABYTE,
        steps=20,
        buffer_rows=64,
        share=0.25,
        budget_bytes=256 * 1024**2,
        buffer_bytes=8 * 1024**2,
    ),
}
"""The buffers are smaller than Axolotl's default of 10,000 rows, so that a short run meets some."""

CASES = (*PREPROCESS, *TRAIN, *STREAMING)
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
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """The chosen cases."""
    chosen = check_names("case", options.cases, CASES)
    if min(options.rows, options.repeats, options.stream_mb) < 1:
        raise UsageError("rows, repeats and the size of the stream must be at least 1")
    if find_spec("axolotl") is None:
        raise MissingExtraError("this race runs the real Axolotl: pip install axolotl==0.19.0")
    cache, model = folder / "kernels", folder / "model"
    environment = offline_environment(folder, cache)
    tell("compiling kernels")
    seconds = json.loads(run_child("fast_axolotl", "warmup", "--json", env=environment))["seconds"]
    warm_up = {"import_seconds": seconds.pop("import of numba"), "compile_seconds": seconds}
    tell("making the model and its tokenizer")
    run_child("benchmarks.axolotl", "--model", str(model), env=environment)
    session = AxolotlSession(
        folder=folder,
        cache=cache,
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
            else:
                cases.append(streaming_case(name, session, options.stream_mb))
        except RunError as error:
            tell(f"{name}: {error}")
            cases.append(_failed(name, str(error).replace(f"{folder}/", "")))
    tables = list(axolotl_tables(cases))
    return Result(cases=cases, facts={"warm_up": warm_up}, notes=NOTES, tables=tables)


def _failed(name: str, reason: str) -> Case:
    return Case(name=name, text="failed", rows=0, left_out={name: reason})


def _with_goals(case: Case, *others: Goal) -> Case:
    """The case with the ratios that are asked for, and other goals."""
    goals = [case.ratio_goal(OURS, STOCK, least) for least in _LEAST.get(case.name, ())]
    aims = [replace(goal, text=f"{goal.text}, aimed at") for goal in goals[1:]]
    return replace(case, goals=[*goals[:1], *aims, *others])


def _preprocess_race(kind: str, session: AxolotlSession) -> Race:
    data = session.folder / f"{kind}.jsonl"
    if not data.exists():
        write_rows(data, session.rows, kind)

    def configure(_: str, folder: Path) -> Config:
        return preprocess_config(session.model, data, folder / "prepared", kind)

    def difference(stock: Run, ours: Run) -> str | None:
        return prepared_difference(stock.folder / "prepared", ours.folder / "prepared")

    return Race(
        name=f"preprocess-{kind}",
        command=_PREPROCESS_COMMAND,
        configure=configure,
        difference=difference,
        session=session,
    )


def preprocess_case(name: str, session: AxolotlSession) -> Case:
    """``axolotl preprocess`` of one kind of dataset."""
    kind = name.removeprefix("preprocess-")
    race = _preprocess_race(kind, session)
    folder = race.race(keep=kind == "chat")
    if kind == "chat":
        session.prepared = race.configure(STOCK, folder)
    text = f"{session.rows:,} rows, a fifth of them repeated: time after imports"
    return _as_case(race, text, "JSON lines → prepared", Run.work_seconds)


def train_case(name: str, session: AxolotlSession) -> Case:
    """``axolotl train`` on the chat dataset that stock prepared."""
    ranks = TRAIN[name]
    if session.prepared is None:
        session.tell("train: preparing the dataset")
        preprocess = _preprocess_race("chat", session)
        session.prepared = preprocess.configure(STOCK, preprocess.run(STOCK).folder)
    prepared = session.prepared
    equal_steps: list[int] = []

    def configure(_: str, folder: Path) -> Config:
        config = train_config(prepared, folder / "output")
        # Axolotl gives every rank a device of its number, even without an accelerator; what is
        # worked out from this overrules that.
        overrule = {"max_memory": {"cpu": "8GiB"}, "ddp_backend": "gloo"}
        return {**config, **overrule} if ranks > 1 else config

    def difference(stock: Run, ours: Run) -> str | None:
        pairs = zip(logged_losses(stock), logged_losses(ours), strict=False)
        equal_steps.append(sum(first == second for first, second in pairs))
        return losses_difference(stock, ours)

    race = Race(
        name=name,
        command=_TRAIN_COMMAND,
        configure=configure,
        difference=difference,
        session=session,
        ranks=ranks,
    )
    race.race()
    text = f"{session.rows:,} rows, {ranks} rank(s): from the loaded dataset to the first step"
    seconds = partial(Run.work_seconds, since="loaded", until="first step", apart=(WATCHING,))
    losses = Goal(
        "logged losses and gradient norms equal to the last digit",
        TRAIN_STEPS,
        "steps",
        min(equal_steps),
        "the worst pair of runs",
        at_least=True,
    )
    return _as_case(race, text, "dataset → step", seconds, losses)


def _as_case(
    race: Race, text: str, gives: str, seconds: Callable[[Run], float], *goals: Goal
) -> Case:
    rows = race.session.rows
    case = Case(
        name=race.name,
        text=text,
        rows=rows,
        timings=race.timings(rows, gives, seconds),
        rivals={STOCK: OURS},
        measurements=(*race.phases(), race.cold(seconds)),
    )
    return _with_goals(case, *goals)


# A pretraining run over a stream. Two inputs: documents of 2 kB, where everything is compared; and
# documents of 1 MB, where Axolotl's buffer, which counts rows, holds whatever they weigh, and ours
# is bounded by bytes. There the batches may differ, since the buffers end elsewhere: memory counts,
# and no speed. A stall is the time that the loop waits for its next batch, over that time and the
# steps'. The first batch stands apart: it fills the first buffer.

_BEGIN, _FIRST, _END = "first batch asked for", "first step", "trained"


def streaming_case(name: str, session: AxolotlSession, megabytes: int) -> Case:
    """``axolotl train`` on a stream, stock and with our reader."""
    stream = STREAMING[name]
    data = session.folder / f"{name}.jsonl"
    session.tell(f"{name}: writing the documents")
    count = max(1, round(megabytes * MEGABYTE * stream.share) // stream.document_bytes)
    with data.open("w", encoding="utf-8") as file:
        for text in documents(count, stream.document_bytes):
            file.write(f'{{"text": "{text}"}}\n')

    def configure(arm: str, folder: Path) -> Config:
        output, options = folder / "output", {"buffer_rows": stream.buffer_rows}
        config = stream_config(session.model, output, steps=stream.steps, **options)
        config |= text_stream(data, ours=arm == OURS)
        if arm == OURS and stream.budget_bytes is not None:
            config["fast_axolotl_memory_budget"] = stream.budget_bytes // 2
            config["fast_axolotl_buffer_bytes"] = stream.buffer_bytes
        return config

    race = Race(
        name=name,
        command=_TRAIN_COMMAND,
        configure=configure,
        difference=batches_difference if stream.buffer_bytes is None else lambda *_: None,
        session=session,
        watch_memory=True,
    )
    race.race()
    measurements = []
    for arm, runs in race.runs.items():
        for number, run in enumerate(runs, start=1):
            peak = peak_bytes(run)
            values = {
                "peak_pss_bytes": peak,
                "for_the_first_batch_bytes": peak_above_bytes(run),
                "first_batch_seconds": run.ledgers[0]["waits"][0],
                "stall_share": stall_share(run),
            }
            text = f"{arm}, run {number}"
            reason = None if peak is not None else "this system tells no PSS"
            measurements.append(Measurement(name=text, values=values, reason=reason))
    stock, ours = (_median(map(peak_bytes, race.runs[arm])) for arm in (STOCK, OURS))
    share = None if stock is None or ours is None else ours / stock
    goals = [Goal("peak PSS of the process tree, ours over stock's", 1.0, "×", share)]
    if stream.budget_bytes is not None:
        above = _median(map(peak_above_bytes, race.runs[OURS]))
        text = "memory that ours takes for its first batch"
        taken = None if above is None else above / MEGABYTE
        goals.append(Goal(text, stream.budget_bytes / MEGABYTE, "MB", taken))
    size = data.stat().st_size
    data.unlink()
    kilobytes = stream.document_bytes // 1000
    has_speed = stream.buffer_bytes is None
    return Case(
        name=name,
        text=f"{size / MEGABYTE:,.0f} MB, documents of {kilobytes:,} kB, {stream.steps} steps",
        rows=stream.steps,
        unit="steps",
        timings=race.timings(stream.steps, "stream → steps", _training_seconds)
        if has_speed
        else (),
        rivals={STOCK: OURS},
        measurements=(*measurements, race.answered()),
        goals=goals,
    )


def _training_seconds(run: Run) -> float:
    return run.work_seconds(since=_BEGIN, until=_END, apart=(WATCHING,))


def stall_share(run: Run) -> float:
    """Of the time from the second batch on."""
    first, *waits = run.ledgers[0]["waits"]
    return float(sum(waits) / (_training_seconds(run) - first))


def peak_bytes(run: Run) -> int | None:
    """The most PSS of the process tree."""
    return max((sample.pss_bytes for sample in run.memory), default=None)


def peak_above_bytes(run: Run) -> int | None:
    """The most anonymous PSS until the first batch is there, above that when it was asked for.

    Afterwards the memory of the steps is in it, too, which is none of the data's.
    """
    begin, end = run.at(_BEGIN), run.at(_FIRST)
    before = [sample.anonymous_bytes for sample in run.memory if sample.at <= begin]
    during = [sample.anonymous_bytes for sample in run.memory if begin < sample.at <= end]
    return max(during) - before[-1] if before and during else None


def _median(values: Iterable[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def axolotl_tables(cases: Sequence[Case]) -> Iterator[Table]:
    """What is wrong, and the runs with their phases."""
    wrong = [(case.name, item.reason) for case in cases for item in case.timings if item.reason]
    if wrong:
        yield Table(
            title="axolotl: INVALID, results differ from stock's",
            header=("case", "difference"),
            rows=wrong,
            notes=("a case whose results differ has no speed: its goals are not met",),
        )
    for case in cases:
        yield from _run_tables(case)


def _run_tables(case: Case) -> list[Table]:
    """Who was faster, what each run measured, and where the time goes, stock beside ours."""
    seconds: dict[str, dict[str, float]] = {}
    rest, notes = [], []
    for item in case.measurements:
        arm, _, phase = item.name.partition(": ")
        if item.name == COLD:
            compiling = format_seconds(item.values["compiling_seconds"] or 0.0)
            whole = format_seconds(median(item.seconds))
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
    tables += case_tables("axolotl", replace(case, name=name, timings=(), measurements=rest))
    order = [name for name in _FIRST_PHASES if name in seconds]
    rows = []
    for phase in (*order, *(name for name in seconds if name not in order)):
        stock, ours = seconds[phase].get(STOCK), seconds[phase].get(OURS)
        if max(stock or 0.0, ours or 0.0) >= _LEAST_SHOWN_SECONDS:
            times = map(format_seconds, (stock, ours))
            rows.append((phase, *times, format_ratio(stock / ours if stock and ours else None)))
    if rows:
        title = f"axolotl: {case.name}: where the time goes, medians"
        tables.append(Table(title=title, header=("", STOCK, OURS, "ratio"), rows=rows))
    if tables:
        tables[-1] = replace(tables[-1], notes=(*tables[-1].notes, *notes))
    return tables


if __name__ == "__main__":
    if sys.argv[1:2] == ["--model"]:
        write_model(Path(sys.argv[2]))
    else:
        main()
