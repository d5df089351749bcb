"""CSV: dialects, quotes, and numbers only where every value of a column is a plain one."""

from __future__ import annotations

import csv
import io
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fast_axolotl import CsvDialect, open_dataset
from fast_axolotl.errors import ConflictError, DataError
from support.files import SMALL_BUDGET, compress, flat_rows, read_rows, write_csv


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def values_of(path: Path, column: str = "a", **options: Any) -> list[Any]:
    return [row[column] for row in read_rows(path, **options)]


# Shapes.


HEADER_ALONE = ("a,b\n", "a,b", "a,b\r\n", "\n\na,b\n\n")


@pytest.mark.parametrize(
    ("text", "rows", "dialect"),
    [
        ('a,b\n"x\ny, ""z""",1\n"",2\n"\r\n",3\n', [('x\ny, "z"', 1), ("", 2), ("\r\n", 3)], {}),
        ('a,b\n5" pipe,1\n"x, y",3\n', [('5" pipe', 1), ("x, y", 3)], {}),
        ('a,b\nsay "hi",2\n', [('say "hi"', 2)], {}),
        ("a,b:c,d\n'1:2',x:3,4\n", [("1:2,x", "3,4")], {"delimiter": ":", "quote": "'"}),
        ('a,b\n"x \\"y\\"",1\nu\\,v,2\n', [('x "y"', 1), ("u,v", 2)], {"escape": "\\"}),
        ("1,x\n2,y\n", [(1, "x"), (2, "y")], {"column_names": ("n", "t")}),
        ("\na,b\n\n1,2\n\n\n3,4\n\n", [(1, 2), (3, 4)], {}),
        ("\ufeffa,b\r\n1,x\r\n2,y", [(1, "x"), (2, "y")], {}),
        *((text, [], {}) for text in HEADER_ALONE),
    ],
)
def test_files_of_every_shape(
    tmp_path: Path, text: str, rows: list[tuple[Any, ...]], dialect: dict[str, Any]
) -> None:
    path = write(tmp_path / "a.csv", text)
    names = {"delimiter": ["a,b", "c,d"], "column_names": ["n", "t"]}
    for compression in ("none", "gzip", "xz"):
        reader = open_dataset(compress(path, compression), csv=CsvDialect(**dialect))
        assert reader.schema.names == names.get(next(iter(dialect), ""), ["a", "b"])
        assert [tuple(row.values()) for batch in reader for row in batch.to_pylist()] == rows


def test_delimiters_are_detected(tmp_path: Path) -> None:
    rows = [{"a": index, "b": f"x, {index}\ny", "c": "1,5"} for index in range(30)]
    for name, delimiter in (("a.tsv", "\t"), ("a.csv", "\t"), ("a.csv", ";"), ("a.csv", "|")):
        assert read_rows(write_csv(tmp_path / name, rows, delimiter=delimiter)) == rows
    assert values_of(write(tmp_path / "b.tsv", "a\n1,2,3\n4,5,6\n")) == ["1,2,3", "4,5,6"]


# Stray quotes.


def test_a_stray_quote_after_many_blocks_loses_nothing_and_shards_have_parts(
    tmp_path: Path,
) -> None:
    rows = flat_rows(4000, 500)
    path = write_csv(tmp_path / "a.csv", rows)
    with path.open("a", newline="") as file:
        file.write('4000,5" pipe,1.5\r\n4001,"x\r\ny",2.5\r\n')

    found = read_rows(path, memory_budget=SMALL_BUDGET)
    shards = [read_rows(path, shard=(index, 2)) for index in range(2)]

    assert sorted(row["id"] for shard in shards for row in shard) == list(range(4002))
    assert found[:4000] == rows
    assert found[4000:] == [
        {"id": 4000, "text": '5" pipe', "score": 1.5},
        {"id": 4001, "text": "x\r\ny", "score": 2.5},
    ]


UNCLOSED, RAGGED = '9,"never closed,1\n10,x,2\n', "1,x,2\r\n1,x,2,3\r\n"


@pytest.mark.parametrize(
    ("size", "tail", "line", "told"),
    [
        (3, UNCLOSED, 1, "not closed"),
        (4000, UNCLOSED, 1, "not closed"),
        (4000, RAGGED, 2, "expected 3 fields, found 4"),
        (4000, f'0,5" pipe,0\r\n{RAGGED}', 3, "expected 3 fields, found 4"),
    ],
)
def test_what_is_wrong_after_many_blocks_is_an_error_with_its_line(
    tmp_path: Path, size: int, tail: str, line: int, told: str
) -> None:
    path = write_csv(tmp_path / "a.csv", flat_rows(size, 500))
    lines = path.read_bytes().count(b"\n")
    with path.open("a", newline="") as file:
        file.write(tail)

    with pytest.raises(DataError, match=rf"a\.csv.*{told}") as caught:
        read_rows(path, memory_budget=SMALL_BUDGET)
    assert caught.value.place == f"line {lines + line}"


# Types.


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        pytest.param(["1", "-2", "0"], [1, -2, 0], id="plain integers"),
        pytest.param(["1", "", "3"], [1, None, 3], id="an empty field is null among integers"),
        pytest.param(["1.5", "2", "-0.25"], [1.5, 2.0, -0.25], id="decimals"),
        pytest.param(["1.50", "2"], [1.5, 2.0], id="a trailing zero is still a number"),
        pytest.param(["1e5", "-2.5E-3"], [1e5, -2.5e-3], id="exponents"),
        pytest.param(["-0", "1"], [-0.0, 1.0], id="minus zero"),
        pytest.param([str(2**63 - 1)], [2**63 - 1], id="the largest integer"),
        pytest.param(["", ""], ["", ""], id="all empty"),
        pytest.param(["x", "", "1"], ["x", "", "1"], id="an empty field is empty text among text"),
        *(([text, "1"], [text, "1"]) for text in ("08123", "00.5", "+1", " 1", "1,000", "0x1F")),
        *(([text, "1"], [text, "1"]) for text in ("NA", "null", "nan", "inf", "1e999", "true")),
        *(([text, "0.5"], [text, "0.5"]) for text in (str(2**63), "12345678901234567")),
        (["2024-01-31"], ["2024-01-31"]),
    ],
)
def test_a_column_is_a_number_only_if_every_value_is_a_plain_one(
    tmp_path: Path, texts: list[str], values: list[Any]
) -> None:
    path = write_csv(tmp_path / "a.csv", [{"a": text, "b": "x"} for text in texts])

    found = values_of(path)

    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("common", "late", "value", "options"),
    [
        ("1", "08123", "1", {}),
        ("1.50", "x", "1.50", {"shuffle": 3}),
        ("1", "1.50", 1.0, {"compression": "gzip"}),
        ("1.50", "12345678901234567", "1.50", {"shard": (1, 2)}),
        ("1", "", 1, {}),
        ("1.5", "2", 1.5, {"shuffle": 3}),
        ("x", "7", "x", {"compression": "gzip"}),
        ("", "7", "", {}),
    ],
)
def test_a_later_value_that_contradicts_is_an_error_with_its_line_or_known_by_a_scan(
    tmp_path: Path, common: str, late: str, value: Any, options: dict[str, Any]
) -> None:
    rows = [{"a": common, "t": "x\ny" * 150}] * 3000 + [{"a": late, "t": "y"}]
    path = write_csv(tmp_path / "a.csv", rows, lineterminator="\n\n")
    path = compress(path, options.pop("compression", "none"))
    options["memory_budget"] = SMALL_BUDGET

    if (common, late) in [("1", ""), ("1.5", "2"), ("x", "7"), ("", "7")]:
        found = values_of(path, **options)
    else:
        with pytest.raises(ConflictError, match=r'in earlier rows.* pass infer="scan"') as caught:
            values_of(path, **options)
        if "shuffle" not in options:  # else it is found in whichever of the rows comes later
            assert (caught.value.path, caught.value.place) == (str(path), "line 456003")
        options.pop("shard", None)
        found = values_of(path, infer="scan", **options)

    assert found.count(value) == 3000
    assert len({type(item) for item in found if item is not None}) == 1


def test_types_are_joined_over_files(tmp_path: Path) -> None:
    write(tmp_path / "1.csv", "a,b\n1,1\n")
    write(tmp_path / "2.csv", "a,b,c\n007,2.5,x\n")

    rows = [tuple(row.values()) for row in read_rows(tmp_path)]
    assert rows == [("1", 1.0, None), ("007", 2.5, "x")]


def test_a_quoted_line_end_at_any_place_of_a_block_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for end in ("\n", "\r\n"):
        rows = [{"n": str(n) + "x", "t": f"{'x' * (n % 37)}{end}y"} for n in range(300)]
        path = write_csv(tmp_path / "a.csv", rows, lineterminator="\n")
        assert read_rows(path) == rows


# Any text: what csv.writer wrote comes back.

FIELDS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=6),
    st.sampled_from(
        ['"', '""', ",", "\n", "\r\n", "\r", "a\rb", ";", "\t", " ", "'", "#", "\\", "\ufeff"]
    ),
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(1, 3).flatmap(
        lambda width: st.lists(
            st.lists(FIELDS, min_size=width, max_size=width), min_size=1, max_size=8
        )
    ),
    delimiter=st.sampled_from(",;\t|"),
    lineterminator=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    tiny_blocks=st.booleans(),
    compression=st.sampled_from(["none", "zstd"]),
)
@example([["\r"]], ",", "\n", csv.QUOTE_MINIMAL, False, "none")
@example([["a\rb", "x"]], ",", "\r\n", csv.QUOTE_MINIMAL, True, "none")
@example([["x", "y"], ["\ufeff", "y"]], ",", "\n", csv.QUOTE_MINIMAL, True, "none")
def test_any_text_comes_back(
    rows: list[list[str]],
    delimiter: str,
    lineterminator: str,
    quoting: Any,
    tiny_blocks: bool,
    compression: str,
) -> None:
    if any("\r" in field for row in rows for field in row):
        quoting = csv.QUOTE_ALL  # Python before 3.13 leaves a lone \\r bare
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator=lineterminator, quoting=quoting)
    names = [f"c{index}" for index in range(len(rows[0]))]
    writer.writerow(names)
    writer.writerow(["text"] * len(names))
    writer.writerows(rows)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if tiny_blocks:
            patch.setattr("fast_axolotl.reading.reader.MIB", 8)
        path = compress(write(Path(folder) / "rows.csv", text.getvalue()), compression)
        found = read_rows(path, csv=CsvDialect(delimiter=delimiter), num_threads=1)

    assert [list(row.values()) for row in found] == [["text"] * len(names), *rows]
