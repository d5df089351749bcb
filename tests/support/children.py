"""Child processes of tests: interpreters that find this package, and no variable of ours."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fast_axolotl

SOURCE = Path(fast_axolotl.__file__).parents[1]
"""The folder that holds the package under test."""
TESTS = Path(__file__).parents[1]
FAST_AXOLOTL = (sys.executable, "-m", "fast_axolotl")
NEEDS_TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install torch"
)


def clean_environment(*folders: Path, **variables: str) -> dict[str, str]:
    """The environment of this process without our variables, with folders to import from."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FAST_AXOLOTL")}
    path = os.pathsep.join(map(str, [*folders, SOURCE]))
    return {**inherited, "PYTHONPATH": path, **variables}


def run_child(
    *command: str,
    cwd: Path | None = None,
    environment: dict[str, str] | None = None,
    timeout: float = 120,
    start_new_session: bool = False,
    text: str = "",
) -> subprocess.CompletedProcess[str]:
    """A command to its end, which reads ``text``, and what it printed."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment() if environment is None else environment,
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        start_new_session=start_new_session,
    )


def run_ranks(*command: str, count: int, cwd: Path | None = None, **variables: str) -> list[str]:
    """So many ranks of one node, which must all succeed, and what each of them printed."""
    size = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen(
            command,
            cwd=cwd,
            env=clean_environment(TESTS, RANK=str(rank), LOCAL_RANK=str(rank), **size),
            **pipes,
        )
        for rank in range(count)
    ]
    printed, said = zip(*(rank.communicate(timeout=300) for rank in ranks), strict=True)
    assert [rank.returncode for rank in ranks] == [0] * count, "\n".join(said)[-4000:]
    return list(printed)


def run_python(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    """A program of one string."""
    return run_child(sys.executable, "-c", code, **options)  # type: ignore[arg-type]


def python_output(*arguments: str, source: Path = SOURCE, text: str = "", **variables: str) -> str:
    """What ``python ARGUMENTS`` prints, which must succeed."""
    path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    done = run_child(sys.executable, *arguments, environment=environment, text=text, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
