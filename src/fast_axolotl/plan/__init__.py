"""From a measured run to the next one: communication, scaling, batch size, memory, time, money."""

from __future__ import annotations

__all__: list[str] = []
