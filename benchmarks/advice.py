"""Is a run that waits for its data cured by what the meter advises? ``make bench-advice``.

The real Axolotl trains on a stream of long conversations of short turns, which takes it long to
tokenise: so many rows, then some steps, then so many rows. Its record is summed up, the settings
are taken out of the sentence that says what to do next, as a reader would, and put into the
configuration; and again, until the model is the limit or no setting is named.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.axolotl_inputs import (
    CHAT,
    random_text,
    stream_config,
    write_config,
    write_model,
)
from benchmarks.children import last_error, offline_environment
from benchmarks.command import Tell, execute, race_parser
from benchmarks.result import Result, Table, record_table
from fast_axolotl.errors import UsageError
from fast_axolotl.measure.summary import summarise
from fast_axolotl.protocol.build import compare_losses
from fast_axolotl.protocol.child import launch, with_own_programs
from fast_axolotl.record.run_folders import read_training
from fast_axolotl.record.units import format_seconds, format_share, format_value

_ROWS = 3000
_TURNS = 20
"""Questions of a conversation, each with its answer. Axolotl looks at every turn on its own."""
_BUFFER_ROWS = 100
"""Rows packed at a time; Axolotl's default is 10,000. So a short run meets some buffers."""
_MOST_ROUNDS = 4
_SETTING = re.compile(r"\b([a-z][a-z0-9_]*): (true|false|\d+)\b")
_RUN = "fast-axolotl run --"
"""Where this stands in an advice, Axolotl is to be started behind it."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("advice", __doc__)
    parser.add_argument("--steps", type=int, default=400, help="of every training, 250 or more")
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """Follows the advice until there is none."""
    if options.steps < 250:
        raise UsageError(f"a verdict needs 250 steps, not {options.steps}")
    begin = time.monotonic()
    tell("model, tokenizer and rows are generated")
    write_model(folder / "model")
    chosen = random.Random(0)
    with (folder / "chat.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(_ROWS):
            turns = [
                {"role": role, "content": random_text(chosen, 1, 3)}
                for role in ("user", "assistant") * _TURNS
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    rounds: list[dict[str, Any]] = []
    first_losses: tuple[float, ...] = ()
    settings: dict[str, Any] = {}
    is_accelerated = False
    while len(rounds) < _MOST_ROUNDS:
        number = len(rounds) + 1
        record = read_training(_train(folder, number, options.steps, settings, is_accelerated))
        summary = summarise(record)
        verdict = summary.verdict
        losses = tuple(line.values["loss"] for line in record.find_losses())
        first_losses = first_losses or losses
        rounds.append(
            {
                "settings": dict(settings),
                "is_accelerated": is_accelerated,
                "verdict": "/".join(filter(None, (verdict.kind, verdict.subtype))),
                "headline": verdict.headline,
                "action": verdict.action,
                "stall_fraction": summary.stall_fraction,
                "wait_max_seconds": summary.wait_max_seconds,
                "tokens_per_second": summary.tokens_per_second,
                "losses": compare_losses([first_losses], [losses], "the last round")[1],
                "seconds": summary.duration_seconds,
            }
        )
        tell(f"round {number}: {verdict.headline} {verdict.action}")
        advised = find_settings(verdict.action)
        if verdict.kind == "compute" or not advised:
            break
        settings = {**settings, **advised}
        is_accelerated = is_accelerated or _RUN in verdict.action
    verdicts = [item["verdict"] for item in rounds]
    facts = {
        "rounds": rounds,
        "is_cured": verdicts[0].startswith("data") and verdicts[-1].startswith("compute"),
        "seconds": time.monotonic() - begin,
    }
    return Result(facts=facts, tables=(advice_table(facts),))


def find_settings(action: str) -> dict[str, Any]:
    """Keys of a configuration and their values, as an advice names them."""
    return {name: json.loads(value) for name, value in _SETTING.findall(action)}


def _train(
    folder: Path, number: int, steps: int, settings: dict[str, Any], is_accelerated: bool
) -> Path:
    """One training; gives the folder of its record."""
    record = folder / f"record-{number}"
    config = stream_config(
        folder / "model", folder / "output", steps=steps, buffer_rows=_BUFFER_ROWS
    )
    source = {"path": "json", "data_files": str(folder / "chat.jsonl"), "split": "train", **CHAT}
    config |= {"datasets": [source], "sequence_len": 512, "logging_steps": 10, **settings}
    path = write_config(config, folder / f"config-{number}.yml")
    environment = {
        **with_own_programs(offline_environment(folder, folder / "kernels")),
        # The model has one core, the loader the other.
        "OMP_NUM_THREADS": "1",
    }
    verb = ["run", "--measure"] if is_accelerated else ["measure"]
    command = [sys.executable, "-m", "fast_axolotl", *verb, "--quiet"]
    command += ["--output", str(record), "--", "axolotl", "train", str(path)]
    log = folder / "log.txt"
    if code := launch(command, environment, log, lambda: None):
        said = last_error(log.read_text(errors="replace"))
        raise RuntimeError(f"axolotl train: exit code {code}: {said}")
    shutil.rmtree(folder / "output", ignore_errors=True)
    return record


def advice_table(facts: dict[str, Any]) -> Table:
    """A row for each round."""

    def settings(item: Mapping[str, Any]) -> str:
        values = (f"{name}: {json.dumps(value)}" for name, value in item["settings"].items())
        return ", ".join(values) or "as it is"

    rounds = [{"number": str(at), **item} for at, item in enumerate(facts["rounds"], start=1)]
    cured = "cured: the data was the limit, and is not any more"
    return record_table(
        "bench advice",
        rounds,
        {
            "round": lambda item: item["number"],
            "changed": settings,
            "verdict": lambda item: item["verdict"],
            "stall": lambda item: format_share(item["stall_fraction"]),
            "longest wait": lambda item: format_seconds(item["wait_max_seconds"]),
            "tokens/s": lambda item: format_value(item["tokens_per_second"], ""),
        },
        (
            *(f"round {item['number']}: {item['action']}" for item in rounds),
            rounds[-1]["losses"],
            cured if facts["is_cured"] else "NOT cured",
            f"{facts['seconds'] / 60:.1f} min",
        ),
    )


if __name__ == "__main__":
    main()
