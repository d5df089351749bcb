"""``fast-axolotl run``: the environment that reaches every interpreter, and what it leaves alone.

A small ``axolotl`` is laid out on disk. Interpreters are started as a user's shell starts them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fast_axolotl
from fast_axolotl.axolotl import use_line
from fast_axolotl.axolotl.patching import Patch
from fast_axolotl.errors import UsageError
from fast_axolotl.integrations.launch import (
    find_program,
    launch_environment,
    status_line,
)

Run = Callable[..., "subprocess.CompletedProcess[str]"]

SHOW = "import json, sys; print(json.dumps('fast_axolotl' in sys.modules))"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "axolotl").mkdir()
    (tmp_path / "axolotl/__init__.py").write_text("")
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Run:
    def run_it(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        source = Path(fast_axolotl.__file__).parents[1]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("FAST_AXOLOTL")}
        path = os.pathsep.join([str(folder), str(source)])
        return subprocess.run(
            [sys.executable, "-m", "fast_axolotl", "run", *command],
            env={**inherited, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return run_it


def test_the_environment_holds_the_switch_and_the_folder_once() -> None:
    once = launch_environment({"PATH": "p", "PYTHONPATH": f"a{os.pathsep}b"}, ["dedupe"])
    assert once["FAST_AXOLOTL_RUN"] == "1"
    assert once["FAST_AXOLOTL_SKIP"] == "dedupe"
    boot, *others = once["PYTHONPATH"].split(os.pathsep)
    assert others == ["a", "b"]
    assert (Path(boot) / "sitecustomize.py").is_file()
    assert launch_environment(once, ["dedupe", "save"]) == {
        **once,
        "FAST_AXOLOTL_SKIP": "dedupe,save",
    }
    assert launch_environment({})["PYTHONPATH"] == boot


def test_axolotl_brings_the_package_along_and_nothing_else_does(run: Run) -> None:
    done = run("--", sys.executable, "-c", f"import axolotl; {SHOW}")
    assert (done.returncode, done.stdout) == (0, "true\n"), done.stderr
    done = run("--", sys.executable, "-c", f"import csv; {SHOW}")
    assert (done.returncode, done.stdout) == (0, "false\n"), done.stderr


def test_grandchildren_are_reached_through_exec_and_spawn(run: Run, folder: Path) -> None:
    (folder / "job.py").write_text(
        "import json, multiprocessing, os, sys\n"
        "def look(_):\n"
        "    import axolotl\n"
        "    return 'fast_axolotl' in sys.modules\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(json.dumps(pool.map(look, [0])))\n"
    )
    code = f"import os, sys; os.execv(sys.executable, [sys.executable, {str(folder / 'job.py')!r}])"
    done = run("--", sys.executable, "-c", code)
    assert (done.returncode, json.loads(done.stdout)) == (0, [True]), done.stderr


def test_the_hooks_are_in_force_where_axolotl_is(run: Run) -> None:
    code = "import axolotl, fast_axolotl; assert fast_axolotl.status().installed"
    assert run("--", sys.executable, "-c", code).returncode == 0


def test_the_exit_code_and_the_output_are_the_command_s(run: Run) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(37)"
    done = run(sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (37, "out\n")
    assert done.stderr.splitlines()[-1] == "err"
    assert done.stderr.startswith("fast-axolotl: ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGUSR1])
def test_signals_reach_the_command(run: Run, number: signal.Signals) -> None:
    handled = number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    catch = f"signal.signal({int(number)}, lambda *_: sys.exit(9)); " if handled else ""
    code = (
        f"import os, signal, sys, time; {catch}os.kill(os.getpid(), {int(number)}); time.sleep(9)"
    )
    assert run("--", sys.executable, "-c", code).returncode == (9 if handled else -number)


def test_flags_after_the_command_are_its_own(run: Run) -> None:
    code = "import sys; print(sys.argv[1:])"
    done = run(sys.executable, "-c", code, "--skip", "x", "--help", "--", "-y")
    assert done.stdout == "['--skip', 'x', '--help', '--', '-y']\n"


def test_an_existing_sitecustomize_runs_as_before(run: Run, folder: Path) -> None:
    (folder / "sitecustomize.py").write_text("import sys\nsys.chained = __file__\n")
    code = "import sys, axolotl, sitecustomize; print(sys.chained == sitecustomize.__file__)"
    done = run("--", sys.executable, "-c", f"{code}; {SHOW}")
    assert done.stdout == "True\ntrue\n", done.stderr


def test_an_existing_sitecustomize_that_fails_does_so_as_before(run: Run, folder: Path) -> None:
    (folder / "sitecustomize.py").write_text("raise RuntimeError('theirs')\n")
    done = run("--", sys.executable, "-c", f"import axolotl; {SHOW}")
    assert (done.returncode, done.stdout) == (0, "true\n")
    assert "Error in sitecustomize" in done.stderr
    assert "theirs" in done.stderr


def test_the_start_up_hook_is_inert_without_the_switch(folder: Path) -> None:
    environment = launch_environment({"PYTHONPATH": str(folder)})
    del environment["FAST_AXOLOTL_RUN"]
    done = subprocess.run(
        [sys.executable, "-c", f"import axolotl; {SHOW}"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "false\n"


def test_axolotl_runs_where_this_package_is_broken(run: Run, folder: Path) -> None:
    (folder / "wreck.py").write_text(
        "import sys\nsys.modules['fast_axolotl'] = None\nimport axolotl\nprint('ran')\n"
    )
    done = run("--", sys.executable, str(folder / "wreck.py"))
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "Axolotl runs as it is" in done.stderr


def test_zero_turns_everything_off(run: Run) -> None:
    code = "import axolotl, fast_axolotl; print(fast_axolotl.status().installed)"
    done = run("--", sys.executable, "-c", code, FAST_AXOLOTL="0")
    assert done.stdout == "False\n"
    assert done.stderr == (
        "fast-axolotl: Axolotl runs as it is: the environment has FAST_AXOLOTL=0\n"
    )


def test_a_command_that_is_not_there_and_a_wrong_name_are_clear_errors(run: Run) -> None:
    done = run("--", "no-such-command-here")
    assert done.returncode == 2
    assert "there is no command 'no-such-command-here' on PATH" in done.stderr
    done = run("--skip", "dedup", "--", "true")
    assert done.returncode == 2
    assert "no replacement is named 'dedup'; there are dedupe, save" in done.stderr
    assert run().returncode == 2


def test_a_command_beside_our_python_is_found_without_path() -> None:
    name = Path(sys.executable).name
    assert find_program(name, {"PATH": "/nowhere"}) == sys.executable
    with pytest.raises(UsageError, match="no command 'no-such'"):
        find_program("no-such", {"PATH": "/nowhere"})


def test_a_file_that_cannot_be_run_says_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("true\n")
    with pytest.raises(UsageError, match=r"train\.sh' is not executable: chmod \+x it"):
        find_program(str(script), {"PATH": "/nowhere"})
    with pytest.raises(UsageError, match="is a folder"):
        find_program(f"{tmp_path}/", {"PATH": "/nowhere"})
    script.chmod(0o755)
    assert find_program(str(script), {"PATH": "/nowhere"}) == str(script)


def test_a_variable_before_the_command_is_told_apart_from_a_command() -> None:
    with pytest.raises(UsageError, match=r"no shell runs the command.*write env FOO=1 COMMAND"):
        find_program("FOO=1", {"PATH": "/nowhere"})


def test_the_status_line_names_what_is_in_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fast_axolotl.integrations.launch.axolotl_version", lambda: "9.9")
    patches = [
        Patch("a", "active", "", "m:a"),
        Patch("a", "waiting", "", "m:b"),
        Patch("b", "off", "switched off", "m:c"),
        Patch("c", "skipped", "m:d is unfamiliar code", "m:d"),
    ]
    assert status_line({}, patches) == (
        "Axolotl 9.9; accelerated: a; switched off: b; left alone: c (d is unfamiliar code)"
    )
    assert status_line({}, patches[2:3]) == ("Axolotl 9.9; nothing accelerated; switched off: b")


def test_the_last_line_tells_what_was_used() -> None:
    patches = [
        Patch("a", "active", "", "m:a", 2),
        Patch("a", "active", "", "m:b", 1),
        Patch("b", "active", "", "m:c", 0, (("a processor", 4),)),
        Patch("c", "waiting", "", "m:d"),
    ]
    assert use_line(patches) == "used a ×3; Axolotl's own: b ×4 (a processor)"
    assert use_line(patches[3:]) == ""
