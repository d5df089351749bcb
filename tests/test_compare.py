"""``fast-axolotl compare``: records, protocols, and limits that are not broken by noise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fast_axolotl.cli.prove import compare
from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.protocol.compare import compare_folders, parse_check
from fast_axolotl.protocol.plan import plan_commands
from fast_axolotl.record.protocol_result import ProtocolResult
from fast_axolotl.report.comparison import protocol_document
from support.protocol import FakeLaunch, cell_of, run_fake, write_record
from support.records import make_rank, make_system, steady
from support.reports import text_of

NOISE = (0.0, 0.004, 0.001, 0.003, 0.002)
STALLS = {"baseline": 0.001, "candidate": 0.2}


def make_protocol(folder: Path, slower: float = 1.0, **fakes: Any) -> Path:
    """A candidate that takes so many times as long as the baseline."""

    def step(arm: str, run: int) -> float:
        jitter = NOISE[run % 5] if arm == "baseline" else NOISE[-1 - run % 5]
        return 0.01 * (slower if arm == "candidate" else 1.0) * (1.0 + jitter)

    plan = plan_commands("cmd a", "cmd b", pairs=3, warmup=0, seed=1)
    run_fake(plan, folder, FakeLaunch(**{"step_seconds": step, **fakes}))
    return folder


def make_record(folder: Path, own_seconds: float, end: Any = "finished") -> Path:
    rank = make_rank(own_seconds=own_seconds, tokens=1000, end=end)
    write_record(folder, rank, make_system(samples=8))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Records and protocols that nobody changes."""
    root = tmp_path_factory.mktemp("compare")
    return {
        "fast": make_record(root / "fast", 0.01),
        "slow": make_record(root / "slow", 0.02),
        "even": make_protocol(root / "even"),
        "slower": make_protocol(root / "slower", 1.1),
        "stalling": make_protocol(root / "stalling", stall=STALLS),
    }


def run_cli(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(compare)
    return CliRunner().invoke(app, arguments)


def test_one_run_each_breaks_no_limit_unless_that_is_asked_for(folders: dict[str, Path]) -> None:
    limits = [parse_check("tokens_per_second < 0.97")]
    careful = compare_folders(folders["fast"], folders["slow"], limits=limits)
    cell = cell_of(careful, "tokens_per_second")
    assert cell.ratio == pytest.approx(0.5, abs=0.01)
    assert (cell.low, cell.outcome) == (None, "not compared")
    assert (careful.checks[0].is_broken, careful.checks[0].is_checked) == (False, False)
    assert "--single" in careful.checks[0].sentence
    asked = compare_folders(folders["fast"], folders["slow"], limits=limits, is_single=True)
    assert (asked.checks[0].is_broken, asked.checks[0].is_checked) == (True, True)
    assert "from a single run" in asked.checks[0].sentence
    # A record beside a protocol is one run.
    limits = [parse_check("samples_per_second < 0.9")]
    assert not compare_folders(folders["even"], folders["slow"], limits=limits).checks[0].is_broken


def test_the_change_of_the_verdict_and_of_a_step_is_shown(tmp_path: Path) -> None:
    """Of two records and of a protocol; sides whose stacks nobody looked at have no phases."""
    waits = {"before": 0.53, "after": 0.04}
    for name, wait in waits.items():
        phases = {"waiting": 10 * wait, "forward": 9.6 - 10 * wait, "other": 0.4}
        rank = make_rank(wait=steady(wait), phases=phases)
        write_record(tmp_path / name, rank, make_system(samples=8))
    sides = (str(tmp_path / "before"), str(tmp_path / "after"))
    text = " ".join(run_cli(*sides).output.split())
    assert "verdict │ Data-bound (rate) │ Compute-bound" in text
    assert "├─ waiting │ 53.0 % │ 4.0 %" in text
    assert "├─ forward │ 43.0 % │ 92.0 %" in text
    arms = json.loads(run_cli(*sides, "--json").output)["arms"]
    assert [arm["name"] for arm in arms] == list(sides)
    assert [arm["verdict"] for arm in arms] == ["data rate", "compute"]
    assert [arm["phases"]["waiting"] for arm in arms] == pytest.approx([0.53, 0.04], abs=0.001)

    protocol = ProtocolResult.read(make_protocol(tmp_path / "stalling", stall=STALLS))
    page = text_of(protocol_document(protocol))
    assert "verdict │ Compute-bound │ Data-bound (rate)" in " ".join(page.split())
    assert "forward" not in page


def test_what_has_nothing_to_compare_says_so(tmp_path: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="has no variant 'streaming'"):
        compare_folders(folders["even"], folders["slower"], arm="streaming")
    # An arm that only failed is not compared, and the others are.
    plan = plan_commands("cmd a", "cmd b", pairs=2, warmup=0)
    plan = replace(plan, arms=(*plan.arms, replace(plan.arms[1], name="third")))
    run_fake(plan, tmp_path / "p", FakeLaunch(codes={"third": [1] * 9}))
    assert compare_folders(tmp_path / "p", arm="candidate").second == "candidate"
    with pytest.raises(DataError, match="No counted run of third succeeded"):
        compare_folders(tmp_path / "p")


@pytest.mark.parametrize(
    ("is_required", "name", "limit", "words"),
    [
        (False, "slower", "tokens_per_second < 0.97", "FAILED: ratio 0.908"),
        (False, "slower", "tokens_per_second < 0.90", "passes: ratio"),
        (False, "slower", "step_p50_seconds > 1.03", "FAILED"),
        (False, "slower", "step_p50_seconds > 1.2", ""),
        # The ratio is about 0.909: the interval spans it, so nothing is certain.
        (False, "slower", "tokens_per_second < 0.909", ""),
        (False, "slower", "tokens_per_second > 0.909", ""),
        # With a sign it is about the difference.
        (False, "stalling", "stall_fraction > +0.05", "FAILED: difference"),
        (True, "even", "tokens_per_second > 0.97", "confirmed: ratio"),
        (True, "slower", "tokens_per_second > 0.9", "confirmed: ratio 0.908"),
        # Likely is not shown: the interval spans the limit.
        (True, "slower", "tokens_per_second > 0.909", "FAILED, not confirmed: ratio 0.908"),
        (True, "slower", "tokens_per_second > 0.97", "FAILED, not confirmed"),
        (True, "slower", "step_p50_seconds < 1.2", "confirmed"),
        (True, "even", "host_stall_fraction < +0.02", "confirmed: difference"),
        (True, "stalling", "host_stall_fraction < +0.02", "FAILED, not confirmed: difference"),
    ],
)
def test_a_limit_is_broken_or_confirmed_by_the_whole_interval(
    folders: dict[str, Path], is_required: bool, name: str, limit: str, words: str
) -> None:
    limits = [parse_check(limit, is_required=is_required)]
    found = compare_folders(folders[name], limits=limits)
    assert found.matrix.arms == ("baseline", "candidate")
    assert words in found.checks[0].sentence
    assert found.checks[0].is_broken == words.startswith("FAILED")


def test_a_protocol_is_judged_again_by_another_size_that_matters(folders: dict[str, Path]) -> None:
    assert cell_of(compare_folders(folders["slower"]), "tokens_per_second").outcome == "worse"
    found = compare_folders(folders["slower"], matters=0.2)
    assert cell_of(found, "tokens_per_second").outcome == "no change that matters"
    assert [note for note in found.matrix.notes if "--matters" in note] == [
        note for note in found.matrix.notes if "A change below 20 % does not matter" in note
    ]
    found = compare_folders(folders["even"], folders["slower"], matters=0.2)
    assert cell_of(found, "samples_per_second").outcome == "no change that matters"


def test_a_limit_that_a_figure_cannot_have_is_refused_with_the_cure(
    folders: dict[str, Path],
) -> None:
    for limit, words in {
        "host_stall_fraction > 2": r"near 0.*difference: > \+0\.02",
        "tokens_per_second > +2": "has no difference; write the bound without a sign",
    }.items():
        with pytest.raises(DataError, match=f"cannot be checked.*{words}"):
            compare_folders(folders["stalling"], limits=[parse_check(limit)])


def test_losses_that_differ_are_an_alarm(tmp_path: Path, folders: dict[str, Path]) -> None:
    other = make_protocol(
        tmp_path / "a", losses=lambda arm, run: (2.0, 1.5 if arm == "baseline" else 1.6)
    )
    [alarm] = compare_folders(other).alarms
    assert alarm.startswith(f"{other}: DIFFERENT losses")
    assert compare_folders(folders["even"], other).alarms == (alarm,)


@pytest.mark.parametrize("end", ["exception", None])
def test_a_run_that_ended_with_an_error_is_told_and_passes_no_limit(
    tmp_path: Path, folders: dict[str, Path], end: str | None
) -> None:
    other = make_record(tmp_path / "b", 0.01, end)
    what = end or "cut off"
    assert any(what in note for note in compare_folders(folders["fast"], other).notes)
    limits = [parse_check("tokens_per_second < 0.5")]
    with pytest.raises(DataError, match="did not finish, so no limit is checked"):
        compare_folders(folders["fast"], other, limits=limits, is_single=True)


def test_two_protocols_are_compared_by_the_arm_that_both_have(folders: dict[str, Path]) -> None:
    limits = [parse_check("samples_per_second < 0.95")]
    found = compare_folders(folders["even"], folders["slower"], limits=limits)
    assert found.checks[0].is_broken
    assert any("not run alternately" in note for note in found.notes)
    same = compare_folders(folders["even"], folders["slower"], arm="baseline")
    assert cell_of(same, "samples_per_second").outcome == "no change that matters"
    assert any("Primary metrics: real tokens." in note for note in same.matrix.notes)


def test_loaders_that_were_not_set_alike_are_told(tmp_path: Path, folders: dict[str, Path]) -> None:
    settings = {"baseline": {"num_workers": 0}, "candidate": {"num_workers": 4}}
    other = make_protocol(tmp_path / "p", settings=settings)
    [note] = compare_folders(other).notes
    assert note == "num_workers is 0 in baseline, 4 in candidate."
    third = make_protocol(tmp_path / "q", settings={"candidate": {"num_workers": 2}})
    notes = compare_folders(other, third).notes
    assert any("num_workers is 4 in " in note for note in notes)


def test_the_command_ends_with_3_where_a_limit_is_broken(
    folders: dict[str, Path],
) -> None:
    folder, limit = str(folders["slower"]), ("--fail-if", "tokens_per_second < 0.97")
    done = run_cli(folder)
    assert (done.exit_code, ") worse" in done.output) == (0, True)
    assert isinstance(run_cli(folder, *limit, "--fail-if", "mfu < 0.9").exception, DataError)
    assert run_cli(folder, *limit).exit_code == 3
    assert run_cli(folder, "--require", "tokens_per_second > 0.97").exit_code == 3
    assert run_cli(folder, "--require", "tokens_per_second > 0.8").exit_code == 0
    single = (str(folders["slow"]), str(folders["fast"]))
    # What one run each cannot show has an exit code of its own, unless they are taken as they are.
    for option in ("--fail-if", "--require"):
        check = (*single, option, "tokens_per_second > 0.97")
        assert run_cli(*check).exit_code == 4
        assert run_cli(*check, "--single").exit_code == (3 if option == "--fail-if" else 0)
    assert isinstance(run_cli(folder, "--matters", "a lot").exception, UsageError)
    done = run_cli(folder, "--matters", "15%")
    assert (done.exit_code, ") worse" in done.output) == (0, False)
