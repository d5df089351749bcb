"""Jobs past one process: dedupe and prepare against others, with several nodes, in bounded memory.

``exact`` deduplicates the same rows with ours, with datatrove's exact dedupe and with a shuffle of
Ray Data, and counts who lost, repeated or changed a row. ``scaling`` prepares chat rows with
several workers and nodes and compares every output with the first. ``dedupe-memory``
deduplicates skewed rows with 1 GiB per worker.

Every job is a process of its own (``cluster_arm``) with the Ray cluster that it needs. Memory is
PSS, sampled every 0.1 s: the sum over the process tree, and the largest process.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.axolotl_inputs import preprocess_config, random_text, write_config, write_rows
from benchmarks.axolotl_runs import prepared_difference, run_watched
from benchmarks.children import RunError, offline_environment, run_child
from benchmarks.cluster_arm import __file__ as _ARM
from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.result import Case, Goal, Measurement, Result, Timing
from fast_axolotl.cli.options import parse_size

MIB = 1024 * 1024
ONE, TWO = "fast-axolotl local-1", "fast-axolotl local-2"
"""Engine and workers; on ray, nodes of one core each, but for exact, where one node has two."""
_PEERS = ("datatrove", "Ray Data")
_ROW_BYTES = {"exact": 390, "scaling": 830, "dedupe-memory": 390}
"""Of JSON lines, about."""
_SMOKE_ROWS = {"exact": 40_000, "scaling": 4_000, "dedupe-memory": 40_000}
_LITTLE = 1024 * MIB
_HUGE_BYTES = 100_000_000
_CHAT_BLOCK_ROWS = 20_000
_FILES = 4
_DEDUPE, _PREPARE = "fast_axolotl.cluster.tables:dedupe_on", "fast_axolotl.cluster.prepare:prepare"
Task = dict[str, Any]
_NOTES = (
    "times of exact are from the call to the complete output, those of scaling from the first task "
    "on; imports and the start of a Ray cluster come before; median is of the whole process",
    "peak is the greatest PSS of the process tree, largest that of one process, both sampled every "
    "0.1 s; resident is the peak RSS of a working process, with pages that it shares",
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("cluster", __doc__)
    parser.add_argument("--cases", type=names, default=[], help=f"of {', '.join(CASES)}")
    parser.add_argument("--rows", type=int, help=f"if neither it nor --bytes: {_SMOKE_ROWS}")
    parser.add_argument("--bytes", type=parse_size, help="of generated JSON lines, such as 20GB")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, in alternating order")
    parser.add_argument(
        "--peer-python", "--peers", help="interpreter of datatrove[processing,io] and ray[data]"
    )
    execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """The cases that are named, or all."""
    session = _Session(options, folder, tell)
    chosen = check_names("case", options.cases, list(CASES))
    tell("compiling kernels, making the model")
    run_child("fast_axolotl", "warmup", env=session.environment)
    run_child("benchmarks.axolotl", "--model", str(folder / "model"), env=session.environment)
    cases = [case for name in chosen for case in CASES[name](session)]
    return Result(
        cases=cases,
        notes=[*_NOTES, *session.notes],
        facts={"jobs": session.jobs},
        versions={item.name: item.version for c in cases for item in c.timings if item.version},
    )


@dataclass(slots=True)
class _Session:
    options: argparse.Namespace
    folder: Path
    tell: Tell
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Case and contestant to the summary of our job."""
    notes: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return offline_environment(self.folder, self.folder / "kernels")

    @property
    def output(self) -> Path:
        return self.folder / "run" / "output"

    def num_rows(self, case: str) -> int:
        if self.options.bytes:
            return max(1, int(self.options.bytes) // _ROW_BYTES[case])
        return self.options.rows or _SMOKE_ROWS[case]

    def run(self, case: str, name: str, task: Task) -> dict[str, Any]:
        """What the process of a task tells, with its memory."""
        place = self.folder / "run"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        (place / "task.json").write_text(json.dumps(task))
        is_ours = task["arm"] == "ours"
        python = sys.executable if is_ours else str(self.options.peer_python)
        # Sockets need a short path. What our reader remembers of files is forgotten.
        with tempfile.TemporaryDirectory(prefix="fab-", ignore_cleanup_errors=True) as short:
            environment = {**self.environment, "RAY_TMPDIR": short, "XDG_CACHE_HOME": short}
            environment["RAY_USAGE_STATS_ENABLED"] = "0"
            if not is_ours:
                environment.pop("PYTHONPATH", None)
            command = [python, "-P", _ARM, str(place / "task.json")]
            wall, samples, text = run_watched(command, env=environment, folder=place)
        found: dict[str, Any] = json.loads(text[text.rindex('{"seconds"') :].splitlines()[0])
        found["wall"] = wall
        found["values"] = {
            "peak_bytes": max(sample.pss_bytes for sample in samples),
            "largest_bytes": max(sample.largest_bytes for sample in samples),
        }
        if is_ours:
            summary = self.jobs.setdefault(case, {})[name] = found["summary"]
            found["values"]["resident_bytes"] = summary["peak_bytes"]
        peak = found["values"]["peak_bytes"] / 1e6
        self.tell(f"{case}: {name}: {found['seconds']:.1f} s of {wall:.1f} s, {peak:,.0f} MB")
        return found


# Exact dedupe.


@dataclass(frozen=True, slots=True)
class _Texts:
    """Generated rows: which value each one has, and the checksum of its text."""

    files: list[str]
    values: Any
    checksums: Any

    @property
    def num_bytes(self) -> int:
        return sum(Path(path).stat().st_size for path in self.files)

    def difference(self, output: Path) -> tuple[dict[str, Any], str | None]:
        """What an output holds, and in what it is not the set of all values."""
        numbers, changed = list[int](), 0
        for path in sorted(output.glob("*.parquet")):
            for batch in pq.ParquetFile(path).iter_batches(1000, columns=["id", "text"]):
                found = [int(text) for text in batch["id"].to_pylist()]
                sums = [zlib.crc32(text.encode()) for text in batch["text"].to_pylist()]
                changed += int(np.count_nonzero(self.checksums[found] != sums))
                numbers += found
        kept = np.unique(self.values[numbers])
        known, first = np.unique(self.values, return_index=True)
        wrong = {
            "lost": len(known) - len(kept),
            "repeated": len(numbers) - len(kept),
            "changed": changed,
        }
        facts = {
            "rows_kept": len(numbers),
            "in_order": bool(np.all(np.diff(numbers) > 0)),
            "first_copy_kept": bool(np.array_equal(np.sort(numbers), np.sort(first))),
        }
        reason = ", ".join(f"{count:,} {name}" for name, count in wrong.items() if count)
        return facts, reason or None


def _write_texts(folder: Path, count: int, hot: float, huge_bytes: int = 0) -> _Texts:
    """Rows of which a share has one value, a tenth repeats and a tenth nearly repeats others."""
    folder.mkdir()
    rng = random.Random(count)
    words = random_text(rng, 200_000, 200_000)
    values, checksums = np.empty(count, np.int64), np.empty(count, np.uint32)
    files = [str(folder / f"rows-{number}.jsonl") for number in range(_FILES)]
    made, step = 1, ceil(count / _FILES)
    for number, path in enumerate(files):
        with Path(path).open("w") as file:
            for row in range(number * step, min(count, (number + 1) * step)):
                chance = rng.random() - hot
                base, is_near = 0, 0.1 <= chance < 0.2
                if 0 <= chance < 0.2:
                    base = rng.randrange(made)
                elif chance >= 0:
                    base, made = made, made + 1
                start, length = base * 7919 % (len(words) - 900), 200 + base * 31 % 400
                text = f"{words[start : start + length]} {base:x}"
                text = f"{text[:99]}#{text[100:]}" if is_near else text
                values[row] = 2 * base + is_near
                if huge_bytes and row == count // 2:
                    values[row], text = -1, words * (huge_bytes // len(words))
                checksums[row] = zlib.crc32(text.encode())
                file.write(f'{{"id": "{row:012d}", "source": "made", "text": "{text}"}}\n')
    return _Texts(files, values, checksums)


def _ours(function: str, workers: int, memory: int, *cores: int, **arguments: Any) -> Task:
    """A job of ours; the cores of the nodes of a cluster make it one of Ray."""
    arguments |= {"workers": workers, "memory": memory}
    return {"arm": "ours", "function": function, "nodes": cores, "arguments": arguments}


def _exact(session: _Session) -> list[Case]:
    rows = session.num_rows("exact")
    session.tell(f"exact: writing {rows:,} rows")
    texts = _write_texts(session.folder / "texts", rows, 1 / 3)
    both = {"inputs": texts.files, "output": str(session.output)}
    peer = {**both, "workers": 2, "work": str(session.output.with_name("work"))}
    peer |= {"partitions": max(8, texts.num_bytes // (64 * MIB))}
    memory = 4096 * MIB
    tasks: dict[str, Task] = {
        ONE: _ours(_DEDUPE, 1, memory, columns=["text"], **both),
        TWO: _ours(_DEDUPE, 2, memory, columns=["text"], **both),
        "fast-axolotl ray-2": _ours(_DEDUPE, 0, memory, 2, columns=["text"], **both),
        **{name: {"arm": name, **peer} for name in _PEERS},
    }
    runs: dict[str, list[dict[str, Any]]] = {}
    facts: dict[str, tuple[dict[str, Any], str | None]] = {}
    left_out: dict[str, str] = {}
    for repeat in range(session.options.repeats):
        for name in list(tasks)[:: -1 if repeat % 2 else 1]:
            if tasks[name]["arm"] != "ours" and session.options.peer_python is None:
                left_out[name] = "no interpreter of its environment was given by --peers"
                continue
            try:
                runs.setdefault(name, []).append(session.run("exact", name, tasks[name]))
                facts[name] = texts.difference(session.output)
            except (RunError, OSError) as error:
                if tasks[name]["arm"] == "ours":
                    raise
                left_out[name] = str(error)
    done = [name for name in tasks if name in facts and name not in left_out]
    case = Case(
        name="exact",
        text="JSON lines, a third of one value, copies and near copies, to the first of each",
        rows=rows,
        num_bytes=texts.num_bytes,
        timings=[
            Timing(
                name=name,
                version=runs[name][0]["version"],
                output="JSONL → Parquet",
                rows=rows,
                seconds=tuple(run["seconds"] for run in runs[name]),
                reason=facts[name][1],
            )
            for name in done
        ],
        rivals=dict.fromkeys(_PEERS, TWO),
        measurements=[
            Measurement(
                name=name,
                seconds=tuple(run["wall"] for run in runs[name]),
                values={**runs[name][-1]["values"], **facts[name][0]},
            )
            for name in done
        ],
        left_out=left_out,
    )
    distinct = len(np.unique(texts.values))
    session.notes.append(
        "datatrove compares 64-bit hashes: among n different rows, n²/2^65 are expected to be lost "
        f"to a collision: {distinct**2 / 2**65:.1g} of these {distinct:,}, {1e10**2 / 2**65:.1f} "
        "of 10,000,000,000; none is made here; ours has 128 bits and a "
        "secret, n²/2^129; Ray Data compares the texts themselves"
    )
    shutil.rmtree(session.folder / "texts")
    return [replace(case, goals=[case.ratio_goal(TWO, peer, 1.0) for peer in case.rivals])]


# Prepare.


def _write_chat(path: Path, count: int) -> Path:
    """Conversations, a fifth of them repeated; every 20,000 begin with another number."""
    block = write_rows(path.with_suffix(".block"), min(count, _CHAT_BLOCK_ROWS))
    lines = block.read_text().splitlines(keepends=True)
    with path.open("w") as file:
        for number in range(0, count, len(lines)):
            mark = f'"content": "{number} '
            chosen = lines[: count - number]
            file.writelines(line.replace('"content": "', mark, 1) for line in chosen)
    return path


def _prepare(session: _Session, data: Path, workers: int, *cores: int) -> Task:
    config = preprocess_config(session.folder / "model", data, session.folder / "unused")
    path = str(write_config(config, session.folder / "config.yml"))
    given: Task = {"config": path, "output": str(session.output), "work": None}
    given |= {"engine": "local", "address": "auto"}
    return _ours(_PREPARE, workers, _LITTLE, *cores, **given)


def _scaling(session: _Session) -> list[Case]:
    count = session.num_rows("scaling")
    data = _write_chat(session.folder / "chat.jsonl", count)
    first = session.folder / "first"
    shapes: dict[str, tuple[int, ...]] = {ONE: (1,), TWO: (2,)}
    shapes |= {f"fast-axolotl ray-{nodes}": (0, *[1] * nodes) for nodes in (1, 2, 4)}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in shapes}
    for repeat in range(session.options.repeats):
        for name in list(shapes)[:: -1 if repeat % 2 else 1]:
            found = session.run("scaling", name, _prepare(session, data, *shapes[name]))
            found["reason"] = first.exists() and prepared_difference(first, session.output)
            runs[name].append(found)
            if not first.exists():
                session.output.rename(first)
    timings, measurements, tokens = list[Timing](), list[Measurement](), 0
    for name, times in runs.items():
        stages, tokens = (times[-1]["summary"][key] for key in ("stages", "tokens"))
        seconds = tuple(run["summary"]["seconds"] for run in times)
        reason = next((run["reason"] for run in times if run["reason"]), None)
        timings.append(Timing(name=name, rows=tokens, seconds=seconds, reason=reason))
        speeds = {f"{item['name']}, tokens/s": round(tokens / item["seconds"]) for item in stages}
        walls, values = tuple(run["wall"] for run in times), {**times[-1]["values"], **speeds}
        measurements.append(Measurement(name=name, seconds=walls, values=values))
    shutil.rmtree(first)
    case = Case(
        name="scaling",
        text=f"prepare, {count:,} chat rows, from the first task on",
        rows=tokens,
        unit="tokens",
        num_bytes=data.stat().st_size,
        timings=timings,
        measurements=measurements,
    )
    return [replace(case, goals=[case.ratio_goal(TWO, ONE, 1.6)])]


def _dedupe_memory(session: _Session) -> list[Case]:
    # Beside the input lie the output and what is between stages.
    free = shutil.disk_usage(session.folder).free
    size = min(session.num_rows("dedupe-memory") * _ROW_BYTES["dedupe-memory"], free * 2 // 3)
    session.tell(f"memory: writing {size / 1e6:,.0f} MB")
    count = max(100, size // _ROW_BYTES["dedupe-memory"])
    texts = _write_texts(session.folder / "skewed", count, 0.5, _HUGE_BYTES)
    given = {"inputs": texts.files, "output": str(session.output), "columns": ["text"]}
    found = session.run("dedupe-memory", "dedupe", _ours(_DEDUPE, 2, _LITTLE, **given))
    facts, reason = texts.difference(session.output)
    num_bytes = found["summary"]["bytes_in"]
    values = {"input_bytes": num_bytes, "allowed_bytes": _LITTLE, **found["values"], **facts}
    resident = found["values"]["resident_bytes"] / 1e6
    limit = f"2 workers of {_LITTLE // MIB:,} MiB"
    case = Case(
        name="memory, dedupe",
        text=f"{num_bytes / 1e6:,.0f} MB, a 100 MB row, half of all rows alike, {limit}",
        rows=count,
        measurements=[
            Measurement(name="dedupe", seconds=(found["wall"],), values=values, reason=reason)
        ],
        goals=[Goal("resident memory of a worker", _LITTLE / 1e6, "MB", resident)],
    )
    return [case]


CASES = {"exact": _exact, "scaling": _scaling, "dedupe-memory": _dedupe_memory}

if __name__ == "__main__":
    main()
