"""Kernels that are loaded beside the reading, once that has proved to be worth it.

Loading takes as long as reading 100 MB of lines without them, and numba 110 MB of memory. So a
thread loads them once a process has read ``_KERNEL_BYTES``, under a memory budget that has room,
and they are used as soon as they are there. Where no process before has left their machine code,
compiling takes 5 to 10 seconds, once: it begins after ``_COMPILE_BYTES``, and a process that is
done earlier waits for it, or the next one would have to begin again. What is read is the same
either way.
"""

from __future__ import annotations

import importlib
import os
import threading
from contextlib import suppress
from typing import Any

from fast_axolotl.reading.blocks import ReadOptions

_KERNEL_BYTES, _COMPILE_BYTES = 64 * 1024 * 1024, 256 * 1024 * 1024
_KERNEL_BLOCK_BYTES = 8 * 1024 * 1024
"""Blocks are that large from a memory budget of 256 MiB on."""


class KernelLoader:
    """Loads a module of kernels beside the reading, once that has proved to be worth it."""

    def __init__(self, name: str, after_bytes: int = _KERNEL_BYTES) -> None:
        self._name = name
        self.kernels: Any = None
        self._num_bytes, self._wanted_bytes = 0, after_bytes
        self._turns = [self._load]
        """Who takes it out starts the thread; no lock, since a forked child might find it held."""

    def loaded(self, length: int, num_bytes: int = 0, options: ReadOptions | None = None) -> Any:
        """The module where it is loaded and can work on data of this length, else ``None``.

        ``num_bytes`` are what counts towards loading, with ``options`` that have room for it.
        """
        has_room = options is not None and options.block_bytes >= _KERNEL_BLOCK_BYTES
        if self.kernels is None and has_room:
            self._num_bytes += num_bytes
            if self._num_bytes >= self._wanted_bytes and self._turns:
                # RuntimeError: the interpreter is about to exit.
                with suppress(IndexError, RuntimeError):
                    thread = threading.Thread(
                        target=self._turns.pop(), name="fast-axolotl-kernels", daemon=False
                    )
                    # A child that is forked while this one compiles would wait for it for ever.
                    os.register_at_fork(before=thread.join)
                    thread.start()
        kernels = self.kernels
        return kernels if kernels is None or kernels.PADDING <= length < 2**31 else None

    def _load(self) -> None:
        from fast_axolotl.kernels.jit import Kernel

        for loader in dict.fromkeys((self, _utf8)):
            module = importlib.import_module(f"fast_axolotl.kernels.{loader._name}")
            kernels = [item for item in vars(module).values() if isinstance(item, Kernel)]
            if self._num_bytes < _COMPILE_BYTES and not all(item.is_on_disk() for item in kernels):
                self._wanted_bytes = _COMPILE_BYTES
                self._turns.append(self._load)
                return
            for item in kernels:
                item.compile()
            loader.kernels = module


_utf8 = KernelLoader("utf8")
"""Loaded with any other, since numba is there by then; alone it does not pay."""


loaded_utf8 = _utf8.loaded
