"""What ``prepare`` does when machines, processes and people fail: the same files, in the end.

Faults come from inside a task, when its first file is written and has no name yet, so that they hit
the stage they are meant for. Nodes are processes of their own on this machine; one process of ours
drives all preparations that are not to end with it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import pickle
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pyarrow as pa
import pytest

from benchmarks.axolotl_inputs import preprocess_config, write_config, write_model
from fast_axolotl.cluster.prepare import _publish, _Split
from fast_axolotl.cluster.stock import open_pipeline
from fast_axolotl.cluster.store import Store
from fast_axolotl.errors import DataError
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
BAD = 600
"""The line of the second file that is wrong where one is."""


def text(source: random.Random) -> str:
    return " ".join(source.choices(["the", "quick", "fox", "reads", "seven", "old", "books"], k=20))


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
    for name, rows, keys in (("alpaca", alpacas, ALPACA), ("chat", chats, CHAT)):
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

    def prepare(self, name: str, config: Path | None = None, **more: Any) -> Any:
        """A preparation that succeeds, and leaves nothing but the wanted files."""
        output = self.folder / "out" / name
        answer = self.driver.prepare(config or self.config, str(output), **more)
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
    with ray_variables():
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
        it.driver.end()


# Processes of this machine.


def test_a_worker_killed_in_each_stage_loses_nothing(made: Made) -> None:
    answer = made.prepare("worker", faults=[made.fault(stage, "worker") for stage in STAGES])
    for stage in STAGES:
        assert answer["events"][f"{stage} retried"] == 1


def command(made: Made, output: Path, fault: dict[str, Any], *more: str) -> Any:
    """``fast-axolotl prepare`` in a group of processes of its own, as a shell starts it."""
    words = ["prepare", str(made.config), "--memory", "320000", "--workers", "2"]
    words += ["--output", str(output), *more]
    return subprocess.Popen(
        [*PROGRAM, *words],
        env=clean_environment(TESTS, FAULTS=json.dumps([fault])),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(("stage", "name"), [("tokenise", "SIGINT"), ("write", "SIGKILL")])
def test_a_command_continues_where_it_was_ended(made: Made, stage: str, name: str) -> None:
    output = made.folder / "out" / f"command-{name}"
    first, family = command(made, output, made.fault(stage, name)), set[psutil.Process]()
    while first.poll() is None:
        with suppress(psutil.NoSuchProcess):
            family.update(psutil.Process(first.pid).children(recursive=True))
        time.sleep(0.1)
    told = first.communicate()[1]
    _, alive = psutil.wait_procs(family, timeout=10)
    assert family
    assert not alive
    if name == "SIGINT":
        assert first.returncode == 130, told
        assert "the same command continues" in told
        assert "Traceback" not in told
    [work] = output.glob(".*.work")
    done = {stage: len(list((work / stage).glob("*.json"))) for stage in STAGES}
    assert done[stage] >= 1
    answer = made.prepare(output.name)
    for each, count in done.items():
        assert answer["events"].get(f"{each} done earlier", 0) == count


def test_a_dataset_is_published_once(tmp_path: Path) -> None:
    """Whoever was ended between the renaming and the removal of the job's folder."""
    store, output = Store(str(tmp_path / "work")), tmp_path / "out" / "hash"
    split = _Split(name="train", configs=[], store=store, output=str(output), sources=[])
    split.final = pa.schema({"input_ids": pa.list_(pa.int32())})
    name = "data-00000-of-00001.arrow"
    store.write_json(f"write/{name}.json", {})
    split.parts.write_json(name, [])
    split.parts.write_json(".unfinished", [])
    for _ in range(2):
        _publish(split, [name])
        found = {path.name for path in (tmp_path / "out").rglob("*")}
        assert found == {"hash", name, "dataset_info.json", "state.json"}
    shutil.rmtree(output)
    with pytest.raises(
        DataError, match=r"files of the prepared dataset are missing in .*; pass --restart"
    ):
        _publish(split, [name])


def test_a_folder_that_was_half_removed_is_not_taken_up(made: Made) -> None:
    [name] = (path.name for path in (made.folder / "out" / "first").iterdir())
    Store(str(made.folder / "out" / "half" / f".{name}.work")).write_json("types.json", {})
    made.prepare("half")


def write_bad(made: Made, line: Any, number: int = BAD) -> tuple[Path, str]:
    """The usual configuration with one bad line in another file; that file, and what was good."""
    good = Path(made.datasets[1]["path"]).read_text()
    lines = good.splitlines(keepends=True)
    lines[number - 1] = f"{line if isinstance(line, str) else json.dumps(line)}\n"
    path = made.folder / "bad.jsonl"
    path.write_text("".join(lines))
    made.write("bad", [made.datasets[0], {**made.datasets[1], "path": str(path)}])
    return path, good


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ({"messages": None}, f", line {BAD}: Axolotl fails on this row"),
        ("{no JSON", r" \(bytes [\d,]+ to [\d,]+\) cannot be read"),
        ({"messages": 7}, r" \(bytes .* has rows with other column types than the first rows"),
    ],
)
def test_a_bad_row_is_named_and_what_was_done_is_kept(made: Made, line: Any, told: str) -> None:
    path, good = write_bad(made, line)
    config, name = made.folder / "bad.yml", f"bad-{len(told)}"
    answer = made.driver.prepare(config, str(made.folder / "out" / name))
    assert re.search(f"^DataError: {path}{told}", answer["error"])
    path.write_text(good)
    answer = made.prepare(name, config=config)
    assert answer["events"]["tokenise done earlier"] >= 1


def test_rows_come_from_and_go_to_an_object_store(made: Made, s3: Any) -> None:
    datasets = []
    for dataset in made.datasets:
        url = f"s3://{BUCKET}/{Path(dataset['path']).name}"
        s3.put_file(dataset["path"], url)
        datasets.append({**dataset, "path": url})
    config = made.write("s3", datasets)
    faults = [made.fault("deal", "worker")]
    answer = made.driver.prepare(config, f"s3://{BUCKET}/out", faults=faults)
    assert "summary" in answer, answer
    output = made.folder / "downloaded"
    s3.invalidate_cache()
    s3.get(f"s3://{BUCKET}/out", str(output), recursive=True)
    assert files_of(output) == made.wanted


# Nodes of a Ray cluster.


def test_a_node_dies_and_another_does_its_tasks(made: Made) -> None:
    nodes = Nodes()
    try:
        nodes.add("n0", wait=False)
        nodes.add("n1", wait=False)
        nodes.cluster.wait_for_nodes()
        where = {"engine": "ray", "address": nodes.address}
        answer = made.prepare("nodes", faults=[made.fault("deal", "node")], **where)
        assert answer["events"]["deal retried"] >= 1
        path, _ = write_bad(made, {"messages": None})
        answer = made.driver.prepare(
            made.folder / "bad.yml", str(made.folder / "bad-on-ray"), **where
        )
        assert re.search(rf"{path}, line {BAD}: .*\(on node n\d\)$", answer["error"], re.DOTALL)
    finally:
        nodes.end()


def test_a_pipeline_that_something_else_wrote_is_not_unpickled(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return (tmp_path / "harm").mkdir, ()

    data = pickle.dumps(Harmful())
    (tmp_path / "pipeline.pickle").write_bytes(data)
    with pytest.raises(DataError, match="was changed by something else"):
        open_pipeline(str(tmp_path), hashlib.sha256(b"ours").hexdigest())
    assert not (tmp_path / "harm").exists()
