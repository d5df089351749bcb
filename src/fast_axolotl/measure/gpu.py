"""Utilisation, memory, power and clocks of the GPUs, from NVML.

NVML comes with the driver; the package nvidia-ml-py speaks to it and is imported here on demand.
Whatever is missing on the way becomes one sentence in ``reason``. Every figure is asked for apart,
since a device may refuse one of them and give the others.

Utilisation is the share of NVML's last sampling period, 0.17 to 1 s, in which *some* kernel ran: a
device at 100 % may still be mostly empty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from fast_axolotl.record import DeviceSample

_LOOK_EVERY = 10
"""Reads after which it is asked anew on which devices the tree runs."""


class GpuReader:
    """The devices of an initialised NVML; without one, none, for a reason."""

    def __init__(self, nvml: Any = None, *, reason: str = "") -> None:
        self.reason = reason
        """Why there are no figures; empty where there are."""
        self._nvml = nvml
        indices = range(0 if nvml is None else nvml.nvmlDeviceGetCount())
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
        self.names = tuple(nvml.nvmlDeviceGetName(handle) for handle in self._handles)
        self._used: set[int] = set()
        self._reads = 0

    def read(self, pids: Collection[int] = ()) -> tuple[DeviceSample, ...]:
        """The devices of now; once a process of ``pids`` was seen on one, only such devices."""
        if pids and self._reads % _LOOK_EVERY == 0:
            # In a container NVML may name processes by the host's pids, or not at all; then all
            # devices stay in.
            for index, handle in enumerate(self._handles):
                running = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle)
                if any(process.pid in pids for process in running or ()):
                    self._used.add(index)
        self._reads += 1
        return tuple(map(self._read_device, sorted(self._used) or range(len(self._handles))))

    def close(self) -> None:
        """Let go of NVML."""
        if self._nvml is not None:
            self._ask(self._nvml.nvmlShutdown)

    def _read_device(self, index: int) -> DeviceSample:
        nvml, handle = self._nvml, self._handles[index]
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        clock = self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM)
        return DeviceSample(
            index=index,
            utilization=None if rates is None else rates.gpu / 100,
            memory_bytes=None if memory is None else int(memory.used),
            total_bytes=None if memory is None else int(memory.total),
            power_watts=None if milliwatts is None else milliwatts / 1000,
            clock_mhz=None if clock is None else float(clock),
        )

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


def open_gpus() -> GpuReader:
    """The GPUs of this machine, or the reason why they cannot be read."""
    try:
        import pynvml
    except ImportError:
        return GpuReader(reason="GPU figures need NVML: pip install nvidia-ml-py")
    try:
        pynvml.nvmlInit()
        reader = GpuReader(pynvml)
    except pynvml.NVMLError as error:
        return GpuReader(reason=f"NVML reports: {error}")
    return reader if reader.names else GpuReader(reason="NVML finds no GPU")
