"""The house stands: who imports whom, how large each part is, and what a start loads.

Imports are read with ``ast``, never executed. An import inside a function, a ``try`` or under
``TYPE_CHECKING`` counts for layers and cycles like any other.

The numbers are ratchets: they follow the tree down. Raising one needs a reason in the commit.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tools.architecture import PAGE, update

PACKAGE = "fast_axolotl"
REPOSITORY = Path(__file__).parents[1]
ROOT = REPOSITORY / "src" / PACKAGE

MOST_LINES = {
    "__init__": 135,
    "__main__": 6,
    "_version": 18,
    "axolotl": 5_207,
    "boot": 97,
    "cli": 2_758,
    "cluster": 1_790,
    "dedupe": 1_311,
    "errors": 117,
    "integrations": 2_677,
    "kernels": 869,
    "measure": 6_467,
    "packing": 856,
    "plan": 1_894,
    "protocol": 2_045,
    "reading": 5_010,
    "record": 2_193,
    "report": 2_273,
    "streaming": 94,
    "system": 270,
}
"""Lines of each package, blank ones and comments included."""
MOST_LINES_IN_ALL = 36_087
MOST_FILES = 166
MOST_USED_ONCE = 0.10
"""Share of functions that are private and used at one place only."""
MOST_TEST_LINES = 27_000

ROWS = {"reading", "streaming", "dedupe", "packing"}
"""The layers through which rows flow."""

LAYERS = {
    "_version": set(),
    "errors": set(),
    "system": set(),
    "kernels": {"system"},
    "reading": {"errors", "system", "kernels"},
    "dedupe": {"errors", "system", "kernels", "reading"},
    "packing": {"errors", "system", "kernels"},
    "streaming": {"_version", "errors", "reading"},
    "record": {"errors"},
    "measure": {"_version", "errors", "system", "record"},
    "protocol": {"errors", "system", "record", "measure"},
    "report": {"errors", "record"},
    "axolotl": ROWS | {"errors", "system", "kernels"},
    "integrations": ROWS | {"root", "errors", "system", "axolotl", "record", "measure", "plan"},
    "plan": {"errors", "record"},
    "cluster": ROWS | {"_version", "errors", "system", "kernels", "axolotl"},
    "boot": {"root", "integrations"},
    "root": ROWS | {"_version", "errors", "axolotl", "integrations", "measure", "record"},
    "cli": ROWS
    | {"root", "errors", "system", "kernels", "record", "measure", "protocol", "report"}
    | {"axolotl", "integrations", "cluster", "plan"},
    "__main__": {"cli"},
}
"""Which layer may import which, beside itself."""

PACKAGES = {
    "kernels": {"numpy", "numba", "llvmlite"},
    "reading": {"pyarrow", "numpy", "fsspec"},
    "dedupe": {"numpy", "pyarrow"},
    "packing": {"numpy", "pyarrow"},
    "measure": {"psutil"},
    "record": {"msgspec"},
    "report": {"rich"},
    "axolotl": {"numpy", "pyarrow", "wrapt"},
    "integrations": {"numpy", "pyarrow", "wrapt"},
    "cluster": {"numpy", "pyarrow", "fsspec"},
    "plan": {"msgspec", "numpy"},
    "cli": {"typer"},
}
"""Packages that a layer may need to be imported at all."""

PACKAGES_ON_DEMAND = {
    "system": {"psutil"},
    "record": {"numpy"},
    "reading": {"aiohttp", "isal", "torch"},
    "dedupe": {"torch"},
    "packing": {"torch"},
    "measure": {"numpy", "pynvml", "torch"},
    "report": {"jinja2", "plotly"},
    "axolotl": {"axolotl", "datasets", "torch", "transformers"},
    "cluster": {"axolotl", "datasets", "psutil", "ray", "transformers", "yaml"},
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
    "plan": {"torch", "transformers"},
    "cli": {"axolotl", "datasets", "numpy", "pandas", "psutil", "pyarrow", "torch"},
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
        name: sorted({t for item in imports_of(tree) for t in own_targets(item)} - {name})
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


def lines_of(folder: Path) -> dict[Path, int]:
    return {path: len(path.read_text().splitlines()) for path in sorted(folder.rglob("*.py"))}


def test_every_package_keeps_to_its_budget_of_lines() -> None:
    sizes: Counter[str] = Counter()
    for path, count in lines_of(ROOT).items():
        sizes[path.relative_to(ROOT).parts[0].removesuffix(".py")] += count
    for template in ROOT.rglob("*.html"):
        sizes[template.relative_to(ROOT).parts[0]] += len(template.read_text().splitlines())
    assert {
        name: (n, MOST_LINES.get(name)) for name, n in sizes.items() if n > MOST_LINES.get(name, 0)
    } == {}
    assert sum(sizes.values()) <= MOST_LINES_IN_ALL
    assert len(lines_of(ROOT)) <= MOST_FILES


def test_the_tests_keep_to_their_budget_of_lines() -> None:
    assert sum(lines_of(Path(__file__).parent).values()) <= MOST_TEST_LINES


def test_few_functions_are_private_helpers_used_once() -> None:
    """A helper that only shortens its caller stays in its caller."""
    texts = [path.read_text() for path in ROOT.rglob("*.py")]
    words = Counter(word for text in texts for word in re.findall(r"\b_[a-z]\w*\b", text))
    functions = [
        node.name
        for tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    once = [name for name in functions if name[:2] != "__" and name[0] == "_" and words[name] == 2]
    assert len(once) / len(functions) <= MOST_USED_ONCE


def test_the_page_on_architecture_has_a_line_for_every_file() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert update(page) == page, "run python tools/architecture.py"
    named = set(re.findall(r"^- `([\w/.]+)`", page, flags=re.MULTILINE))
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")}
    assert {name for name in files if not name.endswith("__init__.py")} <= named


def test_the_page_on_architecture_has_the_table_of_layers() -> None:
    """Every package is in it; names in its text are packages and files that exist."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"\w+", row)}
    assert named == set(LAYERS) - {"_version", "__main__", "root", "boot", "streaming"}
    own = [
        path for place in ("src", "tests", "tools") for path in (REPOSITORY / place).rglob("*.py")
    ]
    mentioned = set(re.findall(r"`(?:\w+/)*(\w+\.py)`", text))
    assert mentioned <= {path.name for path in own}


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
