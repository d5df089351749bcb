"""Runs Axolotl's own functions in a process that has never imported our package.

Ours lends names to Axolotl when both are there; here Axolotl is as it was installed. Its import, of
ten seconds or more, is not timed. Nothing is sent home or downloaded.
"""

from __future__ import annotations

import importlib
import os
import runpy
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["main"]


def main() -> None:
    here = Path(__file__).parent
    serving = runpy.run_path(str(here / "serve.py"))
    answers = serving["take_stdout"]()
    os.environ.update({"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"})
    digest_columns = runpy.run_path(str(here / "answers.py"))["digest_columns"]
    operations = {"deduplicate": _deduplicate, "pack_parallel": _pack_parallel}

    def prepare(request: dict[str, Any]) -> Any:
        return operations[request["operation"]](request["path"], request["settings"])

    tasks = serving["operation_tasks"](prepare, digest_columns)
    serving["serve"](answers, metadata.version("axolotl"), tasks)


def _deduplicate(path: str, _: dict[str, Any]) -> Any:
    import datasets
    import pyarrow as pa

    module = importlib.import_module("axolotl.utils.data.utils")
    dataset = datasets.Dataset(pa.ipc.open_file(path).read_all())

    def kept(result: Any) -> dict[str, Any]:
        chosen, _ = result
        return {"index": chosen._indices.column(0).to_pylist()}

    return lambda: module._deduplicate_dataset(dataset), kept


def _pack_parallel(path: str, settings: dict[str, Any]) -> Any:
    import numpy as np

    module = importlib.import_module("axolotl.utils.samplers.multipack")
    lengths = np.load(path)
    return lambda: module.pack_parallel(lengths, **settings), lambda packs: {"packs": packs}


if __name__ == "__main__":
    main()
