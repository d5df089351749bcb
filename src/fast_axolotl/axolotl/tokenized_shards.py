"""Keep tokenised rows in shards on disk, so that an interrupted preprocess can continue.

``Dataset.map`` writes one file per process, worth nothing until it is complete, under a hash of
pickled objects that another process does not find again; ``axolotl preprocess`` turns its cache off
altogether. ``tokenize_in_shards`` makes the same rows in shards of 1,000 to 50,000, by their number
alone, each through ``Dataset._map_single``, which renames a file into place when it is complete.

A shard's name is a digest of the rows that went in. Its folder's is one of all that turns them into
tokens: function, strategy and prompter with their options, the tokenizer (its Rust part as JSON,
template, special tokens), the source files of their classes, the day where a template asks for it,
and versions. What cannot be described the same way in every process is refused, and ``map`` runs.
So a shard that is found is the one that would be made: after a crash, after rows were appended or
corrected, with another number of processes.

The folders lie in the cache of HF datasets, each locked by the process that uses it. A folder goes
when that process ends after the prepared dataset was saved; one that a killed process left goes
with the first preprocess after a week. As with ``map``, the tokens are on disk once. Cost: a pass
over the rows at 1 GB/s or more, and some milliseconds a shard.

Workers are forked and inherit everything: nothing is pickled, and there is no manager process. A
worker that dies ends the whole with an error; what is finished stays.
"""

from __future__ import annotations

import atexit
import datetime
import fcntl
import hashlib
import multiprocessing
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cache, partial
from importlib import metadata
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path
from types import FunctionType, MethodType
from typing import IO, Any

import pyarrow as pa

from fast_axolotl.axolotl.patching import LOG, MARK, Final, Unfamiliar

BATCH_ROWS = 1000
"""As ``map`` writes them in any case."""
_LEAST_ROWS = 5000
"""Fewer are done again in a few seconds."""
_SHARDS = 64
"""Of most datasets: an interruption costs this part of the work, for each worker."""
_MOST_SHARD_ROWS = 50_000
_MOST_AGE_SECONDS = 7 * 24 * 3600.0
_LOCK = "lock"
_DESC = "Tokenizing Prompts"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_PACKAGES = ("axolotl", "transformers", "tokenizers", "datasets", "jinja2", "fast-axolotl")
_PASSING = {"deprecation_warnings", "_in_target_context_manager"}
"""Attributes of tokenizers that say what has happened, not what will."""

_Job = tuple[Path, tuple[int, int]]
"""A shard, and where its rows begin and end."""

_held: dict[Path, IO[bytes]] = {}
"""Folders that this process uses, with the lock of each."""

_saved: set[Path] = set()
"""Those whose rows are in a prepared dataset."""


def tokenize_in_shards(
    dataset: Any, function: Callable[..., Any], *, num_proc: int | None, keep_in_memory: bool | None
) -> Any:
    """``dataset.map(function, ...)`` over batches, continued if an earlier process began it."""
    folder = None
    if len(dataset) >= _LEAST_ROWS and not keep_in_memory:
        try:
            folder = _work_folder(_key(dataset, function))
        except (Unfamiliar, OSError) as refusal:
            LOG.info("fast-axolotl: tokenising starts over if it is interrupted: %s", refusal)
    made = None if folder is None else _map(dataset, function, num_proc, folder)
    if made is not None:
        return made
    return dataset.map(
        function,
        num_proc=num_proc,
        remove_columns=dataset.features.keys(),
        keep_in_memory=keep_in_memory,
        desc=_DESC,
        batched=True,
        batch_size=BATCH_ROWS,
    )


def note_saved() -> None:
    """The rows tokenised so far are in a prepared dataset: their shards are no longer needed.

    They stay until the process ends, since its datasets are views of these files.
    """
    _saved.update(_held)


# Shards.


def _map(dataset: Any, function: Callable[..., Any], num_proc: int | None, folder: Path) -> Any:
    """The whole, of shards that are there and shards that are made; None if their types differ."""
    from datasets import Dataset, concatenate_datasets
    from datasets.utils import tqdm

    num_rows = len(dataset)
    step = min(-(-num_rows // (_SHARDS * BATCH_ROWS)) * BATCH_ROWS, _MOST_SHARD_ROWS)
    parts = [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
    rows = dataset.with_format("arrow")
    paths = [folder / f"{_digest(rows[slice(*part)])}.arrow" for part in parts]
    whole = set(filter(_is_whole, paths))
    shards = list(zip(paths, parts, strict=True))
    done = sum(stop - start for path, (start, stop) in shards if path in whole)
    if done:
        line = f"tokenising resumes after {done:,} of {num_rows:,} rows"
        print(f"fast-axolotl: {line}", file=sys.stderr)
    desc = _DESC + (f" (num_proc={num_proc})" if num_proc else "")
    with tqdm(unit=" examples", initial=done, total=num_rows, desc=desc) as bar:
        # Shards of equal rows are one.
        jobs = [(path, part) for path, part in dict(shards).items() if path not in whole]
        if num_proc:
            _in_processes(dataset, function, jobs, min(num_proc, len(jobs)), bar.update)
        else:
            for count in _make_shards(dataset, function, jobs):
                bar.update(count)
    made = [Dataset.from_file(str(path)) for path in paths]
    is_alike = all(shard.features == made[0].features for shard in made)
    return concatenate_datasets(made) if is_alike else None


def _make_shards(dataset: Any, function: Callable[..., Any], jobs: Sequence[_Job]) -> Iterator[int]:
    """Writes shards and gives the number of rows done since it last did."""
    from datasets import Dataset

    for path, (start, stop) in jobs:
        steps = Dataset._map_single(
            shard=dataset.select(range(start, stop)),
            function=function,
            batched=True,
            batch_size=BATCH_ROWS,
            remove_columns=list(dataset.features),
            cache_file_name=str(path),
            new_fingerprint=path.stem,
        )
        yield from (content for _, is_done, content in steps if not is_done)


def _in_processes(
    dataset: Any,
    function: Callable[..., Any],
    jobs: Sequence[_Job],
    num_workers: int,
    update: Callable[[int], Any],
) -> None:
    """Every worker makes each ``num_workers``-th shard, and tells of its rows through a pipe."""
    context: Any = multiprocessing.get_context("fork")

    def work(sender: Any, mine: Sequence[_Job]) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        # An orphan must not hold what its owner has lost, and ends at its next word to nobody.
        for end in (*_held.values(), *workers):
            end.close()
        with suppress(BrokenPipeError):
            try:
                for count in _make_shards(dataset, function, mine):
                    sender.send(count)
            except Exception as error:  # noqa: BLE001  the owner raises it
                sender.send((error, traceback.format_exc()))

    workers: dict[Any, Any] = {}
    try:
        for number in range(num_workers):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (sender, jobs[number::num_workers])
            workers[receiver] = context.Process(target=work, args=arguments, daemon=True)
            workers[receiver].start()
            sender.close()
        running = list(workers)
        while running:
            ready: list[Any] = wait(running)
            for receiver in ready:
                try:
                    content = receiver.recv()
                except EOFError:
                    running.remove(receiver)
                    workers[receiver].join()
                    code = workers[receiver].exitcode
                    if code:
                        raise RuntimeError(
                            f"a tokenising worker died with exit code {code}"
                        ) from None
                    continue
                if isinstance(content, tuple):
                    error, place = content
                    shown = error.error if isinstance(error, Final) else error
                    shown.__cause__ = RuntimeError(f"in a tokenising worker:\n{place}")
                    raise error
                update(content)
    finally:
        for process in workers.values():
            process.terminate()
            process.join()


def _digest(table: pa.Table) -> str:
    """Of all values and types of a table, not of its metadata, which differ from run to run."""
    plain = table.replace_schema_metadata(None)
    digest = hashlib.sha256(str(plain.schema).encode())
    for batch in plain.to_batches(max_chunksize=BATCH_ROWS):
        digest.update(batch.serialize())
    return digest.hexdigest()[:32]


def _is_whole(path: Path) -> bool:
    """Whether a shard is there, to its end: a machine may have lost its power since."""
    try:
        with path.open("rb") as file:
            file.seek(-len(_END_OF_STREAM), os.SEEK_END)
            return file.read() == _END_OF_STREAM
    except OSError:
        return False


# Folders.


def _work_folder(key: str) -> Path:
    """The folder of this key, locked by this process."""
    from datasets import config

    root = Path(config.HF_DATASETS_CACHE) / "fast-axolotl"
    folder = root / key
    if folder not in _held:
        root.mkdir(parents=True, exist_ok=True)
        for other in root.iterdir():
            if other != folder and other.is_dir():
                with suppress(OSError):
                    age = time.time() - max(p.stat().st_mtime for p in (other, *other.iterdir()))
                    left = _take(other) if age > _MOST_AGE_SECONDS else None
                    if left is not None:
                        shutil.rmtree(other, ignore_errors=True)
                        left.close()
        folder.mkdir(exist_ok=True)
        lock = _take(folder)
        if lock is None:
            raise Unfamiliar("another process is tokenising the same data")
        if not _held:
            atexit.register(_leave, os.getpid())
        _held[folder] = lock
        for path in folder.iterdir():
            # What a killed process had begun.
            if path.suffix != ".arrow" and path.name != _LOCK:
                path.unlink(missing_ok=True)
    _saved.discard(folder)
    return folder


def _take(folder: Path) -> IO[bytes] | None:
    """The lock of a folder; ``None`` where somebody has it, or has just removed the folder."""
    lock = (folder / _LOCK).open("wb")
    if take_lock(lock.fileno(), folder / _LOCK):
        return lock
    lock.close()
    return None


def take_lock(lock: int, mark: Path) -> bool | None:
    """Lock an open file; ``False``: another has it, or removed it; ``None``: there are no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return mark.exists() and os.path.samestat(os.fstat(lock), mark.stat())


def _leave(owner: int) -> None:
    """At the end of the process that made them: remove what was saved, let the rest go."""
    if os.getpid() != owner:
        return
    for folder, lock in _held.items():
        if folder in _saved:
            shutil.rmtree(folder, ignore_errors=True)
        lock.close()
    _held.clear()


# What turns rows into tokens, described.


def _key(dataset: Any, function: Callable[..., Any]) -> str:
    versions = []
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    text = describe(function)
    if "strftime_now" in text:
        versions.append(str(datetime.date.today()))
    parts = (text, *versions, repr(dataset.features), str(dataset.data.schema.names))
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def describe(value: Any, seen: dict[int, Any] | None = None) -> str:
    """A text that is the same in every process for what behaves the same."""
    seen = {} if seen is None else seen
    kind = type(value)
    package, name = kind.__module__.partition(".")[0], kind.__qualname__
    if value is None or kind in (bool, int, float, str, bytes) or name == "AddedToken":
        return repr(value)
    if id(value) in seen:
        return f"#{list(seen).index(id(value))}"
    seen[id(value)] = value  # kept, so that no other object gets its id
    inner = partial(describe, seen=seen)
    if isinstance(value, Enum):
        return f"{_describe_class(kind, seen)}.{value.name}"
    if isinstance(value, set | frozenset):
        return f"{name}({', '.join(sorted(map(inner, value)))})"
    if isinstance(value, list | tuple):
        return f"{name}({', '.join(map(inner, value))})"
    if isinstance(value, Mapping):
        return f"{name}({', '.join(map(inner, chain(*value.items())))})"
    if isinstance(value, partial):
        return f"partial {inner((value.func, value.args, value.keywords))}"
    if isinstance(value, MethodType):
        return f"method {inner((value.__func__, value.__self__))}"
    if isinstance(value, FunctionType):
        if hasattr(value, MARK):
            return inner(vars(value)["__wrapped__"])  # ours, which changes no result
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        held = inner([value.__defaults__, value.__kwdefaults__, cells])
        return f"{value.__qualname__} {_file_digest(value.__module__)} {held}"
    if isinstance(value, type):
        return _describe_class(value, seen)
    if package == "tokenizers" and name == "Tokenizer":
        # Truncation and padding come first, and every call sets them.
        rust = value.to_str().partition('"added_tokens"')[2]
        return f"{rust} {value.encode_special_tokens}"
    if package not in ("axolotl", "transformers") or not hasattr(value, "__dict__"):
        raise Unfamiliar(f"an object of type {kind.__module__}.{name}")
    attributes = {key: item for key, item in vars(value).items() if key not in _PASSING}
    return f"{_describe_class(kind, seen)} {inner(attributes)}"


def _describe_class(kind: type, seen: dict[int, Any]) -> str:
    """Its name and bases with their source files, and methods that say more than these."""
    parts = []
    for base in kind.__mro__:
        if base.__module__ in ("builtins", "abc", "typing", "enum"):
            continue
        functions = (item for item in vars(base).values() if isinstance(item, FunctionType))
        more = [
            describe(item, seen)
            for item in functions
            if item.__closure__ or item.__module__ != base.__module__
        ]
        parts += [base.__qualname__, _file_digest(base.__module__), *more]
    return f"class {' '.join(parts)}"


@cache
def _file_digest(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        raise Unfamiliar(f"{module} has no source file")
    return f"{module} {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]}"
