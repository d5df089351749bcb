"""The GPU reader: a stand-in for NVML, NVML without a driver, and no NVML at all."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fast_axolotl.measure.gpu import GpuReader, open_gpus
from fast_axolotl.record import DeviceSample


class NVMLError(Exception):
    """As pynvml's: what every call may raise."""


class Nvml(ModuleType):
    """Three devices, the last of which tells nothing but its name."""

    NVML_CLOCK_SM = 1
    NVMLError = NVMLError

    def __init__(self, count: int = 3) -> None:
        super().__init__("pynvml")
        self.count = count
        self.running: dict[int, list[int]] = {}
        self.calls: list[str] = []
        self.is_shut = False

    def nvmlInit(self) -> None:
        self.calls.append("init")

    def nvmlShutdown(self) -> None:
        self.is_shut = True

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return b"NVIDIA H200" if handle == 0 else "NVIDIA H200"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=self._tell(handle, 87))

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=self._tell(handle, 5_000_000_000), total=9_000_000_000)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return self._tell(handle, 650_500)

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        assert kind == self.NVML_CLOCK_SM
        return self._tell(handle, 1980)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        self.calls.append("processes")
        self._tell(handle, 0)
        return [SimpleNamespace(pid=pid) for pid in self.running.get(handle, [])]

    def _tell(self, handle: int, value: int) -> int:
        if handle == 2:
            raise NVMLError("Not Supported")
        return value


FULL = {
    "utilization": 0.87,
    "memory_bytes": 5_000_000_000,
    "total_bytes": 9_000_000_000,
    "power_watts": 650.5,
}


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def test_every_device_is_read_and_a_refused_figure_is_none(nvml: Nvml) -> None:
    reader = open_gpus()
    assert reader.names == ("NVIDIA H200",) * 3
    assert reader.reason == ""
    assert reader.read() == (
        DeviceSample(index=0, clock_mhz=1980.0, **FULL),
        DeviceSample(index=1, clock_mhz=1980.0, **FULL),
        DeviceSample(index=2),
    )
    reader.close()
    assert nvml.is_shut


def test_once_the_tree_is_seen_on_a_device_only_such_devices_count(nvml: Nvml) -> None:
    reader = GpuReader(nvml)
    assert len(reader.read({10, 11})) == 3
    nvml.running = {1: [11], 0: [99]}
    for _ in range(9):
        reader.read({10, 11})
    assert nvml.calls.count("processes") == 3  # not at every read
    for _ in range(20):
        assert [device.index for device in reader.read({10, 11})] == [1]
        nvml.running = {}


def test_without_package_driver_or_device_the_reason_says_which(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise NVMLError("NVML Shared Library Not Found")

    nvml.count = 0
    assert open_gpus().reason == "NVML finds no GPU"
    monkeypatch.setattr(nvml, "nvmlInit", fail)
    assert open_gpus().reason == "NVML reports: NVML Shared Library Not Found"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reader = open_gpus()
    assert reader.reason == "GPU figures need NVML: pip install nvidia-ml-py"
    assert (reader.names, reader.read()) == ((), ())
    reader.close()


def test_the_real_thing_reads_devices_or_gives_a_reason() -> None:
    reader = open_gpus()
    try:
        assert bool(reader.names) is not bool(reader.reason)
        assert len(reader.read()) == len(reader.names)
    finally:
        reader.close()
