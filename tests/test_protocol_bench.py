"""``bench protocol``: the loop it compares with itself, and how its result is told."""

from __future__ import annotations

import json
from pathlib import Path

from fast_axolotl.bench.protocol_bench import (
    ProtocolBenchResult,
    protocol_bench_tables,
    run_protocol_bench,
)


def test_a_loop_is_run_against_itself_and_against_a_slower_one(tmp_path: Path) -> None:
    told: list[str] = []
    found = run_protocol_bench(
        same=1, different=1, pairs=2, steps=60, slower=2.0, work_dir=tmp_path, progress=told.append
    )
    assert [one["kind"] for one in found.trials] == ["A/A", "A/B"]
    # Three times as slow: seen in each single pair, whatever else the machine does.
    slow = found.trials[1]
    pairs = zip(slow["baseline"], slow["candidate"], strict=True)
    assert all(after < before for before, after in pairs)
    assert told[0].startswith("1 of 2: A/A: ")
    [table] = protocol_bench_tables(found)
    assert len(table.rows) == 2
    assert "of 1 report a change" in table.notes[0]
    found.save(tmp_path / "result.json")
    data = json.loads((tmp_path / "result.json").read_text())
    assert ProtocolBenchResult(**data).found == found.found
