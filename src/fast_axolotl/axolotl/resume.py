"""Resume a streamed training at its checkpoint, without reading all earlier rows again.

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
itself does not fix it. What a checkpoint has no state for, stock replays, and the log says why:
so where one rank reads for all others (accelerate's dispatcher).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fast_axolotl.axolotl.patching import NotAsked, Unfamiliar, warn, worker_id
from fast_axolotl.axolotl.streaming import BoundedDataset, drawn_from, random_state
from fast_axolotl.errors import MissingExtraError, UsageError

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtraError("resuming needs Axolotl's packages: pip install axolotl") from error

STATE_FILE = "fast_axolotl_reader_rank{}.json"
"""In the folder of a checkpoint; one for each rank."""

_VERSION = 2
_KEY = "fast_axolotl_state"
"""Under which a batch carries its mark from where it was made to where it is fetched."""
_END = object()


def bounded_dataset(dataset: Any) -> BoundedDataset | None:
    """The stream of ours in a dataset, also below the share of a rank that accelerate makes."""
    while not isinstance(dataset, BoundedDataset):
        dataset = getattr(dataset, "dataset", None)
        if dataset is None:
            return None
    return dataset


@dataclass(slots=True)
class _Marking:
    """A collator whose batches carry the state of the dataset after their last row."""

    collate: Callable[[list[Any]], Any]
    dataset: BoundedDataset

    def __call__(self, rows: list[Any]) -> Any:
        if rows[0] is None:
            return None
        batch, state = self.collate(rows), self.dataset._state_dict
        if isinstance(batch, MutableMapping):
            batch[_KEY] = (worker_id() or 0, int(state["epoch"]), json.dumps(state))
        return batch


@dataclass(slots=True)
class _Resumed:
    """What a loader reads, from a position on. Workers up to the last one let a turn pass."""

    rows: Any
    dataset: BoundedDataset
    position: dict[str, Any]
    batch_rows: int

    def __iter__(self) -> Iterator[Any]:
        worker, last = worker_id(), self.position["last_worker"]
        if self.dataset.epoch == self.position["epoch"]:
            state = self.position["workers"].get(str(worker or 0))
            self.dataset.load_state_dict(None if state is None else json.loads(state))
            if worker is not None and worker <= last:
                yield from [None] * self.batch_rows
        yield from self.rows


def _start(epoch: int, started: str | None) -> dict[str, Any]:
    """The position before the first batch of an epoch, and the random states it begins with."""
    position = {"epoch": epoch, "batches": 0, "last_worker": -1, "workers": {}}
    return {**position, "started": started, "fetched": None}


@dataclass(slots=True)
class Watch:
    """The loader of a training: what it has handed out, and where that came from."""

    loader: Any
    """As accelerate prepared it."""
    dataset: BoundedDataset
    owner: StreamCheckpoint
    """Is told which loader the training reads."""
    resumed: dict[str, Any] | None = None
    """What a checkpoint says; the first iteration begins there."""
    is_endless: bool = False
    """The end of the files is followed by the next epoch, as one stream."""
    start: int = 0
    """Batches of this epoch that earlier runs were given."""
    position: dict[str, Any] = field(default_factory=dict)
    """Of the last batch that was handed out, in the form of the file."""
    ahead: deque[tuple[Any, dict[str, Any]]] = field(default_factory=deque)
    """Batches fetched and not handed out: the mark of each, and what a resume before it needs."""

    def __post_init__(self) -> None:
        # accelerate's loaders call it by this name, of the object.
        self.loader.base_dataloader.__iter__ = self._iterate

    def settle(self) -> dict[str, Any]:
        """The position, when all that was handed out is trained on."""
        is_finished = bool(self.loader.end_of_dataloader)
        self._hand_out(0 if is_finished else 1)
        settled = self.position
        if self.ahead:
            (_, epoch, _), needs = self.ahead[0]
            settled = settled if epoch == settled["epoch"] else _start(epoch, None)
            settled = {**settled, **needs}
        return {**settled, "is_finished": is_finished, "trained": settled["batches"]}

    def is_followed(self, batches: int) -> bool:
        """Whether a step was given so many batches, one more being fetched, or the epoch ended."""
        handed_out = self.position.get("batches", -1) - self.start
        return handed_out == batches or bool(self.position and self.loader.end_of_dataloader)

    def _iterate(self) -> Iterator[Any]:
        resumed, self.resumed = self.resumed, None
        self.owner.watch = self
        self.ahead.clear()
        self.position = _start(int(self.dataset.epoch), random_state())
        if resumed is not None:
            self.position = {key: resumed[key] for key in self.position}
        self.start = self.position["batches"]
        return self._fetch(self._open(is_resumed=resumed is not None))

    def _open(self, *, is_resumed: bool) -> Iterator[Any]:
        """Batches with marks. Making the loader draws the seed of its workers."""
        base = self.loader.base_dataloader
        collate, rows = base.collate_fn, base.dataset
        base.collate_fn = _Marking(collate, self.dataset)
        if is_resumed:
            position = {**self.position, "workers": dict(self.position["workers"])}
            if position["last_worker"] == base.num_workers - 1:
                position["last_worker"] = -1  # it is the first one's turn
            vars(base)["dataset"] = _Resumed(rows, self.dataset, position, base.batch_size)
        try:
            with drawn_from(self.position["started"] if is_resumed else None):
                batches: Iterator[Any] = type(base).__iter__(base)
        finally:
            base.collate_fn, vars(base)["dataset"] = collate, rows
        return batches

    def _fetch(self, batches: Iterator[Any]) -> Iterator[Any]:
        # What workers fetch draws from generators of their own.
        replayed = None if self.loader.base_dataloader.num_workers else self.position["fetched"]
        started, is_empty = self.position["started"], False
        while not is_empty:
            is_empty = True
            while True:
                before = replayed or random_state()
                with drawn_from(replayed):
                    batch: Any = next(batches, _END)
                if batch is _END:
                    break
                if batch is None:
                    continue
                replayed, is_empty = None, False
                if isinstance(batch, MutableMapping):
                    self.ahead.append((batch.pop(_KEY), {"started": started, "fetched": before}))
                    self._hand_out(1)
                else:
                    self.owner.watch = None  # not a batch that can carry anything
                yield batch
            if not self.is_endless:
                return
            self.dataset.set_epoch(self.dataset.epoch + 1)
            started = random_state()
            batches = self._open(is_resumed=False)

    def _hand_out(self, most_ahead: int) -> None:
        while len(self.ahead) > most_ahead:
            (worker, epoch, state), needs = self.ahead.popleft()
            if epoch != self.position["epoch"]:
                self.position = _start(epoch, None)
            self.position |= {"last_worker": worker, **needs}
            self.position["batches"] += 1
            self.position["workers"][str(worker)] = state


class StreamCheckpoint(TrainerCallback):  # type: ignore[misc]
    """Writes where the stream is into every checkpoint."""

    def __init__(self, trainer: Any) -> None:
        dataset: Any = bounded_dataset(trainer.train_dataset)
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
        self.unproven: Watch | None = None
        """The watch before the first step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Watches the loader of this training."""
        loader: Any = known.get("train_dataloader")
        dataset = bounded_dataset(getattr(loader, "dataset", None))
        self.watch = self.unproven = None
        is_shared, is_dispatcher = self.identity["ranks"] > 1, hasattr(loader, "split_batches")
        is_watched = hasattr(loader, "base_dataloader") and not (is_shared and is_dispatcher)
        if dataset is not None and is_watched:
            # Ranks with files of their own end at different steps; a rank that syncs gradients of
            # an incomplete group would wait for the others for ever.
            is_endless = is_shared and loader.dataset is dataset
            is_endless = is_endless and args.gradient_accumulation_steps > 1
            is_new_epoch = self.resumed is None or self.resumed["is_finished"]
            resumed = None if is_new_epoch else self.resumed
            self.unproven = Watch(loader, dataset, self, resumed, is_endless)

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """The trainer counts from the resumed batch; the logged epoch counts them all.

        After the first step: trainer and loader have to work together as known ones do.
        """
        watch, self.unproven = self.unproven, None
        if watch is not None and not watch.is_followed(args.gradient_accumulation_steps):
            self.watch = None
            text = "this transformers or accelerate reads batches in a way unknown to fast-axolotl"
            if self.resumed:
                raise UsageError(
                    f"{text}, so the data does not resume at the right row; set "
                    "FAST_AXOLOTL_SKIP=resume, and the trainer replays the data"
                )
            warn("fast-axolotl: %s: checkpoints hold no position of the data", text)
        resumed, batches = self.resumed, state.max_steps * args.gradient_accumulation_steps
        if resumed and not resumed["is_finished"] and int(state.epoch) == resumed["epoch"]:
            trained = round((state.epoch - resumed["epoch"]) * batches) + resumed["trained"]
            state.epoch = resumed["epoch"] + trained / batches

    def on_save(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """One file, written beside and renamed."""
        if self.watch is None:
            return
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / STATE_FILE.format(self.rank)
        written = path.with_suffix(".partial")
        saved = {"version": _VERSION, "global_step": state.global_step, "identity": self.identity}
        written.write_text(json.dumps({**saved, **self.watch.settle()}), encoding="utf-8")
        written.replace(path)

    def read(self, checkpoint: str) -> dict[str, Any]:
        """What this rank wrote; ``Unfamiliar`` where it cannot go on from it."""
        path = Path(checkpoint, STATE_FILE.format(self.rank))
        try:
            saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise Unfamiliar(
                f"{checkpoint} has no {path.name}: it was saved without fast-axolotl, or where one "
                "rank reads for all"
            ) from None
        if saved.get("version") != _VERSION:
            raise Unfamiliar(f"{path} has version {saved.get('version')}, not {_VERSION}")
        for key, value in json.loads(json.dumps(self.identity)).items():
            if (was := saved["identity"].get(key)) != value:
                raise Unfamiliar(f"{key} was {was} in the checkpoint and is {value} now")
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
    import torch
    from axolotl.utils.data.sft import LOG
    from transformers import Trainer

    refusal = ""
    try:
        saved = ours.read(resume_from_checkpoint)
    except Unfamiliar as reason:
        refusal = str(reason)
    # One rank that skips and one that does not would wait for each other for ever.
    refused = torch.tensor([int(bool(refusal))], device=self.accelerator.device)
    if self.accelerator.gather(refused).any():
        refusal = refusal or "another rank cannot resume from its state"
        LOG.warning(f"fast-axolotl: the trainer replays the data from the start: {refusal}")
        raise Unfamiliar(refusal)
    original = Trainer._init_training_state
    original = getattr(original, "__wrapped__", original)
    original(
        self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
    )
    ours.resumed = saved
    LOG.info(
        f"fast-axolotl: the data resumes after batch {saved['trained']} of epoch {saved['epoch']} "
        "without a replay"
    )
    return saved["epoch"] + int(saved["is_finished"]), 0
