"""Runs inside the environment of the earlier package: reads files, and runs its operations.

Our package has the same import name, so this file must not import it: it is started by path, in
isolated mode, and takes what it needs from the files beside it.
"""

from __future__ import annotations

import runpy
import time
from array import array
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["main"]


def main() -> None:
    here = Path(__file__).parent
    serving = runpy.run_path(str(here / "serve.py"))
    answers = serving["take_stdout"]()
    fingerprint = runpy.run_path(str(here / "fingerprint.py"))["fingerprint"]
    digest_columns = runpy.run_path(str(here / "answers.py"))["digest_columns"]
    import fast_axolotl

    def read(request: dict[str, Any]) -> Any:
        return fast_axolotl.streaming_dataset_reader(
            request["path"], request["format"], batch_size=1000, num_threads=4
        )

    def rows(request: dict[str, Any]) -> dict[str, Any]:
        found = fingerprint(read(request), "python")
        return {"rows": found.rows, "columns": found.columns, "first": found.first}

    def read_through(request: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        deque(read(request), maxlen=0)
        return {"seconds": time.perf_counter() - start}

    def prepare(request: dict[str, Any]) -> Any:
        return _prepare(fast_axolotl, request)

    tasks = {
        "fingerprint": rows,
        "time": read_through,
        **serving["operation_tasks"](prepare, digest_columns),
    }
    serving["serve"](answers, fast_axolotl.__version__, tasks)


def _prepare(package: Any, request: dict[str, Any]) -> Any:
    """What runs an operation, and what makes columns of its answer."""
    operation, path, settings = request["operation"], Path(request["path"]), request["settings"]
    if operation in ("parallel_hash_rows", "deduplicate_indices"):
        lines = path.read_text(encoding="utf-8").splitlines()
        if operation == "parallel_hash_rows":
            return lambda: package.parallel_hash_rows(lines), lambda found: {"hash": found}
        return (
            lambda: package.deduplicate_indices(lines),
            lambda found: dict(zip(("index", "hash"), found, strict=True)),
        )
    sequences = _read_sequences(path)
    if operation == "pack_sequences":
        return lambda: package.pack_sequences(sequences, **settings), dict
    return lambda: package.pad_sequences(sequences, **settings), lambda found: {"rows": found}


def _read_sequences(path: Path) -> list[list[int]]:
    """Tokens of 32 bits, and beside them, in a file of the same name, offsets of 64."""
    tokens, offsets = array("i"), array("q")
    tokens.frombytes(path.read_bytes())
    offsets.frombytes(path.with_suffix(".offsets").read_bytes())
    return [tokens[start:stop].tolist() for start, stop in pairwise(offsets)]


if __name__ == "__main__":
    main()
