"""``axolotl preprocess`` starts faster: what it never uses is imported when it is first used.

Most of a short preprocess is the import of packages for training. ``begin`` runs in that command
only, when ``axolotl`` is first looked for, and does three things. ``FAST_AXOLOTL_SKIP=imports``
leaves all of them out.

- ``_DEFERRED`` names modules and the packages that each imports for functions which a preprocess
  does not call. In such a module, and nowhere else, the import of such a package gives objects that
  stand for it: called, read, subclassed or compared with ``isinstance``, they import the real one
  and pass the request on. ``sys.modules`` has nothing of them, so whoever else imports the package
  gets it, and a module that is loaded already is used as it is. A package that is installed and
  fails to import says so at its first use, not before.
- The garbage collector looks at young objects every 100,000 of them, not every 700: while 5,000
  modules are imported, it runs 1,900 times and finds little. What waits is at most some megabytes.
- transformers and TRL both ask which distribution every installed package is of, reading all of
  their file lists. The answer is remembered.
"""

from __future__ import annotations

import builtins
import gc
import importlib.util
import re
import sys
from collections.abc import Sequence
from functools import cache, cached_property
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SWITCH_NAME = "imports"
"""By which ``FAST_AXOLOTL_SKIP`` and ``--skip`` know all of this."""

_DETECTION = ("deformable_detr", "for_object_detection", "grounding_dino", "lw_detr", "rf_detr")
_DEFERRED = {
    "accelerate.commands.config.sagemaker": ("boto3",),
    "peft.helpers": ("bitsandbytes",),
    "transformers.data.metrics": ("scipy", "sklearn"),
    "transformers.generation.candidate_generator": ("sklearn",),
    **{f"transformers.loss.loss_{name}": ("scipy",) for name in (*_DETECTION, "rt_detr")},
    "transformers.quantizers.quantizer_torchao": ("torchao",),
}
"""Module to the packages that it imports without need."""

_THRESHOLDS = (100_000, 20, 100)
_COMMAND = re.compile(
    r"(?:^|[\0/])(?:axolotl[./]cli[./]preprocess(?:\.py)?|"
    r"(?:axolotl|axolotl[./]cli[./]main(?:\.py)?)\0preprocess)(?:\0|$)"
)


def begin() -> bool:
    """Prepares the start of a preprocess; ``False`` where this process is none."""
    if not is_preprocess(sys.orig_argv):
        return False
    import importlib.metadata

    if gc.isenabled() and gc.get_threshold()[0] < _THRESHOLDS[0]:
        gc.set_threshold(*_THRESHOLDS)
    ask = cache(importlib.metadata.packages_distributions)
    importlib.metadata.packages_distributions = lambda: {
        name: list(found) for name, found in ask().items()
    }
    sys.meta_path.insert(0, _Finder())
    return True


def is_preprocess(arguments: Sequence[str]) -> bool:
    """Whether a command line is Axolotl's preprocess, started in any of its ways."""
    return _COMMAND.search("\0".join(arguments)) is not None


class _Deferred:
    """Stands for a module, or for something in it."""

    def __init__(self, module: str, name: str = "") -> None:
        self._module, self._name = module, name

    @cached_property
    def _real(self) -> Any:
        module = importlib.import_module(self._module)
        return getattr(module, self._name) if self._name else module

    def __getattr__(self, name: str) -> Any:
        if self._name or name.startswith("__") or self._module in sys.modules:
            return getattr(self._real, name)
        return _Deferred(self._module, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._real(*arguments, **options)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._real,)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._real)

    def __subclasscheck__(self, subclass: Any) -> bool:
        return issubclass(subclass, self._real)


class _Loader:
    """Runs a module with an ``__import__`` of its own, and is its own loader in all else."""

    def __init__(self, loader: Any, packages: Sequence[str]) -> None:
        self._loader, self._packages = loader, packages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        original, is_running = builtins.__import__, True

        def import_(
            name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
        ) -> Any:
            package = name.partition(".")[0]
            # ``import a.b`` gives a, not what is asked for.
            is_whole = bool(fromlist) or package == name
            is_named = package in self._packages and not level
            if is_running and is_named and is_whole and name not in sys.modules:
                return _Deferred(name)
            return original(name, globals, locals, fromlist, level)

        vars(module)["__builtins__"] = {**vars(builtins), "__import__": import_}
        try:
            self._loader.exec_module(module)
        finally:
            is_running = False
            vars(module)["__builtins__"] = vars(builtins)


class _Finder:
    """Finds the modules of ``_DEFERRED``, each once."""

    def __init__(self) -> None:
        self._waiting = dict(_DEFERRED)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        packages = self._waiting.pop(name, None)
        spec = None if packages is None else importlib.util.find_spec(name)
        if spec is not None and packages is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, packages)  # type: ignore[assignment]
        return spec
