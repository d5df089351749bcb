"""``fast-axolotl demo``: measure, compare and report on generated data, in about a minute.

A protocol of two arms. A small model in numpy learns the first byte of texts, a step a batch. The
arms make the same arrays of the same rows: bytes as tokens, prompts masked, rows padded; one as
people write it, in plain Python, the other with this package. Losses go into the record, and have
to be equal.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from fast_axolotl.cli.options import AsJson, ShowAll, say

if TYPE_CHECKING:
    from fast_axolotl.protocol.plan import Plan

Batch = dict[str, Any]

BATCH_ROWS = 64
WIDTH = 1024
"""Bytes of a row that the model sees."""

_BATCHES = 230
_PAIRS = 6
"""At most: three are clear on a quiet machine."""
_LEAST_STEPS, _LEAST_SECONDS = 220, 3.5
"""More than the 200 fetches and 2 s that a verdict needs, warm-up apart."""
_TRIAL_STEPS = 20
_NOTE = (
    "The candidate uses more memory and takes longer to its first step, because it loads pyarrow "
    "and prepares some batches ahead. Neither grows with the size of the data."
)
_TEXT = "the model reads what it is given and waits for what it is not while rows come"
_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""Of numpy's libraries for matrices, by platform."""
_PROGRAM = "from fast_axolotl.cli.demo import train; train()"

_BYTES = 256
_HIDDEN = 768
_LAYERS = 8
"""Of the model: a step takes some ten milliseconds of one core."""
_LOG_EVERY = 20
_AHEAD = 4
"""Batches that the candidate prepares beside the model."""


def demo(
    output: Annotated[Path, Option("--output", "-o", help="The HTML report to write.")] = Path(
        "demo-report.html"
    ),
    is_all: ShowAll = False,
    as_json: AsJson = False,
) -> None:
    """See on generated data what this package measures and changes, in about a minute.

    A small model in numpy is fed by a reader in plain Python and by this package's reader, in
    alternating order. The result is printed as a table and written as an HTML report. It needs no
    download, no torch and no GPU.
    """
    from fast_axolotl.cli.prove import print_protocol, run_plan
    from fast_axolotl.cli.report import check_targets, make_documents
    from fast_axolotl.record.codec import to_json, write_text
    from fast_axolotl.record.protocol_result import PROTOCOL_FILE
    from fast_axolotl.report.page import render_page

    check_targets(output=output)
    # Threads of a library that wait for each other make steps erratic on cores that others use.
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    folder = Path(tempfile.mkdtemp(prefix="fast-axolotl-demo-"))
    try:
        data = folder / "rows.jsonl"
        rows = write_rows(data)
        say(
            f"{rows:,} rows generated. The baseline reads them in plain Python, the candidate with "
            "fast-axolotl; both train the same small model. The runs take about a minute, and more "
            "where other programs are busy"
        )
        result = run_plan(plan_demo(data), folder / "protocol")
        result = replace(result, notes=(*result.notes, _NOTE))
        print_protocol(result, is_all=is_all, as_json=as_json)
        if missing := [name for name in ("plotly", "jinja2") if find_spec(name) is None]:
            say(f"there is no HTML report, which needs pip install {' '.join(missing)}")
        else:
            write_text(folder / "protocol" / PROTOCOL_FILE, to_json(result))
            write_text(output, render_page(make_documents([folder / "protocol"])[0]))
            say(f"the report is {output}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_rows(path: Path, batches: int = _BATCHES) -> int:
    """Writes texts of various lengths as JSON lines, the same every time; returns how many."""
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


def plan_demo(data: Path, pairs: int = _PAIRS) -> Plan:
    """A reader in plain Python against ours, in front of the same model.

    The model alone is timed first: each run gets as many steps as a verdict needs on this machine,
    whoever feeds it.
    """
    from fast_axolotl.protocol.plan import plan_commands

    model, seconds = Model(), []
    for batch in itertools.islice(plain_batches(data), _TRIAL_STEPS):
        begun = time.perf_counter()
        model.step(batch["input_ids"])
        seconds.append(time.perf_counter() - begun)
    steps = str(max(_LEAST_STEPS, math.ceil(_LEAST_SECONDS / min(seconds))))
    program = [sys.executable, "-c", _PROGRAM]
    plain, fast = (shlex.join([*program, arm, str(data), steps]) for arm in ("plain", "fast"))
    plan = plan_commands(plain, fast, pairs=pairs, warmup=1, data_path=str(data))
    texts = ("rows read in plain Python, with json and lists", "rows read by fast-axolotl")
    arms = tuple(replace(arm, text=text) for arm, text in zip(plan.arms, texts, strict=True))
    return replace(plan, title="the demo: one model, two readers", arms=arms)


def train() -> None:
    """One run: so many steps, over the file as often as that takes."""
    from fast_axolotl.measure import measure

    arm, path, steps = sys.argv[1:]
    read = {"plain": plain_batches, "fast": read_ahead}[arm]
    epochs = (batch for _ in itertools.count() for batch in read(Path(path)))
    model = Model()
    with measure(os.environ["FAST_AXOLOTL_MEASURE"]) as meter:
        for step, batch in enumerate(meter.watch(itertools.islice(epochs, int(steps)))):
            loss = model.step(batch["input_ids"])
            if step % _LOG_EVERY == 0:
                meter.log(step, {"loss": loss})


def plain_batches(path: Path) -> Iterator[Batch]:
    """A row is a dict, a token is an int, a batch is three lists of lists."""
    import numpy as np

    ids: list[list[int]] = []
    labels: list[list[int]] = []
    masks: list[list[int]] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            prompt, answer = list(row["prompt"].encode()), list(row["answer"].encode())
            tokens = (prompt + answer)[:WIDTH]
            targets = ([-100] * len(prompt) + answer)[:WIDTH]
            padding = WIDTH - len(tokens)
            ids.append(tokens + [0] * padding)
            labels.append(targets + [-100] * padding)
            masks.append([1] * len(tokens) + [0] * padding)
            if len(ids) == BATCH_ROWS:
                names = ("input_ids", "labels", "attention_mask")
                yield dict(zip(names, map(np.array, (ids, labels, masks)), strict=True))
                ids, labels, masks = [], [], []


def fast_batches(path: Path) -> Iterator[Batch]:
    """The same arrays, filled from the bytes of each text."""
    import numpy as np

    from fast_axolotl import open_dataset

    for batch in open_dataset(path, columns=["prompt", "answer"], batch_size=BATCH_ROWS):
        shape = len(batch), WIDTH
        ids, labels, masks = (np.full(shape, fill, np.int64) for fill in (0, -100, 0))
        rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        for row, (prompt, answer) in enumerate(rows):
            tokens = np.frombuffer((prompt + answer).encode(), np.uint8)[:WIDTH]
            begin, end = len(prompt.encode()), len(tokens)
            ids[row, :end] = tokens
            labels[row, begin:end] = tokens[begin:]
            masks[row, :end] = 1
        yield {"input_ids": ids, "labels": labels, "attention_mask": masks}


def read_ahead(path: Path) -> Iterator[Batch]:
    """What takes no lock of the interpreter can run beside the model."""
    batches = fast_batches(path)
    with ThreadPoolExecutor(1) as pool:
        ready = [pool.submit(next, batches, None) for _ in range(_AHEAD)]
        while (batch := ready.pop(0).result()) is not None:
            ready.append(pool.submit(next, batches, None))
            yield batch


class Model:
    """How often each byte occurs, some layers over that, and gradient descent on the last."""

    def __init__(self) -> None:
        import numpy as np

        numbers = np.random.default_rng(0)
        sizes = [_BYTES, *[_HIDDEN] * _LAYERS, 1]
        self.layers = [
            (numbers.normal(size=pair) / pair[0] ** 0.5).astype(np.float32)
            for pair in itertools.pairwise(sizes)
        ]

    def step(self, ids: Any) -> float:
        """Predicts the first byte of every row."""
        import numpy as np

        rows = np.arange(len(ids))
        places = (ids + rows[:, None] * _BYTES).ravel()
        counts = np.bincount(places, minlength=len(ids) * _BYTES).reshape(len(ids), _BYTES)
        hidden = (counts / ids.shape[1]).astype(np.float32)
        for layer in self.layers[:-1]:
            hidden = np.tanh(hidden @ layer)
        error = hidden @ self.layers[-1] - ids[:, :1] / _BYTES
        self.layers[-1] -= 0.01 * hidden.T @ error / len(ids)
        return float((error**2).mean())
