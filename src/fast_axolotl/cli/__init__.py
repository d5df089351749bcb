"""The command line: parse, one call, print.

Errors that the package raises on purpose become one line on stderr: exit code 1 for the data, 2 for
the way the command was called. They are written for Python; here their arguments become options of
the command line. Everything heavy is imported inside the commands, so that ``--help`` is quick.
"""

from __future__ import annotations

import io
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer
from typer import Exit, Option
from typer.core import TyperGroup

from fast_axolotl import __version__
from fast_axolotl.cli.bench import bench
from fast_axolotl.cli.data import dedupe, prepare, read, warmup
from fast_axolotl.cli.demo import demo
from fast_axolotl.cli.doctor import doctor
from fast_axolotl.cli.live import watch
from fast_axolotl.cli.measure import measure, run, status
from fast_axolotl.cli.options import name_options
from fast_axolotl.cli.plan import batch, plan, scale, trace
from fast_axolotl.cli.prove import compare, protocol
from fast_axolotl.cli.report import report, show
from fast_axolotl.errors import FastAxolotlError, UsageError

__all__ = ["app", "main"]

_INTERRUPTED = 130
"""What a shell reports for a command that was stopped with Ctrl-C."""


class _Group(TyperGroup):
    """Shows the help of arguments, which typer 0.25 loses with click 8.5, and no types of flags."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.callback is not None:
            hints = get_type_hints(command.callback, include_extras=True)
            parameters: list[Any] = command.params
            for parameter in parameters:
                parameter.help = parameter.help or hints[parameter.name].__metadata__[0].help
                if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                    parameter.metavar = ""
        return command


app = typer.Typer(
    name="fast-axolotl",
    help="Measure a fine-tune, accelerate its data path, prove the difference, plan the next run.",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Lines of a paragraph are joined, to fill the terminal.
    rich_markup_mode="markdown",
)
_COMMANDS: dict[str, dict[Callable[..., None], tuple[str, ...]]] = {
    "Measure and accelerate a run": {
        measure: (
            "measure -- axolotl train config.yml",
            "measure --live -- python train.py",
            "measure --profile-steps 5 -- torchrun --nproc-per-node 8 train.py",
        ),
        run: ("run -- axolotl preprocess config.yml", "run --live -- axolotl train config.yml"),
        show: ("show", "show fast-axolotl-runs/20300131-120000-axolotl --all"),
        report: ("report protocol/ -o answer.html", "report runs/before runs/after"),
        watch: (
            "watch fast-axolotl-runs/20300131-120000-axolotl",
            "watch 4711 --seconds 60 --output runs/first",
        ),
        status: ("status", "status --json"),
        doctor: ("doctor", "doctor --json"),
    },
    "Prove a difference": {
        demo: ("demo", "demo -o report.html"),
        protocol: (
            "protocol config.yml --streaming --pin max_steps=200,num_workers=2",
            "protocol --baseline 'python train.py --workers 0' "
            "--candidate 'python train.py --workers 4' -o protocols/workers",
            "protocol --command 'torchrun --nproc-per-node {world_size} train.py' "
            "--world-size 1,2,4 --profile-steps 5 --pairs 3",
        ),
        compare: (
            "compare runs/before runs/after",
            "compare protocols/main protocols/branch --fail-if 'tokens_per_second < 0.97'",
        ),
        bench: ("bench reader data.jsonl", "bench dedupe data.jsonl --column prompt"),
    },
    "Work on data": {
        read: ("read train.jsonl.zst", "read data/ --split train --columns messages --head 3"),
        dedupe: (
            "dedupe train.parquet -o clean.parquet --against test.parquet",
            "dedupe s3://bucket/raw/*.parquet -o s3://bucket/clean --engine ray",
        ),
        prepare: (
            "prepare config.yml --memory 2GiB --workers 8",
            "prepare config.yml --engine ray --address 10.0.0.1:6379 --output /shared/prepared",
        ),
        warmup: ("warmup",),
    },
    "Plan the next run": {
        plan: (
            "plan outputs/fast-axolotl-measure --gpu H100-SXM,B200 --gpus 8,64 --tokens 10B",
            "plan --model config.json --gpu H100-SXM --gpus 8,64,512 --tokens 1T",
        ),
        batch: (
            "batch config.yml --micro-batches 1,2,4,8 --global-batch 256 --ranks 8",
            "batch --command 'python train.py --micro-batch {micro_batch} "
            "--accumulation {accumulation} --steps {steps}' --global-batch 64",
        ),
        scale: ("scale runs/1-gpu runs/2-gpus", "scale protocols/sizes"),
        trace: ("trace traces/", "trace rank0.json.gz rank1.json.gz"),
    },
}
"""The commands as the help groups them, each with examples."""
for _panel, _commands in _COMMANDS.items():
    for _command, _examples in _commands.items():
        # What follows the first word belongs to the command that is run, flags included.
        _is_run = _command in (measure, run)
        app.command(
            epilog="\n\n".join(["Examples:", *(f"- `fast-axolotl {text}`" for text in _examples)]),
            rich_help_panel=_panel,
            context_settings={
                "allow_interspersed_args": not _is_run,
                "ignore_unknown_options": _is_run,
            },
        )(_command)


def main() -> None:
    """The console script."""
    warnings.showwarning = _show_warning
    signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal does not have is no reason to end.
            stream.reconfigure(errors="replace")
    try:
        code = app(prog_name="fast-axolotl", standalone_mode=False)
    except FastAxolotlError as error:
        code = 2 if isinstance(error, UsageError) else 1
        sys.exit(_fail(name_options(str(error)), code))
    except ModuleNotFoundError as error:
        if error.name not in ("numba", "pyarrow"):
            raise
        sys.exit(_fail(f"this needs {error.name}: pip install {error.name}", 2))
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
    version: Annotated[bool, Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"fast-axolotl {__version__}")
        raise Exit


def _terminate(number: int, frame: object) -> None:
    """Ends as an interrupt does, so that half-written files are removed."""
    sys.exit(_fail(f"stopped by {signal.Signals(number).name}", 128 + number))


def _fail(message: str, code: int) -> int:
    print(f"fast-axolotl: {' '.join(message.split())}", file=sys.stderr)
    return code


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"fast-axolotl: warning: {name_options(str(message))}", file=sys.stderr)
