"""Is it found where the time of a step goes, and what do the looks cost? ``make bench-stacks``.

Real loops, on a GPU where there is one. The truth is what the loop sleeps or computes; a row is
right if the verdict is the one expected and the share of its phase is within 15 points of the
truth. Cost: loops of 10 ms steps, with looks at the stack and without. The processor time of the
looks' own thread hardly depends on other programs; beside it stands what the whole process took
more, pair by pair.

It runs from the source tree: ``PYTHONPATH=src python -m benchmarks.stacks``.
"""

from __future__ import annotations

import argparse
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.meter_gpu import calibrate
from benchmarks.result import Result, record_table
from fast_axolotl.errors import MissingExtraError
from fast_axolotl.record.units import format_seconds, format_share

PARTS = ("loops", "cost")
_MODEL_SECONDS, _OTHER_SECONDS = 0.010, 0.020
_TOLERANCE = 0.15
_COST_FROM, _COST_STEPS, _COST_PAIRS, _COST_STEP_SECONDS = 500, 1000, 4, 0.010
"""The first seconds are left out, in which there are more looks."""
_PAUSE_EVERY = 25


class Case(NamedTuple):
    """A loop, and what is true of it."""

    phase: str
    share: float
    """Of a step, that the phase takes."""
    verdict: str
    options: dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("stacks", __doc__)
    parser.add_argument("--parts", type=names, default=[], help=f"of {', '.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=400, help="of each loop (default: 400)")
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """All parts, or those that are named."""
    parts = check_names("part", options.parts, PARTS)
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("this race needs torch: pip install torch") from error
    torch.set_num_threads(1)
    is_cuda = torch.cuda.is_available()
    work = calibrate(torch, _MODEL_SECONDS, 4096) if is_cuda else lambda: time.sleep(_MODEL_SECONDS)
    loops: list[dict[str, Any]] = []
    for name, case in _cases(torch, is_cuda).items() if "loops" in parts else ():
        tell(f"loop: {name}")
        loops.append(_run_case(torch, work, name, case, options.steps, folder / name))
    cost = _measure_cost(torch, folder, tell) if "cost" in parts else {}
    device = torch.cuda.get_device_name(0) if is_cuda else "CPU"
    columns = {
        "loop": lambda row: row["loop"],
        "truth": lambda row: f"{row['phase']} {format_share(row['truth'])}",
        "found": lambda row: format_share(row["found"]),
        "verdict": lambda row: row["verdict"],
        "line": lambda row: row["line"],
        "right": lambda row: str(row["right"]),
    }
    tables = [record_table(f"bench stacks: {device}", loops, columns, [])] if loops else []
    if cost:
        shown = {
            "a look": lambda row: format_seconds(row["seconds_per_look"]),
            "looks, of the time": lambda row: format_share(row["share"], decimals=2),
            "pairs of runs, of a step": lambda row: " … ".join(
                format_share(share, decimals=2) for share in sorted(row["pair_shares"])
            ),
        }
        tables.append(record_table("bench stacks: cost", [cost], shown, []))
    return Result(facts={"device": device, "loops": loops, "cost": cost}, tables=tables)


def _cases(torch: Any, is_cuda: bool) -> dict[str, Case]:
    """The share of a phase is what is slept of what a step takes. A device works meanwhile, and
    idles for the rest."""
    together = max(_OTHER_SECONDS, _MODEL_SECONDS) if is_cuda else _OTHER_SECONDS + _MODEL_SECONDS
    both = (together - _MODEL_SECONDS) / together
    paused = 1.0 / (1.0 + _PAUSE_EVERY * _MODEL_SECONDS)
    cases = {
        "model alone": Case("forward", 0.0 if is_cuda else 1.0, "compute", {}),
        "map around the loader": Case(
            "preparing", both, "data/prepare", {"source": lambda loader: map(tokenise, loader)}
        ),
        "rebatched": Case("preparing", both, "data/prepare", {"source": rebatch}),
        "before the model": Case("preparing", both, "data/prepare", {"before": tokenise}),
        "before backward": Case("other", both, "code", {"between": pause}),
        "after the step": Case("other", both, "code", {"after": lambda _: pause()}),
        "a pause every 25 steps": Case(
            "other",
            paused,
            "code",
            {"after": lambda step: time.sleep(1.0) if step % _PAUSE_EVERY == 0 else None},
        ),
        "rows": Case("waiting", both, "data", {"rows": _OTHER_SECONDS}),
        "rows in a worker": Case("waiting", 0.5, "data", {"rows": _OTHER_SECONDS, "workers": 1}),
        "a thread of the loop's own": Case(
            "waiting", 0.5, "data", {"rows": _OTHER_SECONDS, "source": read_in_thread}
        ),
    }
    if is_cuda:
        cases["synchronised every step"] = Case(
            "forward", 0.0, "compute", {"is_synchronised": True}
        )
        cases["replayed as a graph"] = Case("forward", 0.0, "compute", {"is_captured": True})
    return cases


def tokenise(batch: Any) -> Any:
    time.sleep(_OTHER_SECONDS)
    return batch


def pause() -> None:
    time.sleep(_OTHER_SECONDS)


def rebatch(loader: Iterable[Any]) -> Iterator[Any]:
    for batch in loader:
        time.sleep(_OTHER_SECONDS)
        yield batch


def read_in_thread(loader: Iterable[Any]) -> Iterator[Any]:
    filled: queue.Queue[Any] = queue.Queue(2)

    def fill() -> None:
        for batch in loader:
            filled.put(batch)
        filled.put(None)

    threading.Thread(target=fill, daemon=True).start()
    while (batch := filled.get()) is not None:
        yield batch


def _run_case(
    torch: Any, work: Callable[[], None], name: str, case: Case, steps: int, folder: Path
) -> dict[str, Any]:
    summary = _train(torch, folder, steps, work, **case.options)
    verdict = "/".join(filter(None, (summary.verdict.kind, summary.verdict.subtype)))
    found = summary.phases.get(case.phase, 0.0)
    if case.phase == "waiting":
        found = summary.stall_fraction or 0.0
    if summary.gpu_utilization is not None:  # what the host does costs no more than the idle time
        found = min(found, 1.0 - summary.gpu_utilization)
    is_near = abs(found - case.share) <= _TOLERANCE or case.verdict == "compute"
    line = next((one.place for one in summary.where if one.phase in (case.phase, "loading")), "")
    return {
        "loop": name,
        "phase": case.phase,
        "truth": case.share,
        "found": found,
        "verdict": verdict,
        "headline": summary.verdict.headline,
        "phases": summary.phases,
        "gpu_utilization": summary.gpu_utilization,
        "device_stall_fraction": summary.device_stall_fraction,
        "line": line,
        "steps": summary.steps,
        "right": verdict.startswith(case.verdict) and is_near,
    }


def _train(
    torch: Any,
    folder: Path,
    steps: int,
    work: Callable[[], None],
    *,
    rows: float = 0.0,
    workers: int = 0,
    source: Callable[[Any], Iterable[Any]] = lambda loader: loader,
    before: Callable[[Any], Any] = lambda batch: batch,
    between: Callable[[], Any] = lambda: None,
    after: Callable[[int], Any] = lambda step: None,
    is_synchronised: bool = False,
    is_captured: bool = False,
    stacks: bool = True,
    begin: Callable[[Any], None] = lambda meter: None,
) -> Any:
    from fast_axolotl.integrations.torch_meter import watch_torch
    from fast_axolotl.measure import measure

    class Rows(torch.utils.data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return steps

        def __getitem__(self, row: int) -> Any:
            time.sleep(rows)
            return torch.ones(8)

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, batch: Any) -> Any:
            work()
            return self.layer(batch)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters())
    graph = None
    meter = measure(folder, stacks=stacks)
    begin(meter)
    with meter, watch_torch(meter):
        loader = torch.utils.data.DataLoader(Rows(), num_workers=workers)
        for step, batch in enumerate(source(loader)):
            ready = before(batch)
            if graph is not None:
                graph.replay()
                continue
            loss = model(ready.to(device)).sum()
            between()
            loss.backward()
            optimizer.step()
            if is_synchronised:
                loss.item()
            after(step)
            if is_captured and step == 3:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return meter.summary()


def _measure_cost(torch: Any, folder: Path, tell: Tell) -> dict[str, Any]:
    """Processor seconds of the looks' own thread; and of whole processes with looks, less those
    without, in pairs."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    looks: list[float] = []
    shares: list[float] = []
    for number in range(2 * _COST_PAIRS):
        stacks = bool(number % 2)
        tell(f"cost: {'with' if stacks else 'without'} looks")
        meters: list[Any] = []
        begins: list[Any] = []

        def note(step: int, meters: list[Any] = meters, begins: list[Any] = begins) -> None:
            if step in (_COST_FROM, _COST_FROM + _COST_STEPS):
                sampler = meters[0]._stacks
                own = (sampler.num_looks, sampler.cpu_seconds) if sampler else (0, 0.0)
                begins.append((time.process_time(), time.perf_counter(), *own))

        _train(
            *(torch, folder / f"cost-{number}", _COST_FROM + _COST_STEPS + 1),
            lambda: time.sleep(_COST_STEP_SECONDS),
            after=note,
            stacks=stacks,
            begin=meters.append,
        )
        process, wall, count, own = (b - a for a, b in zip(*begins, strict=True))
        seconds[stacks].append(process / _COST_STEPS)
        if stacks:
            looks.append(own / count)
            shares.append(own / wall)
    pairs = [on - off for on, off in zip(seconds[True], seconds[False], strict=True)]
    return {
        "seconds_per_look": median(looks),
        "looks": looks,
        "share": median(shares),
        "shares": shares,
        "pair_shares": [pair / _COST_STEP_SECONDS for pair in pairs],
        "with": seconds[True],
        "without": seconds[False],
    }


if __name__ == "__main__":
    main()
