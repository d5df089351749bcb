"""What ``fast-axolotl show`` prints: the verdict first, every figure, and why one is missing."""

from __future__ import annotations

import io
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console

from fast_axolotl.cli.show import SHOW_EXAMPLES, show
from fast_axolotl.errors import DataError, MissingFileError
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import LineWriter, Log, RunRecord, RunSummary
from fast_axolotl.record.summary import Verdict
from fast_axolotl.report.figures import GROUPS
from fast_axolotl.report.show import (
    render_summary,
    show_summary,
    summary_to_json,
    verdict_title,
)
from support.records import every, make_rank, make_run, make_system, steady

NOT_FIGURES = {
    "run_dir",
    "started",
    "is_finished",
    "end_reason",
    "error",
    "duration_seconds",
    "verdict",
    "world_size",
    "deciding_rank",
    "ranks",
    "steps",
    "fetches",
    "warmup_steps",
    "first_steady_step",
    "measured_seconds",
    "stall_source",
    "stall_pattern",
    "stall_period_of",
    "span_seconds",
    "hwm_by_phase",
    "flops_convention",
    "peak_source",
    "settings",
    "environment",
    "reasons",
    "notes",
}
"""Fields that are shown elsewhere than in the groups of figures."""


def two_ranks() -> RunRecord:
    ranks = [
        make_rank(
            rank=number,
            world_size=2,
            wait=every(16, 0.05 + 0.3 * number),
            fetches=3000,
            settings={"num_workers": 0, "batch_size": 8, "data_paths": ["a.parquet"]},
            spans={"evaluate": 0.5},
        )
        for number in (0, 1)
    ]
    return make_run(*ranks, system=make_system())


def test_every_figure_is_shown() -> None:
    shown = [name for group in GROUPS for row in group.rows for name in row.fields]
    assert len(shown) == len(set(shown))
    assert set(shown) == {item.name for item in fields(RunSummary)} - NOT_FIGURES


def test_the_verdict_is_first_then_why_then_next_then_the_figures() -> None:
    text = render_summary(summarise(two_ranks()))
    places = [
        text.index(part)
        for part in (
            "Data-bound (burst)",
            "\nWhy\n",
            "\nNext\n",
            "\nThe run\n",
            "\nWaiting for data\n",
            "\nRanks\n",
            "\nSettings\n",
            "\nEnvironment\n",
        )
    ]
    assert places == sorted(places)
    assert places[0] == 1


def test_a_figure_that_is_missing_is_a_dash_with_its_reason_below() -> None:
    lines = render_summary(summarise(make_run(make_rank())), width=200).splitlines()
    row = next(number for number, line in enumerate(lines) if line.startswith("  loader alone"))
    assert lines[row].split() == ["loader", "alone", "–"]
    below = next(line for line in lines[row:] if line.startswith("  – loader alone"))
    assert "was not drained without a model" in below


def test_parts_of_a_row_that_are_missing_stand_behind_its_name_once() -> None:
    rank = make_rank(settings={"num_workers": 2, "prefetch_factor": 2})
    text = render_summary(summarise(make_run(rank)), width=200)
    assert "– ready queue (depth and drift a step): the loader has no queue" in text


def test_a_small_figure_of_bytes_is_not_taken_for_a_share() -> None:
    summary = replace(summarise(two_ranks()), disk_bytes_per_second=40.0, disk_share=60.0)
    assert "0.0 MB/s · used 6000.0 %" in render_summary(summary)


def test_a_group_that_is_missing_as_a_whole_is_one_reason() -> None:
    text = render_summary(summarise(make_run(make_rank())), width=200)
    assert "GPU (NVML)\n  – nobody sampled the process tree" in text


def test_a_rank_has_a_line_each() -> None:
    text = render_summary(summarise(two_ranks()))
    ranks = text[text.index("\nRanks\n") : text.index("\nSettings\n")].split("\n")[3:5]
    assert [line.split()[:3] for line in ranks] == [["0", "5.1", "%"], ["1", "35.0", "%"]]


def test_a_peak_stands_with_its_source_and_a_figure_that_is_no_number_is_a_dash() -> None:
    summary = replace(
        summarise(two_ranks()), peak_tflops=989.0, peak_source="the data sheet", mfu=float("nan")
    )
    lines = render_summary(summary, width=200).splitlines()
    [peak] = [line for line in lines if line.startswith("  peak of a device")]
    assert peak.endswith(" 989 TFLOP/s  (the data sheet)")
    [mfu] = [line for line in lines if line.startswith("  MFU")]
    assert mfu.split() == ["MFU", "–"]


def test_large_figures_are_written_out() -> None:
    summary = replace(summarise(two_ranks()), model_flops_per_second=2.5e19)
    assert "25,000 PFLOP" in render_summary(summary)


def test_settings_environment_and_spans_are_told() -> None:
    text = render_summary(summarise(two_ranks()))
    for part in ("a.parquet", "batch_size", "3.12.0", "evaluate"):
        assert part in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for record in (two_ranks(), make_run(system=make_system()), make_run(make_rank(fetches=0))):
        text = render_summary(summarise(record), width=width)
        assert max(map(len, text.splitlines())) <= width
        assert all(line == line.rstrip() for line in text.splitlines())


def test_a_pipe_gets_plain_text_and_a_terminal_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = summarise(two_ranks())
    plain = io.StringIO()
    show_summary(summary, file=plain)
    assert "\x1b" not in plain.getvalue()
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = io.StringIO()
    show_summary(summary, file=coloured)
    assert coloured.getvalue().startswith("\x1b[")


@pytest.mark.parametrize(
    ("kind", "subtype", "title"),
    [
        ("data", "burst", "Data-bound (burst)"),
        ("io", "", "I/O-bound"),
        ("swap", "", "Swap-bound"),
        ("compute", "", "Compute-bound"),
        ("communication", "skew", "Communication-bound (skew)"),
        ("mixed", "", "Mixed"),
        ("inconclusive", "short", "Inconclusive (short)"),
    ],
)
def test_every_kind_of_verdict_has_a_title(kind: str, subtype: str, title: str) -> None:
    verdict = Verdict(kind=kind, subtype=subtype, headline="So.")  # type: ignore[arg-type]
    assert verdict_title(verdict) == title
    summary = replace(summarise(make_run(make_rank())), verdict=verdict)
    assert render_summary(summary).startswith(f" {title}  So.")


def test_what_went_wrong_comes_before_the_verdict() -> None:
    rank = make_rank(end=None)
    rank.add(Log(t=1.0, step=10, values={"loss": 2.0}))
    rank.add(Log(t=2.0, step=20, values={"loss": float("nan")}))
    record = make_run(rank)
    lines = render_summary(summarise(record), record=record).splitlines()
    assert lines[0] == "The losses are NaN from step 20 on."
    assert lines[1].startswith("The run was cut off after 6.0 s, or still goes on")
    assert render_summary(summarise(record)).startswith("The run was cut off")
    file = io.StringIO()
    show_summary(summarise(record), record=record, file=file)
    assert file.getvalue().startswith("The losses are NaN")


def test_markup_in_names_is_not_taken_for_style() -> None:
    summary = replace(summarise(make_run()), run_dir="runs/[bold]x[/bold]", notes=("[red]",))
    text = render_summary(summary)
    assert "runs/[bold]x[/bold]" in text
    assert "[red]" in text


def test_json_holds_every_field_and_no_nan() -> None:
    summary = replace(summarise(two_ranks()), settings={"x": float("nan"), "path": Path("a")})
    found = json.loads(summary_to_json(summary), parse_constant=pytest.fail)
    assert set(found) == {item.name for item in fields(RunSummary)}
    assert found["settings"] == {"x": None, "path": "a"}
    assert found["verdict"]["kind"] == "data"
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]


def write(record: RunRecord, folder: Path) -> None:
    for number, rank in record.ranks.items():
        writer = LineWriter(folder / f"rank-{number}.jsonl")
        lines = [rank.start, *rank.settings, *rank.marks, *rank.blocks, rank.end]
        for line in lines:
            if line is not None:
                writer.write(line)
        writer.close()


def test_the_command_shows_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = make_run(make_rank(wait=steady(0.3)))
    write(record, tmp_path)
    show(tmp_path)
    assert capsys.readouterr().out.startswith(" Data-bound (rate)")
    show(tmp_path, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["stall_fraction"] == pytest.approx(0.3, abs=0.001)
    assert found["run_dir"] == str(tmp_path)


def test_a_record_that_was_cut_off_is_shown_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(make_run(make_rank(wait=steady(0.3), end=None)), tmp_path)
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(path.read_bytes()[:-100])
    show(tmp_path)
    text = capsys.readouterr().out
    assert "cut off, after" in text
    assert "cut off in line" in text


def test_a_folder_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="nowhere"):
        show(tmp_path / "nowhere")


def test_an_empty_file_of_a_rank_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").touch()
    with pytest.raises(DataError, match=r"rank-0\.jsonl has no start line"):
        show(tmp_path)


def edit_line(path: Path, kind: str, **values: object) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == kind:
            line.update(values)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_a_version_that_is_no_number_is_no_traceback(tmp_path: Path) -> None:
    write(make_run(make_rank()), tmp_path)
    edit_line(tmp_path / "rank-0.jsonl", "start", schema="2")
    with pytest.raises(DataError, match="line 1: not a line of a record"):
        show(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        {"steps": "many"},
        {"wall_seconds": [1]},
        {"host_waits": 3},
        {"host_waits": {"1": "x"}},
        {"slow": [{"fetch": 1, "row": 0, "seconds": "long"}]},
        {"slow": [3]},
        {"spans": {"log": None}},
        {"first_step": None},
    ],
    ids=str,
)
def test_a_line_with_values_of_wrong_types_is_left_out_with_a_note(
    values: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(make_run(make_rank()), tmp_path)
    edit_line(tmp_path / "rank-0.jsonl", "steps", **values)
    show(tmp_path)
    assert "not a line of a record" in capsys.readouterr().out


def test_the_example_of_the_help_names_folders_as_they_are_made() -> None:
    assert "fast-axolotl-runs/20300131-120000-" in SHOW_EXAMPLES
