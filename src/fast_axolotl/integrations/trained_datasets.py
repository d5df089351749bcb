"""Which datasets a plain loop trains on: those whose fetches an optimizer step follows.

A loop may evaluate with ``no_grad`` inside of it, where the fetch itself still has gradients. So
once a dataset is known to be trained on, another one is evaluated: until a step follows that no
fetch of a known one explains. Then it is trained on, too (tasks that take turns, a second stage).

Several datasets fetched before the very first step may all be trained on, or one of them checked
first; the second step, which follows the trained ones alone, tells.

A dataset is held weakly. Where none that is known lives any more (a new one for each epoch), the
next one takes its place at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["TrainedDatasets"]

_SETTLING_STEPS = 2


class TrainedDatasets:
    """Told of fetches and steps, tells trained datasets from evaluated ones."""

    def __init__(self) -> None:
        self._known: dict[int, Callable[[], Any]] = {}
        self._fetched: dict[int, Callable[[], Any]] = {}
        """Since the last step."""
        self._num_steps = 0

    def fetch(self, dataset: Any) -> bool:
        """A dataset is fetched from; whether it counts as trained on."""
        key = id(dataset)
        if key not in self._fetched:
            self._fetched[key] = _refer_to(dataset)
        if self._is_known(key):
            return True
        self._known = {key: held for key, held in self._known.items() if held() is not None}
        return not self._known

    def step(self) -> None:
        """An optimizer step follows what was fetched."""
        fetched, self._fetched = self._fetched, {}
        if not fetched:
            return
        explained = {key: held for key, held in fetched.items() if self._is_known(key)}
        self._num_steps += 1
        if not explained:
            self._known.update(fetched)
        elif self._num_steps <= _SETTLING_STEPS:
            self._known = explained

    def _is_known(self, key: int) -> bool:
        held = self._known.get(key)
        return held is not None and held() is not None


def _refer_to(dataset: Any) -> Callable[[], Any]:
    """A weak reference; a list cannot be held so, and is taken to live on."""
    try:
        return weakref.ref(dataset)
    except TypeError:
        return _something


def _something() -> bool:
    """What cannot be held weakly."""
    return True
