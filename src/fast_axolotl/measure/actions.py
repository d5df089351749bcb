"""What to do next: one change, with the exact setting, chosen by the settings that were recorded.

Axolotl's YAML and HF's ``TrainingArguments`` share the names of most settings; torch's own name
stands beside them in brackets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fast_axolotl.measure.wording import percent
from fast_axolotl.record import RunSummary

__all__ = [
    "compute_better",
    "even_out",
    "feed",
    "lower_working_set",
    "profile",
    "read_less",
    "resolve_contradiction",
    "see_fetches",
    "talk_less",
    "warmup_steps",
]

MOST_READ_AHEAD = 16
"""Batches a worker reads ahead before that is the first thing to lower where memory is short."""
SMALL_SHARE = 0.5
"""Of the memory that may be taken. Ours: a run that took less is not what fills it."""
MUCH_PADDING = 0.10
"""Share of positions. Ours: below it packing gains little."""
MUCH_IDLE = 0.20
"""Share of the profiled time in which the device idles though data is there. Ours."""
LOW_MFU = 0.30
"""Ours: published dense runs reach 0.35 to 0.55."""
STREAMED_PACK_ROWS = 10_000
"""Axolotl's default of ``streaming_multipack_buffer_size``."""
MAP_ROWS = 1_000
"""Default batch of ``datasets.map``."""


def feed(one: RunSummary, subtype: str) -> str:
    """Make data come in time: by rate, burst or periodic."""
    return {"burst": _deepen, "periodic": _spread}.get(subtype, _speed_up)(one)


def see_fetches(source: str) -> str:
    """Make the meter see fetches."""
    if source == "loop":
        return "Iterate with meter.watch(loader), so that fetches are timed."
    return (
        "Run it with fast-axolotl run --measure -- COMMAND, or wrap the loader in the code: "
        "for batch in meter.watch(loader)."
    )


def profile() -> str:
    """Make communication visible."""
    return "Record a profiler window: fast-axolotl run --measure --profile-steps 5 -- COMMAND."


def lower_working_set(one: RunSummary) -> str:
    """Take less memory."""
    workers, prefetch = _number(one, "num_workers"), _number(one, "prefetch_factor")
    if one.limit_share is not None and one.limit_share < SMALL_SHARE:
        return (
            "End the other programs that hold the memory: this run took at most "
            f"{percent(one.limit_share)} of it."
        )
    if workers and prefetch and prefetch > MOST_READ_AHEAD:
        return _set(
            f"dataloader_prefetch_factor: {MOST_READ_AHEAD // 2}",
            f"DataLoader(prefetch_factor={MOST_READ_AHEAD // 2})",
            f"now {workers * prefetch:,} batches are kept ready",
        )
    if workers and workers > 1:
        return _set(
            f"dataloader_num_workers: {workers // 2}",
            f"DataLoader(num_workers={workers // 2})",
            f"now {workers} workers hold memory of their own",
        )
    if not one.settings.get("streaming"):
        return (
            "Stream the data instead of holding it: streaming: true with "
            "dataset_use_rust_streaming: true in Axolotl, load_dataset(streaming=True) in datasets."
        )
    return "Lower the working set, or give the machine more memory: micro_batch_size comes first."


def read_less(one: RunSummary) -> str:
    """Take fewer bytes from the disk."""
    if one.settings.get("streaming"):
        return (
            "Read fewer bytes: convert the data to compressed Parquet and read only the columns "
            "that are needed (open_dataset(columns=…)); or move it to a faster device."
        )
    return (
        "Read fewer bytes: prepare the data once (axolotl preprocess, with dataset_prepared_path "
        "on a faster device), or convert it to compressed Parquet."
    )


def resolve_contradiction(one: RunSummary, apart: float) -> str:
    """Find out which of two measurements is right."""
    if apart > 0:
        workers = _number(one, "num_workers")
        if not workers:
            return _set(
                "dataloader_num_workers: 1",
                "DataLoader(num_workers=1)",
                "the loader then no longer shares the interpreter with the model",
            )
        return (
            f"Leave cores to the model: lower dataloader_num_workers below {workers} "
            f"(DataLoader(num_workers={workers - 1})), and compare."
        )
    return "Replay more than one batch, of the usual length: meter.watch(loader, replay=200)."


def talk_less(one: RunSummary) -> str:
    """Communicate less often."""
    now = _number(one, "gradient_accumulation") or 1
    return _set(
        f"gradient_accumulation_steps: {2 * now}",
        "call optimizer.step() half as often, with model.no_sync() between",
        "gradients are then exchanged half as often; with half the micro-batches to match",
    )


def even_out(one: RunSummary, slow_rank: int | None) -> str:
    """Make ranks take the same time."""
    tokens = [rank.tokens_per_second for rank in one.ranks if rank.tokens_per_second]
    uneven = len(tokens) > 1 and max(tokens) > 1.05 * min(tokens)
    if uneven and not one.settings.get("sample_packing"):
        return "Give every rank as many tokens: sample_packing: true (Axolotl)."
    return (
        f"Look at the machine of rank {slow_rank}: its GPU's clocks and power (nvidia-smi -q -d "
        "PERFORMANCE), other programs on its cores."
    )


def compute_better(one: RunSummary) -> str:
    """Leave the data alone, and where something else is plain, name it."""
    padding = one.padding_share
    if padding is not None and padding >= MUCH_PADDING and not one.settings.get("sample_packing"):
        return (
            f"Leave the data path as it is. {percent(padding)} of the positions are padding: set "
            "sample_packing: true (Axolotl), or group_by_length=True (TrainingArguments)."
        )
    idle = one.device_idle_fraction
    if idle is not None and idle >= MUCH_IDLE:
        return (
            f"Leave the data path as it is. The device idles {percent(idle)} between kernels: set "
            "torch_compile: true (torch: torch.compile(model)), or a larger micro_batch_size."
        )
    if one.mfu is not None and one.mfu < LOW_MFU:
        return (
            "Leave the data path as it is. MFU is low: set flash_attention: true (Axolotl; "
            "attn_implementation='flash_attention_2' in transformers), or more micro_batch_size."
        )
    return "Leave the data path as it is: a faster loader would change nothing."


def warmup_steps(settings: Mapping[str, Any]) -> int:
    """Steps until all batches read ahead at the start are used up, five at least."""
    workers = _as_number(settings.get("num_workers")) or 0
    prefetch = _as_number(settings.get("prefetch_factor")) or 0
    accumulation = _as_number(settings.get("gradient_accumulation")) or 1
    return max(5, math.ceil(workers * prefetch / accumulation) + 1)


def _speed_up(one: RunSummary) -> str:
    """The loader is too slow on average."""
    workers = _number(one, "num_workers")
    stall = min(one.stall_fraction or 0.0, 0.95)
    cores = _as_number(one.environment.get("cores"))
    if one.settings.get("dispatcher") and one.world_size > 1:
        return (
            "Let every rank read its own share: accelerator_config: {dispatch_batches: false} "
            "(Axolotl and TrainingArguments; Accelerator(dispatch_batches=False))."
        )
    if not workers:
        wanted = _at_least(stall / (1.0 - stall)) + 1
        return _set_workers(min(wanted, cores or wanted), "now the training process itself reads")
    wanted = max(workers + 1, _at_least(workers / (1.0 - stall)))
    if cores is None or wanted <= cores:
        return _set_workers(wanted, f"{workers} now; {workers} ÷ (1 − stall) keep up")
    if one.settings.get("streaming"):
        return (
            f"Make reading cheaper, {workers} workers fill {cores} cores: set "
            "dataset_use_rust_streaming: true (Axolotl; fast_axolotl.open_dataset elsewhere)."
        )
    return (
        f"Make reading cheaper, {workers} workers fill {cores} cores: tokenise once beforehand "
        "(axolotl preprocess; datasets' map(...).save_to_disk() elsewhere)."
    )


def _deepen(one: RunSummary) -> str:
    """A queue that holds as many batches as come between two waits."""
    workers = _number(one, "num_workers")
    wanted = _ready_batches(one)
    if one.queue_capacity is not None and one.queue_capacity >= wanted:
        return _speed_up(one)
    stall = min(one.stall_fraction or 0.0, 0.95)
    # Where the loop itself reads, reading takes stall ÷ (1 − stall) times as long as the model.
    each = workers or max(2, _at_least(stall / (1.0 - stall)) + 1)
    prefetch = max(2, math.ceil(wanted / each))
    first = "" if workers else f"dataloader_num_workers: {each} and "
    torch = "" if workers else f"num_workers={each}, "
    return _set(
        f"{first}dataloader_prefetch_factor: {prefetch}",
        f"DataLoader({torch}prefetch_factor={prefetch})",
        f"{each * prefetch} batches are then ready, and hide waits {_apart(one)}",
    )


def _ready_batches(one: RunSummary) -> int:
    if one.stall_period_fetches is not None:
        return math.ceil(one.stall_period_fetches)
    own = one.measured_seconds * (1.0 - (one.stall_fraction or 0.0)) / max(1, one.fetches)
    longest = one.wait_max_seconds or 0.0
    return min(64, max(4, math.ceil(longest / own))) if own > 0 else 16


def _apart(one: RunSummary) -> str:
    if one.stall_period_fetches is None:
        return "of the length seen"
    return f"that come every {one.stall_period_fetches:,.4g} fetches"


def _spread(one: RunSummary) -> str:
    """Make the unit of work behind a rare, long wait smaller."""
    rows, settings = one.stall_period_rows, one.settings
    if one.stall_period_of == "epoch" and not settings.get("persistent_workers"):
        return (
            "Keep the workers between epochs: dataloader_persistent_workers=True "
            "(TrainingArguments; DataLoader(persistent_workers=True))."
        )
    if one.stall_period_of == "shard":
        return "Write the data in smaller shards: each wait comes with a new one."
    if settings.get("streaming") and settings.get("sample_packing"):
        now = _as_number(settings.get("streaming_multipack_buffer_size")) or STREAMED_PACK_ROWS
        return (
            f"Pack fewer rows at a time: streaming_multipack_buffer_size: {max(500, now // 10)} "
            f"(Axolotl; now {now:,})."
        )
    if rows is not None and abs(rows - MAP_ROWS) <= 0.05 * MAP_ROWS:
        return (
            "Work in smaller units: every 1,000 rows is the default batch of datasets' map; give "
            "map(batched=True, batch_size=100)."
        )
    unit = f"every {rows:,.0f} samples" if rows is not None else "at these distances"
    return (
        f"Look at what is done {unit} (a map over a batch of rows, a shuffle buffer, a row group) "
        "and make that unit smaller."
    )


def _set_workers(count: int, why: str) -> str:
    count = max(1, count)
    return _set(f"dataloader_num_workers: {count}", f"DataLoader(num_workers={count})", why)


def _set(setting: str, torch: str, why: str) -> str:
    return f"Set {setting} (Axolotl and TrainingArguments; torch: {torch}): {why}."


def _at_least(value: float) -> int:
    """The next whole number; a twentieth over one is not worth another worker."""
    return math.ceil(value - 0.05)


def _number(one: RunSummary, name: str) -> int | None:
    return _as_number(one.settings.get(name))


def _as_number(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value)
