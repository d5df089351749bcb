"""Which replacements are active and proven equal under which Axolotl, each with its own pins.

    python tools/axolotl_matrix.py                          all stacks
    python tools/axolotl_matrix.py --stack 0.20.0           one release
    python tools/axolotl_matrix.py --stack 0.19.0+datasets  a release with the newest datasets
    python tools/axolotl_matrix.py --tests none             what is active, without tests
    python tools/axolotl_matrix.py --tests run              and the real preprocess and train

For every stack: an environment (kept in ``--work`` for the next time), what ``fast-axolotl status``
says there, the tests that compare with stock, and a real ``axolotl preprocess`` and ``train`` with
and without us, whose prepared rows and losses must be equal (``tests/test_axolotl_cli.py``). Writes
a dated file into ``benchmarks/results`` and the table of docs/axolotl.md. Stacks that are not run
keep what the newest file says of them. A stack takes six minutes to install and ten to test.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path
from typing import Any

import tomllib

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
PAGE = REPOSITORY / "docs" / "axolotl.md"
BEGIN, END = "<!-- axolotl-matrix -->\n", "<!-- /axolotl-matrix -->\n"

STACKS = (
    "0.19.0",
    "0.18.0",
    "0.17.0",
    "0.16.1",
    "0.12.2",
    "0.19.0+transformers+datasets",
    "0.19.0+datasets==4.8.5",
)
"""A release, and after each plus what is installed in another version than the release's pin."""

ABOUT_VERSIONS = ("axolotl", "transformers", "datasets", "trl", "accelerate", "torch")

NEEDS_A_GPU = re.compile(r"(xformers|deepspeed|mamba-ssm|flash-attn)\b", re.I)
"""Requirements that are left out: no test needs them."""

NO_CUDA = ('raise AssertionError("Torch not', 'raise RuntimeError("Torch not')

CHAT = "axolotl.prompt_strategies.chat_template:ChatTemplateStrategy.tokenize_prompt"

RUN = "tests/test_axolotl_cli.py"
TESTS = ("tests/test_axolotl_*.py", "tests/test_trl*.py")


def make_environment(stack: str, folder: Path, torch: str) -> None:
    """An environment with a release's own pins, as pip gives it to a user, and our tests' needs."""
    if (folder / ".made").exists():
        return
    version, *others = stack.split("+")
    venv.create(folder, with_pip=True)
    downloads = folder / "downloads"
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet"]
    # Releases that are built here need one; their own requirement decides which stays.
    call([*install, "wheel", "setuptools", "packaging", torch or "torch"])
    download = [*pip, "download", "-q", "--no-deps", "--no-build-isolation", "-d"]
    call([*download, str(downloads), f"axolotl=={version}"])
    [release] = downloads.iterdir()
    wanted = [line for line in requirements(release) if not NEEDS_A_GPU.match(line)]
    (folder / "requirements.txt").write_text("\n".join([*wanted, torch]))
    call([*install, "-r", str(folder / "requirements.txt")])
    call([*install, "--no-deps", "--no-build-isolation", str(release)])
    if others:
        call([*install, "--upgrade", *others])
    ours = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    call([*install, *ours["project"]["dependencies"], "pytest", "hypothesis", "plotly"])
    if tuple(map(int, version.split(".")[:2])) < (0, 18):
        # A build with CUDA, which users have, says so where there is no GPU; these count on it.
        [file] = folder.glob("lib/python*/site-packages/torch/cuda/__init__.py")
        file.write_text(file.read_text().replace(*NO_CUDA))
    (folder / ".made").touch()


def requirements(release: Path) -> list[str]:
    """What a wheel names in its metadata, a source distribution in its requirements.txt."""
    if release.suffix == ".whl":
        with zipfile.ZipFile(release) as wheel:
            [name] = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            text = wheel.read(name).decode()
        found = re.findall(r"^Requires-Dist: (.+)$", text, re.M)
        return [line for line in found if "extra ==" not in line]
    with tarfile.open(release) as archive:
        [member] = (item for item in archive if re.fullmatch(r"[^/]+/requirements.txt", item.name))
        file = archive.extractfile(member)
        lines = file.read().decode().splitlines() if file else []
    return [line for line in lines if line.strip() and not line.startswith(("#", "-"))]


def call(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """A command; where it fails, what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode and "env" not in options:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    return done


def examine(stack: str, folder: Path, tested: str) -> dict[str, Any]:
    """What holds in one environment; ``None`` for what was not tested."""
    python = str(folder / "bin" / "python")
    paths = [str(REPOSITORY / "src"), str(REPOSITORY / "tests"), str(REPOSITORY)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    options = {"env": environment, "cwd": REPOSITORY}
    ask = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    versions = call([python, "-c", ask, *ABOUT_VERSIONS], **options).stdout.split()
    status = call([python, "-m", "fast_axolotl", "status", "--json"], **options)
    patches = json.loads(status.stdout)["patches"]
    there = [patch for patch in patches if patch["state"] != "absent"]
    # Those that are compared first are active where the tests below find them equal.
    left = {p["target"]: p["reason"] for p in there if p["state"] not in ("ready", "check")}
    if tuple(map(int, versions[0].split(".")[:2])) < (0, 19):
        left[CHAT] = "unfamiliar: it finds turns by comparing tokens"
    active = [patch["target"] for patch in there if patch["target"] not in left]
    checked = sum(p["state"] == "check" for p in there if p["target"] in active)
    tests = {str(path.relative_to(REPOSITORY)) for glob in TESTS for path in REPOSITORY.glob(glob)}
    files = sorted(tests - {RUN, "tests/test_axolotl_matrix.py"})
    print(f"{stack}: {len(active)} of {len(there)} active, {left}", flush=True)
    return {
        "stack": stack,
        "versions": dict(zip(ABOUT_VERSIONS, versions, strict=False)),
        "functions": len(there),
        "active": active,
        "checked": checked,
        "not_active": left,
        "tests": run_tests(python, files, folder, options) if tested == "all" else None,
        "preprocess_and_train": run_tests(python, [RUN], folder, options)
        if tested != "none"
        else None,
    }


def run_tests(python: str, files: list[str], folder: Path, options: Any) -> dict[str, Any]:
    """How many passed, and the names of those that did not."""
    report = folder / "tests.xml"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    report.unlink(missing_ok=True)
    done = call([*command, *files], **options)
    if not report.exists():
        return {"passed": 0, "failed": [done.stderr[-300:]], "skipped": 0}
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [case for case in cases if {part.tag for part in case} & {"failure", "error"}]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
    print(f"  {len(cases) - len(failed) - skipped} passed, {names} failed", flush=True)
    return {"passed": len(cases) - len(failed) - skipped, "failed": names, "skipped": skipped}


def newest_result() -> Path | None:
    """The file of the last run."""
    return max(RESULTS.glob("*-axolotl-matrix.json"), default=None)


def table(stacks: list[dict[str, Any]]) -> str:
    """What docs/axolotl.md shows."""
    columns = ("Axolotl", "with", "active", "compared first", "tests", "`preprocess`, `train`")
    lines = [f"| {' | '.join(columns)} | left to Axolotl |"]
    lines += ["| --- | --- | ---: | ---: | --- | --- | --- |"]
    for stack in stacks:
        versions, tests, run = stack["versions"], stack["tests"], stack["preprocess_and_train"]
        result = f"{tests['passed']} passed" if tests else "not run"
        result += f", {len(tests['failed'])} failed" if tests and tests["failed"] else ""
        left = [f"`{name.split(':')[1]}` ({why})" for name, why in stack["not_active"].items()]
        cells = (
            versions["axolotl"],
            ", ".join(f"{name} {versions[name]}" for name in ("transformers", "datasets")),
            f"{len(stack['active'])} of {stack['functions']}",
            stack["checked"],
            result,
            "not run" if run is None else "failed" if run["failed"] else "equal",
            "; ".join(left) or "–",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def update(page: str) -> str:
    """The page with the table of the newest result."""
    path = newest_result()
    stacks = json.loads(path.read_text(encoding="utf-8"))["stacks"] if path else []
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    return f"{before}{BEGIN}{table(stacks)}{END}{after}"


def save(stacks: dict[str, dict[str, Any]]) -> None:
    """A result file of today, and the table."""
    now = datetime.datetime.now(datetime.UTC)
    result = {
        "title": "axolotl-matrix",
        "date": now.isoformat(timespec="seconds"),
        "command": "python tools/axolotl_matrix.py",
        "stacks": [stacks[name] for name in sorted(stacks, reverse=True)],
    }
    path = RESULTS / f"{now:%Y-%m-%d}-axolotl-matrix.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(update(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stack", action="append", help=f"one or more of, or like, {STACKS}")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "build" / "axolotl-matrix")
    parser.add_argument("--torch", default="", help="like torch==2.12.1; default: what pip gives")
    parser.add_argument("--tests", choices=("all", "run", "none"), default="all")
    options = parser.parse_args()
    path = newest_result()
    found = json.loads(path.read_text(encoding="utf-8"))["stacks"] if path else []
    stacks = {item["stack"]: item for item in found}
    for stack in options.stack or STACKS:
        folder = options.work.absolute() / stack
        make_environment(stack, folder, options.torch)
        stacks[stack] = examine(stack, folder, options.tests)
        save(stacks)


if __name__ == "__main__":
    main()
