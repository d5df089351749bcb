"""Where a run takes place, and the cgroup it lives in, laid out in folders and for real."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fast_axolotl import system
from fast_axolotl.measure.processes import read_pressure_seconds
from fast_axolotl.system import find_memory_cgroup, usable_cores

GIGABYTE = 1_000_000_000


def lay_out(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_version_two_gives_the_least_limit_on_the_way_up(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    lay_out(proc, {"7/cgroup": "0::/slice/job\n"})
    files = {
        "cgroup.controllers": "memory",
        "slice/memory.max": f"{8 * GIGABYTE}\n",
        "slice/memory.high": "max\n",
        "slice/job/memory.max": "max\n",
        "slice/job/memory.pressure": "full avg10=0.00 total=1500000\n",
    }
    lay_out(root, files)
    found = find_memory_cgroup(7, proc=proc, root=root)
    assert found is not None
    assert found.limit_bytes() == 8 * GIGABYTE
    pressure = found.pressure_file("memory")
    assert pressure is not None
    assert read_pressure_seconds(pressure) == 1.5
    assert found.pressure_file("io") is None


def test_version_one_knows_no_limit_as_the_largest_number_of_pages(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    lay_out(proc, {"self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/\n0::/\n"})
    no_limit = "9223372036854771712\n"
    limits = ("memory/memory.limit_in_bytes", "memory/job/memory.limit_in_bytes")
    lay_out(root, dict.fromkeys(limits, no_limit))
    found = find_memory_cgroup(proc=proc, root=root)
    assert found is not None
    assert found.version == 1
    assert found.limit_bytes() is None
    lay_out(root, {"memory/job/memory.limit_in_bytes": "4096000\n"})
    assert found.limit_bytes() == 4_096_000


def test_in_a_container_that_sees_the_hosts_path_the_mount_is_the_cgroup(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    lay_out(proc, {"self/cgroup": "0::/../../kubepods/pod1/container\n"})
    lay_out(root, {"cgroup.controllers": "memory", "memory.max": "1000000\n"})
    found = find_memory_cgroup(proc=proc, root=root)
    assert found is not None
    assert found.limit_bytes() == 1_000_000
    # A group inside that has the name of one of the host's is another.
    lay_out(root, {"kubepods/memory.max": "1000\n", "kubepods/cpu.max": "100000 100000\n"})
    assert found.limit_bytes() == 1_000_000
    assert usable_cores(proc, root) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"cgroup/cpu.max": "100000 100000"}, 1),
        ({"cgroup/cpu.max": "50000 100000"}, 1),
        ({"cgroup/cpu.max": "nonsense"}, None),
        (
            {"proc/self/cgroup": "0::/a/b\n", "cgroup/a/b/cpu.max": "max 100000"}
            | {"cgroup/a/cpu.max": "100000 100000"},
            1,
        ),
        (
            {"proc/self/cgroup": "4:cpu,cpuacct:/job\n3:memory:/\n"}
            | {f"cgroup/cpu/job/cpu.cfs_{name}_us": "100000" for name in ("quota", "period")},
            1,
        ),
        ({"cgroup/cpu/cpu.cfs_quota_us": "-1", "cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cores_are_those_of_the_affinity_and_the_quota(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    lay_out(tmp_path, files)
    here = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path / "proc", tmp_path / "cgroup") == (expected or here)


def test_an_affinity_of_one_core_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    assert usable_cores() == 1


def test_this_machine_is_described_without_its_name() -> None:
    found = system.describe()
    assert found["memory_bytes"] > 100_000_000
    assert found["cores"] >= 1
    assert found["versions"]["pyarrow"]
    assert "host" not in found
    assert None not in found.values()
