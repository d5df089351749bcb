"""``fast-axolotl bench advice``: is a run that waits for its data cured by what the meter advises?

The real Axolotl trains on a stream of long conversations of short turns, which takes it long to
tokenise: so many rows, then some steps, then so many rows. Its record is summed up, the settings
are taken out of the sentence that says what to do next, as a reader would, and put into the
configuration; and again, until the model is the limit or no setting is named.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fast_axolotl.bench.axolotl_inputs import (
    conversation,
    streaming_chat_config,
    write_config,
    write_model,
)
from fast_axolotl.bench.axolotl_runs import child_environment, last_line
from fast_axolotl.bench.machine import describe_machine
from fast_axolotl.bench.matrix import Machine, Table, machine_notes, save_json
from fast_axolotl.bench.reader import scratch_folder
from fast_axolotl.protocol.child import launch, with_own_programs
from fast_axolotl.protocol.losses import compare_losses
from fast_axolotl.protocol.matrix import read_figures

__all__ = ["AdviceResult", "Round", "advice_tables", "find_settings", "run_advice_bench"]

_ROWS = 3000
_TURNS = 20
"""Questions of a conversation, each with its answer. Axolotl looks at every turn on its own."""
_STEPS = 400
_BUFFER_ROWS = 100
"""Rows packed at a time; Axolotl's default is 10,000. So a short run meets some buffers."""
_MOST_ROUNDS = 4
_SETTING = re.compile(r"\b([a-z][a-z0-9_]*): (true|false|\d+)\b")
_RUN = "fast-axolotl run --"
"""Where this stands in an advice, Axolotl is to be started behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One training, and what was made of it."""

    settings: dict[str, Any]
    """Changed so far."""
    is_accelerated: bool
    verdict: str
    headline: str
    action: str
    stall_fraction: float | None
    wait_max_seconds: float | None
    tokens_per_second: float | None
    losses: str
    """Beside those of the first round."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceResult:
    """Every round."""

    machine: Machine
    date: str
    command: str
    rounds: tuple[Round, ...]
    is_cured: bool
    """Data-bound at first, compute-bound at the end."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def save(self, path: Path) -> None:
        """Writes the JSON; a file that is there already is refused."""
        save_json(self.to_json(), path)


def run_advice_bench(
    *,
    steps: int = _STEPS,
    work_dir: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> AdviceResult:
    """Follows the advice until there is none."""
    machine, begin = describe_machine(), time.monotonic()
    rounds: list[Round] = []
    with scratch_folder(work_dir) as folder:
        progress("model, tokenizer and rows are generated")
        runner = _Runner(folder=folder, steps=steps)
        runner.prepare()
        settings: dict[str, Any] = {}
        is_accelerated = False
        while len(rounds) < _MOST_ROUNDS:
            one = runner.run(len(rounds) + 1, settings, is_accelerated)
            rounds.append(one)
            progress(f"round {len(rounds)}: {one.headline} {one.action}")
            advised = find_settings(one.action)
            if one.verdict.startswith("compute") or not advised:
                break
            settings = {**settings, **advised}
            is_accelerated = is_accelerated or _RUN in one.action
    return AdviceResult(
        machine=machine,
        date=datetime.now(timezone.utc).date().isoformat(),
        command=f"fast-axolotl bench advice --steps {steps}",
        rounds=tuple(rounds),
        is_cured=rounds[0].verdict.startswith("data") and rounds[-1].verdict.startswith("compute"),
        seconds=time.monotonic() - begin,
    )


def find_settings(action: str) -> dict[str, Any]:
    """Keys of a configuration and their values, as an advice names them."""
    return {name: json.loads(value) for name, value in _SETTING.findall(action)}


def advice_tables(result: AdviceResult) -> list[Table]:
    """A row for each round."""
    rows = tuple(
        (
            str(number),
            ", ".join(f"{name}: {json.dumps(value)}" for name, value in one.settings.items())
            or "as it is",
            one.verdict,
            "–" if one.stall_fraction is None else f"{100 * one.stall_fraction:.1f} %",
            "–" if one.wait_max_seconds is None else f"{one.wait_max_seconds:.2f} s",
            "–" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}",
        )
        for number, one in enumerate(result.rounds, start=1)
    )
    advice = [f"round {n}: {one.action}" for n, one in enumerate(result.rounds, start=1)]
    notes = (
        *advice,
        result.rounds[-1].losses,
        "cured: the data was the limit, and is not any more" if result.is_cured else "NOT cured",
        f"{result.seconds / 60:.1f} min; {result.date}: {result.command}",
        *machine_notes(result.machine),
    )
    header = ("round", "changed", "verdict", "stall", "longest wait", "tokens/s")
    return [Table(title="bench advice", header=header, rows=rows, notes=notes)]


@dataclass(slots=True, kw_only=True)
class _Runner:
    folder: Path
    steps: int
    first_losses: tuple[float, ...] = ()

    def prepare(self) -> None:
        write_model(self.folder / "model")
        chosen = random.Random(0)
        with (self.folder / "chat.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(_ROWS):
                file.write(json.dumps(conversation(chosen, _TURNS)) + "\n")

    def run(self, number: int, settings: Mapping[str, Any], is_accelerated: bool) -> Round:
        record = self.folder / f"record-{number}"
        config = streaming_chat_config(
            self.folder / "model",
            self.folder / "chat.jsonl",
            self.folder / "output",
            steps=self.steps,
            buffer_rows=_BUFFER_ROWS,
        )
        path = write_config({**config, **settings}, self.folder / f"config-{number}.yml")
        environment = {
            **with_own_programs(child_environment(self.folder, self.folder / "kernels")),
            # The model has one core, the loader the other.
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "fast_axolotl", "run", "--measure", "--quiet"]
        command += [] if is_accelerated else ["--no-accelerate"]
        command += ["--output", str(record), "--", "axolotl", "train", str(path)]
        log = self.folder / "log.txt"
        if code := launch(command, environment, log, lambda: None):
            raise RuntimeError(f"axolotl train: exit code {code}: {last_line(log)}")
        shutil.rmtree(self.folder / "output", ignore_errors=True)
        return self._round(record, settings, is_accelerated)

    def _round(self, record: Path, settings: Mapping[str, Any], is_accelerated: bool) -> Round:
        found = read_figures(record)
        summary, verdict = found.summary, found.summary.verdict
        self.first_losses = self.first_losses or found.losses
        check = compare_losses([self.first_losses], [found.losses], "the last round")
        return Round(
            settings=dict(settings),
            is_accelerated=is_accelerated,
            verdict="/".join(filter(None, (verdict.kind, verdict.subtype))),
            headline=verdict.headline,
            action=verdict.action,
            stall_fraction=summary.stall_fraction,
            wait_max_seconds=summary.wait_max_seconds,
            tokens_per_second=summary.tokens_per_second,
            losses=check.sentence,
            seconds=summary.duration_seconds,
        )
