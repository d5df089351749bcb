"""One dataset on many ranks: bytes, first batch, throughput, evenness. ``make bench-sharding``.

The same rows of ``id`` and ``text``, about 1 KB each, as JSON lines, as Parquet with 1,000 rows in
a group and as 40 gzip files; and in Mosaic's and LitData's own formats, made by their writers. A shard is opened and read to its end, as a rank would; the shards of a pass are read by as many
processes as there are cores (``shard_peer``), one shard after another.

The first pass is checked and not timed: which rows came, how often and with which text, how many
bytes each shard read. Then passes are timed, reader by reader, A B C, A B C. Where a peer's
first pass takes longer than ``--most-seconds``, its later shards are left out, and its figures are
those of the shards that it read; ours reads all of them. Imports are outside the timing. The page
cache is warm: on a cold one, bytes weigh more than they do here.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.children import offline_environment
from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.corpus import conversations
from benchmarks.result import Case, Goal, Measurement, Result, Timing
from fast_axolotl.cli import race
from fast_axolotl.cli.race import Worker, WorkerError, interleave
from fast_axolotl.errors import UsageError
from fast_axolotl.system import usable_cores

CASES = {"small": 36_001, "small-shuffled": 36_001, "large": 300_001, "large-shuffled": 300_001}
"""Rows, about 1 KB each. One more than a round number: no number of shards divides them."""
OURS = "fast-axolotl"
MANY_SHARDS = 1024
"""Of ours alone, in a case that is shuffled; read once, not raced."""
_SEED = 7
_TINY_ROWS = 130
_GROUP_ROWS = 1000
_GZIP_FILES = 40
_MOST_READ = 1.3
"""Times the data, over all shards together."""
_NOTES = (
    "read: bytes by system calls of all shards together, over the size of the files. LitData's are "
    "resident pages of the files it maps: an upper bound; on a cold cache it asks the kernel for "
    "whole chunks",
    "Arrow batches of ours and HF's, dicts of Mosaic and LitData; HF shuffles in a buffer of 1,000 "
    "rows, ours in windows of the memory budget, Mosaic and LitData in blocks and chunks",
    "Mosaic repeats rows until all ranks have the same number; LitData leaves rows out for that, "
    "unless drop_last=False; HF gives what it deals",
    "HF deals files, and row groups of Parquet, where their number is a multiple of the ranks; "
    "elsewhere every rank reads all and keeps its rows",
)


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """Otherwise it is only checked, for how even its shards are: once, where rows are shuffled."""


ENTRIES = (
    Entry(name=f"{OURS} JSONL", reader=OURS, file="rows.jsonl"),
    Entry(name=f"{OURS} Parquet", reader=OURS, file="rows.parquet"),
    Entry(name=f"{OURS} dicts", reader=OURS, file="rows.parquet", settings={"is_dicts": True}),
    Entry(name=f"{OURS} gzip", reader=OURS, file="gzip/*.jsonl.gz"),
    Entry(name="HF JSONL", reader="HF", file="rows.jsonl", rival=f"{OURS} JSONL"),
    Entry(name="HF Parquet", reader="HF", file="rows.parquet", rival=f"{OURS} Parquet"),
    Entry(name="HF gzip", reader="HF", file="gzip/*.jsonl.gz", rival=f"{OURS} gzip"),
    Entry(name="Mosaic", reader="Mosaic", file="mds", rival=f"{OURS} dicts"),
    Entry(
        name="LitData",
        reader="LitData",
        file="chunks",
        rival=f"{OURS} dicts",
        settings={"drop_last": False},
    ),
    *(
        Entry(name=name, reader=reader, file=file, settings=settings, is_raced=False)
        for name, reader, file, settings in (
            (f"{OURS} JSONL, drop", OURS, "rows.jsonl", {"even": "drop"}),
            (f"{OURS} JSONL, pad", OURS, "rows.jsonl", {"even": "pad"}),
            (f"{OURS} Parquet, drop", OURS, "rows.parquet", {"even": "drop"}),
            (f"{OURS} Parquet, pad", OURS, "rows.parquet", {"even": "pad"}),
            ("LitData, drop_last", "LitData", "chunks", {"drop_last": True}),
        )
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("sharding", __doc__)
    parser.add_argument("--cases", type=names, default=[*CASES][:2], help=f"of {', '.join(CASES)}")
    parser.add_argument("--shards", type=names, default=["1", "8", "64"], help="numbers of shards")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes of every reader")
    parser.add_argument("--most-seconds", type=float, default=1.5, help="of a peer's first pass")
    parser.add_argument("--peer-python", help="python of an environment with the peers")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, one repeat")
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """Every case at every number of shards."""
    chosen = check_names("case", options.cases, list(CASES))
    if not all(text.isdigit() and int(text) for text in options.shards) or options.repeats < 1:
        raise UsageError("shards must be numbers of at least 1, and repeats at least 1")
    scale, repeats = (10, 1) if options.quick else (1, options.repeats)
    cases: list[Case] = []
    written: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        pools, left_out = _start(options.peer_python, folder, stack, tell)
        tiny, _ = _write(folder / "tiny", _TINY_ROWS, pools)
        for entry in ENTRIES if tiny else ():
            if entry.reader in pools:
                pool = pools[entry.reader]
                request = _request(entry, folder / "tiny", None, is_checked=False)
                pool.read(range(len(pool.workers)), len(pool.workers), request)
        datasets: dict[int, tuple[list[int], dict[str, float]]] = {}
        for name in chosen:
            rows, place = CASES[name] // scale, folder / str(CASES[name])
            if rows not in datasets:
                tell(f"writing {rows:,} rows in every format")
                datasets[rows] = _write(place, rows, pools)
                written[f"{rows:,} rows"] = datasets[rows][1]
            seed = _SEED if name.endswith("shuffled") else None
            for shards in [*map(int, options.shards), *([MANY_SHARDS] if seed else [])]:
                session = _Session(
                    name=f"{name}-{shards}",
                    place=place,
                    checksums=datasets[rows][0],
                    pools=pools,
                    shards=shards,
                    seed=seed,
                    repeats=repeats,
                    most_seconds=options.most_seconds,
                    tell=tell,
                )
                cases.append(session.run(left_out))
    versions = {name: pool.version for name, pool in pools.items() if name != OURS and pool.version}
    return Result(cases=cases, facts={"writing_seconds": written}, notes=_NOTES, versions=versions)


@dataclass(frozen=True, slots=True)
class _Pool:
    """As many processes of one reader as there are cores."""

    workers: Sequence[Worker]

    @property
    def version(self) -> str | None:
        version: str | None = self.workers[0].hello["version"]
        return version

    def read(
        self, shards: Sequence[int], count: int, request: Mapping[str, Any], most: float = 1e9
    ) -> tuple[list[dict[str, Any]], float]:
        """The answers for these shards, as far as they were begun in time, and the seconds."""
        waiting, answers = iter(shards), {}
        start = time.perf_counter()

        def work(worker: Worker) -> None:
            for shard in waiting:
                answers[shard] = worker.ask("read", shard=[shard, count], **request)
                if time.perf_counter() - start > most:
                    return

        with ThreadPoolExecutor(len(self.workers)) as threads:
            list(threads.map(work, self.workers))
        return [answers[shard] for shard in sorted(answers)], time.perf_counter() - start


def _start(
    python: str | None, folder: Path, stack: ExitStack, tell: Tell
) -> tuple[dict[str, _Pool], dict[str, str]]:
    """The processes of every reader, or why it takes no part."""
    pools, left_out = {}, {}
    env = offline_environment(folder, folder / "numba") | {"XDG_CACHE_HOME": str(folder / "cache")}
    shared, script = race.__file__, str(Path(__file__).with_name("shard_peer.py"))
    for reader in dict.fromkeys(entry.reader for entry in ENTRIES):
        command = [sys.executable, "-m", "benchmarks.shard_peer", reader, shared]
        if reader != OURS:
            if python is None:
                left_out[reader] = "no --peer-python"
                continue
            command = [python, "-I", script, reader, shared]
        tell(f"starting {reader}")
        try:
            workers = [
                stack.enter_context(Worker(command, folder / f"{reader}-{number}.txt", env=env))
                for number in range(usable_cores())
            ]
        except WorkerError as error:
            left_out[reader] = str(error)
            continue
        pools[reader] = _Pool(workers)
    return pools, left_out


def _write(
    place: Path, count: int, pools: Mapping[str, _Pool]
) -> tuple[list[int], dict[str, float]]:
    """The rows in every format; gives checksums of their texts, and the seconds of each writer."""
    (place / "gzip").mkdir(parents=True)
    texts = [
        " ".join(message["content"] for message in row["messages"]) for row in conversations(count)
    ]
    lines = [
        json.dumps({"id": index, "text": text}, ensure_ascii=False) + "\n"
        for index, text in enumerate(texts)
    ]
    (place / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    table = pa.table({"id": range(count), "text": texts})
    pq.write_table(table, place / "rows.parquet", row_group_size=_GROUP_ROWS)
    for number in range(_GZIP_FILES):
        part = lines[count * number // _GZIP_FILES : count * (number + 1) // _GZIP_FILES]
        file = place / "gzip" / f"{number:02}.jsonl.gz"
        file.write_bytes(gzip.compress("".join(part).encode(), 1))
    seconds = {}
    for reader, file in (("Mosaic", "mds"), ("LitData", "chunks")):
        if reader in pools:
            start = time.perf_counter()
            worker, rows = pools[reader].workers[0], str(place / "rows.jsonl")
            worker.ask("write", path=str(place / file), rows=rows)
            seconds[reader] = time.perf_counter() - start
    return [zlib.crc32(text.encode()) for text in texts], seconds


def _request(entry: Entry, place: Path, seed: int | None, *, is_checked: bool) -> dict[str, Any]:
    return {
        "path": str(place / entry.file),
        "folder": str(place),
        "seed": seed,
        "settings": dict(entry.settings),
        "is_checked": is_checked,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """A dataset on a number of shards."""

    name: str
    place: Path
    checksums: Sequence[int]
    pools: Mapping[str, _Pool]
    shards: int
    seed: int | None
    repeats: int
    most_seconds: float
    tell: Tell

    def run(self, left_out: Mapping[str, str]) -> Case:
        """Checks everybody, then times in turn those who race."""
        checked: dict[str, list[dict[str, Any]]] = {}
        timed: dict[str, list[list[dict[str, Any]]]] = {}
        failures: dict[str, str] = {}
        runs = {}
        for entry in self._entries():
            self.tell(f"{self.name}: {entry.name} is checked")
            most = 1e9 if entry.reader == OURS else self.most_seconds
            request = _request(entry, self.place, self.seed, is_checked=True)
            pool = self.pools[entry.reader]
            try:
                answers, _ = pool.read(range(self.shards), self.shards, request, most)
            except WorkerError as error:
                failures[entry.name] = str(error)
                continue
            checked[entry.name] = answers
            if entry.is_raced:
                runs[entry.name] = lambda entry=entry: self._time(entry, checked, timed)
        repeats = self.repeats if self.shards < MANY_SHARDS else 1
        seconds = interleave(runs, repeats, lambda text: self.tell(f"{self.name}: {text}"))
        entries = {entry.name: entry for entry in self._entries() if entry.name in checked}
        reasons = {name: self._difference(answers) for name, answers in checked.items()}
        sizes = {name: self._size(entry) for name, entry in entries.items()}
        return Case(
            name=self.name,
            text=f"{sizes[f'{OURS} JSONL'] / 1e6:,.0f} MB on {self.shards} shards",
            rows=len(self.checksums),
            num_bytes=sizes[f"{OURS} JSONL"],
            timings=[
                Timing(
                    name=name,
                    version=self.pools[entries[name].reader].version,
                    output="dicts" if "dicts" in (entries[name].rival or name) else "Arrow",
                    rows=sum(answer["rows"] for answer in checked[name]),
                    seconds=tuple(seconds[name]),
                    reason=reasons[name],
                )
                for name in seconds
            ],
            rivals={name: entries[name].rival or "" for name in seconds if entries[name].rival},
            measurements=[
                Measurement(
                    name=name,
                    values={
                        **self._figures(checked[name], timed.get(name, []), sizes[name]),
                        **_spread(seconds, name, entries[name].rival, self.shards, checked),
                    },
                    reason=reasons[name],
                )
                for name in checked
            ],
            goals=list(self._goals(checked, sizes)),
            left_out={**left_out, **failures},
        )

    def _entries(self) -> Iterator[Entry]:
        for entry in ENTRIES:
            is_even = entry.is_raced or (self.seed is not None and self.shards > 1)
            is_many = self.shards >= MANY_SHARDS
            is_ours = (
                entry.reader == OURS and "gzip" not in entry.name and "dicts" not in entry.name
            )
            if entry.reader in self.pools and is_even and (is_ours or not is_many):
                yield entry

    def _time(
        self,
        entry: Entry,
        checked: Mapping[str, Sequence[Any]],
        timed: dict[str, list[list[dict[str, Any]]]],
    ) -> float:
        request = _request(entry, self.place, self.seed, is_checked=False)
        done = range(len(checked[entry.name]))
        answers, seconds = self.pools[entry.reader].read(done, self.shards, request)
        timed.setdefault(entry.name, []).append(answers)
        return seconds

    def _size(self, entry: Entry) -> int:
        found = self.place.glob(entry.file if "*" in entry.file else f"{entry.file}/*")
        files = list(found) or [self.place / entry.file]
        return sum(path.stat().st_size for path in files)

    def _difference(self, answers: Sequence[Mapping[str, Any]]) -> str | None:
        """How the rows differ from the dataset, each of them once; ``None`` where they do not."""
        missing, repeated, wrong = self._rows(answers)
        parts = (
            f"{missing} rows missing" * bool(missing),
            f"{repeated} rows repeated" * bool(repeated),
        )
        parts = (*parts, f"{wrong} rows with another text" * bool(wrong))
        return ", ".join(part for part in parts if part) or None

    def _rows(self, answers: Sequence[Mapping[str, Any]]) -> tuple[int, int, int]:
        """Rows missing, repeated and changed; none is missing where only some shards were read."""
        pairs = [pair for answer in answers for pair in answer["checksums"]]
        once = dict(map(tuple, pairs))
        missing = len(self.checksums) - len(once) if len(answers) == self.shards else 0
        wrong = sum(self.checksums[index] != checksum for index, checksum in once.items())
        return missing, len(pairs) - len(once), wrong

    def _figures(
        self,
        answers: Sequence[Mapping[str, Any]],
        timed: Sequence[Sequence[Mapping[str, Any]]],
        size: int,
    ) -> dict[str, Any]:
        """Of the shards that were read; times to a first batch are medians of a shard's repeats."""
        firsts = [
            median(first)
            for each in zip(*timed, strict=True)
            if (first := [item["first_seconds"] for item in each if item["first_seconds"]])
        ]
        read = [answer["read_bytes"] for answer in answers]
        source = [answer["source_bytes"] for answer in answers]
        rows = [answer["rows"] for answer in answers]
        batches = [answer["batches"] for answer in answers]
        missing, repeated, _ = self._rows(answers)
        return {
            "shards": len(answers),
            "read_times": sum(read) / len(read) * self.shards / size,
            "by_source_times": None if None in source else sum(source) / size,
            "shard_bytes": round(median(read)),
            "largest_bytes": max(read),
            "first_batch_seconds": median(firsts) if firsts else None,
            "worst_first_batch_seconds": max(firsts, default=None),
            "rows_least": min(rows),
            "rows_most": max(rows),
            "batches_least": min(batches),
            "batches_most": max(batches),
            "missing": missing,
            "repeated": repeated,
        }

    def _goals(
        self, checked: Mapping[str, Sequence[Mapping[str, Any]]], sizes: Mapping[str, int]
    ) -> Iterator[Goal]:
        for name, answers in checked.items():
            if not name.startswith(OURS) or "dicts" in name:
                continue
            if "," in name:
                batches = [answer["batches"] for answer in answers]
                apart = max(batches) - min(batches)
                yield Goal(f"batches of two shards apart, {name}", 0, "batches", apart)
                continue
            read = sum(answer["read_bytes"] for answer in answers) / sizes[name]
            yield Goal(f"read in all, {name}", _MOST_READ, "×", read)


def _spread(
    seconds: Mapping[str, Sequence[float]],
    name: str,
    rival: str | None,
    shards: int,
    checked: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, float]:
    """Ours over this peer in rows per second, repeat by repeat: the least and the most."""
    if rival is None or rival not in seconds:
        return {}
    rows = {key: sum(answer["rows"] for answer in checked[key]) for key in (name, rival)}
    ratios = [
        (rows[rival] / ours) / (rows[name] / theirs)
        for ours, theirs in zip(seconds[rival], seconds[name], strict=True)
    ]
    return {"ours_least": min(ratios), "ours_most": max(ratios)}


if __name__ == "__main__":
    main()
