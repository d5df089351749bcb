"""``fast-axolotl run``, ``measure`` and ``status``: accelerate a command, measure it, or both.

A measured command is a child: this process stays, samples it from outside, and ends as the command
does, with the verdict on stderr. ``measure`` never changes what it measures.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated, NoReturn

from typer import Argument, Option

from fast_axolotl.cli.options import AsJson, DataPath, parse_names, print_result, say, unused_folder
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.report.document import Document, Paragraph, Table

Command = Annotated[list[str], Argument(help="What to run, after --.", metavar="COMMAND")]
Live = Annotated[bool, Option("--live", help="Measure, and show live figures.")]
Output = Annotated[
    Path | None, Option(help="Folder for the record. Default: fast-axolotl-runs/TIME-COMMAND.")
]
PeakTflops = Annotated[
    float | None, Option(help="Peak TFLOP/s of one GPU, if its name is unknown here.", min=0.001)
]
ProfileSteps = Annotated[int, Option(help="Number of steps to profile with torch.profiler.", min=0)]
NoStacks = Annotated[
    bool, Option("--no-stacks", help="Do not sample Python stacks: no phases, no lines of code.")
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Do not print the summary at the end.")]


def run(
    command: Command,
    skip: Annotated[
        str | None, Option(help="Replacements to skip (comma-separated), as status names them.")
    ] = None,
    measure: Annotated[bool, Option("--measure", help="Also record the run.")] = False,
    live: Live = False,
    output: Output = None,
    data_path: DataPath = None,
    peak_tflops: PeakTflops = None,
    profile_steps: ProfileSteps = 0,
    no_stacks: NoStacks = False,
    quiet: Quiet = False,
) -> None:
    """Run a command with a faster Axolotl: same results, no change to your files.

    It works through accelerate launch, torchrun and worker processes. The first line says which
    functions of Axolotl are replaced, and why others are not. If Axolotl was used, a line at the
    end says which replacements ran.

    With --measure, the run is also recorded. To measure a command without any replacement, use
    fast-axolotl measure.

    With --live, you see the figures while the command runs. Its output goes to log.txt in the
    folder of the record, and the last lines are shown.

    FAST_AXOLOTL=0 in the environment turns the replacements off.
    """
    from fast_axolotl.axolotl import status_line
    from fast_axolotl.axolotl.patches import REPLACEMENTS
    from fast_axolotl.axolotl.startup import SWITCH_NAME
    from fast_axolotl.integrations.launch import cannot_start, find_program, launch_environment

    names = parse_names(skip) if skip else []
    known = (*dict.fromkeys(item.name for item in REPLACEMENTS), SWITCH_NAME)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no replacement is named {unknown[0]!r}; there are {', '.join(known)}")
    recorded = (live, output, data_path, peak_tflops, profile_steps, no_stacks, quiet)
    if measure or live:
        _measure(command, *recorded, skip=names)
    if any(recorded):
        raise UsageError(
            "--output, --quiet, --data-path, --peak-tflops, --profile-steps and --no-stacks need a "
            "measured run: add --measure"
        )
    environment = launch_environment(os.environ, names)
    program = find_program(command[0], environment)
    os.environ.update(environment)
    say(status_line(environment))
    sys.stdout.flush()
    try:
        # The command takes this process over: signals and the exit code are its own.
        os.execve(program, command, environment)
    except OSError as error:
        raise cannot_start(program, error) from error


def measure(
    command: Command,
    live: Live = False,
    output: Output = None,
    data_path: DataPath = None,
    peak_tflops: PeakTflops = None,
    profile_steps: ProfileSteps = 0,
    no_stacks: NoStacks = False,
    quiet: Quiet = False,
) -> None:
    """Measure a training run without changing it, and say what limits it.

    It measures Axolotl, TRL, Unsloth, LLaMA-Factory and whatever else trains with the Hugging Face
    Trainer, Lightning, and loops over a torch DataLoader. For every other command, it measures CPU,
    memory, disk and GPU.

    No function is replaced, so this is also the baseline for an accelerated run (fast-axolotl run
    --measure).

    With --live, you see the figures while the command runs. Its output goes to log.txt in the
    folder of the record.
    """
    _measure(command, live, output, data_path, peak_tflops, profile_steps, no_stacks, quiet)


def _measure(
    command: list[str],
    live: bool,
    output: Path | None,
    data_path: Path | None,
    peak_tflops: float | None,
    profile_steps: int,
    no_stacks: bool,
    quiet: bool,
    skip: Sequence[str] | None = None,
) -> NoReturn:
    """Run the command as a child, with a record; ends as it does. Without ``skip``, the names of
    the functions to leave alone, nothing is replaced."""
    from fast_axolotl.axolotl import status_line
    from fast_axolotl.cli.live import LiveRun
    from fast_axolotl.integrations.launch import (
        Order,
        end_as,
        find_program,
        launch_environment,
        supervise,
    )

    order = Order(
        run_dir=str(_run_dir(output, command[0])),
        data_paths=(str(data_path),) if data_path else (),
        peak_tflops=peak_tflops,
        profile_steps=profile_steps,
        stacks=not no_stacks,
    )
    environment = launch_environment(
        os.environ, skip or (), order=order, accelerate=skip is not None
    )
    program = find_program(command[0], environment)
    os.environ.update(environment)
    if skip is not None:
        say(status_line(environment))
    say(f"measuring into {order.run_dir}")
    begin = time.time()
    with closing(LiveRun(order.run_dir, environment)) if live else nullcontext() as view:
        code = supervise(
            program,
            command,
            environment if view is None else view.environment,
            order.run_dir,
            data_path=order.data_paths[0] if order.data_paths else None,
            streams=None if view is None else view.streams,
            meanwhile=None if view is None else view.show,
        )
    if not quiet:
        _print_summary(order.run_dir, begin)
    if view is not None:
        # Last, so that the error of a command that failed is not pushed out of sight.
        view.print_end(code)
    end_as(code)


def status(as_json: AsJson = False) -> None:
    """List which functions of the installed Axolotl would be replaced, and why others are not."""
    from fast_axolotl.axolotl import SEE_LIST, check, host_name, status_line

    host, _, version = host_name().partition(" ")
    patches = check() if host else ()
    found = {
        "axolotl": version if host == "Axolotl" else None,
        "patches": [patch._asdict() for patch in patches],
    }
    rows = [
        [item.name, item.target.removeprefix("axolotl."), item.state, item.reason]
        for item in patches
    ]
    header = ["name", "function of Axolotl", "state", "reason"]
    table = [Table(header=header, rows=rows)] if rows else []
    line = Paragraph(status_line(os.environ, patches or None).removesuffix(SEE_LIST))
    print_result(found, Document(title="", blocks=[*table, line]), as_json=as_json)


def _print_summary(run_dir: str, begin: float) -> None:
    """The training of the run with the most steps; a second one is recorded beside the first."""
    from fast_axolotl.measure.summary import summarise
    from fast_axolotl.record.folder import choose_training, read_trainings
    from fast_axolotl.report.runs import ReportRun, show_short_summary
    from fast_axolotl.system import node_name

    try:
        records = read_trainings(run_dir, begin)
        shown = choose_training(records)
        summary = summarise(shown)
    except DataError as error:
        # A full disk, say: the command's own exit code must not be lost over it.
        say(str(error))
        return
    first = shown.ranks.get(0)
    if (first is not None and first.start.host != node_name()) or _task_number():
        # The node with rank 0 prints the whole.
        folder = shlex.quote(shown.path)
        say(f"{node_name()} wrote its part of the record: fast-axolotl show {folder}")
        return
    show_short_summary(ReportRun(name="", record=shown, summary=summary), file=sys.stderr)
    others = [record.path for record in records if record is not shown]
    if others:
        say(f"this training has the most steps of {len(records)}; the others: {', '.join(others)}")


def _run_dir(output: Path | None, program: str) -> Path:
    """The folder of a new record, or of one that other nodes of this job are writing now."""
    from fast_axolotl.measure.writers import find_running_nodes
    from fast_axolotl.record.protocol_result import PROTOCOL_FILE
    from fast_axolotl.system import node_name

    if output is not None:
        if output.is_dir() and any(output.glob("*.jsonl")):
            running = find_running_nodes(output)
            # A launcher may start several commands on one node, one for each rank.
            if not running or (node_name() in running and _task_number() is None):
                state = "of a run on this machine" if running else "of an earlier run"
                raise UsageError(
                    f"{output} already holds a record {state}; choose another --output"
                )
            say(f"joining the record that {', '.join(running)} is writing")
        if (output / PROTOCOL_FILE).exists():
            raise UsageError(f"{output} is the folder of a protocol; choose another --output")
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(
                f"{output} cannot be used for a record ({reason}); choose another --output"
            ) from error
        return output.absolute()
    return unused_folder("fast-axolotl-runs", Path(program).name).absolute()


def _task_number() -> int | None:
    """Which of several commands of a job this is, from 0; ``None`` where there is one."""
    for number, count in (
        ("RANK", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ):
        value, size = os.environ.get(number, ""), os.environ.get(count, "")
        if value.isdecimal() and size.isdecimal() and int(size) > 1:
            return int(value)
    return None
