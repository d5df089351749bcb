"""A protocol: its order, its runs, what it finds, and how it goes on after an interruption."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.measure.summary import summarise
from fast_axolotl.protocol.plan import ArmPlan, Plan, plan_commands
from fast_axolotl.protocol.runner import run_protocol
from fast_axolotl.record import End, RankRecord, RunRecord, RunSummary
from fast_axolotl.record.protocol_result import ProtocolResult
from support.protocol import FakeLaunch, cell_of, folder_of
from support.protocol import run_fake as run
from support.records import make_rank, with_figures


def plan(**changes: Any) -> Plan:
    return replace(plan_commands("cmd a", "cmd b", pairs=3, seed=0), **changes)


def slower(arm: str, number: int) -> float:
    """The candidate takes 10 % longer, and every run differs by a little."""
    return (0.011 if arm == "candidate" else 0.010) * (1.0 + 0.002 * (number % 3))


def test_the_order_is_drawn_in_blocks_that_no_drift_and_no_period_of_two_or_four_favours() -> None:
    turns = plan(pairs=4, warmup=1).turns()
    assert "".join(turn.arm.name[0] for turn in turns) == "bccbbcbccb"
    assert [turn.pair for turn in turns] == [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3]
    assert turns[0].folder == "runs/01-baseline"
    few = plan(pairs=2, warmup=1).turns()
    assert [turn.folder for turn in few] == [turn.folder for turn in turns][: len(few)]
    arms = tuple(ArmPlan(name=name, text="", command=(name,)) for name in "abc")
    order = Plan(title="", arms=arms, pairs=2, warmup=0, seed=1).turns()
    assert "".join(turn.arm.name for turn in order) == "abccba"
    seen = set()
    for seed in range(50):
        block = [turn.arm.name for turn in plan(pairs=4, warmup=0, seed=seed).turns()]
        seen.add(tuple(block))
        for slow in (range(8), [0, 1] * 4, [0, 1, 2, 5] * 2):
            own = [w for w, name in zip(slow, block, strict=True) if name == "baseline"]
            assert 2 * sum(own) == sum(slow)
    assert len(seen) == 4


def test_a_slower_candidate_is_worse_and_what_is_written_can_be_read_back(tmp_path: Path) -> None:
    launch = FakeLaunch(step_seconds=slower)
    found = run(plan(data_path="data"), tmp_path / "p", launch)
    cell = cell_of(found, "tokens_per_second")
    assert cell.outcome == "worse"
    assert cell.ratio == pytest.approx(1 / 1.1, abs=0.005)
    assert len(cell.values) == 3
    assert found.paragraph.startswith("candidate: training is 9.1 % slower (99,800 tokens/s → ")
    assert "9.1 % slower (99,800 tokens/s → 90,728 tokens/s, 95 % interval 0.90" in found.paragraph
    assert "Keep the baseline." in found.paragraph
    assert (found.pairs, found.are_losses_equal) == (3, True)
    # Imports and prepared data come before the first fetch, and count.
    assert cell_of(found, "start_to_step_seconds", 0).value == pytest.approx(0.5)
    assert ProtocolResult.read(tmp_path / "p") == found
    assert json.loads((tmp_path / "p" / "state.json").read_text())["schema"] == 1
    assert [path.name for path in (tmp_path / "p").glob(".*")] == [".lock"]
    # A run is a measured child without acceleration.
    first = launch.calls[0]
    assert first[1:5] == ("-m", "fast_axolotl", "measure", "--quiet")
    assert first[first.index("--data-path") + 1] == "data"
    assert first[first.index("--") + 1 :] == ("cmd", "a")
    assert folder_of(first) == tmp_path / "p" / "runs" / "01-baseline"


def test_an_arm_is_shown_by_the_run_in_its_middle(tmp_path: Path) -> None:
    paces = (0.01, 0.03, 0.01, 0.02)
    found = run(plan(), tmp_path / "p", FakeLaunch(step_seconds=lambda arm, n: paces[n]))
    assert [arm.shown_run for arm in found.arms] == ["runs/07-baseline", "runs/08-candidate"]


def noisy(scale: float) -> FakeLaunch:
    """Equal arms whose runs differ by chance."""
    noise = {"baseline": (0, 3, 1, 2, 0, 1), "candidate": (1, 2, 0, 3, 1, 0)}
    return FakeLaunch(step_seconds=lambda arm, n: 0.01 * (1 + scale * noise[arm][n]))


def test_equal_arms_show_no_change_that_matters_or_no_clear_one(tmp_path: Path) -> None:
    found = run(plan(pairs=5), tmp_path / "quiet", noisy(0.0002))
    assert found.paragraph.startswith("candidate: no change that matters.\n")
    assert "a faster loader would change nothing" in found.paragraph
    found = run(plan(pairs=5), tmp_path / "loud", noisy(0.02))
    cell = cell_of(found, "tokens_per_second")
    # By hand: the pairs differ by ±2 % and have a standard error of 0.0096; the true one may be
    # 2.39 times as large; 3.50 + 0.94 times that.
    assert cell.detectable == pytest.approx(math.expm1(2.39 * 4.44 * 0.0096), abs=1e-3)
    assert found.paragraph.startswith(
        "candidate: no clear change.\nWith 5 pairs, a change in training speed of 11 % or more "
        "would show in at least 80 % of protocols. "
    )
    found = run(plan(pairs=5, matters=0.1), tmp_path / "loud", noisy(0.02))
    assert found.paragraph.startswith("candidate: no change that matters.")
    assert found.matrix.matters == 0.1


def dropped_in(arm: str, number: int) -> tuple[float, float]:
    """The drop-in saves 17 seconds before the first step, and runs differ by a little."""
    first, whole = (47.6, 61.3) if arm == "baseline" else (30.6, 43.3)
    noise = 1.0 + 0.002 * (number % 3)
    return first * noise, whole * noise


def plan_drop_in(**changes: Any) -> Plan:
    """A drop-in, whose times decide."""
    two = plan(warmup=0, **{"same_work": ("baseline", "drop-in"), **changes})
    return replace(two, arms=(two.arms[0], replace(two.arms[1], name="drop-in", times_decide=True)))


def test_the_time_saved_decides_and_leads_where_arms_do_the_same_work(tmp_path: Path) -> None:
    wanted = plan_drop_in()
    steps = {"baseline": (0, 3, 1), "drop-in": (1, 2, 0)}

    def launch(scale: float, **named: Any) -> FakeLaunch:
        pace = lambda arm, n: 0.01 * (1 + scale * steps[arm][n])  # noqa: E731
        return FakeLaunch(times=dropped_in, step_seconds=pace, **named)

    found = run(wanted, tmp_path / "quiet", launch(0.0002))
    headline, figures = found.paragraph.split("\n")
    assert headline == (
        "drop-in: the whole run is 29 % shorter (61.42 s → 43.39 s, 95 % interval 0.706× to "
        "0.706×); the time to first step is 36 % shorter (47.70 s → 30.66 s, 95 % interval "
        "0.643× to 0.643×); training speed is unchanged."
    )
    assert "Use it: start Axolotl with fast-axolotl run --" in figures
    deciding = {row.name for row in found.matrix.rows if row.cells[1].is_deciding}
    assert deciding == {"tokens_per_second", "start_to_step_seconds", "duration_seconds"}
    notes = " ".join(found.matrix.notes)
    assert "Primary metrics: real tokens, time to first step, whole run." in notes
    found = run(wanted, tmp_path / "loud", launch(0.02))
    assert "); training speed shows no clear change.\n" in found.paragraph
    assert "a change in training speed of" in found.paragraph
    wild = FakeLaunch(times=lambda arm, n: (40.0, (60.0, 90.0, 40.0)[n + (arm != "baseline")]))
    found = run(plan_drop_in(pairs=2), tmp_path / "few", wild)
    headline, figures = found.paragraph.split("\n")
    assert headline == "drop-in: no clear change."
    assert figures.startswith("With 2 pairs, a factor in the whole run of ")
    # Less work is done in less time anyway; the first step comes sooner all the same.
    for name, own, fakes in (
        ("less", wanted, {"fetches": {"drop-in": 400}}),
        ("other", plan_drop_in(same_work=None), {}),
    ):
        found = run(own, tmp_path / name, launch(0.0002, **fakes))
        assert found.paragraph.startswith("drop-in: the time to first step is 36 % shorter")
        assert not cell_of(found, "duration_seconds").is_deciding
    # One pair cannot show any change, and says so.
    found = run(plan_drop_in(pairs=1), tmp_path / "one", FakeLaunch(times=dropped_in))
    headline = "drop-in: the whole run was 29 % shorter (61.30 s → 43.30 s) in one pair"
    assert found.paragraph.startswith(headline)
    assert "cannot tell a change from noise: pass --pairs 10" in found.paragraph


def test_runs_beside_other_programs_are_told_with_the_command_for_more_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def summarise_busy(record: RunRecord) -> RunSummary:
        summary = summarise(record)
        shares = {"04-baseline": 0.34, "05-baseline": 0.09, "06-candidate": 0.25}
        name = Path(summary.run_dir).name
        stolen, throttled = (0.07, 0.2) if name == "04-baseline" else (None, 0.0)
        return with_figures(
            summary,
            other_cpu_share=shares.get(name, 0.01),
            cpu_steal_share=stolen,
            cpu_throttled_share=throttled,
        )

    monkeypatch.setattr("fast_axolotl.protocol.runner.summarise", summarise_busy)
    warned: list[str] = []
    wanted = plan()
    found = run(wanted, tmp_path / "p", FakeLaunch(), warn=warned.append)
    # Those that follow are in the result.
    assert warned == [
        "runs/04-baseline: other programs used 34 % of the CPU cores and the hypervisor took 7 % "
        "of the CPU time and the CPU quota stopped it for 20 % of the time; figures may be too low"
    ]
    [note] = [note for note in found.notes if "shared the CPU" in note]
    assert note.startswith(
        "2 of 6 runs shared the CPU (the worst, runs/04-baseline: other programs"
    )
    assert note.endswith("repeat on an idle machine")
    # Whoever continues it finds the note again, from the records.
    assert note in run(wanted, tmp_path / "p", FakeLaunch()).notes


def test_a_stall_that_goes_away_is_told(tmp_path: Path) -> None:
    launch = FakeLaunch(stall={"baseline": 0.4, "candidate": 0.01}, step_seconds=slower)
    found = run(plan(), tmp_path / "p", launch)
    assert "Stall: 40.0 % → 1.0 %." in found.paragraph
    assert found.arms[0].verdict.startswith("data")
    assert "Use the candidate." in found.paragraph


@pytest.mark.parametrize(
    "command",
    [
        "bin/fast-axolotl run -- axolotl train a.yml",
        "python -m fast_axolotl run -- axolotl train a.yml",
        "env A=1 fast-axolotl run --skip fetch -- axolotl train a.yml",
        "fast-axolotl run python train.py --sep '|' -q",
    ],
)
def test_a_command_that_is_run_itself_keeps_its_acceleration(command: str) -> None:
    wanted = plan_commands("axolotl train a.yml -- fast-axolotl run", command)
    assert [arm.is_accelerated for arm in wanted.arms] == [False, True]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("fast-axolotl run --measure -- python a.py", "already measures .*: remove --measure"),
        ("fast-axolotl measure -- python a.py", "already measures each run: remove measure"),
        ("python a.py >log.txt", "contains '>', but no shell runs it"),
        ("python a.py; echo", "contains ';', but no shell runs it"),
        ("A=1 python a.py", "contains 'A=1', but no shell runs it.*env NAME=VALUE"),
        ("  ", "is empty"),
        ("python 'x", "cannot be split into words"),
    ],
)
def test_a_command_that_would_not_do_what_it_says_is_refused(command: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"--candidate.*{words}"):
        plan_commands("true", command)


def test_of_several_trainings_the_one_with_the_most_steps_counts(tmp_path: Path) -> None:
    found = run(plan(), tmp_path / "p", FakeLaunch(trials={"candidate": 20}))
    one = found.arms[1].runs[1]
    assert (one.folder, one.trainings, one.steps) == ("runs/03-candidate-2", 2, 605)
    assert found.arms[1].shown_run == "runs/06-candidate-2"
    assert one.losses == found.arms[0].runs[0].losses
    assert any("trained up to 2 times" in note for note in found.notes)
    late = cell_of(found, "start_to_step_seconds")
    assert late.reason == "an earlier training of the same run"
    assert cell_of(found, "working_set_peak_bytes").value is not None
    launch = FakeLaunch()
    assert run(plan(), tmp_path / "p", launch).matrix == found.matrix
    assert not launch.calls


def test_arms_that_have_not_done_the_same_work_are_told(tmp_path: Path) -> None:
    idle = FakeLaunch(leave=lambda arm, rank: rank if arm == "baseline" else None)
    found = run(plan(), tmp_path / "idle", idle)
    assert found.paragraph == "candidate did not do the baseline's work, so nothing is compared."
    short = lambda arm, rank: make_rank(fetches=0, warmup_steps=3 + (arm == "baseline"))  # noqa: E731
    found = run(plan(), tmp_path / "short", FakeLaunch(leave=short))
    assert "did not do the baseline's work, so nothing is compared" in found.paragraph
    assert not any("Holm" in note for note in found.matrix.notes)
    found = run(plan(), tmp_path / "less", FakeLaunch(fetches={"candidate": 400}))
    assert any(note.startswith("Not the same work: recorded steps are ") for note in found.notes)


def test_runs_that_seem_to_have_succeeded_or_do_not_end_count_as_failed(tmp_path: Path) -> None:
    def fail(arm: str, rank: RankRecord) -> RankRecord:
        rank.end = End(t=9.0, reason="exception", error="RuntimeError: no")
        return rank

    found = run(plan(warmup=0), tmp_path / "error", FakeLaunch(leave=fail))
    assert {one.status for one in found.arms[1].runs} == {"failed"}
    assert "exit code 0, but its training ended" in found.arms[1].runs[0].log_tail
    assert found.pairs == 0
    silent = lambda command, environment, log, tick: 0  # noqa: E731
    found = run_protocol(plan(warmup=0), tmp_path / "silent", environment={}, launch=silent)
    assert "it left no record" in found.arms[0].runs[0].log_tail


def test_damaged_records_count_for_nothing_and_are_made_again(tmp_path: Path) -> None:
    folder, again, late = tmp_path / "p", FakeLaunch(), FakeLaunch()
    run(plan(), folder, FakeLaunch())
    shutil.rmtree(folder / "runs" / "03-candidate")
    (folder / "runs" / "05-baseline" / "rank-0.jsonl").write_text("garbage\n")
    found = run(plan(), folder, again)
    assert again.arms == ["candidate", "baseline"]
    assert found.pairs == 3
    shutil.rmtree(folder / "runs" / "05-baseline")
    assert run(plan(max_minutes=0.001), folder, late).pairs == 2
    assert not late.calls
    # So is what has failed.
    before = run(plan(), tmp_path / "failed", FakeLaunch(codes={"candidate": [1] * 9}))
    assert before.pairs == 0
    mended, progress = FakeLaunch(), list[Any]()
    found = run(plan(), tmp_path / "failed", mended, progress=lambda *at: progress.append(at))
    assert mended.arms == ["candidate"] * 4
    assert found.pairs == 3
    assert [done for _, done, *_ in progress[::2]] == [4, 5, 6, 7], "those that are not made again"


def test_interrupted_in_every_run_it_goes_on_where_it_stopped_to_the_same_result(
    tmp_path: Path,
) -> None:
    whole = run(plan(), tmp_path / "whole", FakeLaunch(step_seconds=slower))
    folder, fake = tmp_path / "parts", FakeLaunch(step_seconds=slower)
    for number in range(whole.planned_runs):
        fake.interrupt_at = number
        with pytest.raises(KeyboardInterrupt):
            run(plan(), folder, fake)
        assert len(fake.calls) == number
        if number:
            half = ProtocolResult.read(folder)
            assert half.planned_runs == whole.planned_runs
            assert half.order == whole.order[: max(0, number - 2)], "the first two warm up"
    fake.interrupt_at = None
    found = run(plan(), folder, fake)
    assert (found.matrix, found.paragraph) == (whole.matrix, whole.paragraph)
    assert found.seconds == pytest.approx(80.0)
    # The record of the run that was cut off is not in the way, and not counted.
    assert not list(folder.rglob("*.jsonl.1"))
    done = FakeLaunch()
    assert run(plan(), folder, done).matrix == found.matrix
    assert not done.calls


def test_it_ends_when_the_answer_is_clear_and_the_number_of_pairs_is_kept(tmp_path: Path) -> None:
    folder, more = tmp_path / "p", FakeLaunch()
    large = plan(pairs=10, seed=None)
    twice = lambda arm, n: slower(arm, n) * (2 if arm == "candidate" else 1)  # noqa: E731
    found = run(large, folder, FakeLaunch(step_seconds=twice))
    assert (found.pairs, found.planned_pairs, found.planned_runs) == (3, 10, 8)
    assert "The answer was clear after 3 of at most 10 pairs." in found.notes
    assert cell_of(found, "tokens_per_second").outcome == "worse"
    # An interval is as much wider as looks at the pairs cost.
    assert found.matrix.spend == pytest.approx(0.5 / 7)
    assert run(large, folder, more) == found
    assert not more.calls
    with pytest.raises(UsageError, match="another protocol: --pairs changed"):
        run(plan(pairs=12, seed=None), folder, more)
    # One that never succeeds needs no more than the others.
    broken = FakeLaunch(codes={"candidate": [1] * 99})
    assert len(run(large, tmp_path / "broken", broken).arms[1].runs) == 4
    unclear = run(plan(pairs=5), tmp_path / "unclear", noisy(0.02))
    assert (unclear.pairs, unclear.matrix.spend, unclear.seed) == (5, 0.5, 0)


def test_a_folder_that_is_not_for_this_protocol_is_refused_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "p"
    run(plan(pairs=1), folder, FakeLaunch())
    other = plan_commands("cmd a", "cmd c", pairs=1)
    with pytest.raises(UsageError, match=r"another protocol: arms changed; pass another --output"):
        run(other, folder, FakeLaunch())
    with pytest.raises(UsageError, match="warmup changed"):
        run(plan(pairs=1, warmup=2), folder, FakeLaunch())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"working folder changed.*from the same folder"):
        run(plan(pairs=1), folder, FakeLaunch())
    (folder / "state.json").unlink()
    with pytest.raises(UsageError, match="holds no protocol"):
        run(plan(), folder, FakeLaunch())


def test_a_state_or_a_result_that_is_not_one_is_told(tmp_path: Path) -> None:
    run(plan(pairs=1), tmp_path, FakeLaunch())
    state = json.loads((tmp_path / "state.json").read_text())
    changes: list[dict[str, Any]] = [{"runs": []}, {"runs": {"1": {}}}, {"started": "a"}]
    changes += [{"identity": []}, {"dedupe": None}]
    for text in ("{", *(json.dumps({**state, **change}) for change in changes)):
        (tmp_path / "state.json").write_text(text)
        with pytest.raises((DataError, UsageError), match=r"state\.json.*--output|another pr"):
            run(plan(), tmp_path, FakeLaunch())
    for text in ("[]", '{"schema": 7}', '{"schema": 1, "arms": "x"}'):
        (tmp_path / "protocol.json").write_text(text)
        with pytest.raises(DataError, match=r"protocol\.json: not a protocol result"):
            ProtocolResult.read(tmp_path)


def test_failing_runs_are_told_with_their_logs_and_the_others_count(tmp_path: Path) -> None:
    warned: list[str] = []
    codes = {"candidate": (0, 0, 1)}
    found = run(plan(), tmp_path / "one", FakeLaunch(codes=codes), warn=warned.append)
    assert warned == ["runs/06-candidate: exit code 1"]
    [failed] = [item for item in found.arms[1].runs if item.status == "failed"]
    assert failed.exit_code == 1
    assert failed.log_tail.startswith("exit code 1")
    assert "ValueError: it went wrong" in failed.log_tail
    cell = cell_of(found, "tokens_per_second")
    assert (len(cell.values), cell.low is not None) == (2, True)
    found = run(plan(), tmp_path / "all", FakeLaunch(codes={"candidate": (1, -9, 1, 1)}))
    assert [item.status for item in found.arms[1].runs] == ["failed"] * 4
    assert "ended by signal 9" in found.arms[1].runs[1].log_tail
    assert "No counted run of candidate succeeded" in found.paragraph
    assert cell_of(found, "tokens_per_second", 0).value is not None


def test_the_time_limit_ends_it_after_a_pair_and_says_so(tmp_path: Path) -> None:
    launch = FakeLaunch(step_seconds=slower)
    # Rounds of 20 s: the third one, of the second pair, begins within 55 s.
    found = run(plan(pairs=5, max_minutes=55 / 60), tmp_path / "p", launch)
    assert len(launch.calls) == 6
    assert found.pairs == 2
    assert "after 2 of 5 pairs" in found.notes[0]
    more = FakeLaunch(step_seconds=slower)
    found = run(plan(pairs=5, max_minutes=10), tmp_path / "p", more)
    assert len(more.calls) == 2, "a third pair is clear"
    assert found.pairs == 3


def test_different_losses_come_first_in_the_answer(tmp_path: Path) -> None:
    launch = FakeLaunch(losses=lambda arm, n: (2.0, 1.5 if arm == "baseline" else 1.6))
    found = run(plan(), tmp_path / "p", launch)
    assert found.are_losses_equal is False
    assert "Explain the different losses first" in found.paragraph
    assert "Use" not in found.paragraph
    # What is not a number is null in JSON.
    launch = FakeLaunch(losses=lambda arm, n: (2.0, math.nan))
    found = run(plan(), tmp_path / "nan", launch)
    assert found.are_losses_equal is None
    for name in ("protocol.json", "state.json"):
        json.loads((tmp_path / "nan" / name).read_text(), parse_constant=pytest.fail)
    again = ProtocolResult.read(tmp_path / "nan").arms[0].runs[0].losses
    assert again[0] == 2.0
    assert math.isnan(again[1])


def test_progress_tells_the_time_left(tmp_path: Path) -> None:
    told: list[Any] = []
    run(plan(), tmp_path / "p", FakeLaunch(), progress=lambda *at: told.append(at))
    assert told[0][-1] is None
    assert [text for text, *_ in told[::2]] == [
        *("baseline, warm-up", "candidate, warm-up", "candidate, pair 1 of 3"),
        *("baseline, pair 1 of 3", "baseline, pair 2 of 3", "candidate, pair 2 of 3"),
        *("baseline, pair 3 of 3", "candidate, pair 3 of 3"),
    ]
    _, done, total, seconds, left = told[-1]
    assert (done, total, seconds) == (7, 8, 10.0)
    assert left == pytest.approx(0.0)
    assert told[3][-1] == pytest.approx(60.0)
