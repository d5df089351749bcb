"""How far a protocol has come, kept in its folder so that the same command goes on from there.

Files are written beside and renamed, so that a power cut leaves the last state or the one before.

One protocol at a time works in a folder. The lock is a file that is held open, by this process and
by the runs that it starts: a run that outlives a protocol which was killed keeps the next one from
being measured beside it. Whoever comes next waits a while for it, and is then refused.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.protocol.plan import Plan
from fast_axolotl.record.codec import from_plain, to_plain
from fast_axolotl.record.protocol_result import ArmRun

STATE_FILE = "state.json"
_SCHEMA = 1
_LOCK_FILE = ".lock"
_PATIENCE_SECONDS = 15.0
"""How long the next start waits: a run that was asked to end is given ten."""
_BETWEEN_SECONDS = 0.05


@dataclass(slots=True, kw_only=True)
class State:
    """The runs made so far."""

    schema: int = _SCHEMA
    identity: dict[str, Any]
    started: float
    """Seconds since 1970."""
    runs: dict[int, ArmRun] = field(default_factory=dict)
    """By the number of the turn."""
    dedupe: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """That all runs took, over all sessions."""
        return sum(run.seconds or 0.0 for run in self.runs.values())

    def save(self, folder: Path) -> None:
        """Write it down."""
        write_json(folder / STATE_FILE, to_plain(self))


def open_state(folder: Path, plan: Plan) -> State:
    """The state of a new protocol, or of one that was interrupted."""
    path = folder / STATE_FILE
    # Relative paths in the commands and in the configuration start there.
    asked = {**plan.identity(), "working folder": str(Path.cwd())}
    identity = json.loads(json.dumps(asked, default=str))
    if not path.exists():
        if folder.is_dir() and any(item.name != _LOCK_FILE for item in folder.iterdir()):
            raise UsageError(f"{folder} is not empty and holds no protocol; pass another --output")
        return State(identity=identity, started=time.time())
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != _SCHEMA:
            raise ValueError(f"its schema is {data['schema']!r}")
        runs = {int(number): run for number, run in data["runs"].items()}
        found = from_plain(State, {**data, "runs": runs})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"this is not the state of a protocol of this version ({error}); pass another --output",
            path=str(path),
        ) from None
    before, now = dict(_flatten(found.identity)), dict(_flatten(identity))
    for name in [*now, *before]:
        if before.get(name) != now.get(name):
            raise UsageError(
                f"{folder} holds a protocol with another command: {name} was {before.get(name)!r} "
                f"and is now {now.get(name)!r}; pass another --output, or the same command again"
            )
    return found


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file beside and rename it."""
    beside = path.with_name(f".{path.name}.new")
    text = json.dumps(to_plain(data), indent=1, ensure_ascii=False, default=str)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise DataError(
            f"cannot be written: {error.strerror or error}; free space or choose another --output",
            path=str(path),
        ) from error


@contextmanager
def hold(folder: Path, warn: Callable[[str], None] = lambda line: None) -> Iterator[tuple[int]]:
    """Locks a folder, which is made if need be; what a run has to inherit to keep it locked."""
    try:
        import fcntl
    except ImportError:
        raise UsageError("a protocol needs Linux or macOS: this system has no locks") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DataError(
            f"cannot hold a protocol: {error.strerror or error}; pass another --output",
            path=str(folder),
        ) from error
    try:
        begun, is_warned = time.monotonic(), False
        # A file system that cannot lock, as some over a network, locks nothing.
        with suppress(OSError):
            while True:
                try:
                    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    waited = time.monotonic() - begun
                holder = os.pread(opened, 32, 0).decode(errors="replace").strip() or "unknown"
                state = f"{folder} is in use: process {holder} or a run that it started is running"
                if waited > _PATIENCE_SECONDS:
                    raise UsageError(f"{state}; wait for it, or stop it")
                # Whoever asks whether a folder is locked has it for a moment.
                if waited > 1.0 and not is_warned:
                    warn(f"{state}; waiting up to {_PATIENCE_SECONDS:.0f} s for it to end")
                    is_warned = True
                time.sleep(_BETWEEN_SECONDS)
        os.ftruncate(opened, 0)
        os.pwrite(opened, str(os.getpid()).encode(), 0)
        yield (opened,)
    finally:
        os.close(opened)


def _flatten(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting with its path: ``arms.drop-in.config.seed``."""
    for name, inner in value.items():
        path = f"{above}.{name}" if above else name
        if isinstance(inner, Mapping):
            yield from _flatten(inner, path)
        else:
            yield path, " ".join(map(str, inner)) if path.endswith(".command") else inner
