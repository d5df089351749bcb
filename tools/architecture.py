"""Writes the tree in docs/architecture.md: every file with the first sentence of its docstring.

``python tools/architecture.py`` brings the page up to date; a test says when that is needed.
"""

from __future__ import annotations

import ast
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "architecture.md"
SOURCE = REPOSITORY / "src" / "fast_axolotl"
BEGIN, END = "<!-- tree -->\n", "<!-- /tree -->\n"

OTHERS = {"report/assets/report.html": "The template of the HTML report."}
"""Files that have no docstring."""


def describe(path: Path) -> str:
    """The first sentence of a file, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].replace("``", "`").split())


def make_tree() -> str:
    """The files beside the packages, then every package with its files."""
    lines = []
    packages = sorted(path.parent for path in SOURCE.glob("*/__init__.py"))
    for folder in (SOURCE, *packages):
        door = folder / "__init__.py"
        title = "The package itself" if folder == SOURCE else f"`{folder.name}/`"
        lines += [f"**{title}**: {describe(door)}", ""]
        own = [path for path in folder.glob("*.py") if path != door]
        own += SOURCE.glob("boot/*.py") if folder == SOURCE else []
        names = {path.relative_to(SOURCE).as_posix(): describe(path) for path in own}
        names |= {name: text for name, text in OTHERS.items() if name.startswith(f"{folder.name}/")}
        lines += [f"- `{name}`: {text}" for name, text in sorted(names.items())]
        lines.append("")
    return "\n".join(lines)


def update(page: str) -> str:
    """The page with the tree of today."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{make_tree()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(update(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
