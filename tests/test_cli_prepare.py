"""``fast-axolotl prepare`` as people see it: progress, plan, summary, errors, and its record."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fast_axolotl.cli import main
from fast_axolotl.cli.job_progress import JobProgress, plan_table, summary_table
from fast_axolotl.cli.job_record import JobRecord
from fast_axolotl.cluster.job import JobPlan, JobSummary
from fast_axolotl.cluster.tasks import Event, Task
from fast_axolotl.record.codec import from_plain

Run = Callable[..., tuple[int, str, str]]

GB = 10**9
UNITS = {"path": "chat.jsonl", "split": "train", "units": 812, "num_bytes": 100 * GB, "whole": None}
WHOLE = {**UNITS, "path": "hub/alpaca", "whole": "a Hub set"}
SIZES = {"rows": 81_200_000, "tokens": 24_300_000_000, "bytes_out": 88 * GB}
DISK = {"disk_needed": 185 * GB, "disk_free": 400 * GB, "coordinator_bytes": 3 * GB}
PLAN = from_plain(
    JobPlan,
    {"datasets": [UNITS, WHOLE], "outputs": ["prepared/5f0a"], "work": "prepared/.work"}
    | {"stages": {"rows": 814, "buckets": 64}, "bytes_between": {"rows": 97 * GB}, **SIZES, **DISK},
)
COUNTS = {"tasks": 814, "done_before": 0, "retried": 2}
STAGE = {"name": "rows", **COUNTS, "seconds": 1500.0, "task_seconds": 9e4, "bytes_out": 97 * GB}
NODES = [{"name": f"n{number:02}", "tasks": 9, "peak_bytes": GB + number} for number in range(20)]
ROWS = {"rows_in": 1000, "duplicates": 60, "rows_out": 900, "tokens": 2_000_000}
SUMMARY = from_plain(
    JobSummary,
    {"outputs": ["prepared/5f0a"], **ROWS, "bytes_in": GB, "bytes_out": GB, "seconds": 1800.0}
    | {"dropped": {"longer than sequence_len": 30, "without a label": 10}, "nodes": NODES}
    | {"stages": [STAGE, {**STAGE, "name": "shards", "seconds": 200.0}]}
    | {"extra": {"packing_efficiency": 0.98}},
)
JOB = JobRecord(title="prepare c.yml", started=0.0, settings={"engine": "local"}, summary=SUMMARY)


def feed(progress: JobProgress, num_tasks: int = 3, *, stage: str = "rows") -> None:
    """A stage whose first task was done before, and the second was tried again."""
    tasks = [Task(stage=stage, name=f"{number}", function="a:b") for number in range(num_tasks)]
    ran = {"node": "n1", "seconds": 1.0, "peak_bytes": 2 * 10**9}
    answer = {"rows": 1000, "tokens": 50_000, "bytes_in": 10**6, "bytes_out": 10**6, "ran": ran}
    progress.hear(Event(kind="stage", stage=stage, total=num_tasks))
    earlier = Event(kind="done", stage=stage, task=tasks[0], answer=answer, is_earlier=True)
    progress.hear(earlier)
    for place, task in enumerate(tasks[1:]):
        progress.hear(Event(kind="started", stage=stage, task=task))
        if not place:
            progress.hear(Event(kind="retried", stage=stage, task=task, reason="node n2 was lost"))
        progress.hear(Event(kind="done", stage=stage, task=task, answer=answer))


def ticking(seconds: float) -> Callable[[], float]:
    """A clock that goes on by so much whenever it is read."""
    moments = iter(range(10**9))
    return lambda: next(moments) * seconds


def test_outside_a_terminal_stages_begin_and_end_with_a_line() -> None:
    out = io.StringIO()
    with JobProgress("prepare", out=out, clock=ticking(0.01)) as progress:
        feed(progress)
        print("a line of Ray's log")
    lines = out.getvalue().splitlines()
    assert lines[0] == "fast-axolotl: rows: starting, 0/3 tasks"
    assert lines[1].startswith("fast-axolotl: rows: done, 3/3 tasks in 0.1 s · 3,000 rows · 3 MB ")
    assert lines[1].endswith("2 GB in one process · 1 retried (last: node n2 was lost)")
    assert lines[2:] == ["a line of Ray's log"], "stdout is kept for results"


def test_within_a_stage_a_line_comes_every_30_seconds_and_tells_where_it_stopped() -> None:
    out = io.StringIO()
    progress = JobProgress("prepare", out=out, clock=ticking(5.0))
    with suppress(KeyboardInterrupt), progress:
        feed(progress, 40)
        progress.hear(Event(kind="stage", stage="shards", total=9))
        raise KeyboardInterrupt
    lines = out.getvalue().splitlines()
    middle = [line for line in lines if line.startswith("fast-axolotl: rows: ")][1:-1]
    assert 8 < len(middle) < 80 / 6 + 2
    assert "left" in middle[-1]
    assert lines[-1].startswith("fast-axolotl: shards: stopped at 0/9 tasks")


def test_a_hundred_thousand_tasks_leave_nothing_behind() -> None:
    progress = JobProgress("prepare", out=io.StringIO(), clock=ticking(1e-6))
    feed(progress, 100_000)
    stage = progress._stages["rows"]
    assert (len(stage.running), stage.done, stage.sums["rows"]) == (0, 100_000, 10**8)


def test_the_display_has_a_line_for_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    with JobProgress("prepare chat.yml", out=out, clock=ticking(0.01)) as progress:
        feed(progress)
        progress.hear(Event(kind="stage", stage="buckets", total=0))
        progress.hear(Event(kind="stage", stage="shards", total=4))
        task = Task(stage="shards", name="0", function="a:b")
        progress.hear(Event(kind="started", stage="shards", task=task))
        print("(raylet) a line of Ray's log")
        console = Console(record=True, width=100, file=io.StringIO())
        assert progress._live is not None
        console.print(progress._live.get_renderable())
    lines = console.export_text().splitlines()
    assert lines[0] == "prepare chat.yml"
    assert [line.split()[0] for line in lines[1:4]] == ["rows", "buckets", "shards"]
    assert ["3/3 tasks" in lines[1], "0/4 tasks" in lines[3]] == [True, True]
    assert lines[4].startswith("  1 task running · 1 node")
    assert "(raylet) a line of Ray's log" in out.getvalue(), "printed above the display, on stderr"


def test_a_plan_names_units_stages_disk_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    plan_table(PLAN)
    text = capsys.readouterr().out
    expected = ("812", "64", "97 GB", "185 GB at most, 400 GB free", "about 24,300,000,000")
    expected += ("hub/alpaca is first loaded completely on this machine: a Hub set.",)
    assert [words for words in expected if words not in text] == []


def test_a_summary_names_reasons_stages_nodes_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    summary_table(replace(JOB, price_per_hour=6.0, next_command="axolotl train c.yml"))
    text = " ".join(capsys.readouterr().out.split())
    expected = (
        "dropped 40 (4.0 %): 30 longer than sequence_len, 10 without a label",
        "duplicates 60 (6.0 %)",
        "tokens 2,000,000 (1,111 tokens/s)",
        "cost 3 at 6 per hour for all nodes together; 1.5 per million tokens",
        "packing efficiency 0.98",
        "4 more nodes with lower peaks",
        "next axolotl train c.yml",
    )
    assert [words for words in expected if words not in text] == []


def test_a_continued_job_gives_no_rate_and_no_cost_per_token() -> None:
    stages = (replace(SUMMARY.stages[0], done_before=5),)
    continued = replace(JOB, summary=replace(SUMMARY, stages=stages), price_per_hour=6.0)
    pairs = dict(continued.pairs())
    assert pairs["tokens"] == "2,000,000"
    assert pairs["time"] == "30 min 00 s; 5 tasks done by an earlier run"
    assert "per million" not in pairs["cost"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, with a job that does nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yml").write_text("base_model: x\n")
    module = import_module("fast_axolotl.cluster.prepare")

    def fake(config: str, **options: Any) -> JobSummary:
        (tmp_path / "options.json").write_text(json.dumps({**options, "heard": None}))
        return SUMMARY

    def run(*words: str, plan: JobPlan = PLAN, has_axolotl: bool = True) -> tuple[int, str, str]:
        found = "a spec" if has_axolotl else None
        monkeypatch.setattr(sys.modules["fast_axolotl.cli.prepare"], "find_spec", lambda _: found)
        monkeypatch.setattr(module, "prepare", fake)
        monkeypatch.setattr(module, "plan_preparation", lambda config, **options: plan)
        monkeypatch.setattr(sys, "argv", ["fast-axolotl", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def test_options_reach_the_job_and_the_next_command_repeats_them(run: Run, tmp_path: Path) -> None:
    words = "--engine ray --memory 2GiB --workers 3 -o out --restart --json --price 2 --record r"
    sets = ["--set", "sequence_len=64", "--set", "sample_packing=false", "--set", "hf_token=abc"]
    code, out, err = run("prepare", "c.yml", *words.split(), *sets)
    assert (code, err.splitlines()[-1]) == (
        0,
        "fast-axolotl: as an HTML report: fast-axolotl report r",
    )
    sent = {"sequence_len": 64, "sample_packing": False, "hf_token": "abc"}
    assert json.loads((tmp_path / "options.json").read_text()) == (
        {"overrides": sent, "memory": 2**31, "workers": 3, "restart": True, "heard": None}
        | {"engine": "ray", "address": "auto", "output": "out", "work": None}
    )
    found = json.loads(out)
    assert (found["rows_out"], found["price_per_hour"], found["record"]) == (900, 2.0, "r")
    assert found["next_command"] == (
        "axolotl train c.yml --sequence-len 64 --no-sample-packing --hf-token '***' "
        "--dataset-prepared-path out"
    )
    assert "abc" not in (tmp_path / "r" / "job.json").read_text()
    assert (
        "copy s3://b/p to FOLDER, then axolotl train"
        in run("prepare", "c.yml", "-o", "s3://b/p")[1]
    )


def test_a_plan_that_the_disk_cannot_hold_is_printed_and_refused(run: Run, tmp_path: Path) -> None:
    assert run("prepare", "c.yml", "--dry-run")[0] == 0
    code, out, err = run("prepare", "c.yml", "--dry-run", "--json", plan=replace(PLAN, disk_free=9))
    assert (code, json.loads(out)["disk_free"]) == (1, 9)
    assert err.startswith("fast-axolotl: prepared/.work: the disk is too small: this job needs")
    assert not (tmp_path / "fast-axolotl-runs").exists(), "a dry run leaves nothing"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("c.yml", "pip install axolotl"),
        ("none.yml", "does not exist"),
        ("c.yml --address h:1", "add --engine ray"),
        ("c.yml --set sequence_len", "write --set sequence_len=4096"),
        ("c.yml --set datasets=[]", "edit the configuration instead"),
        ("c.yml --memory much", "cannot read 'much' as a size"),
        ("c.yml --record .", "pass an empty folder with --record"),
        ("c.yml --engine spark", "spark"),
    ],
)
def test_a_wrong_call_is_one_line(run: Run, words: str, message: str) -> None:
    code, out, err = run("prepare", *words.split(), has_axolotl=words != "c.yml")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err


def test_the_record_is_shown_and_becomes_a_page(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="pip install plotly jinja2")
    assert run("prepare", "c.yml", "--record", "r")[0] == 0
    assert JobRecord.read(tmp_path / "r").summary == SUMMARY
    assert "longer than sequence_len" in run("show", "r")[1]
    code, out, _ = run("report", "r", "-o", "p.html", "--markdown", "p.md", "--json")
    assert (code, json.loads(out)["job"]["summary"]["rows_out"]) == (0, 900)
    page = (tmp_path / "p.html").read_text()
    assert "900 of 1,000 rows (2,000,000 tokens) written in 30 min 00 s." in page
    assert 'aria-label="rows 83.3 %, shards 11.1 %, other 5.6 %"' in page
    assert len(page) < 100_000, "no charts, so no library"
    assert "| duplicates | 60 (6.0 %) |" in (tmp_path / "p.md").read_text()
    assert run("report", "r", "-o", "p.html")[0] == 0, "a page of ours is replaced"
    assert "pass it alone" in run("report", "r", "r")[2]
    for words in (["compare", "r", "r"], ["watch", "r"]):
        assert "the record of a data job, which has no steps" in run(*words)[2]
    (tmp_path / "r" / "job.json").write_text('{"schema": 9}')
    assert "not the record of a job (its schema is 9)" in run("show", "r")[2]
