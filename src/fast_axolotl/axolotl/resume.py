"""A streamed training that goes on where its checkpoint was written, without reading what came before.

Stock replays: it reads, tokenises and packs everything from the first row and drops the batches. It
also forgets epochs: a checkpoint of the second one finds nothing left. Here every batch carries the
state of the dataset after its last row, from the worker that made it, through all that is fetched
ahead; ``Watch`` takes it off and knows which batches were handed to the trainer. At a checkpoint
``StreamCheckpoint`` writes these states beside the model, one file a rank. At a resume
``init_training_state`` tells the trainer the epoch and that no batch is to be skipped, and the
dataset begins at its states.

Random numbers: what is fetched in the training process draws from the generator that the model
uses. So the state holds that generator as it was before the epoch's loader was made, and before the
batch that was fetched ahead at the checkpoint; the rest comes from the trainer's own file.

Cost: a state a batch, some milliseconds with a full shuffle buffer; at a resume one buffer of rows.
Does not hold the order in which workers take turns once one of them has run out of files: torch
itself does not fix it. What a checkpoint has no state for, stock replays, and the log says why.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from fast_axolotl.axolotl.patching import NotAsked, Unfamiliar
from fast_axolotl.axolotl.streaming import (
    PASSED,
    Begin,
    BoundedDataset,
    random_state,
    set_random_state,
    worker_id,
)

__all__ = ["STATE_FILE", "StreamCheckpoint", "Watch", "bounded_dataset", "init_training_state"]

STATE_FILE = "fast_axolotl_reader_rank{}.json"
"""In the folder of a checkpoint; one for each rank."""

_VERSION = 1
_KEY = "fast_axolotl_state"
"""Under which a batch carries the state from where it was made to where it is fetched."""


def bounded_dataset(dataset: Any) -> BoundedDataset | None:
    """The stream of ours in a dataset, also below the share of a rank that accelerate makes."""
    while not isinstance(dataset, BoundedDataset):
        dataset = getattr(dataset, "dataset", None)
        if dataset is None:
            return None
    return dataset


@dataclass(slots=True)
class _Stamped:
    """A collator whose batches carry the state of the dataset after their last row."""

    collate: Callable[[list[Any]], Any]
    dataset: BoundedDataset

    def __call__(self, rows: list[Any]) -> Any:
        if isinstance(rows[0], str) and rows[0] == PASSED:
            return None
        batch = self.collate(rows)
        batch[_KEY] = json.dumps({"worker": worker_id() or 0, "state": self.dataset._state_dict})
        return batch


@dataclass(slots=True)
class Watch:
    """The loader of a training: what it has handed out, and where that came from."""

    loader: Any
    """As accelerate prepared it."""
    dataset: BoundedDataset
    resumed: dict[str, Any] | None = None
    """What a checkpoint says; the first iteration begins there."""
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    """After the last batch that was handed out, by worker."""
    last_worker: int = -1
    batches: int = 0
    """Handed out in this epoch."""
    started: str | None = None
    """The random state before this epoch's loader was made."""
    ahead: deque[tuple[str, str | None]] = field(default_factory=deque)
    """What is fetched and not handed out: the state, and the random state before the fetch."""

    def __post_init__(self) -> None:
        # accelerate's loaders call it by this name, of the object.
        self.loader.base_dataloader.__iter__ = self._iterate

    @property
    def _group(self) -> int:
        """Batches that the loader fetches at a time; it is one such group ahead."""
        state = getattr(self.loader, "state", None)
        is_dispatcher = state is not None and not self.loader.split_batches
        return int(state.num_processes) if is_dispatcher else 1

    def _iterate(self) -> Iterator[Any]:
        base, now = self.loader.base_dataloader, random_state()
        resumed, self.resumed = self.resumed, None
        self.ahead.clear()
        self.states, self.last_worker, self.batches, self.started = {}, -1, 0, now
        if resumed is not None:
            self.states = {int(key): state for key, state in resumed["workers"].items()}
            self.last_worker, self.batches = resumed["last_worker"], resumed["batches"]
            self.started = resumed["started"]
            self.dataset.begin = Begin(
                epoch=resumed["epoch"],
                states=self.states,
                # After the last worker it is the first one's turn: nobody lets one pass.
                last_worker=self.last_worker if self.last_worker < base.num_workers - 1 else -1,
                batch_rows=base.batch_size,
            )
            set_random_state(resumed["started"])
        collate = base.collate_fn
        base.collate_fn = _Stamped(collate, self.dataset)
        try:
            batches = type(base).__iter__(base)
        finally:
            base.collate_fn = collate
        if resumed is not None:
            set_random_state(now)
        return self._fetch(
            batches, resumed["fetched"] if resumed and not base.num_workers else None
        )

    def _fetch(self, batches: Iterator[Any], replayed: str | None) -> Iterator[Any]:
        while True:
            now = before = random_state()
            if replayed is not None:
                before = replayed
                set_random_state(replayed)
            batch = next(batches, StopIteration)
            if replayed is not None:
                set_random_state(now)
                replayed = None
            if batch is StopIteration:
                return
            if batch is None:
                continue
            self.ahead.append((batch.pop(_KEY), before))
            self._hand_out(self._group)
            yield batch

    def _hand_out(self, most_ahead: int) -> None:
        while len(self.ahead) > most_ahead:
            made = json.loads(self.ahead.popleft()[0])
            self.last_worker = made["worker"]
            self.states[self.last_worker] = made["state"]
            self.batches += 1

    def position(self) -> dict[str, Any]:
        """What a resumed run needs; asked for when all that was handed out is trained on."""
        is_finished = bool(self.loader.end_of_dataloader)
        # The last group may be smaller.
        fetched = self.batches + len(self.ahead)
        self._hand_out(0 if is_finished else fetched % self._group or self._group)
        return {
            "epoch": int(self.dataset.epoch),
            "is_finished": is_finished,
            "batches": self.batches,
            "workers": self.states,
            "last_worker": self.last_worker,
            "started": self.started,
            "fetched": self.ahead[0][1] if self.ahead else None,
        }


class StreamCheckpoint(TrainerCallback):  # type: ignore[misc]
    """Writes where the stream is into every checkpoint."""

    def __init__(self, trainer: Any) -> None:
        dataset = trainer.train_dataset
        accelerator = trainer.accelerator
        self.rank = int(accelerator.process_index)
        self.identity = {
            **dataset.identity,
            "dataloader_num_workers": int(trainer.args.dataloader_num_workers),
            "batch_rows": int(trainer.args.per_device_train_batch_size),
            "ranks": int(accelerator.num_processes),
        }
        self.resumed: dict[str, Any] | None = None
        self.watch: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Watches the loader of this training."""
        loader = known.get("train_dataloader")
        dataset = bounded_dataset(getattr(loader, "dataset", None))
        self.watch = None
        if dataset is not None and hasattr(loader, "end_of_dataloader"):
            is_new_epoch = self.resumed is None or self.resumed["is_finished"]
            self.watch = Watch(loader, dataset, None if is_new_epoch else self.resumed)

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """The trainer counts from the resumed batch; the logged epoch counts them all."""
        resumed = self.resumed
        if resumed and not resumed["is_finished"] and int(state.epoch) == resumed["epoch"]:
            state.epoch += resumed["batches"] / (state.max_steps * args.gradient_accumulation_steps)

    def on_save(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """One file, written beside and renamed."""
        if self.watch is None or self.watch.started is None:
            return
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / STATE_FILE.format(self.rank)
        written = path.with_suffix(".partial")
        saved = {"version": _VERSION, "global_step": state.global_step, "identity": self.identity}
        written.write_text(json.dumps({**saved, **self.watch.position()}), encoding="utf-8")
        os.replace(written, path)

    def read(self, checkpoint: str) -> dict[str, Any]:
        """What this rank wrote; ``Unfamiliar`` where it cannot go on from it."""
        path = Path(checkpoint, STATE_FILE.format(self.rank))
        try:
            saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise Unfamiliar(
                f"{checkpoint} has no {path.name}: it was written without it"
            ) from None
        if saved.get("version") != _VERSION:
            raise Unfamiliar(f"{path} is of version {saved.get('version')}, not {_VERSION}")
        for key, value in json.loads(json.dumps(self.identity)).items():
            if saved["identity"].get(key) != value:
                was = saved["identity"].get(key)
                raise Unfamiliar(f"{key} was {was} at the checkpoint and is {value} now")
        return saved


def init_training_state(
    self: Any,
    max_steps: int,
    num_update_steps_per_epoch: int,
    num_train_epochs: int,
    resume_from_checkpoint: str | None,
    trial: Any,
) -> tuple[int, int]:
    """The trainer's ``_init_training_state``: epoch to begin with, and batches to skip."""
    callbacks = self.callback_handler.callbacks
    ours = next((item for item in callbacks if isinstance(item, StreamCheckpoint)), None)
    if ours is None or resume_from_checkpoint is None or self.args.ignore_data_skip:
        raise NotAsked
    from accelerate.utils import gather_object
    from axolotl.utils.data.sft import LOG
    from transformers import Trainer

    refusal = ""
    try:
        saved = ours.read(resume_from_checkpoint)
    except Unfamiliar as reason:
        refusal = str(reason)
    # One rank that skips and one that does not would wait for each other for ever.
    refusals = gather_object([refusal])
    if any(refusals):
        refusal = next(filter(None, refusals))
        LOG.warning(f"fast-axolotl: the trainer replays the data from its beginning: {refusal}")
        raise Unfamiliar(refusal)
    original = Trainer._init_training_state
    original = getattr(original, "__wrapped__", original)
    original(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    )
    ours.resumed = saved
    LOG.info(
        f"fast-axolotl: the data goes on after batch {saved['batches']} of epoch {saved['epoch']}, "
        "without a replay"
    )
    return saved["epoch"] + int(saved["is_finished"]), 0
