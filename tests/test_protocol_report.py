"""A protocol as text: what comes first, what is left out, and data that tries to be markup."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from fast_axolotl.protocol import plan_commands, run_protocol
from fast_axolotl.record.protocol_result import ProtocolResult
from fast_axolotl.report.matrix import (
    protocol_markdown,
    render_protocol,
    show_comparison,
    show_protocol,
)
from fast_axolotl.report.protocol_progress import protocol_progress
from support.protocol import FakeLaunch


def make(folder: Path, launch: FakeLaunch, pairs: int = 3) -> ProtocolResult:
    return run_protocol(
        plan_commands("cmd a", "cmd b", pairs=pairs, warmup=0),
        folder,
        environment={},
        launch=launch,
        clock=launch.clock,
        page_cache=lambda drop: "as the last run left it; 1.00 GB cached",
    )


@pytest.fixture
def found(tmp_path: Path) -> ProtocolResult:
    def step(arm: str, run: int) -> float:
        return (0.012 if arm == "candidate" else 0.01) * (1 + 0.001 * (run % 2))

    return make(tmp_path / "p", FakeLaunch(step_seconds=step))


def test_the_answer_comes_before_the_matrix(found: ProtocolResult) -> None:
    text = render_protocol(found)
    assert text.index("candidate is WORSE") < text.index("│ real tokens")
    assert "worse" in text
    assert "no detectable change" in text
    assert "Losses: equal to the last digit" in text
    assert "A B B A A B (A baseline, B candidate)" in text
    assert "Page cache before each run: as the last run left it." in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_figures_that_no_arm_has_are_told_below_with_their_reason(found: ProtocolResult) -> None:
    text = " ".join(render_protocol(found).split())
    assert "Not measured:" in text
    assert "MFU: the model was not seen" in text


def test_different_losses_are_red_and_first(tmp_path: Path) -> None:
    launch = FakeLaunch(losses=lambda arm, n: (2.0 if arm == "baseline" else 3.0,))
    protocol = make(tmp_path / "p", launch)
    lines = render_protocol(protocol).splitlines()
    assert lines[1].startswith("DIFFERENT losses")
    file = io.StringIO()
    file.isatty = lambda: True  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TERM", "xterm-256color")
        environment.delenv("NO_COLOR", raising=False)
        environment.setenv("FORCE_COLOR", "1")
        show_protocol(protocol, file=file)
    red = next(line for line in file.getvalue().splitlines() if "DIFFERENT" in line)
    assert "41m" in red
    markdown = protocol_markdown(protocol)
    assert markdown.splitlines()[2].startswith("> **DIFFERENT losses")


def test_a_failed_run_shows_the_end_of_its_log_once(tmp_path: Path) -> None:
    protocol = make(tmp_path / "p", FakeLaunch(codes={"candidate": (1, 1)}))
    text = render_protocol(protocol)
    assert text.count("ValueError: it went wrong") == 1
    assert "runs/02-candidate and runs/03-candidate failed" in text
    assert "```text" in protocol_markdown(protocol)


def test_nothing_measured_gives_no_table(tmp_path: Path) -> None:
    protocol = make(tmp_path / "p", FakeLaunch(codes={"baseline": [1] * 9, "candidate": [1] * 9}))
    text = render_protocol(protocol)
    assert "┃" not in text
    assert "No run of baseline or candidate that counts has succeeded" in text


def test_markdown_is_a_table_whatever_the_data_says(found: ProtocolResult) -> None:
    nasty = replace(found, title="<script>alert(1)</script> | `x`\n# heading")
    text = protocol_markdown(nasty)
    assert "<script>" not in text
    assert text.splitlines()[0].endswith("# heading")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    assert any(line.startswith("| real tokens |") and "**" in line for line in rows)


def test_one_pair_says_that_it_has_no_interval(tmp_path: Path) -> None:
    protocol = make(tmp_path / "p", FakeLaunch(), pairs=1)
    assert "1.000×, no interval" in render_protocol(protocol)
    assert "cannot tell a change from noise" in protocol.paragraph


def test_it_fits_into_a_narrow_terminal(found: ProtocolResult) -> None:
    text = render_protocol(found, width=60)
    assert max(map(len, text.splitlines())) <= 60


def test_a_comparison_tells_broken_limits_first(found: ProtocolResult) -> None:
    file = io.StringIO()
    show_comparison(found.matrix, checks=[("x < 1: FAILED", True)], notes=["a note"], file=file)
    assert file.getvalue().startswith("x < 1: FAILED\n")
    assert "• a note" in file.getvalue()


def test_progress_without_a_terminal_is_one_line_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with protocol_progress() as update:
        update("baseline, pair 1 of 2", 0, 4, 0.0, None)
        update("baseline, pair 1 of 2", 0, 4, 5.0, None)
        update("candidate, pair 1 of 2", 1, 4, 0.0, 300.0)
    assert capsys.readouterr().err.splitlines() == [
        "fast-axolotl: run 1 of 4: baseline, pair 1 of 2",
        "fast-axolotl: run 2 of 4: candidate, pair 1 of 2; about 5 min left",
    ]
