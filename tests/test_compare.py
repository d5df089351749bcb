"""``fast-axolotl compare``: records, protocols, and limits that are not broken by noise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fast_axolotl.cli.protocol import compare
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.protocol import Plan, compare_folders, parse_check, plan_commands, run_protocol
from fast_axolotl.protocol.matrix import find_cell
from support.protocol import FakeLaunch, write_record
from support.records import make_rank, make_system

NOISE = (0.0, 0.004, 0.001, 0.003, 0.002)


def make_protocol(folder: Path, slower: float = 1.0, **fakes: Any) -> Path:
    """A candidate that takes so many times as long as the baseline."""

    def step(arm: str, run: int) -> float:
        return 0.01 * (slower if arm == "candidate" else 1.0) * (1.0 + NOISE[run % 5] * (run + 1))

    launch = FakeLaunch(step_seconds=step, **fakes)
    plan = plan_commands("cmd a", "cmd b", pairs=4, warmup=0)
    run_protocol(
        plan, folder, environment={}, launch=launch, clock=launch.clock, page_cache=lambda drop: ""
    )
    return folder


def make_record(folder: Path, own_seconds: float) -> Path:
    write_record(folder, make_rank(own_seconds=own_seconds, tokens=1000), make_system(samples=8))
    return folder


def run_cli(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(compare)
    return CliRunner().invoke(app, arguments)


def test_two_records_have_a_ratio_and_no_interval(tmp_path: Path) -> None:
    first, second = make_record(tmp_path / "a", 0.01), make_record(tmp_path / "b", 0.02)
    found = compare_folders(first, second)
    cell = find_cell(found.matrix, "tokens_per_second", str(second))
    assert cell is not None
    assert cell.ratio == pytest.approx(0.5, abs=0.01)
    assert cell.low is None
    assert cell.outcome == "not compared"


def test_one_run_each_breaks_no_limit_unless_that_is_asked_for(tmp_path: Path) -> None:
    first, second = make_record(tmp_path / "a", 0.01), make_record(tmp_path / "b", 0.02)
    limits = [parse_check("tokens_per_second < 0.97")]
    careful = compare_folders(first, second, limits=limits)
    assert not careful.is_broken
    assert "--single" in careful.checks[0].sentence
    asked = compare_folders(first, second, limits=limits, is_single=True)
    assert asked.is_broken
    assert "of a single run" in asked.checks[0].sentence


def test_pairs_that_are_all_alike_are_not_a_single_run(tmp_path: Path) -> None:
    launch = FakeLaunch()
    plan = plan_commands("cmd a", "cmd b", pairs=3, warmup=0)
    run_protocol(plan, tmp_path / "p", environment={}, launch=launch, clock=launch.clock)
    found = compare_folders(tmp_path / "p", limits=[parse_check("samples_per_second < 0.97")])
    assert "95 % interval 1 to 1" in found.checks[0].sentence


def test_a_protocol_of_dedupe_alone_has_nothing_to_compare(tmp_path: Path) -> None:
    launch = FakeLaunch()
    plan = Plan(title="dedupe", arms=())
    run_protocol(plan, tmp_path / "p", environment={}, launch=launch, clock=launch.clock)
    with pytest.raises(DataError, match="no arms to compare"):
        compare_folders(tmp_path / "p", make_record(tmp_path / "a", 0.01))


def test_the_arms_of_one_protocol_are_compared(tmp_path: Path) -> None:
    folder = make_protocol(tmp_path / "p", 1.1)
    found = compare_folders(folder, limits=[parse_check("tokens_per_second < 0.97")])
    assert found.matrix.arms == ("baseline", "candidate")
    assert found.is_broken
    assert "FAILED: ratio 0.909" in found.checks[0].sentence


@pytest.mark.parametrize(
    ("limit", "is_broken"),
    [
        ("tokens_per_second < 0.97", True),
        ("tokens_per_second < 0.90", False),
        ("step_p50_seconds > 1.05", True),
        ("step_p50_seconds > 1.2", False),
        # The ratio is about 0.909: the interval spans it, so nothing is certain.
        ("tokens_per_second < 0.9091", False),
        ("tokens_per_second > 0.9091", False),
    ],
)
def test_a_limit_is_broken_when_the_whole_interval_lies_beyond(
    tmp_path: Path, limit: str, is_broken: bool
) -> None:
    folder = tmp_path / "p"

    def step(arm: str, run: int) -> float:
        jitter = NOISE[run] if arm == "baseline" else NOISE[-1 - run]
        return (0.011 if arm == "candidate" else 0.01) * (1.0 + jitter)

    launch = FakeLaunch(step_seconds=step)
    run_protocol(
        plan_commands("a", "b", pairs=5, warmup=0),
        folder,
        environment={},
        launch=launch,
        clock=launch.clock,
        page_cache=str,
    )
    assert compare_folders(folder, limits=[parse_check(limit)]).is_broken == is_broken


def test_a_limit_with_a_sign_is_about_the_difference(tmp_path: Path) -> None:
    folder = make_protocol(tmp_path / "p", stall={"baseline": 0.001, "candidate": 0.2})
    found = compare_folders(folder, limits=[parse_check("host_stall_fraction > +0.05")])
    assert found.is_broken


def test_a_limit_that_cannot_be_checked_is_an_error(tmp_path: Path) -> None:
    folder = make_protocol(tmp_path / "p", stall={"baseline": 0.001, "candidate": 0.2})
    with pytest.raises(DataError, match=r"cannot be checked.*near 0.*difference: > \+0\.02"):
        compare_folders(folder, limits=[parse_check("host_stall_fraction > 2")])
    with pytest.raises(DataError, match=r"difference: > \+1000000"):
        compare_folders(folder, limits=[parse_check("swap_in_bytes_per_second > 2")])


def test_losses_that_differ_are_an_alarm(tmp_path: Path) -> None:
    def losses(arm: str, run: int) -> tuple[float, float]:
        return (2.0, 1.5 if arm == "baseline" else 1.6)

    other = make_protocol(tmp_path / "a", losses=losses)
    [alarm] = compare_folders(other).alarms
    assert alarm.startswith("DIFFERENT losses")
    [alarm] = compare_folders(make_protocol(tmp_path / "b"), other).alarms
    assert alarm.startswith(f"{other}: DIFFERENT losses")


def test_a_run_that_ended_with_an_error_is_told_and_passes_no_limit(tmp_path: Path) -> None:
    first = make_record(tmp_path / "a", 0.01)
    rank = make_rank(own_seconds=0.01, tokens=1000, end="exception")
    write_record(tmp_path / "b", rank, make_system(samples=8))
    assert any("exception" in note for note in compare_folders(first, tmp_path / "b").notes)
    write_record(tmp_path / "c", make_rank(own_seconds=0.01, tokens=1000, end=None))
    limits = [parse_check("tokens_per_second < 0.5")]
    for name in "bc":
        with pytest.raises(DataError, match="did not end well, so no limit is checked"):
            compare_folders(first, tmp_path / name, limits=limits, is_single=True)


def test_a_protocol_in_which_no_pair_counts_says_so(tmp_path: Path) -> None:
    folder = make_protocol(tmp_path / "p", codes={"candidate": [1] * 9})
    with pytest.raises(DataError, match="No run of candidate that counts has succeeded"):
        compare_folders(folder)


def test_of_three_arms_one_may_have_failed(tmp_path: Path) -> None:
    plan = plan_commands("cmd a", "cmd b", pairs=2, warmup=0)
    third = replace(plan.arms[1], name="third")
    launch = FakeLaunch(codes={"third": [1] * 9})
    plan = replace(plan, arms=(*plan.arms, third))
    run_protocol(plan, tmp_path / "p", environment={}, launch=launch, clock=launch.clock)
    assert compare_folders(tmp_path / "p", arm="candidate").second == "candidate"
    with pytest.raises(DataError, match="No run of third"):
        compare_folders(tmp_path / "p")


def test_two_protocols_are_compared_by_the_arm_that_both_have(tmp_path: Path) -> None:
    first = make_protocol(tmp_path / "a", 1.0)
    second = make_protocol(tmp_path / "b", 1.3)
    found = compare_folders(first, second, limits=[parse_check("samples_per_second < 0.9")])
    assert found.is_broken
    assert any("not interleaved" in note for note in found.notes)
    same = compare_folders(first, second, arm="baseline")
    cell = find_cell(same.matrix, "samples_per_second", same.matrix.arms[1])
    assert cell is not None
    assert cell.outcome == "no detectable change"
    with pytest.raises(UsageError, match="has no arm 'streaming'"):
        compare_folders(first, second, arm="streaming")


def test_a_record_beside_a_protocol_is_one_run(tmp_path: Path) -> None:
    protocol = make_protocol(tmp_path / "p")
    record = make_record(tmp_path / "r", 0.02)
    found = compare_folders(protocol, record, limits=[parse_check("samples_per_second < 0.9")])
    assert not found.is_broken


def test_a_limit_on_what_was_not_measured_is_an_error(tmp_path: Path) -> None:
    folder = make_protocol(tmp_path / "p")
    with pytest.raises(DataError, match="mfu was not measured in baseline"):
        compare_folders(folder, limits=[parse_check("mfu < 0.9")])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tokens_per_second", "cannot read the limit"),
        ("tokens_per_second = 1", "cannot read the limit"),
        ("speed < 0.9", "no figure is named 'speed'"),
        ("tokens_per_second < -5", "never near 0"),
    ],
)
def test_limits_that_are_none_are_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_check(text)


def test_one_record_alone_needs_another(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a second folder"):
        compare_folders(make_record(tmp_path / "a", 0.01))
    with pytest.raises(UsageError, match="no arm is named 'x'"):
        compare_folders(make_protocol(tmp_path / "p"), arm="x")


def test_the_command_prints_a_table_and_ends_with_3_where_a_limit_is_broken(
    tmp_path: Path,
) -> None:
    folder = str(make_protocol(tmp_path / "p", 1.2))
    done = run_cli(folder)
    assert done.exit_code == 0, done.output
    assert "real tokens" in done.output
    assert "worse" in done.output
    done = run_cli(folder, "--fail-if", "tokens_per_second < 0.97", "--fail-if", "mfu < 0.9")
    assert isinstance(done.exception, DataError)
    done = run_cli(folder, "--fail-if", "tokens_per_second < 0.97")
    assert done.exit_code == 3
    assert "FAILED" in done.output


def test_the_command_prints_json_and_markdown(tmp_path: Path) -> None:
    folder = str(make_protocol(tmp_path / "p", 1.2))
    done = run_cli(folder, "--json", "--fail-if", "tokens_per_second < 0.97")
    assert done.exit_code == 3
    found = json.loads(done.output)
    assert found["checks"][0]["is_broken"] is True
    assert found["matrix"]["arms"] == ["baseline", "candidate"]
    done = run_cli(folder, "--markdown", "--fail-if", "tokens_per_second < 0.97")
    assert "| real tokens | " in done.output
    assert "- **tokens\\_per" not in done.output
    assert "- **tokens_per_second < 0.97: FAILED" in done.output.replace("&lt;", "<")
