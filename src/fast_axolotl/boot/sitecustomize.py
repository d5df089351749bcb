"""Python's start-up hook: it lies on the ``PYTHONPATH`` of what ``fast-axolotl run`` starts.

Axolotl's command line replaces itself by ``accelerate launch``, which starts more interpreters:
only the environment reaches them all. This file imports ``fast_axolotl`` when ``axolotl`` or
``trl`` is first looked for, and not before, so that every other Python program in the tree starts
as ever. Where a run is measured, it does so when something that trains is first looked for. Without
a switch in the environment it only runs the ``sitecustomize`` it stands in front of.

Standard library only, and for every Python from 3.6 on: the tree may hold older ones than this
package needs. Not seen by interpreters started with ``-S``, ``-E`` or ``-I``.
"""

import _imp
import _thread
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable


class _Finder:
    """Does something before one of some modules is found, once.

    It stays in ``sys.meta_path``: other threads may be walking through the list.
    """

    def __init__(self, names: "set[str]", action: "Callable[[], None]", otherwise: str) -> None:
        self.names, self.otherwise = names, otherwise
        self.action = action  # type: "Callable[[], None] | None"
        self.lock, self.is_done = _thread.RLock(), False

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if self.is_done or name not in self.names:
            return None
        # Finders are asked under the lock of all imports. To import under it would wait for ever
        # for a module that another thread is importing, and that thread for the lock.
        depth = 0
        try:
            while depth < 99:
                _imp.release_lock()
                depth += 1
        except (AttributeError, RuntimeError):
            pass
        try:
            # Another thread that looks for one of the names waits until all is in place.
            with self.lock:
                action, self.action = self.action, None
                if action is not None:
                    action()
        except Exception as error:  # noqa: BLE001
            # The program has to run where this package is missing or broken.
            print(f"fast-axolotl: {self.otherwise}: {error}", file=sys.stderr)
        finally:
            self.is_done = True
            for _ in range(depth):
                _imp.acquire_lock()
        return importlib.util.find_spec(name)


def _accelerate() -> None:
    import fast_axolotl  # noqa: F401


def _measure() -> None:
    error = ""
    try:
        from fast_axolotl.integrations.attach import attach

        attach()
    except Exception as reason:
        error = f"{type(reason).__name__}: {reason}"
        raise
    finally:
        # What reads the record learns which Python this was, and whether it can measure.
        folder = os.environ["FAST_AXOLOTL_MEASURE"]
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
        with open(os.path.join(folder, "interpreters.txt"), "a") as file:  # noqa: PTH118, PTH123
            file.write(f"{sys.executable}\t{error}\n")


def _run_the_next_one() -> None:
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    others = [folder for folder in sys.path if os.path.abspath(folder) != here]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("FAST_AXOLOTL_RUN") == "1":
    sys.meta_path.insert(0, _Finder({"axolotl", "trl"}, _accelerate, "nothing is accelerated"))
if os.environ.get("FAST_AXOLOTL_MEASURE"):
    _TRAINERS = {"torch", "transformers", "lightning", "pytorch_lightning"}
    sys.meta_path.insert(0, _Finder(_TRAINERS, _measure, "this process is not measured"))
_run_the_next_one()
