"""What to do next: one change, with the exact setting of the framework that the meter was plugged
into, chosen by the settings that were recorded.

Data that comes late is the larger half. A loader that is too slow on average needs more processes,
or less to do a row. One that is fast enough and comes in bursts needs a queue as deep as a burst.
Work that is done once in a long while no queue hides: it has to be cut up.

Names hold for Axolotl 0.19, transformers 5 and torch 2; a test looks them up there.
"""

from __future__ import annotations

import math

from fast_axolotl.measure.evidence import Evidence, about_seconds
from fast_axolotl.record.thresholds import (
    LOST_TIME,
    LOW_MFU,
    MUCH_IDLE,
    MUCH_PADDING,
    SMALL_MEMORY_SHARE,
)
from fast_axolotl.record.units import format_share

__all__ = [
    "compute_better",
    "evaluate_less",
    "even_out",
    "feed",
    "free_processors",
    "lower_working_set",
    "profile",
    "read_less",
    "resolve_contradiction",
    "resume_faster",
    "save_less",
    "see_fetches",
    "start_faster",
    "talk_less",
]

MOST_READ_AHEAD = 16
"""Batches a worker reads ahead before that is the first thing to lower where memory is short."""
TORCH_PREFETCH = 2
"""Batches a worker of torch reads ahead unless told otherwise; Axolotl's streams are not told."""
MOST_UNSEEN_WORKERS = 4
"""Workers that are advised where the number of processors is not known. Ours."""
LEAST_PACK_ROWS = 500
"""Rows packed at a time. Ours: with fewer, packs have gaps."""
STREAMED_PACK_ROWS = 10_000
"""Axolotl's default of ``streaming_multipack_buffer_size``."""
MAP_ROWS = 1_000
"""Default batch of ``datasets.map``."""


# How a setting is called where it is set: in Axolotl's YAML, HF's arguments, or torch's loader.


def _name_setting(source: str, name: str, value: str) -> str:
    """One that Axolotl and HF's trainer call alike; elsewhere it stands as HF calls it."""
    if source == "axolotl":
        return f"{name}: {value}"
    shown = value.capitalize() if value in ("true", "false") else value
    return f"TrainingArguments({name}={shown})"


def _name_loader(source: str, **values: int | bool) -> str:
    """Settings of the loader: ``num_workers``, ``prefetch_factor``, ``persistent_workers``."""
    if source == "axolotl":
        shown = (f"dataloader_{name}: {str(value).lower()}" for name, value in values.items())
        return " and ".join(shown)
    prefix = "dataloader_" if source == "transformers" else ""
    joined = ", ".join(f"{prefix}{name}={value}" for name, value in values.items())
    return f"{'TrainingArguments' if prefix else 'DataLoader'}({joined})"


def _name_batch_size(source: str) -> str:
    """Samples of a batch."""
    names = {"axolotl": "micro_batch_size", "transformers": "per_device_train_batch_size"}
    return names.get(source, "DataLoader(batch_size=…)")


# What to do about everything but late data.


def see_fetches(evidence: Evidence) -> str:
    """Make the meter see fetches."""
    if evidence.source == "loop":
        return "Iterate with meter.watch(loader), so that fetches are timed."
    if evidence.source in ("", "watch"):
        return (
            "Run it with fast-axolotl run --measure -- COMMAND, or wrap the loader in the code: "
            "for batch in meter.watch(loader)."
        )
    call = "measure(RUN)"
    if evidence.source == "run":
        # Its folder is there already, and its process tree is sampled from outside.
        call = 'measure(os.environ["FAST_AXOLOTL_MEASURE"])'
    return (
        "Wrap the loader in the code, since no torch DataLoader was read in training: "
        f"with {call} as meter, for batch in meter.watch(loader)."
    )


def profile() -> str:
    """Make communication visible."""
    return "Record a profiler window: fast-axolotl run --measure --profile-steps 5 -- COMMAND."


def lower_working_set(evidence: Evidence) -> str:
    """Take less memory."""
    source, share = evidence.source, evidence.figures.limit_share
    workers, prefetch = evidence.number("num_workers"), evidence.number("prefetch_factor")
    if share is not None and share < SMALL_MEMORY_SHARE and not evidence.figures.oom_kills:
        return (
            "End the other programs that hold the memory: this run took at most "
            f"{format_share(share)} of it."
        )
    # Axolotl gives its prefetch to datasets that know their rows, not to streams.
    is_heard = not (source == "axolotl" and evidence.is_stream)
    if workers and prefetch and prefetch > MOST_READ_AHEAD and is_heard:
        setting = _name_loader(source, prefetch_factor=MOST_READ_AHEAD // 2)
        return f"Set {setting}; now {workers * prefetch:,} batches are kept ready."
    if workers and workers > 1:
        setting = _name_loader(source, num_workers=workers // 2)
        return f"Set {setting}; now {workers} workers hold memory of their own."
    if evidence.is_stream:
        return (
            f"Lower the working set, or give the machine more memory: a smaller "
            f"{_name_batch_size(source)} comes first."
        )
    if source == "axolotl":
        return (
            "Stream the data instead of holding it: streaming: true, with max_steps, which a "
            "stream needs."
        )
    return "Stream the data instead of holding it: load_dataset(streaming=True) in datasets."


def free_processors(evidence: Evidence, subtype: str) -> str:
    """Get the processors back that a quota, the hypervisor or other programs take."""
    if subtype == "steal":
        return "Move the run to a machine with processors of its own: this one shares them."
    workers = evidence.number("num_workers")
    fewer = "OMP_NUM_THREADS=1"
    if workers and workers > 1:
        fewer = f"{_name_loader(evidence.source, num_workers=workers // 2)} (now {workers})"
    if subtype == "quota":
        return (
            "Raise the CPU quota: cpu.max of the control group, docker run --cpus, or "
            f"resources.limits.cpu in Kubernetes. If that is not possible, set {fewer}."
        )
    return (
        "End the other programs, or lower their priority with renice -n 19 -p PID; top shows them. "
        f"If that is not possible, set {fewer}."
    )


def read_less(evidence: Evidence) -> str:
    """Take fewer bytes from the disk, or the same in larger requests."""
    if evidence.is_random:
        copy = "copy the data to a local NVMe drive or into memory (/dev/shm)"
        if evidence.source == "axolotl" and not evidence.is_stream:
            return f"Do not read at random from this disk: {copy} and set dataset_prepared_path."
        return (
            f"Read in order instead of at random: {copy}, or shuffle in a buffer "
            "(dataset.to_iterable_dataset().shuffle(buffer_size=10_000)). More workers do not help."
        )
    if evidence.source == "axolotl" and not evidence.is_stream:
        return (
            "Put the prepared rows on a faster device: dataset_prepared_path, after axolotl "
            "preprocess."
        )
    if evidence.source == "axolotl":
        return (
            "Read fewer bytes: convert the data to compressed Parquet with the columns that are "
            "needed; or move it to a faster device."
        )
    return (
        "Read fewer bytes: convert the data to compressed Parquet and read only the columns that "
        "are needed (fast_axolotl.open_dataset(columns=…)); or move it to a faster device."
    )


def resolve_contradiction(evidence: Evidence, apart: float) -> str:
    """Find out which of two measurements is right."""
    if apart <= 0:
        return "Replay more than one batch, of the usual length: meter.watch(loader, replay=200)."
    workers = evidence.number("num_workers")
    if not workers:
        setting = _name_loader(evidence.source, num_workers=1)
        return f"Set {setting}; the loader then no longer shares the interpreter with the model."
    if workers == 1:
        return (
            "Leave a core to the worker: torch.set_num_threads(CORES − 1) in training, or "
            "OMP_NUM_THREADS in its environment, and compare."
        )
    setting = _name_loader(evidence.source, num_workers=workers // 2)
    return f"Leave cores to the model: set {setting} (now {workers}), and compare."


def talk_less(evidence: Evidence) -> str:
    """Communicate less often."""
    source, count = evidence.source, 2 * (evidence.number("gradient_accumulation") or 1)
    if source in ("axolotl", "transformers"):
        change = f"Set {_name_setting(source, 'gradient_accumulation_steps', str(count))}"
    elif source == "lightning":
        change = f"Set Trainer(accumulate_grad_batches={count})"
    else:
        change = f"Call optimizer.step() every {count} batches, with model.no_sync() between"
    return (
        f"{change}; gradients are then exchanged half as often, and the total batch is twice as "
        "large."
    )


def even_out(evidence: Evidence) -> str:
    """Make ranks take the same time."""
    rates = [rank.tokens_per_second for rank in evidence.figures.ranks if rank.tokens_per_second]
    is_uneven = len(rates) > 1 and max(rates) > 1.05 * min(rates)
    slow = evidence.slow_rank
    if evidence.holds_up:
        slow = evidence.figures.straggler_rank
        is_uneven = evidence.figures.straggler_part == "tokens"
    if is_uneven and not evidence.setting("sample_packing"):
        return f"Give every rank as many tokens: {_pad_less(evidence)}."
    return (
        f"Look at the machine of rank {slow}: its GPU's clocks and power (nvidia-smi "
        "-q -d PERFORMANCE), other programs on its cores."
    )


def compute_better(evidence: Evidence) -> str:
    """Leave the data alone, and where something else is plain, name it."""
    figures, source = evidence.figures, evidence.source
    padding, idle, mfu = figures.padding_share, figures.device_idle_fraction, figures.mfu
    larger = f"a larger {_name_batch_size(source)}"
    is_trainer = source in ("axolotl", "transformers")
    if padding is not None and padding >= MUCH_PADDING and not evidence.setting("sample_packing"):
        change = f"{format_share(padding)} of the positions are padding: {_pad_less(evidence)}"
    elif idle is not None and idle >= MUCH_IDLE:
        if evidence.setting("torch_compile"):
            change = f"set {larger}"
        elif is_trainer:
            change = f"set {_name_setting(source, 'torch_compile', 'true')}, or {larger}"
        else:
            change = f"call torch.compile(model), or set {larger}"
        change = f"The device idles {format_share(idle)} between kernels: {change}"
    elif mfu is not None and mfu < LOW_MFU:
        kernel = str(evidence.setting("attn_implementation") or "")
        has_kernel = kernel not in ("", "eager", "sdpa") or evidence.setting("flash_attention")
        if has_kernel or not is_trainer:
            change = f"set {larger}"
        elif source == "axolotl":
            change = f"set attn_implementation: flash_attention_2, or {larger}"
        else:
            change = f'load the model with attn_implementation="flash_attention_2", or set {larger}'
        change = f"MFU is low: {change}"
    else:
        return "Leave the data path as it is: a faster loader would change nothing."
    return f"Leave the data path as it is. {change}."


def _pad_less(evidence: Evidence) -> str:
    if evidence.source == "axolotl":
        return "set sample_packing: true"
    if evidence.source == "transformers" and not evidence.is_stream:
        return 'set TrainingArguments(train_sampling_strategy="group_by_length")'
    return "put samples of like length into a batch, or pack them"


# What to do about time beside the steps.


def save_less(evidence: Evidence) -> str:
    """Fewer, smaller or concurrent checkpoints."""
    other = "save while training goes on: torch.distributed.checkpoint.async_save"
    if evidence.source in ("axolotl", "transformers"):
        only = _name_setting(evidence.source, "save_only_model", "true")
        other = f"save less: {only} leaves out what a run is resumed from"
    return f"Save less often: {_less_often(evidence, 'checkpoint', 'save')}. Or {other}."


def evaluate_less(evidence: Evidence) -> str:
    """Fewer or shorter evaluations."""
    other = "evaluate on a part of the rows"
    if evidence.source == "axolotl":
        other += ", with a smaller val_set_size"
    return f"Evaluate less often: {_less_often(evidence, 'evaluation', 'eval')}. Or {other}."


def _less_often(evidence: Evidence, part: str, verb: str) -> str:
    """The interval with which a part takes half of what makes it the limit."""
    source, share = evidence.source, min(evidence.lost_share(part), 0.99)
    times = max(2, math.ceil(share / (1.0 - share) / (LOST_TIME / 2)))
    steps, per_epoch = evidence.number(f"{verb}_steps"), evidence.number(f"{verb}s_per_epoch")
    if source == "axolotl" and per_epoch and per_epoch >= times:
        return f"set {verb}s_per_epoch: {per_epoch // times} (now {per_epoch})"
    if source in ("axolotl", "transformers") and steps:
        setting = _name_setting(source, f"{verb}_steps", str(times * steps))
        return f"set {setting} (now every {steps:,} steps)"
    return f"leave {times} times as many steps between two"


def start_faster(evidence: Evidence) -> str:
    """Do once what is done before every run."""
    if evidence.setting("dataset_is_prepared"):
        return "Keep the model's files on a local disk (HF_HOME): the dataset is prepared already."
    if evidence.source == "axolotl":
        return "Prepare the data once: axolotl preprocess CONFIG, with dataset_prepared_path."
    return "Prepare the data once and load the result: datasets' map(…).save_to_disk(…)."


def resume_faster(evidence: Evidence) -> str:
    """Go on without reading what was read before."""
    if evidence.source == "axolotl":
        return (
            "Train on a prepared dataset, which skips rows without reading them: axolotl "
            "preprocess CONFIG, with dataset_prepared_path."
        )
    first = "Use"
    if evidence.source == "transformers":
        first = "Set TrainingArguments(ignore_data_skip=True) to repeat rows of the epoch, or use"
    return (
        f"{first} a reader that resumes at its place: fast_axolotl.open_dataset, with state_dict "
        "and load_state_dict."
    )


# What to do about late data.


def feed(evidence: Evidence) -> str:
    """What to change for waits by rate, in bursts, or once in a while."""
    packs_a_stream = (
        evidence.source == "axolotl" and evidence.is_stream and evidence.setting("sample_packing")
    )
    is_ours = evidence.setting("dataset_use_rust_streaming")
    follows_files = evidence.figures.stall_period_of in ("epoch", "shard")
    if packs_a_stream and not is_ours and evidence.pattern != "rate" and not follows_files:
        # Axolotl packs so many rows of a stream, then so many more.
        has_workers = evidence.number("num_workers")
        loader = "" if has_workers else _name_loader(evidence.source, num_workers=1)
        return (
            f"Pack the next rows while these are trained on: {_use_our_reader(evidence, loader)}."
        )
    return {"burst": _deepen, "periodic": _spread}.get(evidence.pattern, _speed_up)(evidence)


def _use_our_reader(evidence: Evidence, *more: str) -> str:
    names = ("dataset_use_rust_streaming", "fast_axolotl_streaming_force")
    settings = [*(_name_setting(evidence.source, name, "true") for name in names), *more]
    return f"set {', '.join(filter(None, settings))}, and start Axolotl by fast-axolotl run --"


def _speed_up(evidence: Evidence) -> str:
    """The loader is too slow on average."""
    source, world = evidence.source, evidence.figures.world_size
    workers = evidence.number("num_workers") or 0
    stall = min(evidence.stall, 0.95)
    # Where the loop itself reads, reading takes stall ÷ (1 − stall) times as long as the model.
    wanted = _at_least(workers / (1.0 - stall)) if workers else _at_least(stall / (1 - stall)) + 1
    cores = evidence.cores or max(MOST_UNSEEN_WORKERS, 2 * workers)
    shards = evidence.number("num_shards")
    most = min(cores, shards or cores)
    is_dispatched = evidence.setting("dispatcher") and world > 1
    if workers < most:
        count = min(max(workers + 1, wanted), most)
        if not workers:
            why = "now the training process itself reads"
        elif count < wanted:
            limit = "shards" if count == shards else "cores"
            why = f"now {workers}, and there are {limit} for {count}"
        else:
            why = f"now {workers}, and {workers} ÷ (1 − stall) keep up"
        if is_dispatched:
            why += f". They work on rank 0, which reads for all {world} ranks"
        return f"Set {_name_loader(source, num_workers=count)}; {why}."
    if shards and (shards < workers or shards < cores):
        return (
            "Divide the data into more shards (files; num_shards of to_iterable_dataset): "
            f"{workers} workers share {shards}, and each takes one at least."
        )
    if is_dispatched:
        dispatch_off = {
            "axolotl": "accelerator_config: {dispatch_batches: false}",
            "transformers": 'TrainingArguments(accelerator_config={"dispatch_batches": False})',
        }.get(source, "DataLoaderConfiguration(dispatch_batches=False) of accelerate")
        return (
            f"Let every rank read its own share: {dispatch_off}; but only if the data has more "
            f"files than there are ranks ({world}), else each rank reads everything."
        )
    ranks, cores_there = evidence.local_ranks or world, evidence.figures.environment.get("cores")
    full = f"{workers} workers fill {cores_there} cores"
    if ranks > 1 and not evidence.setting("dispatcher"):
        full = f"{workers} workers a rank, and {ranks} ranks, fill {cores_there} cores"
    cheaper = "tokenise once beforehand, with datasets' map(…).save_to_disk(…)"
    if source == "axolotl":
        cheaper = (
            "prepare the rows beforehand (axolotl preprocess), with dataset_prepared_path on a "
            "fast device"
        )
        if evidence.is_stream and not evidence.setting("dataset_use_rust_streaming"):
            cheaper = _use_our_reader(evidence)
    return f"Make reading cheaper, since {full}: {cheaper}."


def _deepen(evidence: Evidence) -> str:
    """A queue that holds as many batches as come between two waits."""
    figures, workers = evidence.figures, evidence.number("num_workers")
    period, stall = figures.stall_period_fetches, min(evidence.stall, 0.95)
    if period is not None:
        wanted = math.ceil(period)
        apart = f"that come every {period:,.4g} fetches"
    else:
        own_seconds = figures.measured_seconds * (1.0 - evidence.stall) / max(1, figures.fetches)
        longest = figures.wait_max_seconds or 0.0
        wanted = min(64, max(4, math.ceil(longest / own_seconds))) if own_seconds > 0 else 16
        apart = "of the length seen"
    if figures.queue_capacity is not None and figures.queue_capacity >= wanted:
        return _speed_up(evidence)
    shards = evidence.number("num_shards")
    each = workers or max(2, _at_least(stall / (1.0 - stall)) + 1)
    each = each if workers else min(each, shards or each)
    values: dict[str, int] = {} if workers else {"num_workers": each}
    if evidence.source == "axolotl" and evidence.is_stream:
        most = evidence.cores or each + 1
        most = min(most, shards or most)
        each = max(each, min(math.ceil(wanted / TORCH_PREFETCH), most))
        if each == workers:
            return _speed_up(evidence)
        values, ready = {"num_workers": each}, TORCH_PREFETCH * each
    else:
        values["prefetch_factor"] = max(2, math.ceil(wanted / each))
        ready = each * values["prefetch_factor"]
    effect = f"and hide waits {apart}" if ready >= wanted else f"of {wanted} between two waits"
    setting = _name_loader(evidence.source, **values)
    return f"Set {setting}; {ready} batches are then ready, {effect}."


def _spread(evidence: Evidence) -> str:
    """Make the unit of work behind a rare, long wait smaller."""
    source, figures = evidence.source, evidence.figures
    if figures.stall_period_of == "epoch":
        return _join_epochs(evidence)
    if figures.stall_period_of == "shard":
        return "Write the data in smaller shards: each wait comes with a new one."
    if source == "axolotl" and evidence.is_stream and evidence.setting("sample_packing"):
        now = evidence.number("streaming_multipack_buffer_size") or STREAMED_PACK_ROWS
        fewer = max(LEAST_PACK_ROWS, now // 10)
        if fewer < now:
            setting = _name_setting(source, "streaming_multipack_buffer_size", str(fewer))
            return f"Pack fewer rows at a time: set {setting} (now {now:,})."
    rows = figures.stall_period_rows
    if source != "axolotl" and rows is not None and abs(rows - MAP_ROWS) <= 0.05 * MAP_ROWS:
        return (
            "Work in smaller units: every 1,000 rows is the default batch of datasets' map; give "
            "map(batched=True, batch_size=100)."
        )
    unit = f"every {rows:,.0f} samples" if rows is not None else "at these distances"
    return (
        f"Look at what is done {unit} (a map over a batch of rows, a shuffle buffer, a row group) "
        "and make that unit smaller."
    )


def _join_epochs(evidence: Evidence) -> str:
    """The wait comes with each epoch."""
    source, workers = evidence.source, evidence.number("num_workers")
    longest = evidence.figures.wait_max_seconds
    cost = "" if longest is None else f", {about_seconds(longest)} at most"
    if not workers or evidence.setting("persistent_workers"):
        return (
            f"Look at what is done as an epoch begins{cost}: a shuffle, files that are opened, a "
            "plan of packs; do it ahead, or less often with more rows an epoch."
        )
    if source == "axolotl":
        limits = (evidence.cores, evidence.number("num_shards"))
        more = min(2 * workers, *(limit for limit in limits if limit))
        change = "train on more rows an epoch"
        if more > workers:
            change = f"set {_name_loader(source, num_workers=more)}, so that batches come sooner"
        return (
            f"Each epoch begins with new workers{cost}, and Axolotl has no setting that keeps "
            f"them: {change}."
        )
    return f"Keep the workers between epochs: {_name_loader(source, persistent_workers=True)}."


def _at_least(value: float) -> int:
    """The next whole number; a twentieth over one is not worth another worker."""
    return math.ceil(value - 0.05)
