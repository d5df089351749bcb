"""A small file is read at once: what its format does not need is not imported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.children import python_output
from support.files import flat_rows, write_as

ELSEWHERE = (
    *("fsspec", "concurrent.futures", "importlib.metadata", "asyncio", "numba"),
    *("csv", "pyarrow.csv", "pyarrow.dataset"),
)
"""What only remote files, CSV, many files or other parts of the package use."""


@pytest.mark.parametrize(
    ("kind", "unused"),
    [
        ("parquet, one row group", ("pyarrow.json", "pyarrow.compute")),
        ("arrow file", ("pyarrow.json", "pyarrow.compute")),
        ("jsonl", ("pyarrow.parquet", "pyarrow.fs")),
    ],
)
def test_a_format_imports_only_what_it_needs(
    tmp_path: Path, kind: str, unused: tuple[str, ...]
) -> None:
    path = write_as(tmp_path, kind, flat_rows(9))
    program = (
        "import sys, json; from fast_axolotl import open_dataset\n"
        f"assert next(iter(open_dataset({str(path)!r}))).num_rows == 9\n"
        f"print(json.dumps([name for name in {(*ELSEWHERE, *unused)!r} if name in sys.modules]))"
    )

    assert json.loads(python_output("-c", program)) == []
