"""The live view without a terminal: what is shown, how it fits, and the loop around it."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from fast_axolotl.cli.report import show
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.measure.summary import summarise
from fast_axolotl.protocol.child import read_last_lines
from fast_axolotl.record import Log, RunRecord, SystemRecord
from fast_axolotl.record.catalogue import FIGURES, GROUPS
from fast_axolotl.record.codec import to_json
from fast_axolotl.report.document import Document, Table
from fast_axolotl.report.live import Display, Moment, follow, format_line, take_moment
from fast_axolotl.report.runs import describe_gpus, show_short_summary
from fast_axolotl.report.terminal import print_document
from support.records import START_TIME, every, make_rank, make_run, make_system, steady, write_run
from support.reports import report_run, screen_of, shown

SECONDS = 9.05
"""How long ``running`` has run."""


def moment_of(record: RunRecord, *, after: float = SECONDS, **named: Any) -> Moment:
    return take_moment("runs/a", record, summarise, clock=START_TIME + after, **named)


def running(share: float = 0.3, **named: Any) -> RunRecord:
    rank = make_rank(wait=steady(share), fetches=900, tokens=100, end=None, **named)
    return make_run(rank, system=make_system(end=None, read_bytes=2.5e8))


def many_ranks(number: int) -> RunRecord:
    ranks = [
        make_rank(
            rank=rank,
            world_size=number,
            wait=steady(0.02 + 0.005 * rank),
            tokens=50,
            end="exception" if rank == number - 1 else None,
        )
        for rank in range(number)
    ]
    return make_run(*ranks, system=make_system(end=None))


@pytest.mark.parametrize("number", [1, 2, 64])
def test_every_moment_fits_the_width_of_its_terminal(number: int) -> None:
    moment = moment_of(many_ranks(number), log=["長い行" * 40, "", "end"], after=99.0)
    for width in (1, 18, 40, 60, 80, 300):
        lines = screen_of(moment, width=width).splitlines()
        assert max(map(cell_len, lines)) <= width


def test_nothing_is_told_of_what_has_not_begun() -> None:
    moment = moment_of(make_run())
    assert "stall" not in screen_of(moment) + format_line(moment)
    system = make_system(end=None, samples=2)
    assert "working set" in screen_of(moment_of(make_run(system=system)))


def test_now_is_the_last_seconds() -> None:
    rank = make_rank(wait=lambda fetch: 0.01 if fetch > 1000 else 0.0, fetches=2000, end=None)
    moment = moment_of(make_run(rank))
    assert moment.now.stall_fraction == pytest.approx(0.5)
    assert (moment.summary.stall_fraction or 0.0) < 0.4
    assert "50.0 % now · 3" in screen_of(moment)
    # So are the samples.
    record = running()
    samples = record.system.samples
    for number in range(len(samples) - 8, len(samples)):
        samples[number] = dataclasses.replace(samples[number], read_bytes=samples[-9].read_bytes)
    moment = moment_of(record)
    assert moment.now.read_bytes_per_second == 0
    assert (moment.summary.read_bytes_per_second or 0) > 0


def test_device_waits_count_where_there_are_any_and_the_host_s_stand_beside() -> None:
    rank = make_rank(wait=steady(0.5), device_wait=steady(0.02), fetches=900, end=None)
    text = screen_of(moment_of(make_run(rank)))
    assert re.search(r"^stall +2\.0 %$", text, re.M)
    assert re.search(r"^CPU-side wait +98\.0 %$", text, re.M)


def test_a_run_that_makes_no_step_or_has_ended_is_noticed() -> None:
    assert "no step for 1 min 30 s" in screen_of(moment_of(running(), after=100 + SECONDS - 6))
    assert "training has ended" in screen_of(moment_of(make_run(make_rank()), after=0.0))
    assert "training failed" in screen_of(moment_of(make_run(make_rank(end="exception"))))


def test_what_is_no_number_breaks_nothing() -> None:
    record = running()
    blocks = record.ranks[0].blocks
    for index in range(0, len(blocks), 2):
        blocks[index] = dataclasses.replace(
            blocks[index], wall_seconds=math.nan, host_wait_seconds=math.inf, t=math.nan
        )
    record.ranks[0].add(Log(t=1.0, step=3, values={"loss": math.nan}))
    assert "loss nan" in screen_of(moment_of(record), width=80)
    assert format_line(moment_of(record))


def test_the_end_of_a_log_is_shown_without_escapes_and_overwritten_progress(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(
        b"first\n\x1b[31mred\x1b[0m\n\n 10%\r 20%\r 30%\n\x1b]0;title\x07\ttab\xff\n40%\r50%\r"
    )
    assert read_last_lines(log, 4) == ["red", " 30%", " tab\ufffd", "50%"]


class Watching(Display):
    """Time that passes only where somebody waits or works, and when something was drawn."""

    def __init__(self, *, cost: float = 0.0, ends_at: float = math.inf) -> None:
        super().__init__(io.StringIO())
        self.now, self.cost, self.ends_at = 0.0, cost, ends_at
        self.drawn: list[float] = []

    def show(self, moment: Moment) -> None:
        super().show(moment)
        self.drawn.append(self.now)

    def read(self) -> RunRecord:
        self.now += self.cost
        return running()

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def follow(self, seconds: float | None = None) -> str:
        return follow(
            self.read,
            summarise,
            self,
            title="run",
            ending=lambda record: "the run finished" if self.now >= self.ends_at else "",
            seconds=seconds,
            clock=lambda: self.now,
            sleep=self.sleep,
        )


def test_it_draws_every_second_until_the_run_ends_and_a_long_record_less_often() -> None:
    watching = Watching(ends_at=2.5)
    assert watching.follow() == "the run finished"
    assert watching.drawn == [0.0, 1.0, 2.0, 3.0]
    assert Watching().follow(1.5) == "the time was up"
    watching = Watching(cost=2.0)
    watching.follow(61.0)
    assert watching.drawn == [2.0, 22.0, 42.0, 62.0, 64.0]


# What ``show`` prints: the verdict first, every figure, and why one is missing.


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
    assert set(FIGURES) <= set(found)
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
    show_short_summary(report_run(record), file=file)
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
    show(is_list=True)
    table = capsys.readouterr().out
    assert "older" in table
    assert "newer" in table
    with pytest.raises(UsageError, match="no record in elsewhere"):
        show(Path("elsewhere"), is_list=True)


def test_the_gpus_of_a_run_are_named() -> None:
    record = make_run(make_rank(), system=make_system())
    assert describe_gpus(record) == ""
    start = record.systems[next(iter(record.systems))].start
    record.systems["other"] = SystemRecord(start=replace(start, gpu_names=("NVIDIA H200",) * 8))
    assert describe_gpus(record) == "8 × NVIDIA H200"


def test_one_step_is_told_as_one() -> None:
    text = shown(make_run(make_rank()), steps=1, fetches=1, warmup_steps=1)
    assert re.search("1 step, 1 fetch in .* 1 step of warm-up not counted", text)
