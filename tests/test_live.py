"""The live view without a terminal: what is on a frame, how it fits, and the loop around it."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from fast_axolotl.measure.summary import summarise
from fast_axolotl.protocol.child import read_last_lines
from fast_axolotl.record import Log, RunRecord, RunSummary, SystemSample, SystemStart
from fast_axolotl.record.follower import ProtocolStage
from fast_axolotl.report.live import LineDisplay, LiveView, SampledProcess, open_display
from fast_axolotl.report.live_frame import Frame, make_frame
from fast_axolotl.report.live_layout import (
    ViewState,
    describe_state,
    format_line,
    lay_out,
    stage_parts,
)
from fast_axolotl.report.series import read_series
from support.records import GIGABYTE, make_rank, make_run, make_system, steady

KEYS = ViewState(keys=(("p", "pause"), ("q", "quit")))


def frame_of(record: RunRecord, **named: Any) -> Frame:
    return make_frame(record, summarise(record), title="runs/a", **named)


def text_of(frame: Frame, *, width: int = 100, height: int | None = None) -> str:
    lines = lay_out(frame, KEYS, width=width, height=height)
    return "\n".join(line.plain.rstrip() for line in lines)


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
            end="exception" if rank == 1 else None,
        )
        for rank in range(number)
    ]
    return make_run(*ranks, system=make_system(end=None))


@pytest.mark.parametrize("number", [1, 2, 64])
@pytest.mark.parametrize("width", [1, 18, 40, 59, 60, 80, 120, 300])
@pytest.mark.parametrize("height", [1, 5, 12, 24, 60])
def test_every_frame_fits_its_terminal(number: int, width: int, height: int) -> None:
    frame = frame_of(many_ranks(number), log=["長い行" * 40, "", "end"], stepless_seconds=99.0)
    lines = lay_out(frame, KEYS, width=width, height=height)
    assert 1 <= len(lines) <= height
    assert max(cell_len(line.plain) for line in lines) <= max(width, 10)


def test_colours_stay_with_what_they_colour() -> None:
    lines = lay_out(frame_of(running()), KEYS, width=100)
    text = {line.plain.split()[0]: line for line in lines if line.plain.strip()}
    for line in lines:
        assert line.style == "", line.plain
    verdict = text["Data-bound"]
    assert verdict.plain[verdict.spans[0].start : verdict.spans[0].end] == " Data-bound (rate) "
    rate = text["rows/s"]
    assert [rate.plain[span.start : span.end].strip() for span in rate.spans] == ["rows/s"]


@pytest.mark.parametrize(("width", "height"), [(40, 24), (80, 24), (120, 36)])
def test_what_matters_most_is_shown_in_every_usual_size(width: int, height: int) -> None:
    text = text_of(frame_of(many_ranks(64)), width=width, height=height)
    for label in ("stall", "rows/s", "tokens/s", "swap", "disk", "rank"):
        assert label in text, label
    assert "memory" in text or "working set" in text
    assert "exce" in text, "the rank that failed is among those shown"
    assert "more: stall" in text


def test_a_low_terminal_keeps_the_verdict_and_the_stall() -> None:
    text = text_of(frame_of(running()), width=40, height=9)
    assert "Data-bound (rate)" in text
    assert "30.0 % now" in text
    assert "→" not in text


def test_a_narrow_terminal_tells_what_the_highest_mark_stands_for() -> None:
    text = text_of(frame_of(running(0.46)), width=59, height=20)
    assert "46.0 % now · 46.0 % overall · full height 50 %" in text


STAGE = ProtocolStage(
    run=3, arm="candidate", pair=0, planned_runs=6, planned_pairs=2, done=2, seconds_left=40.0
)


def test_the_words_for_a_stage() -> None:
    def words(**named: Any) -> str:
        return ", ".join(stage_parts(dataclasses.replace(STAGE, **named)))

    assert words(pair=-1, seconds_left=None) == "run 3 of 6, candidate, warm-up"
    assert words(seconds_left=600.0).endswith("about 10 min left")
    assert words(seconds_left=9000.0).endswith("about 2.5 h left")
    assert words(run=0, arm="") == "run 1 of 6 has not started"
    assert words(planned_runs=0, pair=None, seconds_left=None) == "run 3, candidate"
    assert stage_parts(None) == []


def test_nothing_is_told_of_what_has_not_begun() -> None:
    frame = frame_of(make_run(), stage=["run 1 of 6 has not started"])
    assert "Nothing has been recorded yet." in text_of(frame)
    assert "working set" not in text_of(frame) + format_line(frame)


def test_a_line_tells_when_the_next_run_of_a_protocol_begins() -> None:
    text = io.StringIO()
    display = LineDisplay(text)
    for number in (3, 3, 4):
        stage = stage_parts(dataclasses.replace(STAGE, run=number))
        frame = frame_of(running(), stage=stage)
        display.show(dataclasses.replace(frame, title=f"p/runs/{number:02d}-candidate"))
    lines = text.getvalue().splitlines()
    rest = "candidate, pair 1 of 2, about 40 s left, p/runs"
    assert lines[0] == f"fast-axolotl: watching run 3 of 6: {rest}/03-candidate"
    assert lines[3] == f"fast-axolotl: run 4 of 6 starts: {rest}/04-candidate"
    assert len(lines) == 5


def test_a_run_with_nothing_yet_says_what_it_waits_for() -> None:
    system = make_system(end=None, samples=2)
    assert "No training step has been seen yet." in text_of(frame_of(make_run(system=system)))
    rank = make_rank(fetches=0, warmup_steps=0, end=None)
    assert "No step has ended yet." in text_of(frame_of(make_run(rank)))
    reset = frame_of(make_run(rank), window_seconds=3.0)
    assert "No step has ended since the reset." in text_of(reset)


def test_warming_up_and_short_are_told_as_of_a_run_that_goes_on() -> None:
    warming = text_of(frame_of(make_run(make_rank(fetches=0, end=None))))
    assert "Warming up  5 steps so far" in warming
    assert "during warm-up" not in warming
    short = make_run(make_rank(fetches=50, end=None))
    assert "Too early  50 fetches in 500.0 ms so far." in text_of(frame_of(short))
    assert "→ A verdict in about 0:02." in text_of(frame_of(short))
    over = text_of(frame_of(short, is_over=True))
    assert "Inconclusive (short)  Too short to judge" in over
    assert "at the end" in over


def test_a_run_that_makes_no_step_is_noticed() -> None:
    assert "no step for 1:30" in text_of(frame_of(running(), stepless_seconds=90.0))
    assert "running" in text_of(frame_of(running(), stepless_seconds=8.0))
    slow = make_run(make_rank(own_seconds=30.0, fetches=10, end=None))
    assert "running" in text_of(frame_of(slow, stepless_seconds=90.0))


def test_marks_show_when_the_stall_came() -> None:
    rank = make_rank(wait=lambda fetch: 0.01 if fetch > 1000 else 0.0, fetches=2000, end=None)
    frame = frame_of(make_run(rank))
    shares = [mark.share or 0.0 for mark in frame.marks]
    assert frame.mark_seconds == 1.0
    assert max(shares[:9]) < 0.01
    assert min(shares[-8:]) == pytest.approx(0.5, abs=0.01)
    assert frame.stall_now == pytest.approx(0.5)


def test_marks_begin_where_every_one_of_many_ranks_is_known() -> None:
    slow = [
        make_rank(
            rank=rank, world_size=64, own_seconds=1.5, wait=steady(0.02, 1.5), fetches=60, end=None
        )
        for rank in range(1, 64)
    ]
    fast = make_rank(world_size=64, own_seconds=1.0, wait=steady(0.24, 1.0), fetches=90, end=None)
    frame = frame_of(make_run(fast, *slow))
    shares = [mark.share or 0.0 for mark in frame.marks]
    assert len(fast.blocks) > 32
    assert len(shares) >= 16
    assert min(shares[:16]) == pytest.approx(0.24, abs=0.01)


def test_a_mark_covers_more_time_where_steps_are_long() -> None:
    rank = make_rank(own_seconds=8.0, fetches=40, wait=steady(0.2, 8.0), end=None)
    frame = frame_of(make_run(rank))
    assert frame.mark_seconds == 10.0
    assert {round(mark.share or 0.0, 3) for mark in frame.marks} == {0.2}


def test_the_stall_is_that_of_the_rank_that_stalls_most_or_of_the_dispatcher() -> None:
    def ranks(**settings: Any) -> RunRecord:
        shares = (0.1, 0.4)
        return make_run(
            *(
                make_rank(rank=rank, world_size=2, wait=steady(share), end=None, settings=settings)
                for rank, share in enumerate(shares)
            )
        )

    assert frame_of(ranks()).stall_now == pytest.approx(0.4)
    assert frame_of(ranks(dispatcher=True)).stall_now == pytest.approx(0.1)


def test_device_waits_count_where_there_are_any_and_the_host_s_stand_beside() -> None:
    rank = make_rank(wait=steady(0.5), device_wait=steady(0.02), fetches=900, end=None)
    frame = frame_of(make_run(rank))
    assert frame.stall_now == pytest.approx(0.02)
    assert "2.0 % now · 2.0 % overall · CPU-side 98.0 %" in text_of(frame)


def test_device_waits_of_half_of_the_time_are_not_the_stall_of_the_run_anywhere() -> None:
    record = make_run(make_rank(wait=steady(0.5), device_wait=steady(0.02), end=None))
    blocks = record.ranks[0].blocks
    blocks[::2] = [dataclasses.replace(one, device_wait_seconds=None) for one in blocks[::2]]
    summary = summarise(record)
    assert summary.stall_source == "host"
    assert frame_of(record).stall_now == pytest.approx(summary.stall_fraction, abs=0.01)
    assert "device" not in read_series(record, summary)["stall"]


def test_what_is_no_number_breaks_nothing() -> None:
    record = running()
    blocks = record.ranks[0].blocks
    for index in range(0, len(blocks), 2):
        blocks[index] = dataclasses.replace(
            blocks[index], wall_seconds=math.nan, host_wait_seconds=math.inf, t=math.nan
        )
    record.ranks[0].add(Log(t=1.0, step=3, values={"loss": math.nan}))
    text = text_of(frame_of(record), width=80, height=24)
    assert "loss nan" in text
    assert format_line(frame_of(record))


def test_a_plain_line_holds_the_same() -> None:
    assert format_line(frame_of(many_ranks(3))).endswith("stall by rank 0 2.0 %, 1 2.5 %, 2 3.0 %")
    assert format_line(frame_of(many_ranks(40))).endswith(
        "39 21.5 %, 38 21.0 %, 37 20.5 %, 37 others less"
    )


def test_the_end_of_a_log_is_shown_without_escapes_and_overwritten_progress(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(
        b"first\n\x1b[31mred\x1b[0m\n\n 10%\r 20%\r 30%\n\x1b]0;title\x07\ttab\xff\n40%\r50%\r"
    )
    assert read_last_lines(log, 4) == ["red", " 30%", " tab\ufffd", "50%"]
    assert read_last_lines(log, 1) == ["50%"]
    assert read_last_lines(tmp_path / "none", 3) == []


class FakeDisplay:
    """Takes frames, and types keys when it is waited for; time passes only there."""

    def __init__(self, keys: str = "") -> None:
        self.now = 0.0
        self.frames: list[tuple[Frame, float | None, str]] = []
        self.is_open = False
        self._keys = list(keys)

    def __enter__(self) -> FakeDisplay:
        self.is_open = True
        return self

    def __exit__(self, *error: object) -> None:
        self.is_open = False

    def show(self, frame: Frame, *, paused_seconds: float | None = None, ending: str = "") -> None:
        assert self.is_open
        self.frames.append((frame, paused_seconds, ending))

    def wait(self, seconds: float) -> str:
        key = self._keys.pop(0) if self._keys else ""
        if key == "^":
            raise KeyboardInterrupt
        self.now += seconds if key in ("", " ") else 0.0
        return key.strip()


class GrowingRun:
    """A source that gains a block at every poll, until there are none left."""

    is_behind = False
    stepless_seconds = 0.0

    def __init__(self) -> None:
        self.record = running()
        rank = self.record.ranks[0]
        self.left, rank.blocks = rank.blocks, []
        self.polls = 0

    def poll(self) -> int:
        self.polls += 1
        new, self.left = self.left[:1], self.left[1:]
        self.record.ranks[0].blocks += new
        return len(new)

    def reset(self) -> None:
        self.record.ranks[0].blocks.clear()

    def ending(self) -> str:
        return "" if self.left else "the run finished"


def view_of(
    source: GrowingRun,
    display: FakeDisplay,
    summarise: Callable[[RunRecord], RunSummary] = summarise,
) -> LiveView:
    return LiveView(
        source,
        summarise,
        display,
        title=lambda: "runs/a",
        ending=source.ending,
        clock=lambda: display.now,
    )


def test_a_view_shows_a_frame_a_second_until_the_run_ends() -> None:
    source, display = GrowingRun(), FakeDisplay()
    number = len(source.left)
    assert view_of(source, display).run() == "the run finished"
    assert len(display.frames) == number + 1
    assert display.now == pytest.approx(number)
    steps = [frame.step for frame, _, _ in display.frames[:-1]]
    assert steps == sorted(set(steps))
    last, _, ending = display.frames[-1]
    assert (last.step, last.is_over, ending) == (905, True, "the run finished")
    assert not display.is_open


def test_q_and_ctrl_c_and_the_time_end_it_without_the_run() -> None:
    assert view_of(GrowingRun(), FakeDisplay("  q")).run() == "q was pressed"
    assert view_of(GrowingRun(), FakeDisplay(" ^")).run() == "Ctrl-C"
    display = FakeDisplay()
    assert view_of(GrowingRun(), display).run(2.5) == "the time was up"
    assert display.now == pytest.approx(2.5)
    assert not display.frames[-1][0].is_over


def test_a_paused_view_stands_still_and_reads_on() -> None:
    source, display = GrowingRun(), FakeDisplay("  p   pq")
    view_of(source, display).run()
    paused = [(frame.step, seconds) for frame, seconds, _ in display.frames if seconds is not None]
    assert len({step for step, _ in paused}) == 1
    assert [seconds for _, seconds in paused] == [0.0, 1.0, 2.0, 3.0]
    frame, seconds, _ = display.frames[-1]
    assert seconds is None
    assert frame.step is not None
    assert frame.step > (paused[0][0] or 0)
    assert source.polls == 6


def test_a_reset_begins_a_new_window() -> None:
    display = FakeDisplay("    r q")
    view_of(GrowingRun(), display).run()
    before, at, after = (display.frames[index][0] for index in (-3, -2, -1))
    assert before.window_seconds is None
    assert before.summary.steps > after.summary.steps > 0
    assert not at.has_blocks
    assert after.window_seconds == pytest.approx(1.0)
    assert "since reset" in text_of(after)


def test_the_next_run_has_figures_and_a_window_of_its_own() -> None:
    source, display = GrowingRun(), FakeDisplay("  r   q")
    view = view_of(source, display)
    polls = source.poll

    def poll() -> int:
        if source.polls == 4:
            source.record = make_run(make_rank(wait=steady(0.01), end=None))
            source.record.path = "runs/b"
        return polls()

    source.poll = poll  # type: ignore[method-assign]
    view.run()
    frames = [frame for frame, _, _ in display.frames]
    second = [frame for frame in frames if frame.summary.run_dir == "runs/b"]
    first = frames[: -len(second)]
    assert first[-1].window_seconds is not None
    assert {frame.window_seconds for frame in second} == {None}


def test_a_dear_summary_is_made_less_often() -> None:
    display = FakeDisplay()
    calls = []

    def slow(record: RunRecord) -> RunSummary:
        calls.append(display.now)
        display.now += 0.5
        return summarise(record)

    view_of(GrowingRun(), display, slow).run()
    assert len(calls) <= 3
    assert len(display.frames) >= 13


def test_a_process_that_is_sampled_is_a_source_without_ranks() -> None:
    source = SampledProcess(4711)
    source.add(SystemSample(t=0.0, processes=1, pss_bytes=GIGABYTE, cpu_seconds=0.0))
    assert source.poll() == 0, "not before it has begun"
    source.begin(SystemStart(time=0.0, host="here", root_pid=4711, memory_bytes=4 * GIGABYTE))
    for second in range(1, 5000):
        source.add(
            SystemSample(t=float(second), processes=2, pss_bytes=GIGABYTE, cpu_seconds=second * 1.5)
        )
    assert source.poll() == 5000
    system = source.record.system
    assert system is not None
    assert len(system.samples) <= 1024
    frame = frame_of(source.record, is_outside=True)
    assert "From outside" in text_of(frame)
    assert "processes    2 · 1.50 cores busy" in text_of(frame)
    assert "stall  " not in text_of(frame)
    assert "fast-axolotl measure -- COMMAND" in text_of(frame)
    source.reset()
    assert len(system.samples) == 1


def test_without_a_terminal_there_are_lines() -> None:
    text = io.StringIO()
    display = open_display(text)
    assert isinstance(display, LineDisplay)
    slept: list[float] = []
    with LineDisplay(text, sleep=slept.append) as lines:
        lines.show(frame_of(running()))
        assert lines.wait(1.0) == ""
    assert slept == [1.0]
    assert text.getvalue().count("\n") == 1


def test_a_run_that_has_ended_is_not_said_to_make_no_step() -> None:
    for end, words in (
        ("finished", "training has ended"),
        ("exception", "training failed"),
        ("interrupted", "training was interrupted"),
    ):
        record = make_run(make_rank(end=end))
        frame = make_frame(record, summarise(record), title="", stepless_seconds=15.0)
        assert describe_state(frame, ViewState()) == (words, "bold")
        assert words in format_line(frame)
        assert describe_state(frame, ViewState(ending="q was pressed"))[0] == "q was pressed"
    for ranks in (
        [make_rank(world_size=2)],
        [make_rank(world_size=2), make_rank(rank=1, end=None)],
    ):
        record = make_run(*ranks)
        frame = make_frame(record, summarise(record), title="", stepless_seconds=15.0)
        assert describe_state(frame, ViewState())[0] == "no step for 0:15"
