"""Python in a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fast_axolotl

SOURCE = Path(fast_axolotl.__file__).parents[1]
"""The folder that holds the package under test."""


def run_python(*arguments: str, source: Path = SOURCE, text: str = "", **environment: str) -> str:
    """What ``python ARGUMENTS`` prints, which must succeed."""
    path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *arguments],
        input=text,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
