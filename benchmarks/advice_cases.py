"""Does advice keep its promises? ``make bench-advice``.

Every case is a loop over a real DataLoader whose costs are known: a model, a dataset and a sampler
that sleep, so that a busy machine changes little. The loop is measured, and what its advice names
is taken out of the sentence and applied, as a reader would: the settings of the loader, or the
function that it says to look at. Runs before and after alternate; the gain is the median of the
pairs' ratios of steps per second, the starts of epochs included.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.result import Result, Table, record_table
from fast_axolotl.measure import measure
from fast_axolotl.record import RunSummary
from fast_axolotl.record.units import format_share

LEAST_KEPT, LEAST_PACE = 0.5, 0.97
"""Of the gain promised that has to be reached; of the pace before that has to be kept."""
_WARMUP = 10
"""Steps before the clock starts."""
_SETTING = re.compile(r"(num_workers|prefetch_factor|persistent_workers)=(\w+)")
_MODEL, _ROW = "model", "row"
CASES: dict[str, dict[str, Any]] = {
    "no workers, rows wait": {_MODEL: 0.008, _ROW: 0.02},
    "2 workers, rows wait": {_MODEL: 0.006, _ROW: 0.04, "num_workers": 2},
    "2 workers, rows compute": {_MODEL: 0.004, "compute": 0.012, "num_workers": 2},
    "rows take 1 ms, no workers": {_MODEL: 0.006, _ROW: 0.001},
    "model computes, no workers": {"think": 0.01, "compute": 0.0025},
    "next(iter(loader)) for every step": {_MODEL: 0.005, _ROW: 0.005, "fresh": True},
    "short epochs, 1 worker": {_MODEL: 0.008, _ROW: 0.003, "num_workers": 1, "epoch": 12},
    "short epochs, 1 worker, slow rows": {_MODEL: 0.008, _ROW: 0.01, "num_workers": 1, "epoch": 20},
    "slow sampler, 2 workers": {_MODEL: 0.006, _ROW: 0.004, "num_workers": 2, "choose_rows": 0.01},
    "epochs are planned, 2 workers": {
        _MODEL: 0.006,
        _ROW: 0.004,
        "num_workers": 2,
        "epoch": 60,
        "plan_epoch": 0.5,
    },
    "a pause every 100 rows, 1 worker": {
        _MODEL: 0.01,
        _ROW: 0.002,
        "num_workers": 1,
        "pause": 0.4,
        "every": 100,
    },
    "a pause every 25 rows, 1 worker": {
        _MODEL: 0.01,
        _ROW: 0.002,
        "num_workers": 1,
        "pause": 0.12,
        "every": 25,
    },
    "every 5th row is slow, 1 worker": {
        _MODEL: 0.008,
        _ROW: 0.004,
        "num_workers": 1,
        "pause": 0.08,
        "every": 5,
    },
    "prepared in the loop": {_MODEL: 0.01, "prepare": 0.012},
    "other code in the loop": {_MODEL: 0.01, "report": 0.012},
    "just enough workers": {_MODEL: 0.016, _ROW: 0.0165, "num_workers": 1},
}
"""Seconds of each part by its name, and settings of the loader."""
_CURES: Mapping[str, Mapping[str, Any]] = {
    "choose_rows": {"choose_rows": 0.0},
    "plan_epoch": {"plan_epoch": 0.0},
    "Make one iterator": {"fresh": False},
    "prepare does into the loader": {"is_moved": True},
    "report": {"report": 0.0},
    "compute": {"compute": 0.0},
    "rows in advance": {"compute": 0.0, "row": 0.0},
}
"""What to change where the advice names something to look at."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("advice-cases", __doc__)
    parser.add_argument("--cases", type=names, default=[], help="names; by default all")
    parser.add_argument("--pairs", type=int, default=2, help="runs before and after")
    parser.add_argument("--seconds", type=float, default=6.0, help="of every run")
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """Follows the advice of every case."""
    begin = time.monotonic()
    cases: list[dict[str, Any]] = []
    for name in check_names("case", options.cases, list(CASES)):
        before, pairs = CASES[name], []
        summary, pace = train(folder / f"{len(cases)}", before, options.seconds)
        verdict = summary.verdict
        changed = follow(verdict.action)
        paces = [pace]
        for _ in range(options.pairs if changed else 0):
            paces = paces or [train(folder / f"{len(cases)}-again", before, options.seconds)[1]]
            after = train(folder / f"{len(cases)}-after", {**before, **changed}, options.seconds)[1]
            pairs.append(after / paces.pop())
        cases.append(
            {
                "name": name,
                "verdict": "/".join(filter(None, (verdict.kind, verdict.subtype))),
                "action": verdict.action,
                "promised": verdict.gain,
                "changed": dict(changed),
                "pairs": pairs,
                "given": statistics.median(pairs) - 1.0 if pairs else None,
                "cpu_cores": summary.cpu_cores,
                "stall": summary.stall_fraction,
            }
        )
        tell(f"{name}: {verdict.headline} {verdict.action} {cases[-1]['given']}")
    facts = {"cases": cases, "seconds": time.monotonic() - begin}
    return Result(facts=facts, tables=(cases_table(facts),))


def follow(action: str) -> dict[str, Any]:
    """What an advice changes: the settings that it names, and what it says to look at."""
    plain = {"True": True, "None": None}
    found = {
        name: plain[value] if value in plain else int(value)
        for name, value in _SETTING.findall(action)
    }
    cures = (changes for words, changes in _CURES.items() if words in action)
    return {**found, **next(cures, {})}


class Rows:
    """A dataset that is slow, and now and then makes a pause."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        self.case = case

    def __len__(self) -> int:
        return int(self.case.get("epoch", 100_000))

    def __getitem__(self, number: int) -> int:
        case = self.case
        time.sleep(case.get(_ROW, 0.0))
        if case.get("is_moved"):
            time.sleep(case["prepare"])
        compute(case.get("compute", 0.0))
        every = case.get("every", 0)
        if every and number % every == every - 1:
            time.sleep(case["pause"])
        return number


class Sampler:
    """Chooses rows, and plans epochs."""

    def __init__(self, case: Mapping[str, Any], length: int) -> None:
        self.case, self.length = case, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.plan_epoch()
        for number in range(self.length):
            self.choose_rows()
            yield number

    def plan_epoch(self) -> None:
        time.sleep(self.case.get("plan_epoch", 0.0))

    def choose_rows(self) -> None:
        if seconds := self.case.get("choose_rows"):
            time.sleep(seconds)


def compute(seconds: float) -> None:
    """Keep a processor busy."""
    end = time.thread_time() + seconds
    while seconds and time.thread_time() < end:
        pass


def report(seconds: float) -> None:
    time.sleep(seconds)


def prepare(seconds: float) -> None:
    time.sleep(seconds)


def train(folder: Path, case: Mapping[str, Any], seconds: float) -> tuple[RunSummary, float]:
    """One run: what was measured of it, and its steps per second."""
    import torch
    from torch.utils.data import DataLoader

    from fast_axolotl.integrations.torch_meter import watch_torch

    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self) -> None:
            time.sleep(case.get(_MODEL, 0.0))
            compute(case.get("think", 0.0))

    settings = ("num_workers", "prefetch_factor", "persistent_workers")
    rows, model = Rows(case), Model()
    options = {name: case[name] for name in settings if name in case}
    loader: Any = DataLoader(rows, batch_size=1, sampler=Sampler(case, len(rows)), **options)
    meter = measure(folder)
    step, end, first = 0, time.perf_counter() + seconds, 0.0
    with meter, watch_torch(meter):
        while time.perf_counter() < end:
            batches = iter(loader)
            for _ in batches:
                if "prepare" in case and not case.get("is_moved"):
                    prepare(case["prepare"])
                model()
                if case.get("report"):
                    report(case["report"])
                step += 1
                now = time.perf_counter()
                first = now if step == _WARMUP else first
                if now >= end or case.get("fresh"):
                    break
        del batches
    return meter.summary(), (step - _WARMUP) / (now - first)


def cases_table(facts: dict[str, Any]) -> Table:
    """A row for each case."""
    cases = facts["cases"]

    def signed(share: float | None) -> str:
        return "–" if share is None else f"{100 * share:+.0f} %"

    def settings(case: Mapping[str, Any]) -> str:
        return ", ".join(f"{name}={value}" for name, value in case["changed"].items()) or "nothing"

    def is_kept(case: Mapping[str, Any]) -> bool:
        promised = case["promised"]
        return bool(case["given"] >= (LEAST_KEPT * promised if promised else LEAST_PACE - 1.0))

    followed = [case for case in cases if case["given"] is not None]
    kept = sum(map(is_kept, followed))
    return record_table(
        "bench advice-cases",
        cases,
        {
            "case": lambda case: case["name"],
            "verdict": lambda case: case["verdict"],
            "stall": lambda case: format_share(case["stall"]),
            "followed": settings,
            "promised": lambda case: signed(case["promised"]),
            "reached": lambda case: signed(case["given"]),
            "kept": lambda case: "–" if case["given"] is None else "yes" if is_kept(case) else "NO",
        },
        (
            *(f"{case['name']}: {case['action']}" for case in cases),
            f"{kept} of {len(followed)} followed and kept; {facts['seconds'] / 60:.1f} min",
        ),
    )


if __name__ == "__main__":
    main()
