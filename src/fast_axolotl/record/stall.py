"""The one sum that makes a stall, and the one rule whether it is the device's or the host's.

A stall is a ratio of sums: waiting ÷ wall time. It is the device's where device waits are known for
at least 90 % of the wall time, and then over exactly that part of it; else it is the host's. The
meter's running figures, the summary, the live view and the charts all add up steps or blocks here,
so that they cannot disagree.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fast_axolotl.record.arithmetic import finite, ratio
from fast_axolotl.record.schema import StepBlock

__all__ = [
    "LEAST_DEVICE_SHARE",
    "WAIT_ERROR",
    "WAIT_SECONDS",
    "StallSource",
    "WaitTotals",
    "decode_waits",
    "encode_waits",
    "join_waits",
]

StallSource = Literal["device", "host", ""]

LEAST_DEVICE_SHARE = 0.9
"""Share of the wall time over which device waits must be known to stand for all of it."""

WAIT_ERROR = 0.04
"""How far a condensed wait can be off, as a share of it."""
_LEAST_WAIT, _WAIT_GROWTH = 1e-5, 1.08
WAIT_SECONDS = (0.0, *(_LEAST_WAIT * _WAIT_GROWTH**number for number in range(255)))
"""The wait that each byte of condensed waits stands for: none, then 10 µs to 50 minutes."""


def encode_waits(waits: Iterable[float]) -> str:
    """Waits of single steps as a byte each; longer is larger, so ranks are compared as bytes."""
    growth = math.log(_WAIT_GROWTH)
    return base64.b64encode(
        bytes(
            min(255, max(0, round(math.log(wait / _LEAST_WAIT) / growth) + 1)) if wait > 0 else 0
            for wait in waits
        )
    ).decode()


def decode_waits(text: str) -> bytes:
    """The bytes of condensed waits, of which ``WAIT_SECONDS`` gives the seconds."""
    return base64.b64decode(text)


def join_waits(first: str, second: str) -> str:
    """The condensed waits of two blocks together; none where either has none."""
    if not first or not second:
        return ""
    return base64.b64encode(decode_waits(first) + decode_waits(second)).decode()


@dataclass(slots=True)
class WaitTotals:
    """Wall time and waits, summed over steps or blocks."""

    steps: int = 0
    fetches: int = 0
    wall_seconds: float = 0.0
    host_wait_seconds: float = 0.0
    device_wait_seconds: float = 0.0
    device_wall_seconds: float = 0.0
    """Wall time of the steps whose device waits are known."""

    def add(
        self,
        *,
        wall_seconds: float,
        host_wait_seconds: float,
        device_wait_seconds: float | None,
        steps: int = 1,
        fetches: int = 0,
    ) -> None:
        """Add one step, or several at once."""
        self.steps += steps
        self.fetches += fetches
        self.wall_seconds += wall_seconds
        self.host_wait_seconds += host_wait_seconds
        if device_wait_seconds is not None:
            self.device_wait_seconds += device_wait_seconds
            self.device_wall_seconds += wall_seconds

    def add_block(self, block: StepBlock) -> None:
        """Add the steps of a block; a foreign record's numbers may be none."""
        self.add(
            wall_seconds=finite(block.wall_seconds) or 0.0,
            host_wait_seconds=finite(block.host_wait_seconds) or 0.0,
            device_wait_seconds=finite(block.device_wait_seconds),
            steps=block.steps,
            fetches=block.fetches,
        )

    @property
    def source(self) -> StallSource:
        """Whose waits the stall is made of; empty before the first step."""
        if not self.steps:
            return ""
        known = ratio(self.device_wall_seconds, self.wall_seconds)
        return "device" if known is not None and known >= LEAST_DEVICE_SHARE else "host"

    @property
    def host_stall_fraction(self) -> float | None:
        """Share of the time in which the host waited."""
        return ratio(self.host_wait_seconds, self.wall_seconds)

    @property
    def device_stall_fraction(self) -> float | None:
        """Share of the time in which the device had nothing to run for want of data."""
        if self.source != "device":
            return None
        return ratio(self.device_wait_seconds, self.device_wall_seconds)

    @property
    def stall_fraction(self) -> float | None:
        """The device's where it is known, else the host's."""
        return self.device_stall_fraction if self.source == "device" else self.host_stall_fraction
