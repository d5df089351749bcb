"""``fast-axolotl protocol`` and ``compare``: does it help me? An answer with intervals.

``compare`` sets records or protocols beside each other later, with limits for CI.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fast_axolotl.cli.measure import ProfileSteps
from fast_axolotl.cli.options import (
    DataPath,
    Matters,
    ResultAsJson,
    examples,
    parse_percent,
    say,
    unused_folder,
)
from fast_axolotl.errors import UsageError

if TYPE_CHECKING:
    from fast_axolotl.protocol import Plan
    from fast_axolotl.record.protocol_result import ProtocolResult

PROTOCOL_EXAMPLES = examples(
    "protocol config.yml --pin max_steps=200",
    "protocol config.yml --streaming --pin max_steps=200,num_workers=2",
    "protocol config.yml --command 'axolotl train {config} --launcher torchrun' --max-minutes 60",
    "protocol --baseline 'python train.py --workers 0' --candidate 'python train.py --workers 4' "
    "-o protocols/workers",
    "protocol --command 'torchrun --nproc-per-node {world_size} train.py' --world-size 1,2,4 "
    "--profile-steps 5 --pairs 3",
)
COMPARE_EXAMPLES = examples(
    "compare runs/before runs/after",
    "compare protocols/workers --markdown",
    "compare protocols/main protocols/branch --fail-if 'tokens_per_second < 0.97' "
    "--fail-if 'stall_fraction > +0.02'",
    "compare protocols/main protocols/branch --require 'tokens_per_second > 0.97'",
)

_BROKEN = 3
"""Exit code where a limit is broken, apart from 1 (the data) and 2 (how it was called)."""
_UNCHECKED = 4
"""Exit code where no limit is broken and one could not be checked."""


def protocol(
    config: Annotated[
        Path | None, typer.Argument(help="The Axolotl configuration.", metavar="CONFIG.yml")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Without a configuration: the command to compare with (A).")
    ] = None,
    candidate: Annotated[
        str | None, typer.Option(help="Without a configuration: the command to test (B).")
    ] = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Also compare streaming by our reader.")
    ] = False,
    dedupe: Annotated[
        bool, typer.Option("--dedupe", help="Also time dedupe alone, on your rows.")
    ] = False,
    pairs: Annotated[
        int, typer.Option(help="Measured runs of each variant; at least 3 for an answer.", min=1)
    ] = 5,
    warmup: Annotated[
        int, typer.Option(help="Warm-up runs of each variant, which do not count.", min=0)
    ] = 1,
    matters: Matters = None,
    max_minutes: Annotated[
        float | None,
        typer.Option(
            help="Start no pair after so many minutes; one that has started is finished.",
            min=0.01,
        ),
    ] = None,
    pin: Annotated[
        str | None,
        typer.Option(
            help="Set these keys of the configuration in every variant: "
            "num_workers=2,prefetch_factor=4,max_steps=200."
        ),
    ] = None,
    command: Annotated[
        str | None, typer.Option(help="How to start Axolotl. Default: 'axolotl train {config}'.")
    ] = None,
    world_size: Annotated[
        str | None,
        typer.Option(
            help="Numbers of GPUs to compare, such as 1,2,4, in place of {world_size} in --command."
        ),
    ] = None,
    profile_steps: ProfileSteps = 0,
    data_path: DataPath = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for the protocol; an interrupted one is continued. "
            "Default: fast-axolotl-protocols/TIME.",
        ),
    ] = None,
    as_json: ResultAsJson = False,
) -> None:
    """Compare two or three variants, run alternately (A B B A), and report whether one is faster.

    With an Axolotl configuration, it compares stock Axolotl with the same configuration and our
    functions (drop-in), and with streaming on request. Without one, it compares any two commands.
    Every run is a separate process with its own record. To measure your own Python loop, use
    fast_axolotl.measure(os.environ["FAST_AXOLOTL_MEASURE"]).

    The same command with the same --output continues an interrupted protocol. With more --pairs, it
    adds to a finished one.
    """
    from fast_axolotl.protocol import parse_pins, plan_axolotl, plan_commands
    from fast_axolotl.protocol.axolotl_plan import COMMAND
    from fast_axolotl.protocol.plan import Plan, plan_arm, plan_world_sizes

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
        plan = plan_world_sizes(plan, world_size)
    plan = replace(
        plan,
        pairs=pairs,
        warmup=warmup,
        matters=plan.matters if matters is None else parse_percent(matters),
        max_minutes=max_minutes,
        profile_steps=profile_steps,
        data_path=str(data_path) if data_path is not None else plan.data_path,
    )
    folder = output or unused_folder("fast-axolotl-protocols", f"{datetime.now():%Y%m%d-%H%M%S}")
    try:
        result = run_plan(plan, folder)
    except (KeyboardInterrupt, SystemExit):
        say(f"the same command with --output {shlex.quote(str(folder))} continues from here")
        raise
    print_protocol(result, as_json=as_json)
    say(f"the records are in {folder}; as an HTML report: fast-axolotl report {folder}")
    if not result.pairs:
        raise typer.Exit(1)


def run_plan(plan: Plan, folder: Path) -> ProtocolResult:
    """Run a protocol with a display of how far it is."""
    from fast_axolotl.protocol import run_protocol
    from fast_axolotl.report.terminal import protocol_progress

    say(f"measuring into {folder}")
    with protocol_progress() as update:
        return run_protocol(plan, folder, environment=os.environ, progress=update, warn=say)


def print_protocol(result: ProtocolResult, *, as_json: bool = False) -> None:
    """The matrix and what it means."""
    from fast_axolotl.record.codec import to_json
    from fast_axolotl.report.comparison import protocol_document
    from fast_axolotl.report.terminal import print_document

    print(to_json(result)) if as_json else print_document(protocol_document(result))


def compare(
    first: Annotated[Path, typer.Argument(help="A record or a protocol.", metavar="A")],
    second: Annotated[
        Path | None,
        typer.Argument(
            help="Another one. Default: compare the variants of protocol A.", metavar="B"
        ),
    ] = None,
    arm: Annotated[
        str | None,
        typer.Option(help="Variant of the protocols. Default: the last one that both have."),
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            help="A limit on the ratio B ÷ A, 'tokens_per_second < 0.97', or with a sign on the "
            "difference B − A, 'stall_fraction > +0.02'. Repeatable.",
        ),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            help="Fail unless this is proven, written in the same way: 'tokens_per_second > 0.97'. "
            "Repeatable.",
        ),
    ] = None,
    single: Annotated[
        bool,
        typer.Option(
            "--single", help="Check limits on two single runs, although noise is unknown."
        ),
    ] = False,
    matters: Matters = None,
    as_json: ResultAsJson = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the result as Markdown.")
    ] = False,
) -> None:
    """Compare two runs or protocols, for example in CI, and fail if a limit is exceeded.

    Exit code 3: the whole 95 % interval of a figure is beyond a limit of --fail-if, or not within a
    limit of --require. Exit code 4: a limit could not be checked, because a single run has no
    interval; --single compares the values themselves.
    """
    from fast_axolotl.protocol import compare_folders, parse_check
    from fast_axolotl.report.comparison import comparison_document
    from fast_axolotl.report.markdown import document_markdown
    from fast_axolotl.report.terminal import print_document

    limits = [parse_check(text) for text in fail_if or ()]
    limits += [parse_check(text, is_required=True) for text in require or ()]
    least = None if matters is None else parse_percent(matters)
    found = compare_folders(first, second, arm=arm, limits=limits, is_single=single, matters=least)
    checks = [(check.sentence, check.is_broken) for check in found.checks]
    document = comparison_document(
        found.matrix, alarms=found.alarms, notes=found.notes, checks=checks
    )
    if as_json:
        print(json.dumps(asdict(found), indent=2, ensure_ascii=False))
    elif as_markdown:
        print(document_markdown(document), end="")
    else:
        print_document(document)
    if found.is_broken or found.is_unchecked:
        raise typer.Exit(_BROKEN if found.is_broken else _UNCHECKED)
