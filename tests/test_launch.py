"""``fast-axolotl run``: the environment that reaches every interpreter, and what it leaves alone.

A small ``axolotl`` is laid out on disk. Interpreters are started as a user's shell starts them.
"""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from fast_axolotl.axolotl import SEE_LIST, status_line
from fast_axolotl.axolotl.patching import Patch
from fast_axolotl.errors import UsageError
from fast_axolotl.integrations.launch import (
    find_program,
    launch_environment,
)
from support.children import FAST_AXOLOTL, clean_environment, run_child, run_python
from support.files import lay_out

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "axolotl").mkdir()
    (tmp_path / "axolotl/__init__.py").write_text("")
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Run:
    def run_it(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = clean_environment(folder, **variables)
        return run_child(*FAST_AXOLOTL, "run", *command, environment=environment)

    return run_it


def test_the_environment_holds_the_switch_and_the_folder_once() -> None:
    once = launch_environment({"PATH": "p", "PYTHONPATH": f"a{os.pathsep}b"}, ["dedupe"])
    assert once["FAST_AXOLOTL_RUN"] == "1"
    assert once["FAST_AXOLOTL_SKIP"] == "dedupe"
    boot, *others = once["PYTHONPATH"].split(os.pathsep)
    assert others == ["a", "b"]
    assert (Path(boot) / "sitecustomize.py").is_file()
    skipped = {**once, "FAST_AXOLOTL_SKIP": "dedupe,save"}
    assert launch_environment(once, ["dedupe", "save"]) == skipped
    assert launch_environment({})["PYTHONPATH"] == boot


def test_axolotl_brings_the_package_along_through_exec_and_spawn_and_nothing_else_does(
    run: Run, folder: Path
) -> None:
    (folder / "job.py").write_text(
        "import csv, multiprocessing, os, sys\n"
        "def look(_):\n"
        "    before = 'fast_axolotl' in sys.modules\n"
        "    import axolotl, fast_axolotl\n"
        "    return before, fast_axolotl.status().installed\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(look, [0]), look(0))\n"
    )
    code = f"import os, sys; os.execv(sys.executable, [sys.executable, {str(folder / 'job.py')!r}])"
    done = run("--", sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (0, "[(False, True)] (False, True)\n"), done.stderr


def test_signals_reach_the_command_and_axolotl_runs_where_this_package_is_broken(run: Run) -> None:
    code = "import sys; sys.modules['fast_axolotl'] = None; import axolotl; print('ran')"
    done = run("--", sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "nothing is accelerated" in done.stderr
    code = (
        "import os, signal\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):\n"
        "    signal.signal(number, lambda number, _: print(number, flush=True))\n"
        "    os.kill(os.getpid(), number)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = run("--", sys.executable, "-c", code)
    assert (done.returncode, done.stdout.split()) == (-signal.SIGKILL, ["15", "2", "10"])


def test_the_start_up_hook_runs_on_pythons_older_than_ours(folder: Path) -> None:
    boot = Path(launch_environment({})["PYTHONPATH"]) / "sitecustomize.py"
    tree = ast.parse(boot.read_text(), feature_version=(3, 6))
    # Annotations are evaluated there, and a set has no items in brackets.
    for node in ast.walk(tree):
        annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
        assert isinstance(annotation, ast.Name | ast.Constant | None)
    (folder / "sitecustomize.py").write_text("print('theirs')\n")
    environment = launch_environment(clean_environment(folder, FAST_AXOLOTL_MEASURE="record"))
    found = [*Path.home().glob(".pyenv/versions/3.[6-9].*/bin/python")]
    for program in [*found, *Path("/usr/bin").glob("python3.[6-9]")]:
        done = run_child(
            str(program), "-c", "import axolotl; print('ran')", environment=environment
        )
        assert (done.returncode, done.stdout) == (0, "theirs\nran\n"), (program, done.stderr)
        assert "nothing is accelerated" in done.stderr


def test_threads_that_import_at_the_same_time_neither_fail_nor_wait_for_ever(folder: Path) -> None:
    waiting = "import sys\nhas_waited = sys.has_acted\n"
    # The action of the hook imports it, while a thread that is in it imports something, too.
    shared = "import time\ntime.sleep(0.5)\nimport colorsys\n"
    lay_out(folder, {"torch.py": waiting, "transformers.py": waiting, "shared.py": shared})
    code = (
        "import sys, threading, time\n"
        "sys.has_acted = False\n"
        "def act():\n"
        "    import shared\n"
        "    sys.has_acted = True\n"
        "sys.meta_path[0].action = act\n"
        "names = ['shared', 'torch', 'transformers']\n"
        "threads = [threading.Thread(target=__import__, args=[name], daemon=True) "
        "for name in names]\n"
        "for thread in threads:\n"
        "    thread.start()\n"
        "    time.sleep(0.1)\n"
        "for thread in threads:\n"
        "    thread.join(20)\n"
        "assert not any(thread.is_alive() for thread in threads)\n"
        "print([sys.modules[name].has_waited for name in names[1:]])\n"
    )
    environment = launch_environment(clean_environment(folder, FAST_AXOLOTL_MEASURE="record"))
    done = run_python(code, environment=environment)
    assert (done.stdout, done.stderr) == ("[True, True]\n", "")


def test_what_cannot_be_run_says_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("true\n")
    for name, text in {
        "no-such": "no command 'no-such'",
        str(script): r"train\.sh' is not executable; run chmod \+x on it",
        "FOO=1": "to set a variable, write env",
    }.items():
        with pytest.raises(UsageError, match=text):
            find_program(name, {"PATH": "/nowhere"})
    script.chmod(0o755)
    assert find_program(str(script), {"PATH": "/nowhere"}) == str(script)


def test_the_status_line_counts_what_is_in_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "axolotl":
            raise metadata.PackageNotFoundError
        return "1.2"

    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", version)
        found = [Patch("chat", "absent", "axolotl is not installed", "a:b")]
        found.append(Patch("trl-sft", "ready", "", "trl:x"))
        assert status_line({}, found) == f"TRL 1.2; replacements: 1 active{SEE_LIST}"
    monkeypatch.setattr("fast_axolotl.axolotl.host_name", lambda: "Axolotl 9.9")
    patches = [
        Patch("a", "active", "", "m:a"),
        Patch("a", "waiting", "", "m:b"),
        Patch("b", "off", "switched off", "m:c"),
        Patch("c", "skipped", "m:d has unknown source code", "m:d"),
        Patch("e", "check", "m:e has unknown source code", "m:e"),
    ]
    assert status_line({}, patches) == (
        "WARNING: not all replacements are active on Axolotl 9.9; replacements: 2 active, "
        f"1 switched off, 1 inactive, 1 compared with stock first{SEE_LIST}"
    )
    few = status_line({}, patches[2:3])
    assert few == f"Axolotl 9.9; replacements: 1 switched off{SEE_LIST}"
