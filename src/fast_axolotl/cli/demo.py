"""``fast-axolotl demo``: the whole story on generated data, in about a minute.

A protocol of two arms (``demo_arm``): one small model in numpy, fed by a reader in plain Python and
by ours.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import shlex
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fast_axolotl.cli.options import ResultAsJson, examples, say

if TYPE_CHECKING:
    from fast_axolotl.protocol.plan import Plan

__all__ = ["DEMO_EXAMPLES", "demo", "plan_demo", "write_rows"]

DEMO_EXAMPLES = examples("demo", "demo -o report.html")

_BATCHES = 230
_PAIRS = 3
_LEAST_STEPS, _LEAST_SECONDS = 220, 3.5
"""More than the 200 fetches and 2 s that a verdict needs, warm-up apart."""
_TRIAL_STEPS = 20
_TEXT = "the model reads what it is given and waits for what it is not while rows come"


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="The report to write.")] = Path(
        "demo-report.html"
    ),
    as_json: ResultAsJson = False,
) -> None:
    """Prove the difference on generated data: a protocol, its matrix, and an HTML report.

    A small model in numpy is fed by a reader in plain Python and by this package's, by turns. No
    download, no torch. What bounds each of them is said before and after.
    """
    from fast_axolotl.cli.protocol import print_protocol, run_plan
    from fast_axolotl.cli.report import check_targets, write_report

    check_targets(output=output)
    folder = Path(tempfile.mkdtemp(prefix="fast-axolotl-demo-"))
    try:
        data = folder / "rows.jsonl"
        rows = write_rows(data)
        say(f"{rows:,} rows generated")
        result = run_plan(plan_demo(data), folder / "protocol")
        write_report([folder / "protocol"], output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_protocol(result, as_json=as_json)
    say(f"the report is {output}")


def write_rows(path: Path, batches: int = _BATCHES) -> int:
    """Writes texts of various lengths as JSON lines, the same every time; returns how many."""
    from fast_axolotl.cli.demo_arm import BATCH_ROWS

    chosen = random.Random(0)
    words = [chosen.choice(_TEXT.split()) for _ in range(4000)]
    rows = batches * BATCH_ROWS
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            start, length = chosen.randrange(3000), chosen.randrange(120, 300)
            prompt = f"{number} {' '.join(words[start : start + length // 4])}"
            answer = " ".join(words[start + length // 4 : start + length])
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
    return rows


def plan_demo(data: Path, pairs: int = _PAIRS) -> Plan:
    """A reader in plain Python against ours, in front of the same model.

    The model alone is timed first: each run gets as many steps as a verdict needs on this machine,
    whoever feeds it.
    """
    from fast_axolotl.cli.demo_arm import Model, plain_batches
    from fast_axolotl.protocol import plan_commands

    model, seconds = Model(), []
    for batch in itertools.islice(plain_batches(data), _TRIAL_STEPS):
        begun = time.perf_counter()
        model.step(batch["input_ids"])
        seconds.append(time.perf_counter() - begun)
    steps = str(max(_LEAST_STEPS, math.ceil(_LEAST_SECONDS / min(seconds))))
    program = [sys.executable, "-m", "fast_axolotl.cli.demo_arm"]
    plain, fast = (shlex.join([*program, arm, str(data), steps]) for arm in ("plain", "fast"))
    plan = plan_commands(plain, fast, pairs=pairs, warmup=1, data_path=str(data))
    texts = ("rows read by json and lists, in Python", "rows read by fast-axolotl")
    arms = tuple(replace(arm, text=text) for arm, text in zip(plan.arms, texts, strict=True))
    return replace(plan, title="the demo: one model, two readers", arms=arms)
