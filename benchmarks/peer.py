"""A peer in a process of its own: ``python -I peer.py earlier package|Axolotl RACE.py``.

The earlier package has our import name, and ours lends names to Axolotl where both are there: so
this process never imports our package. It is started by path, in isolated mode, and takes digests
and pipes from the file of ours that needs the standard library alone. An input is loaded once; then
``digest`` and ``seconds`` are asked as often as it takes, and ``forget`` frees it.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import sys
from array import array
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

Request = dict[str, Any]


def main(name: str, race: str) -> None:
    """Answers until there are no more requests."""
    shared = runpy.run_path(race) | runpy.run_path(str(Path(__file__).with_name("worker.py")))
    answers = shared["take_stdout"]()
    os.environ.update({"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"})
    if name == "Axolotl":
        prepare, version = _axolotl, metadata.version("axolotl")
    else:
        prepare, version = _earlier, importlib.import_module("fast_axolotl").__version__
    held: list[Any] = []

    def forget(_: Request) -> Request:
        held.clear()
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        return {}

    def load(request: Request) -> Request:
        forget(request)
        run, columns = prepare(request["operation"], request["path"], request["settings"])

        def digest(answer: Any) -> Any:
            if columns is None:
                return shared["digest_items"](answer, "python")
            return shared["digest_columns"](columns(answer), 0)

        held.append(shared["Contender"](run=run, digest=digest, is_stream=columns is None))
        gc.freeze()
        return {}

    tasks = {
        "load": load,
        "digest": lambda _: asdict(held[0].digest(held[0].run())),
        "seconds": lambda _: {"seconds": shared["timed_pass"](held[0])[0]},
        "forget": forget,
    }
    shared["serve"](answers, {"version": version}, tasks)


Prepared = tuple[Callable[[], Any], Callable[[Any], Any] | None]
"""What makes one pass, and what makes columns of its answer; none for a reader's batches."""


def _earlier(operation: str, path: str, settings: dict[str, Any]) -> Prepared:
    package = importlib.import_module("fast_axolotl")
    if operation == "read":
        read = package.streaming_dataset_reader
        return lambda: iter(read(path, settings["format"], batch_size=1000, num_threads=4)), None
    if operation in ("parallel_hash_rows", "deduplicate_indices"):
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        function = getattr(package, operation)
        if operation == "parallel_hash_rows":
            return lambda: function(lines), lambda found: {"hash": found}
        return lambda: function(lines), lambda found: {"index": found[0], "hash": found[1]}
    # Tokens of 32 bits, and beside them, in a file of the same name, offsets of 64.
    tokens, offsets = array("i"), array("q")
    tokens.frombytes(Path(path).read_bytes())
    offsets.frombytes(Path(path).with_suffix(".offsets").read_bytes())
    sequences = [tokens[start:stop].tolist() for start, stop in pairwise(offsets)]
    function = getattr(package, operation)
    columns = dict if operation == "pack_sequences" else lambda found: {"rows": found}
    return lambda: function(sequences, **settings), columns


def _axolotl(operation: str, path: str, settings: dict[str, Any]) -> Prepared:
    if operation == "deduplicate":
        datasets, pa = importlib.import_module("datasets"), importlib.import_module("pyarrow")
        deduplicate = importlib.import_module("axolotl.utils.data.utils")._deduplicate_dataset
        dataset = datasets.Dataset(pa.ipc.open_file(path).read_all())
        return (
            lambda: deduplicate(dataset)[0],
            lambda found: {"index": found._indices.column(0).to_pylist()},
        )
    lengths = importlib.import_module("numpy").load(path)
    pack = importlib.import_module("axolotl.utils.samplers.multipack").pack_parallel
    return lambda: pack(lengths, **settings), lambda packs: {"packs": packs}


if __name__ == "__main__":
    main(*sys.argv[1:])
