"""The probe of the data's device: on this machine's filesystems, and where it must refuse."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from fast_axolotl.measure import disk
from fast_axolotl.measure.disk import choose_files, find_numbers, probe_capacity, read_requests

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


def test_a_file_on_a_device_gives_a_rate_or_says_why_not(folder: Path) -> None:
    found = probe_capacity(folder / "large.bin")
    assert found.bytes_per_second is None or found.bytes_per_second > 0
    assert (found.bytes_per_second is None) is bool(found.reason)


def test_the_probe_reads_in_order_no_more_and_no_longer_than_it_may(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    def note(descriptor: int, buffers: list[object], offset: int) -> int:
        assert len(buffers[0]) == MEBIBYTE  # type: ignore[arg-type]
        reads.append(offset)
        return MEBIBYTE

    monkeypatch.setattr(disk.os, "preadv", note)
    ticks = count()
    probe_capacity(folder, max_bytes=20 * MEBIBYTE, clock=lambda: next(ticks) * 1e-3)
    # Several threads read, so one may be noted after the next.
    assert sorted(reads) == [MEBIBYTE * number for number in range(20)]
    reads.clear()
    probe_capacity(folder, max_seconds=0.002, clock=lambda: next(ticks) * 1e-3)
    assert 0 < len(reads) <= 18  # threads that have started read once more


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
    assert ([file.name for file in files], reason) == (["large.bin", "small.bin"], "")
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
    for path, words in (("s3://bucket/data", "not on a disk"), ("/nowhere", "there is no /nowher")):
        assert words in choose_files(path, MEBIBYTE)[1]
