"""Compile the kernels of a benchmark before it starts, and say what that took."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fast_axolotl.bench.operation_result import WarmUp

__all__ = ["warm_up"]


def warm_up(kernels: Sequence[str]) -> WarmUp:
    """Compiles, or loads, the kernels whose names begin with one of these."""
    start = time.perf_counter()
    from fast_axolotl.kernels.jit import all_kernels

    found = [kernel for kernel in all_kernels() if kernel.name.startswith(tuple(kernels))]
    imported = time.perf_counter() - start
    seconds = {}
    for kernel in found:
        start = time.perf_counter()
        kernel.compile()
        seconds[kernel.name] = time.perf_counter() - start
    return WarmUp(import_seconds=imported, compile_seconds=seconds)
