"""The reference pages of the documentation, made from the code.

`make docs` calls this at every build, so nothing generated is committed. ``python
tools/reference.py FOLDER`` writes the same pages as Markdown files.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer.main

from fast_axolotl.cli import app

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src" / "fast_axolotl"

INTEGRATIONS = (
    "fast_axolotl.integrations.torch.TorchDataset",
    "fast_axolotl.integrations.torch_meter.watch_torch",
    "fast_axolotl.integrations.transformers_meter.MeterCallback",
    "fast_axolotl.integrations.lightning_meter.MeterCallback",
    "fast_axolotl.integrations.axolotl.FastAxolotlPlugin",
)
"""Public names that need a host library, which is why they are not in ``fast_axolotl`` itself."""


def pages() -> dict[str, str]:
    """Every generated page by its path in the documentation."""
    return {
        "reference/cli.md": command_line(),
        "reference/api.md": python_names(),
    }


# The command line


def command_line() -> str:
    """All commands with their arguments, options, defaults and examples."""
    root: Any = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "Every command, as `fast-axolotl COMMAND --help` prints it. Exit codes: 0 is success, 1 is "
        "a problem in the data or in the run, 2 is a mistake in the command line. [`compare`]"
        "(../protocol.md) has two more, for CI. `run` and `measure` end with the exit code of the "
        "command that they start.",
        "",
        "| command | what it does |",
        "| --- | --- |",
    ]
    commands = list(walk_commands(root, ""))
    for name, command in commands:
        summary = _cell(inspect.cleandoc(command.help or "").split("\n\n")[0])
        lines.append(f"| [`{name}`](#{_anchor(name)}) | {summary} |")
    for name, command in commands:
        lines += ["", *_describe(name, command)]
    return "\n".join(lines) + "\n"


def walk_commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from walk_commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _describe(name: str, command: Any) -> list[str]:
    shown = [param for param in command.params if not getattr(param, "hidden", False)]
    arguments = [param for param in shown if param.param_type_name == "argument"]
    options = [param for param in shown if param.param_type_name == "option"]
    # Releases of typer describe types and arguments differently: the annotations are the source.
    kinds = get_type_hints(command.callback, include_extras=True)
    words = [f"fast-axolotl {name}", "[OPTIONS]" if options else ""]
    words += [_place(param) for param in arguments]
    text = _ticks(inspect.cleandoc(command.help or ""))
    lines = [f"## {name} {{ #{_anchor(name)} }}", "", text, ""]
    lines += ["```text", " ".join(filter(None, words)), "```"]
    if arguments:
        lines += ["", "| argument | |", "| --- | --- |"]
        helps = [get_args(kinds[param.name])[1].help for param in arguments]
        pairs = zip(arguments, helps, strict=True)
        lines += [f"| `{param.name.upper()}` | {_cell(text)} |" for param, text in pairs]
    if options:
        lines += ["", "| option | default | |", "| --- | --- | --- |"]
        lines += [_option(param, get_args(kinds[param.name])[0]) for param in options]
    if command.epilog:
        examples = [line.strip() for line in command.epilog.splitlines() if line.strip()]
        lines += ["", "```bash", *examples[1:], "```"]
    return lines


def _place(argument: Any) -> str:
    text = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return text if argument.required else f"[{text}]"


def _option(param: Any, kind: Any) -> str:
    """One row of the table of options."""
    names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    kinds = [kind for kind in (get_args(kind) or (kind,)) if kind is not type(None)]
    if get_origin(kind) is Literal:
        names += " `" + "|".join(map(str, kinds)) + "`"
    elif kinds != [bool]:
        names += f" `{param.metavar or _PLACEHOLDERS.get(kinds[0], 'TEXT')}`"
    default = param.default
    has_none = kinds == [bool] or default in (None, "", (), []) or callable(default)
    return f"| {names} | {'' if has_none else f'`{default}`'} | {_cell(param.help)} |"


_PLACEHOLDERS = {int: "INTEGER", float: "NUMBER", Path: "PATH"}


# The Python names


def python_names() -> str:
    """The public names with their signatures and docstrings, read from the source."""
    names = ast.literal_eval(_assigned(SOURCE / "__init__.py", "__all__"))
    homes = ast.literal_eval(_assigned(SOURCE / "__init__.py", "_HOMES"))
    lines = [
        "# Python",
        "",
        "Everything in `fast_axolotl`, and the classes for host libraries below "
        "`fast_axolotl.integrations`. Names with *Rust* in them come from the earlier package of "
        "this name and keep working; see [For users of fast-axolotl 0.2.0](../earlier-package.md).",
    ]
    for name in sorted(names, key=str.lower):
        home = SOURCE / homes.get(name, "measure" if name == "measure" else "").replace(".", "/")
        found = _find(home, name)
        if found:
            lines += ["", *_document(f"fast_axolotl.{name}", *found)]
    for full in INTEGRATIONS:
        module, _, name = full.rpartition(".")
        found = _find(SOURCE.parent / module.replace(".", "/"), name)
        assert found, full
        lines += ["", *_document(full, *found)]
    return "\n".join(lines) + "\n"


def _assigned(path: Path, name: str) -> ast.expr:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node.value
    raise LookupError(f"{path} assigns no {name}")


Definition = ast.FunctionDef | ast.ClassDef


def _find(module: Path, name: str) -> tuple[Definition, Path] | None:
    """A function or class where it is written, followed through imports; ``None`` for values."""
    path = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    imports = []
    definitions = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            if not _is_overload(node):
                definitions.append(node)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            if isinstance(node.value, ast.Name):  # another name for what is written there
                return _find(module, node.value.id)
        elif isinstance(node, ast.ImportFrom):
            imports += [
                (node.module or "", x.name) for x in node.names if name in (x.asname, x.name)
            ]
    if definitions:
        return definitions[0], path
    for source, original in imports:
        if source.startswith("fast_axolotl"):
            return _find(SOURCE.parent / source.replace(".", "/"), original)
    return None


def _document(full: str, node: Definition, path: Path) -> list[str]:
    title = full.rpartition(".")[2] if full.count(".") == 1 else full
    lines = [f"## `{title}` {{ #{full} }}", ""]
    if isinstance(node, ast.FunctionDef):
        return [*lines, *_signature(node), "", _docstring(node), *_origin(path)]
    functions = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    made = next((item for item in functions if item.name == "__init__"), None)
    if made:
        lines += [*_signature(made, name=node.name, of_class=True), ""]
    lines += [_docstring(node), *_fields(node), *_origin(path)]
    for item in functions:
        if not item.name.startswith("_") and not _is_overload(item):
            own = not any(ast.unparse(mark) == "staticmethod" for mark in item.decorator_list)
            lines += ["", f"### `{node.name}.{item.name}` {{ #{full}.{item.name} }}", ""]
            if not any(ast.unparse(mark).endswith("property") for mark in item.decorator_list):
                lines += [*_signature(item, of_class=own), ""]
            lines.append(_docstring(item))
    return lines


def _is_overload(node: Definition) -> bool:
    return any(ast.unparse(mark).endswith("overload") for mark in node.decorator_list)


def _signature(node: ast.FunctionDef, name: str = "", *, of_class: bool = False) -> list[str]:
    """One parameter a line where one line would be too long."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults += arguments.defaults
    parts = [_parameter(*pair) for pair in zip(positional, defaults, strict=True)]
    parts = parts[1:] if of_class else parts
    if arguments.vararg:
        parts.append(f"*{_parameter(arguments.vararg)}")
    elif arguments.kwonlyargs:
        parts.append("*")
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parts += [_parameter(*pair) for pair in pairs]
    if arguments.kwarg:
        parts.append(f"**{_parameter(arguments.kwarg)}")
    result = f" -> {ast.unparse(node.returns)}" if node.returns and not name else ""
    line = f"{name or node.name}({', '.join(parts)}){result}"
    if len(line) > 90:
        inner = "".join(f"    {part},\n" for part in parts)
        line = f"{name or node.name}(\n{inner}){result}"
    return ["```py", line, "```"]


def _parameter(argument: ast.arg, default: ast.expr | None = None) -> str:
    kind = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    value = f"{' = ' if kind else '='}{ast.unparse(default)}" if default is not None else ""
    return f"{argument.arg}{kind}{value}"


def _docstring(node: Definition) -> str:
    """Markdown of a docstring: sections of parameters become lists, examples become code."""
    lines: list[str] = []
    is_list = False
    for line in _ticks(ast.get_docstring(node) or "").splitlines():
        if line in ("Args:", "Returns:", "Raises:", "Yields:"):
            is_list = line in ("Args:", "Raises:")
            lines += [f"**{line.removesuffix(':').replace('Args', 'Parameters')}**", ""]
        elif is_list and (found := re.match(r"    (\*{0,2}\w+): (.*)", line)):
            lines.append(f"- `{found[1]}`: {found[2]}")
        else:
            is_list = is_list and (line.startswith("    ") or not line)
            lines.append(line.strip() if is_list else line)
    text = "\n".join(lines)
    return re.sub(r"(?m)((?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)+)", r"```pycon\n\1\n```\n", text)


def _ticks(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _fields(node: ast.ClassDef) -> list[str]:
    """The fields of a dataclass, with the text below each."""
    rows = []
    for item, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and not ast.unparse(item.target).startswith("_"):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = _ticks(str(after.value.value))
            kind = ast.unparse(item.annotation)
            rows.append(f"| `{ast.unparse(item.target)}` | `{kind}` | {_cell(text)} |")
    return ["", "| field | type | |", "| --- | --- | --- |", *rows] if rows else []


def _origin(path: Path) -> list[str]:
    return ["", f"<small>`{path.relative_to(SOURCE.parent).as_posix()}`</small>"]


def _cell(text: str | None) -> str:
    """Text that stays inside one cell of a table."""
    return " ".join((text or "").split()).replace("|", "\\|").replace("<", "&lt;")


def _anchor(name: str) -> str:
    return name.replace(" ", "-")


if __name__ == "__main__":
    for name, text in pages().items():
        target = Path(sys.argv[1]) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
