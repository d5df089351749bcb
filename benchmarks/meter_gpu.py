"""Is the stall fraction true on a GPU, where host timing lies? ``make bench-meter-gpu``.

Four parts, all on a real GPU; ``--parts`` chooses. Loops: a step queues about 64 ms of matrix
products, and the loader waits 20 to 200 ms, with and without a synchronise a step: the device stall
that the meter reports beside the idle time that torch's profiler saw in the same steps, and beside
naive host timing. Capture: the same where a step is a replayed CUDA graph, and the meter times a
fetch while it is captured. Epochs: the same where a batch sampler plans for half a second before
each epoch. Trainers: a small Llama trained by HF ``Trainer`` from a fast loader, from one whose
waits hide in part behind queued work, and from a slow one: the verdicts.

It runs from the source tree, where nothing of ours is installed: ``PYTHONPATH=src python -m
benchmarks.meter_gpu``. ``… --train WAIT STEPS FOLDER`` trains alone, with so many seconds of wait
for each batch: an arm of a protocol on a machine with a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.result import Result, Table, record_table
from fast_axolotl.errors import MissingExtraError
from fast_axolotl.record.units import format_share

PARTS = ("loops", "capture", "epochs", "trainers")
_STEP_SECONDS = 0.064
_WAITS = (0.020, 0.060, 0.100, 0.200)
_WARMUP, _STEPS = 5, 60
"""The meter leaves out the first five steps, and so does the profiler."""
_TOLERANCE = 0.02
_RIGHT_NOTE = (
    f"right: device stall within {100 * _TOLERANCE:.0f} points of the profiler's idle time, or the "
    "verdict that was made"
)
_COLUMNS = ("loader", "way", "wait_seconds", "is_synchronised", "is_captured", "verdict", "right")
_EPOCHS, _EPOCH_STEPS, _PLAN_SECONDS = 4, 25, 0.5
_TRAINER_STEPS = 230
_TRAINER_WAITS = {"fast": 0.0, "half hidden": 0.5, "slow": 2.0}
"""Loaders by their wait a batch, in steps of the model. Half a step hides in part: the host runs
ahead of the device by less than a step in this trainer."""
_RIGHT = {"fast": "compute", "half hidden": "data", "slow": "data"}
_ROWS_OF_A_BATCH = 8
_ROW_TOKENS = 2048
_VOCABULARY = 32000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("meter-gpu", __doc__)
    parser.add_argument("--parts", type=names, default=[], help=f"of {', '.join(PARTS)}")
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """All parts, or those that are named, on the first GPU."""
    parts = check_names("part", options.parts, PARTS)
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("this race needs torch: pip install torch") from error
    if not torch.cuda.is_available():
        raise MissingExtraError("this race needs a GPU that torch can use, and there is none")
    loops, epochs, trainers = [], [], []
    queue_work = calibrate(torch, _STEP_SECONDS)
    if "loops" in parts:
        for is_synchronised, wait in product((False, True), _WAITS):
            tell(f"loop: wait {wait:.3f} s, synchronised: {is_synchronised}")
            place = folder / f"loop-{wait}-{is_synchronised}"
            loops.append(_run_loop(torch, queue_work, wait, is_synchronised, place))
    if "capture" in parts:
        for wait in _WAITS:
            tell(f"capture: wait {wait:.3f} s")
            place = folder / f"capture-{wait}"
            loops.append(_run_loop(torch, queue_work, wait, False, place, is_captured=True))
    if "epochs" in parts:
        for way, is_synchronised in product(("watch", "watch_torch"), (False, True)):
            tell(f"epochs: {way}, synchronised: {is_synchronised}")
            place = folder / f"epochs-{way}-{is_synchronised}"
            epochs.append(_run_epochs(torch, queue_work, way, is_synchronised, place))
    if "trainers" in parts:
        step = _run_trainer(0.0, folder / "trial", steps=20)["step_p50_seconds"]
        for name, waits in _TRAINER_WAITS.items():
            tell(f"trainer: {name} loader")
            found = _run_trainer(waits * step, folder / name)
            is_right = found["verdict"].partition("/")[0] == _RIGHT[name]
            trainers.append({"loader": name, **found, "right": is_right})
    gpu = torch.cuda.get_device_name(0)
    facts = {
        "gpu": gpu,
        "tolerance": _TOLERANCE,
        "loops": loops,
        "epochs": epochs,
        "trainers": trainers,
    }
    return Result(facts=facts, tables=_tables(gpu, loops, epochs, trainers))


def _tables(
    gpu: str,
    loops: list[dict[str, Any]],
    epochs: list[dict[str, Any]],
    trainers: list[dict[str, Any]],
) -> list[Table]:
    """A table of each part, with the fractions that are compared."""
    stalls = {
        "naive host": "naive_host_fraction",
        "host stall": "host_stall_fraction",
        "device stall": "device_stall_fraction",
        "profiler": "profiler_idle_fraction",
        "MFU": "mfu",
    }
    shown = (
        (f"{gpu}, steps of {1000 * _STEP_SECONDS:.0f} ms", loops),
        (f"{_EPOCHS} epochs of {_EPOCH_STEPS} steps, {_PLAN_SECONDS} s of planning", epochs),
        ("a small Llama by HF Trainer", trainers),
    )
    tables = []
    for title, records in shown:
        columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
            key.replace("_", " "): lambda item, key=key: str(item[key])  # type: ignore[misc]
            for key in _COLUMNS
            if records and key in records[0]
        }
        for heading, key in stalls.items():
            if records and key in records[0]:
                columns[heading] = lambda item, key=key: format_share(item[key])  # type: ignore[misc]
        if records:
            tables.append(
                record_table(f"bench meter-gpu: {title}", records, columns, [_RIGHT_NOTE])
            )
    return tables


def calibrate(torch: Any, seconds: float, size: int = 8192) -> Callable[[], None]:
    """Work that is queued at once and keeps the device busy for so long."""
    matrix = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    result = torch.empty_like(matrix)

    def queue_work(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix, out=result)

    queue_work(20)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    queue_work(100)
    torch.cuda.synchronize()
    count = max(1, round(seconds / ((time.perf_counter() - begun) / 100)))
    return lambda: queue_work(count)


def _run_loop(
    torch: Any,
    queue_work: Callable[[], None],
    wait: float,
    is_synchronised: bool,
    folder: Path,
    *,
    is_captured: bool = False,
) -> dict[str, Any]:
    """The meter over every step, the profiler over those after the warm-up."""
    from fast_axolotl.integrations.profiler import open_profile, read_events, window_of
    from fast_axolotl.measure import measure

    profiler = open_profile()
    waited = begun = 0.0

    def slow_batches() -> Iterator[int]:
        for number in range(_WARMUP + _STEPS + is_captured):
            time.sleep(wait)
            yield number

    with measure(folder, sample_system=False) as meter:
        batches = meter.watch(slow_batches())
        if is_captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                queue_work()
                next(batches)
            queue_work = graph.replay
        for number in range(_WARMUP + _STEPS):
            if number == _WARMUP:
                torch.cuda.synchronize()
                profiler.start()
                # The profiler sees the device from its first kernel on.
                torch.zeros(1, device="cuda")
                waited, begun = 0.0, time.perf_counter()
            asked = time.perf_counter()
            next(batches)
            waited += time.perf_counter() - asked
            queue_work()
            if is_synchronised:
                torch.cuda.synchronize()
        wall = time.perf_counter() - begun
        torch.cuda.synchronize()
        profiler.stop()
        summary = meter.summary()
    window = window_of(read_events(profiler), t=0.0, steps=_STEPS)
    idle_seconds = window.device_idle_seconds
    idle = None if idle_seconds is None else idle_seconds / window.wall_seconds
    device = summary.device_stall_fraction
    return {
        "wait_seconds": wait,
        "is_synchronised": is_synchronised,
        "is_captured": is_captured,
        "naive_host_fraction": waited / wall,
        "host_stall_fraction": summary.host_stall_fraction,
        "device_stall_fraction": device,
        "profiler_idle_fraction": idle,
        "right": None not in (device, idle) and abs((device or 0) - (idle or 0)) <= _TOLERANCE,
    }


def _run_epochs(
    torch: Any, queue_work: Callable[[], None], way: str, is_synchronised: bool, folder: Path
) -> dict[str, Any]:
    """The meter over all epochs, the profiler over the steady steps: those after the fifth."""
    from fast_axolotl.integrations.profiler import open_profile, read_events, window_of
    from fast_axolotl.integrations.torch_meter import watch_torch
    from fast_axolotl.measure import measure

    class Planned:
        def __len__(self) -> int:
            return _EPOCH_STEPS

        def __iter__(self) -> Iterator[list[int]]:
            time.sleep(_PLAN_SECONDS)
            return iter([[number] for number in range(_EPOCH_STEPS)])

    loader = torch.utils.data.DataLoader(
        torch.arange(_EPOCH_STEPS), batch_sampler=Planned(), num_workers=0
    )
    weight = torch.nn.Parameter(torch.zeros(8, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    profiler = open_profile()
    number = 0
    with measure(folder, sample_system=False) as meter, ExitStack() as hooks:
        if way == "watch_torch":
            hooks.enter_context(watch_torch(meter))
        for _ in range(_EPOCHS):
            for _batch in meter.watch(loader) if way == "watch" else loader:
                if number == _WARMUP:
                    torch.cuda.synchronize()
                    profiler.start()
                    torch.zeros(1, device="cuda")
                number += 1
                queue_work()
                weight.grad = torch.ones_like(weight)
                optimizer.step()
                if is_synchronised:
                    torch.cuda.synchronize()
        torch.cuda.synchronize()
        profiler.stop()
    summary = meter.summary()
    window = window_of(read_events(profiler), t=0.0, steps=number - _WARMUP)
    idle_seconds = window.device_idle_seconds
    idle = None if idle_seconds is None else idle_seconds / window.wall_seconds
    device = summary.device_stall_fraction
    return {
        "way": way,
        "is_synchronised": is_synchronised,
        "host_stall_fraction": summary.host_stall_fraction,
        "device_stall_fraction": device,
        "profiler_idle_fraction": idle,
        "waits_by_cause": summary.waits_by_cause,
        "overhead_seconds_per_fetch": summary.overhead_seconds_per_fetch,
        "right": None not in (device, idle) and abs((device or 0) - (idle or 0)) <= _TOLERANCE,
    }


def _run_trainer(wait: float, folder: Path, steps: int = _TRAINER_STEPS) -> dict[str, Any]:
    from fast_axolotl.integrations.transformers_meter import MeterCallback
    from fast_axolotl.measure.summary import summarise
    from fast_axolotl.record import read_run

    train(wait, steps, folder / "trainer", [MeterCallback(folder / "run")])
    summary = summarise(read_run(folder / "run"))
    verdict = summary.verdict
    return {
        "wait_seconds": wait,
        "step_p50_seconds": summary.step_p50_seconds,
        "host_stall_fraction": summary.host_stall_fraction,
        "device_stall_fraction": summary.device_stall_fraction,
        "tokens_per_second": summary.tokens_per_second,
        "mfu": summary.mfu,
        "flops_convention": summary.flops_convention,
        "peak_tflops": summary.peak_tflops,
        "gpu_utilization": summary.gpu_utilization,
        "overhead_seconds_per_fetch": summary.overhead_seconds_per_fetch,
        "verdict": "/".join(filter(None, (verdict.kind, verdict.subtype))),
        "headline": verdict.headline,
        "evidence": list(verdict.evidence),
        "reasons": summary.reasons,
    }


def train(wait: float, steps: int, folder: Path, callbacks: Sequence[Any] = ()) -> None:
    """So many steps, each batch after a wait of so many seconds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=_ROW_TOKENS,
        use_cache=False,
    )
    torch.manual_seed(0)
    tokens = torch.randint(0, _VOCABULARY, (_ROW_TOKENS,))
    row = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}

    class SlowRows(torch.utils.data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return _ROWS_OF_A_BATCH * steps

        def __getitem__(self, index: int) -> dict[str, Any]:
            if wait:
                time.sleep(wait / _ROWS_OF_A_BATCH)
            return row

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=_ROWS_OF_A_BATCH,
        max_steps=steps,
        bf16=True,
        logging_steps=50,
        # On by default, it looks at every loss and so waits for the device at every step.
        logging_nan_inf_filter=False,
        # So does the copy of every batch to the device.
        accelerator_config={"non_blocking": True},
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=SlowRows(),
        callbacks=list(callbacks),
    ).train()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
