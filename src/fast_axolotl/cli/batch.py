"""``fast-axolotl batch``: the micro-batch to use, by short runs of several."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_axolotl.cli.options import ResultAsJson, examples, parse_names, say, unused_folder
from fast_axolotl.errors import DataError, UsageError

if TYPE_CHECKING:
    from fast_axolotl.record.protocol_result import Trial
    from fast_axolotl.report.document import Document

BATCH_EXAMPLES = examples(
    "batch config.yml",
    "batch config.yml --micro-batches 1,2,4,8 --global-batch 256 --ranks 8 -o batches/llama",
    "batch --command 'python train.py --micro-batch {micro_batch} --accumulation {accumulation} "
    "--steps {steps}' --global-batch 64",
)


def batch(
    config: Annotated[
        Path | None, typer.Argument(help="The Axolotl configuration.", metavar="[CONFIG.yml]")
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            help="Without a configuration: the training command, with {micro_batch}, "
            "{accumulation} and {steps} in it. With one: how to start Axolotl."
        ),
    ] = None,
    micro_batches: Annotated[
        str | None,
        typer.Option(
            help="Sizes to try, for example 1,2,4,8. Default: double until memory is full."
        ),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            help="Samples per step over all ranks. Default: that of the configuration.", min=1
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Ranks that share --global-batch.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Steps per run; the first 5 are warm-up.", min=8)] = 20,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for the runs; the same command continues an interrupted sweep. Default: "
            "fast-axolotl-batches/TIME.",
        ),
    ] = None,
    as_json: ResultAsJson = False,
) -> None:
    """Find the best micro-batch: try several, and compare tokens/s, memory and step time.

    Each size is one short recorded run. The global batch stays the same: a larger micro-batch needs
    fewer accumulation steps. If a size runs out of memory, the search continues below it. With a
    configuration, the longest batches of the data are tried at the recommended size, too.
    """
    from fast_axolotl.plan.batch import advise, choose_next, describe_longest, find_sizes
    from fast_axolotl.protocol.axolotl_plan import plan_batches
    from fast_axolotl.protocol.plan import Plan, plan_arm
    from fast_axolotl.protocol.runner import open_running, write_json
    from fast_axolotl.protocol.sweep import run_trial
    from fast_axolotl.record.codec import to_json
    from fast_axolotl.report.terminal import print_document, protocol_progress

    wanted = [int(name) if name.isdecimal() else 0 for name in parse_names(micro_batches or "")]
    if min(wanted, default=1) < 1:
        raise UsageError(f"cannot read --micro-batches {micro_batches!r}; write 1,2,4,8")
    share, rest = divmod(global_batch or 0, ranks)
    if rest:
        raise UsageError(f"--global-batch {global_batch} cannot be divided among {ranks} ranks")
    folder = output or unused_folder("fast-axolotl-batches", f"{datetime.now():%Y%m%d-%H%M%S}")
    folder = folder.resolve()
    if config is not None:
        arm, own = plan_batches(config, command, steps=steps, prepared=folder / "prepared")
        share = share or own
    elif command is None or "{micro_batch}" not in command:
        raise UsageError("pass an Axolotl configuration, or --command with {micro_batch} in it")
    elif ("{accumulation}" in command) != bool(share):
        raise UsageError(
            "{accumulation} in --command and --global-batch go together: pass both to keep the "
            "global batch, or neither to let it grow with the micro-batch"
        )
    else:
        arm = plan_arm("training", command.replace("{steps}", str(steps)))
        if "{steps}" not in command:
            say("--command has no {steps}: every run trains as long as the command does")
    sizes, notes = find_sizes(share, wanted)
    if not sizes:
        raise UsageError(f"none of --micro-batches {micro_batches} divides {share} samples")
    say(f"measuring into {folder}; if interrupted, the same command with --output continues")
    trials: list[Trial] = []
    found: dict[str, Any] = {"trials": trials, "notes": notes}
    with (
        protocol_progress() as update,
        open_running(
            Plan(title="batch sizes", arms=(arm,), warmup=0),
            folder,
            environment=os.environ,
            progress=lambda text, done, total, seconds, left: update(
                text.partition(",")[0], len(trials), 0, seconds, None
            ),
            warn=say,
        ) as running,
    ):
        while size := choose_next(trials, sizes, is_listed=bool(wanted)):
            trial = run_trial(running, size, share // size or 1)
            trials.append(trial)
            if len(trials) == 1 and trial.outcome != "out of memory" and trial.rate is None:
                print(trial.reason, file=sys.stderr)
                why = "failed" if trial.outcome == "failed" else "gave no throughput"
                raise DataError(f"the first run {why}", path=f"{folder}/{trial.folder}/log.txt")
            if trial.outcome == "ran" and global_batch and trial.ranks != ranks:
                raise UsageError(f"{trial.ranks} ranks, not {ranks}: add --ranks {trial.ranks}")
        found["advice"] = advice = advise(trials, is_axolotl=config is not None)
        chosen = next((one for one in trials if one.micro_batch == advice.knee), None)
        if config is not None and chosen is not None:
            from fast_axolotl.axolotl.longest import copy_longest

            size, log, target = chosen.micro_batch, folder / chosen.folder / "log.txt", "longest"
            # Gradients of an earlier pass, and the state after a first step, take memory, too.
            passes, rows = min(2, chosen.accumulation), size * chosen.ranks
            try:
                tokens = copy_longest(arm.config or {}, log, folder / target, rows, 4 * passes)
            except DataError as error:
                found["longest_sentence"] = f"The longest batch was not tried: {error}."
            else:
                keys = {"dataset_prepared_path": str(folder / target), "curriculum_sampling": True}
                trial = run_trial(running, size, passes, target, max_steps=2, **keys)
                found |= {"longest": trial, "longest_tokens": tokens}
                found["longest_sentence"] = describe_longest(trial, tokens, sizes)
    write_json(folder / "batch.json", found)
    print(to_json(found)) if as_json else print_document(batch_document(found))
    if chosen is None:
        raise typer.Exit(1)


def batch_document(found: dict[str, Any]) -> Document:
    """A row for each size, then what to do and what to know."""
    from fast_axolotl.record.units import format_bytes, format_count, format_seconds, format_share
    from fast_axolotl.report.document import Block, Bullets, Document, Paragraph, Row, Table

    advice, title, lines = found["advice"], "Batch sizes", list(found["notes"])
    rows: list[Row] = []
    for one in sorted(found["trials"], key=lambda trial: trial.micro_batch):
        used = one.peak_bytes / one.total_bytes if one.peak_bytes and one.total_bytes else None
        row = (
            f"{one.micro_batch} × {one.accumulation}",
            format_count(one.rate) if one.outcome == "ran" else one.outcome,
            f"{format_count(one.low)} to {format_count(one.high)}" if one.low else "–",
            format_seconds(one.step_seconds),
            f"{format_bytes(one.peak_bytes)} ({format_share(used, decimals=0)})" if used else "–",
            {advice.best: "best", advice.knee: "← recommended"}.get(one.micro_batch, ""),
        )
        rows.append(row)
        if one.outcome != "ran":
            reason = (one.reason or "it left no message").splitlines()[-1]
            lines.append(f"{row[0]}: {one.outcome}: {reason[:300]} ({one.folder}/log.txt).")
        if one.micro_batch == advice.knee:
            title += f", global batch {one.micro_batch * one.accumulation * one.ranks:,}"
    header = ("micro-batch × accumulation", found["trials"][0].unit, "95 %", "step", "peak", "")
    longest = [found["longest_sentence"]] if "longest_sentence" in found else []
    blocks: list[Block] = [
        Table(header=header, rows=rows),
        *(Paragraph(sentence, "lead") for sentence in advice.sentences[:1]),
        Bullets([*advice.sentences[1:], *longest, *lines]),
        *(Paragraph(warning, "warning") for warning in advice.warnings),
    ]
    return Document(title=title, blocks=blocks)
