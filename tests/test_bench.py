"""``fast-axolotl bench``: races on the user's own files, against what is installed here."""

from __future__ import annotations

import importlib.util
import json
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
from fast_axolotl.cli.bench import CONTENDERS
from fast_axolotl.cli.race import Contender, columns, digest, run_race
from fast_axolotl.errors import DataError
from fast_axolotl.report.document import Document
from support.files import write_csv, write_jsonl
from support.golden import check_calls

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
    }


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass a repeat, and of the peers none that takes seconds to import."""
    monkeypatch.setattr("timeit.Timer.autorange", lambda _: (1, 0.0))
    slow = ("axolotl", "datasets", "torch")
    find = importlib.util.find_spec
    spec = "fast_axolotl.cli.race.find_spec"
    monkeypatch.setattr(spec, lambda name: None if name in slow else find(name))


def invoke(*arguments: str) -> None:
    app(["bench", *arguments], standalone_mode=False)


COMMANDS = {
    "reader": ("reader", "jsonl"),
    "dedupe": ("dedupe", "csv", "--column", "text", "--rows", "50"),
}


@pytest.mark.parametrize("operation", COMMANDS)
def test_the_answer_comes_first_and_every_library_gives_the_same(
    operation: str, files: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    command, file, *options = COMMANDS[operation]
    invoke(command, files[file], *options)
    first, *rest = (shown := capsys.readouterr().out).splitlines()
    assert first.startswith("fast-axolotl is ")
    text = "\n".join(rest)
    count = 50 if operation == "dedupe" else 60
    assert f" rows {count} format " in " ".join(text.split())
    assert "another answer" not in text
    # What is printed can be shared.
    assert [word for word in ("text", str(Path(files[file]).parent)) if word in shown] == []
    assert f"fast-axolotl: {__version__}" in text
    request = BENCH._look([files[file]], ["text"] if operation == "dedupe" else None, 60)
    for contender in CONTENDERS[operation](request):
        assert contender.name in shown
    invoke(command, files[file], *options, "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == count
    assert len(found["libraries"]) >= 2


def test_what_cannot_be_raced_is_named_with_its_cure(
    files: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(files["jsonl"]).parent)
    check_calls("bench", bench=invoke)


def contender(name: str, *changes: Any, values: Any = (1, 3)) -> Contender:
    def run() -> Any:
        if values is None:
            raise NotImplementedError("it cannot do that")
        return values

    return Contender(name, "list", run, *changes)


def test_who_gives_another_answer_is_not_timed() -> None:
    contenders = (
        contender("ours"),
        contender("equal", "ours"),
        contender("wrong", "ours", values=(1, 2)),
        contender("failing", "ours", values=None),
        contender("absent", "ours", "no_such_package"),
    )
    (ours, equal), left_out = run_race(contenders, repeats=3, progress=lambda _: None)
    assert (ours["ours_over_theirs"], len(equal["seconds"])) == (None, 3)
    ratios = [b / a for a, b in zip(ours["seconds"], equal["seconds"], strict=True)]
    assert equal["ours_over_theirs"] == [sorted(ratios)[1], min(ratios), max(ratios)]
    assert left_out == {
        "wrong": "it gives another answer",
        "failing": "it cannot do that",
        "absent": "no_such_package is not installed",
    }
    with pytest.raises(DataError, match="ours failed: it cannot do that"):
        run_race([contender("ours", values=None)], repeats=1, progress=print)


def test_sentences_say_plainly_who_is_faster() -> None:
    def answer(**ratios: tuple[float, float, float] | None) -> list[str]:
        libraries = [
            {"name": name, "returns": "rows", "seconds": [1.0], "ours_over_theirs": ratio}
            for name, ratio in ratios.items()
        ]
        found = {"rows": 1, "files": 1, "format": "csv", "num_bytes": 1}
        shown: Document = BENCH.bench_document(
            found | {"libraries": libraries, "not_measured": ["x"]}
        )
        return shown.title.splitlines()

    assert answer(slow=(0.8, 0.7, 0.9), HF=(21, 19, 1250), near=(1.02, 0.95, 1.1)) == [
        "fast-axolotl is slower than slow: 0.8× (0.7–0.9×).",
        "fast-axolotl is faster than HF: 21× (19–1,250×).",
        "fast-axolotl is about as fast as near: 1.02× (0.95–1.1×).",
    ]
    (nothing,) = answer(wrong=None)
    assert nothing.startswith("No other library gave the same result here")


def test_a_digest_depends_on_the_values_alone_and_not_on_what_holds_them() -> None:
    rows = [{"a": index, "b": [str(index), None]} for index in range(50)]
    table = pa.Table.from_pylist(rows)
    expected = digest(columns(rows, "rows"))
    for size in (1, 7, 50):
        batches = table.to_batches(max_chunksize=size)
        assert digest(columns(batches, "arrow")) == expected
        assert digest(columns([batch.to_pydict() for batch in batches], "python")) == expected
    assert digest(columns(rows[:-1], "rows")) != expected
    lists = [[1, 2, 3], [4, 5, 6]]
    assert digest(lists) == digest(np.array(lists, np.int16)) == digest(map(tuple, lists))
    others = ([[1, 2], [3, 4, 5, 6]], [[1, 2, 3], [4, 5, 7]], [1, 2, 3, 4, 5, 6], ["1"])
    assert len({digest(values) for values in (lists, *others)}) == 5
