"""What users see, against golden files: summaries, matrices, pages, live frames, help, messages.

``golden/runs`` and ``golden/protocols`` are folders as they were recorded; they must stay readable.
``golden/expected`` is what is said of them. ``support.golden`` tells how to write it anew.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import fast_axolotl
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import read_run
from fast_axolotl.record.catalogue import FIGURES
from fast_axolotl.record.figures import VERDICTS
from fast_axolotl.record.protocol_result import ProtocolResult
from fast_axolotl.report.comparison import protocol_document
from fast_axolotl.report.live import format_line, take_moment
from fast_axolotl.report.markdown import document_markdown
from fast_axolotl.report.runs import show_short_summary
from support import files
from support.golden import (
    GOLDEN,
    PROTOCOLS,
    RUNS,
    check,
    check_calls,
    command,
    plain,
    read_page,
    terminal,
)
from support.reports import report_run, screen_of

WIDTHS = (80, 160)


@pytest.fixture(autouse=True)
def in_golden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders are named as they are from here, whatever the checkout is called."""
    monkeypatch.chdir(GOLDEN / "runs")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_shown(name: str) -> None:
    check(f"show/{name}.json", command("show", name, "--json").json())
    for width in WIDTHS:
        check(f"show/{name}-{width}.txt", command("show", name, "--all", width=width).out)


def test_all_verdicts_are_among_the_runs() -> None:
    found = set()
    for path in (GOLDEN / "expected" / "show").glob("*.json"):
        verdict = json.loads(path.read_text(encoding="utf-8"))["verdict"]
        found.add("/".join(filter(None, (verdict["kind"], verdict["subtype"]))))
    kinds = {"memory", "swap", "cpu/others", "io", "io/near", "checkpoint", "evaluation"}
    kinds |= {"startup", "compute", "mixed", "code", "memory/growing"}
    kinds |= {f"data/{name}" for name in ("rate", "burst", "periodic", "prepare")}
    kinds |= {f"communication/{name}" for name in ("network", "skew")}
    subtypes = ("short", "warming", "draining", "unseen")
    assert found == kinds | {f"inconclusive/{name}" for name in subtypes}
    assert {name.partition("/")[0] for name in found} == set(VERDICTS)


SHORT = ("compute-everything", "crashed-late", "data-one-rank-of-two", "inconclusive-unseen", "nan")


def test_a_run_is_summed_up_on_one_screen() -> None:
    check("short.txt", "\n".join(f"== {name}\n{short_summary(name)}" for name in SHORT))


def read(folder: str | Path) -> tuple[Any, Any]:
    """A record and its summary."""
    record = read_run(folder)
    return record, summarise(record)


def short_summary(folder: str) -> str:
    with terminal(80) as (out, _):
        show_short_summary(report_run(read_run(folder)), file=out)
    return plain(out.getvalue())


MOMENTS = {
    "compute-everything": 12.0,
    "data-burst": 20.0,
    "mixed-unseen-communication": 9.0,
    "swap": 8.0,
    "inconclusive-unseen": 5.0,
    "inconclusive-warming": 0.0,
}
"""Seconds after which each run is looked at while it goes on."""


@pytest.mark.parametrize("name", MOMENTS)
def test_a_run_is_watched(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_at(GOLDEN / "runs" / name, MOMENTS[name], tmp_path / name)
    monkeypatch.chdir(tmp_path)
    check(f"live/{name}.txt", "\n".join(f"== {what}\n{text}" for what, text in live_frames(name)))


def cut_at(run: Path, moment: float, target: Path) -> None:
    """A record as it was at a moment."""
    target.mkdir()
    for file in run.iterdir():
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line).get("t", 0.0) <= moment]
        (target / file.name).write_text("".join(kept), encoding="utf-8")


def live_frames(folder: str) -> Iterator[tuple[str, str]]:
    record = read_run(folder)
    clock = max((rank.start.time for rank in record.ranks.values()), default=0.0)
    moments = {
        "running": {"clock": clock},
        "without a step": {"clock": clock + 90, "log": ["a line", "another"]},
        "over": {"clock": clock, "ending": "the run finished"},
    }
    for what, options in moments.items():
        moment = take_moment(folder, record, summarise, **options)
        yield f"{what}, as a line", format_line(moment)
        for width in (60, 120):
            yield f"{what}, {width} columns", screen_of(moment, width)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN / "protocols")
    for width in WIDTHS:
        check(f"protocol/{name}-{width}.txt", protocol_text(name, width))
    check(
        f"protocol/{name}.md", document_markdown(protocol_document(ProtocolResult.read(Path(name))))
    )
    # What is printed as JSON is what was read, field by field; later versions have more fields,
    # and figures have the labels of today.
    found, known = (
        json.loads(text)
        for text in (protocol_text(name, as_json=True), Path(name, "protocol.json").read_text())
    )
    for row in known["matrix"]["rows"]:
        row["label"] = FIGURES[row["name"]].label
    for run in (run for arm in known["arms"] for run in arm["runs"]):
        # What earlier versions noted, and nobody reads.
        run.pop("page_cache", None)
    assert without_later_fields(found, known) == known


def without_later_fields(found: Any, known: Any) -> Any:
    if isinstance(known, dict):
        return {key: without_later_fields(found[key], value) for key, value in known.items()}
    if isinstance(known, list) and len(known) == len(found):
        return [without_later_fields(*pair) for pair in zip(found, known, strict=True)]
    return found


def protocol_text(folder: str, width: int = 0, *, as_json: bool = False) -> str:
    from fast_axolotl.cli.options import print_result

    result = ProtocolResult.read(Path(folder))
    with terminal(width) as (out, _):
        print_result(result, protocol_document(result), as_json=as_json)
    return plain(out.getvalue())


LIMIT = ("--fail-if", "tokens_per_second < 0.97")
SAMPLES = ("--fail-if", "samples_per_second < 0.97")
COMPARISONS = {
    "runs": ("../runs/data-rate", "../runs/data-rate-device"),
    "runs-single-limit": ("../runs/data-rate", "../runs/swap", "--single", *SAMPLES),
    "runs-limit": ("../runs/data-rate", "../runs/data-rate-device", *LIMIT),
    "one-protocol": ("three-arms",),
    "one-protocol-limits": ("commands", *LIMIT, "--fail-if", "host_stall_fraction > +0.02"),
    "two-protocols": ("commands", "commands-failing"),
    "different-losses": ("single-pair",),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_folders_are_compared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(GOLDEN / "protocols")
    arguments = ("compare", *COMPARISONS[name])
    for width in WIDTHS:
        check(f"compare/{name}-{width}.txt", command(*arguments, width=width).text(arguments))
    arguments += ("--markdown",)
    check(f"compare/{name}.md", command(*arguments).text(arguments))
    check(f"compare/{name}.json", command(*arguments[:-1], "--json").json())


PAGES = {
    "compute-everything": ("runs/compute-everything",),
    "lively": ("runs/lively",),
    "nan": ("runs/nan",),
    "many-ranks": ("runs/mixed-unseen-communication",),
    "two-runs": ("runs/by-the-meter", "runs/crashed-late"),
    "three-arms": ("protocols/three-arms",),
    "in-the-middle": ("protocols/in-the-middle", "runs/data-rate"),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    monkeypatch.chdir(GOLDEN)
    page, markdown = tmp_path / "page.html", tmp_path / "page.md"
    done = command("report", *PAGES[name], "-o", str(page), "--markdown", str(markdown), "--json")
    assert done.code == 0, done.err
    words, charts = read_page(page.read_text(encoding="utf-8"))
    check(f"report/{name}.txt", words)
    check(f"report/{name}-charts.json", charts)
    check(f"report/{name}.md", plain(markdown.read_text(encoding="utf-8")))
    answer = done.json()
    for file in answer["files"]:
        file["path"], file["bytes"] = Path(file["path"]).name, "BYTES"
    check(f"report/{name}-answer.json", answer)


STREAM = {"streaming": True}
KEPT = {"persistent_workers": True}
PACKED = {**STREAM, "sample_packing": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing known": {},
    "no workers": {"num_workers": 0},
    "a worker": {"num_workers": 1, "prefetch_factor": 2},
    "deep queue, kept workers": {"num_workers": 2, "prefetch_factor": 256, **KEPT},
    "full cores": {"num_workers": 8, "prefetch_factor": 2},
    "dispatcher": {"num_workers": 8, "prefetch_factor": 2, "dispatcher": True},
    "two shards": {"num_workers": 2, "prefetch_factor": 2, "num_shards": 2},
    "stream": {"num_workers": 1, "prefetch_factor": 2, "config": STREAM},
    "packed stream": {"num_workers": 0, "config": PACKED},
    "accelerated stream": {"num_workers": 8, "config": PACKED, "replacements": ["sampler"]},
    "flash attention": {"config": {"attn_implementation": "flash_attention_2"}},
}
SOURCES = ("loop", "transformers", "lightning", "axolotl")
ADVISED = sorted(path.stem for path in (GOLDEN / "expected" / "advice").iterdir())
"""A run, or one whose waits have a cause: ``data-periodic-with-epochs``."""


@pytest.mark.parametrize("name", ADVISED)
def test_what_is_advised_fits_the_trainer_and_its_settings(name: str, tmp_path: Path) -> None:
    run, _, causes = name.partition("-with-")
    advice: dict[str, list[str]] = {}
    for source in SOURCES:
        for label, settings in SETTINGS.items():
            folder = tmp_path / f"{source} {label}"
            alter(GOLDEN / "runs" / run, folder, source, settings, causes.removesuffix("s"))
            action = read(folder)[1].verdict.action
            advice.setdefault(action, []).append(f"{source}, {label}")
    check(f"advice/{name}.json", advice)


def alter(run: Path, target: Path, source: str, settings: dict[str, Any], cause: str) -> None:
    """The same record of another trainer with other settings, whose waits have a cause."""
    target.mkdir()
    for file in run.iterdir():
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            if line["kind"] == "start":
                line["source"] = source
            if line["kind"] == "settings":
                kept = {"gradient_accumulation": line["values"].get("gradient_accumulation", 1)}
                line["values"] = {**kept, **settings}
            if cause and line["kind"] == "steps":
                line["waits_by_cause"] = {cause: line["host_wait_seconds"]}
        (target / file.name).write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")


def commands_of(app: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in getattr(app, "commands", {}).items():
        yield from commands_of(inner, (*path, name))


def test_the_help_of_every_command() -> None:
    wanted = "0.25."
    if not version("typer").startswith(wanted):
        pytest.skip(f"the help is of typer {wanted}x, and draws itself anew in others")
    app = importlib.import_module("typer.main").get_command(
        importlib.import_module("fast_axolotl.cli").app
    )
    texts = []
    for path in commands_of(app):
        arguments = (*path, "--help")
        texts.append(command(*arguments).text(arguments))
    check("help.txt", "\n".join(texts))


def test_the_status_with_axolotl() -> None:
    found = version("axolotl") if importlib.util.find_spec("axolotl") else "none"
    if found != "0.19.0":
        pytest.skip(f"the status is that with Axolotl 0.19.0, and here is {found}")
    check("status.json", {**command("status", "--json").json(), "axolotl": "VERSION"})
    check("status.txt", command("status").out.replace(found, "VERSION"))


DOORS = {"FastAxolotlPlugin", "MeterCallback", "TorchDataset", "TrainingMeter", "watch_torch"}
"""What the documentation has users import from ``integrations``, and what it inherits from."""


def test_what_trainers_import_is_where_it_was_with_the_same_parameters() -> None:
    # Read and not imported: that would take longer than all other tests of this file.
    folder = Path(fast_axolotl.__file__).parent / "integrations"
    assert "FastAxolotlPlugin" in (folder / "axolotl.py").read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in DOORS:
                inner = node.body if isinstance(node, ast.ClassDef) else [node]
                functions = [one for one in inner if isinstance(one, ast.FunctionDef)]
                public = [one for one in functions if one.name == "__init__" or one.name[0] != "_"]
                found[f"{file.stem}.{node.name}"] = {
                    one.name: ast.unparse(one.args) for one in public
                }
    check("integrations.json", found)


def make_files(folder: Path) -> None:
    """Data of every kind that cannot be read, and some that can."""
    texts: dict[str, str | bytes] = {
        "latin.jsonl": b'{"a": "\xe9"}\n',
        "rows.jsonl": '{"id": 1, "text": "a"}\n{"id": 2, "text": "b"}\n{"id": 1, "text": "a"}\n',
        "broken.jsonl": '{"id": 1}\n{broken\n',
        "array.jsonl": "[1, 2]\n",
        "conflict.jsonl": '{"id": 1}\n{"id": "one"}\n',
        "broken.csv": "a,b\n1,2\n3\n",
        "broken.json": '[{"a": 1}, {"a": ',
        "cut.parquet": "PAR1",
        "unknown.xyz": "?",
        "empty.jsonl": "",
        "config.yml": "base_model: x\n",
        "page.html": "mine",
        "record/rank-0.jsonl": "",
        "later/rank-0.jsonl": '{"kind":"start","schema":9,"time":0.0,"pid":1,"host":"h",'
        '"version":"9"}\n',
        "protocol/protocol.json": "{",
        "nothing/x": "",
    }
    files.lay_out(folder, texts)
    shutil.copytree(GOLDEN / "protocols" / "three-arms", folder / "three-arms")
    shutil.copytree(GOLDEN / "runs" / "data-rate", folder / "run")


def commands_in(name: str) -> list[str]:
    """What is typed in a golden file: a case more is a line more there, and is answered anew."""
    text = (GOLDEN / "expected" / name).read_text(encoding="utf-8")
    return re.findall(r"^\$ fast-axolotl ?(.*)$", text, re.M)


def test_every_mistake_has_its_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    texts = []
    for line in commands_in("mistakes.txt"):
        arguments = shlex.split(line)
        before = sorted(path.name for path in tmp_path.iterdir())
        done = command(*arguments)
        text = done.text([line]).replace(str(Path(sys.executable).parent), "BIN")
        texts.append(re.sub(r"(corrupt or truncated) \(.*\)", r"\1 (BY PYARROW)", text))
        new = sorted({path.name for path in tmp_path.iterdir()} - set(before))
        texts[-1] += f"[new: {', '.join(new)}]\n" if new else ""
    check("mistakes.txt", "\n".join(texts))


def test_what_reading_and_deduplicating_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = "\n".join(command(*shlex.split(line)).text([line]) for line in commands_in("work.txt"))
    # Times, rates and sizes are of this machine.
    text = re.sub(r"[\d,.]+ (µs|ms|s|[kMG]?B|rows/s)\b", "N", text)
    text = re.sub(r"(rows/s\s+|(?:second|bytes|set)\w*\"?:\s+)[\d,.e-]+", r"\1N", text)
    check("work.txt", text)


def test_every_wrong_call_has_its_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    check_calls("files")
