"""Jobs past one process: dedupe and prepare, against others, in bounded memory, and at 10 TB.

    python -m benchmarks.cluster --cases exact,scaling,memory --peers PYTHON -o RESULT.json
    python -m benchmarks.cluster --cases arithmetic --measured RESULT.json --markdown

``exact`` deduplicates the same rows with ours, with datatrove's exact dedupe and with a ``groupby``
of Ray Data, and counts who lost, repeated or changed a row. ``scaling`` prepares chat rows with
several workers and nodes and compares every output with the first. ``memory`` runs both jobs with a
small ``--memory``. ``arithmetic`` scales the measured rates of every stage to a cluster that is not
here; they come from the same run or from ``--measured``.

Every job is a process of its own (``cluster_arm``), and so is the Ray cluster that it needs. Memory
is PSS, sampled every 0.1 s: the sum over the process tree, and the largest process.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
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
from benchmarks.cluster_model import Cluster, estimate, markdown
from benchmarks.command import Tell, check_names, execute, names, race_parser
from benchmarks.result import Case, Goal, Measurement, Result, Timing
from fast_axolotl.cli.options import parse_size
from fast_axolotl.errors import UsageError

MIB = 1024 * 1024
CASES = ("exact", "scaling", "memory", "arithmetic")
ONE = "fast-axolotl local, 1 worker"
TWO = "fast-axolotl local, 2 workers"
_ROW_BYTES = {"exact": 470, "scaling": 830, "memory": 470}
"""Of JSON lines, about."""
_MEMORY = {"dedupe": 1024 * MIB, "prepare": 1536 * MIB}
_HUGE_BYTES = 100_000_000
_CHAT_BLOCK_ROWS = 20_000
_FILES = 4
_NOTES = (
    "a time is from the call to the complete output; imports and the start of a Ray cluster come "
    "before, processes that work are started inside; median is of the whole process",
    "peak is the greatest PSS of the process tree, sampled every 0.1 s; largest is that of one "
    "process; resident is what a working process said of itself, shared pages included",
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("cluster", __doc__)
    parser.add_argument("--cases", type=names, default=[], help=f"of {', '.join(CASES)}")
    parser.add_argument("--rows", type=int, help="of exact and scaling; 40,000 if none is given")
    parser.add_argument("--bytes", type=parse_size, help="of generated JSON lines, such as 20GB")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each contestant of exact")
    parser.add_argument(
        "--peer-python", "--peers", help="interpreter of datatrove[processing,io] and ray[data]"
    )
    parser.add_argument("--measured", type=names, default=[], help="result files for arithmetic")
    parser.add_argument("--tb", type=float, default=10, help="of the arithmetic, as those below")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--cores", type=int, default=32, help="of a node")
    parser.add_argument("--gbit", type=float, default=25, help="network of a node, each way")
    parser.add_argument("--disk", type=float, default=2, help="GB/s of a node")
    parser.add_argument("--markdown", action="store_true", help="print arithmetic for the docs")
    if (options := parser.parse_args(arguments)).markdown:
        print(markdown(*_arithmetic(options, {})))
    else:
        execute(parser, run, arguments)


def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
    """The cases that are named, or all."""
    session = _Session(options, folder, tell)
    chosen = check_names("case", options.cases, CASES)
    cases, notes = list[Case](), list(_NOTES)
    if chosen != ["arithmetic"]:
        tell("compiling kernels, making the model")
        run_child("fast_axolotl", "warmup", "--json", env=session.environment)
        run_child("benchmarks.axolotl", "--model", str(folder / "model"), env=session.environment)
    for name in chosen[: -1 if "arithmetic" in chosen else None]:
        cases += {"exact": _exact, "scaling": _scaling, "memory": _memory}[name](session)
    if "arithmetic" in chosen:
        case, assumptions = _arithmetic(options, session.jobs)
        cases, notes = [*cases, case], [*notes, *assumptions]
    return Result(cases=cases, notes=notes, facts={"jobs": session.jobs})


@dataclass(slots=True)
class _Session:
    options: argparse.Namespace
    folder: Path
    tell: Tell
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Case and contestant to the summary of our job."""

    @property
    def environment(self) -> dict[str, str]:
        return offline_environment(self.folder, self.folder / "kernels")

    def num_rows(self, case: str) -> int:
        if self.options.bytes:
            return max(1, int(self.options.bytes) // _ROW_BYTES[case])
        return self.options.rows or 40_000

    def run(self, case: str, name: str, task: Mapping[str, Any]) -> dict[str, Any]:
        """What the process of a task tells, with its memory."""
        place = self.folder / "run"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        (place / "task.json").write_text(json.dumps(task))
        is_ours = task["arm"] == "ours"
        python = sys.executable if is_ours else str(self.options.peer_python)
        # Sockets need a short path. What our reader remembers of files is forgotten.
        with tempfile.TemporaryDirectory(prefix="fa-", ignore_cleanup_errors=True) as short:
            environment = {**self.environment, "RAY_TMPDIR": short, "XDG_CACHE_HOME": short}
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
            resident = max(node["peak_bytes"] for node in summary["nodes"])
            found["values"]["resident_bytes"] = resident
        peak = found["values"]["peak_bytes"] / 1e6
        self.tell(f"{case}: {name}: {found['seconds']:.1f} s of {wall:.1f} s, {peak:,.0f} MB")
        return found


def _arithmetic(
    options: argparse.Namespace, jobs: Mapping[str, Mapping[str, Any]]
) -> tuple[Case, list[str]]:
    """From the jobs of this run and of ``--measured``."""
    found = {name: dict(made) for name, made in jobs.items()}
    for path in options.measured:
        for name, made in json.loads(Path(path).read_text())["jobs"].items():
            found.setdefault(name, {}).update(made)
    chosen = {"dedupe": found.get("exact", {}), "prepare": found.get("scaling", {})}
    one_worker = {job: made[ONE] for job, made in chosen.items() if ONE in made}
    if not one_worker:
        raise UsageError("arithmetic needs the result of exact or scaling: --measured FILE")
    keys = ("nodes", "cores", "gbit", "disk", "tb")
    return estimate(one_worker, Cluster(**{key: getattr(options, key) for key in keys}))


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


def _dedupe(texts: _Texts, output: Path, memory: int, workers: int, *nodes: int) -> dict[str, Any]:
    arguments = {"inputs": texts.files, "output": str(output), "columns": ["text"]}
    arguments |= {"workers": workers, "memory": memory}
    function = "fast_axolotl.cluster.tables:dedupe_on"
    return {"arm": "ours", "function": function, "nodes": nodes, "arguments": arguments}


def _exact(session: _Session) -> list[Case]:
    rows, output = session.num_rows("exact"), session.folder / "run" / "output"
    session.tell(f"exact: writing {rows:,} rows")
    texts = _write_texts(session.folder / "texts", rows, 1 / 3)
    peer = {"inputs": texts.files, "workers": 2, "output": str(output)}
    peer |= {"work": str(output.with_name("work"))}
    peer |= {"partitions": max(8, texts.num_bytes // (64 * MIB))}
    tasks = {
        ONE: _dedupe(texts, output, 4096 * MIB, 1),
        TWO: _dedupe(texts, output, 4096 * MIB, 2),
        "fast-axolotl ray, 2 CPUs": _dedupe(texts, output, 4096 * MIB, 0, 2),
        "datatrove": {"arm": "datatrove", **peer},
        "Ray Data": {"arm": "Ray Data", **peer},
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
                facts[name] = texts.difference(output)
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
        rivals={name: TWO for name in ("datatrove", "Ray Data")},
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


def _prepare(
    session: _Session, data: Path, output: Path, memory: int, workers: int, *nodes: int
) -> dict[str, Any]:
    config = preprocess_config(session.folder / "model", data, session.folder / "unused")
    path = write_config(config, session.folder / "config.yml")
    arguments: dict[str, Any] = {"config": str(path), "overrides": {}, "output": str(output)}
    arguments |= {"engine": "local", "address": "auto", "work": None}
    arguments |= {"workers": workers, "memory": memory}
    function = "fast_axolotl.cluster.prepare:prepare"
    return {"arm": "ours", "function": function, "nodes": nodes, "arguments": arguments}


def _scaling(session: _Session) -> list[Case]:
    count = session.num_rows("scaling")
    data = _write_chat(session.folder / "chat.jsonl", count)
    first = session.folder / "first"
    shapes: dict[str, tuple[int, ...]] = {ONE: (1,), TWO: (2,)}
    shapes |= {f"fast-axolotl ray, nodes: {nodes}": (0, *[1] * nodes) for nodes in (1, 2, 4)}
    timings, measurements, tokens = [], [], 0
    for name, shape in shapes.items():
        output = session.folder / "run" / "output"
        task = _prepare(session, data, output, _MEMORY["prepare"], *shape)
        found = session.run("scaling", name, task)
        if name == ONE:
            output.rename(first)
        reason = None if name == ONE else prepared_difference(first, output)
        summary = found["summary"]
        tokens = summary["tokens"]
        timings.append(
            Timing(
                name=name,
                output="chat → prepared",
                rows=tokens,
                seconds=(summary["seconds"],),
                reason=reason,
            )
        )
        speeds = {
            f"{stage['name']}, tokens/s": round(tokens / stage["seconds"])
            for stage in summary["stages"]
        }
        values = {**found["values"], **speeds}
        measurements.append(Measurement(name=name, seconds=(found["wall"],), values=values))
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


def _memory(session: _Session) -> list[Case]:
    wanted = session.num_rows("memory") * _ROW_BYTES["memory"]
    # Beside the input lie the output and what is between stages; prepared tokens take more.
    most = shutil.disk_usage(session.folder).free // 2
    sizes = {"dedupe": min(wanted, most), "prepare": min(wanted, most // 4)}
    cases = []
    for job, memory in _MEMORY.items():
        output = session.folder / "run" / "output"
        session.tell(f"memory: writing {sizes[job] / 1e9:.1f} GB for {job}")
        if job == "dedupe":
            count = max(100, sizes[job] // _ROW_BYTES["memory"])
            texts = _write_texts(session.folder / "texts", count, 0.5, _HUGE_BYTES)
            found = session.run("memory", job, _dedupe(texts, output, memory, 2))
            facts, reason = texts.difference(output)
            num_bytes = texts.num_bytes
            shutil.rmtree(session.folder / "texts")
        else:
            count = max(100, sizes[job] // _ROW_BYTES["scaling"])
            data = _write_chat(session.folder / "memory.jsonl", count)
            found = session.run("memory", job, _prepare(session, data, output, memory, 2))
            facts, reason = {"rows_kept": found["summary"]["rows_out"]}, None
            num_bytes = data.stat().st_size
            data.unlink()
        values = {"input_bytes": num_bytes, "allowed_bytes": memory, **found["values"], **facts}
        measured = Measurement(name=job, seconds=(found["wall"],), values=values, reason=reason)
        text = "a 100 MB row, half of all rows alike" if job == "dedupe" else "chat rows"
        resident = found["values"]["resident_bytes"] / 1e6
        goal = Goal("memory of a working process", memory / 1e6, "MB", resident)
        cases.append(
            Case(
                name=f"memory, {job}",
                text=f"{num_bytes / 1e9:.2f} GB, {text}, 2 workers of {memory // MIB:,} MiB",
                rows=count,
                measurements=[measured],
                goals=[goal],
            )
        )
    return cases
