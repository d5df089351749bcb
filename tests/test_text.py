"""Plain text: a row per line, whatever the line ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_axolotl import open_dataset

PIECES = st.lists(st.sampled_from(["a", "é", "\n", "\r\n", "\r", " ", "xyz", "\x00"]), min_size=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text")


def lines_of(text: str) -> list[str]:
    """The oracle: ``\\n`` ends a line, and one ``\\r`` before it belongs to that end."""
    lines = text.split("\n")
    last = lines.pop()
    return [line.removesuffix("\r") for line in lines] + ([last] if last else [])


@settings(max_examples=300, deadline=None)
@given(pieces=PIECES)
def test_lines_equal_those_of_plain_python(folder: Path, pieces: list[str]) -> None:
    path = folder / "rows.txt"
    path.write_bytes("".join(pieces).encode())
    rows = [row for batch in open_dataset(path) for row in batch.column("text").to_pylist()]
    assert rows == lines_of("".join(pieces))


def test_lines_across_many_byte_ranges_equal_those_of_plain_python(folder: Path) -> None:
    text = "".join(f"{'x' * (index % 997)}{index}\r\n" for index in range(4000))
    path = folder / "long.txt"
    path.write_bytes(text.encode())
    reader = open_dataset(path, memory_budget=16 * 2**20)
    rows = [row for batch in reader for row in batch.column("text").to_pylist()]
    assert rows == lines_of(text)
