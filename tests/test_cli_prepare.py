"""``fast-axolotl prepare`` as people see it: progress, summary, errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl.cli import main
from fast_axolotl.cli.data import job_document, job_progress
from fast_axolotl.cluster.job import JobSummary, Stage
from fast_axolotl.report.terminal import print_document

Run = Callable[..., tuple[int, str, str]]

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
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, with a job that does nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yml").write_text("base_model: x\n")
    module = import_module("fast_axolotl.cluster.prepare")

    def fake(config: str, **options: Any) -> JobSummary:
        (tmp_path / "options.json").write_text(json.dumps({**options, "heard": None}))
        return SUMMARY

    def run(*words: str, has_axolotl: bool = True) -> tuple[int, str, str]:
        found = "a spec" if has_axolotl else None
        monkeypatch.setattr(sys.modules["fast_axolotl.cli.data"], "find_spec", lambda _: found)
        monkeypatch.setattr(module, "prepare", fake)
        monkeypatch.setattr(sys, "argv", ["fast-axolotl", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_options_reach_the_job_and_the_next_command_repeats_them(run: Run, tmp_path: Path) -> None:
    words = "--engine ray --memory 2GiB --workers 3 -o out --restart --json"
    code, out, _ = run("prepare", "c.yml", *words.split())
    assert code == 0
    assert json.loads((tmp_path / "options.json").read_text()) == (
        {"overrides": {}, "memory": 2**31, "workers": 3, "restart": True, "heard": None}
        | {"engine": "ray", "address": "auto", "output": "out", "work": None, "dry_run": False}
    )
    found = json.loads(out)
    assert found["rows_out"] == 900
    assert found["next_command"] == "axolotl train c.yml --dataset-prepared-path out"
    assert (
        "copy s3://b/p to FOLDER, then axolotl train"
        in run("prepare", "c.yml", "-o", "s3://b/p")[1]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("c.yml", "pip install axolotl"),
        ("none.yml", "does not exist"),
        ("c.yml --address h:1", "add --engine ray"),
        ("c.yml --memory much", "cannot read 'much' as a size"),
        ("c.yml --engine spark", "spark"),
    ],
)
def test_a_wrong_call_is_one_line(run: Run, words: str, message: str) -> None:
    code, out, err = run("prepare", *words.split(), has_axolotl=words != "c.yml")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err
