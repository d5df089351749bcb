"""``fast-axolotl protocol``: does it help me? One command, an answer with intervals."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fast_axolotl.cli.options import DataPath
from fast_axolotl.errors import UsageError

if TYPE_CHECKING:
    from fast_axolotl.protocol import Plan, Progress
    from fast_axolotl.record.protocol_result import ProtocolResult

__all__ = ["PROTOCOL_EXAMPLES", "print_protocol", "protocol", "run_plan"]

PROTOCOL_EXAMPLES = "\n\n".join(
    [
        "Examples:",
        "  fast-axolotl protocol config.yml --pin max_steps=200",
        "  fast-axolotl protocol config.yml --steps 1,2,3,4,5 --sequence-len 16384 "
        "--pin max_steps=200,num_workers=2",
        "  fast-axolotl protocol config.yml --command "
        "'axolotl train {config} --launcher torchrun' --max-minutes 60",
        "  fast-axolotl protocol --baseline 'python train.py --workers 0' "
        "--candidate 'python train.py --workers 4' --title 'four workers' -o protocols/workers",
    ]
)


_Config = Annotated[
    Path | None, typer.Argument(help="Configuration of Axolotl.", metavar="CONFIG.yml")
]
_Baseline = Annotated[
    str | None, typer.Option(help="Without a configuration: the command to compare with.")
]
_Candidate = Annotated[
    str | None, typer.Option(help="Without a configuration: the command in question.")
]
_Steps = Annotated[
    str | None,
    typer.Option(
        help="1 stock, 2 drop-in, 3 streaming, 4 side by side, 5 dedupe. Default: 1,2,4,5."
    ),
]
_Pairs = Annotated[int, typer.Option(help="Runs of every arm that count.", min=1)]
_Warmup = Annotated[int, typer.Option(help="Runs of every arm before, which do not.", min=0)]
_MaxMinutes = Annotated[
    float | None,
    typer.Option(help="Begin no pair that would end later; the one under way goes on.", min=0.01),
]
_RunMinutes = Annotated[
    float | None,
    typer.Option(help="End a run that takes longer; it counts as failed.", min=0.01),
]
_Pin = Annotated[
    str | None,
    typer.Option(
        help="Keys of the configuration, the same in all arms: "
        "num_workers=2,prefetch_factor=4,max_steps=200."
    ),
]
_SequenceLen = Annotated[int | None, typer.Option(help="sequence_len of the streaming arm.", min=1)]
_Command = Annotated[
    str | None,
    typer.Option(help="How Axolotl is started. Default: 'axolotl train {config}'."),
]
_DropCaches = Annotated[
    bool, typer.Option("--drop-caches", help="Empty the page cache before each run (root).")
]
_KeepOutputs = Annotated[
    bool, typer.Option("--keep-outputs", help="Keep what Axolotl wrote in each run.")
]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Folder of the protocol; one that was interrupted is continued. "
        "Default: fast-axolotl-protocols/TIME.",
    ),
]
_Title = Annotated[
    str | None, typer.Option(help="Heads the result and its report. Default: what is compared.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
_AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print the result as Markdown.")]


def protocol(
    config: _Config = None,
    baseline: _Baseline = None,
    candidate: _Candidate = None,
    steps: _Steps = None,
    pairs: _Pairs = 5,
    warmup: _Warmup = 1,
    max_minutes: _MaxMinutes = None,
    run_minutes: _RunMinutes = None,
    pin: _Pin = None,
    sequence_len: _SequenceLen = None,
    command: _Command = None,
    data_path: DataPath = None,
    drop_caches: _DropCaches = False,
    keep_outputs: _KeepOutputs = False,
    output: _Output = None,
    title: _Title = None,
    as_json: _AsJson = False,
    as_markdown: _AsMarkdown = False,
) -> None:
    """Answer whether something helps: two or three arms, run by turns, A B B A, and compared.

    With a configuration of Axolotl: stock, the drop-in, and streaming on request. Without: any two
    commands. Every run is a process of its own and leaves a record. A Python loop of your own is
    measured by fast_axolotl.measure(os.environ["FAST_AXOLOTL_MEASURE"]).

    The same command with the same --output continues a protocol that was interrupted.
    """
    if config is not None:
        if baseline or candidate:
            raise UsageError("give a configuration, or --baseline and --candidate, not both")
        plan = _plan_config(config, steps, command, pin, sequence_len, keep_outputs)
    else:
        if steps or pin or sequence_len or command or keep_outputs:
            raise UsageError(
                "--steps, --pin, --sequence-len, --command and --keep-outputs are about a "
                "configuration of Axolotl; two commands take none of them"
            )
        plan = _plan_commands(baseline, candidate)
    plan = replace(
        plan,
        title=title or plan.title,
        pairs=pairs,
        warmup=warmup,
        max_minutes=max_minutes,
        run_minutes=run_minutes,
        drop_caches=drop_caches,
        data_path=str(data_path) if data_path is not None else plan.data_path,
    )
    folder = output or _new_folder()
    try:
        result = run_plan(plan, folder)
    except (KeyboardInterrupt, SystemExit):
        _say(f"the same command with --output {shlex.quote(str(folder))} goes on from here")
        raise
    print_protocol(result, as_json=as_json, as_markdown=as_markdown)
    _say(f"kept in {folder}")
    is_answered = result.pairs > 0 if result.arms else "reason" not in result.dedupe
    if not is_answered:
        raise typer.Exit(1)


def _say(line: str) -> None:
    print(f"fast-axolotl: {line}", file=sys.stderr, flush=True)


def _plan_config(
    config: Path,
    steps: str | None,
    command: str | None,
    pin: str | None,
    sequence_len: int | None,
    keep_outputs: bool,
) -> Plan:
    from fast_axolotl.protocol import plan_axolotl
    from fast_axolotl.protocol.axolotl_plan import COMMAND, STEPS, parse_pins, parse_steps

    return plan_axolotl(
        config,
        steps=STEPS if steps is None else parse_steps(steps),
        command=command or COMMAND,
        pins=parse_pins(pin) if pin else {},
        sequence_len=sequence_len,
        keep_outputs=keep_outputs,
    )


def _plan_commands(baseline: str | None, candidate: str | None) -> Plan:
    from fast_axolotl.protocol import plan_commands

    if not baseline or not candidate:
        raise UsageError("give a configuration, or both --baseline and --candidate")
    return plan_commands(baseline, candidate)


def run_plan(plan: Plan, folder: Path) -> ProtocolResult:
    """Run a protocol with a display of how far it is."""
    from fast_axolotl.protocol import run_protocol
    from fast_axolotl.report.terminal import protocol_progress

    _say(f"measuring into {folder}")
    with protocol_progress() as update:

        def tell(at: Progress) -> None:
            update(_in_words(at), at.done, at.total, at.run_seconds, at.seconds_left)

        return run_protocol(plan, folder, environment=os.environ, progress=tell)


def _in_words(at: Progress) -> str:
    if at.arm == "dedupe":
        return "dedupe on its own"
    return f"{at.arm}, warm-up" if at.pair < 0 else f"{at.arm}, pair {at.pair + 1} of {at.pairs}"


def print_protocol(
    result: ProtocolResult, *, as_json: bool = False, as_markdown: bool = False
) -> None:
    """The matrix and what it means, in one of three forms."""
    from fast_axolotl.record.codec import to_json
    from fast_axolotl.report.matrix import protocol_markdown, show_protocol

    if as_json:
        print(to_json(result))
    elif as_markdown:
        print(protocol_markdown(result), end="")
    else:
        show_protocol(result)


def _new_folder() -> Path:
    stem = f"{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path("fast-axolotl-protocols") / stem
    number = 1
    while folder.exists():
        number += 1
        folder = folder.with_name(f"{stem}-{number}")
    return folder
