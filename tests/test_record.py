"""A record: what is written is what is read, whatever happens to the files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl.errors import DataError, MissingFileError
from fast_axolotl.measure.summary import summarise
from fast_axolotl.protocol.compare import parse_check
from fast_axolotl.record import (
    DeviceSample,
    End,
    Histogram,
    LineWriter,
    Log,
    Mark,
    ModelShape,
    ProfileWindow,
    RunSummary,
    Settings,
    StackLine,
    Stacks,
    Start,
    StepBlock,
    SystemSample,
    SystemStart,
    read_run,
)
from fast_axolotl.record.catalogue import FIGURES, MATRIX, PRIMARY
from fast_axolotl.record.codec import from_plain
from fast_axolotl.record.folder import _KINDS, dump_line, parse_line
from fast_axolotl.record.schema import Phase
from fast_axolotl.record.units import count_words, format_duration, format_value
from support.protocol import write_lines as write
from support.records import make_rank, make_run

START = Start(time=1.5, rank=0, world_size=2, pid=7, host="here", version="1", command=("a", "b"))
BLOCK = replace(make_rank().blocks[-1], spans={"log": 0.5}, walls=(0.5, 0.5))
LINE = StackLine(phase="loading", file="a.py", line=3, function="get", seconds=2.0)
EVERY = [
    START,
    BLOCK,
    Settings(t=1.0, values={"num_workers": 0, "is_on": False}, reasons={"mfu": "no model"}),
    Mark(t=1.0, name="epoch", fetch=0, text="ä 中"),
    Log(t=1.0, step=3, values={"loss": 2.5}),
    Phase(t=1.0, name="start", seconds=0.5),
    Stacks(t=1.0, who="workers", seconds=2.0, lines=(LINE,)),
    ModelShape(num_parameters=3, layers=1, attention_width=2),
    ProfileWindow(t=1.0, steps=3, wall_seconds=2.0, collectives=(0.1, 0.2)),
    End(t=9.0, reason="exception", error="ValueError: x"),
    SystemStart(time=1.0, host="here", root_pid=3, gpu_names=("NVIDIA H200",)),
    SystemSample(t=1.0, processes=2, gpus=(DeviceSample(index=0, utilization=0.5),)),
]


def test_every_kind_of_line_is_read_as_it_was_written() -> None:
    assert {type(line) for line in EVERY} == {kind for kind, _ in _KINDS.values()}
    for line in EVERY:
        assert parse_line(dump_line(line)) == line
        values: dict[str, Any] = json.loads(dump_line(line))
        assert set(values) - {"kind"} <= {item.name for item in fields(line)}  # type: ignore[arg-type]


def test_what_was_not_measured_takes_no_room_and_a_zero_is_not_missing() -> None:
    text = dump_line(BLOCK)
    assert not any(word in text for word in ("device", "null", ", "))
    assert parse_line(dump_line(Mark(t=0.0, name="x", fetch=0))) == Mark(t=0.0, name="x", fetch=0)


def test_a_number_that_is_none_is_null_in_json_and_nan_when_it_is_read() -> None:
    text = dump_line(Log(t=1.0, step=3, values={"loss": math.nan, "grad_norm": math.inf}))
    json.loads(text, parse_constant=pytest.fail)
    # Earlier versions wrote what is no JSON.
    for line in (text, '{"kind":"log","t":1.0,"step":3,"values":{"loss":NaN}}'):
        assert all(map(math.isnan, parse_line(line).values.values()))
    block = parse_line(dump_line(replace(BLOCK, walls=(0.5, math.nan))))
    assert block.walls == pytest.approx((0.5, math.nan), nan_ok=True)


def test_what_other_versions_wrote_is_read_and_what_does_not_fit_is_an_error() -> None:
    assert parse_line('{"kind": "hologram", "t": 1}') is None
    later = parse_line('{"kind": "mark", "t": 1, "name": "x", "colour": "red"}')
    assert later == Mark(t=1, name="x")
    sample = parse_line('{"kind":"system","t":1,"processes":2.0,"read_bytes":1e6}')
    assert sample == SystemSample(t=1.0, processes=2, read_bytes=1_000_000)
    with pytest.raises(ValueError, match=r"`int`, got `str` - at `\$.steps`"):
        from_plain(StepBlock, {**asdict(BLOCK), "steps": "two"})


def test_a_run_is_read_by_rank_and_kind(tmp_path: Path) -> None:
    write(tmp_path / "rank-0.jsonl", *EVERY[:10])
    write(tmp_path / "rank-1.jsonl", Start(time=1, rank=1, pid=8, host="there", version="1"))
    write(tmp_path / "system.jsonl", EVERY[10], EVERY[11], End(t=2.0, reason="finished"))
    record = read_run(tmp_path)
    assert sorted(record.ranks) == [0, 1]
    rank = record.ranks[0]
    assert (rank.start, rank.blocks, rank.end) == (START, [BLOCK], EVERY[9])
    assert len(rank.marks) == len(rank.phases) == len(rank.models) == len(rank.windows) == 1
    assert rank.values == {"num_workers": 0, "is_on": False}
    assert rank.reasons == {"mfu": "no model"}
    assert record.system.samples == [EVERY[11]]
    assert record.notes == []


def test_a_line_that_is_cut_off_is_noted_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    write(path, START, BLOCK, BLOCK)
    whole = path.read_bytes()
    for cut in range(len(whole) - len(dump_line(BLOCK)), len(whole) - 2):
        path.write_bytes(whole[:cut])
        record = read_run(tmp_path)
        assert record.ranks[0].blocks == [BLOCK]
        (note,) = record.notes
        assert "truncated in line 3" in note


def test_lines_that_are_none_are_noted_with_their_numbers(tmp_path: Path) -> None:
    texts = ["not json", "[]", "7", "{}", '{"kind":"steps"}', '{"kind":"mark","t":1,"name":1}x']
    lines = [dump_line(START), *texts, dump_line(BLOCK)]
    (tmp_path / "rank-0.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    record = read_run(tmp_path)
    assert record.ranks[0].blocks == [BLOCK]
    noted = [f"rank-0.jsonl, line {at}: not a line of a record" for at in range(2, 8)]
    assert record.notes == noted


def test_files_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "rank-0.jsonl", START)
    write(tmp_path / "rank-1.jsonl", BLOCK)
    (tmp_path / "rank-2.jsonl").mkdir()
    record = read_run(tmp_path)
    assert sorted(record.ranks) == [0]
    assert record.notes[0] == "rank-1.jsonl has no start line and was skipped"
    assert record.notes[1].startswith("rank-2.jsonl cannot be read: Is a directory")


def test_a_protocol_s_folder_names_what_reads_it(tmp_path: Path) -> None:
    # A folder with records below is no protocol yet.
    write(tmp_path / "runs" / "before" / "system.jsonl")
    with pytest.raises(DataError, match=r"holds no record: .*measure"):
        read_run(tmp_path)
    with pytest.raises(MissingFileError, match="no such folder"):
        read_run(tmp_path / "nowhere")
    folder = tmp_path / "p 1"
    for name in ("01-baseline", "02-drop-in"):
        write(folder / "runs" / name / "system.jsonl")
    with pytest.raises(DataError, match="folder of a protocol") as found:
        read_run(folder)
    assert "fast-axolotl report" not in str(found.value), "there is no result yet"
    (folder / "protocol.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="folder of a protocol") as found:
        read_run(folder)
    for command in (f"report '{folder}", f"compare '{folder}", f"show '{folder}/runs/02-drop-in"):
        assert f"fast-axolotl {command}'" in str(found.value)
    assert "run --measure" not in str(found.value)


def test_an_earlier_file_is_kept_and_not_read_and_a_refused_one_is_left_as_it_is(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rank-0.jsonl"
    write(path, START, BLOCK)
    write(path, START)
    assert read_run(tmp_path).ranks[0].blocks == []
    assert len((tmp_path / "rank-0.jsonl.1").read_text().splitlines()) == 2
    (tmp_path / "empty.jsonl").touch()
    write(tmp_path / "empty.jsonl", START)
    assert not (tmp_path / "empty.jsonl.1").exists()
    theirs = path.read_text()
    writer = LineWriter(path, refusal="it is another's")
    writer.write(End(t=0.0, reason="finished"))
    writer.close()
    assert writer.failure == f"{path}: it is another's"
    assert path.read_text() == theirs
    assert not (tmp_path / "rank-0.jsonl.2").exists()


def test_bytes_that_are_no_text_are_written_and_all_bytes_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    name = b"data-\xff.jsonl".decode("utf-8", "surrogateescape")
    marks = [Mark(t=1, name="shard", text=text) for text in (name, "grüße.jsonl")]
    writer = LineWriter(path)
    for line in (START, *marks, BLOCK):
        writer.write(line)
    writer.close()
    assert writer.num_bytes == path.stat().st_size
    rank = read_run(tmp_path).ranks[0]
    assert (len(rank.marks), len(rank.blocks)) == (2, 1)


def test_a_disk_that_refuses_ends_the_writing(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "rank-0.jsonl")
    writer.write(START)
    written = writer.num_bytes
    writer._file.close()
    writer._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    for _ in range(2):
        writer.write(BLOCK)
    assert writer.failure == f"{tmp_path / 'rank-0.jsonl'}: No space left on device"
    assert writer.num_bytes == written == (tmp_path / "rank-0.jsonl").stat().st_size


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200), st.floats(0, 1))
def test_quantiles_of_a_histogram_are_within_one_percent(
    durations: list[float], share: float
) -> None:
    histogram = Histogram()
    for seconds in durations:
        histogram.add(seconds)
    found = histogram.quantile(share)
    ordered = sorted(durations)
    rank = -(-round(share * len(ordered) * 1e9) // 10**9)
    exact = ordered[max(0, min(len(ordered), rank) - 1)]
    assert found == pytest.approx(exact, rel=0.0101, abs=1e-6)


@given(st.lists(st.floats(0, 1e4)), st.lists(st.floats(0, 1e4)))
def test_histograms_fold_the_same_way_however_they_are_cut(
    first: list[float], second: list[float]
) -> None:
    whole = Histogram()
    parts = [Histogram(), Histogram()]
    for part, durations in zip(parts, (first, second), strict=True):
        for seconds in durations:
            part.add(seconds)
            whole.add(seconds)
    merged = Histogram()
    for part in parts:
        merged.merge(part.written())
    assert merged == whole
    assert (
        sum(count for _, count in merged.durations()) == merged.total() == len(first) + len(second)
    )


DOCS = sorted((Path(__file__).parents[1] / "docs").glob("metrics*.md"))


def test_a_summary_has_every_figure_of_the_catalogue_and_nothing_twice() -> None:
    summary = summarise(make_run())
    assert set(summary.figures) == set(FIGURES)
    assert not {item.name for item in fields(summary)} & set(FIGURES)
    assert {figure.name for figure in MATRIX} | set(PRIMARY) <= set(FIGURES)
    assert summary.stall_fraction is summary.figures["stall_fraction"]
    limit = parse_check("stall_fraction > +0.02")
    assert (limit.figure, limit.bound, limit.is_difference) == ("stall_fraction", 0.02, True)
    with pytest.raises(AttributeError, match="no figure 'stall'"):
        _ = summary.stall


def test_units_are_ones_that_a_value_can_be_written_in() -> None:
    counted = {"fetches", "batches", "samples", "tokens", "rows", "steps", "cores", "processes"}
    counted |= {f"{noun}/s" for noun in counted} | {"batches/step", "×", "W", "MHz", "TFLOP/s"}
    scaled = {"share", "s", "bytes", "bytes/s", "FLOP", "FLOP/s", "yes/no"}
    assert {figure.unit for figure in FIGURES.values()} <= counted | scaled
    for figure in FIGURES.values():
        assert figure.format(None) == "–"
        assert figure.unit in scaled or figure.format(3.0) == f"3 {figure.unit}"


def test_the_documentation_explains_every_figure_in_short_sentences() -> None:
    """What it tells, how it is measured, when it is blank or misleading: a paragraph each."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in DOCS)
    sections = {}
    for title, body in re.findall(r"(?ms)^### (.+?)\n\n(.+?)(?=\n#|\Z)", text):
        sections |= dict.fromkeys(re.findall(r"`(\w+)`", title), body.strip())
    assert set(sections) == set(FIGURES)
    names = [item.name for item in fields(RunSummary) if item.name != "figures"]
    assert [name for name in names if f"`{name}`" not in text] == []
    directions = {"higher": "; higher is better.", "lower": "; lower is better.", "": "."}
    for name, figure in FIGURES.items():
        parts = re.split(r"\n\n- |\n- ", sections[name])
        tells, method, caveat = (" ".join(part.split()) for part in parts)
        label = figure.label if "Label: " in tells else figure.label.split(", ")[-1]
        assert re.search(rf"Labels?: .*[*]([^*]*, )?{re.escape(label)}[*]", tells), name
        unit = "percent" if figure.unit == "share" else figure.unit
        assert tells.endswith(f" Unit: {unit}{directions[figure.better]}"), name
        assert method.startswith("**How it is measured.** "), name
        assert caveat.startswith("**When it is blank or misleading.** "), name
        assert figure.missing in caveat or figure.missing == "not recorded", name
        for sentence in re.split(r"[.] ", f"{tells} {method} {caveat}"):
            assert len(sentence.split()) <= 30, sentence


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (None, "s", "–"),
        (float("nan"), "share", "–"),
        (0.3417, "share", "34.2 %"),
        (0.0000412, "s", "41 µs"),
        (0.0412, "s", "41.2 ms"),
        (3.2, "s", "3.20 s"),
        (7384.0, "s", "2 h 03 min"),
        (9.44e9, "bytes", "9.44 GB"),
        (4.2e15, "bytes", "4,200 TB"),
        (999.6e6, "bytes/s", "1,000 MB/s"),
        (123.4e3, "bytes", "123 kB"),
        (0.0, "bytes/s", "0 B/s"),
        (2.5e19, "FLOP", "25,000 PFLOP"),
        (51234.5, "tokens/s", "51,234 tokens/s"),
        (1.24, "samples/s", "1.24 samples/s"),
        (True, "yes/no", "yes"),
    ],
)
def test_figures_have_their_units(value: float | None, unit: str, words: str) -> None:
    assert format_value(value, unit) == words


def test_durations_and_counts_are_read_at_a_glance() -> None:
    durations = [format_duration(one) for one in (8.24, 59.99, 750, 3840)]
    assert durations == ["8.2 s", "60.0 s", "12 min 30 s", "1 h 04 min"]
    counts = [count_words(*one) for one in ((1, "step"), (0, "step"), (2000, "fetch"))]
    assert counts == ["1 step", "0 steps", "2,000 fetches"]
