"""The command line as a user meets it: in a process of its own."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module, metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fast_axolotl._version import __version__
from fast_axolotl.cli import app, main, options
from fast_axolotl.cli.data import job_document, job_progress
from fast_axolotl.cluster.job import JobSummary, Stage
from fast_axolotl.report.terminal import print_document
from support.children import FAST_AXOLOTL, clean_environment, run_child, run_python
from support.files import write_jsonl

ENVIRONMENT = {
    "COLUMNS": "100",
    "TERM": "dumb",
    # Which shell started the tests does not count.
    "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
}


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    return write_jsonl(path, [{"id": index, "text": f"row {index}"} for index in range(2500)])


def run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(**ENVIRONMENT, **variables)
    return run_child(*FAST_AXOLOTL, *map(str, arguments), environment=environment)


def test_head_prints_rows_as_json_lines_and_all_where_there_are_fewer(rows_file: Path) -> None:
    done = run("read", rows_file, "--head", "2", "--columns", "text")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows == [{"text": "row 0"}, {"text": "row 1"}]
    assert len(run("read", rows_file, "--head", "9999").stdout.splitlines()) == 2500


def test_a_closed_pipe_is_no_traceback(rows_file: Path) -> None:
    command = f"'{sys.executable}' -m fast_axolotl read '{rows_file}' --head 2500 | head -1"
    done = run_child("bash", "-c", command)
    assert done.stdout.splitlines() == ['{"id": 0, "text": "row 0"}']
    assert "Traceback" not in done.stderr


def test_a_file_that_cannot_be_read_at_all_is_said_to_hold_an_unknown_number_of_rows(
    tmp_path: Path,
) -> None:
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no end")
    done = run("read", tmp_path / "cut.parquet", "--on-error", "skip")
    assert "(an unknown number of rows)" in " ".join(done.stdout.split())
    assert (done.returncode, "no row could be read" in done.stderr) == (1, True)


def test_a_character_that_a_stream_does_not_have_ends_nothing() -> None:
    done = run("bench", "reader", "nowhere", "--help", PYTHONIOENCODING="ascii")
    assert (done.returncode, "+- " in done.stdout) == (0, True)


def test_what_needs_a_package_that_is_not_there_names_it(rows_file: Path) -> None:
    code = "import sys; sys.modules['pyarrow'] = None; from fast_axolotl.cli import main; main()"
    done = run_child(sys.executable, "-c", code, "read", str(rows_file))
    assert done.stderr == "fast-axolotl: this needs pyarrow: pip install pyarrow\n"
    assert done.returncode == 2


def help_of(name: str) -> str:
    return CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "100"}).output


def test_translated_names_are_options_of_a_command() -> None:
    every = "".join(map(help_of, ("read", "dedupe")))
    for name in options._OPTIONS.split("|"):
        assert f"--{name.replace('_', '-')} " in every


def test_arguments_have_their_help_and_commands_an_example() -> None:
    assert "Files, folders, globs or URIs" in help_of("read")
    names = [command.callback.__name__ for command in app.registered_commands if command.callback]
    assert {"show", "read", "demo", "trace", "warmup"} <= set(names)
    for name in names:
        options, _, examples = help_of(name).partition("Examples:")
        assert f"fast-axolotl {name}" in examples, name
        # What is quoted or follows -- belongs to another command.
        own = re.sub(r"'[^']*'| -- [^•]*", "", examples)
        assert set(re.findall(r"--[a-z-]+", own)) <= set(re.findall(r"--[a-z-]+", options)), name


# ``prepare`` as people see it: progress, summary, errors.


Prepare = Callable[..., tuple[int, str, str]]

GB = 10**9
STAGE = Stage(
    name="rows",
    tasks=814,
    done_before=0,
    retried=2,
    seconds=1500.0,
)
SUMMARY = JobSummary(
    outputs=("prepared/5f0a",),
    rows_in=1000,
    dropped={"longer than sequence_len": 30, "without a label": 10},
    duplicates=60,
    rows_out=900,
    tokens=2_000_000,
    bytes_in=GB,
    bytes_out=GB,
    seconds=1800.0,
    stages=(STAGE, replace(STAGE, name="shards", seconds=200.0)),
    peak_bytes=GB,
)


def test_stages_begin_and_end_with_a_line_and_tell_of_tasks_that_are_tried_again() -> None:
    lines: list[str] = []
    bars: list[tuple[str, int, int, int]] = []
    moments = iter(range(10**9))
    hear = job_progress(
        lambda *bar: bars.append(bar), lines.append, clock=lambda: float(next(moments))
    )
    stage = Stage(name="rows", tasks=100)
    hear(stage, "starting")
    hear(stage, "a task is tried again, since node n2 died")
    for done in range(1, 101):
        stage = replace(stage, done=done, rows=1000 * done, seconds=2.0 * done)
        hear(stage, "done" if done == 100 else "")
    assert lines[0] == "rows: starting, 0/100 tasks"
    assert lines[1] == "rows: a task is tried again, since node n2 died, 0/100 tasks"
    assert lines[-1] == "rows: done, 100/100 tasks, 100,000 rows in 3 min 20 s"
    assert len(lines) == 3 + 100 // 30, "one every 30 seconds"
    assert bars[-1] == ("rows", 100, 100, 100_000)


def test_a_summary_names_reasons_and_stages(capsys: pytest.CaptureFixture[str]) -> None:
    print_document(job_document(SUMMARY, "axolotl train c.yml"))
    text = " ".join(capsys.readouterr().out.split())
    expected = (
        "dropped longer than sequence_len: 30 without a label: 10",
        "duplicates 60",
        "tokens/s 1,111",
        "peak memory 1 GB",
        "next command axolotl train c.yml",
    )
    assert [words for words in expected if words not in text] == []
    continued = replace(SUMMARY, stages=(replace(STAGE, done_before=5),))
    print_document(job_document(continued))
    text = " ".join(capsys.readouterr().out.split())
    assert "tokens/s" not in text


@pytest.fixture
def prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Prepare:
    """The command in this process, with a job that does nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yml").write_text("base_model: x\n")
    module = import_module("fast_axolotl.cluster.prepare")

    def fake(config: str, **options: Any) -> JobSummary:
        (tmp_path / "options.json").write_text(json.dumps({**options, "heard": None}))
        return SUMMARY

    def run_prepare(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(module, "prepare", fake)
        monkeypatch.setattr(sys, "argv", ["fast-axolotl", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run_prepare


def test_options_reach_the_job_and_the_next_command_repeats_them(
    prepare: Prepare, tmp_path: Path
) -> None:
    words = "--engine ray --memory 2GiB --workers 3 -o out --restart --json"
    code, out, _ = prepare("prepare", "c.yml", *words.split())
    assert code == 0
    assert json.loads((tmp_path / "options.json").read_text()) == (
        {"memory": 2**31, "workers": 3, "restart": True, "heard": None}
        | {"engine": "ray", "address": "auto", "output": "out", "work": None, "dry_run": False}
    )
    found = json.loads(out)
    assert found["rows_out"] == 900
    assert found["next_command"] == "axolotl train c.yml --dataset-prepared-path out"
    assert (
        "copy s3://b/p to FOLDER, then axolotl train"
        in prepare("prepare", "c.yml", "-o", "s3://b/p")[1]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("none.yml", "does not exist"),
        ("c.yml --address h:1", "add --engine ray"),
        ("c.yml --memory much", "cannot read 'much' as a size"),
        ("c.yml --engine spark", "spark"),
    ],
)
def test_a_wrong_call_is_one_line(prepare: Prepare, words: str, message: str) -> None:
    code, out, err = prepare("prepare", *words.split())
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err


# ``doctor``: what is here, what is not and why, and what is broken.


# The package has the command under this name, not the module.
doctor: Any = importlib.import_module("fast_axolotl.cli.doctor")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions that are installed; a test adds to them and takes away."""
    versions = {**dict.fromkeys(doctor._REQUIRED, "1"), "fast-axolotl": __version__, "plotly": "6"}
    versions |= {"jinja2": "3.1.6"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr(
        metadata, "distributions", lambda name: [SimpleNamespace(version=versions["fast-axolotl"])]
    )
    return versions


def test_it_shows_versions_and_gaps_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fast_axolotl.cli import app; app(['doctor'], standalone_mode=False); "
        "print([n for n in ('torch', 'numba', 'numpy', 'pyarrow', 'axolotl') if n in sys.modules])"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert f"{__version__} machine python: {sys.version.split()[0]}" in " ".join(
        done.stdout.split()
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "nothing is broken" in done.stdout


def test_a_machine_without_a_gpu_or_procfs_says_so_with_the_cure(
    tmp_path: Path, installed: dict[str, str]
) -> None:
    found = list(doctor.find_gaps(tmp_path / "proc"))
    gpus, machine = found[:2]
    assert gpus.endswith(": no NVIDIA driver. Measure on the machine that has the GPU.")
    assert machine.endswith(" has no /proc. Measure on Linux.")
    assert "s3:// paths: s3fs is not installed. pip install s3fs." in found
    assert "the HTML report" not in "".join(found)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    assert "has no /proc" not in "".join(doctor.find_gaps(tmp_path / "proc"))


def test_another_package_of_the_same_name_and_a_missing_dependency_are_problems(
    installed: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert list(doctor.find_problems()) == []
    del installed["psutil"]
    (tmp_path / "_rust_ext.abi3.so").touch()
    with monkeypatch.context() as patch:
        patch.setattr(doctor, "_PACKAGE", tmp_path)
        other, missing = doctor.find_problems()
    assert other.startswith("Another package has the same name")
    assert missing == "psutil is missing: pip install psutil."
    installed |= {"fast-axolotl": "0.2.0", "psutil": "7"}
    with pytest.raises(typer.Exit) as ended:
        doctor.doctor()
    assert ended.value.exit_code == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "those of 0.2.0. pip uninstall fast-axolotl" in shown
    assert app(["doctor", "--json"], standalone_mode=False) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["problems"]) == 1
    assert found["fast-axolotl"] == __version__
