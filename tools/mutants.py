"""Do the tests notice a small mistake? A seeded sample of mistakes, and the tests on each of them.

    python tools/mutants.py CHECKOUT…   the sample, against the tests of each module

A mistake turns a comparison, swaps ``and`` and ``or``, moves a number by one, or never takes a
branch. Every package has the same number of them. A mistake is killed if a test fails or takes
longer than the limit. The tests that run are the files that import the module, else those that
name it, else those that import its package: the fastest first, as many as fit into 20 seconds of
processor time. Each of these files runs once without a mistake before; one that fails, or takes
more than a minute, is left out.

Each CHECKOUT is a working copy that nobody else uses: its source is changed and restored. Several
share the work; all use the Python that runs this file. The result lies in the first one's
``build/``. Allow 20 seconds for each mistake.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from queue import Queue
from threading import Timer
from typing import Any

PACKAGES = ("kernels", "reading", "dedupe", "packing", "record", "measure", "protocol", "axolotl")
SOURCE = Path("src/fast_axolotl")
MOST_SECONDS = 20
LIMIT_SECONDS = 300
TIMING_LIMIT_SECONDS = 60
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


def candidates(mutant: Mutant, root: Path) -> list[str]:
    """The files of tests that have to do with a module."""
    package, stem = Path(mutant.file).parts[-2], Path(mutant.file).stem
    texts = {path.name: path.read_text() for path in (root / "tests").glob("test_*.py")}
    patterns = (
        rf"fast_axolotl\.{package}\.{stem}\b|fast_axolotl\.{package} import .*\b{stem}\b",
        rf"\b{stem}\b",
        rf"fast_axolotl\.{package}\b",
    )
    for pattern in patterns:
        files = [name for name, text in texts.items() if re.search(pattern, text)]
        if files:
            break
    return sorted(files)


def run_tests(
    tests: list[str], checkout: Path, limit_seconds: float = LIMIT_SECONDS
) -> tuple[bool, float]:
    """Whether they pass within the limit, and the processor time they took."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [f"tests/{name}" for name in tests]
    search = os.pathsep.join(str(checkout / name) for name in ("src", "tests", ""))
    process = subprocess.Popen(
        command,
        cwd=checkout,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": search},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    limit = Timer(limit_seconds, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    _, status, usage = os.wait4(process.pid, 0)
    limit.cancel()
    subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
    return status == 0, usage.ru_utime + usage.ru_stime


def passes_with(mutant: Mutant, tests: list[str], checkout: Path) -> bool:
    """Whether the mistake goes unnoticed."""
    path = checkout / mutant.file
    source = path.read_bytes()
    try:
        path.write_bytes(source[: mutant.begin] + mutant.text.encode() + source[mutant.end :])
        return run_tests(tests, checkout)[0]
    finally:
        path.write_bytes(source)


def main() -> None:
    """Prints each mistake as it is tried out, and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="+", type=lambda text: Path(text).resolve())
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=25)
    options = parser.parse_args()
    root = options.checkouts[0]
    mutants = choose(root, options.count, options.seed)
    tests = {mutant: candidates(mutant, root) for mutant in mutants}
    free: Queue[Path] = Queue()
    for checkout in options.checkouts:
        free.put(checkout)
    seconds: dict[str, float] = {}
    results: list[dict[str, Any]] = []

    def time_file(name: str) -> None:
        checkout = free.get()
        is_passed, seconds_taken = run_tests([name], checkout, TIMING_LIMIT_SECONDS)
        free.put(checkout)
        if is_passed:
            seconds[name] = seconds_taken
        print(f"{seconds_taken:6.1f} s {'' if is_passed else 'left out: '}{name}", flush=True)

    def try_out(mutant: Mutant) -> None:
        files = [name for name in tests[mutant] if name in seconds]
        files.sort(key=lambda name: seconds[name])
        ends = list(accumulate(seconds[name] for name in files))
        files = files[: max(1, bisect_right(ends, MOST_SECONDS))]
        checkout = free.get()
        outcome = "survived" if not files or passes_with(mutant, files, checkout) else "killed"
        free.put(checkout)
        results.append({**asdict(mutant), "outcome": outcome, "tests": files})
        change = f"{mutant.was!r:.60} → {mutant.text!r:.60}"
        print(f"{len(results):4} {outcome:8} {mutant.file}:{mutant.line} {change}", flush=True)

    with ThreadPoolExecutor(len(options.checkouts)) as threads:
        list(threads.map(time_file, sorted({name for names in tests.values() for name in names})))
        list(threads.map(try_out, mutants))
    (root / "build").mkdir(exist_ok=True)
    (root / "build/mutants.json").write_text(json.dumps(results, indent=1))
    for package in (*PACKAGES, ""):
        inside = [item for item in results if f"/{package}/" in item["file"] or not package]
        killed = sum(item["outcome"] == "killed" for item in inside)
        print(f"{package or 'all':10} {killed:4} of {len(inside)} killed")


if __name__ == "__main__":
    main()
