"""Run a protocol or a sweep, one child process after the other, and save the state after each.

A sweep over batch sizes (``run_trial``) is a plan whose next arm is chosen when the last has run.

After every run the state and ``protocol.json`` are written, so the folder can be looked at while
the protocol goes on, and the same command continues it after an interruption. A run that was cut
off does not count and is made again, and so are failed ones when the protocol is continued.

One protocol at a time works in a folder. The lock is a file that is held open, by this process and
by the runs that it starts: a run that outlives a protocol which was killed keeps the next one from
being measured beside it. Whoever comes next waits a while for it, and is then refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import json
import math
import os
import random
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.measure.summary import summarise
from fast_axolotl.protocol import child
from fast_axolotl.protocol.build import End, build_protocol, find_disturbance, is_settled
from fast_axolotl.protocol.child import Launch, read_last_lines, read_tail
from fast_axolotl.protocol.matrix import count_steps
from fast_axolotl.protocol.plan import STATE_SCHEMA, Plan, State, Turn
from fast_axolotl.protocol.statistics import LEAST_PAIRS, compare_runs, t_quantile
from fast_axolotl.record import RunSummary
from fast_axolotl.record.codec import from_plain, to_json, write_text
from fast_axolotl.record.folder import choose_training, find_folders, read_trainings
from fast_axolotl.record.protocol_result import PROTOCOL_FILE, ArmRun, ProtocolResult, Trial
from fast_axolotl.record.units import count_words

_DEDUPE_WORKER = "fast_axolotl.axolotl.data"
_STATE_FILE, _LOCK_FILE = "state.json", ".lock"
_PATIENCE_SECONDS = 15.0
"""How long the next start waits: a run that was asked to end is given ten."""
_LOG_BYTES = 4_000_000
"""Of the end of a log, in which memory that ran out is looked for: 64 ranks print a lot."""
_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|\b(CUDA|HIP|XPU|NPU)( error:)? out of memory|hipErrorOutOfMemory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|DefaultCPUAllocator: (can't|not enough)|\bMemoryError\b"
    r"|exitcode\s*: -9\b|Signal 9 \(SIGKILL\)"
)
_KILLED = (-9, 137)


def run_protocol(plan: Plan, folder: str | Path, **options: Any) -> ProtocolResult:
    """Everything that is not done yet, and the result; for options see ``Running``."""
    with open_running(plan, folder, **options) as running:
        running.plan = replace(plan, seed=running.state.seed)
        return running.run()


@contextlib.contextmanager
def open_running(plan: Plan, folder: str | Path, **options: Any) -> Iterator[Running]:
    """A protocol in its folder, which is locked; one that was interrupted is continued."""
    root = Path(folder).resolve()
    # A folder that is not for this protocol is refused before anything is written there.
    running = Running(plan=plan, root=root, state=open_state(root, plan), **options)
    with hold(root) as opened:
        running.state = open_state(root, plan)
        if running.launch is child.launch:
            running.launch = functools.partial(child.launch, inherit=opened)
        yield running


@dataclass(slots=True, kw_only=True)
class Running:
    """A protocol at work: its runs, one after the other; ``run_turn`` makes one of them."""

    plan: Plan
    root: Path
    state: State
    environment: Mapping[str, str]
    progress: Callable[[str, int, int, float, float | None], None] = lambda *_: None
    """Told what is running, runs done, most runs in all, and seconds: of this run so far, and most
    that are left, ``None`` before the first run has ended."""
    warn: Callable[[str], None] = lambda line: None
    """Told at once what makes a run, or all of them, worth less."""
    launch: Launch = child.launch
    clock: Callable[[], float] = time.monotonic
    figures: dict[int, RunSummary] = field(default_factory=dict)
    """Of the runs that count, by the number of the turn."""
    notes: list[str] = field(default_factory=list)
    """What to know about this session."""
    end: End = ""

    def run(self) -> ProtocolResult:
        """The turns that are missing, then dedupe, then the result."""
        turns = self.plan.turns()
        for turn in turns:
            if turn.number in self.state.runs and not self._has_figures(turn):
                del self.state.runs[turn.number]
        self.save()
        planned = count_words(self.plan.pairs, "pair")
        for turn in turns:
            if turn.number in self.state.runs:
                continue
            begins_pair = (turn.number - 1) % len(self.plan.arms) == 0
            if begins_pair and turn.pair >= LEAST_PAIRS and is_settled(self._write()):
                self.notes.append(f"The answer was clear after {turn.pair} of at most {planned}.")
                self.end = "clear"
                break
            limit = self.plan.max_minutes
            if begins_pair and limit is not None and self.state.seconds >= 60.0 * limit:
                self.notes.append(
                    f"Stopped by --max-minutes {limit:g} after {max(0, turn.pair)} of {planned}; "
                    "repeat it with more minutes to continue."
                )
                self.end = "time"
                break
            self.state.runs[turn.number] = self.run_turn(turn)
            self._write()
        is_known = bool(self.state.dedupe) and "reason" not in self.state.dedupe
        if self.plan.dedupe is not None and not is_known:
            self.state.dedupe = self._dedupe(self.plan.dedupe)
        return self._write()

    def _has_figures(self, turn: Turn) -> bool:
        """Whether a run of an earlier session counts; its figures are read."""
        run = self.state.runs[turn.number]
        if run.status != "done":
            return False
        with contextlib.suppress(DataError):
            summary = summarise(choose_training(read_trainings(self.root / turn.folder)))
            if run.steps in (None, count_steps(summary)):
                self.figures[turn.number] = summary
        return turn.number in self.figures

    def run_turn(self, turn: Turn) -> ArmRun:
        """One run, to its end; its figures are in ``figures`` if it succeeded."""
        folder = self.root / turn.folder
        # What a run that was cut off has left.
        for left in find_folders(folder):
            shutil.rmtree(left, ignore_errors=True)
        folder.mkdir(parents=True)
        command, environment = self._command(turn, folder)
        begin = self.clock()
        tick = functools.partial(self._tell_progress, turn, begin)
        tick()
        summary, code, failure = None, None, ""
        losses: tuple[float, ...] = ()
        try:
            code = self.launch(command, environment, folder / "log.txt", tick)
            if code:
                failure = f"exit code {code}" if code > 0 else f"ended by signal {-code}"
            else:
                record = choose_training(read_trainings(folder))
                losses = tuple(line.values["loss"] for line in record.find_losses())
                summary = summarise(record)
                if summary.end_reason == "exception" and count_steps(summary):
                    failure = f"exit code 0, but its training ended with an error: {summary.error}"
        except DataError as error:
            failure = f"it left no record: {error}"
        seconds = self.clock() - begin
        run = ArmRun(
            folder=turn.folder,
            trainings=len(find_folders(folder)),
            pair=turn.pair,
            status="failed",
            exit_code=code,
            seconds=seconds,
        )
        if summary is None or failure:
            self.warn(f"{turn.folder}: {failure}")
            return replace(run, log_tail=f"{failure}\n{read_tail(folder / 'log.txt')}".strip())
        is_first = not any(map(find_disturbance, self.figures.values()))
        self.figures[turn.number] = summary
        if is_first and (disturbance := find_disturbance(summary)):
            self.warn(f"{turn.folder}: {disturbance}; figures may be too low")
        # As many models as there are runs.
        for name in turn.arm.own_folders:
            shutil.rmtree(folder / name.lower(), ignore_errors=True)
        training = Path(summary.run_dir).relative_to(self.root).as_posix()
        steps = count_steps(summary)
        return replace(run, folder=training, status="done", losses=losses, steps=steps)

    def _command(self, turn: Turn, folder: Path) -> tuple[list[str], dict[str, str]]:
        arm = turn.arm
        # Programs beside this Python are found, too: what Axolotl starts (accelerate) lies there.
        folders = (self.environment.get("PATH"), str(Path(sys.executable).parent))
        environment = {**self.environment, "PATH": os.pathsep.join(filter(None, folders))}
        own = {name: str(folder / name.lower()) for name in arm.own_folders}
        environment |= {name: own[name] for name in own if name.isupper()}
        command = list(arm.command)
        if arm.config is not None:
            config = folder / "config.yml"
            yaml = importlib.import_module("yaml")
            changed = {**arm.config, **{name: own[name] for name in own if name.islower()}}
            config.write_text(yaml.safe_dump(changed, sort_keys=False), encoding="utf-8")
            command = [word.replace("{config}", str(config)) for word in command]
        verb = ["run", "--measure"] if arm.is_accelerated else ["measure"]
        words = [sys.executable, "-m", "fast_axolotl", *verb, "--quiet"]
        words += ["--data-path", self.plan.data_path] if self.plan.data_path else []
        if self.plan.profile_steps:
            words += ["--profile-steps", str(self.plan.profile_steps)]
        return [*words, "--output", str(folder), "--", *command], environment

    def _tell_progress(self, turn: Turn, begin: float) -> None:
        run_seconds = self.clock() - begin
        total, done = len(self.plan.turns()), len(self.state.runs)
        most = f"{'up to ' * (self.plan.pairs > LEAST_PAIRS)}{self.plan.pairs}"
        part = "warm-up" if turn.pair < 0 else f"pair {turn.pair + 1} of {most}"
        left = None
        if done:
            left = max(0.0, self.state.seconds / done * (total - done) - run_seconds)
        self.progress(f"{turn.arm.name}, {part}", done, total, run_seconds, left)

    def _dedupe(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Figures of the trial, and one sentence; or why there are none."""
        folder = self.root / "dedupe"
        folder.mkdir(parents=True, exist_ok=True)
        trial, result, log = (folder / name for name in ("trial.json", "result.json", "log.txt"))
        result.unlink(missing_ok=True)
        write_text(trial, to_json(config))
        # Axolotl's function has to be its own here; ours is called by name.
        variables = {**self.environment, "FAST_AXOLOTL": "0", "AXOLOTL_DO_NOT_TRACK": "1"}
        variables["HF_DATASETS_CACHE"] = str((folder / "cache").absolute())
        begin, total = self.clock(), len(self.state.runs)

        def tick() -> None:
            self.progress("dedupe alone", total, total, self.clock() - begin, None)

        command = (sys.executable, "-m", _DEDUPE_WORKER, str(trial), str(result))
        code = self.launch(command, variables, log, tick)
        try:
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {"reason": f"it ended with exit code {code}", "log_tail": read_tail(log)}
        shutil.rmtree(folder / "cache", ignore_errors=True)
        if found.get("reason"):
            return {**found, "sentence": f"Dedupe alone was not measured: {found['reason']}."}
        gain = compare_runs(found["our_seconds"], found["stock_seconds"])
        gains = {"speed_up": gain.value, "speed_up_low": gain.low, "speed_up_high": gain.high}
        speed = f"{gain.value:,.1f}× the speed ({gain.low:,.1f} to {gain.high:,.1f})"
        rows = f"{found['rows']:,} rows, same {found['kept']:,} kept"
        return {**found, **gains, "sentence": f"Dedupe alone, {rows}: {speed}."}

    def save(self) -> None:
        """Keep how far it has come."""
        write_text(self.root / _STATE_FILE, to_json(self.state))

    def _write(self) -> ProtocolResult:
        """Keep what is known by now."""
        self.save()
        protocol = build_protocol(self.plan, self.state, self.figures, self.notes, self.end)
        write_text(self.root / PROTOCOL_FILE, to_json(protocol))
        return protocol


def run_trial(
    running: Running, micro_batch: int, accumulation: int, kind: str = "micro", **keys: Any
) -> Trial:
    """A trial of the only arm of a plan: as it was recorded, or made now.

    What has run is found again by its name, ``runs/03-micro-4x16``; a trial that was cut off, or
    failed for another reason than memory, is made again. Memory that runs out is an answer.
    ``{micro_batch}`` and ``{accumulation}`` in the command, and two keys of the configuration,
    become the sizes; ``keys`` are more of the configuration.
    """
    root, state, [arm] = running.root, running.state, running.plan.arms
    trial = Trial(micro_batch=micro_batch, accumulation=accumulation, outcome="failed")
    name = f"{kind}-{micro_batch}x{accumulation}"
    kept = [at for at, run in state.runs.items() if f"-{name}-" in f"{run.folder}-"]
    number = kept[0] if kept else max(state.runs, default=0) + 1
    if kept:
        with contextlib.suppress(DataError):
            found = _read_trial(trial, state.runs[number], root)
            if found.outcome != "failed":
                return found
    words = (word.replace("{micro_batch}", str(micro_batch)) for word in arm.command)
    command = tuple(word.replace("{accumulation}", str(accumulation)) for word in words)
    sizes = {"micro_batch_size": micro_batch, "gradient_accumulation_steps": accumulation}
    config = None if arm.config is None else {**arm.config, **sizes, **keys}
    turn = Turn(number=number, arm=replace(arm, name=name, command=command, config=config), pair=0)
    running.save()  # a folder with a run and no state is not continued
    state.runs[number] = running.run_turn(turn)
    running.save()
    return _read_trial(trial, state.runs[number], root)


def find_out_of_memory(code: int | None, log: Path) -> str:
    """The line that says that memory ran out, or that the run was killed; empty where none does."""
    lines = read_last_lines(log, _LOG_BYTES, num_bytes=_LOG_BYTES)
    killed = "signal 9 ended it, as when memory runs out" if code in _KILLED else ""
    return next((line.strip() for line in lines if _OUT_OF_MEMORY.search(line)), killed)


def open_state(folder: Path, plan: Plan) -> State:
    """The state of a new protocol, or of one that was interrupted."""
    path = folder / _STATE_FILE
    # Relative paths in the commands and in the configuration start there.
    asked = {**plan.identity(), "working folder": str(Path.cwd())}
    identity = json.loads(json.dumps(asked, default=str))
    if not path.exists():
        if folder.is_dir() and any(item.name != _LOCK_FILE for item in folder.iterdir()):
            raise UsageError(f"{folder} is not empty and holds no protocol; pass another --output")
        seed = random.randrange(2**32) if plan.seed is None else plan.seed
        return State(identity=identity, started=time.time(), seed=seed)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != STATE_SCHEMA:
            raise ValueError(f"its schema is {data['schema']!r}")
        runs = {int(number): run for number, run in data["runs"].items()}
        found = from_plain(State, {**data, "runs": runs})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"this is not the state of a protocol of this version ({error}); pass another --output",
            path=str(path),
        ) from None
    changed = [name for name in identity if found.identity.get(name) != identity[name]]
    if changed:
        raise UsageError(
            f"{folder} holds another protocol: {', '.join(changed)} changed; pass another "
            "--output, or the same command from the same folder again"
        )
    return found


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[tuple[int]]:
    """Locks a folder, which is made if need be; what a run has to inherit to keep it locked."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(
            f"cannot hold a protocol: {error.strerror or error}; pass another --output",
            path=str(folder),
        ) from error
    try:
        begun = time.monotonic()
        # A file system that cannot lock, as some over a network, locks nothing.
        with contextlib.suppress(OSError):
            while True:
                try:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.05)
                if time.monotonic() - begun > _PATIENCE_SECONDS:
                    holder = os.pread(opened, 32, 0).decode(errors="replace").strip() or "unknown"
                    raise UsageError(
                        f"{folder} is in use: process {holder} or a run that it started is "
                        "running; wait for it, or stop it"
                    )
        os.ftruncate(opened, 0)
        os.pwrite(opened, str(os.getpid()).encode(), 0)
        yield (opened,)
    finally:
        os.close(opened)


def _read_trial(trial: Trial, run: ArmRun, root: Path) -> Trial:
    """What a run has left."""
    trial = replace(trial, folder=run.folder, reason=run.log_tail)
    if run.status != "done":
        full = find_out_of_memory(run.exit_code, root / run.folder / "log.txt")
        return replace(trial, outcome="out of memory", reason=full) if full else trial
    record = choose_training(read_trainings(root / run.folder))
    summary = summarise(record)
    unit, rate = "tokens/s", summary.tokens_per_second
    if rate is None and summary.samples_per_second is not None:
        unit, rate = "samples/s", summary.samples_per_second
    # The 95 % interval of the mean step time, as a share of it.
    first, error = summary.first_steady_step, None
    walls = [
        wall
        for rank, lines in record.ranks.items()
        for block in lines.blocks
        for step, wall in enumerate(block.walls or (), block.first_step)
        if rank == summary.deciding_rank and block.phase == "steady" and step >= (first or 0)
    ]
    if len(walls) > 1:
        spread = statistics.stdev(walls) / statistics.fmean(walls)
        error = t_quantile(len(walls) - 1.0) * spread / math.sqrt(len(walls))
    held = summary.settings.get("cuda_memory")
    held = held if isinstance(held, dict) else {}
    return replace(
        trial,
        outcome="ran",
        reason="" if rate else summary.reasons.get("tokens_per_second", ""),
        ranks=summary.data_parallel_size or max(1, summary.world_size),
        rate=rate,
        low=None if rate is None or error is None else rate / (1 + error),
        high=None if rate is None or error is None or error >= 1 else rate / (1 - error),
        unit=unit,
        step_seconds=summary.step_p50_seconds,
        stall=summary.stall_fraction,
        peak_bytes=summary.gpu_peak_allocated_bytes,
        held_bytes=max(summary.gpu_memory_bytes or 0, held.get("reserved_peak") or 0) or None,
        total_bytes=held.get("total"),
    )
