"""One arm of ``fast-axolotl demo``: ``python -m fast_axolotl.cli.demo_arm ARM FILE STEPS``.

A small model in numpy learns the first byte of texts, a step a batch. The arms make the same arrays
of the same rows: bytes as tokens, prompts masked, rows padded; one as people write it, in plain
Python, the other with this package. Losses go into the record, and have to be equal.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fast_axolotl.measure import measure

Batch = dict[str, Any]

BATCH_ROWS = 64
WIDTH = 1024
"""Bytes of a row that the model sees."""

_BYTES = 256
_HIDDEN = 768
_LAYERS = 8
"""Of the model: a step takes some ten milliseconds of one core."""
_LOG_EVERY = 20
_READY = 4


def main() -> None:
    """Trains so many steps, over the file as often as that takes."""
    arm, path, steps = sys.argv[1:]
    read = {"plain": plain_batches, "fast": read_ahead}[arm]
    epochs = (batch for _ in itertools.count() for batch in read(Path(path)))
    batches = itertools.islice(epochs, int(steps))
    folder = os.environ["FAST_AXOLOTL_MEASURE"]
    model = Model()
    with measure(folder) as meter:
        for step, batch in enumerate(meter.watch(batches)):
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
    """The same arrays, from Arrow's buffers."""
    import numpy as np
    import pyarrow as pa

    from fast_axolotl import open_dataset

    columns = np.arange(WIDTH)
    for batch in open_dataset(path, columns=["prompt", "answer"], batch_size=BATCH_ROWS):
        texts = [batch.column(name).cast(pa.large_binary()) for name in ("prompt", "answer")]
        data = [np.frombuffer(text.buffers()[2], np.uint8) for text in texts]
        ends = [
            np.frombuffer(text.buffers()[1], np.int64)[text.offset :][: len(text) + 1, None]
            for text in texts
        ]
        prompts, answers = (np.diff(one, axis=0) for one in ends)
        is_prompt, is_row = columns < prompts, columns < prompts + answers
        # An answer begins where its prompt ends, in the bytes of the other column.
        shift = np.where(is_prompt, ends[0][:-1], len(data[0]) + ends[1][:-1] - prompts)
        places = np.where(is_row, shift + columns, 0)
        ids = np.where(is_row, np.concatenate(data)[places], 0).astype(np.int64)
        labels = np.where(is_row & ~is_prompt, ids, -100)
        yield {"input_ids": ids, "labels": labels, "attention_mask": is_row.astype(np.int64)}


def read_ahead(path: Path) -> Iterator[Batch]:
    """What takes no lock of the interpreter can run beside the model."""
    ready: queue.Queue[Batch | Exception | None] = queue.Queue(_READY)

    def read() -> None:
        try:
            for batch in fast_batches(path):
                ready.put(batch)
        except Exception as error:  # noqa: BLE001 - raised where the batches are taken
            ready.put(error)
        else:
            ready.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (found := ready.get()) is not None:
        if isinstance(found, Exception):
            raise found
        yield found


class Model:
    """How often each byte occurs, some layers over that, and gradient descent on the last."""

    def __init__(self) -> None:
        import numpy as np

        numbers = np.random.default_rng(0)
        sizes = [_BYTES, *[_HIDDEN] * _LAYERS, _BYTES]
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
        scores = hidden @ self.layers[-1]
        scores -= scores.max(axis=1, keepdims=True)
        chances = np.exp(scores)
        chances /= chances.sum(axis=1, keepdims=True)
        loss = -np.log(chances[rows, ids[:, 0]]).mean()
        chances[rows, ids[:, 0]] -= 1
        self.layers[-1] -= 0.1 * hidden.T @ chances / len(ids)
        return float(loss)


if __name__ == "__main__":
    main()
