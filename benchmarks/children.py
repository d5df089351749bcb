"""Processes of our own: their environment, what they print, and why they failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
_TIMEOUT_SECONDS = 1800
_ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b")
_OFFLINE = {
    "AXOLOTL_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "ACCELERATE_USE_CPU": "true",
}


class RunError(Exception):
    """A process ended badly; never leaves a race."""


def module_environment(**values: str) -> dict[str, str]:
    """With this folder and our package importable, wherever the process runs."""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    places = os.pathsep.join(map(str, [ROOT, ROOT / "src", *map(os.path.abspath, given)]))
    inherited = {name: text for name, text in os.environ.items() if name != "FAST_AXOLOTL"}
    return {**inherited, "PYTHONPATH": places, **values}


def offline_environment(folder: Path, cache: Path) -> dict[str, str]:
    """For Axolotl and trainers: offline, on the processor, with these caches."""
    caches = {"HF_HOME": str(folder / "huggingface"), "NUMBA_CACHE_DIR": str(cache)}
    return module_environment(**_OFFLINE, **caches)


def run_child(
    module: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout: float = _TIMEOUT_SECONDS,
) -> str:
    """What ``python -m MODULE ARGUMENTS…`` prints; raises ``RunError`` with its last line."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=env or module_environment(),
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"not done after {timeout:.0f} s") from None
    if done.returncode:
        raise RunError(last_error(done.stderr) or f"exit code {done.returncode}")
    return done.stdout


def last_error(text: str) -> str:
    """Why a process failed: the last line that looks like an error, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or [""])[-1][-200:]
