"""Do the tests notice a small mistake? A seeded sample of mistakes, and the tests on each of them.

    python tools/mutants.py cover CHECKOUT…     which files of tests run which lines; writes a map
    python tools/mutants.py run CHECKOUT…       the sample, against the tests of each line
    python tools/mutants.py run CHECKOUT… --count 40 --seed 7

A mistake turns a comparison, swaps ``and`` and ``or``, moves a number by one, or never takes a
branch. Every package has the same number of them. A mistake is killed if a test fails or takes
longer than the limit. The tests that run are the files that execute the line, the ones that name
its module first, then the fastest, five of them at most.

Each CHECKOUT is a working copy with an environment of its own in ``.venv`` (with ``coverage``
installed) that nobody else uses: its source is changed and restored. Several share the work. The
map and the result lie in the first one's ``build/``. Allow an hour for each.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

PACKAGES = ("kernels", "reading", "dedupe", "packing", "record", "measure", "protocol", "axolotl")
SOURCE = Path("src/fast_axolotl")
MOST_FILES = 5
LIMIT_SECONDS = 400
TURNED: dict[type, type] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One mistake: the text between two positions of a file is replaced."""

    file: str
    line: int
    begin: int
    """Offset into the file, in bytes."""
    end: int
    text: str
    was: str


def find_mutants(path: Path, root: Path) -> Iterator[Mutant]:
    """Every mistake that can be made in a file."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    skipped = {id(inner) for node in ast.walk(tree) for inner in _not_run(node)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        for target, text in _replacements(node):
            begin = starts[target.lineno - 1] + target.col_offset
            end = starts[(target.end_lineno or 0) - 1] + (target.end_col_offset or 0)
            was = source[begin:end].decode()
            name = path.relative_to(root).as_posix()
            yield Mutant(file=name, line=target.lineno, begin=begin, end=end, text=text, was=was)


def _not_run(node: ast.AST) -> Iterator[ast.AST]:
    """What has no effect when it is changed: annotations, and what only type checkers read. Inside
    of f-strings, older Pythons do not know the places."""
    places = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    if isinstance(node, ast.JoinedStr):
        places.append(node)
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        places.append(node)
    for place in places:
        if isinstance(place, ast.AST):
            yield from ast.walk(place)


def _replacements(node: Any) -> Iterator[tuple[Any, str]]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED:
        operators = [TURNED[type(node.ops[0])](), *node.ops[1:]]
        turned = ast.Compare(node.left, operators, node.comparators)
        yield node, f"({ast.unparse(turned)})"
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, str(node.value + 1)
    elif isinstance(node, ast.If):
        yield node.test, "False"


def choose(root: Path, count: int, seed: int) -> list[Mutant]:
    """The sample: as many of each package."""
    chosen: list[Mutant] = []
    for number, package in enumerate(PACKAGES):
        files = sorted((root / SOURCE / package).glob("*.py"))
        every = [mutant for path in files for mutant in find_mutants(path, root)]
        share = count // len(PACKAGES) + (number < count % len(PACKAGES))
        chosen += random.Random(f"{seed} {package}").sample(every, share)
    return chosen


def cover(checkouts: list[Path]) -> None:
    """Runs every file of tests under coverage, in processes of its own, children included."""
    first = checkouts[0]
    build = first / "build"
    build.mkdir(exist_ok=True)
    free: Queue[Path] = Queue()
    for checkout in checkouts:
        free.put(checkout)
    seconds: dict[str, float] = {}
    lines: dict[str, dict[str, list[int]]] = {}

    def run(name: str) -> None:
        checkout = free.get()
        try:
            seconds[name], lines[name] = _cover_file(checkout, name)
        finally:
            free.put(checkout)
        print(f"{len(seconds):4} {name} {seconds[name]:.0f} s", flush=True)

    names = sorted(path.name for path in (first / "tests").glob("test_*.py"))
    with ThreadPoolExecutor(len(checkouts)) as threads:
        list(threads.map(run, names))
    (build / "mutants-map.json").write_text(json.dumps({"seconds": seconds, "lines": lines}))


def _cover_file(checkout: Path, name: str) -> tuple[float, dict[str, list[int]]]:
    folder = checkout / "build" / "coverage"
    subprocess.run(["rm", "-rf", folder], check=True)
    folder.mkdir(parents=True)
    settings = folder / "settings"
    settings.write_text(
        f"[run]\nsource = {checkout / SOURCE}\nparallel = true\ndata_file = {folder / 'data'}\n"
        "patch = subprocess\n"
    )
    python = checkout / ".venv/bin/python"
    coverage = [python, "-m", "coverage", "run", f"--rcfile={settings}"]
    begin = time.perf_counter()
    _run(
        [*coverage, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{name}"], checkout, 1800
    )
    took = time.perf_counter() - begin
    _run([python, "-m", "coverage", "combine", f"--rcfile={settings}"], checkout, 300)
    found: dict[str, list[int]] = {}
    data = folder / "data"
    if data.exists():
        with sqlite3.connect(data) as base:
            query = "select path, numbits from line_bits join file on file.id = line_bits.file_id"
            for path, bits in base.execute(query):
                numbers = [
                    8 * at + bit
                    for at, byte in enumerate(bits)
                    for bit in range(8)
                    if byte >> bit & 1
                ]
                found[Path(path).relative_to(checkout).as_posix()] = numbers
    return took, found


def _run(command: list[Any], checkout: Path, limit: float) -> int:
    """The exit code; 124 where it took too long, with all that it started ended."""
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=checkout,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
        process.wait()


def tests_of(mutant: Mutant, known: dict[str, Any], root: Path) -> list[str]:
    """The files of tests to run. Compiled kernels show no lines: there, those that name them."""
    stem = Path(mutant.file).stem
    lines, seconds = known["lines"], known["seconds"]
    naming = {name for name in lines if stem in (root / "tests" / name).read_text()}
    files = {name for name in lines if mutant.line in lines[name].get(mutant.file, ())}
    if "/kernels/" in mutant.file or not files:
        files |= {name for name in naming if mutant.file in lines[name]}
    ranked = sorted(files, key=lambda name: (name not in naming, seconds[name]))
    return ranked[:MOST_FILES]


def try_out(mutant: Mutant, tests: list[str], checkout: Path) -> str:
    """``killed``, or ``survived``."""
    path = checkout / mutant.file
    source = path.read_bytes()
    try:
        path.write_bytes(source[: mutant.begin] + mutant.text.encode() + source[mutant.end :])
        python = checkout / ".venv/bin/python"
        options = ["-q", "-x", "-p", "no:cacheprovider"]
        for name in tests:
            if _run([python, "-m", "pytest", *options, f"tests/{name}"], checkout, LIMIT_SECONDS):
                return "killed"
    finally:
        path.write_bytes(source)
    return "survived"


def run(checkouts: list[Path], count: int, seed: int) -> None:
    """The sample against the tests; prints the survivors and a table."""
    root = checkouts[0]
    known = json.loads((root / "build/mutants-map.json").read_text())
    free: Queue[Path] = Queue()
    for checkout in checkouts:
        free.put(checkout)
    chosen = choose(root, count, seed)
    results: list[dict[str, Any]] = []

    def one(mutant: Mutant) -> None:
        tests = tests_of(mutant, known, root)
        checkout = free.get()
        begin = time.perf_counter()
        try:
            outcome = try_out(mutant, tests, checkout)
        finally:
            free.put(checkout)
        took = time.perf_counter() - begin
        results.append({**asdict(mutant), "outcome": outcome, "tests": tests})
        change = f"{mutant.was!r:.60} → {mutant.text!r:.60}"
        print(
            f"{len(results):4} {outcome:8} {took:4.0f} s {mutant.file}:{mutant.line} {change}",
            flush=True,
        )

    with ThreadPoolExecutor(len(checkouts)) as threads:
        list(threads.map(one, chosen))
    (root / "build/mutants.json").write_text(json.dumps(results, indent=1))
    for package in (*PACKAGES, ""):
        inside = [item for item in results if f"/{package}/" in item["file"] or not package]
        killed = sum(item["outcome"] == "killed" for item in inside)
        print(f"{package or 'all':10} {killed:4} of {len(inside)} killed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["cover", "run"])
    parser.add_argument("checkouts", nargs="+", type=lambda text: Path(text).resolve())
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=25)
    options = parser.parse_args()
    if options.what == "cover":
        cover(options.checkouts)
    else:
        run(options.checkouts, options.count, options.seed)


if __name__ == "__main__":
    sys.exit(main())
