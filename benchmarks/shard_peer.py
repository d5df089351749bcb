"""A reader in a process of its own that reads one shard after another: ``sharding`` asks it.

Ours is started as a module of this tree. A peer is started by path, in isolated mode, with the
interpreter of its own environment; so this file needs the standard library alone, and takes the
pipes from the file of ours that does as well.

Bytes are counted by the kernel: ``rchar`` of ``/proc/self/io``, what every thread of this process
read by system calls between the call that opens the shard and its last row. Files that a reader
maps into memory are read by page faults, which are not in there: for those, the resident pages of
the mapping are added. The kernel maps them in groups of up to 2 MiB, so this is an upper bound.
"""

from __future__ import annotations

import gc
import importlib
import json
import mmap
import os
import re
import runpy
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from itertools import count, islice
from pathlib import Path
from typing import Any

BATCH_ROWS = 64
_CHUNK_BYTES = 1 << 26
"""Of a file of Mosaic's and LitData's formats: 64 MiB, the default or recommendation of both."""
_BATCHES_BETWEEN_LOOKS = 16
"""At the mapped files, in a pass that is checked."""
_MAPPING = re.compile(r"^[0-9a-f]+-.* (/.*)\n(?:Size|.*PageSize):(?s:.*?)\nRss: +(\d+) kB", re.M)

_NUMBERS = count()

Request = dict[str, Any]


def main(name: str) -> None:
    """Answers until there are no more requests."""
    shared = runpy.run_path(str(Path(__file__).with_name("worker.py")))
    answers = shared["take_stdout"]()
    package, module, open_shard, write = READERS[name]
    importlib.import_module(module)
    version = metadata.version(package) if package else None
    tasks = {"write": write, "read": lambda request: _read(request, open_shard)}
    shared["serve"](answers, {"version": version}, tasks)


def _read(request: Request, open_shard: Callable[[Request], Iterator[Any]]) -> Request:
    """One shard from its opening to its last row. A batch has a length, and is Arrow or dicts."""
    is_mapped = request["is_checked"] and open_shard is _litdata
    for item in gc.get_objects() if is_mapped else ():
        # What an earlier shard left mapped counts from nothing again.
        if type(item) is mmap.mmap and not item.closed:
            item.madvise(mmap.MADV_DONTNEED)
    mapped: dict[str, int] = {}
    batches = rows = looked = 0
    first, checksums = None, []
    before, start = _system_read_bytes(), time.perf_counter()
    for batch in open_shard(request):
        first = time.perf_counter() - start if first is None else first
        batches, rows = batches + 1, rows + len(batch)
        if request["is_checked"]:
            held = batch if isinstance(batch, list) else batch.to_pylist()
            checksums += [(row["id"], zlib.crc32(row["text"].encode())) for row in held]
        elif time.perf_counter() - start > request["most_seconds"]:
            break
        if is_mapped and batches % _BATCHES_BETWEEN_LOOKS == 1:
            looked += _look_at_mappings(request["path"], mapped)
    seconds = time.perf_counter() - start
    looked += _look_at_mappings(request["path"], mapped) if is_mapped else 0
    return {
        "seconds": seconds,
        "first_seconds": first,
        "rows": rows,
        "batches": batches,
        "read_bytes": _system_read_bytes() - before - looked + sum(mapped.values()),
        "checksums": checksums,
    }


def _system_read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _look_at_mappings(folder: str, mapped: dict[str, int]) -> int:
    """Notes the most that was resident of each mapped file of the folder; gives what that read."""
    text = Path("/proc/self/smaps").read_text()
    for path, kilobytes in _MAPPING.findall(text):
        if path.startswith(folder):
            mapped[path] = max(mapped.get(path, 0), 1024 * int(kilobytes))
    return len(text.encode())


# Ways to open a shard. A request has a path, a shard (index, count), a seed or none, and settings.


def _ours(request: Request) -> Iterator[Any]:
    reading = importlib.import_module("fast_axolotl.reading")
    settings = dict(request["settings"])
    is_dicts = settings.pop("is_dicts", False)
    shard, seed = tuple(request["shard"]), request["seed"]
    reader = reading.open_dataset(
        request["path"], batch_size=BATCH_ROWS, shard=shard, shuffle=seed, **settings
    )
    return (batch.to_pylist() for batch in reader) if is_dicts else iter(reader)


def _hf(request: Request) -> Iterator[Any]:
    datasets: Any = importlib.import_module("datasets")
    # It sleeps 5 s after the last row of shuffled Parquet, so that pyarrow's threads can end.
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
    split = importlib.import_module("datasets.distributed").split_dataset_by_node
    is_parquet = request["path"].endswith(".parquet")
    dataset = datasets.load_dataset(
        "parquet" if is_parquet else "json",
        data_files=request["path"],
        split="train",
        streaming=True,
    )
    # Row groups instead of files are what is dealt; datasets 4 has no such function.
    if is_parquet and hasattr(dataset, "reshard"):
        dataset = dataset.reshard()
    if request["seed"] is not None:
        dataset = dataset.shuffle(seed=request["seed"])
    dataset = split(dataset, *request["shard"])
    return iter(dataset.with_format("arrow").iter(batch_size=BATCH_ROWS))


def _mosaic(request: Request) -> Iterator[Any]:
    """A rank of as many nodes with one rank each, which need not be there."""
    module: Any = importlib.import_module("streaming.base.dataset")
    module.maybe_init_dist = lambda: False
    # Names of shared memory: without this, two processes at a time would take the same one, and
    # every dataset would look through all those before it.
    prefix: Any = importlib.import_module("streaming.base.shared.prefix")
    first = 10_000 * os.getpid() + next(_NUMBERS)
    prefix._each_prefix_int = lambda: count(first)
    _set_rank(request, LOCAL_WORLD_SIZE=1, LOCAL_RANK=0)
    seed = request["seed"]
    dataset = module.StreamingDataset(
        local=request["path"],
        batch_size=BATCH_ROWS,
        shuffle=seed is not None,
        shuffle_seed=seed or 0,
    )
    return _in_batches(dataset)


def _litdata(request: Request) -> Iterator[Any]:
    litdata = importlib.import_module("litdata")
    _set_rank(request)
    dataset = litdata.StreamingDataset(
        request["path"],
        shuffle=request["seed"] is not None,
        seed=request["seed"] or 0,
        **request["settings"],
    )
    return _in_batches(dataset)


def _set_rank(request: Request, **others: int) -> None:
    index, shards = request["shard"]
    values = {"RANK": index, "GLOBAL_RANK": index, "WORLD_SIZE": shards, **others}
    os.environ.update({name: str(value) for name, value in values.items()})


def _in_batches(dataset: Iterable[Any]) -> Iterator[list[Any]]:
    # LitData's dataset is an iterator that begins again at every call of ``iter``: only one here.
    rows = (row for row in dataset)
    while batch := list(islice(rows, BATCH_ROWS)):
        yield batch


# Ways to bring JSON lines into a peer's own format.


def _write_mds(request: Request) -> Request:
    writer = importlib.import_module("streaming").MDSWriter
    columns = {"id": "int", "text": "str"}
    with writer(out=request["path"], columns=columns, size_limit=_CHUNK_BYTES) as file:
        for row in _rows_of(request["rows"]):
            file.write(row)
    return {}


def _write_chunks(request: Request) -> Request:
    cache = importlib.import_module("litdata.streaming.cache").Cache
    _set_rank({"shard": (0, 1)})
    writer = cache(request["path"], chunk_bytes=_CHUNK_BYTES)
    for index, row in enumerate(_rows_of(request["rows"])):
        writer[index] = row
    writer.done()
    writer.merge(1)
    return {}


def _rows_of(path: str) -> Iterator[Any]:
    with Path(path).open(encoding="utf-8") as file:
        yield from map(json.loads, file)


Reader = tuple[str | None, str, Callable[[Request], Iterator[Any]], Callable[[Request], Request]]
READERS: dict[str, Reader] = {
    "fast-axolotl": (None, "fast_axolotl.reading", _ours, dict),
    "HF": ("datasets", "datasets", _hf, dict),
    "Mosaic": ("mosaicml-streaming", "streaming", _mosaic, _write_mds),
    "LitData": ("litdata", "litdata", _litdata, _write_chunks),
}
"""Distribution, module, how a shard is opened, how its format is written."""

if __name__ == "__main__":
    main(*sys.argv[1:])
