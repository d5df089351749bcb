"""The probe of the data's device: on this machine's filesystems, and where it must refuse."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from fast_axolotl.measure import disk
from fast_axolotl.measure.disk import (
    capacity_at,
    choose_files,
    find_numbers,
    probe_capacity,
    read_requests,
)
from fast_axolotl.record import DiskProbe

MEBIBYTE = 1 << 20


def write(path: Path, num_bytes: int) -> Path:
    path.write_bytes(os.urandom(num_bytes))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("data")
    write(found / "large.bin", 24 * MEBIBYTE + 777)
    write(found / "small.bin", MEBIBYTE)
    with (found / "large.bin").open("rb") as file:
        os.fsync(file.fileno())
    return found


def test_a_file_on_a_device_gives_rates_or_says_why_not(folder: Path) -> None:
    found = probe_capacity(folder / "large.bin")
    rates = found.random_64k_bytes_per_second, found.bytes_per_second
    assert all(rate is None or rate > 0 for rate in rates)
    assert (None in rates) is bool(found.reason)


def test_the_probe_reads_no_more_and_no_longer_than_it_may(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[int, int]] = []

    def note(descriptor: int, buffers: list[object], offset: int) -> int:
        size = len(buffers[0])  # type: ignore[arg-type]
        reads.append((size, offset))
        return size

    monkeypatch.setattr(disk.os, "preadv", note)
    ticks = count()
    probe_capacity(folder, max_bytes=10 * MEBIBYTE, clock=lambda: next(ticks) * 1e-3)
    # Several threads read, so one may be noted after the next.
    assert sorted(offset for size, offset in reads if size == MEBIBYTE) == [
        MEBIBYTE * number for number in range(10)
    ]
    offsets = [offset for size, offset in reads if size == 65536]
    # A second of ticks of a millisecond; threads that have started read once more.
    assert 100 < len(offsets) < 1100
    assert offsets != sorted(offsets)
    assert {offset % 65536 for offset in offsets} == {0}
    assert max(offsets) > 16 * MEBIBYTE


def test_a_device_that_python_cannot_keep_busy_has_no_rate_of_small_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk.os, "preadv", lambda _, buffers, __: len(buffers[0]))
    # On the clock of this process, other programs of the machine do not count.
    found = probe_capacity(folder, max_seconds=0.2, proc=folder / "none", clock=time.process_time)
    assert found.random_64k_bytes_per_second is None
    assert "cannot issue small requests fast enough" in found.reason
    assert found.bytes_per_second is not None


PROBED = DiskProbe(t=0.0, path="", bytes_per_second=2e9, random_64k_bytes_per_second=4e8)


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (None, 2e9),
        (16384, 1e8),
        (65536, 4e8),
        (262144, (4e8 * 2e9) ** 0.5),
        (4 << 20, 2e9),
    ],
)
def test_capacity_is_that_of_the_size_of_the_requests(
    request_bytes: float | None, expected: float
) -> None:
    assert capacity_at(PROBED, request_bytes) == pytest.approx(expected)


def test_without_random_reads_no_capacity_is_known_for_small_requests() -> None:
    assert capacity_at(DiskProbe(t=0.0, path="", bytes_per_second=2e9), 16384) is None
    assert capacity_at(DiskProbe(t=0.0, path=""), 16384) is None
    assert capacity_at(DiskProbe(t=0.0, path=""), None) is None


def test_requests_are_those_of_the_device_or_partition_that_holds_the_path(
    tmp_path: Path, shared_memory: Path
) -> None:
    device = tmp_path.stat().st_dev
    major, minor = os.major(device), os.minor(device)
    (tmp_path / "diskstats").write_text(
        f" {major} {minor}1 vda1 9 9 9 9 0 0 0 0 0 0 0\n"
        f" {major} {minor} vda 5 2 80 7 0 0 0 0 0 0 0\n"
        "short line\n"
    )
    assert find_numbers(tmp_path, proc=tmp_path) == (major, minor)
    assert read_requests((major, minor), proc=tmp_path) == (5, 80 * 512)
    assert find_numbers(shared_memory) is None
    assert find_numbers("/nowhere/at/all", proc=tmp_path) is None


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    path = Path("/dev/shm") / f"fast-axolotl-test-{os.getpid()}"
    try:
        yield write(path, 16 * MEBIBYTE)
    finally:
        path.unlink(missing_ok=True)


def test_memory_is_no_device_whether_it_refuses_the_probe_or_not(shared_memory: Path) -> None:
    found = probe_capacity(shared_memory)
    assert found.bytes_per_second is None
    assert "refused" in found.reason or "do not count as disk reads" in found.reason


def test_a_refusal_names_the_path_and_the_cause(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object, flags: int) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(disk.os, "open", refuse)
    found = probe_capacity(folder / "large.bin", proc=folder / "none")
    assert found.bytes_per_second is None
    where = folder / "large.bin"
    text = f"the system refused to read {where} with O_DIRECT: Invalid argument"
    assert found.reason == text


def test_a_device_that_does_not_answer_is_left_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(disk.os, "preadv", lambda *_: threading.Event().wait(1.0) or 0)
    found = probe_capacity(folder / "large.bin", max_seconds=0.05)
    assert found.bytes_per_second is None
    assert "no read" in found.reason


def test_the_largest_files_of_a_folder_are_taken_first(folder: Path) -> None:
    files, reason = choose_files(folder, 256 * MEBIBYTE)
    assert [file.name for file in files] == ["large.bin", "small.bin"]
    assert reason == ""
    assert [file.name for file in choose_files(folder, 16 * MEBIBYTE)[0]] == ["large.bin"]


@pytest.mark.parametrize("num_bytes", [1000, 0])
def test_a_small_dataset_or_a_file_full_of_holes_is_too_little(
    tmp_path: Path, num_bytes: int
) -> None:
    with write(tmp_path / "data", num_bytes).open("r+b") as file:
        file.truncate(num_bytes or 64 * MEBIBYTE)
    files, reason = choose_files(tmp_path, 256 * MEBIBYTE)
    assert files == []
    assert "too little to measure" in reason


@pytest.mark.parametrize(
    ("path", "words"),
    [("s3://bucket/data", "not on a disk"), ("/nowhere/at/all", "there is no /nowhere")],
)
def test_a_path_that_is_not_here_has_no_capacity(path: str, words: str) -> None:
    found = probe_capacity(path)
    assert found.bytes_per_second is None
    assert words in found.reason or "O_DIRECT" in found.reason
