"""The names, signatures and flags that users rely on: a change here is a change of the interface.

They stand in golden files. Where a change is meant, these are written anew, and it is a line in the
CHANGELOG.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import fast_axolotl
from fast_axolotl.reading import ReadStats, Rejection
from fast_axolotl.record.catalogue import FIGURES
from support.golden import check

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
    own = {*found["fields"]["RunSummary"], *FIGURES} - {"figures", "start_to_step_seconds"}
    found["fields"]["RunSummary"] = sorted(own)
    check("surface.json", found)


def test_every_public_name_resolves_and_is_offered_by_dir_and_no_other_does() -> None:
    names = fast_axolotl.__all__
    assert [name for name in names if getattr(fast_axolotl, name, None) is None] == []
    assert set(names) <= set(dir(fast_axolotl))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fast_axolotl.no_such_name


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.py")), ids=lambda file: file.stem)
def test_only_what_users_import_from_lists_its_names(file: Path) -> None:
    """A package, and the modules that users were shown. Elsewhere an underscore says it."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    lists = [
        ast.literal_eval(node.value)
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    doors = ("errors.py", "streaming.py", "integrations/axolotl.py")
    is_door = file.name == "__init__.py" or file.relative_to(ROOT).as_posix() in doors
    assert is_door or not lists
    for listed in lists:
        assert len(listed) == len(set(listed))


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
