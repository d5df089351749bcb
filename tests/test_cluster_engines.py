"""Engines with real processes that are killed, and with real Ray clusters on this machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fast_axolotl.cluster import engines
from fast_axolotl.cluster.engines import Answer, Engine, Local, Task, run_tasks
from fast_axolotl.cluster.job import Job, Stage
from fast_axolotl.cluster.store import Store
from fast_axolotl.cluster.tables import dedupe_on
from fast_axolotl.errors import DataError, MissingFileError, UsageError
from support.children import clean_environment
from support.cluster import TESTS, Machines, ray_variables
from support.cluster_tasks import square, squares, task

Open = Callable[..., Engine]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens engines, local ones unless an address is passed."""
    with ExitStack() as stack:

        def open_engine(**options: Any) -> Engine:
            kind: Any = engines.Nodes if "address" in options else Local
            return stack.enter_context(closing(kind(**options)))

        yield open_engine


def perform_all(
    engine: Engine, url: Path, tasks: list[Task], retried: Callable[[str], None] = print
) -> dict[str, Answer]:
    """All answers by their tasks' names; an answer that came twice is an error."""
    answers: dict[str, Answer] = {}
    for done, answer in run_tasks(engine, str(url), tasks, retried):
        assert done.name not in answers
        answers[done.name] = answer
    return answers


def assert_squares(answers: dict[str, Answer], count: int) -> None:
    assert {name: answer["square"] for name, answer in answers.items()} == {
        f"{number:02d}": number**2 for number in range(count)
    }


def wait_for(is_so: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("workers", [1, 3])
def test_local_processes_do_all_tasks(opened: Open, tmp_path: Path, workers: int) -> None:
    engine = opened(workers=workers)
    answers = perform_all(engine, tmp_path, squares(20, 0.02))
    assert_squares(answers, 20)
    pids = {answer["pid"] for answer in answers.values()}
    assert len(pids) == engine.num_slots == workers
    assert {a["pid"] for a in perform_all(engine, tmp_path, squares(9)).values()} <= pids
    for pid in pids:  # who dies between stages is replaced
        os.kill(pid, signal.SIGKILL)
    assert_squares(perform_all(engine, tmp_path, squares(2)), 2)


def test_a_stage_continues_where_it_was_and_tells_how_far_it_is(
    opened: Open, tmp_path: Path
) -> None:
    heard: list[tuple[int, int, str]] = []

    def hear(stage: Stage, what: str) -> None:
        heard.append((stage.done, stage.tasks, what))

    store = Store(str(tmp_path))
    for count, before in ((3, 0), (5, 3)):
        heard.clear()
        tasks = {task.name: task.arguments for task in squares(count)}
        with closing(Job(hear, workers=2)) as job:
            assert_squares(job.run(store, square, tasks), count)
        [stage] = job._stages.values()
        assert (stage.tasks, stage.done, stage.done_before) == (count, count, before)
        assert heard[0] == (0, count, "starting")
        assert heard[1:] == [(n, count, "done" * (n == count)) for n in range(1, count + 1)]


def test_a_worker_has_the_environment_of_now(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    perform_all(opened(workers=1), tmp_path, squares(1))
    monkeypatch.setenv("SOME_VARIABLE", "new")
    look = task("environment", name="SOME_VARIABLE")
    answers = perform_all(opened(workers=1), tmp_path, [look])
    assert answers["environment"]["value"] == "new"


def test_a_task_whose_process_is_killed_is_tried_again(opened: Open, tmp_path: Path) -> None:
    reasons: list[str] = []
    tasks = [*squares(6, 0.1), task("die", times=1)]
    answers = perform_all(opened(workers=2), tmp_path, tasks, reasons.append)
    assert answers.pop("die")["attempts"] == 1
    assert_squares(answers, 6)
    assert reasons == ["its process ended with SIGKILL"]


def test_a_task_that_always_kills_its_process_is_an_error(opened: Open, tmp_path: Path) -> None:
    engine = opened(workers=2)
    tasks = [*squares(3), task("die", times=9, signal_number=signal.SIGSEGV)]
    with pytest.raises(DataError, match=r"toy/die failed 4 times.*--memory.*SIGSEGV"):
        perform_all(engine, tmp_path, tasks)
    assert len(Store(str(tmp_path)).sizes("attempts")) == 4
    assert_squares(perform_all(engine, tmp_path, squares(3)), 3)


def test_errors_keep_their_type_and_message_or_show_the_traceback(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_MOMENT_SECONDS", 0.0)
    engine = opened(workers=2)
    with pytest.raises(MissingFileError) as caught:
        perform_all(engine, tmp_path, [task("complain"), *squares(3)])
    assert str(caught.value) == "rows.jsonl, line 7: there is no such file"
    assert caught.value.path == "rows.jsonl"
    kind, told = engines._attempt(str(tmp_path), task("divide"))
    assert (kind, told.partition(":")[0]) == ("lost", "ZeroDivisionError")
    assert "cluster_tasks.py" in told


def test_a_run_that_is_given_up_ends_its_workers(opened: Open, tmp_path: Path) -> None:
    engine = opened(workers=2)
    tasks = [*squares(1), task("hold", name="a")]
    for _ in run_tasks(engine, str(tmp_path), tasks, print):
        wait_for((tmp_path / "a.pid").exists)
        break
    wait_for(lambda: not psutil.pid_exists(int((tmp_path / "a.pid").read_text())))
    assert_squares(perform_all(engine, tmp_path, squares(3)), 3)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_when_the_parent_ends(tmp_path: Path, signal_number: int) -> None:
    code = f"from support.cluster_tasks import main; main({str(tmp_path)!r})"
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        env=clean_environment(TESTS),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: all((tmp_path / f"{name}.pid").exists() for name in "ab"))
    family = psutil.Process(parent.pid).children(recursive=True)
    assert len(family) >= 3
    if signal_number == signal.SIGINT:
        os.killpg(parent.pid, signal_number)  # as a terminal does
    else:
        parent.send_signal(signal_number)
    _, told = parent.communicate(timeout=20)
    assert parent.returncode == -signal_number
    assert told.count("Traceback") == (signal_number == signal.SIGINT), told
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert not list((tmp_path / "held").iterdir())


def test_an_engine_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="local or ray"):
        Job(print, engine="dask")

    def start(_: Any) -> None:
        raise EOFError

    monkeypatch.setattr(ForkServerProcess, "start", start)
    with pytest.raises(DataError, match="the fork server was killed; is the memory full"):
        Local(1).start("", squares(1)[0])


# Nodes of a Ray cluster, each with its own processes on this machine.

NO_RAY = importlib.util.find_spec("ray") is None
needs_ray = pytest.mark.skipif(NO_RAY, reason="Ray is not installed")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Machines]:
    with ray_variables():
        made = Machines()
        try:
            yield made
        finally:
            made.end()


@needs_ray
def test_nodes_do_all_tasks_and_others_do_those_of_a_lost_one(
    opened: Open, nodes: Machines, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = opened(address=nodes.address, memory=1 << 20)  # there are no nodes yet
    assert engine.num_slots == 2
    assert "no node at" in capfd.readouterr().err
    nodes.add("n1")
    nodes.last = nodes.add("n2")
    assert_squares(perform_all(engine, tmp_path / "early", squares(4)), 4)
    nodes.cluster.wait_for_nodes()
    opened(address=nodes.address, memory=1 << 50)
    assert "bytes of memory yet; the job waits for one: lower --memory?" in capfd.readouterr().err
    engine = opened(address=nodes.address, memory=1 << 20)
    assert engine.num_slots == 4
    assert opened(address=nodes.address, workers=3).num_slots == 3
    answers = perform_all(engine, tmp_path, squares(16, 0.1))
    assert_squares(answers, 16)
    assert {answer["ran"]["node"] for answer in answers.values()} == {"n1", "n2"}
    with pytest.raises(MissingFileError, match=r"rows.jsonl, line 7: .*\(on node n[12]\)$"):
        perform_all(engine, tmp_path, [task("complain")])
    reasons: list[str] = []

    def kill_while_it_works() -> None:
        wait_for((tmp_path / "n2.pid").exists)
        nodes.kill(nodes.last)

    with ThreadPoolExecutor() as threads:
        killed = threads.submit(kill_while_it_works)
        tasks = squares(20, 0.2, stuck_on="n2")
        assert_squares(perform_all(engine, tmp_path, tasks, reasons.append), 20)
        killed.result()
    assert 1 <= len(reasons) <= 2
    pq.write_table(pa.table({"x": [1, 2, 1, 3]}), tmp_path / "a.parquet")
    where: Any = {"engine": "ray", "address": nodes.address, "memory": 1 << 28}
    dedupe_on(tmp_path / "a.parquet", str(tmp_path / "out"), **where)
    assert pq.read_table(tmp_path / "out")["x"].to_pylist() == [1, 2, 3]


@needs_ray
def test_a_job_whose_head_is_gone_ends_soon_and_says_so(nodes: Machines, tmp_path: Path) -> None:
    code = (
        "import sys; from fast_axolotl.cluster.engines import Nodes, run_tasks\n"
        "from support.cluster_tasks import squares\n"
        "for _ in run_tasks(Nodes(sys.argv[1]), sys.argv[2], squares(500, 0.2), print):\n"
        "    print('done', flush=True)"
    )
    driver: Any = subprocess.Popen(
        [sys.executable, "-c", code, nodes.address, str(tmp_path)],
        env=clean_environment(TESTS),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout.readline() == "done\n"
    begin = time.monotonic()
    nodes.kill(nodes.cluster.head_node)
    _, told = driver.communicate(timeout=60)
    assert time.monotonic() - begin < 30
    assert "Failed to connect to GCS within 15 seconds" in told
    assert driver.returncode == 1


def test_a_node_with_other_versions_ends_the_job(tmp_path: Path) -> None:
    versions = engines.versions()
    kind, _ = engines._attempt(str(tmp_path), squares(1)[0], versions)
    assert kind == "done"
    code = {"fast-axolotl": versions["fast-axolotl"].replace("code ", "code 0")}
    for changed in ({"numpy": "0.0.1"}, {"axolotl-extra": "1"}, code):
        kind, error = engines._attempt(str(tmp_path), squares(1)[0], {**versions, **changed})
        assert (kind, type(error)) == ("meant", UsageError)
        [name] = changed
        assert f"nodes differ: {name} " in str(error)


@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:9", "nowhere", "ray://127.0.0.1:9"])
def test_an_address_without_a_cluster_is_an_error_soon(address: str) -> None:
    begin = time.monotonic()
    with pytest.raises(UsageError, match=address):
        engines.Nodes(address)
    assert time.monotonic() - begin < 10


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'ray>=2\.52\.1'"):
        engines.Nodes("auto")
