"""Runs a command of Axolotl in this process and writes down where its time went.

Run as ``python axolotl_driver.py FOLDER MODULE ARGUMENTS…``: it does what ``python -m MODULE
ARGUMENTS…`` does, down to what spawned workers import as their main module, and leaves
``ledger-PID.json`` in the folder: ``marks``, by what happened, with the seconds of every name until
then; ``spans``, when each phase first began and last ended; ``compiling``, the seconds of all
threads together; ``waits`` and ``batches``, how long each batch took and its digest; ``patches``,
what our package says of its replacements. The same for stock and accelerated runs: it is the
environment that tells them apart, and this file imports nothing of our package.

Every moment of the main thread belongs to one name. Imports and compilation have names of their
own, wherever they happen, so that what is left is the work. Phases are known by the functions that
begin them, which are wrapped from outside after everything is imported, and after our replacements
are in place. The standard library alone; a phase costs three microseconds, an import of what is
there already half of one.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib
import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IMPORTS = "imports"
COMPILING = "compiling"
WAITING = "waiting for a batch"
WATCHING = "watching"

_SFT, _RL = "axolotl.utils.data.sft", "axolotl.utils.data.rl"

_PHASES = {
    "axolotl.cli.config:load_cfg": "configuration",
    "axolotl.common.datasets:load_tokenizer": "tokenizer",
    f"{_SFT}:load_dataset_with_config": "load",
    f"{_RL}:load_dataset_with_config": "load",
    f"{_SFT}:get_dataset_wrapper": "tokenise",
    f"{_RL}:_map_dataset": "tokenise",
    f"{_SFT}:merge_datasets": "merge",
    f"{_RL}:merge_datasets": "merge",
    f"{_SFT}:handle_long_seq_in_dataset": "length filter",
    f"{_RL}:_load_split": "length filter",
    f"{_SFT}:process_datasets_for_packing": "packing columns",
    f"{_SFT}:deduplicate_and_log_datasets": "dedupe",
    f"{_RL}:deduplicate_and_log_datasets": "dedupe",
    f"{_SFT}:save_preprocessed_dataset": "save",
    f"{_RL}:save_preprocessed_dataset": "save",
    f"{_SFT}:calculate_total_num_steps": "count steps",
}
"""Function, where it is called from, to the phase it is; time in an inner phase is not the outer's.
The length filter of preferences is what ``_load_split`` does beside its other phases."""

_TRAIN_PHASES = {
    "axolotl.train:setup_model_and_tokenizer": "model",
    "axolotl.train:setup_trainer": "trainer",
    "transformers.trainer:Trainer.train": "training",
}


class Ledger:
    """Seconds of the main thread by name, each moment under one name only."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self.marks: dict[str, dict[str, float]] = {}
        """What happened first when, with the seconds of every name until then."""
        self.spans: dict[str, tuple[float, float]] = {}
        """When each name first began and last ended, in seconds since the epoch."""
        self._clock = clock
        self._thread = threading.get_ident()
        self._names = ["rest"]
        self._since = clock()

    @contextmanager
    def under(self, name: str) -> Iterator[None]:
        """Time goes under this name, until it is left or another one is entered."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._charge()
        self._names.append(name)
        begun = self.spans[name][0] if name in self.spans else time.time()
        try:
            yield
        finally:
            self._charge()
            self._names.pop()
            self.spans[name] = (begun, time.time())

    @property
    def name(self) -> str:
        """Whose time it is."""
        return self._names[-1]

    def mark(self, name: str) -> None:
        """Notes the first time that something happens."""
        if name not in self.marks and threading.get_ident() == self._thread:
            self._charge()
            self.marks[name] = dict(self.seconds)

    def _charge(self) -> None:
        now = self._clock()
        self.seconds[self.name] = self.seconds.get(self.name, 0.0) + now - self._since
        self._since = now


def main(folder: str, module: str, *arguments: str) -> None:
    """Runs the module with everything watched, and writes the ledger whatever happens."""
    ledger, process = Ledger(), os.getpid()
    found: dict[str, Any] = {"compiling": 0.0, "waits": [], "batches": []}
    # The folder of this file is no place to look for modules.
    sys.path = [path for path in sys.path if path != str(Path(__file__).parent)]
    _watch_imports(ledger)
    _watch_compilation(ledger, found)
    is_train = module == "axolotl.cli.train"
    for target, phase in {**_PHASES, **(_TRAIN_PHASES if is_train else {})}.items():
        _replace(target, functools.partial(_as_phase, ledger, phase))
    _replace(f"{_SFT}:load_preprocessed_dataset", functools.partial(_marking, ledger, "loaded"))
    if is_train:
        _watch_training(ledger, found)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        if os.getpid() == process:
            ledger.mark("end")
            found |= {"marks": ledger.marks, "spans": ledger.spans, "patches": _patches()}
            text = json.dumps(found, default=str)
            Path(folder, f"ledger-{process}.json").write_text(text, encoding="utf-8")


def _watch_imports(ledger: Ledger) -> None:
    importlib.import_module = _as_phase(ledger, IMPORTS, importlib.import_module)
    original = builtins.__import__
    timed, modules = _as_phase(ledger, IMPORTS, original), sys.modules

    def watched(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        # Functions that import what is there already do so at every call. Names are looked for
        # without asking for them: a lazy module would import them.
        known = getattr(modules.get(name), "__dict__", ())
        has_all = not fromlist or all(item in known for item in fromlist)
        is_here = not level and name in modules and has_all
        return (original if is_here else timed)(name, globals, locals, fromlist, level)

    builtins.__import__ = watched


def _watch_compilation(ledger: Ledger, found: dict[str, Any]) -> None:
    """The main thread's under its name; that of all threads together beside it."""
    event = importlib.import_module("numba.core.event")
    threads = threading.local()

    class Watch(event.Listener):  # type: ignore[name-defined, misc]
        def on_start(self, _: Any) -> None:
            threads.depth = getattr(threads, "depth", 0) + 1
            if threads.depth == 1:
                threads.start = time.perf_counter()
                threads.phase = ledger.under(COMPILING)
                threads.phase.__enter__()

        def on_end(self, _: Any) -> None:
            threads.depth -= 1
            if threads.depth == 0:
                threads.phase.__exit__(None, None, None)
                found["compiling"] += time.perf_counter() - threads.start

    event.register("numba:compile", Watch())


def _watch_training(ledger: Ledger, found: dict[str, Any]) -> None:
    """Batches as the trainer gets them, how long it waited for each, and when it begins."""

    def get_batch_samples(original: Any) -> Any:
        @functools.wraps(original)
        def watched(*arguments: Any, **options: Any) -> Any:
            ledger.mark("first batch asked for")
            start = time.perf_counter()
            with ledger.under(WAITING):
                batches = original(*arguments, **options)
            found["waits"].append(time.perf_counter() - start)
            with ledger.under(WATCHING):
                content = hashlib.sha256()
                tensors = (item for batch in batches[0] for item in sorted(batch.items()))
                for name, values in tensors:
                    if hasattr(values, "numpy"):
                        content.update(f"{name} {tuple(values.shape)} {values.dtype} ".encode())
                        content.update(values.detach().cpu().contiguous().numpy().tobytes())
                found["batches"].append(content.hexdigest())
            return batches

        return watched

    callbacks = "transformers.trainer_callback:CallbackHandler"
    _replace("transformers.trainer:Trainer.get_batch_samples", get_batch_samples)
    for name, mark in (("on_step_begin", "first step"), ("on_train_end", "trained")):
        _replace(f"{callbacks}.{name}", functools.partial(_marking, ledger, mark))


def _replace(target: str, make: Callable[[Any], Any]) -> None:
    """Puts ``make(function)`` where a function is; another version may not have it."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for step in owners:
        owner = getattr(owner, step)
    if hasattr(owner, name):
        setattr(owner, name, make(getattr(owner, name)))


def _as_phase(ledger: Ledger, phase: str, function: Any) -> Any:
    @functools.wraps(function)
    def timed(*arguments: Any, **options: Any) -> Any:
        if ledger.name == phase:
            return function(*arguments, **options)
        with ledger.under(phase):
            return function(*arguments, **options)

    return timed


def _marking(ledger: Ledger, mark: str, function: Any) -> Any:
    @functools.wraps(function)
    def marked(*arguments: Any, **options: Any) -> Any:
        answer = function(*arguments, **options)
        ledger.mark(mark)
        return answer

    return marked


def _patches() -> list[dict[str, Any]]:
    """What our package says it did, where it is in this process."""
    package = sys.modules.get("fast_axolotl")
    if package is None:
        return []
    fields = ("name", "target", "state", "reason", "calls", "fallbacks")
    return [{key: getattr(item, key) for key in fields} for item in package.status().patches]


if __name__ == "__main__":
    main(*sys.argv[1:])
