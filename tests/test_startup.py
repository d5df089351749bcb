"""A preprocess imports later what it does not use; everybody else imports as ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fast_axolotl
from fast_axolotl.axolotl.startup import is_preprocess

USER = """
import heavy as module
from heavy.inner import Base, double
from light import value
def use():
    import heavy.inner
    class Derived(Base): pass
    return [double(4), module.NAME, isinstance(heavy.inner.Base(), Base), Derived.__mro__[1],
            issubclass(Derived, Base), double.__name__, value]
"""
PROGRAM = """
import gc, sys, importlib.metadata
sys.orig_argv = ["python", "-m", "axolotl.cli.main", COMMAND]
from fast_axolotl.axolotl import startup
startup._DEFERRED["user"] = ("heavy",)
before = importlib.metadata.packages_distributions
print(startup.begin(), gc.get_threshold()[0] > 700, end=" ")
import user
print("heavy" in sys.modules, user.__builtins__ is vars(__builtins__), end=" ")
other = __import__("other")
print("heavy" in sys.modules, type(other.double).__name__)
print(user.use())
answers = [before(), *(importlib.metadata.packages_distributions() for _ in range(2))]
print(answers[0] == answers[1] == answers[2], answers[1] is answers[2])
"""


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("/bin/python /bin/axolotl preprocess a.yml", True),
        ("python -m axolotl.cli.main preprocess a.yml", True),
        ("python -m axolotl.cli.preprocess a.yml", True),
        ("python /x/axolotl/cli/preprocess.py a.yml", True),
        ("python /bin/axolotl train preprocess", False),
        ("python -m axolotl.cli.train a.yml", False),
        ("python train.py", False),
        ("python -c preprocess", False),
    ],
)
def test_only_preprocess_is_one(line: str, wanted: bool) -> None:
    assert is_preprocess(line.split()) is wanted


@pytest.mark.parametrize("command", ["preprocess", "train"])
def test_what_is_deferred_behaves_as_the_thing_itself(tmp_path: Path, command: str) -> None:
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").write_text("NAME = 'heavy'\n")
    inner = "class Base: pass\ndef double(x): return 2 * x\n"
    (tmp_path / "heavy" / "inner.py").write_text(inner)
    (tmp_path / "light.py").write_text("value = 1\n")
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "other.py").write_text("from heavy.inner import double\n")
    source = Path(fast_axolotl.__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("COMMAND", repr(command))],
        env={"PYTHONPATH": f"{tmp_path}:{source}", "FAST_AXOLOTL": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not found.returncode, found.stderr
    first, used, same = found.stdout.splitlines()
    is_deferred = command == "preprocess"
    # In the module itself nothing is loaded; one that imports it in its own right gets it.
    assert first == f"{is_deferred} {is_deferred} {not is_deferred} True True function"
    base = "<class 'heavy.inner.Base'>"
    assert used == f"[8, 'heavy', True, {base}, True, 'double', 1]"
    assert same == "True False"
