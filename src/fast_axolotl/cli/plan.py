"""``fast-axolotl plan``, ``scale``, ``batch`` and ``trace``: plan the next run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Exit, Option

from fast_axolotl.cli.options import (
    AsJson,
    RunsFolder,
    parse_amount,
    parse_counts,
    parse_names,
    print_result,
    say,
    unused_folder,
)
from fast_axolotl.cli.report import read_report_run
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.record.units import (
    format_bytes,
    format_count,
    format_duration,
    format_seconds,
    format_share,
)
from fast_axolotl.report.document import (
    Block,
    Bullets,
    Card,
    Document,
    Paragraph,
    Row,
    Section,
    Table,
)

if TYPE_CHECKING:
    from fast_axolotl.plan.memory import Layout
    from fast_axolotl.plan.predict import Plan, Range, Reference
    from fast_axolotl.plan.scale import Run, Scaling
    from fast_axolotl.plan.trace import TraceSummary
    from fast_axolotl.record.devices import Gpu
    from fast_axolotl.record.protocol_result import Trial

_BATCH_TOKENS = 262_144
"""Of a step, without a record."""
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def plan(
    run: Annotated[Path | None, Argument(help="The folder of a record.", metavar="[RUN]")] = None,
    model: Annotated[Path | None, Option(help="config.json, required without RUN.")] = None,
    gpu: Annotated[
        str | None, Option(help="Kinds of GPU: H100-SXM,B200. Default: that of the run.")
    ] = None,
    gpus: Annotated[str, Option(help="Numbers of GPUs (comma-separated).")] = "8,16,64",
    tokens: Annotated[str | None, Option(help="Tokens to train on: 300M, 10B, 1.5T.")] = None,
    price: Annotated[
        str | None, Option(help="Dollars per GPU and hour: 2.5/h, or one per kind of GPU.")
    ] = None,
    network: Annotated[
        float | None, Option(help="GB/s per GPU between nodes. Default: the usual adapter's.")
    ] = None,
    sequence_len: Annotated[int, Option(help="Without RUN: tokens per sample.", min=1)] = 4096,
    method: Annotated[
        Literal["full", "lora", "qlora"], Option(help="Without RUN: training method.")
    ] = "full",
    precision: Annotated[
        Literal["bf16", "fp8", "fp4"], Option(help="Without RUN: of matrix products.")
    ] = "bf16",
    optimizer: Annotated[
        str | None,
        Option(help="Only this: adamw, adamw_8bit, lion, muon, sgd, adafactor, offload."),
    ] = None,
    micro_batch: Annotated[int | None, Option(help="Only this: samples per pass.", min=1)] = None,
    accumulation: Annotated[int | None, Option(help="Only this: passes per step.", min=1)] = None,
    recompute: Annotated[
        Literal["none", "selective", "full"] | None, Option(help="Only this: of activations.")
    ] = None,
    tp: Annotated[int | None, Option(help="Only this tensor parallelism.", min=1)] = None,
    pp: Annotated[int | None, Option(help="Only this pipeline parallelism.", min=1)] = None,
    cp: Annotated[int | None, Option(help="Only this context parallelism.", min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Predict tokens/s, memory, time and cost on other kinds and numbers of GPUs.

    The record of a short run calibrates the prediction: its throughput, memory, communication and
    what its loader can deliver. Every prediction has a 90 % interval and says what limits it:
    compute, memory, communication or data. Without a record, the intervals are wide. Of all layouts
    of the same global batch, the fastest that fits is taken.
    """
    from fast_axolotl.plan.memory import MOMENTS, Layout
    from fast_axolotl.plan.predict import Range, find_price, make_plan, read_reference
    from fast_axolotl.plan.shape import read_config
    from fast_axolotl.record.devices import find_gpu

    if network is not None and not 0 < network < float("inf"):
        raise UsageError(f"--network {network:g}: pass a number above 0")
    if optimizer is not None and optimizer not in MOMENTS:
        raise UsageError(f"--optimizer {optimizer!r}: choose one of {', '.join(MOMENTS)}")
    sizes: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "micro_batch": micro_batch}
    sizes |= {"accumulation": accumulation, "recompute": recompute, "optimizer": optimizer}
    pinned = {name: value for name, value in sizes.items() if value is not None}
    amount = None
    if tokens is not None:
        amount = parse_amount(tokens, _COUNTS, f"--tokens {tokens!r}", "300M, 10B or 1.5T")
    kinds = list(dict.fromkeys(find_gpu(name) for name in parse_names(gpu or "")))
    shape = None if model is None else read_config(model)
    reference = None
    if run is not None:
        shown = read_report_run(run, "")
        shape, reference = read_reference(shown.record, shown.summary, shape)
        layout, kinds = reference.layout, kinds or [reference.gpu]
    elif shape is None or not kinds:
        raise UsageError("pass the folder of a record, or --model config.json and --gpu H100-SXM")
    else:
        layout = Layout(
            gpus=1,
            seq_len=sequence_len,
            accumulation=max(1, round(_BATCH_TOKENS / sequence_len)),
            method=method,
            precision=precision,
            optimizer=optimizer or "adamw",
        )
    if network is not None:
        kinds = [replace(kind, network=network) for kind in kinds]
        if reference is not None:
            reference = replace(reference, gpu=replace(reference.gpu, network=network))
    costs = [find_price(kind) for kind in kinds]
    if price is not None:
        texts = [text.removesuffix("/h").removeprefix("$") for text in parse_names(price)]
        example = "2.5/h per GPU"
        dollars = [parse_amount(text, {"": 1.0}, f"--price {text!r}", example) for text in texts]
        dollars *= len(kinds) if len(dollars) == 1 else 1
        if len(dollars) != len(kinds):
            raise UsageError(f"--price {price!r}: pass one, or {len(kinds)}: one per kind of GPU")
        costs = [(Range(each, each, each), "by --price") for each in dollars]
    counts = parse_counts("--gpus", gpus)
    priced = [(kind, cost) for kind, (cost, _) in zip(kinds, costs, strict=True)]
    known: dict[str, Any] = {"reference": reference, "tokens": amount, "pinned": pinned}
    found = make_plan(shape, priced, counts, layout, **known)
    notes: list[str] = []
    for kind, (cost, source) in zip(kinds, costs, strict=True):
        said = [*describe_plan(found, kind, layout, reference)]
        hourly = "" if cost is None else f"${cost.value:g}, "
        said.append(f"Dollars per GPU and hour: {kind.key}: {hourly}{source}.")
        notes += [f"{kind.key}: {note}" if len(kinds) > 1 else note for note in said]
    found = replace(found, notes=tuple(notes))
    print_result(found, plan_document(found), as_json=as_json)


def describe_plan(
    plan: Plan, gpu: Gpu, start: Layout, reference: Reference | None
) -> Iterator[str]:
    """What users get wrong, where the candidates of a kind of GPU are about to; their layouts, and
    what the prediction rests on."""
    from fast_axolotl.plan.predict import PAUSES, SEEN, STARTUP_SECONDS, TRUSTED_LEVELS
    from fast_axolotl.plan.scale import warn_of_cost

    candidates = [one for one in plan.candidates if one.gpu == gpu.key]
    possible = [one for one in candidates if one.tokens_per_second is not None]
    yield from warn_of_cost([(one.gpus, one.dollars.value) for one in possible if one.dollars])
    for one in [one for one in possible if one.doubt][:1]:
        yield (
            f"From {one.gpus} GPUs on, {one.doubt}: no sensible choice. A larger batch needs "
            "another learning rate and may generalise worse, and more GPUs bring ever less: in "
            "MLPerf's LoRA of Llama 2 70B, 64 times the GPUs were 13.8 times as fast."
        )
    least, most = TRUSTED_LEVELS
    if plan.level is not None and possible and not least < plan.level < most:
        yield (
            f"The run is {plan.level:.2g} times as fast as predicted, as no published stack is: "
            "check its tokens, model and GPU, and whether a tiny batch slowed it down."
        )
    for starved in [one for one in possible if one.binds == "data"][:1]:
        yield (
            f"On {starved.gpus} GPUs, the loader must deliver "
            f"{format_count(starved.demand_tokens_per_second)} tokens/s; yours delivers "
            f"{format_count(starved.loader_tokens_per_second)}."
        )
    last = possible[-1] if possible else None
    if reference is not None and last is not None and reference.layout.gpus == 1 < last.gpus:
        naive = reference.tokens_per_second * reference.real_share * last.gpus
        yield (
            f"The run used one GPU, so communication was not measured. {last.gpus} times its rate "
            f"would be {format_count(naive)} tokens/s; the prediction is "
            f"{format_count(last.demand_tokens_per_second)} tokens/s, with "
            f"{format_share(last.communication_share, decimals=0)} of a step in communication, "
            "from the link rates alone. Measure a short run on two nodes before you rent more."
        )
    for one in candidates:
        yield f"{one.gpus} × {gpu.key}: {one.changes}."
    if reference is None:
        batch, seconds = format_count(start.step_tokens), format_count(STARTUP_SECONDS)
        yield (
            "No run of yours calibrates this plan: it uses the rates of published, well-tuned "
            "stacks, and its intervals are wide. A short measured run narrows them. Assumed: a "
            f"global batch of {batch} tokens, {seconds} s of start-up, {format_share(PAUSES)} of "
            "the time for evaluation and checkpoints."
        )
        if gpu.generation not in SEEN:
            yield "No published run was on such a GPU: this is an extrapolation."
    elif gpu.key != reference.gpu.key:
        yield (
            f"The run was on {reference.gpu.key}: the plan assumes that {gpu.key} reaches the "
            "same share of its predicted speed."
        )
    yield (
        f"Between nodes of {gpu.node_size} GPUs ({gpu.key}): "
        f"{gpu.network:g} GB/s per GPU, without congestion."
    )


def plan_document(plan: Plan) -> Document:
    """The fastest and the cheapest candidate, all of them, and what to know about them."""

    def dollars(value: float) -> str:
        return f"${value:,.2f}" if value < 100 else f"${value:,.0f}"

    def show(found: Range | None, write: Callable[[float], str]) -> tuple[str, str]:
        if found is None:
            return "–", "–"
        return write(found.value), f"{write(found.low)} to {write(found.high)}"

    rows: list[Row] = []
    rates: dict[str, float] = {}
    costs: dict[str, float] = {}
    for one in plan.candidates:
        fits = {"yes": "", "may": ", may fit", "no": ", does not fit"}[one.fits]
        name, share = f"{one.gpus} × {one.gpu}", format_share(one.communication_share, decimals=0)
        rate, pace = show(one.tokens_per_second, format_count)
        need, room = show(one.memory_bytes, format_bytes)
        lasts, _ = show(one.seconds, format_duration)
        cost, money = show(one.dollars, dollars)
        row = [name, rate, pace, f"{need} ({room}){fits}", format_count(one.global_batch_tokens)]
        row += [format_count(one.steps and round(one.steps)), share, lasts]
        rows.append([*row, f"{cost} ({money})" if one.dollars else cost, one.binds])
        if one.tokens_per_second and not one.doubt:
            words = [word for word in (lasts, cost) if word != "–"]
            text = ", ".join([name, f"{rate} tokens/s", *words])
            rates[text] = one.tokens_per_second.value
            costs |= {text: one.dollars.value} if one.dollars else {}
    fastest = max(rates, key=rates.__getitem__, default="")
    cheapest = min(costs, key=costs.__getitem__, default="")
    headline = f"Fastest: {fastest}. Cheapest: {cheapest}."
    if not fastest:
        headline = "No candidate fits into GPU memory, or is a sensible choice: see the notes."
    elif cheapest in ("", fastest):
        headline = f"{'Fastest and cheapest' if cheapest else 'Fastest'}: {fastest}."
    kinds = ", ".join(dict.fromkeys(one.gpu for one in plan.candidates))
    title = f"Plan: {format_count(plan.parameters / 1e9)} B parameters on {kinds}"
    title += "" if plan.tokens is None else f", {format_count(plan.tokens / 1e9)} B tokens"
    header = ["GPUs", "tokens/s", "90 %", "memory (interval)", "global batch", "steps"]
    header += ["communication", "time", "cost", "limited by"]
    blocks: list[Block] = [
        Card(badges=[("plain", "Prediction, 90 % intervals")], headline=headline),
        Section(title="Candidates", blocks=[Table(header=header, rows=rows)]),
        Section(title="Notes", blocks=[Bullets(plan.notes)]),
    ]
    return Document(title=title, blocks=blocks)


def scale(
    runs: Annotated[
        list[Path], Argument(help="Records, or a protocol made with --world-size.", metavar="RUN…")
    ],
    as_json: AsJson = False,
) -> None:
    """Compare runs of one job on several numbers of GPUs: efficiency, and what reduces it.

    Several runs on the same number of GPUs count as repeats. For numbers that were not measured,
    use fast-axolotl plan.
    """
    from fast_axolotl.plan.scale import make_scaling, read_scaling_run
    from fast_axolotl.protocol.statistics import compare_runs
    from fast_axolotl.record.protocol_result import PROTOCOL_FILE, ProtocolResult

    pairs: dict[Path, str] = {}
    for path in {path.resolve(): path for path in runs}.values():
        if not (path / PROTOCOL_FILE).is_file():
            pairs[path] = ""
            continue
        for arm in ProtocolResult.read(path).arms:
            done = [run for run in arm.runs if run.pair >= 0 and run.status == "done"]
            pairs |= {path / run.folder: f"{path}:{run.pair}" for run in done}
            if not done:
                say(f"{path}: {arm.name} has no measured run and is left out")
    figures: list[Run] = []
    unit = ""
    for path, pair in pairs.items():
        shown = read_report_run(path, "")
        summary = shown.summary
        unit = unit or ("tokens" if summary.tokens_per_second else "samples")
        if summary.verdict.kind in ("inconclusive", "cpu"):
            say(f"{path}: {summary.verdict.headline}")
        figures.append(read_scaling_run(shown.record, summary, pair, unit))
    found = make_scaling(figures, compare_runs, unit=unit)
    print_result(found, scale_document(found), as_json=as_json)


def scale_document(found: Scaling) -> Document:
    """Every number of GPUs, where efficiency goes, and what to know."""
    rows: list[Row] = []
    losses: list[Row] = []
    names = list(dict.fromkeys(name for one in found.counts for name in one.losses))
    names.sort(key="not explained".__eq__)
    for one in found.counts:
        row = [str(one.gpus), str(one.runs), format_count(one.rate)]
        row += [format_count(one.rate_per_gpu), format_share(one.efficiency)]
        row += [f"{format_share(one.efficiency_low)} to {format_share(one.efficiency_high)}"]
        row += [format_seconds(one.step_seconds), format_count(one.batch_per_gpu)]
        rows.append([cell.replace("– to –", "–") for cell in row])
        lost = [1 - one.efficiency, *(one.losses.get(name) for name in names)]
        losses.append([str(one.gpus), *map(format_share, lost)])
    header = ["GPUs", "runs", f"{found.unit}/s", "per GPU", "efficiency", "95 %"]
    header += ["step p50", "batch per GPU"]
    same = {"weak": "same batch per GPU", "strong": "same global batch"}
    kind = same.get(found.kind, "batch per GPU and global batch both change")
    title = "Lost efficiency in points, by cause"
    blocks: list[Block] = [
        Table(header=header, rows=rows),
        Section(title=title, blocks=[Table(header=["GPUs", "lost", *names], rows=losses[1:])]),
        *(Paragraph(warning, "warning") for warning in found.warnings),
        Bullets(found.notes, is_muted=True),
    ]
    return Document(title=f"Scaling, {found.kind}: {kind}", blocks=blocks)


def batch(
    config: Annotated[Path | None, Argument(help="The Axolotl configuration.")] = None,
    command: Annotated[
        str | None,
        Option(help="A training with {micro_batch}, {accumulation}, {steps}; or axolotl train."),
    ] = None,
    micro_batches: Annotated[
        str | None, Option(help="Sizes to try: 1,2,4,8. Default: double until memory is full.")
    ] = None,
    global_batch: Annotated[
        int | None, Option(help="Samples per step. Default: the configuration's.", min=1)
    ] = None,
    ranks: Annotated[int, Option(help="Ranks that share --global-batch.", min=1)] = 1,
    steps: Annotated[int, Option(help="Steps per run; the first 5 are warm-up.", min=8)] = 20,
    output: RunsFolder = None,
    as_json: AsJson = False,
) -> None:
    """Find the best micro-batch: try several, and compare tokens/s, memory and step time.

    Each size is one short recorded run. The global batch stays the same: a larger micro-batch needs
    fewer accumulation steps. If a size runs out of memory, the search continues below it. With a
    configuration, the longest batches of the data are tried at the recommended size, too.
    """
    from fast_axolotl.plan.batch import advise, choose_next, find_sizes
    from fast_axolotl.protocol.axolotl_plan import plan_batches
    from fast_axolotl.protocol.plan import Plan, plan_arm
    from fast_axolotl.protocol.runner import open_running, run_trial
    from fast_axolotl.record.codec import to_json, write_text
    from fast_axolotl.report.terminal import protocol_progress

    wanted = parse_counts("--micro-batches", micro_batches) if micro_batches else []
    share, rest = divmod(global_batch or 0, ranks)
    if rest:
        raise UsageError(f"--global-batch {global_batch} cannot be divided among {ranks} ranks")
    folder = (output or unused_folder("fast-axolotl-batches")).resolve()
    if config is not None:
        arm, own = plan_batches(config, command, steps=steps, prepared=folder / "prepared")
        share = share or own
    elif command is None or "{micro_batch}" not in command:
        raise UsageError("pass an Axolotl configuration, or --command with {micro_batch} in it")
    elif ("{accumulation}" in command) != bool(share):
        raise UsageError("{accumulation} and --global-batch go together: pass both or neither")
    else:
        arm = plan_arm("training", command.replace("{steps}", str(steps)))
        if "{steps}" not in command:
            say("--command has no {steps}: every run trains as long as the command does")
    sizes = find_sizes(share, wanted)
    say(f"measuring into {folder}; if interrupted, the same command with --output continues")
    trials: list[Trial] = []
    found: dict[str, Any] = {"trials": trials}
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
                found["not_tried"] = f"The longest batch was not tried: {error}."
            else:
                keys = {"dataset_prepared_path": str(folder / target), "curriculum_sampling": True}
                trial = run_trial(running, size, passes, target, max_steps=2, **keys)
                found |= {"longest": trial, "longest_tokens": tokens}
    write_text(folder / "batch.json", to_json(found))
    print_result(found, batch_document(found), as_json=as_json)
    if advice.best is None:
        raise Exit(1)


def batch_document(found: dict[str, Any]) -> Document:
    """A row for each size, then what to do and what to know."""
    advice, title = found["advice"], "Batch sizes"
    lines = [found["not_tried"]] if "not_tried" in found else []
    rows: list[Row] = []
    longest = [found["longest"]] if "longest" in found else []
    for one in [*sorted(found["trials"], key=lambda trial: trial.micro_batch), *longest]:
        mark = {advice.best: "best", advice.knee: "← recommended"}.get(one.micro_batch, "")
        if one in longest:
            mark = f"the longest rows: {found['longest_tokens']:,} tokens"
        used = one.peak_bytes / one.total_bytes if one.peak_bytes and one.total_bytes else None
        row = (
            f"{one.micro_batch} × {one.accumulation}",
            format_count(one.rate) if one.outcome == "ran" else one.outcome,
            f"{format_count(one.low)} to {format_count(one.high)}" if one.low else "–",
            format_seconds(one.step_seconds),
            f"{format_bytes(one.peak_bytes)} ({format_share(used, decimals=0)})" if used else "–",
            mark,
        )
        rows.append(row)
        if one.outcome != "ran":
            reason = (one.reason or "it left no message").splitlines()[-1]
            lines.append(f"{row[0]}: {one.outcome}: {reason[:300]} ({one.folder}/log.txt).")
            if one in longest and one.outcome == "out of memory":
                lines.append("For the longest rows, lower micro_batch_size or sequence_len.")
        elif one.micro_batch == advice.knee and one not in longest:
            title += f", global batch {one.micro_batch * one.accumulation * one.ranks:,}"
    header = ("micro-batch × accumulation", found["trials"][0].unit, "95 %", "step", "peak", "")
    blocks: list[Block] = [
        Table(header=header, rows=rows),
        *(Paragraph(sentence, "lead") for sentence in advice.sentences[:1]),
        Bullets([*advice.sentences[1:], *lines]),
        *(Paragraph(warning, "warning") for warning in advice.warnings),
    ]
    return Document(title=title, blocks=blocks)


def trace(
    traces: Annotated[
        list[str], Argument(help="Traces of torch.profiler, one per rank.", metavar="TRACE…")
    ],
    as_json: AsJson = False,
) -> None:
    """Split step time into compute, communication and idle time, from torch.profiler traces.

    Pass files, folders or globs, one trace per rank. With several ranks, it separates waiting for
    other ranks from transfer and names the straggler. Traces of some ranks are enough; what needs
    the others stays empty.
    """
    from fast_axolotl.plan.trace import summarise_traces
    from fast_axolotl.reading.files import find_files

    files: list[str] = []
    for text in traces:
        every = [source.path for source in find_files(text, split="all")[0]]
        found = [file for file in every if file.endswith((".json", ".json.gz"))] or every
        files += [file for file in found if ".pt.trace.json" in file] or found
    summary = summarise_traces([Path(file) for file in dict.fromkeys(files)])
    print_result(summary, trace_document(summary), as_json=as_json)


def trace_document(summary: TraceSummary) -> Document:
    """The mean step of each rank, and communication; ``--json`` has every step."""
    means: list[Row] = []
    for one in summary.ranks:
        names = ("compute", "overlapped", "exposed", "waiting", "copy", "idle", "host")
        parts = [getattr(one, f"{name}_seconds") for name in names]
        whole = one.seconds or 1
        cells = [format_share(None if part is None else part / whole) for part in parts]
        count = sum(step.rank == one.rank for step in summary.steps)
        means.append([str(one.rank), f"{count:,}", format_seconds(one.seconds), *cells])
    notes = list(summary.notes)
    if len(means) > 1:
        rank = "none" if summary.straggler is None else f"rank {summary.straggler}"
        notes.insert(0, f"Straggler: {rank}. {summary.straggler_reason}")
    rows: list[Row] = []
    for row in summary.collectives:
        group = "–" if row.group is None else row.group[:24] or "not named"
        cells = [row.kind, group, str(row.group_size or "–"), row.message]
        cells += [f"{row.count:,}", format_seconds(row.seconds)]
        rows.append([*cells, format_seconds(row.waiting_seconds)])
    header = ["rank", "steps", "step time", "compute", "overlapped", "exposed", "waiting", "copies"]
    header += ["idle", "waiting for the host"]
    blocks: list[Block] = [Table(header=header, rows=means), Bullets(notes, True)]
    if rows:
        header = ["collective", "group", "ranks", "message", "count", "time", "waiting"]
        table = Table(header=header, rows=rows)
        blocks.append(Section(title="Communication, all ranks together", blocks=[table]))
    return Document(title="Mean step of each rank", blocks=blocks)
