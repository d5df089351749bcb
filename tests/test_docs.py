"""README and documentation hold: their code runs, their commands parse, their links lead somewhere.

- Python blocks run, all of one page in one namespace, in a folder with the files that they name.
  A script with a `__main__` runs in a process of its own, measured.
- Commands of ours must parse; those that only read small files or records run, too. Targets of
  `make`, modules, scripts and extras must exist.
- YAML must parse, and its keys must be Axolotl's or ours.
- Relative links lead to files and headings that exist.

A block that cannot run has the reason in a comment above it: ``<!-- not run: needs a GPU -->``. It
must parse all the same. ``<!-- answer: RUN -->`` above a block means that it shows the verdict of
that record; ``FAST_AXOLOTL_UPDATE_GOLDEN=1`` writes it again.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import posixpath
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import typer.main

import fast_axolotl
from fast_axolotl import cli
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import read_run
from fast_axolotl.report.runs import show_short_summary
from support.axolotl import run_child
from support.children import NEEDS_TORCH
from support.files import COMPRESSIONS, jsonl_bytes, parquet_bytes, squeeze
from support.golden import GOLDEN, command, plain, terminal
from support.reports import report_run
from tools import reference, site

REPOSITORY = Path(__file__).parents[1]
README = REPOSITORY / "README.md"
PAGES = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8")
    for path in (README, *sorted((REPOSITORY / "docs").rglob("*.md")))
}
BESIDE = ("BENCHMARK.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
LANGUAGES = {"bash", "console", "python", "yaml", "text", "json", "toml", "html", "slurm", ""}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    note: str
    """What the comment above it says."""

    @property
    def is_run(self) -> bool:
        return not self.note.startswith("not run:")

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


FENCE = re.compile(r"^([ ]*)```(\w*)[^\n]*\n(.*?)^\1```[ ]*$", re.M | re.S)
COMMENT = re.compile(r"<!-- (.*?) -->\s*\Z", re.S)


def find_blocks(page: str, text: str) -> Iterator[Block]:
    for found in FENCE.finditer(text):
        indent, language, body = found.groups()
        body = re.sub(rf"^{indent}", "", body, flags=re.M)
        note = COMMENT.search(text[: found.start()])
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page, line, language, body, note[1] if note else "")


BLOCKS = [block for page, text in PAGES.items() for block in find_blocks(page, text)]


def blocks_of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def test_every_block_says_its_language_and_why_it_is_not_run() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES
    for block in BLOCKS:
        if block.language in ("text", ""):
            is_command = re.search(r"^(\$ )?(fast-axolotl|make) ", block.text, re.M)
            assert not is_command, f"{block}: bash?"
        if not block.is_run:
            assert len(block.note.removeprefix("not run:").split()) >= 3, f"{block}: no reason"


# Commands


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of every command, without comments, variables before it, and pipes."""
    text = block.text.replace("\\\n", " ")
    lines = text.splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    for line in lines:
        if not re.match(r"\w+=[$(]", line):  # a variable of a longer script
            yield from split_commands(line)


def split_commands(line: str) -> Iterator[list[str]]:
    reader = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    reader.whitespace_split = True
    words: list[str] = []
    for word in [*reader, ";"]:
        if word in (";", "&&", "||", "|", "&"):
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield words
            words = []
        else:
            words.append(word)


@cache
def our_commands() -> dict[str, Any]:
    return dict(reference.walk_commands(typer.main.get_command(cli.app), ""))


ROOT_OPTIONS = {"--help", "--version", "--install-completion", "--show-completion"}


def parse(words: list[str]) -> None:
    if words[0].startswith("--"):
        assert set(words) <= ROOT_OPTIONS, words
        return
    name, *rest = words
    our_commands()[name].make_context(name, list(rest))
    if name in ("run", "measure"):  # they take every option for one of the command that they run
        ours = rest[: rest.index("--")] if "--" in rest else rest[:1]
        assert unknown_options(name, ours) == set(), words
        check_words(rest[len(ours) + ("--" in rest) :])


def unknown_options(name: str, words: list[str]) -> set[str]:
    known = {option for param in our_commands()[name].params for option in param.opts}
    return {word.split("=")[0] for word in words if word.startswith("--")} - known - {"--help"}


MAKEFILE = (REPOSITORY / "Makefile").read_text(encoding="utf-8")


def check_words(words: list[str]) -> None:
    program, rest = words[0], words[1:]
    if program == "fast-axolotl":
        parse(rest)
    elif program == "make":
        for target in rest:
            if "=" not in target:
                assert re.search(rf"\b{re.escape(target)}\b", MAKEFILE), f"make {target}?"
    elif rest[:1] == ["-m"]:
        if rest[1].startswith(("benchmarks", "fast_axolotl", "tools")):
            assert importlib.util.find_spec(rest[1]), words
    elif program == "python" and rest[:1] and rest[0].startswith(("tools/", "benchmarks/")):
        assert (REPOSITORY / rest[0]).exists(), words
    elif "fast-axolotl" in rest and not {"pip", "pipx", "uv"} & set(words):
        check_words(rest[rest.index("fast-axolotl") :])


def test_what_is_installed_is_ours_with_extras_that_exist() -> None:
    """The package of our name on PyPI is another one."""
    toml = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    text = "\n".join(block.text for block in blocks_of("bash", "console"))
    assert not re.search(r"install '?fast-axolotl\b", text)
    for extras in re.findall(r"install .*\.\[([\w,-]+)\]", text):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", toml, re.M), f"extra {extra}?"


@pytest.mark.parametrize("block", blocks_of("bash", "console"), ids=str)
def test_commands_parse_and_cheap_ones_run(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in commands_of(block):
        lay_out_files(" ".join(words))
        if block.is_run:
            check_words(words)
        elif words[0] == "fast-axolotl":
            parse(words[1:])
        if block.is_run and can_run(words):
            answer = command(*words[1:])
            assert answer.code in EXPECTED.get(words[1], {0}), f"{shlex.join(words)}\n{answer.err}"


CHEAP = {"read", "dedupe", "show", "compare", "report", "status", "plan", "doctor"}
EXPECTED = {"compare": {0, 3, 4}}
"""A limit that is broken, or that one run cannot check, is an answer, too."""


def can_run(words: list[str]) -> bool:
    is_ours = words[0] == "fast-axolotl" and words[1] in CHEAP
    return is_ours and not set(words) & {">", "<", "--engine"} and "://" not in " ".join(words)


FILES = re.compile(r"[\w./*-]+\.(?:jsonl|parquet)(?:\.(?:zst|gz))?\b")
WRITTEN = re.compile(r"(?:-o|--output|--report|--html|--png)[ =](\S+)")
RECORDS = {"show", "compare", "report", "plan", "watch"}


def make_rows(count: int = 64) -> list[dict[str, Any]]:
    return [
        {
            "messages": [{"role": "user", "content": f"question {number % 50}"}],
            "text": f"text {number % 50}",
            "prompt": f"prompt {number % 50}",
            "input_ids": list(range(number % 7 + 1)),
            "source": "web",
        }
        for number in range(count)
    ]


def lay_out_files(text: str) -> None:
    """The files, folders and records that a command or a block of code names, here."""
    written = {path.rstrip("/") for path in WRITTEN.findall(text)}
    for path in written:
        Path(path).unlink(missing_ok=True)
    for name in FILES.findall(text):
        if name not in written and not name.startswith("/"):
            write_rows(Path(name.replace("*", "part-0")))
    for folder in re.findall(r"(?<![\w./-])((?:data|chat|code|maths))/(?![\w*])", text):
        if not Path(folder).exists():
            write_rows(Path(folder, "train.jsonl"))
    words = text.split()
    if words[:1] == ["fast-axolotl"] and words[1] in RECORDS:
        lay_out_records(words[2:], written)
    if "config.yml" in text:
        Path("config.yml").write_text("base_model: model\n", encoding="utf-8")
    if "config.json" in text:
        shape = '{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, '
        shape += '"intermediate_size": 128, "vocab_size": 1000, "model_type": "llama"}'
        Path("config.json").write_text(shape, encoding="utf-8")


def write_rows(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        kinds = {suffix: name for name, suffix in COMPRESSIONS.items() if suffix}
        data = (parquet_bytes if ".parquet" in path.name else jsonl_bytes)(make_rows())
        path.write_bytes(squeeze(data, kinds.get(path.suffix, "none")))


def lay_out_records(words: list[str], written: set[str]) -> None:
    for before, word in zip(["", *words], words, strict=False):
        is_path = re.fullmatch(r"[\w./-]+", word) and not f"{before}{word}".startswith("-")
        if is_path and word[0] != "-" and word not in written and not Path(word).exists():
            kind = "protocols/commands" if "protocol" in word else "runs/compute-everything"
            shutil.copytree(GOLDEN / kind, word)


INLINE = re.compile(r"(?<!`)`((?:fast-axolotl|make) [^`\n]+)`(?!`)")


@pytest.mark.parametrize("page", PAGES)
def test_commands_inside_sentences_exist_with_their_options(page: str) -> None:
    text = FENCE.sub("", PAGES[page])
    for found in INLINE.findall(text):
        words = [word.strip(",;.") for word in re.sub(r"[…|].*", "", found).split()]
        if words[0] == "make":
            check_words(words[:2])
        elif words[1:] not in ([], ["bench"]) and words[1] not in {"COMMAND", *ROOT_OPTIONS}:
            name, *rest = words[1:]
            ours = rest[: rest.index("--")] if "--" in rest else rest
            assert unknown_options(name, ours) == set(), found


# Python and YAML

STUBS: dict[str, Any] = {
    **dict.fromkeys(("train", "write", "Trainer"), lambda *_, **__: None),
    "checkpoint": {},
    "rank": 0,
    "world_size": 2,
    "shard": (0, 2),
    "pad": 0,
    "eos": 1,
    "n": 10,
    "tokenizer": SimpleNamespace(pad_token_id=0, eos_token_id=1),
    "lengths": [5, 7, 3],
    "sequences": [[1, 2], [3]],
}
"""Names that code in the documentation leaves to its reader."""


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("page", sorted({block.page for block in blocks_of("python")}))
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = pa.Table.from_pylist(make_rows())
    batch = {"input_ids": [1, 2, 3]}
    names = {**STUBS, "table": table, "tables": [table, table], "loader": [batch] * 3}
    for block in blocks_of("python"):
        if block.page == page and block.is_run:
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    lay_out_files(f"{node.value} ")
            if "torch." in block.text:
                names.setdefault("torch", importlib.import_module("torch"))
            if "__main__" in block.text:
                measure_script(block.text)
            else:
                exec(compile(block.text, str(block), "exec"), names)
        elif block.page == page:
            ast.parse(block.text)


def measure_script(text: str) -> None:
    """A whole script, in a process of its own, measured."""
    Path("script.py").write_text(text, encoding="utf-8")
    for path in Path().glob("*.jsonl"):
        # Some rows are enough to see that it runs.
        rows = path.read_text(encoding="utf-8").splitlines(keepends=True)[:1000]
        path.write_text("".join(rows), encoding="utf-8")
    words = [sys.executable, "-m", "fast_axolotl", "measure", "--output", "runs/script", "--"]
    done = subprocess.run([*words, sys.executable, "script.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert summarise(read_run("runs/script")).stall_fraction is not None
    shutil.rmtree("runs/script")


@pytest.mark.parametrize("block", blocks_of("yaml"), ids=str)
def test_yaml_has_keys_that_axolotl_or_we_know(block: Block) -> None:
    yaml = pytest.importorskip("yaml")
    for document in yaml.safe_load_all(block.text):
        others = ("apiVersion", "jobs", "steps", "repos", "on", True)
        if isinstance(document, dict) and not any(key in document for key in others):
            pytest.importorskip("axolotl")
            assert set(document) <= axolotl_keys(), f"{block}: {set(document) - axolotl_keys()}"


@cache
def axolotl_keys() -> set[str]:
    schema = importlib.import_module("axolotl.utils.schemas.config").AxolotlInputConfig
    ours = importlib.import_module("fast_axolotl.integrations.axolotl_plugin").FastAxolotlArgs
    return set(schema.model_fields) | set(ours.model_fields)


# What pages show, and where they lead


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.note.startswith("answer:")], ids=str
)
def test_an_answer_is_what_is_said_of_the_record(block: Block) -> None:
    folder = REPOSITORY / block.note.removeprefix("answer:").strip()
    record = read_run(folder)
    with terminal(110) as (out, _):
        show_short_summary(report_run(record), file=out)
    answer = plain(out.getvalue()).strip("\n").partition("\n\n")[0]
    answer = f"$ fast-axolotl measure --output runs/a -- python train.py\n{answer}\n…\n"
    if os.environ.get("FAST_AXOLOTL_UPDATE_GOLDEN"):
        page = REPOSITORY / block.page
        text = page.read_text(encoding="utf-8")
        begin = text.index(f"<!-- {block.note} -->")
        begin = text.index("```console\n", begin) + len("```console\n")
        page.write_text(text[:begin] + answer + text[text.index("```", begin) :], encoding="utf-8")
    else:
        assert block.text == answer


LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)\)")
ALL_PAGES = PAGES | {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in BESIDE}


@cache
def generated() -> dict[str, str]:
    return {f"docs/{name}": text for name, text in reference.pages().items()}


def anchors_of(text: str) -> set[str]:
    """Of the headings, as code hosts and MkDocs make them."""
    found = set(re.findall(r"\{ ?#([\w.-]+) ?\}|<a (?:id|name)=\"([\w-]+)\"", text))
    anchors = {name for pair in found for name in pair if name}
    for title in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        words = re.sub(r"[^\w\s-]", "", title.replace("`", "").strip().lower())
        anchors |= {re.sub(r"\s", "-", words), re.sub(r"[\s-]+", "-", words)}
    return anchors


@pytest.mark.parametrize("page", ALL_PAGES)
def test_relative_links_lead_to_files_and_headings_that_exist(page: str) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", ALL_PAGES[page])):
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        place = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        text = (ALL_PAGES | generated()).get(place)
        if text is None:
            exists = (REPOSITORY / place).exists()
        else:
            exists = not anchor or anchor in anchors_of(text)
        broken += [] if exists else [target]
    assert broken == []


# The site


def test_what_a_page_loads_from_elsewhere_is_found() -> None:
    page = """<link rel="stylesheet" href="https://fonts.example/a.css"><a href="https://fine.example">
    <script src="//cdn.example/b.js"></script><img src="images/c.png">
    <style>@import 'https://d.example/d.css'; p { background: url("e.png") }</style>"""
    found = ["https://fonts.example/a.css", "//cdn.example/b.js", "https://d.example/d.css"]
    assert site.loaded_from_outside(page) == found


def test_the_reference_has_every_command_and_name() -> None:
    pages = generated()
    for name in our_commands():
        assert f"\n## {name} " in pages["docs/reference/cli.md"]
    values = {"RUST_AVAILABLE", "__version__"}
    shown = set(re.findall(r"\{ #fast_axolotl\.(\w+) \}", pages["docs/reference/api.md"]))
    assert set(fast_axolotl.__all__) - shown == values


# Examples for other trainers, which docs/guides/trainers.md shows

EXAMPLES = REPOSITORY / "examples"
TUNED = ("full_finetune_single_device", "--config")


def measure_example(folder: Path, *command: str) -> None:
    """Run an example in a folder with the tiny model, and see that its steps were recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tiny_model.py", str(folder / "work")])
        runpy.run_path(str(EXAMPLES / "tiny_model.py"), run_name="__main__")
    shutil.copy(EXAMPLES / "llamafactory_dataset_info.json", folder / "work" / "dataset_info.json")
    inside = f"import os, sys; os.chdir({str(folder)!r}); from fast_axolotl.cli import main; main()"
    done = run_child(
        *(sys.executable, "-c", inside, "measure", "--quiet", "--output", "record", "--"),
        *command,
        folders=(EXAMPLES,),
        HF_HOME=str(folder / "cache"),
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    (rank,) = read_run(folder / "record").ranks.values()
    assert sum(block.steps for block in rank.blocks) >= 15


@NEEDS_TORCH
@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("trl", (sys.executable, str(EXAMPLES / "trl_sft.py"), "work")),
        ("llamafactory", ("llamafactory-cli", "train", str(EXAMPLES / "llamafactory_sft.yaml"))),
        ("torchtune", ("tune", "run", *TUNED, str(EXAMPLES / "torchtune_full.yaml"))),
    ],
)
def test_an_example_is_measured(module: str, command: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip(module, reason=f"not installed: {module}")
    measure_example(tmp_path, *command)


def test_the_page_names_every_example() -> None:
    page = PAGES["docs/guides/trainers.md"]
    files = [path.name for path in EXAMPLES.iterdir() if path.is_file()]
    assert [name for name in files if f"examples/{name}" not in page] == []
