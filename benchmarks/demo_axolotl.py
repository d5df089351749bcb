"""The demo with the real Axolotl: as it is, accelerated, and streamed, on a generated chat set.

``make demo-axolotl`` runs it: all variants of a protocol, and dedupe alone, about 11 minutes on two
cores. With ``--json`` the result is printed as JSON.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.axolotl_inputs import (
    preprocess_config,
    train_config,
    write_config,
    write_model,
    write_rows,
)
from fast_axolotl.cli.prove import print_protocol, run_plan
from fast_axolotl.cli.report import check_targets, make_documents
from fast_axolotl.protocol.axolotl_plan import plan_axolotl
from fast_axolotl.protocol.plan import Plan
from fast_axolotl.record.codec import write_text
from fast_axolotl.report.page import render_page

ROWS = 10_000
STEPS = 260
SEQUENCE_LENGTH = 512
"""A step takes about a tenth of a second of one core."""
PAIRS = 3
REPORT = Path("demo-axolotl-report.html")


def plan_demo(folder: Path) -> Plan:
    """Model, tokenizer and rows are generated."""
    write_model(folder / "model")
    data = write_rows(folder / "chat.jsonl", ROWS)
    prepare = preprocess_config(folder / "model", data, folder / "prepared")
    config = {
        **train_config(prepare, folder / "output"),
        "sequence_len": SEQUENCE_LENGTH,
        "max_steps": STEPS,
        "save_steps": STEPS,
        "num_epochs": 100,
        "logging_steps": 10,
    }
    path = write_config(config, folder / "config.yml")
    pins = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 2}
    plan = plan_axolotl(path, streaming=True, dedupe=True, pairs=PAIRS, pins=pins)
    return replace(plan, title="the demo: Axolotl as it is, accelerated, and streamed")


if __name__ == "__main__":
    check_targets(output=REPORT)
    with tempfile.TemporaryDirectory(prefix="fast-axolotl-demo-") as name:
        protocol = Path(name) / "protocol"
        result = run_plan(plan_demo(Path(name)), protocol)
        write_text(REPORT, render_page(make_documents([protocol])[0]))
    print_protocol(result, is_all="--all" in sys.argv, as_json="--json" in sys.argv)
    print(f"The report is {REPORT}", file=sys.stderr)
