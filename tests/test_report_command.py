"""``fast-axolotl report``: which folders it takes, what it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="plotly is not installed: pip install plotly jinja2")

from fast_axolotl.cli.demo import demo
from fast_axolotl.cli.report import make_report, report
from fast_axolotl.errors import DataError, MissingExtraError, MissingFileError, UsageError
from fast_axolotl.protocol import plan_commands
from fast_axolotl.record.codec import to_plain
from fast_axolotl.record.protocol_result import ProtocolResult
from fast_axolotl.report.picture import BROWSERS, find_browser, take_picture
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


def test_a_run_becomes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "deep" / "page.html"
    report([some_run(tmp_path / "run")], output=page)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out.startswith(f"{page}  ")
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_without_a_name_it_is_report_html(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report([some_run(tmp_path / "run")])
    assert (tmp_path / "report.html").exists()


def test_markdown_alone_writes_no_page_and_needs_no_plotly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    report([some_run(tmp_path / "run")], markdown=tmp_path / "comment.md")
    assert "Data-bound (rate)" in (tmp_path / "comment.md").read_text(encoding="utf-8")
    assert not (tmp_path / "report.html").exists()


def test_a_protocol_brings_the_last_counted_run_of_each_arm(tmp_path: Path) -> None:
    folder = some_protocol(tmp_path / "protocol")
    made = make_report([folder], now=0.0)
    assert made.protocol is not None
    assert [run.name for run in made.runs] == ["baseline", "drop-in", "streaming"]
    assert made.runs[0].summary.run_dir.endswith("runs/13-baseline")
    assert made.notes == ()


def test_a_protocol_that_tells_which_run_stands_for_an_arm_is_followed(tmp_path: Path) -> None:
    protocol = make_protocol()
    arms = tuple(replace(arm, shown_run=arm.runs[2].folder) for arm in protocol.arms)
    folder = some_protocol(tmp_path / "protocol", replace(protocol, arms=arms))
    some_run(folder / arms[0].runs[2].folder)
    made = make_report([folder], now=0.0)
    assert made.runs[0].summary.run_dir.endswith("runs/07-baseline")


def test_an_arm_without_runs_or_records_is_noted(tmp_path: Path) -> None:
    protocol = make_protocol()
    failed = tuple(replace(run, status="failed") for run in protocol.arms[1].runs)
    arms = (protocol.arms[0], replace(protocol.arms[1], runs=failed), protocol.arms[2])
    folder = some_protocol(tmp_path / "protocol", replace(protocol, arms=arms))
    for file in (folder / arms[2].runs[-1].folder).iterdir():
        file.unlink()
    made = make_report([folder], now=0.0)
    assert [run.name for run in made.runs] == ["baseline"]
    assert "drop-in has no measured run" in made.notes[0]
    assert "streaming has no charts" in made.notes[1]


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [some_run(tmp_path / name / "run") for name in ("a", "b")]
    assert [run.name for run in make_report(folders, now=0.0).runs] == ["a/run", "b/run"]


def test_an_earlier_report_is_replaced_and_no_other_file_is(tmp_path: Path) -> None:
    run = some_run(tmp_path / "run")
    page, other = tmp_path / "page.html", tmp_path / "train.yml"
    report([run], output=page)
    report([run], output=page)
    other.write_text("base_model: x", encoding="utf-8")
    with pytest.raises(UsageError, match=r"train\.yml already exists"):
        report([run], output=other)
    assert other.read_text(encoding="utf-8") == "base_model: x"


@pytest.mark.parametrize("flag", ["markdown", "png"])
def test_no_form_of_a_report_replaces_a_foreign_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setattr("fast_axolotl.report.picture.find_browser", lambda: "/bin/false")
    run, page = some_run(tmp_path / "run"), tmp_path / "page.html"
    for name in ("train.py", "notes.md", "slide.png"):
        (tmp_path / name).write_text("# mine\n", encoding="utf-8")
        with pytest.raises(UsageError, match=f"{name} already exists.*another name with --{flag}"):
            report([run], output=page, **{flag: tmp_path / name})
        assert (tmp_path / name).read_text(encoding="utf-8") == "# mine\n"
    assert not page.exists(), "nothing is written before all can be"


def test_markdown_of_an_earlier_report_is_replaced_and_so_is_an_empty_file(tmp_path: Path) -> None:
    comment = tmp_path / "comment.md"
    comment.touch()
    for share in (0.3, 0.01):
        report([some_run(tmp_path / f"run-{share}", share)], markdown=comment)
    text = comment.read_text(encoding="utf-8")
    assert text.startswith("<!-- fast-axolotl report -->\n\n**Compute-bound")


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link.md").symlink_to(tmp_path / "real.md")
    report([some_run(tmp_path / "run")], markdown=tmp_path / "link.md")
    assert (tmp_path / "link.md").is_symlink()
    assert (tmp_path / "real.md").read_text(encoding="utf-8").startswith("<!--")


def test_a_later_training_of_a_run_has_what_was_seen_from_outside(tmp_path: Path) -> None:
    some_run(tmp_path / "run")
    write_run(tmp_path / "run-2", make_run(make_rank(wait=steady(0.3))))
    [shown] = make_report([tmp_path / "run-2"], now=0.0).runs
    assert shown.record.system is not None
    write_run(tmp_path / "other-2", make_run(make_rank(wait=steady(0.3))))
    [shown] = make_report([tmp_path / "other-2"], now=0.0).runs
    assert shown.record.system is None


def test_a_picture_is_replaced_by_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = fake_browser(tmp_path)
    monkeypatch.setattr("fast_axolotl.report.picture.find_browser", lambda: browser)
    picture = tmp_path / "slide.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\nold")
    report([some_run(tmp_path / "run")], png=picture)
    assert picture.read_bytes() == b"fake"


def test_what_is_no_file_and_one_name_for_two_forms_are_refused(tmp_path: Path) -> None:
    run = some_run(tmp_path / "run")
    os.mkfifo(tmp_path / "pipe")
    for flag in ("output", "markdown"):
        for place in (tmp_path, tmp_path / "pipe"):
            with pytest.raises(UsageError, match="is not a file"):
                report([run], **{flag: place})
    with pytest.raises(UsageError, match="different files"):
        report([run], output=tmp_path / "one", markdown=tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_a_demo_refuses_its_file_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DEMO, "write_rows", lambda path: pytest.fail("begun"))
    other = tmp_path / "train.py"
    other.write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="already exists"):
        demo(output=other)


def test_an_interrupted_demo_promises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DEMO, "write_rows", lambda path: 0)
    monkeypatch.setattr(DEMO, "plan_demo", lambda data: plan_commands("a", "b"))
    monkeypatch.setattr("fast_axolotl.protocol.run_protocol", stop)
    with pytest.raises(KeyboardInterrupt):
        demo(output=tmp_path / "page.html")
    assert "continues from here" not in capsys.readouterr().err


def test_a_folder_that_is_not_there_and_two_protocols_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="nowhere"):
        make_report([tmp_path / "nowhere"], now=0.0)
    folders = [some_protocol(tmp_path / name) for name in ("one", "two")]
    with pytest.raises(UsageError, match="a report shows only one"):
        make_report(folders, now=0.0)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(DataError, match="cannot be written"):
        report([some_run(tmp_path / "run")], output=tmp_path / "file" / "page.html")


def test_a_picture_without_a_browser_names_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingExtraError, match="apt install chromium"):
        find_browser(lambda name: None)
    assert find_browser(lambda name: f"/bin/{name}" if name == BROWSERS[1] else None) == (
        f"/bin/{BROWSERS[1]}"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    page = tmp_path / "page.html"
    with pytest.raises(MissingExtraError, match="apt install chromium"):
        report([some_run(tmp_path / "run")], output=page, png=tmp_path / "slide.png")
    assert not page.exists(), "nothing is written before all can be"


def test_a_browser_that_takes_no_picture_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="could not take a picture"):
        take_picture(tmp_path / "page.html", tmp_path / "slide.png", browser="/bin/false")
    assert not (tmp_path / "slide.png").exists()


def fake_browser(folder: Path) -> str:
    """A command that takes a picture of four bytes."""
    path = folder / "browser"
    path.write_text(
        '#!/bin/sh\nfor word; do case "$word" in --screenshot=*) '
        'printf fake > "${word#--screenshot=}";; esac; done\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return str(path)


def test_a_picture_makes_its_folder(tmp_path: Path) -> None:
    picture = tmp_path / "deep" / "er" / "slide.png"
    take_picture(tmp_path / "page.html", picture, browser=fake_browser(tmp_path))
    assert picture.read_bytes() == b"fake"


def test_a_picture_that_cannot_be_written_is_named_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    browser = fake_browser(tmp_path)
    for picture in (tmp_path / "file" / "slide.png", tmp_path):
        with pytest.raises(DataError, match=r"cannot be written.*another name with --png") as found:
            take_picture(tmp_path / "page.html", picture, browser=browser)
        assert found.value.path == str(picture)
