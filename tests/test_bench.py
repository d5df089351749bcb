"""``fast-axolotl bench``: races on the user's own files, against what is installed here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fast_axolotl import __version__
from fast_axolotl.cli import app
from fast_axolotl.cli.bench import CONTENDERS, first_fit
from fast_axolotl.cli.race import (
    Contender,
    Timing,
    columns,
    digest,
    run_race,
)
from fast_axolotl.errors import DataError, UsageError
from support.files import write_csv, write_jsonl

pytestmark = pytest.mark.filterwarnings("default")

BENCH: Any = sys.modules["fast_axolotl.cli.bench"]
"""The module: its package has the command of the same name."""

ROWS = [
    {
        "id": index,
        "text": f"row {index % 40} naïve\n“{index % 3}”",
        "input_ids": list(range(index % 17 + 1)),
    }
    for index in range(60)
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    folder = tmp_path_factory.mktemp("files")
    flat = [{"id": row["id"], "text": row["text"]} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=20)
    (folder / "empty.jsonl").write_text("")
    return {
        "parquet": str(folder / "rows.parquet"),
        "jsonl": str(write_jsonl(folder / "rows.jsonl", ROWS)),
        "csv": str(write_csv(folder / "rows.csv", flat)),
        "empty": str(folder / "empty.jsonl"),
        "missing": str(folder / "missing.jsonl"),
    }


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass a repeat."""
    monkeypatch.setattr("fast_axolotl.cli.race.LEAST_SECONDS", 0.0)


def invoke(*arguments: str) -> None:
    app(["bench", *arguments], standalone_mode=False)


COMMANDS = {
    "reader": ("reader", "jsonl"),
    "hash": ("hash", "jsonl", "--column", "text", "--rows", "50"),
    "dedupe": ("dedupe", "csv", "--column", "text"),
    "pack": ("pack", "parquet", "--sequence-len", "32"),
    "pad": ("pad", "parquet"),
}


@pytest.mark.parametrize("operation", COMMANDS)
def test_the_answer_comes_first_and_every_library_gives_the_same(
    operation: str, files: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    command, file, *options = COMMANDS[operation]
    invoke(command, files[file], *options)
    first, *rest = (shown := capsys.readouterr().out).splitlines()
    assert first.startswith(
        ("fast-axolotl ", "fast-axolotl is slower than ", "No clear difference from ")
    )
    text = "\n".join(rest)
    count = 50 if operation == "hash" else 60
    assert f"{count} rows, of the first " in text
    assert "another answer" not in text
    # What is printed can be shared.
    assert [word for word in ("text", str(Path(files[file]).parent)) if word in shown] == []
    assert f"cores, Python {sys.version.split()[0]}, fast-axolotl {__version__}" in text
    column = {"hash": ["text"], "dedupe": ["text"], "reader": None}.get(operation, ["input_ids"])
    request = BENCH._look(operation, [files[file]], column, 60)
    for contender in CONTENDERS[operation](request | {"sequence_len": 32}):
        assert contender.name in text


def test_what_cannot_be_raced_is_named_with_its_cure(files: Mapping[str, str]) -> None:
    for words, error, message in (
        ("hash jsonl --column nope", UsageError, "no column 'nope'; the data has: id, text"),
        ("hash jsonl --column id", UsageError, "has the type int64, but bench hash needs text"),
        ("pack jsonl --column text", UsageError, "needs lists of token ids"),
        ("pad csv", UsageError, "no column 'input_ids'"),
        ("hash jsonl", UsageError, "needs --column"),
        ("reader empty", DataError, "empty.jsonl: no rows to measure"),
        ("reader missing", DataError, "missing.jsonl: no such file"),
    ):
        operation, file, *options = words.split()
        with pytest.raises(error, match=message):
            invoke(operation, files[file], *options)


def contender(name: str, *changes: Any, values: Any = (1, 3)) -> Contender:
    def run() -> Any:
        if values is None:
            raise NotImplementedError("it cannot do that")
        return values

    return Contender(name, "list", run, list, *changes)


def test_who_gives_another_answer_is_not_timed() -> None:
    contenders = (
        contender("ours"),
        contender("equal", "ours"),
        contender("wrong", "ours", values=(1, 2)),
        contender("failing", "ours", values=None),
        contender("absent", "ours", "no_such_package"),
    )
    timings, left_out = run_race(contenders, repeats=3, progress=lambda _: None)
    _, equal = timings
    assert len(equal.seconds) == 3
    assert equal.ratio is not None
    assert left_out == {
        "wrong": "it gives another answer",
        "failing": "it cannot do that",
        "absent": "no_such_package is not installed",
    }
    with pytest.raises(DataError, match="ours failed: it cannot do that"):
        run_race([contender("ours", values=None)], repeats=1, progress=print)


def test_sentences_say_plainly_who_is_faster() -> None:
    def sentences(**ratios: tuple[float, float, float] | None) -> list[str]:
        timings = [
            Timing(contender=contender(name), seconds=(1.0,), ratio=ratio)
            for name, ratio in ratios.items()
        ]
        found: list[str] = BENCH._sentences("reads it", timings)
        return found

    found = sentences(
        slow=(0.8, 0.7, 0.9), HF=(2.1, 1.9, 2.3), near=(1.02, 0.95, 1.1), other=(200, 150.2, 1250)
    )
    assert found == [
        "fast-axolotl reads it 2.1× as fast as HF (1.9–2.3×).",
        "fast-axolotl is slower than slow: 0.80× as fast (0.70–0.90×).",
        "No clear difference from near: 1.0× (0.95–1.1×).",
    ]
    assert sentences(wrong=None) == [
        "No other library gave the same result here, so there is nothing to compare with."
    ]


def test_a_digest_depends_on_the_values_alone_and_not_on_what_holds_them() -> None:
    rows = [{"a": index, "b": [str(index), None]} for index in range(2500)]
    table = pa.Table.from_pylist(rows)
    expected = digest(columns(rows, "rows"))
    for size in (1, 700, 2500):
        batches = table.to_batches(max_chunksize=size)
        assert digest(columns(batches, "arrow")) == expected
        assert digest(columns([batch.to_pydict() for batch in batches], "python")) == expected
    for others in (rows[:-1], [{"b": 1}], [{**row, "a": 0} for row in rows]):
        assert digest(columns(others, "rows")) != expected
    lists = [[1, 2, 3], [4, 5, 6]]
    assert digest(lists) == digest(np.array(lists, np.int16)) == digest(map(tuple, lists))
    assert digest([1, 2]) == digest(np.array([1, 2])) == digest(iter((1, 2)))
    others = ([[1, 2], [3, 4, 5, 6]], [[1, 2, 3], [4, 5, 7]], [1, 2, 3, 4, 5, 6], ["1"])
    assert len({digest(values) for values in (lists, *others)}) == 5


def test_first_fit_takes_the_first_pack_with_room() -> None:
    assert first_fit([3, 3, 1, 1], 4, 2) == [[0, 2], [1, 3]]
