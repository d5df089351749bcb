"""A preprocess starts faster; everybody else starts as ever."""

from __future__ import annotations

import pytest

from fast_axolotl.axolotl.startup import is_preprocess
from support.children import python_output


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


def test_a_preprocess_collects_rarely_and_remembers_distributions() -> None:
    program = """
import gc, sys, importlib.metadata
from fast_axolotl.axolotl import startup
before = importlib.metadata.packages_distributions()
for command in ("train", "preprocess"):
    sys.orig_argv = ["python", "-m", "axolotl.cli.main", command]
    print(startup.begin(), gc.get_threshold()[0] > 700, end=" ")
answers = [importlib.metadata.packages_distributions() for _ in range(2)]
print(before == answers[0] == answers[1], answers[0] is answers[1])
"""
    assert python_output("-c", program).split() == [*["False"] * 2, *["True"] * 3, "False"]
