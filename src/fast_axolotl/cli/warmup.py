"""``fast-axolotl warmup``: compile every kernel now, so that no later run has to."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

WARMUP_EXAMPLES = (
    "Examples:\n\n  fast-axolotl warmup\n\n"
    "In a container image, with a cache folder that the container's user can write to:\n\n"
    "  ENV NUMBA_CACHE_DIR=/var/cache/numba\n\n"
    "  RUN pip install ./fast-axolotl && fast-axolotl warmup"
)


def warmup(
    as_json: Annotated[bool, typer.Option("--json", help="Print the times as JSON.")] = False,
) -> None:
    """Compile all numba kernels now and cache them, so that no later run waits for it."""
    from fast_axolotl.record.units import format_seconds
    from fast_axolotl.report.terminal import phase_progress, show_pairs

    start = time.perf_counter()
    from fast_axolotl.kernels.jit import all_kernels

    kernels = all_kernels()
    seconds = {"import of numba": time.perf_counter() - start}
    with phase_progress("kernels") as progress:
        for index, kernel in enumerate(kernels):
            progress(kernel.name, index, len(kernels), index)
            start = time.perf_counter()
            kernel.compile()
            seconds[kernel.name] = time.perf_counter() - start
    is_kept = all(kernel.is_kept for kernel in kernels)
    if as_json:
        print(json.dumps({"seconds": seconds, "total": sum(seconds.values()), "kept": is_kept}))
        return
    pairs = [(name, format_seconds(value)) for name, value in seconds.items()]
    show_pairs("", [*pairs, ("total", format_seconds(sum(seconds.values())))])
    if not is_kept:
        print(
            "The compiled code could not be cached, because no cache folder is writable. Set "
            "NUMBA_CACHE_DIR to a writable folder, or every process compiles again."
        )
