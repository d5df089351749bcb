"""``fast-axolotl report``: which folders it takes, what it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="plotly is not installed: pip install plotly jinja2")

from fast_axolotl.cli.demo import demo
from fast_axolotl.cli.report import make_documents, report
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.protocol.plan import plan_commands
from fast_axolotl.record.codec import to_plain
from fast_axolotl.record.protocol_result import ProtocolResult
from support.records import make_rank, make_run, make_system, steady, write_run
from support.reports import make_protocol

DEMO = sys.modules["fast_axolotl.cli.demo"]
"""The module: its package has the command of the same name."""


def some_run(folder: Path, share: float = 0.3) -> Path:
    write_run(folder, make_run(make_rank(wait=steady(share)), system=make_system()))
    return folder


def some_protocol(folder: Path, protocol: ProtocolResult | None = None) -> Path:
    protocol = protocol or make_protocol()
    for arm in protocol.arms:
        some_run(folder / arm.runs[-1].folder)
    (folder / "protocol.json").write_text(json.dumps(to_plain(protocol)), encoding="utf-8")
    return folder


def runs_of(*folders: Path) -> dict[str, Any]:
    """The summaries of a page by the names of its runs."""
    page, _ = make_documents(folders)
    return {run.name: run.summary for run in page.data["runs"]}


def test_a_run_becomes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report([some_run(tmp_path / "run")])
    assert (tmp_path / "report.html").exists()
    capsys.readouterr()
    page = tmp_path / "deep" / "page.html"
    report([tmp_path / "run"], output=page)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out.startswith(f"{page}  ")
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_a_followed_run_is_a_page_that_reloads_until_every_rank_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [make_rank(rank=number, world_size=2, wait=steady(0.3)) for number in (0, 1)]
    run, page, seen = tmp_path / "run", tmp_path / "page.html", []

    def sleep(seconds: float) -> None:
        seen.append(page.read_text(encoding="utf-8"))
        write_run(run, make_run(*ranks, system=make_system()))

    monkeypatch.setattr("time.sleep", sleep)
    write_run(run, make_run(ranks[0], replace(ranks[1], end=None), system=make_system()))
    report([run], output=page, is_followed=True)
    assert len(seen) == 1
    assert 'data-reload="5.0"' in seen[0]
    assert "running, updated at" in seen[0]
    assert "without a final record" not in seen[0]
    assert "data-reload=" not in page.read_text(encoding="utf-8")
    assert page.as_uri() in capsys.readouterr().err


def test_markdown_alone_writes_no_page_and_needs_no_plotly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    report([some_run(tmp_path / "run")], markdown=tmp_path / "comment.md")
    assert not (tmp_path / "report.html").exists()


def test_a_protocol_brings_the_run_that_stands_for_each_arm(tmp_path: Path) -> None:
    protocol = make_protocol()
    runs = runs_of(some_protocol(tmp_path / "last"))
    assert list(runs) == ["baseline", "drop-in", "streaming"]
    assert runs["baseline"].run_dir.endswith("runs/13-baseline")
    arms = tuple(replace(arm, shown_run=arm.runs[2].folder) for arm in protocol.arms)
    folder = some_protocol(tmp_path / "told", replace(protocol, arms=arms))
    some_run(folder / arms[0].runs[2].folder)
    assert runs_of(folder)["baseline"].run_dir.endswith("runs/07-baseline")


def test_an_arm_without_runs_or_records_is_noted(tmp_path: Path) -> None:
    protocol = make_protocol()
    failed = tuple(replace(run, status="failed") for run in protocol.arms[1].runs)
    arms = (
        protocol.arms[0],
        replace(protocol.arms[1], runs=failed, shown_run=""),
        protocol.arms[2],
    )
    folder = some_protocol(tmp_path / "protocol", replace(protocol, arms=arms))
    for file in (folder / arms[2].runs[-1].folder).iterdir():
        file.unlink()
    page, _ = make_documents([folder])
    assert list(runs_of(folder)) == ["baseline"]
    assert "drop-in has no measured run" in page.footnotes[0]
    assert "streaming has no charts" in page.footnotes[1]


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [some_run(tmp_path / name / "run") for name in ("a", "b")]
    assert list(runs_of(*folders)) == [str(folder) for folder in folders]


def test_an_earlier_report_is_replaced_a_link_stays_one_and_no_other_file_is_replaced(
    tmp_path: Path,
) -> None:
    page, comment, other = (tmp_path / name for name in ("page.html", "comment.md", "train.yml"))
    comment.touch()
    (tmp_path / "link.md").symlink_to(comment)
    for share in (0.3, 0.01):
        report(
            [some_run(tmp_path / f"run-{share}", share)], output=page, markdown=tmp_path / "link.md"
        )
    assert (tmp_path / "link.md").is_symlink()
    text = comment.read_text(encoding="utf-8")
    assert text.startswith("<!-- fast-axolotl report -->\n\n**Compute-bound")
    other.write_text("base_model: x", encoding="utf-8")
    for flag, name in (("output", "-o"), ("markdown", "--markdown")):
        target = {"output": tmp_path / "new.html", flag: other}
        with pytest.raises(UsageError, match=rf"train\.yml already .*another name with {name}"):
            report([tmp_path / "run-0.3"], **target)
        assert other.read_text(encoding="utf-8") == "base_model: x"
    assert not (tmp_path / "new.html").exists(), "nothing is written before all can be"


def test_what_cannot_be_a_report_is_refused(tmp_path: Path) -> None:
    run = some_run(tmp_path / "run")
    os.mkfifo(tmp_path / "pipe")
    for flag in ("output", "markdown"):
        with pytest.raises(UsageError, match="is not a"):
            report([run], **{flag: tmp_path / "pipe"})
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be written"):
        report([run], output=tmp_path / "file" / "page.html")


def test_a_demo_refuses_its_file_before_it_begins_and_promises_nothing_when_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "train.py"
    other.write_text("mine", encoding="utf-8")
    monkeypatch.setattr(DEMO, "write_rows", lambda path: pytest.fail("begun"))
    with pytest.raises(UsageError, match="already exists"):
        demo(output=other)

    def stop(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DEMO, "write_rows", lambda path: 0)
    monkeypatch.setattr(DEMO, "plan_demo", lambda data: plan_commands("a", "b"))
    monkeypatch.setattr("fast_axolotl.protocol.runner.run_protocol", stop)
    with pytest.raises(KeyboardInterrupt):
        demo(output=tmp_path / "page.html")
    assert "continues from here" not in capsys.readouterr().err
