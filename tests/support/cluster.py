"""Ray clusters of several node processes on this machine, and a process that prepares on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from support.children import clean_environment

TESTS = Path(__file__).parents[1]
PROGRAM = (sys.executable, "-m", "support.prepare_driver")


class Machines:
    """A head that does no tasks, and nodes with one core each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._few = {"object_store_memory": 80_000_000}
        head = {"num_cpus": 0, "include_dashboard": False, **self._few}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self.cluster.address
        self.last: Any = None

    def add(self, name: str) -> Any:
        variables = clean_environment(TESTS, FAST_AXOLOTL_NODE=name)
        return self.cluster.add_node(num_cpus=1, env_vars=variables, wait=False, **self._few)

    def kill(self, node: Any) -> None:
        """As a machine that lost its power."""
        for started in chain(*node.all_processes.values()):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(started.process.pid)
                for one in (process, *process.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        one.kill()

    def end(self) -> None:
        for node in self.cluster.worker_nodes:
            self.kill(node)  # with its agents, which outlive its main process
        self.cluster.shutdown()


@contextmanager
def ray_variables() -> Iterator[None]:
    """A folder, short since sockets lie there; the token is in ``conftest.py``."""
    with tempfile.TemporaryDirectory(prefix="fa-", ignore_cleanup_errors=True) as folder:
        ours = {"RAY_TMPDIR": folder, "RAY_health_check_period_ms": "500"}
        with mock.patch.dict(os.environ, ours):
            yield


class Driver:
    """A process that prepares one dataset after the other."""

    def __init__(self) -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process: Any = subprocess.Popen(PROGRAM, env=clean_environment(TESTS), **pipes)

    def prepare(self, config: Path, output: str | None, **more: Any) -> Any:
        order = {"config": str(config), "output": output, **more}
        print(json.dumps(order), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise AssertionError(f"the driver ended with {self.process.wait()}")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
