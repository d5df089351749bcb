"""Compile kernels on first use and cache the machine code on disk.

``kernel`` takes the signatures that a function is meant for; a call with other types is a
``TypeError``, never a second compilation behind the caller's back. Inputs are declared read-only,
which writeable arrays satisfy too. A place to keep machine code that cannot be written is no error:
the kernel is then compiled once in every process.

Cost: half a second to four per kernel without the cache, about ten milliseconds with it.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable
from typing import Any

import numba
from numba import types

from fast_axolotl import kernels


def _array(dtype: Any, *, readonly: bool = True) -> Any:
    return types.Array(dtype, 1, "C", readonly=readonly)


BYTES = _array(types.uint8)
FLAGS = _array(types.boolean)
INT32, MUTABLE_INT32 = _array(types.int32), _array(types.int32, readonly=False)
INT64, MUTABLE_INT64 = _array(types.int64), _array(types.int64, readonly=False)
UINT64, MUTABLE_UINT64 = _array(types.uint64), _array(types.uint64, readonly=False)
MUTABLE_UINT32 = _array(types.uint32, readonly=False)
"""Contiguous arrays of one dimension, for the signatures of kernels."""

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

inlined: Callable[[Callable[..., Any]], Any] = numba.njit(**_OPTIONS)
"""For the parts of a kernel: compiled together with it, never on their own.

They stand in the same file as the kernels that call them, since the cache watches that file alone.
"""


class Kernel:
    """A function that is compiled, for its signatures, when it is first called."""

    def __init__(self, function: Callable[..., Any], signatures: tuple[Any, ...]) -> None:
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        """``module.function``, for people."""
        self._function = function
        self._signatures = signatures
        self._compiled: Any = None
        self._lock = threading.Lock()
        self.is_kept = False
        """Whether the machine code is on disk for the next process."""
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: Any) -> Any:
        return (self._compiled or self.compile())(*arguments)

    def compile(self) -> Any:
        """Compile, or load what was compiled before; does nothing the second time."""
        with self._lock:
            if self._compiled is None:
                try:
                    self._compiled = self._dispatcher(cache=True)
                    self.is_kept = True
                except (OSError, RuntimeError):
                    self._compiled = self._dispatcher(cache=False)
            return self._compiled

    def _dispatcher(self, *, cache: bool) -> Any:
        dispatcher = numba.njit(cache=cache, **_OPTIONS)(self._function)
        for signature in self._signatures:
            dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher


def kernel(*signatures: Any) -> Callable[[Callable[..., Any]], Kernel]:
    """Makes a ``Kernel`` of a function, for these numba signatures and no others."""
    return lambda function: Kernel(function, signatures)


def all_kernels() -> list[Kernel]:
    """Every kernel of this package, compiled or not, by name."""
    found = {
        value.name: value
        for module in pkgutil.iter_modules(kernels.__path__)
        for value in vars(importlib.import_module(f"{kernels.__name__}.{module.name}")).values()
        if isinstance(value, Kernel)
    }
    return [found[name] for name in sorted(found)]
