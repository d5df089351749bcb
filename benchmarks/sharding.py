"""One dataset on many ranks: bytes, first batch, throughput, evenness. ``make bench-sharding``.

The same rows of ``id`` and ``text``, about 1 KB each, as JSON lines, as Parquet with 1,000 rows in
a group and as 40 gzip files; and in the formats of Mosaic and LitData, made by their own writers.
A shard is opened and read to its end, as a rank would; the shards of a pass are read by as many
processes as there are cores (``shard_peer``), one shard after another.

The first pass is checked and not timed: which rows came, how often and with which text, how many
bytes each shard read. Then passes are timed, reader by reader, A B C, A B C. Where a peer's first
pass takes longer than ``--most-seconds``, its later shards are left out, its figures are those of
the shards that it read, and a shard is timed for so long at most; ours reads all of everything.
Imports are outside the timing. The page cache is warm: on a cold one, bytes weigh more than here.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.children import module_environment
from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.corpus import conversations
from benchmarks.result import Case, Goal, Measurement, Result, Timing
from benchmarks.worker import Worker, WorkerError
from fast_axolotl.cli.race import interleave
from fast_axolotl.errors import UsageError
from fast_axolotl.system import usable_cores

CASES = {"small": 36_001, "small-shuffled": 36_001, "large": 300_001, "large-shuffled": 300_001}
"""Rows. One more than a round number: no number of shards divides them."""
OURS = "fast-axolotl"
MANY_SHARDS = 1024
"""Of ours alone, where rows are shuffled; checked, not raced."""
_SEED = 7
_TINY_ROWS = 130
_GROUP_ROWS = 1000
_GZIP_FILES = 40
_MOST_READ = 1.3
"""Times the data, over all shards together."""
_NOTES = (
    "read times: bytes by system calls of all shards together over the size of the files. LitData "
    "maps files: resident pages, an upper bound; on a cold cache it asks for whole chunks",
    "HF shuffles in a buffer of 1,000 rows, ours in windows of an eighth of the memory budget, "
    "Mosaic in blocks of 262,144 rows, LitData inside chunks",
    "Mosaic repeats rows until all ranks have the same number; LitData leaves rows out for that, "
    "unless drop_last=False, as here; HF gives what it deals",
    "HF deals files, and row groups of Parquet, where their number is a multiple of the ranks; "
    "elsewhere every rank reads everything and keeps its rows; its pause of 5 s after shuffled "
    "Parquet is switched off",
)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A reader, what it reads and how."""

    name: str
    reader: str
    """Which of ``shard_peer.READERS``."""
    file: str
    """In the folder of a dataset."""
    rival: str | None = None
    """Which of ours does the same work; ``None`` for ours."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_raced: bool = True
    """Otherwise it is only checked, for how even its shards are, where rows are shuffled."""
    is_wide: bool = False
    """Whether it is read on ``MANY_SHARDS``, too."""


_JSONL, _PARQUET, _GZIP = "rows.jsonl", "rows.parquet", "gzip/*.jsonl.gz"
_even = partial(Entry, rival=None, is_raced=False)
ENTRIES = (
    Entry(f"{OURS} JSONL", OURS, _JSONL, is_wide=True),
    Entry(f"{OURS} Parquet", OURS, _PARQUET, is_wide=True),
    Entry(f"{OURS} dicts", OURS, _PARQUET, settings={"is_dicts": True}),
    Entry(f"{OURS} gzip", OURS, _GZIP),
    Entry("HF JSONL", "HF", _JSONL, f"{OURS} JSONL"),
    Entry("HF Parquet", "HF", _PARQUET, f"{OURS} Parquet"),
    Entry("HF gzip", "HF", _GZIP, f"{OURS} gzip"),
    Entry("Mosaic", "Mosaic", "mds", f"{OURS} dicts"),
    Entry("LitData", "LitData", "chunks", f"{OURS} dicts", settings={"drop_last": False}),
    _even(f"{OURS} JSONL, drop", OURS, _JSONL, settings={"even": "drop"}, is_wide=True),
    _even(f"{OURS} Parquet, drop", OURS, _PARQUET, settings={"even": "drop"}),
    _even("LitData, drop_last", "LitData", "chunks", settings={"drop_last": True}),
)

READERS = tuple(dict.fromkeys(entry.reader for entry in ENTRIES))
_WAITS = ("first_batch_seconds", "worst_first_batch_seconds")
_COUNTS = ("missing", "repeated", "changed")
_PARTS = {
    "bytes": ("shards", "read_times", "shard_bytes", "largest_bytes", *_WAITS),
    "rows": ("rows_least", "rows_most", "batches_least", "batches_most", *_COUNTS),
}
"""The figures of a table each."""

Answer = dict[str, Any]
"""What a process says of a shard."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("sharding", __doc__)
    parser.add_argument("--cases", type=names, default=[*CASES][:2], help=f"of {', '.join(CASES)}")
    parser.add_argument("--shards", type=names, default=["1", "8", "64"], help="numbers of shards")
    parser.add_argument("--readers", type=names, default=[], help=f"of {', '.join(READERS)}")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes of every reader")
    parser.add_argument("--most-seconds", type=float, default=1.0, help="of a peer's first pass")
    parser.add_argument("--peer-python", help="python of an environment with the peers")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, one repeat")
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """Every case on every number of shards."""
    chosen = check_names("case", options.cases, list(CASES))
    if not all(text.isdigit() and int(text) for text in options.shards) or options.repeats < 1:
        raise UsageError("shards must be numbers of at least 1, and repeats at least 1")
    readers = check_names("reader", options.readers, READERS)
    scale, repeats = (10, 1) if options.quick else (1, options.repeats)
    cases: list[Case] = []
    checksums: dict[Path, list[int]] = {}
    seconds: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        pools, left_out = _start(readers, options.peer_python, folder, stack, tell)
        for name, rows in {
            "tiny": _TINY_ROWS * scale,
            **{name: CASES[name] for name in chosen},
        }.items():
            place = folder / name.removesuffix("-shuffled")
            if place not in checksums:
                tell(f"writing {rows // scale:,} rows in every format")
                checksums[place], seconds[place.name] = _write(place, rows // scale, pools)
            seed = _SEED if name.endswith("shuffled") else None
            counts = [*map(int, options.shards), *([MANY_SHARDS] if seed and scale == 1 else [])]
            for shards in [usable_cores()] if name == "tiny" else counts:
                data = _Sharded(pools, place, checksums[place], seed, shards)
                passes = 1 if name == "tiny" else repeats if shards < MANY_SHARDS else 0
                found = data.race(name, passes, options.most_seconds, left_out, tell)
                # What is imported late is imported with the tiny one, whose figures are not kept.
                cases += found if name != "tiny" else []
    versions = {name: pool[0].hello["version"] for name, pool in pools.items() if name != OURS}
    return Result(cases=cases, facts={"seconds": seconds}, notes=_NOTES, versions=versions)


def _start(
    readers: Sequence[str], python: str | None, folder: Path, stack: ExitStack, tell: Tell
) -> tuple[dict[str, list[Worker]], dict[str, str]]:
    """As many processes of each reader as there are cores, or why it takes no part."""
    pools: dict[str, list[Worker]] = {}
    left_out: dict[str, str] = {}
    places = {"HF_HOME": str(folder / "hf"), "XDG_CACHE_HOME": str(folder / "cache")}
    env = module_environment(HF_HUB_OFFLINE="1", **places)
    script = str(Path(__file__).with_name("shard_peer.py"))
    for reader in readers:
        tell(f"starting {reader}")
        command = [sys.executable, "-m", "benchmarks.shard_peer", reader]
        if reader != OURS:
            command = [python or "", "-I", script, reader]
        logs = [folder / f"{reader}-{number}.txt" for number in range(usable_cores())]
        try:
            if reader != OURS and python is None:
                raise WorkerError("no --peer-python")
            with ThreadPoolExecutor(len(logs)) as threads:
                pools[reader] = list(threads.map(partial(Worker, command, env=env), logs))
        except WorkerError as error:
            left_out[reader] = str(error)
        for worker in pools.get(reader, ()):
            stack.enter_context(worker)
    return pools, left_out


def _write(
    place: Path, count: int, pools: Mapping[str, Sequence[Worker]]
) -> tuple[list[int], dict[str, float]]:
    """The rows in every format; gives checksums of their texts, and the seconds of each writer."""
    (place / "gzip").mkdir(parents=True)
    rows = conversations(count)
    texts = [" ".join(message["content"] for message in row["messages"]) for row in rows]
    lines = [
        json.dumps({"id": index, "text": text}, ensure_ascii=False) + "\n"
        for index, text in enumerate(texts)
    ]
    (place / _JSONL).write_text("".join(lines), encoding="utf-8")
    table = pa.table({"id": range(count), "text": texts})
    pq.write_table(table, place / _PARQUET, row_group_size=_GROUP_ROWS)
    for number in range(_GZIP_FILES):
        part = lines[count * number // _GZIP_FILES : count * (number + 1) // _GZIP_FILES]
        packed = gzip.compress("".join(part).encode(), 1)
        (place / "gzip" / f"{number:02}.jsonl.gz").write_bytes(packed)
    seconds = {}
    for reader, file in (("Mosaic", "mds"), ("LitData", "chunks")):
        if reader in pools:
            start = time.perf_counter()
            pools[reader][0].ask("write", path=str(place / file), rows=str(place / _JSONL))
            seconds[reader] = time.perf_counter() - start
    return [zlib.crc32(text.encode()) for text in texts], seconds


@dataclass(frozen=True, slots=True)
class _Sharded:
    """A dataset on a number of shards."""

    pools: Mapping[str, Sequence[Worker]]
    place: Path
    checksums: Sequence[int]
    """Of the text of each row."""
    seed: int | None
    shards: int

    def race(
        self, name: str, repeats: int, most_seconds: float, left_out: Mapping[str, str], tell: Tell
    ) -> list[Case]:
        """Checks everybody, then times in turn those who race."""
        name, left_out = f"{name}-{self.shards}", dict(left_out)
        checked: dict[Entry, list[Answer]] = {}
        timed: dict[str, list[list[Answer]]] = {}
        most: dict[Entry, float] = {}
        for entry in ENTRIES:
            is_even = entry.is_raced or (self.seed is not None and self.shards > 1)
            is_asked = is_even and (entry.is_wide or self.shards < MANY_SHARDS)
            if entry.reader not in self.pools or not is_asked:
                continue
            tell(f"{name}: {entry.name} is checked")
            most[entry] = 1e9 if entry.reader == OURS else most_seconds
            try:
                checked[entry], _ = self._read(entry, range(self.shards), most[entry], True)
            except WorkerError as error:
                left_out[entry.name] = str(error)

        def timed_pass(entry: Entry) -> float:
            answers, seconds = self._read(entry, range(len(checked[entry])), most[entry], False)
            timed.setdefault(entry.name, []).append(answers)
            return seconds * _rows(checked[entry]) / _rows(answers)

        runs = {entry.name: partial(timed_pass, entry) for entry in checked if entry.is_raced}
        seconds = interleave(runs, repeats, lambda text: tell(f"{name}: {text}"))
        figures = {entry.name: self._figures(entry, checked[entry], timed) for entry in checked}
        goals = []
        for found, values in figures.items():
            apart = values["batches_most"] - values["batches_least"]
            if found.startswith(OURS) and ", " in found:
                goals.append(Goal(f"batches, most less least: {found}", 0, "batches", apart))
            elif found.startswith(OURS):
                goals.append(Goal(f"read in all: {found}", _MOST_READ, "×", values["read_times"]))
        text = f"{len(self.checksums):,} rows on {self.shards} shards"
        make = partial(Case, text=text, rows=len(self.checksums))
        timings = [
            Timing(
                name=entry.name,
                version=self.pools[entry.reader][0].hello["version"],
                output="dicts" if "dicts" in f"{entry.name} {entry.rival}" else "Arrow",
                rows=_rows(answers),
                seconds=tuple(seconds[entry.name]),
                reason=_difference(figures[entry.name]),
            )
            for entry, answers in checked.items()
            if entry.is_raced and repeats
        ]
        rivals = {entry.name: entry.rival for entry in checked if entry.rival}
        cases = [make(name=name, timings=timings, rivals=rivals, goals=goals, left_out=left_out)]
        for part, keys in _PARTS.items():
            measurements = [
                Measurement(name=found, values={key: values[key] for key in keys})
                for found, values in figures.items()
            ]
            cases.append(make(name=f"{name}-{part}", measurements=measurements))
        return cases

    def _read(
        self, entry: Entry, shards: Sequence[int], most: float, is_checked: bool
    ) -> tuple[list[Answer], float]:
        """The answers for these shards, as far as they were begun in time, and the seconds that the
        busiest process read; what is done between two shards is left out."""
        waiting, answers = iter(shards), {}
        request: dict[str, Any] = {"path": str(self.place / entry.file), "seed": self.seed}
        request |= {"settings": dict(entry.settings), "is_checked": is_checked}
        request["most_seconds"] = most
        start = time.perf_counter()

        def work(worker: Worker) -> float:
            busy = 0.0
            for shard in waiting:
                answers[shard] = worker.ask("read", shard=[shard, self.shards], **request)
                busy += answers[shard]["seconds"]
                if is_checked and time.perf_counter() - start > most:
                    break
            return busy

        workers = self.pools[entry.reader]
        with ThreadPoolExecutor(len(workers)) as threads:
            seconds = max(threads.map(work, workers))
        return [answers[shard] for shard in sorted(answers)], seconds

    def _figures(
        self, entry: Entry, answers: Sequence[Answer], timed: Mapping[str, list[list[Answer]]]
    ) -> dict[str, Any]:
        """Of the shards that were read; the first batch of a shard is the median of its repeats."""
        files = list(self.place.glob(entry.file if "*" in entry.file else f"{entry.file}/*"))
        size = sum(path.stat().st_size for path in files or [self.place / entry.file])
        repeats = zip(*timed.get(entry.name, [answers]), strict=True)
        waits = [[answer["first_seconds"] for answer in each] for each in repeats]
        firsts = [median(each) for each in waits if None not in each]
        read, rows, batches = (
            [answer[key] for answer in answers] for key in ("read_bytes", "rows", "batches")
        )
        pairs = [pair for answer in answers for pair in answer["checksums"]]
        once = dict(map(tuple, pairs))
        is_whole = len(answers) == self.shards
        return {
            "shards": len(answers),
            "read_times": sum(read) / len(read) * self.shards / size,
            "shard_bytes": round(median(read)),
            "largest_bytes": max(read),
            "first_batch_seconds": median(firsts) if firsts else None,
            "worst_first_batch_seconds": max(firsts, default=None),
            "rows_least": min(rows),
            "rows_most": max(rows),
            "batches_least": min(batches),
            "batches_most": max(batches),
            "missing": len(self.checksums) - len(once) if is_whole else 0,
            "repeated": len(pairs) - len(once),
            "changed": sum(self.checksums[index] != value for index, value in once.items()),
        }


def _rows(answers: Sequence[Answer]) -> int:
    return sum(answer["rows"] for answer in answers)


def _difference(figures: Mapping[str, Any]) -> str | None:
    """How the rows differ from the dataset, each of them once; ``None`` where they do not."""
    return ", ".join(f"{figures[key]} rows {key}" for key in _COUNTS if figures[key]) or None


if __name__ == "__main__":
    main()
