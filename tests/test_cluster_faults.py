"""What ``prepare`` does when machines, processes and people fail: the same files, in the end.

Faults come from inside a task, when its first file is written and has no name yet, so that they hit
the stage they are meant for. Nodes are processes of their own on this machine; one process of ours
drives all preparations that are not to end with it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest

from benchmarks.axolotl_inputs import preprocess_config, write_config, write_model
from support.axolotl import AGAINST_AXOLOTL
from support.children import clean_environment
from support.cluster import PROGRAM, TESTS, Driver, Nodes, ray_variables

pytestmark = [
    *AGAINST_AXOLOTL,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

STAGES = ["tokenise", "split", "unique", "deal", "write"]
CHAT = {"type": "chat_template", "field_messages": "messages", "ds_type": "json"}
ALPACA = {"type": "alpaca", "ds_type": "json"}
BUCKET = "prepared"


def text(source: random.Random) -> str:
    return " ".join(source.choices("the quick brown fox reads seven old books".split(), k=20))


def write_inputs(folder: Path) -> list[dict[str, Any]]:
    """Two datasets, a third of whose rows are there twice."""
    source = random.Random(5)
    chats: list[Any] = [
        {"messages": [{"role": role, "content": text(source)} for role in ("user", "assistant")]}
        for _ in range(500)
    ]
    names = ("instruction", "input", "output")
    alpacas: list[Any] = [{name: text(source) for name in names} for _ in range(300)]
    datasets = []
    for name, rows, keys in (("chat", chats, CHAT), ("alpaca", alpacas, ALPACA)):
        again = source.sample(rows + rows[: len(rows) // 2], len(rows) * 3 // 2)
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in again))
        datasets.append({"path": str(path), **keys})
    return datasets


class Made:
    """Configurations, the process that prepares them, and what one gives when nothing fails."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.driver = folder, Driver()
        write_model(folder / "model")
        self.datasets = write_inputs(folder)
        self.config = self.write("usual", self.datasets)
        self.wanted: dict[str, str] = {}

    def write(self, name: str, datasets: list[dict[str, Any]]) -> Path:
        usual = preprocess_config(self.folder / "model", self.folder / "x", self.folder / "y")
        keys = {"datasets": datasets, "num_dataset_shards_to_save": 6}
        return write_config({**usual, **keys}, self.folder / f"{name}.yml")

    def prepare(self, name: str, **more: Any) -> Any:
        """A preparation that succeeds, and leaves nothing but the wanted files."""
        output = self.folder / "out" / name
        answer = self.driver.prepare(self.config, str(output), **more)
        assert "summary" in answer, answer
        assert files_of(output) == self.wanted
        return answer

    def fault(self, stage: str, what: str, **more: Any) -> dict[str, Any]:
        """A fault that happens once."""
        mark = self.folder / f"mark-{len(list(self.folder.glob('mark-*')))}-{stage}"
        return {"stage": stage, "what": what, "mark": str(mark), **more}


def files_of(output: Path) -> dict[str, str]:
    """The digests of all that is in a folder of prepared datasets, hidden files included.

    The state has a fingerprint that follows from the path.
    """
    found = {}
    for path in output.rglob("*"):
        if path.is_file() and path.name != "state.json":
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(output).as_posix()).partition("/")[2] or path.name] = digest
    assert len(list(output.iterdir())) == 1, list(output.iterdir())
    return found


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A server whose address is in the environment before anybody starts."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        environment.setenv("AWS_ACCESS_KEY_ID", "someone")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
        filesystem.call_s3("create_bucket", Bucket=BUCKET)
        yield filesystem
        server.stop()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, s3: Any) -> Iterator[Made]:
    with ray_variables(), pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_OFFLINE", "1")
        environment.setenv("AXOLOTL_DO_NOT_TRACK", "1")
        it = Made(tmp_path_factory.mktemp("faults"))
        answer = it.driver.prepare(it.config, str(it.folder / "out" / "first"))
        assert "summary" in answer, answer
        stages = {stage["name"]: stage["tasks"] for stage in answer["summary"]["stages"]}
        assert list(stages) == STAGES
        assert min(stages.values()) >= 2, stages
        assert answer["summary"]["duplicates"] >= 350
        it.wanted = files_of(it.folder / "out" / "first")
        assert len(it.wanted) == 7
        yield it
        it.driver.process.kill()
        it.driver.process.wait()


# Processes of this machine.


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_worker_loses_nothing(made: Made, stage: str) -> None:
    answer = made.prepare(f"worker-{stage}", fault=made.fault(stage, "worker"))
    assert answer["events"][f"{stage} retried"] == 1
