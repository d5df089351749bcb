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
from pathlib import Path

import psutil
import pytest

from fast_axolotl.cluster import engines
from fast_axolotl.cluster.engines import open_engine
from fast_axolotl.cluster.store import Store
from fast_axolotl.cluster.tasks import Answer, Engine, Event, Heard, Task, run_stage
from fast_axolotl.errors import DataError, MissingFileError, UsageError
from support.children import clean_environment
from support.cluster import TESTS, Nodes, ray_variables
from support.cluster_tasks import squares, task

Open = Callable[..., Engine]


@pytest.fixture
def opened() -> Iterator[Open]:
    with ExitStack() as stack:
        yield lambda kind, **options: stack.enter_context(closing(open_engine(kind, **options)))


def perform_all(
    engine: Engine, url: Path, tasks: list[Task], heard: Heard = lambda event: None
) -> dict[str, Answer]:
    """All answers by their tasks' names; an answer that came twice is an error."""
    answers: dict[str, Answer] = {}
    for done, answer in engine.run(str(url), tasks, heard):
        assert done.name not in answers
        answers[done.name] = answer
    return answers


def retried(events: list[Event]) -> list[str]:
    return [event.reason for event in events if event.kind == "retried"]


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
    engine = opened("local", workers=workers)
    events: list[Event] = []
    answers = perform_all(engine, tmp_path, squares(20, 0.02), events.append)
    assert_squares(answers, 20)
    assert sum(event.kind == "started" for event in events) == 20
    assert len({answer["pid"] for answer in answers.values()}) == engine.num_workers == workers
    again = perform_all(engine, tmp_path, squares(20, 0.02))
    assert {a["pid"] for a in again.values()} <= {a["pid"] for a in answers.values()}


def test_a_stage_continues_where_it_was(opened: Open, tmp_path: Path) -> None:
    engine = opened("local", workers=2)
    store = Store(str(tmp_path))
    run_stage(engine, store, "toy", squares(5), lambda event: None)
    events: list[Event] = []
    answers = run_stage(engine, store, "toy", squares(8), events.append)
    assert_squares(answers, 8)
    assert sum(event.kind == "started" for event in events) == 3


def test_a_worker_has_the_environment_of_now(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    perform_all(opened("local", workers=1), tmp_path, squares(1))
    monkeypatch.setenv("SOME_VARIABLE", "new")
    look = task("environment", name="SOME_VARIABLE")
    answers = perform_all(opened("local", workers=1), tmp_path, [look])
    assert answers["environment"]["value"] == "new"


def test_a_task_whose_process_is_killed_is_tried_again(opened: Open, tmp_path: Path) -> None:
    events: list[Event] = []
    tasks = [*squares(6, 0.1), task("die", times=1)]
    answers = perform_all(opened("local", workers=2), tmp_path, tasks, events.append)
    assert answers.pop("die")["attempts"] == 1
    assert_squares(answers, 6)
    [reason] = retried(events)
    assert "SIGKILL" in reason


def test_a_task_that_always_kills_its_process_is_an_error(opened: Open, tmp_path: Path) -> None:
    engine = opened("local", workers=2)
    tasks = [*squares(3), task("die", times=9, signal_number=signal.SIGSEGV)]
    with pytest.raises(DataError, match=r"toy/die failed 4 times.*SIGSEGV.*--memory"):
        perform_all(engine, tmp_path, tasks)
    assert len(Store(str(tmp_path)).names("attempts")) == 4
    assert_squares(perform_all(engine, tmp_path, squares(3)), 3)


def test_a_worker_that_dies_between_stages_is_replaced(opened: Open, tmp_path: Path) -> None:
    engine = opened("local", workers=1)
    os.kill(perform_all(engine, tmp_path, squares(1))["00"]["pid"], signal.SIGKILL)
    assert_squares(perform_all(engine, tmp_path, squares(2)), 2)


def test_an_error_on_purpose_keeps_its_type_and_message(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError) as caught:
        perform_all(opened("local", workers=2), tmp_path, [task("complain"), *squares(3)])
    assert str(caught.value) == "rows.jsonl, line 7: there is no such file"
    assert caught.value.path == "rows.jsonl"


def test_any_other_error_names_the_task_and_shows_the_traceback(
    opened: Open, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"task toy/divide failed: ZeroDivisionError") as caught:
        perform_all(opened("local", workers=1), tmp_path, [task("divide")])
    assert "cluster_tasks.py" in str(caught.value)


def test_a_run_that_is_given_up_ends_its_workers(opened: Open, tmp_path: Path) -> None:
    engine = opened("local", workers=2)
    tasks = [*squares(1), task("hold", name="a")]
    for _ in engine.run(str(tmp_path), tasks, lambda event: None):
        wait_for((tmp_path / "a.pid").exists)
        break
    wait_for(lambda: not psutil.pid_exists(int((tmp_path / "a.pid").read_text())))
    assert_squares(perform_all(engine, tmp_path, squares(3)), 3)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
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


def test_an_unknown_engine_is_an_error() -> None:
    with pytest.raises(UsageError, match="local or ray"):
        open_engine("dask")


# Nodes of a Ray cluster, each with its own processes on this machine.

NO_RAY = importlib.util.find_spec("ray") is None
needs_ray = pytest.mark.skipif(NO_RAY, reason="Ray is not installed")
NO_PORT = "127.0.0.1:9"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_variables():
        made = Nodes()
        try:
            made.add("n1", wait=False)
            made.add("n2", wait=False)
            made.cluster.wait_for_nodes()
            yield made
        finally:
            made.end()


@needs_ray
def test_nodes_do_all_tasks(opened: Open, nodes: Nodes, tmp_path: Path) -> None:
    engine = opened("ray", address=nodes.address)
    assert engine.num_workers == 2
    flying = []

    def heard(event: Event) -> None:
        flying.append({"started": 1, "done": -1}.get(event.kind, 0))
        assert sum(flying) <= 4

    answers = run_stage(engine, Store(str(tmp_path)), "toy", squares(16, 0.1), heard)
    assert_squares(answers, 16)
    assert {answer["ran"]["node"] for answer in answers.values()} == {"n1", "n2"}


@needs_ray
def test_errors_of_nodes_name_the_node(opened: Open, nodes: Nodes, tmp_path: Path) -> None:
    engine = opened("ray", address=nodes.address, memory=1 << 20)
    with pytest.raises(MissingFileError, match=r"rows.jsonl, line 7: .*\(on node n[12]\)$"):
        perform_all(engine, tmp_path, [task("complain")])
    with pytest.raises(DataError, match=r"divide failed: ZeroDivision.*\(on node n[12]\)\n"):
        perform_all(engine, tmp_path, [task("divide")])


@needs_ray
def test_others_do_the_tasks_of_a_lost_node(opened: Open, nodes: Nodes, tmp_path: Path) -> None:
    lost = nodes.add("n3")
    engine = opened("ray", address=nodes.address)
    events: list[Event] = []

    def kill_while_it_works() -> None:
        wait_for((tmp_path / "n3.pid").exists)
        nodes.kill(lost)

    with ThreadPoolExecutor() as threads:
        killed = threads.submit(kill_while_it_works)
        tasks = squares(20, 0.2, stuck_on="n3")
        assert_squares(perform_all(engine, tmp_path, tasks, events.append), 20)
        killed.result()
    assert 1 <= len(retried(events)) <= 2


def test_a_node_with_other_versions_ends_the_job(tmp_path: Path) -> None:
    versions = engines._versions()
    kind, _ = engines._attempt(str(tmp_path), squares(1)[0], versions)
    assert kind == "done"
    for changed in ({"numpy": "0.0.1"}, {"axolotl-extra": "1"}):
        kind, error = engines._attempt(str(tmp_path), squares(1)[0], {**versions, **changed})
        assert (kind, type(error)) == ("meant", UsageError)
        [name] = changed
        assert f"nodes differ: {name} " in str(error)


@needs_ray
def test_more_memory_than_any_node_has_is_an_error(nodes: Nodes) -> None:
    with pytest.raises(UsageError, match=r"no node .* has a CPU and .* bytes; .*--memory"):
        open_engine("ray", address=nodes.address, memory=1 << 50)


@needs_ray
@pytest.mark.parametrize("address", [NO_PORT, "nowhere", "ray://127.0.0.1:9", "no.invalid:6379"])
def test_an_address_without_a_cluster_is_an_error_soon(address: str) -> None:
    begin = time.monotonic()
    with pytest.raises(UsageError, match=address):
        open_engine("ray", address=address)
    assert time.monotonic() - begin < 10


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'ray>=2\.52\.1'"):
        open_engine("ray")
