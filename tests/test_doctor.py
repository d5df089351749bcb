"""``fast-axolotl doctor``: what is here, what is not and why, and what is broken."""

from __future__ import annotations

import importlib
import json
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from fast_axolotl._version import __version__
from fast_axolotl.cli import app
from support.axolotl import run_child

# The package has the command under this name, not the module.
doctor: Any = importlib.import_module("fast_axolotl.cli.doctor")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions that are installed; a test adds to them and takes away."""
    versions = {**dict.fromkeys(doctor._REQUIRED, "1"), "fast-axolotl": __version__, "plotly": "6"}
    versions |= {"jinja2": "3.1.6"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr(
        metadata, "distributions", lambda name: [SimpleNamespace(version=versions["fast-axolotl"])]
    )
    return versions


def test_it_shows_versions_and_gaps_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fast_axolotl.cli import app; app(['doctor'], standalone_mode=False); "
        "print([n for n in ('torch', 'numba', 'numpy', 'pyarrow', 'axolotl') if n in sys.modules])"
    )
    done = run_child(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert f"{__version__} machine python: {sys.version.split()[0]}" in " ".join(
        done.stdout.split()
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "nothing is broken" in done.stdout


def test_a_machine_without_a_gpu_or_procfs_says_so_with_the_cure(
    tmp_path: Path, installed: dict[str, str]
) -> None:
    found = doctor.find_gaps(tmp_path / "proc")
    assert found["GPU utilisation, memory and power"] == (
        "no NVIDIA driver",
        "Measure on the machine that has the GPU",
    )
    assert found["memory, disk and processor figures"][1] == "Measure on Linux"
    assert found["s3:// paths"] == ("s3fs is not installed", "pip install s3fs")
    assert "the HTML report" not in found
    (tmp_path / "proc" / "self").mkdir(parents=True)
    assert "memory, disk and processor figures" not in doctor.find_gaps(tmp_path / "proc")


def test_another_package_of_the_same_name_and_a_missing_dependency_are_problems(
    installed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(doctor.find_problems()) == []
    installed["fast-axolotl"] = "0.2.0"
    (problem,) = doctor.find_problems()
    assert problem.startswith("Another package has the same name")
    assert "those of 0.2.0" in problem
    installed["fast-axolotl"] = __version__
    del installed["numba"]
    (tmp_path / "_rust_ext.abi3.so").touch()
    monkeypatch.setattr(doctor, "_PACKAGE", tmp_path)
    other, missing = doctor.find_problems()
    assert other.startswith("Another package has the same name")
    assert missing == "numba is missing: pip install numba."


def test_a_problem_ends_with_1(
    installed: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    installed["fast-axolotl"] = "0.2.0"
    with pytest.raises(typer.Exit) as ended:
        doctor.doctor()
    assert ended.value.exit_code == 1
    assert "pip uninstall fast-axolotl" in capsys.readouterr().out
    assert app(["doctor", "--json"], standalone_mode=False) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["problems"]) == 1
    assert found["fast-axolotl"] == __version__
