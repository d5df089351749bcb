"""What to do next: one change, with the setting's name in the user's framework.

Data that comes late is the larger half. Every setting has a precondition in measured figures, and a
gain that follows from them: more workers where those that there are load all the time and the
processors have room; a deeper queue where they do not, and a long wait comes now and then; workers
that stay, or none, where the start of workers takes the time. The one that promises most is
advised, and only if it promises enough. Where nothing is sure, the action names what to look at,
down to the line, and promises nothing; likewise where the number of workers is not known.
``benchmarks/advice_cases.py`` follows the advice.

Names hold for Axolotl 0.19, transformers 5 and torch 2; a test looks them up there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fast_axolotl.measure.evidence import Evidence
from fast_axolotl.measure.ranks import DEEPEST_QUEUE
from fast_axolotl.record import thresholds
from fast_axolotl.record.arithmetic import ratio
from fast_axolotl.record.units import count_words, format_bytes, format_share

MOST_READ_AHEAD = 16
"""Batches a worker reads ahead before that is the first thing to lower where memory is short."""
MOST_UNSEEN_WORKERS = 4
"""Workers that are advised where the number of processors is not known. Ours."""
MOST_WORKERS = 16
"""Workers that are advised where they mostly wait. Ours: each takes memory of its own."""
LEAST_GAIN = 0.10
"""That a setting has to promise, to be advised. Ours: less cannot be told from noise."""
FULL_LOADING = 0.9  # share of their time in which workers load, to be too few
LEAST_FETCH_SECONDS = 0.002
"""That a batch takes to load, for a worker to take it over. Handing it over takes up to 1 ms."""
_ARGUMENTS = "TrainingArguments"
_LOADER = ("num_workers", "prefetch_factor", "persistent_workers")
_BATCH_SIZE = {
    "axolotl": "micro_batch_size",
    "transformers": "per_device_train_batch_size",
    "": "DataLoader(batch_size=…)",
}
_STREAM = {
    "axolotl": "set streaming: true and max_steps, which a stream needs",
    "": "load_dataset(streaming=True) in datasets",
}
_PREPARE = {
    "axolotl": "run axolotl preprocess CONFIG with dataset_prepared_path set",
    "": "save the result of map(…) with save_to_disk(…) in datasets",
}
_PAD_LESS = {
    "axolotl": "set sample_packing: true",
    "": "group samples of similar length in a batch, or pack them",
}
_SAVE_LESS = {
    "axolotl": "save less: save_only_model: true drops the optimizer state",
    "transformers": "save less: TrainingArguments(save_only_model=True) drops the optimizer state",
    "": "save in the background: torch.distributed.checkpoint.async_save",
}
_ACCELERATE = (
    "set dataloader_num_workers: 1 or more, and start Axolotl with fast-axolotl run --, which "
    "tokenises chats, packs and collates faster"
)
_KEEP_PARAMETERS = {
    "transformers": 'TrainingArguments(fsdp_config={"reshard_after_forward": False})',
    "": "fsdp_config: {reshard_after_forward: false}",
}
_COMPILE = {
    "axolotl": "set torch_compile: true",
    "transformers": "set TrainingArguments(torch_compile=True)",
    "": "call torch.compile(model)",
}
FREE_PROCESSORS = {
    "steal": "Move the run to a machine with dedicated CPU cores: this one shares them.",
    "quota": "Raise the CPU quota (cpu.max, docker run --cpus, resources.limits.cpu), or use fewer "
    "workers and threads (OMP_NUM_THREADS).",
    "others": "Stop the other programs, or lower their priority with renice -n 19 -p PID; top "
    "lists them.",
}
"""By who takes them: what gives a run its processors back."""


class Action(NamedTuple):
    """One change, and the share by which throughput can grow at most if it works."""

    text: str
    gain: float | None = None
    """``None``: not known."""


def possible_gain(share: float) -> float | None:
    """What it brings at most to remove this share of the time."""
    return share / (1.0 - share) if 0.0 <= share < 1.0 else None


def _of(texts: Mapping[str, str], evidence: Evidence) -> str:
    """What a table says for a framework, its arguments called as in the user's script."""
    arguments = str(evidence.setting("arguments") or _ARGUMENTS)
    return texts.get(evidence.source, texts[""]).replace(_ARGUMENTS, arguments)


def _name(evidence: Evidence, **values: object) -> str:
    """Settings as they stand in Axolotl's YAML, in HF's arguments or in torch's loader."""
    if evidence.source not in ("axolotl", "transformers"):
        return f"DataLoader({', '.join(f'{name}={value}' for name, value in values.items())})"
    named = {
        f"dataloader_{name}" if name in _LOADER else name: value for name, value in values.items()
    }
    if evidence.source == "axolotl":
        return " and ".join(f"{name}: {str(value).lower()}" for name, value in named.items())
    given = ", ".join(f"{name}={value}" for name, value in named.items())
    return _of({"": f"{_ARGUMENTS}({given})"}, evidence)


# What to do about everything but late data.


def see_fetches(evidence: Evidence) -> str:
    """Make the meter see fetches."""
    if evidence.source in ("", "watch"):
        return (
            "Run the training with fast-axolotl measure -- COMMAND, or wrap the loader in your "
            "code: for batch in meter.watch(loader)."
        )
    if evidence.source == "run" and not evidence.interpreters:
        return (
            "Install fast-axolotl into the Python that trains, and add a MeterCallback or "
            "meter.watch(loader) there: no Python of this command was reached. It may run with "
            "-I or -E, in a container or on another machine."
        )
    return (
        "Wrap the loader in your code, because no torch DataLoader was seen: with measure(RUN) as "
        "meter, then for batch in meter.watch(loader)."
    )


def lower_working_set(evidence: Evidence) -> str:
    """Take less memory."""
    share = evidence.figures.limit_share
    workers, prefetch = evidence.number("num_workers"), evidence.number("prefetch_factor")
    is_small = share is not None and share < thresholds.SMALL_MEMORY_SHARE
    if is_small and not evidence.figures.oom_kills:
        return (
            "Stop the other programs that use the memory: this run used at most "
            f"{format_share(share)} of it."
        )
    if workers and prefetch and prefetch > MOST_READ_AHEAD:
        setting = _name(evidence, prefetch_factor=MOST_READ_AHEAD // 2)
        return f"Set {setting}; currently {workers * prefetch:,} batches are kept ready."
    if workers and workers > 1:
        setting = _name(evidence, num_workers=workers // 2)
        return f"Set {setting}; each of the current {workers} workers needs memory of its own."
    if evidence.is_stream:
        return f"Use a smaller {_of(_BATCH_SIZE, evidence)}, or a larger machine."
    return f"Stream the data instead of loading it all: {_of(_STREAM, evidence)}."


def read_less(evidence: Evidence) -> str:
    """Take fewer bytes from the disk, or the same in larger requests."""
    if evidence.is_random:
        return (
            "Read in order, not at random: copy the data to a local NVMe drive or into memory "
            "(/dev/shm), or shuffle in a buffer. More workers do not help."
        )
    if evidence.source == "axolotl" and not evidence.is_stream:
        return (
            "Put the prepared rows on a faster disk: set dataset_prepared_path, after axolotl "
            "preprocess."
        )
    return (
        "Read fewer bytes: convert the data to compressed Parquet and keep only the columns you "
        "need; or move it to a faster disk."
    )


def talk_less(evidence: Evidence) -> Action:
    """Communicate less often, or less."""
    source, exposed = evidence.source, evidence.exposed
    stage, is_fsdp = evidence.number("deepspeed_stage") or 0, bool(evidence.setting("fsdp"))
    if not is_fsdp and stage < 2:
        count = 2 * (evidence.number("gradient_accumulation") or 1)
        change = f"Call optimizer.step() every {count} batches, with model.no_sync() in between"
        if source in ("axolotl", "transformers"):
            change = f"Set {_name(evidence, gradient_accumulation_steps=count)}"
        elif source == "lightning":
            change = f"Set Trainer(accumulate_grad_batches={count})"
        return Action(
            f"{change}; gradients are then exchanged half as often. The global batch doubles, so "
            "check the learning rate.",
            possible_gain(exposed / 2),
        )
    kind, change = f"ZeRO-{stage}", f"use ZeRO-{stage - 1} (zero{stage - 1}.json)"
    if is_fsdp:
        kind, change = "FSDP", f"set {_of(_KEEP_PARAMETERS, evidence)}"
    return Action(
        f"{kind} communicates in every micro-batch, so accumulation does not reduce it: {change} "
        f"if the parameters fit on every GPU. {_larger_batch(evidence)}",
        possible_gain(exposed),
    )


def even_out(evidence: Evidence) -> Action:
    """Make ranks take the same time."""
    figures = evidence.figures
    rates = [rank.tokens_per_second for rank in figures.ranks if rank.tokens_per_second]
    is_uneven = len(rates) > 1 and max(rates) > 1.05 * min(rates)
    slow, lost = figures.straggler_rank, figures.straggler_fraction or 0.0
    text = (
        f"Check the machine of rank {slow}: its GPU clocks and power (nvidia-smi -q -d "
        "PERFORMANCE), and other programs on its CPU cores."
    )
    if place := evidence.line_of(evidence.slow_phase):
        text = f"Look at {place} on rank {slow}, where the other ranks take less time. If all do "
        text += "the same there, look for other programs on its CPU cores."
    if is_uneven and not evidence.setting("sample_packing"):
        text = f"Give every rank the same number of tokens: {_of(_PAD_LESS, evidence)}."
    return Action(text, possible_gain(lost))


def compute_better(evidence: Evidence) -> Action:
    """Leave the data alone, and where something else is plain, name it."""
    figures = evidence.figures
    padding, idle, mfu = figures.padding_share, figures.device_idle_fraction, figures.mfu
    larger = _larger_batch(evidence)
    is_padded = (padding or 0.0) >= thresholds.MUCH_PADDING
    if is_padded and not evidence.setting("sample_packing"):
        pad_less = _of(_PAD_LESS, evidence)
        change, gain = f"{format_share(padding)} of all positions are padding: {pad_less}.", None
    elif idle is not None and idle >= thresholds.MUCH_IDLE:
        change = f"The GPU is idle between kernels {format_share(idle)} of the time. {larger}"
        if not evidence.setting("torch_compile"):
            change += f" Or {_of(_COMPILE, evidence)}."
        gain = possible_gain(idle)
    elif mfu is not None and mfu < thresholds.LOW_MFU:
        change, gain = f"MFU is low. {larger}", None
        if evidence.setting("attn_implementation") == "eager":
            # sdpa has flash kernels, too; eager attention is slow whatever the batch.
            change += " Use attn_implementation sdpa: eager stores the whole attention matrix."
    else:
        return Action("Leave the data path as it is: a faster loader would change nothing.")
    return Action(f"Leave the data path as it is. {change}", gain)


def _larger_batch(evidence: Evidence) -> str:
    """How to find the micro-batch that the GPU works best with."""
    free = evidence.figures.gpu_free_bytes
    room = "" if free is None else f", {format_bytes(free)} of GPU memory are free"
    name = _of(_BATCH_SIZE, evidence)
    return f"Try a larger {name}{room}: fast-axolotl batch finds the fastest that fits."


# What to do about time beside the steps.


def lose_less(evidence: Evidence, part: str) -> Action:
    """Fewer, smaller or concurrent checkpoints and evaluations; do once what is done before every
    run; go on without reading what was read before."""
    source, share = evidence.source, min(evidence.lost_share(part), 0.99)
    prepare = _of(_PREPARE, evidence)
    if part in ("checkpoint", "evaluation"):
        verb, head, instead = "eval", "Evaluate", "evaluate on fewer rows"
        if part == "checkpoint":
            verb, head, instead = "save", "Save", _of(_SAVE_LESS, evidence)
        # So many times as rarely, it takes half of what makes it the limit.
        times = max(2, math.ceil(share / (1.0 - share) / (thresholds.LOST_TIME / 2)))
        steps, per_epoch = evidence.number(f"{verb}_steps"), evidence.number(f"{verb}s_per_epoch")
        less_often = f"leave {times} times as many steps in between"
        if source == "axolotl" and per_epoch and per_epoch >= times:
            less_often = f"set {verb}s_per_epoch: {per_epoch // times} (now {per_epoch})"
        elif source in ("axolotl", "transformers") and steps:
            setting = _name(evidence, **{f"{verb}_steps": times * steps})
            less_often = f"set {setting} (now every {steps:,} steps)"
        gain = possible_gain(share * (1.0 - 1.0 / times))
        return Action(f"{head} less often: {less_often}. Or {instead}.", gain)
    place = evidence.line_of("between") or "what the loop does between two loaders"
    ready = "the data is streamed" if evidence.is_stream else ""
    ready = "the dataset is prepared" if evidence.setting("dataset_is_prepared") else ready
    texts = {
        "startup": f"Keep the model files on a local disk (HF_HOME): {ready}."
        if ready
        else f"Prepare the data once: {prepare}.",
        "between": f"Look at {place}: do it less often.",
        "resume": "Use a reader that resumes where it stopped: fast_axolotl.open_dataset, with "
        "state_dict and load_state_dict.",
    }
    if source == "axolotl":
        skipping = "Train on a prepared dataset, whose rows are skipped without being read"
        texts["resume"] = f"{skipping}: {prepare}."
    return Action(texts[part], None if part == "startup" else possible_gain(share))


# What to do about late data.


def prepare_in_workers(evidence: Evidence, place: str, share: float) -> Action:
    """What the loop does to a batch can be done in the loader's processes, beside the model."""
    what = f"what {place} does" if place else "the preparation"
    workers = evidence.number("num_workers") or 0
    setting = "" if workers else f" with {_name(evidence, num_workers=2)}"
    pace = 1.0 / max(1.0 - share, share / (workers or 2))
    return Action(
        f"Move {what} into the loader (the dataset, or its collate_fn){setting}: then it runs "
        "beside the model.",
        _within_room(evidence, pace - 1.0),
    )


def feed(evidence: Evidence) -> Action:
    """Of the settings whose preconditions hold the one that promises most, if that is enough; else
    what to look at."""
    figures, causes = evidence.figures, evidence.figures.waits_by_cause
    at = f" at {place}" if (place := evidence.line_of("waiting")) else ""
    if figures.stall_source == "stacks":
        return Action(
            f"The loop waits{at} for what feeds it: have more threads or processes fill that "
            "queue, or read with a DataLoader and workers."
        )
    if causes.get("iterator", 0.0) >= thresholds.MOST_WAITING:
        return Action(
            "Make one iterator before the loop and call next() on it: now every batch has a new "
            f"one, so no worker can read ahead. The loop waits{at}."
        )
    if evidence.phases.waiting.get("sampler", 0.0) >= thresholds.MOST_WAITING:
        return Action(
            f"Look at {evidence.line_of('sampler') or 'the sampler'}: it chooses the rows in the "
            "training process, where workers do not help. Plan them in advance, or in less time."
        )
    if evidence.stall < thresholds.DATA_STALL:
        most = 100 * (possible_gain(evidence.stall) or 0.0)
        text = "Leave the data path as it is: a faster loader would bring at most"
        return Action(f"{text} {most:.0f} %.")
    throttled = figures.cpu_throttled_share or 0.0
    if evidence.pattern == "rate" and throttled >= thresholds.CPU_LOST:
        text = f"{FREE_PROCESSORS['quota']} It withholds {format_share(throttled)} of the CPU "
        text += "time, so more workers do not help."
        return Action(text, possible_gain(min(evidence.stall, throttled)))
    is_stream = evidence.source == "axolotl" and evidence.is_stream
    if is_stream and evidence.setting("sample_packing") and not figures.replacements:
        # Axolotl packs so many rows of a stream, then so many more.
        text = f"Make the next packs in less time: {_ACCELERATE}."
        return Action(text, possible_gain(evidence.stall))
    if evidence.number("num_workers") is None:
        setting = _name(evidence, num_workers=min(2, evidence.number("num_shards") or 2))
        text = f"Load data in worker processes: {setting}. The current number was not recorded."
        return Action(text)
    is_late = evidence.pattern != "rate" and figures.stall_period_of != "epoch"
    is_full = (evidence.phases.loading or 0.0) >= FULL_LOADING
    settings = [*(_deepen if is_late and not is_full else _change_workers)(evidence)]
    if evidence.start_share and evidence.source != "axolotl":  # which has no setting for it
        takes = f"starting them takes {format_share(evidence.start_share)} of the time"
        text = f"Keep the workers between epochs: {_name(evidence, persistent_workers=True)}; "
        settings.append(Action(f"{text}{takes}.", possible_gain(evidence.start_share)))
    best = max(settings, key=lambda action: action.gain or 0.0, default=Action(""))
    return best if (best.gain or 0.0) >= LEAST_GAIN else Action(_look_at_loading(evidence))


def _within_room(evidence: Evidence, gain: float) -> float:
    """No more than the processors have room for."""
    room = evidence.cpu_room
    return max(0.0, gain if room is None else min(gain, room - 1.0))


def _change_workers(evidence: Evidence) -> Iterator[Action]:
    """More workers, where those that there are load all the time, or the loop itself loads. A step
    then takes the longer of the model's part and of one worker's share of the loading."""
    figures, phases = evidence.figures, evidence.phases
    workers, shards = evidence.number("num_workers") or 0, evidence.number("num_shards")
    at_epochs = figures.waits_by_cause.get("epoch", 0.0)
    started = 0.0 if evidence.source == "axolotl" else evidence.start_share
    of_others = max(at_epochs, phases.waiting.get("sampler", 0.0))
    stall = min(evidence.stall * max(0.0, 1.0 - of_others) + started, 0.95)
    seconds = ratio(evidence.stall * figures.measured_seconds, figures.fetches) or 0.0
    is_quick = not workers and seconds < LEAST_FETCH_SECONDS
    # Of the time of a step; workers that nobody looked at load all the time.
    loading = workers * (phases.loading or 1.0) if workers else stall
    needed = loading / (1.0 - stall)
    wanted = _at_least(needed) + (not workers)
    cores = evidence.cores or max(MOST_UNSEEN_WORKERS, 2 * workers)
    most = cores if evidence.cpu_room is None else max(cores, MOST_WORKERS)
    count = min(wanted, most, shards or wanted)
    is_full = (figures.limit_share or 0.0) >= thresholds.MEMORY_NEAR
    if count <= workers or is_quick or is_full:
        return
    why = "data is currently loaded in the main process (0 workers)"
    if workers:
        why = f"{count_words(workers, 'worker')} cannot keep up; about {needed:.1f} are needed"
        if count < wanted and count in (shards, cores):
            why += f", but there are only {count} {'shards' if count == shards else 'cores'}"
    if evidence.is_stream and not shards:
        why += "; the dataset has to give each worker rows of its own"
    if count > cores:
        why += f"; they mostly wait: the run uses {figures.cpu_cores:.1f} CPU cores"
    values: dict[str, object] = {"num_workers": count}
    if evidence.source != "axolotl" and (started or (at_epochs and not workers)):
        values["persistent_workers"] = True
    gain = 1.0 / max(1.0 - stall, loading / count) - 1.0
    text = f"Set {_name(evidence, **values)}, because {why}."
    yield Action(text, _within_room(evidence, gain))


def _deepen(evidence: Evidence) -> Iterator[Action]:
    """A queue that holds as many batches as are trained on during a long wait, for a loader that is
    fast enough on average."""
    figures, workers = evidence.figures, evidence.number("num_workers") or 0
    if evidence.source == "axolotl" and evidence.is_stream:
        return  # it does not give its streams a prefetch factor
    # No queue hides the start of an epoch.
    at_epochs = figures.waits_by_cause.get("epoch", 0.0)
    stall = min(evidence.stall * max(0.0, 1.0 - at_epochs), 0.95)
    period = figures.stall_period_fetches or 0.0
    capacity, missing = figures.queue_capacity or 0, period * stall / (1.0 - stall)
    count = workers or min(
        max(2, _at_least(stall / (1.0 - stall)) + 1), evidence.number("num_shards") or 64
    )
    # Some trainers fetch all batches of a step at once.
    wanted = max(math.ceil(missing) + capacity, evidence.number("gradient_accumulation") or 0)
    each = max(2, math.ceil(min(wanted, DEEPEST_QUEUE) / count))
    if workers and count * each <= capacity:
        return
    gain = possible_gain(stall * min(1.0, (count * each - capacity) / (missing or 1.0))) or 0.0
    # No more than the loader gives on average.
    loading = evidence.phases.loading if workers else None
    average = 1.0 / loading if loading else figures.reader_ratio
    gain = gain if average is None else min(gain, average - 1.0)
    setting = _name(evidence, **({} if workers else {"num_workers": count}), prefetch_factor=each)
    text = f"Set {setting}; {count * each} batches are then ready and hide waits that come about "
    yield Action(f"{text}every {round(period):,} fetches.", _within_room(evidence, gain))


def _look_at_loading(evidence: Evidence) -> str:
    """Where no setting is sure to help: what to look at, down to the line."""
    figures, follows = evidence.figures, evidence.figures.stall_period_of
    shards = evidence.number("num_shards")
    place = evidence.line_of("loading") or evidence.line_of("waiting")
    at, rows = f" Look at {place}." if place else "", figures.stall_period_rows
    if follows == "epoch":
        what = "shuffling, opening files, planning packs, starting workers"
        return f"Find out what happens when an epoch begins ({what}), and do it in advance.{at}"
    if evidence.pattern == "periodic":
        unit = f"about every {rows:,.0f} samples" if rows is not None else "at these distances"
        return (
            f"Find out what happens {unit} (map(batched=True) in datasets takes 1,000 rows at a "
            "time, batch_size=100 takes fewer; or a shuffle buffer, a row group) and make that "
            f"unit smaller.{at}"
        )
    cheaper = f"prepare the rows in advance, {_of(_PREPARE, evidence)}"
    if shards and shards < max(evidence.number("num_workers") or 0, evidence.cores or 0):
        cheaper = "split the data into more shards (files, or num_shards of to_iterable_dataset), "
        cheaper += f"of which each worker needs one (now {shards})"
    elif evidence.setting("dataset_is_prepared"):
        cheaper = "keep the prepared rows on a local disk or in memory (/dev/shm)"
        if evidence.source == "axolotl" and figures.replacements == ():
            cheaper = "start Axolotl with fast-axolotl run --, which makes collators faster"
    return f"Make {place or 'loading'} cheaper: {cheaper}."


def _at_least(value: float) -> int:
    """The next whole number; a twentieth over one is not worth another worker."""
    return math.ceil(value - 0.05)
