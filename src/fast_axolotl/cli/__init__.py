"""The command line: parse, one call, print.

Errors that the package raises on purpose become one line on stderr: exit code 1 for the data, 2 for
the way the command was called. They are written for Python; here their arguments become options of
the command line. Everything heavy is imported inside the commands, so that ``--help`` is quick.
"""

from __future__ import annotations

import inspect
import io
import re
import signal
import sys
import warnings
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from fast_axolotl import __version__
from fast_axolotl.cli.batch import BATCH_EXAMPLES, batch
from fast_axolotl.cli.bench import BENCH_EXAMPLES, bench
from fast_axolotl.cli.dedupe import DEDUPE_EXAMPLES, dedupe
from fast_axolotl.cli.demo import DEMO_EXAMPLES, demo
from fast_axolotl.cli.doctor import DOCTOR_EXAMPLES, doctor
from fast_axolotl.cli.measure import (
    MEASURE_EXAMPLES,
    RUN_EXAMPLES,
    STATUS_EXAMPLES,
    measure,
    run,
    status,
)
from fast_axolotl.cli.options import name_options
from fast_axolotl.cli.plan import PLAN_EXAMPLES, plan
from fast_axolotl.cli.prepare import PREPARE_EXAMPLES, prepare
from fast_axolotl.cli.prove import COMPARE_EXAMPLES, PROTOCOL_EXAMPLES, compare, protocol
from fast_axolotl.cli.read import READ_EXAMPLES, WARMUP_EXAMPLES, read, warmup
from fast_axolotl.cli.report import REPORT_EXAMPLES, report
from fast_axolotl.cli.scale import SCALE_EXAMPLES, scale
from fast_axolotl.cli.show import SHOW_EXAMPLES, show
from fast_axolotl.cli.trace import TRACE_EXAMPLES, trace
from fast_axolotl.cli.watch import WATCH_EXAMPLES, watch
from fast_axolotl.errors import FastAxolotlError, UsageError

__all__ = ["app", "main"]

_INTERRUPTED = 130
"""What a shell reports for a command that was stopped with Ctrl-C."""


class _Group(TyperGroup):
    """Commands whose help looks the same with every version of typer and click.

    A flag is shown without a type, which newer typers write behind it. An argument keeps its help,
    which typer 0.25 loses with click 8.5. Lines of a paragraph are joined, to fill the terminal.
    """

    def get_params(self, ctx: Any) -> Any:
        return _tidy(super().get_params(ctx), {})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.callback is not None:
            command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.help or ""))
            _tidy(command.get_params(ctx), get_type_hints(command.callback, include_extras=True))
        return command


def _tidy(parameters: Any, hints: dict[str, Any]) -> Any:
    for one in parameters:
        if getattr(one, "is_flag", False) and one.metavar is None:
            one.metavar = ""
        if not one.help and hasattr(hints.get(one.name), "__metadata__"):
            one.help = hints[one.name].__metadata__[0].help
    return parameters


app = typer.Typer(
    name="fast-axolotl",
    help="Measure a fine-tune, accelerate its data path, prove the difference, plan the next run.",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_PANELS = {
    "Measure and accelerate a run": (
        (measure, MEASURE_EXAMPLES), (run, RUN_EXAMPLES), (show, SHOW_EXAMPLES),
        (report, REPORT_EXAMPLES), (watch, WATCH_EXAMPLES), (status, STATUS_EXAMPLES),
        (doctor, DOCTOR_EXAMPLES),
    ),
    "Prove a difference": (
        (demo, DEMO_EXAMPLES), (protocol, PROTOCOL_EXAMPLES), (compare, COMPARE_EXAMPLES),
        (bench, BENCH_EXAMPLES),
    ),
    "Work on data": (
        (read, READ_EXAMPLES), (dedupe, DEDUPE_EXAMPLES),
        (prepare, PREPARE_EXAMPLES), (warmup, WARMUP_EXAMPLES),
    ),
    "Plan the next run": (
        (plan, PLAN_EXAMPLES), (batch, BATCH_EXAMPLES), (scale, SCALE_EXAMPLES),
        (trace, TRACE_EXAMPLES),
    ),
}  # fmt: skip
"""The commands as the help groups them, with their examples."""
# What follows the first word belongs to the command that is run, flags included.
_OF_A_COMMAND = {"allow_interspersed_args": False, "ignore_unknown_options": True}
for _panel, _commands in _PANELS.items():
    for _command, _examples in _commands:
        _settings = _OF_A_COMMAND if _command in (measure, run) else None
        app.command(epilog=_examples, rich_help_panel=_panel, context_settings=_settings)(_command)


def main() -> None:
    """The console script."""
    warnings.showwarning = _show_warning
    signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that has no "×" gets a "?", not an error after the work is done.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = app(prog_name="fast-axolotl", standalone_mode=False)
    except FastAxolotlError as error:
        code = 2 if isinstance(error, UsageError) else 1
        sys.exit(_fail(name_options(str(error)), code))
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(_fail("interrupted", _INTERRUPTED))
    except Exception as error:
        # typer's own complaints about flags and arguments.
        describe = getattr(error, "format_message", None)
        if describe is None or not hasattr(error, "exit_code"):
            raise
        message = describe().rstrip(".")
        sys.exit(_fail(f"{message}; see --help", 2) if message else 2)
    # typer turns an interrupt into this result.
    sys.exit(_fail("interrupted", code) if code == _INTERRUPTED else code)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"fast-axolotl {__version__}")
        raise typer.Exit


def _terminate(number: int, frame: object) -> None:
    """Ends as an interrupt does, so that half-written files are removed."""
    sys.exit(_fail("terminated", 128 + number))


def _fail(message: str, code: int) -> int:
    print(f"fast-axolotl: {' '.join(message.split())}", file=sys.stderr)
    return code


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"fast-axolotl: warning: {name_options(str(message))}", file=sys.stderr)
