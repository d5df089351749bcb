"""The layers hold: who imports whom, how long things are, and what a start loads.

Imports are read with ``ast``, never executed. An import inside a function counts for the layers
like any other; one under ``TYPE_CHECKING`` does too, but makes no cycle and loads nothing.
Signatures and docstrings are declarations: the length of a function is that of its statements.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "fast_axolotl"
ROOT = Path(__file__).parents[1] / "src" / PACKAGE

MOST_FILE_LINES = 700
MOST_FUNCTION_LINES = 60

ROWS = {"reading", "dedupe", "packing", "streaming"}
"""The layers through which rows flow."""

EVERYTHING = ROWS | {
    "root",
    "_version",
    "errors",
    "system",
    "record",
    "kernels",
    "measure",
    "protocol",
    "report",
    "axolotl",
    "integrations",
    "bench",
}

LAYERS = {
    "_version": set(),
    "errors": set(),
    "system": set(),
    "boot": {"root", "integrations"},
    "record": {"errors"},
    "kernels": {"system"},
    "reading": {"errors", "system", "kernels"},
    "dedupe": {"errors", "system", "kernels", "reading"},
    "packing": {"errors", "kernels"},
    "streaming": {"errors", "reading", "root"},
    "measure": {"_version", "errors", "record", "system"},
    "protocol": {"errors", "system", "record", "measure"},
    "report": {"errors", "record"},
    "axolotl": ROWS | {"errors", "system", "kernels"},
    "integrations": EVERYTHING - {"protocol", "report", "bench"},
    "bench": ROWS | {"errors", "kernels", "record", "measure", "protocol", "integrations", "root"},
    "cli": EVERYTHING,
    "__main__": {"cli"},
    "root": EVERYTHING,
}
"""Which layer may import which, beside itself."""

PACKAGES = {
    "kernels": {"numpy", "numba", "llvmlite"},
    "reading": {"pyarrow", "numpy", "fsspec"},
    "dedupe": {"numpy", "pyarrow"},
    "packing": {"numpy"},
    "measure": {"psutil"},
    "report": {"rich"},
    "axolotl": {"numpy", "pyarrow"},
    "integrations": {"numpy", "pyarrow", "wrapt"},
    "bench": {"pyarrow"},
    "cli": {"typer"},
}
"""Packages that a layer may need to be imported at all."""

PACKAGES_ON_DEMAND = {
    "reading": {"torch"},
    "dedupe": {"torch"},
    "packing": {"pyarrow", "torch"},
    "measure": {"pynvml", "torch"},
    "system": {"psutil"},
    "report": {"jinja2", "plotly"},
    "axolotl": {"axolotl", "datasets", "torch", "transformers", "wrapt"},
    "integrations": {
        "axolotl",
        "datasets",
        "lightning",
        "pydantic",
        "pytorch_lightning",
        "torch",
        "torchdata",
        "transformers",
    },
    "bench": {
        "datasets",
        "duckdb",
        "numpy",
        "polars",
        "psutil",
        "pyarrow",
        "torch",
        "transformers",
    },
}
"""Packages that a layer may import inside a function or a ``try``: extras, hosts and peers."""

HEAVY = ("numpy", "numba", "pyarrow", "torch")


@dataclass(frozen=True)
class Import:
    """One imported module."""

    module: str
    names: tuple[str, ...]
    is_eager: bool
    """Whether it happens when the importing module is imported, and cannot fail quietly."""


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "root"


def imports_of(tree: ast.Module) -> Iterator[Import]:
    yield from _imports(tree.body, is_eager=True)


def _imports(body: list[ast.stmt], *, is_eager: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), is_eager)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = tuple(alias.name for alias in node.names)
            yield Import(node.module or "", names, is_eager)
        else:
            runs_now = isinstance(node, ast.ClassDef | ast.With | ast.For | ast.While)
            runs_now |= isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test)
            yield from _imports(_inner(node), is_eager=is_eager and runs_now)


def _inner(node: ast.AST) -> list[ast.stmt]:
    return [
        statement
        for child in ast.iter_child_nodes(node)
        for statement in ([child] if isinstance(child, ast.stmt) else _inner(child))
    ]


def own_targets(item: Import) -> list[str]:
    """The modules of ours that an import means: ``from fast_axolotl.bench import tally`` too."""
    if item.module.split(".")[0] != PACKAGE:
        return []
    inside = [f"{item.module}.{name}" for name in item.names]
    found = [name for name in inside if name in modules()]
    return found if len(found) == len(item.names) and found else [item.module, *found]


def test_every_module_belongs_to_a_layer() -> None:
    assert {layer_of(name) for name in modules()} <= set(LAYERS)


def test_every_layer_imports_only_what_the_table_allows() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, tree in modules().items()
        for item in imports_of(tree)
        for target in own_targets(item)
        if layer_of(target) != layer_of(name) and layer_of(target) not in LAYERS[layer_of(name)]
    ]
    assert not wrong


def test_every_layer_uses_only_its_packages() -> None:
    wrong = []
    for name, tree in modules().items():
        layer = layer_of(name)
        needed = PACKAGES.get(layer, set())
        for item in imports_of(tree):
            package = item.module.split(".")[0]
            if package in sys.stdlib_module_names or package == PACKAGE:
                continue
            allowed = needed if item.is_eager else needed | PACKAGES_ON_DEMAND.get(layer, set())
            if package not in allowed:
                wrong.append(f"{name} imports {package}{'' if item.is_eager else ' on demand'}")
    assert not wrong


def test_importing_the_package_itself_reaches_no_layer_of_rows() -> None:
    eager = {
        layer_of(target)
        for item in imports_of(modules()[PACKAGE])
        if item.is_eager
        for target in own_targets(item)
    }
    assert eager == {"_version", "axolotl"}


def test_there_are_no_import_cycles() -> None:
    edges = {
        name: sorted(
            target
            for item in imports_of(tree)
            if item.is_eager
            for target in own_targets(item)
            if target != name
        )
        for name, tree in modules().items()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in edges[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_no_file_is_too_long() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert {name: count for name, count in lengths.items() if count > MOST_FILE_LINES} == {}


def test_no_function_is_too_long() -> None:
    long = {
        f"{name}.{node.name}": count
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (count := _statement_lines(node)) > MOST_FUNCTION_LINES
    }
    assert long == {}


def _statement_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_folders_are_at_most_two_levels_deep() -> None:
    assert {name for name in modules() if name.count(".") > 2} == set()


@pytest.mark.parametrize(
    "code",
    [
        "import fast_axolotl",
        "import fast_axolotl; dir(fast_axolotl); fast_axolotl.get_version()",
        "import fast_axolotl.errors",
        "import fast_axolotl.cli",
        "import contextlib, io, sys\n"
        "sys.argv = ['fast-axolotl', '--help']\n"
        "from fast_axolotl.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):\n"
        "    main()\n"
        "assert 'read' in text.getvalue(), text.getvalue()",
    ],
)
def test_a_start_loads_nothing_heavy(code: str) -> None:
    tail = f"\nimport sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code + tail], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_the_command_line_starts_as_a_module_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fast_axolotl", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "fast-axolotl"), done.stderr
