"""The demo: two readers that give one model the same arrays."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import numpy as np
import pytest

from fast_axolotl.cli.demo import (
    BATCH_ROWS,
    WIDTH,
    demo,
    plain_batches,
    plan_demo,
    read_ahead,
    write_rows,
)
from fast_axolotl.errors import MissingFileError
from fast_axolotl.record.protocol_result import ProtocolResult
from support.golden import GOLDEN

pytestmark = pytest.mark.kernels


def test_the_arms_give_the_same_arrays_and_errors_reach_the_model(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert write_rows(path, batches=3) == 3 * BATCH_ROWS
    plain, fast = list(plain_batches(path)), list(read_ahead(path))
    assert len(plain) == len(fast) == 3
    for one, other in zip(plain, fast, strict=True):
        assert list(one) == list(other)
        for name, array in one.items():
            assert array.shape == (BATCH_ROWS, WIDTH)
            assert array.dtype == other[name].dtype
            np.testing.assert_array_equal(array, other[name])
    with pytest.raises(MissingFileError):
        list(read_ahead(tmp_path / "nothing.jsonl"))


def test_the_plan_has_both_readers_in_front_of_one_model(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_rows(path, batches=2)
    plan = plan_demo(path, pairs=2)
    assert [arm.name for arm in plan.arms] == ["baseline", "candidate"]
    assert [arm.command[-3] for arm in plan.arms] == ["plain", "fast"]
    assert int(plan.arms[0].command[-1]) == int(plan.arms[1].command[-1]) >= 220
    assert plan.pairs == 2


def test_a_demo_without_plotly_says_so_and_prints_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module("fast_axolotl.cli.demo")
    monkeypatch.setattr("os.environ", {**os.environ})
    result = ProtocolResult.read(GOLDEN / "protocols" / "commands")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "write_rows", lambda path: 1)
    monkeypatch.setattr(module, "plan_demo", lambda path: None)
    protocol = importlib.import_module("fast_axolotl.cli.prove")
    monkeypatch.setattr(protocol, "run_plan", lambda plan, folder: result)
    demo(tmp_path / "page.html")
    out, err = capsys.readouterr()
    assert "pip install plotly jinja2" in err
    assert result.title in out
    assert "loads pyarrow" in out
    assert not (tmp_path / "page.html").exists()
