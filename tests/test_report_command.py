"""``fast-axolotl report``: which folders it takes, what it writes, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="plotly is not installed: pip install 'fast-axolotl[report]'")

from fast_axolotl.cli.report import make_report, report
from fast_axolotl.errors import DataError, MissingExtraError, MissingFileError, UsageError
from fast_axolotl.record import LineWriter, RunRecord
from fast_axolotl.record.comparison import Protocol
from fast_axolotl.report.picture import BROWSERS, find_browser, take_picture
from records import make_rank, make_run, make_system, steady
from reports import make_protocol, middle_of_a_protocol


def write_record(record: RunRecord, folder: Path) -> Path:
    for number, rank in record.ranks.items():
        writer = LineWriter(folder / f"rank-{number}.jsonl")
        for line in (rank.start, *rank.settings, *rank.marks, *rank.blocks, rank.end):
            if line is not None:
                writer.write(line)
        writer.close()
    if record.system is not None:
        writer = LineWriter(folder / "system.jsonl")
        for line in (record.system.start, *record.system.samples):
            writer.write(line)
        writer.close()
    return folder


def some_run(folder: Path, share: float = 0.3) -> Path:
    return write_record(make_run(make_rank(wait=steady(share)), system=make_system()), folder)


def some_protocol(folder: Path, protocol: Protocol | None = None) -> Path:
    protocol = protocol or make_protocol()
    for arm in protocol.arms:
        some_run(folder / arm.runs[-1].folder)
    (folder / "protocol.json").write_text(json.dumps(protocol.to_json()), encoding="utf-8")
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


def test_before_any_run_counts_the_warm_up_is_shown(tmp_path: Path) -> None:
    folder = some_protocol(tmp_path / "protocol", middle_of_a_protocol())
    made = make_report([folder], now=0.0)
    assert [run.summary.run_dir[-11:] for run in made.runs] == ["01-baseline", "/02-drop-in"]


def test_an_arm_without_runs_or_records_is_noted(tmp_path: Path) -> None:
    protocol = make_protocol()
    failed = tuple(replace(run, status="failed") for run in protocol.arms[1].runs)
    arms = (protocol.arms[0], replace(protocol.arms[1], runs=failed), protocol.arms[2])
    folder = some_protocol(tmp_path / "protocol", replace(protocol, arms=arms))
    for file in (folder / arms[2].runs[-1].folder).iterdir():
        file.unlink()
    made = make_report([folder], now=0.0)
    assert [run.name for run in made.runs] == ["baseline"]
    assert "No run of the arm drop-in counts" in made.notes[0]
    assert "The arm streaming has no charts" in made.notes[1]


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [some_run(tmp_path / name / "run") for name in ("a", "b")]
    assert [run.name for run in make_report(folders, now=0.0).runs] == ["a/run", "b/run"]


def test_json_tells_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    report([some_protocol(tmp_path / "protocol")], output=page, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == [{"path": str(page), "bytes": page.stat().st_size}]
    assert [run["verdict"] for run in found["runs"]] == ["data"] * 3
    assert found["answer"].startswith("Streaming helps")


def test_an_earlier_report_is_replaced_and_no_other_file_is(tmp_path: Path) -> None:
    run = some_run(tmp_path / "run")
    page, other = tmp_path / "page.html", tmp_path / "train.yml"
    report([run], output=page)
    report([run], output=page)
    other.write_text("base_model: x", encoding="utf-8")
    with pytest.raises(UsageError, match=r"train\.yml is there already"):
        report([run], output=other)
    assert other.read_text(encoding="utf-8") == "base_model: x"


def test_a_folder_that_is_not_there_and_two_protocols_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="nowhere"):
        make_report([tmp_path / "nowhere"], now=0.0)
    folders = [some_protocol(tmp_path / name) for name in ("one", "two")]
    with pytest.raises(UsageError, match="a report shows one"):
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
    with pytest.raises(DataError, match="took no picture"):
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
