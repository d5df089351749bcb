"""A record read while it grows: every line once, the same figures, bounded memory."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from fast_axolotl.errors import DataError, MissingFileError
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import End, StepBlock, read_run
from fast_axolotl.record.codec import to_plain
from fast_axolotl.record.folder import dump_line
from fast_axolotl.record.follower import (
    ProtocolFollower,
    RunFollower,
    condense_blocks,
    condense_marks,
    condense_samples,
)
from fast_axolotl.record.protocol_result import PROTOCOL_FILE, Arm, ArmRun, Matrix, ProtocolResult
from fast_axolotl.record.schema import Mark
from support.records import every, lines_of, make_rank, make_run, make_system, steady, write_run

ORDER = ("baseline", "candidate", "candidate", "baseline", "baseline", "candidate")
"""Of a protocol with one warm-up and two pairs."""


def write_protocol(folder: Path, *, done: int, planned: int = 6, seconds: float = 10.0) -> None:
    """What a protocol writes at its start and after every run."""
    arms = tuple(
        Arm(
            name=name,
            text=name,
            command=("true",),
            runs=tuple(
                ArmRun(folder=f"runs/{number:02d}-{name}", pair=0, status="done", seconds=seconds)
                for number, arm in enumerate(ORDER[:done], 1)
                if arm == name
            ),
        )
        for name in ("baseline", "candidate")
    )
    protocol = ProtocolResult(
        title="",
        started=0.0,
        seconds=done * seconds,
        pairs=0,
        planned_pairs=2 if planned else 0,
        planned_runs=planned,
        order=ORDER[:done],
        arms=arms,
        matrix=Matrix(arms=("baseline", "candidate"), rows=()),
        losses="",
        are_losses_equal=None,
        paragraph="",
    )
    folder.mkdir(exist_ok=True)
    (folder / "runs").mkdir(exist_ok=True)
    (folder / PROTOCOL_FILE).write_text(json.dumps(to_plain(protocol)))
    os.utime(folder / PROTOCOL_FILE, (1000 + done, 1000 + done))


def test_a_record_followed_byte_by_byte_is_the_record_read_at_once(tmp_path: Path) -> None:
    text = "".join(lines_of(make_rank(wait=steady(0.2), fetches=900, tokens=10))).encode()
    file = tmp_path / "rank-0.jsonl"
    follower = RunFollower(tmp_path)
    for begin in range(0, len(text), 97):
        with file.open("ab") as opened:
            opened.write(text[begin : begin + 97])
        follower.poll()
    whole = read_run(tmp_path)
    assert follower.record.ranks == whole.ranks
    assert follower.record.notes == []
    assert follower.poll() == 0


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    write_run(tmp_path, make_run(make_rank(end=None), system=make_system(samples=3, end=None)))
    follower = RunFollower(tmp_path)
    assert follower.poll() > 5
    assert follower.poll() == 0
    with (tmp_path / "system.jsonl").open("a") as file:
        file.write(dump_line(End(t=3.0, reason="finished")) + "\n")
    assert follower.poll() == 1
    assert follower.record.system is not None
    assert follower.record.system.end is not None


def test_a_protocol_is_followed_from_run_to_run(tmp_path: Path) -> None:
    first, tenth = (tmp_path / "runs" / name for name in ("2-baseline", "10-candidate"))
    (tmp_path / "runs").mkdir()
    assert not ProtocolFollower.is_protocol(tmp_path)
    with pytest.raises(DataError, match="holds no record"):
        ProtocolFollower(tmp_path).check()
    write_run(first, make_run(make_rank()))
    follower = ProtocolFollower(tmp_path)
    follower.check()
    assert follower.poll() > 1
    assert follower.record.path == str(first)
    tenth.mkdir()
    assert follower.poll() == 0
    write_run(tenth, make_run(make_rank(end=None)))
    assert follower.poll() > 1
    assert follower.record.path == str(tenth)
    assert not follower.run.is_complete


def test_how_far_a_protocol_is_is_read_from_its_folder(tmp_path: Path) -> None:
    now = [1000.0]
    write_protocol(tmp_path, done=0)
    follower = ProtocolFollower(tmp_path, now=lambda: now[0])
    follower.check()
    assert not follower.has_begun
    stage = follower.read_stage()
    assert stage is not None
    assert (stage.run, stage.planned_runs, stage.done, stage.seconds_left) == (0, 6, 0, None)
    pairs = []
    for number, arm in enumerate(ORDER, 1):
        write_run(tmp_path / "runs" / f"{number:02d}-{arm}", make_run(make_rank()))
        follower.poll()
        stage = follower.read_stage()
        assert stage is not None
        assert (stage.run, stage.arm, stage.is_over) == (number, arm, False)
        pairs.append(stage.pair)
        write_protocol(tmp_path, done=number)
    assert pairs == [-1, -1, 0, 0, 1, 1]
    stage = follower.read_stage()
    assert stage is not None
    assert stage.is_over
    assert stage.seconds_left is None


def test_the_time_left_is_that_of_the_runs_so_far(tmp_path: Path) -> None:
    write_protocol(tmp_path, done=3, seconds=10.0)
    write_run(tmp_path / "runs" / "04-baseline", make_run(make_rank(end=None)))

    def left_after(seconds: float) -> float | None:
        stage = ProtocolFollower(tmp_path, now=lambda: 1003.0 + seconds).read_stage()
        assert stage is not None
        return stage.seconds_left

    assert [left_after(seconds) for seconds in (0, 4, 10, 99)] == [30, 26, 20, 20]
    write_protocol(tmp_path, done=5, seconds=10.0)
    assert left_after(99) is None, "the last run takes longer than those before"


def test_of_an_earlier_version_s_protocol_only_the_run_is_known(tmp_path: Path) -> None:
    write_protocol(tmp_path, done=1, planned=0)
    write_run(tmp_path / "runs" / "02-candidate", make_run(make_rank(end=None)))
    stage = ProtocolFollower(tmp_path).read_stage()
    assert stage is not None
    assert (stage.run, stage.arm, stage.pair, stage.is_over) == (2, "candidate", None, False)
    (tmp_path / PROTOCOL_FILE).write_text("{")
    assert ProtocolFollower(tmp_path).read_stage() is None


def test_a_run_that_is_made_again_is_the_one_to_follow(tmp_path: Path) -> None:
    write_protocol(tmp_path, done=1)
    for number, arm in enumerate(ORDER[:3], 1):
        write_run(tmp_path / "runs" / f"{number:02d}-{arm}", make_run(make_rank()))
    data = json.loads((tmp_path / PROTOCOL_FILE).read_text())
    third = {"folder": "runs/03-candidate", "pair": 0, "status": "done"}
    data["arms"][1]["runs"].append(third)
    (tmp_path / PROTOCOL_FILE).write_text(json.dumps(data))
    follower = ProtocolFollower(tmp_path)
    assert follower.run.folder.name == "02-candidate"
    write_protocol(tmp_path, done=3)
    follower.poll()
    assert follower.run.folder.name == "03-candidate"


def test_a_protocol_that_cannot_be_read_and_has_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / PROTOCOL_FILE).write_text("{}")
    assert ProtocolFollower.is_protocol(tmp_path)
    with pytest.raises(DataError, match="not a protocol result"):
        ProtocolFollower(tmp_path).check()


def test_ranks_that_begin_later_are_found(tmp_path: Path) -> None:
    write_run(tmp_path, make_run(make_rank(world_size=2)))
    follower = RunFollower(tmp_path)
    follower.poll()
    assert not follower.is_complete
    write_run(tmp_path, make_run(make_rank(rank=1, world_size=2)))
    follower.poll()
    assert sorted(follower.record.ranks) == [0, 1]
    assert follower.is_complete


def test_a_new_run_in_the_folder_takes_the_place_of_the_earlier(tmp_path: Path) -> None:
    two = [make_rank(rank=rank, world_size=2, fetches=900) for rank in (0, 1)]
    write_run(tmp_path, make_run(*two))
    follower = RunFollower(tmp_path)
    follower.poll()
    (tmp_path / "rank-0.jsonl").rename(tmp_path / "rank-0.jsonl.1")
    write_run(tmp_path, make_run(make_rank(fetches=100)))
    follower.poll()
    assert sorted(follower.record.ranks) == [0]
    assert sum(block.fetches for block in follower.record.ranks[0].blocks) == 105
    assert follower.record.notes == ["rank-1.jsonl is from another run: this one had 1 ranks"]


def test_a_rank_that_is_ahead_of_rank_0_is_not_lost(tmp_path: Path) -> None:
    write_run(tmp_path, make_run(make_rank()))
    follower = RunFollower(tmp_path)
    follower.poll()
    write_run(tmp_path, make_run(make_rank(rank=1, world_size=2)))
    follower.poll()
    assert sorted(follower.record.ranks) == [0]
    (tmp_path / "rank-0.jsonl").unlink()
    write_run(tmp_path, make_run(make_rank(world_size=2)))
    follower.poll()
    assert sorted(follower.record.ranks) == [0, 1]


def test_a_spoilt_line_is_noted_and_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, make_run(make_rank(fetches=300)))
    file = tmp_path / "rank-0.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:3], b"{\xff no JSON\n\n", *lines[3:]]))
    follower = RunFollower(tmp_path)
    follower.poll()
    assert follower.record.notes == ["rank-0.jsonl, line 4: not a line of a record"]
    assert follower.is_complete
    file.write_bytes(b"".join(lines[:4]))
    follower.poll()
    assert follower.record.notes == [], "of a file that is no more"


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no such folder"):
        RunFollower(tmp_path / "gone").check()
    with pytest.raises(DataError, match="holds no record"):
        RunFollower(tmp_path).check()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="this is a file"):
        RunFollower(tmp_path / "file").check()
    assert RunFollower(tmp_path / "gone").poll() == 0


def test_a_record_of_a_later_version_is_refused(tmp_path: Path) -> None:
    rank = make_rank()
    rank.start = dataclasses.replace(rank.start, schema=99)
    write_run(tmp_path, make_run(rank))
    with pytest.raises(DataError, match="in format 99"):
        RunFollower(tmp_path).poll()


def test_a_long_run_is_kept_short_with_the_same_figures(tmp_path: Path) -> None:
    wait = every(40, 0.15, own_seconds=0.1)
    rank = make_rank(wait=wait, own_seconds=0.1, fetches=60_000, tokens=100, padded=120)
    record = make_run(rank, system=make_system(samples=7000, read_bytes=5e6))
    assert len(rank.blocks) > 5000
    write_run(tmp_path, record)
    follower = RunFollower(tmp_path)
    while follower.poll() or follower.is_behind:
        pass
    kept = follower.record
    assert len(kept.ranks[0].blocks) <= 4096
    assert kept.system is not None
    assert len(kept.system.samples) <= 1024
    whole, short = summarise(record), summarise(kept)
    for name in ("stall_fraction", "samples_per_second", "tokens_per_second", "padding_share"):
        assert getattr(short, name) == pytest.approx(getattr(whole, name)), name
    for name in ("fetches", "steps", "step_p50_seconds", "wait_p99_seconds", "stall_pattern"):
        assert getattr(short, name) == getattr(whole, name), name
    assert short.read_bytes_per_second == pytest.approx(whole.read_bytes_per_second)
    assert short.verdict.kind == whole.verdict.kind == "data"


def test_blocks_are_joined_within_a_phase_and_the_newest_left_alone() -> None:
    blocks = make_rank(fetches=3000, warmup_steps=300, device_wait=steady(0.1)).blocks
    found = condense_blocks(blocks, most=len(blocks) - 1, newest=8)
    assert len(found) < len(blocks) * 0.7
    assert found[-8:] == blocks[-8:]
    for name in ("fetches", "steps", "wall_seconds", "device_wait_seconds", "samples"):
        for phase in ("warmup", "steady"):
            before, after = (
                sum(getattr(block, name) for block in some if block.phase == phase)
                for some in (blocks, found)
            )
            assert before == pytest.approx(after), (name, phase)
    assert condense_blocks(blocks, most=len(blocks), newest=8) is blocks


def test_what_one_of_two_blocks_did_not_count_is_not_known_of_both() -> None:
    def block(step: int, **named: object) -> StepBlock:
        values = {"phase": "steady", "steps": 1, "fetches": 1, "host_wait_seconds": 0.0, **named}
        return StepBlock(t=step, first_step=step, first_fetch=step, wall_seconds=1.0, **values)  # type: ignore[arg-type]

    pair = [block(0, real_tokens=5, sequences=3, queue_depth=4.0), block(1), block(2)]
    [joined, last] = condense_blocks(pair, most=2, newest=1)
    assert (joined.real_tokens, joined.rows) == (None, None)
    assert (joined.sequences, joined.queue_depth) == (3, 4.0)  # looked at now and then
    assert last is pair[2]
    idle = [block(0, real_tokens=5), block(1, fetches=0), block(2)]
    assert condense_blocks(idle, most=2, newest=1)[0].real_tokens == 5
    apart = [block(0, device_wait_seconds=0.5), block(1), block(2)]
    assert condense_blocks(apart, most=2, newest=1) == apart


def test_the_highest_sample_is_never_let_go() -> None:
    samples = make_system(samples=100).samples
    peak = dataclasses.replace(samples[41], pss_bytes=9 * 10**9)
    tall = dataclasses.replace(samples[22], hwm_bytes=9 * 10**9, pss_bytes=None)
    samples[41], samples[22] = peak, tall
    for _ in range(5):
        samples = condense_samples(samples, most=len(samples) - 1, newest=4)
    assert len(samples) < 20
    assert peak in samples
    assert tall in samples
    assert samples[0].t == 0.0
    assert samples[-1].t == 99.0


def test_of_marks_the_first_and_the_latest_stay() -> None:
    marks = [Mark(t=float(number), name="epoch") for number in range(1000)]
    kept = condense_marks(marks, most=400)
    assert len(kept) <= 400
    assert (kept[0], kept[-1]) == (marks[0], marks[-1])


def test_a_new_window_forgets_steps_and_keeps_what_counters_are_compared_with(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, make_run(make_rank(end=None), system=make_system(end=None, read_bytes=1e6)))
    follower = RunFollower(tmp_path)
    follower.poll()
    follower.reset()
    assert follower.record.ranks[0].blocks == []
    assert follower.record.ranks[0].marks != []
    assert follower.record.system is not None
    [sample] = follower.record.system.samples
    assert (sample.t, sample.read_bytes) == (59.0, 59e6)


def test_seconds_without_a_step_are_counted_by_the_clock(tmp_path: Path) -> None:
    now = [100.0]
    write_run(tmp_path, make_run(make_rank(end=None)))
    follower = RunFollower(tmp_path, clock=lambda: now[0])
    now[0] += 5
    assert follower.stepless_seconds == 5
    follower.poll()
    assert follower.stepless_seconds == 0
    now[0] += 7
    follower.poll()
    assert follower.stepless_seconds == 7
