"""Fixtures of all tests. What several test modules import lies in ``support``."""

from __future__ import annotations

import gc
import importlib
import os
import secrets
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest

import fast_axolotl

LONGEST = (
    *("batch", "trl", "axolotl_resume", "tokenized_shards", "torch_dataset"),
    *("axolotl_cli", "benchmarks", "cluster_prepare", "cluster_engines", "axolotl_install"),
    *("axolotl_plugin", "bench", "run_measure", "cluster_tables"),
)
"""Files of tests that take the longest begin, so that all processes end at about one time."""


def pytest_configure() -> None:
    """Started in the background of a shell, a process ignores interrupts, and so would everything
    that tests start and interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ray looks at these once in a process, and a token of the user's would count otherwise.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    # huggingface_hub reads this once, when it is first imported; where it may ask, it waits for
    # names that nobody resolves.
    os.environ.update(HF_HUB_OFFLINE="1", AXOLOTL_DO_NOT_TRACK="1")
    # The models of tests are tiny, and every core has a test already.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Machines are shared: how long one example takes says nothing.
    hypothesis.settings.register_profile("shared", deadline=None)
    hypothesis.settings.load_profile("shared")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """``map`` of ``datasets`` with several processes leaves a copy in the place of ``os.environ``:
    whoever holds the first one, as rich does, would see no change any more."""
    environment = os.environ
    yield
    os.environ = environment  # noqa: B003 - nothing is to be cleared


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Indices of rows are kept for these tests alone, in processes that they start too."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def known_objects_are_not_searched() -> None:
    """What earlier files of tests imported stays until the end: the garbage collector, which would
    go through all of Axolotl and torch every few tests, leaves it out."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its standard input to close."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have left in this process is not seen: replaced functions of Axolotl, and
    the state of accelerate."""
    nothing = SimpleNamespace(patches=())
    monkeypatch.setattr("fast_axolotl.axolotl.status", lambda: nothing)
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)


@pytest.fixture(scope="module")
def stock() -> Iterator[Callable[[str], Any]]:
    """Imports modules of Axolotl as they are released, with none of our patches in them."""
    fast_axolotl.uninstall()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield importlib.import_module
    fast_axolotl.install()
