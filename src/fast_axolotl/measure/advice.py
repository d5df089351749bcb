"""What to do next: one change, with the setting's name in the user's framework.

Data that comes late is the larger half. A loader that is too slow on average needs more processes,
or less to do a row. One that is fast enough and comes in bursts needs a queue as deep as a burst.
Work that is done once in a long while no queue hides: it has to be cut up.

An ``Action`` has the gain that it can bring at most, from the stall and what the action removes of
it. What is not recorded is not stated: an unknown number of workers is not none.

Names hold for Axolotl 0.19, transformers 5 and torch 2; a test looks them up there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from fast_axolotl.measure.evidence import Evidence
from fast_axolotl.record import thresholds
from fast_axolotl.record.units import count_words, format_bytes, format_share

MOST_READ_AHEAD = 16
"""Batches a worker reads ahead before that is the first thing to lower where memory is short."""
MOST_UNSEEN_WORKERS = 4
"""Workers that are advised where the number of processors is not known. Ours."""
_LOADER = ("num_workers", "prefetch_factor", "persistent_workers")
_BATCH_SIZE = {
    "axolotl": "micro_batch_size",
    "transformers": "per_device_train_batch_size",
    "": "DataLoader(batch_size=…)",
}
_NO_DISPATCH = {
    "axolotl": "accelerator_config: {dispatch_batches: false}",
    "transformers": 'TrainingArguments(accelerator_config={"dispatch_batches": False})',
    "": "DataLoaderConfiguration(dispatch_batches=False) of accelerate",
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
    "transformers": 'set TrainingArguments(train_sampling_strategy="group_by_length")',
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


def _of(texts: Mapping[str, str], source: str) -> str:
    """What a table says for a framework."""
    return texts.get(source, texts[""])


def _name(source: str, **values: object) -> str:
    """Settings as they stand in Axolotl's YAML, in HF's arguments or in torch's loader."""
    if source not in ("axolotl", "transformers"):
        return f"DataLoader({', '.join(f'{name}={value}' for name, value in values.items())})"
    named = {
        f"dataloader_{name}" if name in _LOADER else name: value for name, value in values.items()
    }
    if source == "axolotl":
        return " and ".join(f"{name}: {str(value).lower()}" for name, value in named.items())
    return f"TrainingArguments({', '.join(f'{name}={value}' for name, value in named.items())})"


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
    source, share = evidence.source, evidence.figures.limit_share
    workers, prefetch = evidence.number("num_workers"), evidence.number("prefetch_factor")
    is_small = share is not None and share < thresholds.SMALL_MEMORY_SHARE
    if is_small and not evidence.figures.oom_kills:
        return (
            "Stop the other programs that use the memory: this run used at most "
            f"{format_share(share)} of it."
        )
    if workers and prefetch and prefetch > MOST_READ_AHEAD:
        setting = _name(source, prefetch_factor=MOST_READ_AHEAD // 2)
        return f"Set {setting}; currently {workers * prefetch:,} batches are kept ready."
    if workers and workers > 1:
        setting = _name(source, num_workers=workers // 2)
        return f"Set {setting}; each of the current {workers} workers needs memory of its own."
    if evidence.is_stream:
        return f"Use a smaller {_of(_BATCH_SIZE, source)}, or a larger machine."
    return f"Stream the data instead of loading it all: {_of(_STREAM, source)}."


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
    """Communicate less often, or less; where most of it is waiting, even the ranks out."""
    if evidence.is_skewed:
        return even_out(evidence)
    source, exposed = evidence.source, evidence.exposed
    stage, is_fsdp = evidence.number("deepspeed_stage") or 0, bool(evidence.setting("fsdp"))
    if not is_fsdp and stage < 2:
        count = 2 * (evidence.number("gradient_accumulation") or 1)
        change = f"Call optimizer.step() every {count} batches, with model.no_sync() in between"
        if source in ("axolotl", "transformers"):
            change = f"Set {_name(source, gradient_accumulation_steps=count)}"
        elif source == "lightning":
            change = f"Set Trainer(accumulate_grad_batches={count})"
        return Action(
            f"{change}; gradients are then exchanged half as often. The global batch doubles, so "
            "check the learning rate.",
            possible_gain(exposed / 2),
        )
    why = (
        f"{'FSDP' if is_fsdp else f'ZeRO-{stage}'} communicates in every micro-batch, so "
        "accumulation does not reduce it"
    )
    larger, is_known_to_fit = _raise_batch(evidence)
    if is_known_to_fit:
        return Action(f"{larger} {why}.", possible_gain(exposed / 2))
    change = f"use ZeRO-{stage - 1} (zero{stage - 1}.json) if the model then fits on every GPU"
    if is_fsdp:
        setting = "fsdp_config: {reshard_after_forward: false}"
        if source == "transformers":
            setting = 'TrainingArguments(fsdp_config={"reshard_after_forward": False})'
        change = (
            f"set {setting} if the parameters fit on every GPU; with several nodes, shard inside "
            "each node only (hybrid sharding)"
        )
    return Action(f"{why}: {change}. {larger}", possible_gain(exposed))


def even_out(evidence: Evidence) -> Action:
    """Make ranks take the same time."""
    figures = evidence.figures
    rates = [rank.tokens_per_second for rank in figures.ranks if rank.tokens_per_second]
    is_uneven = len(rates) > 1 and max(rates) > 1.05 * min(rates)
    slow, lost = evidence.slow_rank, evidence.exposed * (evidence.skew_share or 0.0)
    if evidence.holds_up:
        slow, lost = figures.straggler_rank, figures.straggler_fraction or 0.0
    text = (
        f"Check the machine of rank {slow}: its GPU clocks and power (nvidia-smi -q -d "
        "PERFORMANCE), and other programs on its CPU cores."
    )
    if is_uneven and not evidence.setting("sample_packing"):
        text = f"Give every rank the same number of tokens: {_of(_PAD_LESS, evidence.source)}."
    return Action(text, possible_gain(lost))


def compute_better(evidence: Evidence) -> Action:
    """Leave the data alone, and where something else is plain, name it."""
    figures, source = evidence.figures, evidence.source
    padding, idle, mfu = figures.padding_share, figures.device_idle_fraction, figures.mfu
    larger, is_known_to_fit = _raise_batch(evidence)
    if padding is not None and evidence.is_padded:
        pad_less = _of(_PAD_LESS, source)
        change = f"{format_share(padding)} of all positions are padding: {pad_less}."
        gain = possible_gain(padding)
    elif idle is not None and idle >= thresholds.MUCH_IDLE:
        change = f"The GPU is idle between kernels {format_share(idle)} of the time. {larger}"
        if not evidence.setting("torch_compile") and not is_known_to_fit:
            change += f" Or {_of(_COMPILE, source)}."
        gain = possible_gain(idle)
    elif mfu is not None and mfu < thresholds.LOW_MFU:
        change, gain = f"MFU is low. {larger}", None
        if evidence.setting("attn_implementation") == "eager":
            # sdpa has flash kernels, too; eager attention is slow whatever the batch.
            change += " Use attn_implementation sdpa: eager stores the whole attention matrix."
    else:
        return Action("Leave the data path as it is: a faster loader would change nothing.")
    return Action(f"Leave the data path as it is. {change}", gain)


def _raise_batch(evidence: Evidence) -> tuple[str, bool]:
    """A larger micro-batch, and whether the memory of the GPU is known to allow it.

    By a linear estimate that errs on the safe side: all of the memory is taken to grow with the
    batch, though weights and optimizer state do not.
    """
    name = _of(_BATCH_SIZE, evidence.source)
    size = evidence.number("micro_batch_size") or evidence.number("batch_size")
    used, free = evidence.gpu_memory
    if not size or not used or free is None:
        return f"Try a larger {name}; it may not fit, because memory use was not recorded.", False
    more = min(size, math.floor(free / (used / size)))
    room = f"{format_bytes(free)} of GPU memory are free"
    if more < 1:
        need = f"one more sample may take {format_bytes(used / size)}"
        return f"Do not raise {name}: {room}; {need}.", False
    accumulation = evidence.number("gradient_accumulation") or 1
    caveat = "the global batch grows, so check the learning rate"
    if more == size and accumulation % 2 == 0:
        caveat = f"halve gradient_accumulation_steps (now {accumulation}) to keep the global batch"
    return f"Raise {name} from {size} to {size + more}: {room}; {caveat}.", True


# What to do about time beside the steps.


def lose_less(evidence: Evidence, part: str) -> str:
    """Fewer, smaller or concurrent checkpoints and evaluations; do once what is done before every
    run; go on without reading what was read before."""
    source, prepare = evidence.source, _of(_PREPARE, evidence.source)
    if part == "checkpoint":
        less_often = _less_often(evidence, part, "save")
        return f"Save less often: {less_often}. Or {_of(_SAVE_LESS, source)}."
    if part == "evaluation":
        less_often = _less_often(evidence, part, "eval")
        return f"Evaluate less often: {less_often}. Or evaluate on fewer rows."
    if part == "between":
        place = evidence.line_of(part)
        return f"Look at {place or 'what the loop does between two loaders'}: do it less often."
    if part == "resume" and source == "axolotl":
        return f"Train on a prepared dataset, whose rows are skipped without being read: {prepare}."
    if part == "resume":
        return (
            "Use a reader that resumes where it stopped: fast_axolotl.open_dataset, with "
            "state_dict and load_state_dict."
        )
    if evidence.setting("dataset_is_prepared"):
        return "Keep the model files on a local disk (HF_HOME): the dataset is already prepared."
    return f"Prepare the data once: {prepare}."


def _less_often(evidence: Evidence, part: str, verb: str) -> str:
    """The interval with which a part takes half of what makes it the limit."""
    source, share = evidence.source, min(evidence.lost_share(part), 0.99)
    times = max(2, math.ceil(share / (1.0 - share) / (thresholds.LOST_TIME / 2)))
    steps, per_epoch = evidence.number(f"{verb}_steps"), evidence.number(f"{verb}s_per_epoch")
    if source == "axolotl" and per_epoch and per_epoch >= times:
        return f"set {verb}s_per_epoch: {per_epoch // times} (now {per_epoch})"
    if source in ("axolotl", "transformers") and steps:
        setting = _name(source, **{f"{verb}_steps": times * steps})
        return f"set {setting} (now every {steps:,} steps)"
    return f"leave {times} times as many steps in between"


# What to do about late data.


def prepare_in_workers(evidence: Evidence, place: str, share: float) -> Action:
    """What the loop does to a batch can be done in the loader's processes, beside the model."""
    what = f"what {place} does" if place else "the preparation"
    workers = evidence.number("num_workers") or 0
    setting = "" if workers else f" with {_name(evidence.source, num_workers=2)}"
    return Action(
        f"Move {what} into the loader (the dataset, or its collate_fn){setting}: then it runs "
        "beside the model.",
        possible_gain(share),
    )


def feed(evidence: Evidence) -> Action:
    """What to change for waits by rate, in bursts, or once in a while."""
    figures, follows = evidence.figures, evidence.figures.stall_period_of
    everything = possible_gain(evidence.stall)
    if figures.stall_source == "stacks":
        place = evidence.line_of("waiting")
        where = f" at {place}" if place else ""
        return Action(
            f"The loop waits{where} for what feeds it: have more threads or processes fill that "
            "queue, or read with a DataLoader and workers.",
            everything,
        )
    if evidence.pattern == "rate":
        return _speed_up(evidence)
    if follows not in ("epoch", "shard"):
        if evidence.setting("sample_packing") and _is_stock_stream(evidence):
            # Axolotl packs so many rows of a stream, then so many more.
            return Action(f"Make the next packs in less time: {_ACCELERATE}.", everything)
        if evidence.pattern == "burst":
            return _deepen(evidence)
    # Make the unit of work behind a rare, long wait smaller.
    gain = possible_gain(evidence.stall * figures.waits_by_cause.get(follows, 1.0))
    rows = figures.stall_period_rows
    if follows == "shard":
        return Action("Write the data in smaller shards: each wait comes with a new shard.", gain)
    if follows == "epoch":
        text = (
            "Find out what happens when an epoch begins (shuffling, opening files, planning "
            "packs); do it in advance, or less often with more rows per epoch."
        )
        if evidence.number("num_workers") and not evidence.setting("persistent_workers"):
            text = "Each epoch starts new workers: train on more rows per epoch."
            if evidence.source != "axolotl":  # it has no setting that keeps them
                keep = _name(evidence.source, persistent_workers=True)
                text = f"Keep the workers between epochs: {keep}."
        return Action(text, gain)
    unit = f"about every {rows:,.0f} samples" if rows is not None else "at these distances"
    return Action(
        f"Find out what happens {unit} (map(batched=True) in datasets takes 1,000 rows at a time, "
        "batch_size=100 takes fewer; or a shuffle buffer, a row group) and make that unit smaller.",
        gain,
    )


def _is_stock_stream(evidence: Evidence) -> bool:
    """Whether Axolotl prepares a stream by itself."""
    is_axolotl = evidence.source == "axolotl" and evidence.is_stream
    return is_axolotl and not evidence.figures.replacements


def _speed_up(evidence: Evidence) -> Action:
    """The loader is too slow on average."""
    source, world = evidence.source, evidence.figures.world_size
    workers, shards = evidence.number("num_workers"), evidence.number("num_shards")
    # What comes at the start of an epoch, or in the main process, no worker takes away.
    causes = evidence.figures.waits_by_cause
    stall = min(evidence.stall * max(0.0, 1.0 - causes.get("epoch", 0.0)), 0.95)
    all_of_it = possible_gain(stall)
    throttled = evidence.figures.cpu_throttled_share or 0.0
    if throttled >= thresholds.CPU_LOST:
        return Action(
            "Raise the CPU quota (cpu.max, docker run --cpus, resources.limits.cpu): it withholds "
            f"{format_share(throttled)} of the CPU time, so more workers do not help.",
            all_of_it,
        )
    # Where the loop itself reads, reading takes stall ÷ (1 − stall) times as long as the model.
    wanted = _at_least(workers / (1.0 - stall)) if workers else _at_least(stall / (1 - stall)) + 1
    cores = evidence.cores or max(MOST_UNSEEN_WORKERS, 2 * (workers or 0))
    most = min(cores, shards or cores)
    if workers is None:
        setting = _name(source, num_workers=min(wanted, most))
        return Action(
            f"Load data in worker processes: {setting}, at most {most}. The current number was "
            "not recorded.",
            all_of_it,
        )
    if workers < most:
        count = min(max(workers + 1, wanted), most)
        # The workers share the reading, and the step is as long as the longer of both.
        reading = stall / count if not workers else workers / count
        why = "data is currently loaded in the main process (0 workers)"
        if workers:
            why = f"{count_words(workers, 'worker')} cannot keep up; about "
            why += f"{workers / (1.0 - stall):.1f} are needed"
            if count < wanted:
                why += f", but there are only {count} {'shards' if count == shards else 'cores'}"
        text = f"Set {_name(source, num_workers=count)}, because {why}."
        return Action(text, 1.0 / max(1.0 - stall, reading) - 1.0)
    if shards and (shards < workers or shards < cores):
        return Action(
            "Split the data into more shards (files, or num_shards of to_iterable_dataset): each "
            f"worker needs at least one (now {count_words(workers, 'worker')}, "
            f"{count_words(shards, 'shard')}).",
            all_of_it,
        )
    if evidence.setting("dispatcher") and world > 1:
        return Action(
            f"Let every rank read its own part: set {_of(_NO_DISPATCH, source)}, but only if the "
            f"data has more files than there are ranks ({world}); otherwise each rank reads "
            "everything.",
            all_of_it,
        )
    cheaper = f"to prepare the rows in advance, {_of(_PREPARE, source)}"
    if _is_stock_stream(evidence):
        cheaper = _ACCELERATE
    elif evidence.setting("dataset_is_prepared"):
        # What is left is to read the rows, to collate and to hand them over.
        cheaper = "keep the prepared rows on a local disk or in memory (/dev/shm)"
        if source == "axolotl" and evidence.figures.replacements == ():
            cheaper = (
                "start Axolotl with fast-axolotl run --, which replaces its collators and fetching"
            )
    each = " on each rank" if world > 1 and not evidence.setting("dispatcher") else ""
    full = f"{count_words(workers, 'worker')}{each} occupy all CPU cores"
    return Action(f"Make loading cheaper, because {full}: {cheaper}.", all_of_it)


def _deepen(evidence: Evidence) -> Action:
    """A queue that holds as many batches as come between two waits."""
    figures, workers = evidence.figures, evidence.number("num_workers")
    wanted, stall = round(figures.stall_period_fetches or 0.0), min(evidence.stall, 0.95)
    is_deep = figures.queue_capacity is not None and figures.queue_capacity >= wanted
    # Axolotl does not give its streams a prefetch factor: only workers make their queue deeper.
    if is_deep or (evidence.source == "axolotl" and evidence.is_stream):
        return _speed_up(evidence)
    count = workers or min(
        max(2, _at_least(stall / (1.0 - stall)) + 1), evidence.number("num_shards") or 64
    )
    values = {} if workers else {"num_workers": count}
    values["prefetch_factor"] = max(2, math.ceil(wanted / count))
    gain = possible_gain(evidence.stall)
    if gain is not None and figures.reader_ratio is not None:
        # No more than the loader gives.
        gain = min(gain, max(0.0, figures.reader_ratio - 1.0))
    ready = count * values["prefetch_factor"]
    return Action(
        f"Set {_name(evidence.source, **values)}; {ready} batches are then ready and hide waits "
        f"that come about every {wanted:,} fetches.",
        gain,
    )


def _at_least(value: float) -> int:
    """The next whole number; a twentieth over one is not worth another worker."""
    return math.ceil(value - 0.05)
