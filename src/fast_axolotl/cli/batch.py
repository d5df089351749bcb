"""``fast-axolotl batch``: the micro-batch to use, by short runs of several."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_axolotl.cli.options import ResultAsJson, examples, parse_names, say, unused_folder
from fast_axolotl.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fast_axolotl.plan.batch import Advice
    from fast_axolotl.protocol.sweep import Sweep
    from fast_axolotl.record.protocol_result import Trial

__all__ = ["BATCH_EXAMPLES", "batch"]

BATCH_EXAMPLES = examples(
    "batch config.yml",
    "batch config.yml --micro-batches 1,2,4,8 --global-batch 256 --ranks 8 -o batches/llama",
    "batch --command 'python train.py --micro-batch {micro_batch} --accumulation {accumulation} "
    "--steps {steps}' --global-batch 64",
)


def batch(
    config: Annotated[
        Path | None, typer.Argument(help="Configuration of Axolotl.", metavar="[CONFIG.yml]")
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            help="Without a configuration: the training, with {micro_batch}, {accumulation} and "
            "{steps} in it. With one: how Axolotl is started."
        ),
    ] = None,
    micro_batches: Annotated[
        str | None, typer.Option(help="Sizes, as 1,2,4,8. Default: doubled until memory is full.")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(help="Samples of a step over all ranks. Default: the configuration's.", min=1),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Ranks that share --global-batch.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Steps of a run; 5 are warm-up.", min=8)] = 20,
    longest: Annotated[
        bool | None,
        typer.Option(help="Also try the longest batches. Default: with a configuration."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder of the sweep; one that was interrupted is continued. Default: "
            "fast-axolotl-batches/TIME.",
        ),
    ] = None,
    as_json: ResultAsJson = False,
) -> None:
    """Find the micro-batch to train with: tokens/s, memory and step time of several.

    Each size is a short run with a record. The global batch stays the same: a larger micro-batch
    accumulates less. Memory that runs out ends nothing, and its boundary is found.
    """
    from fast_axolotl.plan.batch import advise, choose_next, find_sizes
    from fast_axolotl.protocol.axolotl_plan import COMMAND, plan_batches
    from fast_axolotl.protocol.plan import plan_command
    from fast_axolotl.protocol.state import write_json
    from fast_axolotl.protocol.sweep import open_sweep
    from fast_axolotl.record.codec import to_json
    from fast_axolotl.report.terminal import protocol_progress

    try:
        wanted = [int(name) for name in parse_names(micro_batches or "")]
    except ValueError:
        wanted = [0]
    if min(wanted, default=1) < 1:
        raise UsageError(f"cannot read --micro-batches {micro_batches!r}; write 1,2,4,8")
    if global_batch is not None and global_batch % ranks:
        raise UsageError(f"--global-batch {global_batch} cannot be divided among {ranks} ranks")
    share = None if global_batch is None else global_batch // ranks
    moment = f"{datetime.now():%Y%m%d-%H%M%S}"
    folder = (output or unused_folder("fast-axolotl-batches", moment)).resolve()
    names = {"key": "micro-batch"}
    if config is not None:
        arm, own = plan_batches(
            config, steps=steps, prepared=folder / "prepared", command=command or COMMAND
        )
        share = share or own
        names = {"key": "micro_batch_size", "accumulation_key": "gradient_accumulation_steps"}
    elif command is None or "{micro_batch}" not in command:
        raise UsageError("give a configuration of Axolotl, or --command with {micro_batch} in it")
    elif longest:
        raise UsageError("--longest needs a configuration: other data cannot be chosen from here")
    elif ("{accumulation}" in command) != (share is not None):
        raise UsageError(
            "{accumulation} in --command and --global-batch go together: give both to keep the "
            "global batch, or none to let it grow with the micro-batch"
        )
    else:
        arm = plan_command("command", command.replace("{steps}", str(steps)))
    sizes, notes = find_sizes(share, wanted)
    if not sizes:
        raise UsageError(f"none of --micro-batches {micro_batches} divides {share} samples")
    say(f"measuring into {folder}")
    trials: list[Trial] = []
    found: dict[str, Any] = {"trials": trials, "notes": notes}
    try:
        with (
            protocol_progress() as update,
            open_sweep(
                arm,
                folder,
                environment=os.environ,
                progress=lambda at: update(at.arm, len(trials), 0, at.run_seconds, None),
                warn=say,
            ) as sweep,
        ):
            while size := choose_next(trials, sizes, is_listed=bool(wanted)):
                trial = sweep.run(size, 1 if share is None else share // size)
                trials.append(trial)
                if trial.outcome == "failed" and len(trials) == 1:
                    print(trial.reason, file=sys.stderr)
                    raise DataError("the first run failed", path=f"{folder}/{trial.folder}/log.txt")
                if trial.outcome == "ran" and global_batch and trial.ranks != ranks:
                    raise UsageError(
                        f"{trial.ranks} ranks shared --global-batch {global_batch}, not {ranks}: "
                        f"add --ranks {trial.ranks}"
                    )
            found["advice"] = advice = advise(trials, **names)
            if config is not None and longest is not False and advice.knee is not None:
                [chosen] = [one for one in trials if one.micro_batch == advice.knee]
                found |= _try_longest(sweep, chosen, sizes)
    except (KeyboardInterrupt, SystemExit):
        say(f"the same command with --output {shlex.quote(str(folder))} goes on from here")
        raise
    write_json(folder / "batch.json", found)
    print(to_json(found)) if as_json else _print(found, is_constant=share is not None)
    say(f"kept in {folder}")
    if advice.knee is None:
        raise typer.Exit(1)


def _try_longest(sweep: Sweep, chosen: Trial, sizes: Sequence[int]) -> dict[str, Any]:
    """Two steps: the first makes the optimizer's state, the second has its peak beside it."""
    from fast_axolotl.axolotl.longest import copy_longest, find_prepared
    from fast_axolotl.plan.batch import describe_longest

    root, config = sweep.running.root, sweep.arm.config or {}
    log = root / chosen.folder / "log.txt"
    prepared = find_prepared(Path(config.get("dataset_prepared_path") or root / "prepared"), log)
    if prepared is None:
        return {"longest_sentence": "The longest batch was not tried: no prepared dataset is left."}
    # Gradients of an earlier pass take memory beside the next one.
    passes, is_packed = min(2, chosen.accumulation), bool(config.get("sample_packing"))
    tokens = copy_longest(
        prepared,
        root / "longest",
        rows=chosen.micro_batch * chosen.ranks,
        repeats=4 * passes,
        full=int(config.get("sequence_len") or 0) if is_packed else None,
    )
    keys = {"dataset_prepared_path": str(root / "longest"), "curriculum_sampling": True}
    trial = sweep.run(chosen.micro_batch, passes, kind="longest", max_steps=2, **keys)
    sentence = describe_longest(trial, tokens, sizes)
    return {"longest": trial, "longest_tokens": tokens, "longest_sentence": sentence}


def _print(found: dict[str, Any], *, is_constant: bool) -> None:
    from fast_axolotl.record.units import format_bytes, format_count, format_seconds, format_share
    from fast_axolotl.report.terminal import show_matrix

    advice: Advice = found["advice"]
    rows = []
    for one in sorted(found["trials"], key=lambda trial: trial.micro_batch):
        marks = {advice.best: "best", advice.knee: "← knee"}
        used = one.peak_bytes / one.total_bytes if one.peak_bytes and one.total_bytes else None
        row = [
            str(one.micro_batch),
            str(one.accumulation),
            format_count(one.rate) if one.outcome == "ran" else one.outcome,
            f"{format_count(one.low)} to {format_count(one.high)}" if one.low else "–",
            format_seconds(one.step_seconds),
            format_bytes(one.peak_bytes),
            format_share(used, decimals=0),
            format_bytes(one.held_bytes),
            marks.get(one.micro_batch, ""),
        ]
        rows.append(row)
    ran = [one for one in found["trials"] if one.outcome == "ran"]
    title = "Batch sizes"
    if ran and is_constant:
        title += f", global batch {ran[0].micro_batch * ran[0].accumulation * ran[0].ranks:,}"
    if noise := [
        one.noise_scale for one in ran if one.noise_scale and one.micro_batch == advice.knee
    ]:
        title += f", gradient noise scale {format_count(noise[0])} samples (a proxy)"
    unit = ran[0].unit if ran else "tokens/s"
    header = ["micro-batch", "accumulation", unit, "95 %", "step", "peak", "of GPU", "held", ""]
    show_matrix(title, header, rows)
    lines = [*advice.sentences, found.get("longest_sentence", "")]
    lines += [f"! {line}" for line in advice.warnings]
    print("\n".join(filter(None, lines)))
