"""How long a job takes on a cluster that is not here, from the measured rates of its stages.

    python -m benchmarks.cluster_arithmetic --measured EXACT.json,SCALING.json [--markdown]

A job of one worker has seconds of tasks and bytes for every stage. What it has more of than a job
of a quarter of the rows grows with the input; the rest is start-up. The bytes that tasks read
follow from what they do (``cluster/tables.py``, ``cluster/shards.py``). A stage takes as long as
the slowest of processor, disk and network; stages follow one another.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.cluster import ONE, QUARTER
from benchmarks.command import Tell, execute, names, race_parser
from benchmarks.result import Case, Measurement, Result, case_tables
from fast_axolotl.errors import UsageError

_UNIT_BYTES, _PART_BYTES, _PIECE_BYTES = 64 << 20, 256 << 20, 128 << 20
"""Of ``prepare`` with 4 GiB a worker."""
_LOOK_BYTES, _BLOCK_BYTES = 2600, 24
_LOOK_SECONDS, _BLOCK_SECONDS = 1e-4, 3e-9
"""To open a part for one record batch: once, and for every batch of the list at its end. Measured
with pyarrow 26 on files of 1,000 to 50,000 batches."""
_FAN = 512
"""Record batches of a file at most."""
_ASSUMPTIONS = (
    "bytes and task seconds grow with the input; the rows are like the generated ones",
    "the rates of one worker with no other beside it hold for every core of a node; start-up, "
    "stragglers and retries are left out",
    "input, work folder and output are striped over the disks of all nodes, so all bytes but "
    "1/nodes cross the network, once, and every read goes to the disk: no page cache",
    "a stage takes as long as its slowest resource; stages do not overlap",
    "the coordinator is one process on one machine; 0.00 is less than the measured runs show",
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = race_parser("cluster-arithmetic", __doc__)
    parser.add_argument("--measured", type=names, required=True, help="results of cluster")
    parser.add_argument("--tb", type=float, default=10, help="of chat JSON lines")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--cores", type=int, default=32, help="of a node")
    parser.add_argument("--gbit", type=float, default=25, help="network of a node, each way")
    parser.add_argument("--disk", type=float, default=2, help="GB/s of a node")
    parser.add_argument("--markdown", action="store_true", help="print a section of the docs")
    options = parser.parse_args(arguments)
    if not options.markdown:
        execute(parser, run, arguments)
        return
    try:
        print(_markdown(*_estimate(options)))
    except UsageError as error:
        parser.error(str(error))


def run(options: argparse.Namespace, _folder: Path, _tell: Tell) -> Result:
    """A table of stages."""
    case, notes = _estimate(options)
    return Result(cases=[case], notes=notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cluster:
    nodes: int
    cores: int
    gbit: float
    disk: float
    """GB/s."""
    tb: float

    def stage(self, name: str, task_seconds: float, read: float, written: float) -> Measurement:
        """Per node; the coordinator's work is done by one process alone."""
        is_alone = name.endswith("coordinator")
        share = 1 if is_alone else self.nodes
        sent = (read + written) * (self.nodes - 1) / self.nodes / share
        seconds = {
            "CPU": task_seconds / (1 if is_alone else self.nodes * self.cores),
            "disk": (read + written) / self.nodes / self.disk / 1e9,
            "network": sent * 8 / self.gbit / 1e9,
        }
        values = {"read, GB": read / share / 1e9, "written, GB": written / share / 1e9}
        values |= {"sent, GB": sent / 1e9}
        values |= {f"{what}, s": value for what, value in seconds.items()}
        return Measurement(name=name, seconds=(max(seconds.values()),), values=values)


def _estimate(options: argparse.Namespace) -> tuple[Case, list[str]]:
    """The stages of dedupe and prepare, and every assumption."""
    jobs: dict[str, Any] = {}
    notes = list(_ASSUMPTIONS)
    for path in options.measured:
        result = json.loads(Path(path).read_text())
        found, load = result.get("jobs", {}), result["machine"]["load_average"]
        for job, name in (("dedupe", "exact"), ("prepare", "scaling")):
            if name in found:
                jobs[job] = _growth(found[name])
                size = found[name][ONE]["bytes_in"] / 1e6
                notes.append(f"{job} was measured on {size:,.0f} MB, load {load:.1f} at its start")
    if not jobs:
        raise UsageError("no result of exact or scaling among --measured; run benchmarks.cluster")
    keys = ("nodes", "cores", "gbit", "disk", "tb")
    cluster = _Cluster(**{key: getattr(options, key) for key in keys})
    stages = [*_dedupe(jobs["dedupe"], cluster)] if "dedupe" in jobs else []
    if "prepare" in jobs:
        made, more = _prepare(jobs["prepare"], cluster)
        stages, notes = [*stages, *made], [*notes, *more]
    for job in jobs:
        own = [stage for stage in stages if stage.name.startswith(job)]
        total = sum(stage.seconds[0] for stage in own)
        longest = max(own, key=lambda stage: stage.seconds[0])
        what = max(("CPU", "disk", "network"), key=lambda key: longest.values[f"{key}, s"] or 0)
        notes.append(
            f"{job} of {cluster.tb:g} TB takes {total / 3600:,.1f} h; {longest.name} is "
            f"{longest.seconds[0] / total:.0%} of that and bound by {what}"
        )
    text = f"{cluster.tb:g} TB of chat JSONL on {cluster.nodes} nodes of {cluster.cores} cores, "
    text += f"{cluster.gbit:g} Gbit/s and {cluster.disk:g} GB/s of disk each; figures per node"
    return Case(name="arithmetic", text=text, rows=0, measurements=stages), notes


def _growth(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the job of all rows has more of than that of a quarter."""
    small, large = found[QUARTER], found[ONE]

    def more(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: max(0, other[name] - value)
            for name, value in one.items()
            if isinstance(value, int | float)
        }

    before = {stage["name"]: stage for stage in small["stages"]}
    stages = [{**stage, **more(before[stage["name"]], stage)} for stage in large["stages"]]
    gaps = [job["seconds"] - sum(s["seconds"] for s in job["stages"]) for job in (small, large)]
    return {**more(small, large), "stages": stages, "between": max(0.0, gaps[1] - gaps[0])}


def _scaled(job: Mapping[str, Any], cluster: _Cluster) -> tuple[float, dict[str, float], Any]:
    """How much more there is, bytes out of every stage then, and its task seconds."""
    scale = cluster.tb * 1e12 / job["bytes_in"]
    out = {stage["name"]: stage["bytes_out"] * scale for stage in job["stages"]}
    seconds = {stage["name"]: stage["task_seconds"] * scale for stage in job["stages"]}
    return scale, out, {**seconds, "coordinator": job["between"] * scale}


def _dedupe(job: Mapping[str, Any], cluster: _Cluster) -> Iterator[Measurement]:
    scale, out, seconds = _scaled(job, cluster)
    size, rows, again = cluster.tb * 1e12, job["rows_in"] * scale, job["duplicates"] * scale
    flows = {
        "types": (size, 0.0),
        "digest": (size, 16 * rows),
        "split": (16 * rows, out["split"] + 8 * again),
        "unique": (out["split"], 8 * again),
        "coordinator": (8 * again, 8 * again),
        "write": (size + 8 * again, out["write"]),
    }
    for name, (read, written) in flows.items():
        if name in seconds:
            yield cluster.stage(f"dedupe: {name}", seconds[name], read, written)


def _prepare(job: Mapping[str, Any], cluster: _Cluster) -> tuple[list[Measurement], list[str]]:
    scale, out, seconds = _scaled(job, cluster)
    size, rows, again = cluster.tb * 1e12, job["rows_in"] * scale, job["duplicates"] * scale
    tokens = out["tokenise"]
    parts = size / _UNIT_BYTES * ceil(_UNIT_BYTES * tokens / size / _PART_BYTES)
    pieces = out["write"] / _PIECE_BYTES
    ranges = ceil(pieces / _FAN)
    groups = ceil(parts / ranges)
    # Many pieces are dealt twice; a look opens a file for one of its record batches.
    looks = {"merge": parts * ranges, "write": pieces * groups} if ranges > 1 else {}
    looks = looks or {"merge": 0.0, "write": parts * pieces}
    lists = {name: count * (_LOOK_BYTES + _BLOCK_BYTES * _FAN) for name, count in looks.items()}
    again_dealt = out["deal"] if ranges > 1 else 0.0
    seconds["merge"] = seconds["deal"] if ranges > 1 else 0.0
    for name, count in looks.items():
        seconds[name] += count * (_LOOK_SECONDS + _BLOCK_SECONDS * _FAN)
    flows = {
        "tokenise": (size, tokens + 24 * rows),
        "split": (24 * rows, out["split"] + 8 * again),
        "unique": (out["split"], 8 * again),
        "coordinator": (24 * rows, 16 * rows),
        "deal": (tokens + 8 * rows, out["deal"]),
        "merge": (again_dealt + lists["merge"], again_dealt),
        "write": (out["deal"] + lists["write"], out["write"]),
    }
    stages = [
        cluster.stage(f"prepare: {name}", seconds[name], read, written)
        for name, (read, written) in flows.items()
        if name in seconds
    ]
    disk = (2 * tokens + 72 * rows) / cluster.nodes / 1e9
    return stages, [
        f"{rows:.2g} rows, {job['tokens'] * scale:.2g} tokens; work folder and output of prepare "
        f"hold at most {disk:,.0f} GB per node, input not counted; its coordinator holds 40 bytes "
        f"per row, {40 * rows / 1e9:,.0f} GB on one machine",
        f"{parts:,.0f} parts are dealt to {ranges:,} ranges, and these to {pieces:,.0f} pieces: a "
        f"task opens at most {max(ranges, groups):,} files; merge is taken to cost as much as deal",
    ]


def _markdown(case: Case, notes: list[str]) -> str:
    """The section of the documentation."""
    (table,) = case_tables("", case)
    header = ["stage", "takes", *table.header[2:]]
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *table.rows]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    told = "\n".join(
        fill(f"- {note[0].upper()}{note[1:]}.", 138, subsequent_indent="  ") for note in notes
    )
    return f"## How long, how much\n\nCalculated, not tried: {case.text}.\n\n{text}\n\n{told}\n"


if __name__ == "__main__":
    main()
