"""Several ranks on a node, several nodes in one record: real processes that play them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fast_axolotl.integrations.training_meter import open_meter
from fast_axolotl.measure import measure
from fast_axolotl.measure.summary import summarise
from fast_axolotl.measure.writers import find_new_ranks, find_owner, find_running_nodes
from fast_axolotl.record import RunRecord, Start, read_run
from fast_axolotl.record.folder import dump_line
from fast_axolotl.system import node_name, pid_namespace
from support.children import FAST_AXOLOTL, clean_environment, run_ranks
from support.records import (
    GIGABYTE,
    START_TIME,
    make_ranks,
    make_run,
    make_system,
    write_run,
)

MEGABYTE = 1_000_000
HELD = 150 * MEGABYTE

RANK = f"""
import glob, os, re, time
held = bytes(range(250)) * ({HELD} // 250)
from fast_axolotl import measure
wanted = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) * {HELD}
folder = os.environ.get("FAST_AXOLOTL_MEASURE", "run")
files = folder + "/system-*" + os.environ.get("FAST_AXOLOTL_NODE", "")[-1:] + ".jsonl"

def loader():
    # Until all ranks of the node have been sampled together; a busy machine is sampled seldom.
    end = time.monotonic() + 20
    sampled = 0
    while time.monotonic() < end and sampled < wanted:
        yield [1, 2]
        texts = "".join(open(path).read() for path in glob.glob(files))
        sampled = max(map(int, re.findall('"pss_bytes":([0-9]+)', texts)), default=0)

with measure(folder) as meter:
    for batch in meter.watch(loader()):
        time.sleep(0.05)
"""


def most_memory(record: RunRecord, node: str = "") -> int:
    """The largest ΣPSS of a node, or of the only one."""
    system = record.systems[node] if node else record.system
    return max(sample.pss_bytes or 0 for sample in system.samples)


def test_one_sampler_covers_every_rank_of_its_node(tmp_path: Path) -> None:
    """Three ranks of one node that measure themselves."""
    run_ranks(sys.executable, "-c", RANK, count=3, cwd=tmp_path)
    record = read_run(tmp_path / "run")
    assert sorted(record.ranks) == [0, 1, 2]
    [system] = record.systems.values()
    assert system.start.source == "meter"
    assert most_memory(record) > 3 * HELD
    assert max(sample.processes for sample in system.samples) == 3


def test_a_node_without_a_watcher_samples_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher has passed the order to measure on to another node than the watcher's."""
    write_run(tmp_path, two_nodes())
    monkeypatch.setenv("FAST_AXOLOTL_MEASURE", str(tmp_path))
    monkeypatch.setenv("FAST_AXOLOTL_NODE", "node-c")
    with (
        open_meter(tmp_path, source="torch", rank=(8, 10, 0)),
        # A rank that does not know which one of its node it is.
        open_meter(tmp_path, source="torch", rank=(9, 10, 0)),
        # A second training of the same run.
        open_meter(tmp_path.with_name(f"{tmp_path.name}-2"), source="torch", rank=(8, 10, 0)),
    ):
        pass
    names = [path.name for path in sorted(tmp_path.glob("system*"))]
    assert names == [f"system-node-{letter}.jsonl" for letter in "abc"]
    assert not list(tmp_path.with_name(f"{tmp_path.name}-2").glob("system*"))
    assert read_run(tmp_path).systems["node-c"].start.source == "meter"


def first_line(folder: Path, **changed: object) -> Path:
    """The file of a rank 3 that has begun just now."""
    start = Start(
        time=time.time(),
        rank=3,
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        host=node_name(),
        version="0",
    )
    path = folder / "rank-3.jsonl"
    path.write_text(dump_line(replace(start, **changed)) + "\n")  # type: ignore[arg-type]
    return path


def test_ranks_are_found_by_their_files_unless_they_are_in_another_container(
    tmp_path: Path,
) -> None:
    known: set[tuple[str, int]] = set()
    assert [*find_new_ranks(tmp_path / "none", known)] == []
    path = tmp_path / "rank-3.jsonl"
    path.write_text('{"kind":"start",')
    assert [*find_new_ranks(tmp_path, known)] == []
    path.unlink()
    first_line(tmp_path)
    assert [*find_new_ranks(tmp_path, known)] == [os.getpid()]
    assert [*find_new_ranks(tmp_path, known)] == []
    for changed in (
        *({"host": "node-b"}, {"time": 1000.0}, {"pid": 2**22 + 7}),
        {"pid_namespace": "another"},
    ):
        first_line(tmp_path, **changed)
        assert [*find_new_ranks(tmp_path, set())] == []


@pytest.mark.parametrize(
    ("changed", "age", "is_kept"),
    [
        ({"pid": os.getppid()}, 300.0, True),
        ({"pid": os.getpid()}, 0.0, False),
        ({"pid": 2**22 + 7}, 0.0, False),
        ({"pid": os.getppid(), "time": 1000.0}, 0.0, False),
        (None, 0.0, False),
        ({"host": "node-b"}, 10.0, True),
        ({"host": "node-b"}, 300.0, False),
        ({"pid_namespace": "another-boot pid:[1]"}, 10.0, True),
        ({"pid_namespace": f"{pid_namespace().split()[0]} pid:[1]"}, 10.0, False),
    ],
    ids=[
        *("another process", "this process", "a dead one", "its number again", "no start"),
        *("another node, now", "another node, long ago", "a machine of the same name"),
        "this container before it restarted",
    ],
)
def test_a_file_that_somebody_writes_is_left_alone_and_any_other_is_moved_aside(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, object] | None,
    age: float,
    is_kept: bool,
) -> None:
    path = first_line(tmp_path, **(changed or {}))
    if changed is None:
        path.write_text('{"kind":"settings","t":0.0}\n')
    theirs = path.read_text()
    os.utime(path, (time.time() - age,) * 2)
    assert (find_owner(path) is not None) == is_kept
    with measure(tmp_path, rank=3, sample_system=is_kept) as meter:
        assert len(list(meter.watch([["row"]] * 20))) == 20
    refusal = f"nothing is recorded, but the run continues: {path}: "
    assert (path.read_text() == theirs) == (refusal in caplog.text) == is_kept
    if is_kept and "pid" in changed:
        assert f"{refusal}process {os.getppid()}" in caplog.text
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"rank-3.jsonl", *(["rank-3.jsonl.1"] * (not is_kept))}


def run_node(node: str, folder: Path, *command: str, **variables: str) -> list[str]:
    environment = clean_environment(FAST_AXOLOTL_NODE=node, **variables)
    started = [*FAST_AXOLOTL, "run", "--measure", "--output", "run", "--", *command]
    with subprocess.Popen(
        started, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        return process.stderr.read().splitlines()


def test_nodes_that_start_at_the_same_moment_write_one_record(tmp_path: Path) -> None:
    nodes = {"node-a": "0", "node/b": "1"}
    with ThreadPoolExecutor(2) as pool:
        told = [
            pool.submit(
                run_node,
                *(node, tmp_path, sys.executable, "-c", RANK),
                RANK=number,
                WORLD_SIZE="2",
                LOCAL_RANK="0",
            )
            for node, number in nodes.items()
        ]
    first, second = [one.result() for one in told]
    record = read_run(tmp_path / "run")
    assert [record.ranks[number].start.host for number in range(2)] == list(nodes)
    names = sorted(path.name for path in (tmp_path / "run").glob("system*"))
    assert names == ["system-node-a.jsonl", "system-node_b.jsonl"]
    found = [(node["node"], node["ranks"]) for node in summarise(record).nodes]
    assert found == [("node-a", (0,)), ("node/b", (1,))]
    # Neither node counts the other's rank.
    for node in nodes:
        assert HELD < most_memory(record, node) < 1.5 * HELD
    assert any("Working set" in line or "working set" in line for line in first)
    assert sum("wrote its part of the record" in line for line in second) == 1
    assert len(second) < 5


def test_a_record_is_joined_by_other_nodes_while_it_is_written_and_not_afterwards(
    tmp_path: Path,
) -> None:
    def told(node: str, **variables: str) -> str:
        return "\n".join(run_node(node, tmp_path, "true", **variables))

    environment = clean_environment(FAST_AXOLOTL_NODE="node-a")
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [*FAST_AXOLOTL, "run", "--measure", "-q", "--output", "run", "--", "cat"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes):
        while not find_running_nodes(tmp_path / "run"):
            time.sleep(0.02)
        assert "joining the record that node-a is writing" in told("node-b")
        assert "run already holds a record" in told("node-a")
        # One of several commands that a launcher starts on one node.
        assert "joining the record" in told("node-a", SLURM_PROCID="1", SLURM_NTASKS="2")
    assert "run already holds a record" in told("node-c")
    assert sorted(read_run(tmp_path / "run").systems) == ["node-a", "node-b"]
    # Cut off, and not touched for long.
    path = tmp_path / "run" / "system-node-a.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert "joining the record" in told("node-c")
    os.utime(path, (time.time() - 300,) * 2)
    assert "run already holds a record" in told("node-d")


def two_nodes(ranks: int = 2, nodes: int = 2) -> RunRecord:
    """So many ranks a node; the second node swaps, the first has least memory left."""
    names = [f"node-{letter}" for letter in "abcdefgh"[:nodes]]
    record = make_run(*make_ranks(ranks * nodes))
    for place, name in enumerate(names):
        # The clock of every node differs from that of the others.
        start = {"host": name, "time": START_TIME + 1000 * place}
        values = {"pss_bytes": (60 - place) * GIGABYTE, "swap_in_bytes": 1e9 * (place == 1)}
        record.systems[name] = make_system(start=start, **values)
        for number in range(place * ranks, (place + 1) * ranks):
            rank = record.ranks[number]
            rank.start = replace(rank.start, **start)
    return record


def test_the_figures_are_of_the_node_under_most_pressure_and_a_note_names_it() -> None:
    summary = summarise(two_nodes())
    found = [(node["node"], node["ranks"]) for node in summary.nodes]
    assert found == [("node-a", (0, 1)), ("node-b", (2, 3))]
    assert [node["working_set_bytes"] for node in summary.nodes] == [60 * GIGABYTE, 59 * GIGABYTE]
    assert [rank.node for rank in summary.ranks] == ["node-a", "node-a", "node-b", "node-b"]
    assert (summary.node, summary.is_swap_sustained) == ("node-b", True)
    assert summary.working_set_bytes == 59 * GIGABYTE
    assert any("are from node-b" in note for note in summary.notes)
    calm = two_nodes()
    calm.systems["node-b"] = make_system(start={"host": "node-b"}, pss_bytes=GIGABYTE)
    assert summarise(calm).node == "node-a"
    del calm.systems["node-b"]
    assert "there are no samples from node-b" in summarise(calm).notes


def test_nodes_of_an_earlier_run_in_the_same_folder_are_left_out(tmp_path: Path) -> None:
    record = two_nodes()
    gone = {"host": "node-z", "time": START_TIME - 3600}
    record.systems["node-z"] = make_system(start=gone)
    write_run(tmp_path, record)
    kept = read_run(tmp_path)
    assert list(kept.systems) == ["node-a", "node-b"]
    assert kept.notes == ["the samples of node-z belong to an earlier run and were skipped"]
