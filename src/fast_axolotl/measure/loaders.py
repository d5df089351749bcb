"""Read the settings of a loader and the number of batches it has ready.

Written for torch's ``DataLoader``, its iterators (whose attributes begin with an underscore) and
the wrappers around both that pass attributes on or hold the loader. torch is never imported. What
an object does not tell is left out, and whatever its properties raise is "not told".
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

_ITERABLE = 1
"""``_DatasetKind.Iterable`` of torch: rows come from a stream, and have no numbers."""
_WRAPPED = ("dataloader", "base_dataloader", "loader", "iterable")
"""Where accelerate, Lightning and tqdm hold a loader."""
_MOST_WRAPPERS = 8


def read_loader(loader: Any) -> dict[str, Any]:
    """The settings of a loader, or of its iterator; empty where it is none of torch's kind."""
    workers = _read(loader, "num_workers")
    for _ in range(_MOST_WRAPPERS):
        if loader is None or isinstance(workers, int):
            break
        # Never by its truth: the length of a loader may be worth a whole plan of packs.
        held = (_read(loader, name) for name in _WRAPPED)
        loader = next((inner for inner in held if inner is not None), None)
        workers = _read(loader, "num_workers")
    if not isinstance(workers, int):
        return {}
    size = _read(loader, "batch_size")
    settings = {
        "num_workers": workers,
        "prefetch_factor": _read(loader, "prefetch_factor") if workers else None,
        "batch_size": _read(_read(loader, "index_sampler"), "batch_size") if size is None else size,
        "pin_memory": bool(_read(loader, "pin_memory")),
        "persistent_workers": bool(_read(loader, "persistent_workers")),
        "streaming": _read(loader, "dataset_kind") == _ITERABLE,
    }
    dataset = _read(loader, "dataset") if settings["streaming"] else None
    for _ in range(_MOST_WRAPPERS):
        if isinstance(count := _read(dataset, "num_shards"), int):
            settings["num_shards"] = count
            break
        # What adapters hold: accelerate's, torch's ``Subset``, streams that map.
        inner = _read(dataset, "dataset")
        dataset = _read(dataset, "ex_iterable") if inner is None else inner
    return settings


def ready_batches(iterator: Any) -> int | None:
    """Batches that wait in an iterator's queues; ``None`` where it has no workers, or cannot tell.

    ``_task_info`` holds what was asked for and not yet handed out, ``_tasks_outstanding`` what the
    workers still owe; the difference arrived out of turn. Where less was asked for than the queue
    holds, the sampler is exhausted: the queue empties because the epoch ends, which says nothing
    about the workers. Reads three counters, about 3 µs.
    """
    queue = getattr(iterator, "_data_queue", None)
    if queue is None:
        return None
    try:
        if len(iterator._task_info) < iterator._num_workers * iterator._prefetch_factor:
            return None
        ready = queue.qsize()
        results = iterator._worker_result_queue
        if results is not queue:
            ready += results.qsize()
        return int(ready + max(0, len(iterator._task_info) - iterator._tasks_outstanding))
    except (NotImplementedError, AttributeError, OSError, TypeError, ValueError):
        # macOS cannot count, other releases may name things differently, a closed queue is gone.
        return None


def _read(thing: Any, name: str) -> Any:
    with suppress(Exception):  # a property of anybody's object may raise anything
        return getattr(thing, name, None) if hasattr(thing, name) else getattr(thing, f"_{name}")
    return None
