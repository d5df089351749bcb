"""The command line: parse, one call, print.

Errors that the package raises on purpose become one line on stderr: exit code 1 for the data, 2 for
the way the command was called. Everything heavy is imported inside the commands, so that ``--help``
is quick.
"""

from __future__ import annotations

import io
import signal
import sys
import warnings
from typing import Annotated, Any

import typer

from fast_axolotl import __version__
from fast_axolotl.cli.batch import BATCH_EXAMPLES, batch
from fast_axolotl.cli.bench import bench_app
from fast_axolotl.cli.dedupe import DEDUPE_EXAMPLES, dedupe
from fast_axolotl.cli.demo import DEMO_EXAMPLES, demo
from fast_axolotl.cli.doctor import DOCTOR_EXAMPLES, doctor
from fast_axolotl.cli.pack import PACK_EXAMPLES, pack
from fast_axolotl.cli.plan import PLAN_EXAMPLES, plan
from fast_axolotl.cli.prepare import PREPARE_EXAMPLES, prepare
from fast_axolotl.cli.protocol import COMPARE_EXAMPLES, PROTOCOL_EXAMPLES, compare, protocol
from fast_axolotl.cli.read import READ_EXAMPLES, read
from fast_axolotl.cli.report import REPORT_EXAMPLES, report
from fast_axolotl.cli.run import (
    MEASURE_EXAMPLES,
    RUN_EXAMPLES,
    STATUS_EXAMPLES,
    measure,
    run,
    status,
)
from fast_axolotl.cli.scale import SCALE_EXAMPLES, scale
from fast_axolotl.cli.show import SHOW_EXAMPLES, show
from fast_axolotl.cli.trace import TRACE_EXAMPLES, trace
from fast_axolotl.cli.warmup import WARMUP_EXAMPLES, warmup
from fast_axolotl.cli.watch import WATCH_EXAMPLES, watch
from fast_axolotl.errors import FastAxolotlError, UsageError

__all__ = ["app", "main"]

_INTERRUPTED = 130
"""What a shell reports for a command that was stopped with Ctrl-C."""

app = typer.Typer(
    name="fast-axolotl",
    help="Measure a fine-tune honestly, accelerate its data path, prove the difference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command(epilog=READ_EXAMPLES)(read)
app.command(epilog=DEDUPE_EXAMPLES)(dedupe)
app.command(epilog=PACK_EXAMPLES)(pack)
app.command(epilog=PREPARE_EXAMPLES)(prepare)
app.command(epilog=WARMUP_EXAMPLES)(warmup)
# What follows the first word belongs to the command that is run, flags included.
_OF_A_COMMAND = {"allow_interspersed_args": False, "ignore_unknown_options": True}
app.command(epilog=RUN_EXAMPLES, context_settings=_OF_A_COMMAND)(run)
app.command(epilog=MEASURE_EXAMPLES, context_settings=_OF_A_COMMAND)(measure)
app.command(epilog=STATUS_EXAMPLES)(status)
app.command(epilog=DOCTOR_EXAMPLES)(doctor)
app.command(epilog=WATCH_EXAMPLES)(watch)
app.command(epilog=SHOW_EXAMPLES)(show)
app.command(epilog=PROTOCOL_EXAMPLES)(protocol)
app.command(epilog=COMPARE_EXAMPLES)(compare)
app.command(epilog=TRACE_EXAMPLES)(trace)
app.command(epilog=REPORT_EXAMPLES)(report)
app.command(epilog=SCALE_EXAMPLES)(scale)
app.command(epilog=PLAN_EXAMPLES)(plan)
app.command(epilog=BATCH_EXAMPLES)(batch)
app.command(epilog=DEMO_EXAMPLES)(demo)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """The console script."""
    warnings.showwarning = _show_warning
    signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that has no "×" gets a "?", not an error after the work is done.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = app(standalone_mode=False)
    except FastAxolotlError as error:
        code = 2 if isinstance(error, UsageError) else 1
        sys.exit(_fail(str(error), code))
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
    print(f"fast-axolotl: warning: {message}", file=sys.stderr)
