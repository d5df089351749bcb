"""Writes BENCHMARK.md from the newest result file of each race in benchmarks/results.

``python tools/benchmark_page.py`` brings the page up to date; a test says when that is needed. A
ratio is ours over theirs in rows per second, of medians, with the lowest and highest ratio of
single repeats: below 1 we are slower, and the figure is bold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "BENCHMARK.md"
RESULTS = REPOSITORY / "benchmarks" / "results"

HEAD = """# Benchmarks

`python tools/benchmark_page.py` writes this page from the result files in
[benchmarks/results](benchmarks/results). Each section names the file, the date, the machine and the
command behind it. How a figure is made, and what each peer does, is in
[benchmarks/README.md](benchmarks/README.md).

A ratio says how many times faster we are: our rows per second divided by theirs, of medians. The
range in parentheses is the lowest and highest ratio of single repeats. **Bold** means that we are
slower. A dash means that there is no measurement; the result file has the reason. Answers are
checked to be equal before anything is timed.
"""

READER_PEERS = {
    "earlier package": ("earlier package",),
    "HF streaming": ("HF streaming", "HF datasets, streaming"),
    "pyarrow": ("pyarrow", "pyarrow pages"),
    "pyarrow, no checks": ("pyarrow mapped",),
    "Polars": ("Polars", "Polars views"),
    "DuckDB": ("DuckDB",),
}
"""Columns of the reader's matrix; of several ways to use a package the fastest counts."""

Json = Mapping[str, Any]


def newest(name: str, case: str = "") -> tuple[str, Json] | None:
    """The newest result file of a race that has a case of this name, and what is in it."""
    dated = re.compile(rf"\d{{4}}-\d\d-\d\d-{re.escape(name)}\.json")
    files = sorted(path for path in RESULTS.glob("*.json") if dated.fullmatch(path.name))
    for path in reversed(files):
        result = json.loads(path.read_text(encoding="utf-8"))
        if any(item["name"].startswith(case) for item in result["cases"]):
            return path.name, result
    return None


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table: text in the first column, figures in the others."""
    lines = [f"| {' | '.join(header)} |", f"| --- |{' ---: |' * (len(header) - 1)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def source(file: str, result: Json) -> str:
    """One line that says where a section comes from."""
    machine = result.get("machine", {})
    memory = machine.get("memory_bytes", 0) / 1e9
    place = f"{machine.get('cores')} cores of {machine.get('cpu')}, {memory:.0f} GB"
    load = machine.get("load_average")
    busy = "" if load is None else f", load {load:.1f} at the start"
    versions = ", ".join(f"{name} {text}" for name, text in machine.get("versions", {}).items())
    return (
        f"[{file}](benchmarks/results/{file}), {result['date'][:10]}, {place}{busy}. {versions}. "
        f"Command: `{result['command']}`.\n"
    )


def timing(case: Json, name: str) -> Json | None:
    return next((item for item in case["timings"] if item["name"] == name), None)


def speed(item: Json, pick: Any = median) -> float:
    """Rows per second."""
    return float(item["rows"]) / float(pick(item["seconds"]))


def ratio(ours: Json | None, theirs: Json | None) -> str:
    """``1.25× (1.1–1.4)``; bold below 1; marked where the answer or the memory is another."""
    if ours is None or theirs is None or not theirs["rows"]:
        return "–"
    value = speed(ours) / speed(theirs)
    pairs = list(zip(ours["seconds"], theirs["seconds"], strict=False))
    text = f"{figure(value)}×"
    if len(pairs) > 1:
        scale = ours["rows"] / theirs["rows"]
        single = [scale * second / first for first, second in pairs]
        text += f" ({figure(min(single))}–{figure(max(single))})"
    text = f"**{text}**" if value < 1 else text
    marks = ["¹"] * (not theirs["equal"]) + ["²"] * bool(theirs.get("unbounded"))
    return " ".join([text, *marks])


def figure(value: float) -> str:
    """About three digits."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def fastest(case: Json, names: Sequence[str]) -> Json | None:
    found = [item for item in (timing(case, name) for name in names) if item is not None]
    return max(found, key=speed, default=None)


def reader(name: str, title: str) -> list[str]:
    """Format and compression × peer."""
    found = newest(name)
    if found is None:
        return []
    file, result = found
    rows, notes = [], []
    for case in result["cases"]:
        arrow = fastest(case, ("fast-axolotl", "fast-axolotl arrow"))
        if not arrow:
            continue
        lists = fastest(case, ("fast-axolotl, Python", "fast-axolotl python"))
        cells = [ratio(arrow, fastest(case, names)) for names in READER_PEERS.values()]
        lists_ratio = ratio(lists, timing(case, "earlier package"))
        size = case["num_bytes"] / 1e6
        rows.append(
            [
                f"{case['name'].replace('messages-', '')}, {size:,.0f} MB",
                f"{speed(arrow) / 1e6:.2f} M",
                *cells,
                lists_ratio,
            ]
        )
        notes += [
            f"- ¹ {item['name']} on {case['name']}: another answer: {item['reason'][:80]}"
            for item in case["timings"]
            if not item["equal"]
        ]
    header = ["input", "our rows/s", *READER_PEERS, "as Python lists: earlier package"]
    lines = [title, "", source(file, result)]
    lines += table(header, rows)
    if any("²" in cell for row in rows for cell in row):
        lines.append("² Its memory grows with the file or with a row group; ours is bounded.\n")
    return [*lines, *dict.fromkeys(notes), ""]


def reader_memory() -> list[str]:
    """Goals of the memory cases: measured in fresh processes."""
    found = newest("reader-memory")
    if found is None:
        return []
    file, result = found
    goals = [
        [goal["text"], f"{figure(goal['measured'])} {goal['unit']}", f"{figure(goal['target'])}"]
        for case in result["cases"]
        for goal in case["goals"]
        if goal["measured"] is not None and not case["timings"]
    ]
    lines = ["### Memory and first batch", "", source(file, result)]
    return [*lines, *table(["", "measured", "goal: at most"], goals)]


def operation(name: str, title: str) -> list[str]:
    """Ours against each peer, a column for each size."""
    found = newest(name)
    if found is None:
        return []
    file, result = found
    sizes: dict[str, None] = {}
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for case in result["cases"]:
        kind, _, size = case["name"].rpartition("-")
        pairs = [(ours, peer) for peer, ours in case["rivals"].items()]
        # Another form of ours has no peer of its own: it is compared with the first one.
        others = {item["name"] for item in case["timings"]} - set(case["rivals"])
        lone = sorted(others - {ours for ours, _ in pairs})
        pairs += [(ours, pairs[0][1]) for ours in lone if pairs]
        for ours, peer in pairs:
            first, second = timing(case, ours), timing(case, peer)
            if first is None or second is None:
                continue
            sizes[size] = None
            text = ratio(first, second)
            if second["rows"] != case["rows"]:
                text += "³"
            way = first["output"]
            cells.setdefault((kind, way, peer), {})[size] = text
    columns = sorted(sizes, key=number_of_rows)
    rows = [
        [f"{kind}, {way}", peer, *(by_size.get(size, "–") for size in columns)]
        for (kind, way, peer), by_size in cells.items()
    ]
    lines = [f"## {title}", "", source(file, result), *table(["", "against", *columns], rows)]
    if any("³" in cell for row in rows for cell in row):
        lines.append(
            "³ The peer is timed on the first rows alone and compared by rows per second.\n"
        )
    return lines


def number_of_rows(size: str) -> float:
    """``10k`` as 10,000; what is no size comes last."""
    match = re.fullmatch(r"(\d+)([kM]?)", size)
    scale = {"": 1, "k": 1e3, "M": 1e6}
    return float("inf") if match is None else int(match[1]) * scale[match[2]]


def races(title: str, names: Sequence[str]) -> list[str]:
    """Ours against one rival, a row for each case of several result files."""
    lines = [f"## {title}", ""]
    for name in names:
        found = newest(name)
        if found is None:
            continue
        file, result = found
        rows = []
        for case in result["cases"]:
            for peer, ours in case["rivals"].items():
                first, second = timing(case, ours), timing(case, peer)
                if first is None or second is None:
                    continue
                seconds = [figure_seconds(median(item["seconds"])) for item in (second, first)]
                rows.append([case["name"], *seconds, ratio(first, second)])
        if rows:
            lines += [source(file, result), *table(["", "stock", "ours", "ratio"], rows)]
    return lines if len(lines) > 2 else []


def stages(name: str) -> list[str]:
    """Where the time and the memory of a command went, of Axolotl and of ours."""
    found = newest(name)
    if found is None:
        return []
    file, result = found
    lines = []
    for case in result["cases"]:
        by_name = {item["name"]: item for item in case["measurements"]}
        names = [key.partition(": ")[2] for key in by_name if key.startswith("Axolotl: ")]
        rows = []
        for stage in names:
            cells = [stage]
            for arm in ("Axolotl", "fast-axolotl"):
                item = by_name.get(f"{arm}: {stage}", {"seconds": [], "values": {}})
                cells.append(figure_seconds(median(item["seconds"])) if item["seconds"] else "–")
                # Imports happen again and again, so they have no peak of their own.
                holder = by_name[arm] if stage == "whole process" else item
                peak = holder["values"].get("peak_bytes") if stage != "imports" else None
                cells.append(f"{peak / 1e6:,.0f} MB" if peak else "–")
            rows.append(cells)
        lines += [
            f"**{case['rows']:,} rows by stage** ([{file}](benchmarks/results/{file})): time of "
            "the main process, and peak memory of all processes where a stage is long enough for "
            "samples. Pages of mapped files count.",
            "",
            *table(["stage", "Axolotl", "memory", "fast-axolotl", "memory"], rows),
        ]
    return lines


def figure_seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"


def missed() -> list[str]:
    """Goals that were set and not met, of the newest file of every race that has goals."""
    newest_files: dict[str, Path] = {}
    for path in sorted(RESULTS.glob("*.json")):
        newest_files[path.name[11:]] = path
    rows = []
    for path in newest_files.values():
        result = json.loads(path.read_text(encoding="utf-8"))
        for case in result.get("cases", []):
            for goal in case.get("goals", []):
                measured, target = goal["measured"], goal["target"]
                if measured is None or (
                    measured >= target if goal["at_least"] else measured <= target
                ):
                    continue
                bound = "≥" if goal["at_least"] else "≤"
                rows.append(
                    [
                        f"{result['title']}: {case['name']}: {goal['text']}",
                        f"{figure(measured)} {goal['unit']}",
                        f"{bound} {figure(target)}",
                    ]
                )
    return ["## Goals that were missed", "", *table(["goal", "measured", "target"], rows)]


def make_page() -> str:
    """The whole page."""
    parts = [
        [HEAD],
        reader("reader", "## Reading: format and compression"),
        reader("reader-rare", "### Rare compressions, fewer rows"),
        reader_memory(),
        operation("hash", "Hashing"),
        operation("dedupe", "Dedupe"),
        operation("pack", "Packing"),
        operation("pad", "Padding"),
        races(
            "The whole `axolotl preprocess` command",
            ("preprocess-command-20k", "preprocess-command-200k", "preprocess-command-1m"),
        ),
        stages("preprocess-command-200k"),
        stages("preprocess-command-1m"),
        races("Axolotl, imports not counted", ("axolotl",)),
        races("TRL's data preparation", ("trl-prepare-sft-chat", "trl-prepare-dpo")),
        missed(),
    ]
    return "\n".join(line for part in parts for line in part).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
