"""The same training under TraceML and under ours: who says what is true? ``make bench-traceml``.

Each loop sleeps 10 ms in its model and 20 ms somewhere else, so two thirds of a step are in one
place. TraceML 0.5 is told of the model by ``trace_step`` around the loop's body, as its manual
says; ours measures the script as it is. Each has its own environment, and the processor seconds are
those of the whole command. TraceML has no name for preparing batches in the loop: "residual" counts
as right there. It looks at the memory of GPUs alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import Tell, execute, race_parser
from benchmarks.result import Result, record_table
from fast_axolotl.errors import UsageError
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import read_run
from fast_axolotl.record.units import format_seconds

CASES: dict[str, tuple[str, str | tuple[str, ...], str]] = {
    "rows": ("waiting for rows, 67 %", "INPUT", "data"),
    "map": ("map around the loader, 67 %", "INPUT", "data"),
    "prepare": ("tokenising in the loop, 67 %", ("INPUT", "RESIDUAL"), "data"),
    "pause": ("Python before backward, 67 %", "RESIDUAL", "code"),
    "rare": ("1 s every 25 steps, 80 %", "RESIDUAL", "code"),
    "model": ("the model alone", "COMPUTE", "compute"),
    "leak": ("3 MB kept in each step", "MEMORY", "memory"),
}
"""Of each loop: the truth, and how the verdicts begin that say it."""
_SCRIPT = """
import contextlib, sys, time, torch
case, is_traced = sys.argv[1], sys.argv[2] == "traced"
if is_traced:
    import traceml_ai as traceml
    traceml.init()
torch.set_num_threads(1)
kept = []

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, row):
        if case == "rows":
            time.sleep(0.02)
        return torch.ones(8)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, batch):
        time.sleep(0.01)
        return self.layer(batch)

def tokenise(batch):
    time.sleep(0.02)
    return batch

model = Model()
optimizer = torch.optim.SGD(model.parameters())
loader = torch.utils.data.DataLoader(Rows())
for step, batch in enumerate(map(tokenise, loader) if case == "map" else loader):
    with traceml.trace_step(model) if is_traced else contextlib.nullcontext():
        if case == "prepare":
            batch = tokenise(batch)
        loss = model(batch).sum()
        if case == "pause":
            time.sleep(0.02)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if case == "rare" and step % 25 == 0:
            time.sleep(1.0)
        if case == "leak":
            kept.append(bytearray(b"x" * 3_000_000))
            time.sleep(0.02)
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("traceml", __doc__)
    parser.add_argument("--peer-python", type=Path, help="of an environment with traceml-ai, torch")
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """Every case under both."""
    if options.peer_python is None:
        raise UsageError("name the Python of an environment with traceml-ai: --peer-python PYTHON")
    script = folder / "train.py"
    script.write_text(_SCRIPT, encoding="utf-8")
    rows = []
    for case, (truth, theirs, ours) in CASES.items():
        tell(f"{case}: TraceML")
        peer = _run_peer(options.peer_python, script, case, folder)
        tell(f"{case}: ours")
        own = _run_ours(script, case, folder)
        rows.append(
            {
                "case": case,
                "truth": truth,
                "peer": {**peer, "right": peer["verdict"].startswith(theirs)},
                "ours": {**own, "right": own["verdict"].startswith(ours)},
            }
        )
    columns = {
        "loop": lambda row: row["truth"],
        "TraceML": lambda row: row["peer"]["verdict"],
        "right ": lambda row: str(row["peer"]["right"]),
        "ours": lambda row: row["ours"]["verdict"],
        "right": lambda row: str(row["ours"]["right"]),
        "where": lambda row: row["ours"]["line"],
        "CPU, theirs": lambda row: format_seconds(row["peer"]["cpu_seconds"]),
        "CPU, ours": lambda row: format_seconds(row["ours"]["cpu_seconds"]),
    }
    return Result(facts={"cases": rows}, tables=[record_table("bench traceml", rows, columns, [])])


def _run_peer(python: Path, script: Path, case: str, folder: Path) -> dict[str, Any]:
    command = [str(python.parent / "traceml"), "run", "--run-name", case]
    command += ["--logs-dir", str(folder / "traceml"), str(script), "--args", case, "traced"]
    cost = _execute(command, {**os.environ, "PYTHONPATH": ""})
    text = (folder / "traceml" / case / "final_summary.json").read_text(encoding="utf-8")
    step_time = json.loads(text)["step_time"]
    return {"verdict": step_time["diagnosis"]["status"], "step_time": step_time["global"], **cost}


def _run_ours(script: Path, case: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "fast_axolotl", "measure", "-q", "--output"]
    command += [str(folder / case), "--", sys.executable, str(script), case, "plain"]
    cost = _execute(command, dict(os.environ))
    summary = summarise(read_run(folder / case))
    verdict = "/".join(filter(None, (summary.verdict.kind, summary.verdict.subtype)))
    told = [line.place for line in summary.where if line.share > 0.5]
    return {
        "verdict": verdict,
        "headline": summary.verdict.headline,
        "phases": summary.phases,
        "line": told[0] if told and verdict.partition("/")[0] in ("data", "code") else "",
        **cost,
    }


def _execute(command: Sequence[str], environment: dict[str, str]) -> dict[str, float]:
    """Wall and processor seconds of a command and all that it waited for."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "wall_seconds": time.perf_counter() - begin,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }


if __name__ == "__main__":
    main()
