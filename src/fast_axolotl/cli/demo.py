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
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fast_axolotl.cli.options import ResultAsJson, examples, say

if TYPE_CHECKING:
    from fast_axolotl.protocol.plan import Plan
    from fast_axolotl.record.protocol_result import ProtocolResult

DEMO_EXAMPLES = examples("demo", "demo -o report.html")

_BATCHES = 230
_PAIRS = 3
_LEAST_STEPS, _LEAST_SECONDS = 220, 3.5
"""More than the 200 fetches and 2 s that a verdict needs, warm-up apart."""
_TRIAL_STEPS = 20
_LOSSES = {
    "The candidate uses more memory because it loads pyarrow and keeps a few prepared batches in a "
    "queue. Neither grows with the size of the data.": {
        "working_set_bytes",
        "working_set_peak_bytes",
    },
    "The candidate takes longer to its first step because it first loads pyarrow. This happens "
    "once per process.": {"first_step_seconds", "start_to_step_seconds"},
}
"""What to know about a figure in which the demo's short runs make our reader look worse."""
_TEXT = "the model reads what it is given and waits for what it is not while rows come"


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The HTML report to write.")
    ] = Path("demo-report.html"),
    as_json: ResultAsJson = False,
) -> None:
    """See on generated data what this package measures and changes, in about a minute.

    A small model in numpy is fed by a reader in plain Python and by this package's reader, in
    alternating order. The result is printed as a table and written as an HTML report. It needs no
    download, no torch and no GPU.
    """
    from fast_axolotl.cli.prove import print_protocol, run_plan
    from fast_axolotl.cli.report import check_targets, make_documents
    from fast_axolotl.protocol.runner import write_json
    from fast_axolotl.record.codec import to_plain
    from fast_axolotl.record.protocol_result import PROTOCOL_FILE
    from fast_axolotl.report.page import render_page, write_text

    check_targets(output=output)
    missing = [name for name in ("plotly", "jinja2") if find_spec(name) is None]
    left_out = f"no HTML report: it needs {' and '.join(missing)} (pip install {' '.join(missing)})"
    if missing:
        say(f"{left_out}. The result is printed here")
    folder = Path(tempfile.mkdtemp(prefix="fast-axolotl-demo-"))
    try:
        data = folder / "rows.jsonl"
        rows = write_rows(data)
        say(
            f"{rows:,} rows generated. The baseline reads them in plain Python, the candidate with "
            "fast-axolotl; both train the same small model. The runs take about a minute"
        )
        result = explain_losses(run_plan(plan_demo(data), folder / "protocol"))
        print_protocol(result, as_json=as_json)
        if not missing:
            write_json(folder / "protocol" / PROTOCOL_FILE, to_plain(result))
            write_text(output, render_page(make_documents([folder / "protocol"])[0]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(left_out if missing else f"the report is {output}")


def explain_losses(result: ProtocolResult) -> ProtocolResult:
    """The result, with a note for each figure in which the package's own reader is worse."""
    lost = {
        row.name for row in result.matrix.rows for cell in row.cells[1:] if cell.outcome == "worse"
    }
    notes = [note for note, names in _LOSSES.items() if lost & names]
    return replace(result, notes=(*result.notes, *notes))


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
    texts = ("rows read in plain Python, with json and lists", "rows read by fast-axolotl")
    arms = tuple(replace(arm, text=text) for arm, text in zip(plan.arms, texts, strict=True))
    return replace(plan, title="the demo: one model, two readers", arms=arms)
