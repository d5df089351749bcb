"""Runs inside the environment of the earlier package and reads on request: JSON lines in and out.

Our package has the same import name, so this file must not import it: it is started by path, in
isolated mode, and is told where ``fingerprint.py`` is.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import time
from collections import deque
from typing import Any

__all__ = ["main"]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    fingerprint = runpy.run_path(sys.argv[1])["fingerprint"]
    import fast_axolotl

    gc.freeze()

    def read(path: str, kind: str) -> Any:
        return fast_axolotl.streaming_dataset_reader(path, kind, batch_size=1000, num_threads=4)

    def answer(request: dict[str, str]) -> dict[str, Any]:
        gc.collect()
        if request["task"] == "fingerprint":
            found = fingerprint(read(request["path"], request["format"]), "python")
            return {"rows": found.rows, "columns": found.columns, "first": found.first}
        start = time.perf_counter()
        deque(read(request["path"], request["format"]), maxlen=0)
        return {"seconds": time.perf_counter() - start}

    print(json.dumps({"version": fast_axolotl.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except BaseException as error:  # noqa: BLE001 - its panics are BaseExceptions; all are told
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
