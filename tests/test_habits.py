"""The files around the code hold: workflows, forms and hooks parse and name what exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
GITHUB = REPOSITORY / ".github"
FILES = [
    *sorted(GITHUB.rglob("*.yml")),
    REPOSITORY / ".pre-commit-config.yaml",
    REPOSITORY / "CITATION.cff",
]
PYPROJECT = (REPOSITORY / "pyproject.toml").read_text()
TARGETS = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.M)) | {
    "axolotl-matrix"
}


def load(path: Path) -> Any:
    yaml: Any = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text())


def runs(path: Path) -> list[str]:
    """The commands of every job of a workflow."""
    jobs = load(path)["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def test_every_file_is_valid_yaml() -> None:
    assert all(isinstance(load(path), dict) for path in FILES)


@pytest.mark.parametrize("path", sorted(GITHUB.glob("workflows/*.yml")), ids=lambda path: path.name)
def test_every_make_target_of_a_workflow_exists(path: Path) -> None:
    named = set()
    for command in runs(path):
        if command.startswith("make "):
            # A choice between two targets names both in quotes.
            named |= set(re.findall(r"'([a-z-]+)'", command)) or set(command.split()[1:])
    assert named <= TARGETS
    assert named


def test_the_matrix_has_every_python_that_the_package_names() -> None:
    matrix = load(GITHUB / "workflows" / "test.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    least, below = re.findall(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', PYPROJECT)[0]
    assert matrix["python"] == [f"3.{minor}" for minor in range(int(least), int(below))]
    assert f"3.{sys.version_info.minor}" in matrix["python"]


def test_the_forms_name_commands_that_exist_and_have_unique_fields() -> None:
    from fast_axolotl.cli import app

    known = {command.callback.__name__ for command in app.registered_commands if command.callback}
    for path in sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml")):
        fields = [item["id"] for item in load(path).get("body", ())]
        assert len(fields) == len(set(fields))
        assert set(re.findall(r"fast-axolotl ([a-z]+)", path.read_text())) <= known


def test_the_hooks_run_what_make_check_runs() -> None:
    (local,) = load(REPOSITORY / ".pre-commit-config.yaml")["repos"]
    entries = [hook["entry"] for hook in local["hooks"]]
    assert [entry.split()[0].rpartition("/")[2] for entry in entries] == ["ruff", "ruff", "mypy"]
