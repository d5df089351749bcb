"""The command line as a user meets it: in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fast_axolotl.cli import app, options
from support.children import FAST_AXOLOTL, clean_environment, run_child
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
        assert f"fast-axolotl {name}" in help_of(name).partition("Examples:")[2], name


def test_a_shell_completes_commands_options_and_values() -> None:
    def complete(words: str, at: int) -> list[str]:
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(at)}
        return run(**asked, _FAST_AXOLOTL_COMPLETE="complete_bash").stdout.split()

    assert complete("fast-axolotl pro", 1) == ["protocol"]
    assert complete("fast-axolotl read --on-e", 2) == ["--on-error"]
    assert complete("fast-axolotl read --on-error ", 3) == ["raise", "skip"]
    assert "complete -o default" in run("--show-completion", "bash").stdout
