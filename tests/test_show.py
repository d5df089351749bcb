"""What ``fast-axolotl show`` prints: the verdict first, every figure, and why one is missing."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fast_axolotl.cli.report import show
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import RunRecord, SystemRecord
from fast_axolotl.record.catalogue import FIGURES, GROUPS
from fast_axolotl.record.codec import to_json
from fast_axolotl.report.document import Document, Table
from fast_axolotl.report.runs import describe_gpus, show_short_summary
from fast_axolotl.report.terminal import print_document
from support.records import every, make_rank, make_run, make_system, write_run
from support.reports import shown


def two_ranks() -> RunRecord:
    ranks = [
        make_rank(
            rank=number,
            world_size=2,
            wait=every(16, 0.05 + 0.3 * number),
            fetches=3000,
            settings={"num_workers": 0, "batch_size": 8, "data_paths": ["a.parquet"]},
            spans={"evaluate": 0.05},
        )
        for number in (0, 1)
    ]
    return make_run(*ranks, system=make_system())


def test_every_figure_is_shown() -> None:
    names = [name for group in GROUPS.values() for name in group]
    assert sorted(names) == sorted(set(FIGURES) - {"duration_seconds", "start_to_step_seconds"})


@pytest.mark.parametrize("width", [60, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for record in (two_ranks(), make_run(system=make_system()), make_run(make_rank(fetches=0))):
        lines = shown(record, width=width).splitlines()
        assert all(len(line) <= width and line == line.rstrip() for line in lines)


def test_a_pipe_gets_plain_text_and_a_terminal_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in shown(two_ranks())
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert shown(two_ranks()).startswith("\x1b[")


def test_brackets_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(make_run(), run_dir="runs/[bold]x[/bold]", notes=("[red]",))
    assert "runs/[bold]x[/bold]" in text
    assert "[red]" in text
    table = Table(header=["reason"], rows=[["pip install 'ray[default]'"]])
    print_document(Document(title="", blocks=[table]))
    assert "'ray[default]'" in capsys.readouterr().out


def test_json_holds_every_field_and_no_nan() -> None:
    summary = replace(summarise(two_ranks()), settings={"x": float("nan"), "path": Path("a")})
    found = json.loads(to_json(summary), parse_constant=pytest.fail)
    assert set(found) == set(summary.as_dict())
    assert set(FIGURES) - set(found) == {"start_to_step_seconds"}
    assert found["settings"] == {"x": None, "path": "a"}
    assert found["verdict"]["kind"] == "data"
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]


def test_a_version_that_is_no_number_is_no_traceback(tmp_path: Path) -> None:
    write_run(tmp_path, make_run(make_rank()))
    path = tmp_path / "rank-0.jsonl"
    path.write_text(re.sub(r'"schema":\s*\d+', '"schema":"2"', path.read_text(), count=1))
    with pytest.raises(DataError, match="line 1: not a line of a record"):
        show(tmp_path)


@pytest.mark.parametrize("name", ["steps", "host_waits"])
def test_a_line_with_a_value_of_a_wrong_type_is_left_out_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write_run(tmp_path, make_run(make_rank()))
    path = tmp_path / "rank-0.jsonl"
    path.write_text(path.read_text().replace(f'"{name}":', f'"{name}":"many","x":'))
    show(tmp_path)
    assert "not a line of a record" in capsys.readouterr().out


def test_the_command_after_a_run_can_be_pasted() -> None:
    record = make_run(make_rank())
    record.path = "out dir ü/p [x]"
    file = io.StringIO()
    show_short_summary(summarise(record), record, file=file)
    assert "Every figure: fast-axolotl show --all 'out dir ü/p [x]'\n" in file.getvalue()


def test_show_prints_a_screen_of_the_latest_run_and_every_figure_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="fast-axolotl measure -- COMMAND"):
        show()
    for age, name in ((9, "older"), (0, "newer")):
        write_run(tmp_path / "fast-axolotl-runs" / name, two_ranks())
        for file in (tmp_path / "fast-axolotl-runs" / name).iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    show()
    screen = capsys.readouterr().out
    assert len(screen.splitlines()) <= 30
    assert "Every figure: fast-axolotl show --all fast-axolotl-runs/newer" in screen
    assert not any(word in screen for word in ("Σ", "PSI", "VmHWM"))
    show(is_all=True)
    assert len(capsys.readouterr().out.splitlines()) > 60


def test_the_gpus_of_a_run_are_named() -> None:
    record = make_run(make_rank(), system=make_system())
    assert describe_gpus(record) == ""
    start = record.systems[next(iter(record.systems))].start
    record.systems["other"] = SystemRecord(start=replace(start, gpu_names=("NVIDIA H200",) * 8))
    assert describe_gpus(record) == "8 × NVIDIA H200"


def test_one_step_is_told_as_one() -> None:
    text = shown(make_run(make_rank()), steps=1, fetches=1, warmup_steps=1)
    assert re.search("1 step, 1 fetch in .* 1 step of warm-up not counted", text)
