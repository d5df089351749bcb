"""``fast-axolotl demo``: the whole story on generated data, in about a minute."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fast_axolotl.protocol.plan import Plan

__all__ = ["DEMO_EXAMPLES", "demo"]

DEMO_EXAMPLES = "Examples:\n\n  fast-axolotl demo\n\n  fast-axolotl demo --axolotl -o report.html"


def demo(
    axolotl: Annotated[
        bool,
        typer.Option("--axolotl", help="The real Axolotl, as it is and accelerated: 11 minutes."),
    ] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="The report to write.")] = Path(
        "demo-report.html"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
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
        plan = _plan_axolotl(folder) if axolotl else _plan(folder)
        result = run_plan(plan, folder / "protocol")
        write_report([folder / "protocol"], output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print_protocol(result, as_json=as_json)
    print(f"fast-axolotl: the report is {output}", file=sys.stderr)


def _plan(folder: Path) -> Plan:
    from fast_axolotl.bench.story import plan_story, write_rows

    data = folder / "rows.jsonl"
    rows = write_rows(data)
    print(f"fast-axolotl: {rows:,} rows generated", file=sys.stderr, flush=True)
    return plan_story(data)


def _plan_axolotl(folder: Path) -> Plan:
    from fast_axolotl.bench.story import plan_axolotl_story

    print("fast-axolotl: model, tokenizer and rows are generated", file=sys.stderr, flush=True)
    return plan_axolotl_story(folder)
