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


def test_every_file_is_valid_yaml() -> None:
    assert all(isinstance(load(path), dict) for path in FILES)


def test_every_make_target_of_a_workflow_exists() -> None:
    for path in GITHUB.glob("workflows/*.yml"):
        # A choice between two targets names both in quotes.
        commands = re.findall(r"run: make (.*)", path.read_text())
        named = {
            target
            for text in commands
            for target in re.findall(r"'([a-z-]+)'", text) or text.split()
        }
        assert named, path
        assert named <= TARGETS, path


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
