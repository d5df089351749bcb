"""How to make data come in time: more workers, a deeper queue, or smaller units of work.

A loader that is too slow on average needs more processes, or less to do a row. One that is fast
enough and comes in bursts needs a queue as deep as a burst. Work that is done once in a long while
no queue hides: it has to be cut up.
"""

from __future__ import annotations

import math

from fast_axolotl.measure.evidence import Evidence
from fast_axolotl.measure.naming import name_loader, name_setting
from fast_axolotl.measure.wording import seconds

__all__ = ["feed"]

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


def feed(given: Evidence) -> str:
    """What to change for waits by rate, in bursts, or once in a while."""
    if _can_read_ahead(given):
        return _read_ahead(given)
    return {"burst": _deepen, "periodic": _spread}.get(given.pattern, _speed_up)(given)


def _can_read_ahead(given: Evidence) -> bool:
    """Whether Axolotl packs so many rows of a stream, then so many more, and not yet by us."""
    return (
        given.source == "axolotl"
        and given.is_stream
        and bool(given.setting("sample_packing"))
        and not given.setting("dataset_use_rust_streaming")
        and given.pattern in ("burst", "periodic")
        and given.figures.stall_period_of not in ("epoch", "shard")
    )


def _read_ahead(given: Evidence) -> str:
    loader = "" if given.number("num_workers") else name_loader(given.source, num_workers=1)
    return f"Pack the next rows while these are trained on: {_use_our_reader(given, loader)}."


def _use_our_reader(given: Evidence, *more: str) -> str:
    names = ("dataset_use_rust_streaming", "fast_axolotl_streaming_force")
    settings = [name_setting(given.source, name, "true") for name in names]
    told = ", ".join(filter(None, (*settings, *more)))
    return f"set {told}, and start Axolotl by fast-axolotl run --"


def _speed_up(given: Evidence) -> str:
    """The loader is too slow on average."""
    workers = given.number("num_workers") or 0
    stall = min(given.stall, 0.95)
    # Where the loop itself reads, reading takes stall ÷ (1 − stall) times as long as the model.
    wanted = _at_least(workers / (1.0 - stall)) if workers else _at_least(stall / (1 - stall)) + 1
    cores = given.cores or max(MOST_UNSEEN_WORKERS, 2 * workers)
    shards = given.number("num_shards")
    most = min(cores, shards or cores)
    if workers < most:
        count = min(max(workers + 1, wanted), most)
        return f"Set {name_loader(given.source, num_workers=count)}; {_why_workers(given, count)}."
    if shards and (shards < workers or shards < cores):
        return (
            "Divide the data into more shards (files; num_shards of to_iterable_dataset): "
            f"{workers} workers share {shards}, and each takes one at least."
        )
    if given.setting("dispatcher") and given.figures.world_size > 1:
        return (
            f"Let every rank read its own share: {_dispatch_off(given)}; but only if the data has "
            f"more files than there are ranks ({given.figures.world_size}), else each rank reads "
            "everything."
        )
    return f"Make reading cheaper, since {_full_cores(given, workers)}: {_read_cheaper(given)}."


def _why_workers(given: Evidence, count: int) -> str:
    workers = given.number("num_workers")
    if not workers:
        why = "now the training process itself reads"
    elif count < _at_least(workers / (1.0 - min(given.stall, 0.95))):
        limit = "shards" if count == given.number("num_shards") else "cores"
        why = f"now {workers}, and there are {limit} for {count}"
    else:
        why = f"now {workers}, and {workers} ÷ (1 − stall) keep up"
    if given.setting("dispatcher") and given.figures.world_size > 1:
        why += f". They work on rank 0, which reads for all {given.figures.world_size} ranks"
    return why


def _full_cores(given: Evidence, workers: int) -> str:
    ranks = given.local_ranks or given.figures.world_size
    cores = given.figures.environment.get("cores")
    if ranks > 1 and not given.setting("dispatcher"):
        return f"{workers} workers a rank, and {ranks} ranks, fill {cores} cores"
    return f"{workers} workers fill {cores} cores"


def _dispatch_off(given: Evidence) -> str:
    if given.source == "axolotl":
        return "accelerator_config: {dispatch_batches: false}"
    if given.source == "transformers":
        return 'TrainingArguments(accelerator_config={"dispatch_batches": False})'
    return "DataLoaderConfiguration(dispatch_batches=False) of accelerate"


def _read_cheaper(given: Evidence) -> str:
    is_ours = given.setting("dataset_use_rust_streaming")
    if given.source == "axolotl" and given.is_stream and not is_ours:
        return _use_our_reader(given)
    if given.source == "axolotl":
        return (
            "prepare the rows beforehand (axolotl preprocess), with dataset_prepared_path on a "
            "fast device"
        )
    return "tokenise once beforehand, with datasets' map(…).save_to_disk(…)"


def _deepen(given: Evidence) -> str:
    """A queue that holds as many batches as come between two waits."""
    figures, workers = given.figures, given.number("num_workers")
    wanted = _ready_batches(given)
    if figures.queue_capacity is not None and figures.queue_capacity >= wanted:
        return _speed_up(given)
    stall, shards = min(given.stall, 0.95), given.number("num_shards")
    each = workers or max(2, _at_least(stall / (1.0 - stall)) + 1)
    each = each if workers else min(each, shards or each)
    values: dict[str, int] = {} if workers else {"num_workers": each}
    if given.source == "axolotl" and given.is_stream:
        most = given.cores or each + 1
        most = min(most, shards or most)
        each = max(each, min(math.ceil(wanted / TORCH_PREFETCH), most))
        if each == workers:
            return _speed_up(given)
        values, ready = {"num_workers": each}, TORCH_PREFETCH * each
    else:
        values["prefetch_factor"] = max(2, math.ceil(wanted / each))
        ready = each * values["prefetch_factor"]
    setting = name_loader(given.source, **values)
    what = (
        f"and hide waits {_apart(given)}" if ready >= wanted else f"of {wanted} between two waits"
    )
    return f"Set {setting}; {ready} batches are then ready, {what}."


def _ready_batches(given: Evidence) -> int:
    figures = given.figures
    if figures.stall_period_fetches is not None:
        return math.ceil(figures.stall_period_fetches)
    own = figures.measured_seconds * (1.0 - given.stall) / max(1, figures.fetches)
    longest = figures.wait_max_seconds or 0.0
    return min(64, max(4, math.ceil(longest / own))) if own > 0 else 16


def _apart(given: Evidence) -> str:
    period = given.figures.stall_period_fetches
    return "of the length seen" if period is None else f"that come every {period:,.4g} fetches"


def _spread(given: Evidence) -> str:
    """Make the unit of work behind a rare, long wait smaller."""
    if given.figures.stall_period_of == "epoch":
        return _join_epochs(given)
    if given.figures.stall_period_of == "shard":
        return "Write the data in smaller shards: each wait comes with a new one."
    if given.source == "axolotl" and given.is_stream and given.setting("sample_packing"):
        now = given.number("streaming_multipack_buffer_size") or STREAMED_PACK_ROWS
        fewer = max(LEAST_PACK_ROWS, now // 10)
        if fewer < now:
            setting = name_setting(given.source, "streaming_multipack_buffer_size", str(fewer))
            return f"Pack fewer rows at a time: set {setting} (now {now:,})."
    rows = given.figures.stall_period_rows
    is_own_map = given.source != "axolotl"
    if is_own_map and rows is not None and abs(rows - MAP_ROWS) <= 0.05 * MAP_ROWS:
        return (
            "Work in smaller units: every 1,000 rows is the default batch of datasets' map; give "
            "map(batched=True, batch_size=100)."
        )
    unit = f"every {rows:,.0f} samples" if rows is not None else "at these distances"
    return (
        f"Look at what is done {unit} (a map over a batch of rows, a shuffle buffer, a row group) "
        "and make that unit smaller."
    )


def _join_epochs(given: Evidence) -> str:
    """The wait comes with each epoch."""
    workers = given.number("num_workers")
    longest = given.figures.wait_max_seconds
    cost = "" if longest is None else f", {seconds(longest)} at most"
    if not workers or given.setting("persistent_workers"):
        return (
            f"Look at what is done as an epoch begins{cost}: a shuffle, files that are opened, a "
            "plan of packs; do it ahead, or less often with more rows an epoch."
        )
    if given.source == "axolotl":
        limits = (given.cores, given.number("num_shards"))
        more = min(2 * workers, *(limit for limit in limits if limit))
        sooner = f"set {name_loader(given.source, num_workers=more)}, so that batches come sooner"
        return (
            f"Each epoch begins with new workers{cost}, and Axolotl has no setting that keeps "
            f"them: {sooner if more > workers else 'train on more rows an epoch'}."
        )
    return f"Keep the workers between epochs: {name_loader(given.source, persistent_workers=True)}."


def _at_least(value: float) -> int:
    """The next whole number; a twentieth over one is not worth another worker."""
    return math.ceil(value - 0.05)
