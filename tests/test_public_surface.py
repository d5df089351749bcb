"""The names, signatures and flags that users rely on: a change here is a change of the interface.

They stand in golden files. Where a change is meant, these are written anew, and it is a line in the
CHANGELOG.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import fast_axolotl
from fast_axolotl import errors
from fast_axolotl.errors import (
    AccessError,
    ConflictError,
    DataError,
    FastAxolotlError,
    MissingExtraError,
    MissingFileError,
    ResumeError,
    UsageError,
    mask_secrets,
    mask_words,
)
from fast_axolotl.reading import ReadStats, Rejection
from fast_axolotl.record.catalogue import FIGURES
from support.golden import GOLDEN, check

ROOT = Path(__file__).parents[1] / "src" / "fast_axolotl"


def parameters_of(function: Any) -> str:
    """Names, kinds and defaults, without annotations."""
    signature = inspect.signature(function)
    plain = [item.replace(annotation=item.empty) for item in signature.parameters.values()]
    text = str(inspect.Signature(plain))[1:-1].removeprefix("self").removeprefix(", ")
    return re.sub(r"<(built-in )?function \w+( at 0x\w+)?>", "<function>", text)


def members_of(kind: type) -> dict[str, str]:
    """The public methods of a class with their parameters, and its properties."""
    members = {name: getattr(kind, name) for name in sorted(vars(kind)) if not name.startswith("_")}
    return {
        name: "property" if isinstance(member, property) else parameters_of(member)
        for name, member in members.items()
    }


def test_the_public_names_their_signatures_and_fields_are_frozen() -> None:
    names = sorted(fast_axolotl.__all__)
    members = (fast_axolotl.Reader, fast_axolotl.Meter)
    status = type(fast_axolotl.status())
    records = (fast_axolotl.RunSummary, fast_axolotl.Verdict, ReadStats, Rejection, status)
    special = {kind.__name__ for kind in (*members, *records, fast_axolotl.FastAxolotlError)}
    public = {name: getattr(fast_axolotl, name) for name in names if name not in special}
    found: dict[str, Any] = {
        "names": names,
        "parameters": {name: parameters_of(one) for name, one in public.items() if callable(one)},
        "results": {
            name: inspect.signature(one).return_annotation
            for name, one in public.items()
            if callable(one) and not inspect.isclass(one)
        },
        "members": {kind.__name__: members_of(kind) for kind in members},
        "fields": {kind.__name__: sorted(inspect.signature(kind).parameters) for kind in records},
    }
    # Figures are read like fields.
    own = {*found["fields"]["RunSummary"], *FIGURES} - {"figures"}
    found["fields"]["RunSummary"] = sorted(own)
    check("surface.json", found)


def test_every_public_name_resolves_and_is_offered_by_dir_and_no_other_does() -> None:
    names = fast_axolotl.__all__
    assert [name for name in names if getattr(fast_axolotl, name, None) is None] == []
    assert set(names) <= set(dir(fast_axolotl))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fast_axolotl.no_such_name
    # Ray Train sends a training function with what it names.
    assert pickle.loads(pickle.dumps(fast_axolotl.measure)) is fast_axolotl.measure


def test_the_commands_and_their_flags_are_frozen() -> None:
    typer = importlib.import_module("typer.main")
    root = typer.get_command(importlib.import_module("fast_axolotl.cli").app)
    found = {}
    for name, command in {"": root, **root.commands}.items():
        options = [
            text
            for item in command.params
            for text in (item.opts if item.param_type_name == "option" else [item.name])
        ]
        found[name] = sorted(text for text in options if text != "--help")
    check("flags.json", found)


def test_the_console_script_is_the_one_that_is_declared() -> None:
    text = (ROOT.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'fast-axolotl = "fast_axolotl.cli:main"' in text
    assert callable(importlib.import_module("fast_axolotl.cli").main)


# The tree of exceptions: one root, the builtin bases that were promised, messages of one form.


ALL = [
    item
    for item in vars(errors).values()
    if isinstance(item, type) and issubclass(item, FastAxolotlError)
]
OF_DATA = [kind for kind in ALL if issubclass(kind, DataError)]


BASES: dict[type[Exception], set[type]] = {
    FastAxolotlError: {Exception},
    UsageError: {ValueError},
    MissingExtraError: {ImportError},
    DataError: {RuntimeError},
    MissingFileError: {DataError, FileNotFoundError},
    AccessError: {DataError, PermissionError},
    ConflictError: {DataError},
    ResumeError: {DataError, ValueError},
}


def test_the_tree_has_one_root_the_promised_bases_and_is_drawn() -> None:
    drawing = errors.__doc__ or ""
    assert set(ALL) == set(BASES)
    for kind, bases in BASES.items():
        assert bases | {FastAxolotlError} <= set(kind.__mro__)
        assert kind.__name__ in drawing
    assert all(drawing.index("DataError") <= drawing.index(kind.__name__) for kind in OF_DATA)


@pytest.mark.parametrize("kind", OF_DATA)
@pytest.mark.parametrize(
    ("path", "place", "text"),
    [
        ("ünï.jsonl", "line 7", "ünï.jsonl, line 7: broken; mend it"),
        ("ünï.jsonl", "", "ünï.jsonl: broken; mend it"),
        ("", "line 7", "line 7: broken; mend it"),
        ("", "", "broken; mend it"),
    ],
)
def test_a_data_error_prints_the_file_and_the_place_first_and_can_be_copied(
    kind: type[DataError], path: str, place: str, text: str
) -> None:
    error = kind("broken; mend it", path=path, place=place)
    for same in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(same) is kind
        assert str(same) == text
        assert (same.message, same.path, same.place) == ("broken; mend it", path, place)


@pytest.mark.parametrize("kind", [FastAxolotlError, UsageError, MissingExtraError])
def test_the_other_errors_survive_pickling(kind: type[Exception]) -> None:
    again = pickle.loads(pickle.dumps(kind("pass another")))
    assert (type(again), str(again)) == (kind, "pass another")


def test_secrets_are_masked_and_nothing_else() -> None:
    known = json.loads((GOLDEN / "expected" / "masked.json").read_text(encoding="utf-8"))
    check("masked.json", {text: mask_secrets(text) for text in known})
    for text, masked in known.items():
        assert mask_secrets(masked) == masked
        error = DataError(f"failed: {text}", path=text)
        assert error.message == f"failed: {masked}"
        assert str(error).endswith(f"failed: {masked}")
        assert error.path == (masked if "://" in text else text)


def test_a_secret_may_be_a_word_of_its_own() -> None:
    words = ["go", "--hf-token", "my token", "--api-key=a b", "HF_TOKEN=x y", "--token", "--last"]
    masked = ("go", "--hf-token", "***", "--api-key=***", "HF_TOKEN=***", "--token", "--last")
    assert mask_words(words) == masked


# The files around the code name what exists.


REPOSITORY = Path(__file__).parents[1]
GITHUB = REPOSITORY / ".github"
PYPROJECT = (REPOSITORY / "pyproject.toml").read_text()
TARGETS = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.M))


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
    yaml: Any = pytest.importorskip("yaml")
    workflow = yaml.safe_load((GITHUB / "workflows" / "test.yml").read_text())
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)", PYPROJECT)
    least, below = re.findall(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', PYPROJECT)[0]
    assert matrix["python"] == [f"3.{minor}" for minor in range(int(least), int(below))]
    assert f"3.{sys.version_info.minor}" in matrix["python"]
