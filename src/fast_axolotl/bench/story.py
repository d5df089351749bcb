"""What ``fast-axolotl demo`` compares: generated rows, and two ways to read them.

Or, on request, the real Axolotl as it is and accelerated, on a generated chat set.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

from fast_axolotl.bench.story_arm import BATCH_ROWS, Model, plain_batches
from fast_axolotl.protocol import plan_axolotl, plan_commands
from fast_axolotl.protocol.plan import Plan

__all__ = ["plan_axolotl_story", "plan_story", "write_rows"]

_BATCHES = 230
_PAIRS = 3
_LEAST_STEPS, _LEAST_SECONDS = 220, 3.5
"""More than the 200 fetches and 2 s that a verdict needs, warm-up apart."""
_TRIAL_STEPS = 20
_AXOLOTL_ROWS = 10_000
_AXOLOTL_STEPS = 260
_AXOLOTL_LENGTH = 512
"""Of a sequence: a step takes about a tenth of a second of one core."""
_TEXT = "the model reads what it is given and waits for what it is not while rows come"


def write_rows(path: Path, batches: int = _BATCHES) -> int:
    """Writes texts of various lengths as JSON lines; returns how many. Always the same ones."""
    chosen = random.Random(0)
    words = [chosen.choice(_TEXT.split()) for _ in range(4000)]
    rows = batches * BATCH_ROWS
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            start, length = chosen.randrange(3000), chosen.randrange(120, 300)
            prompt = f"{number} {' '.join(words[start : start + length // 4])}"
            answer = " ".join(words[start + length // 4 : start + length])
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
    return rows


def plan_story(data: Path, pairs: int = _PAIRS) -> Plan:
    """A reader in plain Python against ours, in front of the same model."""
    program = [sys.executable, "-m", "fast_axolotl.bench.story_arm"]
    steps = str(_count_steps(data))
    plain, fast = (shlex.join([*program, arm, str(data), steps]) for arm in ("plain", "fast"))
    plan = plan_commands(plain, fast, pairs=pairs, warmup=1, data_path=str(data))
    texts = ("rows read by json and lists, in Python", "rows read by fast-axolotl")
    arms = tuple(replace(arm, text=text) for arm, text in zip(plan.arms, texts, strict=True))
    return replace(plan, title="the demo: one model, two readers", arms=arms)


def _count_steps(data: Path) -> int:
    """As many as a verdict needs on this machine, whatever is fed: the model alone is timed."""
    model, seconds = Model(), []
    for batch in itertools.islice(plain_batches(data), _TRIAL_STEPS):
        begun = time.perf_counter()
        model.step(batch["input_ids"])
        seconds.append(time.perf_counter() - begun)
    return max(_LEAST_STEPS, math.ceil(_LEAST_SECONDS / min(seconds)))


def plan_axolotl_story(folder: Path) -> Plan:
    """The real Axolotl on a generated chat set: all five steps."""
    from fast_axolotl.bench.axolotl_inputs import (
        preprocess_config,
        train_config,
        write_config,
        write_model,
    )
    from fast_axolotl.bench.axolotl_inputs import write_rows as write_chat_rows

    model = folder / "model"
    write_model(model)
    data = write_chat_rows("chat", folder / "chat.jsonl", _AXOLOTL_ROWS)
    prepare = preprocess_config("chat", model, data, folder / "prepared")
    config = {
        **train_config(prepare, folder / "output"),
        "sequence_len": _AXOLOTL_LENGTH,
        "max_steps": _AXOLOTL_STEPS,
        "save_steps": _AXOLOTL_STEPS,
        "num_epochs": 100,
        "logging_steps": 10,
    }
    path = write_config(config, folder / "config.yml")
    pins = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 2}
    plan = plan_axolotl(path, steps=(1, 2, 3, 4, 5), pairs=_PAIRS, pins=pins)
    return replace(plan, title="the demo: Axolotl as it is, accelerated, and streamed")
