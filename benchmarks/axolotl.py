"""The real Axolotl as it is and accelerated, in one run: ``make bench-axolotl``.

A case begins with one run of each that is compared and not counted; every counted pair is compared
as well. What is timed is the work: the process less its imports and less compilation, both of which
stand apart in the result, as does the same run with no kernel compiled before.

``axolotl_inputs`` makes data and configurations; ``axolotl_runs`` starts Axolotl's command line,
through ``axolotl_driver``, which watches it, and says whether two runs gave the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.axolotl_driver import WATCHING
from benchmarks.axolotl_inputs import (
    DATASETS,
    TRAIN_STEPS,
    Config,
    documents,
    preprocess_config,
    stream_config,
    train_config,
    write_model,
    write_rows,
)
from benchmarks.axolotl_runs import (
    OURS,
    STOCK,
    AxolotlSession,
    Race,
    Run,
    batches_difference,
    logged_losses,
    losses_difference,
    open_axolotl_session,
    prepared_difference,
)
from benchmarks.children import RunError
from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.result import MEGABYTE, Case, Goal, Measurement, Result
from fast_axolotl.errors import MissingExtraError, UsageError

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


STREAM = "streaming"
_DOCUMENT_BYTES, _STREAM_STEPS = 2000, 60
_BUFFER_ROWS = 100
"""Smaller than Axolotl's default of 10,000 rows, so that a short run meets some buffers."""

CASES = (*PREPROCESS, *TRAIN, STREAM)
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
    session = open_axolotl_session(folder, options.rows, options.repeats, tell)
    cases: list[Case] = []
    for name in chosen:
        try:
            if name in PREPROCESS:
                cases.append(preprocess_case(name, session))
            elif name in TRAIN:
                cases.append(train_case(name, session))
            else:
                cases.append(streaming_case(session, options.stream_mb))
        except RunError as error:
            tell(f"{name}: {error}")
            reason = str(error).replace(f"{folder}/", "")
            cases.append(Case(name=name, text="failed", rows=0, left_out={name: reason}))
    return Result(cases=cases, notes=NOTES)


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


# A pretraining run over a stream. A stall is the time that the loop waits for its next batch, over
# that time and the steps'. The first batch stands apart: it fills the first buffer.

_BEGIN, _END = "first batch asked for", "trained"


def streaming_case(session: AxolotlSession, megabytes: int) -> Case:
    """``axolotl train`` on a stream, stock and with our reader."""
    data = session.folder / f"{STREAM}.jsonl"
    session.tell(f"{STREAM}: writing the documents")
    with data.open("w", encoding="utf-8") as file:
        for text in documents(max(1, megabytes * MEGABYTE // _DOCUMENT_BYTES), _DOCUMENT_BYTES):
            file.write(f'{{"text": "{text}"}}\n')

    def configure(arm: str, folder: Path) -> Config:
        sizes = {"steps": _STREAM_STEPS, "buffer_rows": _BUFFER_ROWS}
        return stream_config(session.model, folder / "output", data, ours=arm == OURS, **sizes)

    race = Race(
        name=STREAM,
        command=_TRAIN_COMMAND,
        configure=configure,
        difference=batches_difference,
        session=session,
        watch_memory=True,
    )
    race.race()
    measurements = []
    for arm, runs in race.runs.items():
        for number, run in enumerate(runs, start=1):
            values = {
                "peak_pss_bytes": peak_bytes(run),
                "first_batch_seconds": run.ledgers[0]["waits"][0],
                "stall_share": stall_share(run),
            }
            measurements.append(Measurement(name=f"{arm}, run {number}", values=values))
    stock, ours = (_median(map(peak_bytes, race.runs[arm])) for arm in (STOCK, OURS))
    share = None if stock is None or ours is None else ours / stock
    size = data.stat().st_size
    data.unlink()
    return Case(
        name=STREAM,
        text=f"{size / MEGABYTE:,.0f} MB, documents of 2 kB, {_STREAM_STEPS} steps",
        rows=_STREAM_STEPS,
        unit="steps",
        timings=race.timings(_STREAM_STEPS, "stream → steps", _training_seconds),
        rivals={STOCK: OURS},
        measurements=(*measurements, race.answered()),
        goals=[Goal("peak PSS of the process tree, ours over stock's", 1.0, "×", share)],
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


def _median(values: Iterable[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


if __name__ == "__main__":
    if sys.argv[1:2] == ["--model"]:
        write_model(Path(sys.argv[2]))
    else:
        main()
