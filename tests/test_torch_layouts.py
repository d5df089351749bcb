"""Two real ranks see every row in every layout, or both are told what to do instead."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.children import clean_environment
from support.files import write_parquet

pytest.importorskip("torch")

from support import torch_layouts

ALL = list(range(403))
"""An odd number, so that no division is even."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw in each layout."""
    folder = tmp_path_factory.mktemp("layouts")
    rows: list[dict[str, Any]] = [{"id": number, "score": number / 8} for number in ALL]
    write_parquet(folder / "flat.parquet", rows, row_group_size=40)
    for half in range(2):
        own = rows[200 * half : 200 + 203 * half]
        write_parquet(folder / f"mix-{half}.parquet", own, row_group_size=10)
    rows = [{**row, "tokens": ALL[: row["id"] % 5]} for row in rows]
    write_parquet(folder / "ragged.parquet", rows, row_group_size=40)
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    job |= {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "layouts"}
    children = [
        subprocess.Popen(
            [sys.executable, torch_layouts.__file__],
            cwd=folder,
            env=clean_environment(Path(__file__).parent, RANK=rank, LOCAL_RANK=rank, **job),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    said = [child.communicate(timeout=300)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], "\n".join(said)[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in "01"]


@pytest.mark.parametrize("layout", torch_layouts.LAYOUTS)
def test_two_ranks_see_every_row_or_are_refused(seen: list[dict[str, Any]], layout: str) -> None:
    of_ranks = [rank[layout] for rank in seen]
    expected = torch_layouts.LAYOUTS[layout][0]
    if of_ranks[0] is None:
        pytest.skip("a package is missing")
    if expected == "same":
        assert of_ranks == [ALL, ALL]
    elif isinstance(expected, str):
        assert all(isinstance(said, str) and re.search(expected, said) for said in of_ranks)
    else:
        assert all(isinstance(ids, list) for ids in of_ranks), of_ranks
        has_epochs = isinstance(of_ranks[0][0], list)
        for first, second in zip(*of_ranks, strict=True) if has_epochs else [of_ranks]:
            counts = Counter([*first, *second])
            assert set(counts) <= set(ALL)
            assert len(counts) - len(ALL) >= min(0, expected)
            assert sum(counts.values()) - len(ALL) <= max(0, expected)
