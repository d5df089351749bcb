"""``fast-axolotl protocol`` and ``compare``: compare variants, with intervals.

``compare`` sets records or protocols beside each other later, with limits for CI.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from fast_axolotl.cli.measure import ProfileSteps
from fast_axolotl.cli.options import (
    AsJson,
    DataPath,
    Matters,
    RunsFolder,
    ShowAll,
    parse_counts,
    parse_percent,
    print_result,
    say,
    unused_folder,
)
from fast_axolotl.errors import UsageError

if TYPE_CHECKING:
    from fast_axolotl.protocol.plan import Plan
    from fast_axolotl.record.protocol_result import ProtocolResult

_BROKEN = 3
"""Exit code where a limit is broken, apart from 1 (the data) and 2 (how it was called)."""
_UNCHECKED = 4
"""Exit code where no limit is broken and one could not be checked."""


def protocol(
    config: Annotated[Path | None, Argument(help="The Axolotl configuration.")] = None,
    baseline: Annotated[str | None, Option(help="The command to compare with (A).")] = None,
    candidate: Annotated[str | None, Option(help="The command to test (B).")] = None,
    streaming: Annotated[bool, Option("--streaming", help="Also compare streaming.")] = False,
    dedupe: Annotated[bool, Option("--dedupe", help="Also time dedupe on your rows.")] = False,
    pairs: Annotated[
        int, Option(help="Largest number of pairs; ends earlier if the answer is clear.", min=1)
    ] = 10,
    warmup: Annotated[int, Option(help="Runs of each variant that do not count.", min=0)] = 1,
    matters: Matters = None,
    max_minutes: Annotated[
        float | None, Option(help="Start no new pair after this many minutes.", min=0.01)
    ] = None,
    pin: Annotated[
        str | None, Option(help="Settings for every variant: num_workers=2,max_steps=200.")
    ] = None,
    command: Annotated[
        str | None, Option(help="How to start Axolotl. Default: 'axolotl train {config}'.")
    ] = None,
    world_size: Annotated[
        str | None, Option(help="Numbers of GPUs for {world_size} in --command: 1,2,4.")
    ] = None,
    profile_steps: ProfileSteps = 0,
    data_path: DataPath = None,
    output: RunsFolder = None,
    is_all: ShowAll = False,
    as_json: AsJson = False,
) -> None:
    """Compare two or three variants, run in pairs (A B, B A), and report whether one is faster.

    With an Axolotl configuration, it compares stock Axolotl with the same configuration and our
    functions (drop-in), and with streaming on request. Without one, it compares any two commands.
    Every run is a separate process with its own record. To measure your own Python loop, use
    fast_axolotl.measure(os.environ["FAST_AXOLOTL_MEASURE"]).

    It ends as soon as the answer is clear, from three pairs on. The same command with the same
    --output continues an interrupted protocol.
    """
    from fast_axolotl.protocol.axolotl_plan import COMMAND, parse_pins, plan_axolotl
    from fast_axolotl.protocol.plan import Plan, plan_arm, plan_commands, plan_world_sizes

    if config is not None:
        if baseline or candidate:
            raise UsageError("pass either a configuration or --baseline and --candidate, not both")
        plan = plan_axolotl(
            config,
            streaming=streaming,
            dedupe=dedupe,
            command=command or COMMAND,
            pins=parse_pins(pin) if pin else {},
        )
    elif world_size is not None:
        if baseline or candidate or not command:
            raise UsageError("--world-size needs one command: pass --command 'torchrun …'")
        arm = plan_arm("command", command)
        plan = Plan(title=arm.text, arms=(arm,))
    else:
        if streaming or dedupe or pin or command:
            raise UsageError(
                "--streaming, --dedupe, --pin and --command need an Axolotl configuration; they do "
                "not work with two commands"
            )
        if not baseline or not candidate:
            raise UsageError("pass a configuration, or both --baseline and --candidate")
        plan = plan_commands(baseline, candidate)
    if world_size is not None:
        plan = plan_world_sizes(plan, parse_counts("--world-size", world_size))
    plan = replace(
        plan,
        pairs=pairs,
        warmup=warmup,
        matters=plan.matters if matters is None else parse_percent(matters),
        max_minutes=max_minutes,
        profile_steps=profile_steps,
        data_path=str(data_path) if data_path is not None else plan.data_path,
    )
    folder = output or unused_folder("fast-axolotl-protocols")
    try:
        result = run_plan(plan, folder)
    except (KeyboardInterrupt, SystemExit):
        say(f"the same command with --output {shlex.quote(str(folder))} continues from here")
        raise
    print_protocol(result, is_all=is_all, as_json=as_json)
    say(f"the records are in {folder}; every row: fast-axolotl compare {folder} --all")
    say(f"as an HTML report: fast-axolotl report {folder}")
    if not result.pairs:
        raise Exit(1)


def print_protocol(result: ProtocolResult, *, is_all: bool, as_json: bool) -> None:
    """The answer of a protocol with the rows that matter most, or with all of them."""
    from fast_axolotl.report.comparison import brief_matrix, protocol_document

    shown = result if is_all else replace(result, matrix=brief_matrix(result.matrix), order=())
    print_result(result, protocol_document(shown), as_json=as_json)


def run_plan(plan: Plan, folder: Path) -> ProtocolResult:
    """Run a protocol with a display of how far it is."""
    from fast_axolotl.protocol.runner import run_protocol
    from fast_axolotl.report.terminal import protocol_progress

    say(f"measuring into {folder}")
    with protocol_progress() as update:
        return run_protocol(plan, folder, environment=os.environ, progress=update, warn=say)


def compare(
    first: Annotated[Path, Argument(help="A record or a protocol.", metavar="A")],
    second: Annotated[
        Path | None, Argument(help="Default: compare the variants of protocol A.", metavar="B")
    ] = None,
    arm: Annotated[str | None, Option(help="Variant. Default: the last in both.")] = None,
    fail_if: Annotated[
        list[str] | None,
        Option(
            help="A limit on the ratio B ÷ A, 'tokens_per_second < 0.97', or with a sign on the "
            "difference B − A, 'stall_fraction > +0.02'. Repeatable."
        ),
    ] = None,
    require: Annotated[
        list[str] | None, Option(help="Fail unless this is proven: 'tokens_per_second > 0.97'.")
    ] = None,
    single: Annotated[bool, Option("--single", help="Check limits on single runs, too.")] = False,
    matters: Matters = None,
    is_all: ShowAll = False,
    as_json: AsJson = False,
    as_markdown: Annotated[bool, Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """Compare two runs or protocols, for example in CI, and fail if a limit is exceeded.

    Exit code 3: the whole 95 % interval of a figure is beyond a limit of --fail-if, or not within a
    limit of --require. Exit code 4: a limit could not be checked, because a single run has no
    interval; --single compares the values themselves.
    """
    from fast_axolotl.protocol.compare import compare_folders, parse_check
    from fast_axolotl.report.comparison import brief_matrix, comparison_document
    from fast_axolotl.report.markdown import document_markdown

    limits = [parse_check(text) for text in fail_if or ()]
    limits += [parse_check(text, is_required=True) for text in require or ()]
    least = None if matters is None else parse_percent(matters)
    found = compare_folders(first, second, arm=arm, limits=limits, is_single=single, matters=least)
    checks = [(check.sentence, check.is_broken) for check in found.checks]
    matrix = found.matrix if is_all or as_markdown else brief_matrix(found.matrix)
    document = comparison_document(
        matrix, arms=found.arms, alarms=found.alarms, notes=found.notes, checks=checks
    )
    if as_markdown and not as_json:
        print(document_markdown(document), end="")
    else:
        print_result(found, document, as_json=as_json)
    if any(check.is_broken for check in found.checks):
        raise Exit(_BROKEN)
    if not all(check.is_checked for check in found.checks):
        raise Exit(_UNCHECKED)
