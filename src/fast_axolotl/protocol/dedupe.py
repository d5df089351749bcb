"""Step 5: dedupe on its own, on the user's own rows, in a child that imports Axolotl."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fast_axolotl.protocol.child import Launch, read_tail
from fast_axolotl.protocol.state import write_json
from fast_axolotl.protocol.statistics import paired_ratio

__all__ = ["describe_dedupe", "run_dedupe"]

_WORKER = "fast_axolotl.axolotl.data"


def run_dedupe(
    config: Mapping[str, Any],
    folder: Path,
    *,
    environment: Mapping[str, str],
    launch: Launch,
    tick: Callable[[], None],
) -> dict[str, Any]:
    """Figures, and one sentence; or why there are none."""
    folder.mkdir(parents=True, exist_ok=True)
    trial, result, log = (folder / name for name in ("trial.json", "result.json", "log.txt"))
    result.unlink(missing_ok=True)
    write_json(trial, config)
    # Axolotl's function has to be its own here; ours is called by name.
    variables = {**environment, "FAST_AXOLOTL": "0", "AXOLOTL_DO_NOT_TRACK": "1"}
    variables["HF_DATASETS_CACHE"] = str((folder / "cache").absolute())
    command = (sys.executable, "-m", _WORKER, str(trial), str(result))
    code = launch(command, variables, log, tick)
    try:
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {"reason": f"it ended with exit code {code}", "log_tail": read_tail(log)}
    return {**found, **_speed_up(found), "sentence": describe_dedupe(found)}


def describe_dedupe(found: Mapping[str, Any]) -> str:
    """One sentence about the trial."""
    reason = found.get("reason")
    if reason:
        return f"Dedupe on its own was not measured: {reason}."
    gain = _speed_up(found)
    rows, kept = found["rows"], found["kept"]
    cut = ", the first ones" if found.get("is_cut") else ""
    speed = f"{gain['speed_up']:,.1f}× the speed" if gain.get("speed_up") else "not compared"
    if gain.get("speed_up_low"):
        speed += f" ({gain['speed_up_low']:,.1f} to {gain['speed_up_high']:,.1f})"
    return f"Dedupe on its own, {rows:,} rows{cut}, {kept:,} kept by both alike: {speed}."


def _speed_up(found: Mapping[str, Any]) -> dict[str, float | None]:
    stock, ours = found.get("stock_seconds", ()), found.get("our_seconds", ())
    count = min(len(stock), len(ours))
    estimate = paired_ratio(ours[:count], stock[:count])
    return {
        "speed_up": estimate.value,
        "speed_up_low": estimate.low,
        "speed_up_high": estimate.high,
    }
