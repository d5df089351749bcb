"""Does ``prepare`` give the same files whatever fails? ``PYTHONPATH=src:tests``.

Nodes of a Ray cluster are processes on this machine. They, their workers, the head and the command
are killed in every stage, from inside a task that has written half of its files; then the folder is
compared, byte for byte, with that of local processes which nobody killed. What is short enough of
this is in ``tests/test_cluster_faults.py``, whose inputs and helpers these are.
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.result import Result, record_table
from fast_axolotl.record.units import format_seconds

_PARTS = ("nodes", "commands", "heads")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("cluster-faults", __doc__)
    parser.add_argument("--parts", type=names, default=(), help=", ".join(_PARTS))
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """One fault after the other, on clusters that get new nodes for the killed ones."""
    cluster: Any = import_module("support.cluster")
    os.environ |= {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with cluster.ray_variables():
        faults = _Faults(folder, tell)
        try:
            for part in check_names("part", options.parts, _PARTS):
                getattr(faults, f"kill_{part}")()
        finally:
            faults.close()
    columns: dict[str, Callable[[Any], str]] = {
        "fault": lambda record: record["fault"],
        "where": lambda record: record["where"],
        "result": lambda record: record["result"],
        "tried again": lambda record: str(record["retried"]),
        "done before": lambda record: f"{record['done_before']} of {record['tasks']}",
        "time": lambda record: format_seconds(record["seconds"]),
    }
    notes = ["time: with the import of Axolotl by every process that is new"]
    table = record_table("prepare under faults", faults.records, columns, notes)
    return Result(facts={"faults": faults.records}, tables=[table])


class _Faults:
    def __init__(self, folder: Path, tell: Tell) -> None:
        self._tests: Any = import_module("test_cluster_faults")
        self._cluster: Any = import_module("support.cluster")
        self._tell, self._added = tell, 0
        self.records: list[dict[str, Any]] = []
        self._made = self._tests.Made(folder)
        self._nodes = self._cluster.Nodes()
        self._where: dict[str, Any] = {"engine": "ray", "address": self._nodes.address}
        self._add(1)
        self._prepare("none", "2 local processes")
        self._made.wanted = self._tests.files_of(self._output)

    def close(self) -> None:
        self._made.driver.end()
        self._nodes.end()

    def kill_nodes(self) -> None:
        """Other numbers of nodes, then all of these killed one by one."""
        for count in (1, 2, 4):
            self._add(count - self._added)
            self._prepare("none", f"{count} nodes", **self._where)
        for stage in self._tests.STAGES:
            for what in ("node", "worker"):
                fault = self._made.fault(stage, what)
                self._prepare(
                    f"{what} in {stage}", "3 nodes or more", faults=[fault], **self._where
                )
            self._add(1)

    def kill_commands(self) -> None:
        """The command itself, on the cluster; its workers must not outlive it."""
        for stage, name in (("tokenise", "SIGKILL"), ("write", "SIGINT")):
            self._begin()
            more = ["--engine", "ray", "--address", self._nodes.address]
            fault = self._made.fault(stage, name)
            process = self._tests.command(self._made, self._output, fault, *more)
            told = process.communicate()[1]
            if name == "SIGINT" and (process.returncode != 130 or "continues" not in told):
                raise AssertionError(told)
            self._prepare(f"command {name} in {stage}", "cluster", is_begun=True, **self._where)

    def kill_heads(self) -> None:
        """The head, replaced by another one after the error, or while the command runs."""
        for is_late in (True, False):
            old, port = self._nodes, int(self._nodes.address.rpartition(":")[2])
            pids = [process.pid for process in old.processes(old.cluster.head_node)]
            fault = self._made.fault("tokenise", "SIGKILL", pids=pids)
            self._begin()
            more = {**self._where, "faults": [fault], "head_seconds": 2 if is_late else 30}
            call = partial(self._made.driver.prepare, self._made.config, str(self._output), **more)
            with ThreadPoolExecutor(1) as pool:
                running = pool.submit(call)
                while not (running.done() if is_late else Path(fault["mark"]).exists()):
                    time.sleep(0.1)
                self._nodes = self._cluster.Nodes(port)
                self._add(2)
                try:
                    self._tell(running.result()["error"])
                except AssertionError as ended:  # Ray ends a process that meets another head
                    self._tell(str(ended))
                    self._made.driver.end()
                    self._made.driver = self._cluster.Driver()
            old.end()
            self._where["address"] = self._nodes.address
            when = "after the error" if is_late else "at once"
            self._prepare(
                "head in tokenise", f"new head {when}", is_begun=True, leave=True, **self._where
            )

    def _add(self, count: int) -> None:
        for _ in range(count):
            self._added += 1
            self._nodes.add(f"n{self._added}")

    def _begin(self) -> None:
        self._output: Path = self._made.folder / "out" / str(len(self.records))

    def _prepare(self, fault: str, where: str, *, is_begun: bool = False, **more: Any) -> None:
        if not is_begun:
            self._begin()
        answer = self._made.driver.prepare(self._made.config, str(self._output), **more)
        result = answer.get("error", "identical")
        if "summary" in answer and self._made.wanted:
            files = self._tests.files_of(self._output)
            result = "identical" if files == self._made.wanted else "OTHER FILES"
        stages = answer.get("summary", {}).get("stages", [])
        totals = {
            key: sum(stage[key] for stage in stages) for key in ("retried", "done_before", "tasks")
        }
        record = {"fault": fault, "where": where, "result": result, "seconds": answer["seconds"]}
        self.records.append({**record, **totals})
        self._tell(str(self.records[-1]))


if __name__ == "__main__":
    main()
