"""The matmul rate that this very device reaches: what MFU's peak promises, measured.

Square matrices of random numbers, as large as fits comfortably, multiplied again and again. Random
ones, because a GPU multiplying zeros draws less power and clocks higher. Costs ``seconds`` and
three matrices of memory, and synchronises: call it before or after training, never inside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from fast_axolotl.errors import MissingExtraError, UsageError
from fast_axolotl.measure.peak_flops import normalise_dtype

__all__ = ["measure_matmul_tflops"]

GPU_SIZE = 8192
"""Rows and columns: past 4096, the rate of data-centre GPUs no longer grows with the size."""
CPU_SIZE = 1024
_BLOCK_SECONDS = 0.05
"""A block is timed as a whole: long against the cost of a synchronise."""


def measure_matmul_tflops(
    device: Any = "cuda",
    dtype: str = "bfloat16",
    seconds: float = 1.0,
    *,
    size: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """TFLOP/s of large square matmuls: the median over blocks, the first of them left out."""
    try:
        import torch
    except ImportError:
        raise MissingExtraError(
            "measuring the matmul rate needs PyTorch: pip install 'fast-axolotl[torch]'"
        ) from None
    place = torch.device(device)
    edge = size or (CPU_SIZE if place.type == "cpu" else GPU_SIZE)
    left, right, out = _make_matrices(torch, place, dtype, edge)
    precision = torch.get_float32_matmul_precision()
    if normalise_dtype(dtype) in ("tf32", "float32"):
        torch.set_float32_matmul_precision(
            "high" if normalise_dtype(dtype) == "tf32" else "highest"
        )

    def run(times: int) -> float:
        begin = clock()
        for _ in range(times):
            torch.matmul(left, right, out=out)
        if place.type != "cpu":
            getattr(torch, place.type).synchronize()
        return clock() - begin

    try:
        run(2)
        times = max(1, round(_BLOCK_SECONDS / max(run(1), 1e-6)))
        blocks = _repeat(lambda: run(times), seconds)
    finally:
        torch.set_float32_matmul_precision(precision)
    return 2.0 * edge**3 * times / median(blocks) / 1e12


def _repeat(run: Callable[[], float], seconds: float) -> list[float]:
    """Blocks until their time is up, at least one after the first, which warms the clocks up."""
    blocks = [run(), run()]
    while sum(blocks) < seconds:
        blocks.append(run())
    return blocks[1:]


def _make_matrices(torch: Any, place: Any, dtype: str, edge: int) -> tuple[Any, Any, Any]:
    name = normalise_dtype(dtype)
    kind = getattr(torch, "float32" if name == "tf32" else name, None)
    if name not in ("bfloat16", "float16", "float32", "tf32") or kind is None:
        raise UsageError(f"no plain matmul in {dtype!r}: bfloat16, float16, float32 or tf32")
    made = [torch.randn(edge, edge, device=place, dtype=kind) for _ in range(2)]
    return made[0], made[1], torch.empty(edge, edge, device=place, dtype=kind)
