"""One job in a process of its own: ``python cluster_arm.py TASK.json`` prints what it did as JSON.

Started by path, with our interpreter or that of the peers' environment, so it needs the standard
library alone. The clock runs from the call that begins the work until its output is complete;
imports of this process and the start of a Ray cluster come before. A cluster's processes are
children of this one, so whoever watches its tree sees all of them.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

Task = dict[str, Any]
Work = Callable[[], Any]
_OBJECT_STORE_BYTES = 100_000_000
"""Of a node that works for us: no rows lie there. Ray Data has Ray's default."""


def main(path: str) -> None:
    """Does the task and prints seconds, the package's version, and what the work returned."""
    task = json.loads(Path(path).read_text())
    with ExitStack() as stack:
        work, package = ARMS[task["arm"]](task, stack)
        start = time.perf_counter()
        summary = work()
        seconds = time.perf_counter() - start
    version = metadata.version(package) if package else None
    print(json.dumps({"seconds": seconds, "version": version, "summary": summary}))


def _ours(task: Task, stack: ExitStack) -> tuple[Work, str | None]:
    """``dedupe_on`` or ``prepare``, in local processes or on a cluster made for it."""
    module, _, name = task["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    given = dict(task["arguments"], heard=lambda *_: None)
    if cpus := task.get("nodes"):
        cluster_utils = importlib.import_module("ray.cluster_utils")
        node = {"object_store_memory": _OBJECT_STORE_BYTES}
        head = {"num_cpus": cpus[0], "include_dashboard": False, **node}
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        stack.callback(cluster.shutdown)
        for count in cpus[1:]:
            cluster.add_node(num_cpus=count, wait=False, **node)
        cluster.wait_for_nodes()
        given |= {"engine": "ray", "address": cluster.address}
    return lambda: function(**given).to_json(), None


def _datatrove(task: Task, _: ExitStack) -> tuple[Work, str]:
    """Signatures, duplicates, filter: three pipelines, one after the other, as documented."""
    local = importlib.import_module("datatrove.executor").LocalPipelineExecutor
    dedup: Any = importlib.import_module("datatrove.pipeline.dedup.exact_dedup")
    read = importlib.import_module("datatrove.pipeline.readers").JsonlReader
    write = importlib.import_module("datatrove.pipeline.writers").ParquetWriter
    work, files, workers = task["work"], len(task["inputs"]), task["workers"]
    config = dedup.ExactDedupConfig(content_getter=lambda document: str(document.text))
    signatures, duplicates = f"{work}/signatures", f"{work}/duplicates"
    rows = read(str(Path(task["inputs"][0]).parent))
    kept = write(task["output"], compression="zstd", expand_metadata=True)
    steps = (
        (files, [rows, dedup.ExactDedupSignature(signatures, config, finder_workers=workers)]),
        (workers, [dedup.ExactFindDedups(signatures, duplicates, config, lines_to_buffer=10_000)]),
        (files, [rows, dedup.ExactDedupFilter(duplicates, config), kept]),
    )

    def run() -> None:
        for number, (tasks, pipeline) in enumerate(steps):
            local(pipeline, tasks=tasks, workers=workers, logging_dir=f"{work}/log{number}").run()

    return run, "datatrove"


def _keep_first(rows: Any) -> Any:
    """Of the rows of a partition that have the same text, the one with the least ``id``."""
    firsts = rows.select(["text", "id"]).group_by("text").aggregate([("id", "min")])
    pc = importlib.import_module("pyarrow.compute")
    return rows.filter(pc.is_in(rows["id"], value_set=firsts["id_min"]))


def _ray_data(task: Task, stack: ExitStack) -> tuple[Work, str]:
    """Rows with the same text brought together by a shuffle, the least ``id`` of them kept."""
    ray = importlib.import_module("ray")
    importlib.import_module("ray.data")
    ray.init(num_cpus=task["workers"], include_dashboard=False, log_to_driver=False)
    stack.callback(ray.shutdown)

    def run() -> None:
        rows = ray.data.read_json(task["inputs"])
        parts = rows.repartition(task["partitions"], keys=["text"])
        kept = parts.map_batches(_keep_first, batch_size=None, batch_format="pyarrow")
        kept.write_parquet(task["output"], compression="zstd")

    return run, "ray"


ARMS: dict[str, Callable[[Task, ExitStack], tuple[Work, str | None]]] = {
    "ours": _ours,
    "datatrove": _datatrove,
    "Ray Data": _ray_data,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
