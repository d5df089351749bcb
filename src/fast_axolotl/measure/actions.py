"""What to do next: one change, with the exact setting of the framework that the meter was plugged
into, chosen by the settings that were recorded. What feeds the model faster is in ``feeding``.

Names hold for Axolotl 0.19, transformers 5 and torch 2; a test looks them up there.
"""

from __future__ import annotations

from fast_axolotl.measure.evidence import Evidence
from fast_axolotl.measure.naming import (
    name_accumulation,
    name_batch_size,
    name_loader,
    name_setting,
)
from fast_axolotl.measure.wording import percent
from fast_axolotl.record.thresholds import LOW_MFU, MUCH_IDLE, MUCH_PADDING, SMALL_MEMORY_SHARE

__all__ = [
    "compute_better",
    "even_out",
    "lower_working_set",
    "profile",
    "read_less",
    "resolve_contradiction",
    "see_fetches",
    "talk_less",
]

MOST_READ_AHEAD = 16
"""Batches a worker reads ahead before that is the first thing to lower where memory is short."""


def see_fetches(given: Evidence) -> str:
    """Make the meter see fetches."""
    if given.source == "loop":
        return "Iterate with meter.watch(loader), so that fetches are timed."
    if given.source in ("", "watch"):
        return (
            "Run it with fast-axolotl run --measure -- COMMAND, or wrap the loader in the code: "
            "for batch in meter.watch(loader)."
        )
    call = "measure(RUN)"
    if given.source == "run":
        # Its folder is there already, and its process tree is sampled from outside.
        call = 'measure(os.environ["FAST_AXOLOTL_MEASURE"])'
    return (
        "Wrap the loader in the code, since no torch DataLoader was read in training: "
        f"with {call} as meter, for batch in meter.watch(loader)."
    )


def profile() -> str:
    """Make communication visible."""
    return "Record a profiler window: fast-axolotl run --measure --profile-steps 5 -- COMMAND."


def lower_working_set(given: Evidence) -> str:
    """Take less memory."""
    share = given.figures.limit_share
    workers, prefetch = given.number("num_workers"), given.number("prefetch_factor")
    if share is not None and share < SMALL_MEMORY_SHARE:
        return (
            "End the other programs that hold the memory: this run took at most "
            f"{percent(share)} of it."
        )
    # Axolotl gives its prefetch to datasets that know their rows, not to streams.
    is_heard = not (given.source == "axolotl" and given.is_stream)
    if workers and prefetch and prefetch > MOST_READ_AHEAD and is_heard:
        setting = name_loader(given.source, prefetch_factor=MOST_READ_AHEAD // 2)
        return f"Set {setting}; now {workers * prefetch:,} batches are kept ready."
    if workers and workers > 1:
        setting = name_loader(given.source, num_workers=workers // 2)
        return f"Set {setting}; now {workers} workers hold memory of their own."
    if not given.is_stream:
        return _stream_instead(given)
    return (
        f"Lower the working set, or give the machine more memory: a smaller "
        f"{name_batch_size(given.source)} comes first."
    )


def _stream_instead(given: Evidence) -> str:
    if given.source == "axolotl":
        return (
            "Stream the data instead of holding it: streaming: true, with max_steps, which a "
            "stream needs."
        )
    return "Stream the data instead of holding it: load_dataset(streaming=True) in datasets."


def read_less(given: Evidence) -> str:
    """Take fewer bytes from the disk."""
    if given.source == "axolotl" and not given.is_stream:
        return (
            "Put the prepared rows on a faster device: dataset_prepared_path, after axolotl "
            "preprocess."
        )
    if given.source == "axolotl":
        return (
            "Read fewer bytes: convert the data to compressed Parquet with the columns that are "
            "needed; or move it to a faster device."
        )
    return (
        "Read fewer bytes: convert the data to compressed Parquet and read only the columns that "
        "are needed (fast_axolotl.open_dataset(columns=…)); or move it to a faster device."
    )


def resolve_contradiction(given: Evidence, apart: float) -> str:
    """Find out which of two measurements is right."""
    if apart <= 0:
        return "Replay more than one batch, of the usual length: meter.watch(loader, replay=200)."
    workers = given.number("num_workers")
    if not workers:
        setting = name_loader(given.source, num_workers=1)
        return f"Set {setting}; the loader then no longer shares the interpreter with the model."
    if workers == 1:
        return (
            "Leave a core to the worker: torch.set_num_threads(CORES − 1) in training, or "
            "OMP_NUM_THREADS in its environment, and compare."
        )
    setting = name_loader(given.source, num_workers=workers // 2)
    return f"Leave cores to the model: set {setting} (now {workers}), and compare."


def talk_less(given: Evidence) -> str:
    """Communicate less often."""
    now = given.number("gradient_accumulation") or 1
    return (
        f"{name_accumulation(given.source, 2 * now)}; gradients are then exchanged half as often, "
        "and the total batch is twice as large."
    )


def even_out(given: Evidence) -> str:
    """Make ranks take the same time."""
    rates = [rank.tokens_per_second for rank in given.figures.ranks if rank.tokens_per_second]
    is_uneven = len(rates) > 1 and max(rates) > 1.05 * min(rates)
    if is_uneven and not given.setting("sample_packing"):
        return f"Give every rank as many tokens: {_pad_less(given)}."
    return (
        f"Look at the machine of rank {given.slow_rank}: its GPU's clocks and power (nvidia-smi "
        "-q -d PERFORMANCE), other programs on its cores."
    )


def compute_better(given: Evidence) -> str:
    """Leave the data alone, and where something else is plain, name it."""
    figures = given.figures
    padding, idle, mfu = figures.padding_share, figures.device_idle_fraction, figures.mfu
    found = ""
    if padding is not None and padding >= MUCH_PADDING and not given.setting("sample_packing"):
        found = f"{percent(padding)} of the positions are padding: {_pad_less(given)}"
    elif idle is not None and idle >= MUCH_IDLE:
        found = f"The device idles {percent(idle)} between kernels: {_idle_less(given)}"
    elif mfu is not None and mfu < LOW_MFU:
        found = f"MFU is low: {_compute_faster(given)}"
    if not found:
        return "Leave the data path as it is: a faster loader would change nothing."
    return f"Leave the data path as it is. {found}."


def _pad_less(given: Evidence) -> str:
    if given.source == "axolotl":
        return "set sample_packing: true"
    if given.source == "transformers" and not given.is_stream:
        return 'set TrainingArguments(train_sampling_strategy="group_by_length")'
    return "put samples of like length into a batch, or pack them"


def _idle_less(given: Evidence) -> str:
    larger = f"a larger {name_batch_size(given.source)}"
    if given.setting("torch_compile"):
        return f"set {larger}"
    if given.source in ("axolotl", "transformers"):
        return f"set {name_setting(given.source, 'torch_compile', 'true')}, or {larger}"
    return f"call torch.compile(model), or set {larger}"


def _compute_faster(given: Evidence) -> str:
    larger = f"a larger {name_batch_size(given.source)}"
    kernel = str(given.setting("attn_implementation") or "")
    has_kernel = bool(given.setting("flash_attention")) or kernel not in ("", "eager", "sdpa")
    if has_kernel or given.source not in ("axolotl", "transformers"):
        return f"set {larger}"
    if given.source == "axolotl":
        return f"set attn_implementation: flash_attention_2, or {larger}"
    return f'load the model with attn_implementation="flash_attention_2", or set {larger}'
