"""``fast-axolotl show`` and ``report``: show a run in the terminal or as one HTML file."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from fast_axolotl.cli.options import AsJson, latest_run, print_result, say
from fast_axolotl.errors import FastAxolotlError, UsageError
from fast_axolotl.record import RunRecord, read_run

if TYPE_CHECKING:
    from fast_axolotl.report.document import Document
    from fast_axolotl.report.runs import ReportRun

_MARKDOWN_MARK = "<!-- fast-axolotl report -->"
"""First in the Markdown that is written, to be known again; a pull request shows nothing of it."""
_HEAD_BYTES = 4096
"""Within which a page names its maker."""
_DEAD_SECONDS = 10.0
"""Without a line, for a run that nobody is seen to write to count as cut off."""
_RELOAD_SECONDS = 5.0
"""Between two pages of a run that goes on, at least: they take at most a tenth of a core."""


def report(
    runs: Annotated[
        list[Path] | None,
        Argument(help="Records, or a protocol. Default: the latest run here.", metavar="[RUN…]"),
    ] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", help="Default: report.html, unless with --markdown.")
    ] = None,
    markdown: Annotated[Path | None, Option(help="Also write Markdown.")] = None,
    is_followed: Annotated[
        bool,
        Option("--follow", help="Write it again and again until the run ends; open it meanwhile."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file about runs or a protocol: verdict, comparison, charts, settings, data.

    The file contains everything it shows and works offline. You can write it while a run is still
    going on; with --follow it is a live view in the browser, because the open page reloads itself.
    """
    from fast_axolotl.record.codec import to_json, write_text
    from fast_axolotl.record.protocol_result import PROTOCOL_FILE
    from fast_axolotl.report.markdown import document_markdown
    from fast_axolotl.report.page import render_page

    if output is None and (markdown is None or is_followed):
        output = Path("report.html")
    check_targets(output=output, markdown=markdown)
    runs = runs or [latest_run()]
    if is_followed and any((run / PROTOCOL_FILE).exists() for run in runs):
        raise UsageError("--follow takes the folders of runs; leave it out for a protocol")
    if output is not None and is_followed:
        say(f"{output.absolute().as_uri()} follows the run; Ctrl-C ends that")
        pause = _RELOAD_SECONDS
        with suppress(KeyboardInterrupt):
            while not all(how_run_ended(read_run(run)) for run in runs):
                begun = time.monotonic()
                page = make_documents(runs, is_running=True)[0]
                write_text(output, render_page(replace(page, reload_seconds=pause)))
                pause = max(_RELOAD_SECONDS, 9 * (time.monotonic() - begun))
                time.sleep(pause)
    page, text = make_documents(runs)
    if output is not None:
        write_text(output, render_page(page))
    if markdown is not None:
        # A comment ends at an empty line: what follows it is Markdown again.
        write_text(markdown, f"{_MARKDOWN_MARK}\n\n{document_markdown(text)}")
    written = [path for path in (output, markdown) if path is not None]
    protocol = page.data["protocol"]
    found: dict[str, Any] = {
        "title": page.title,
        "files": [{"path": str(path), "bytes": path.stat().st_size} for path in written],
        "notes": list(page.footnotes),
        "answer": None if protocol is None else protocol.paragraph,
    }
    lines = [f"{file['path']}  {file['bytes'] / 1e6:,.1f} MB" for file in found["files"]]
    print(to_json(found) if as_json else "\n".join([*page.footnotes, *lines]))


def show(
    run: Annotated[
        Path | None, Argument(help="A record. Default: the latest one here.", metavar="[RUN]")
    ] = None,
    is_all: Annotated[bool, Option("--all", help="Print every figure.")] = False,
    is_list: Annotated[
        bool, Option("--list", help="List the runs of a folder. Default: fast-axolotl-runs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what limits a run: the verdict, the reasons, the advice and the main figures.

    It also works while the run is still going on, and after the run was killed.
    """
    from fast_axolotl.report.runs import run_document, show_short_summary

    if is_list:
        print_runs(run or Path("fast-axolotl-runs"), as_json=as_json)
        return
    shown = read_report_run(run or latest_run(), "")
    if is_all or as_json:
        print_result(shown.summary, run_document(shown), as_json=as_json)
    else:
        show_short_summary(shown)


def print_runs(root: Path, *, as_json: bool) -> None:
    """The records of a folder, oldest first, a line each."""
    from fast_axolotl.record.units import format_count, format_date, format_share
    from fast_axolotl.report.document import Document, Table
    from fast_axolotl.report.runs import verdict_badge

    runs = []
    for folder in {file.parent for file in root.glob("*/*.jsonl")}:
        try:
            found = read_report_run(folder, folder.name)
        except FastAxolotlError as error:
            say(str(error))
            continue
        summary, parts = found.summary, [found.record.system, *found.record.ranks.values()]
        commands = (part.start.command for part in parts if part is not None)
        runs.append(
            {
                "run": found.name,
                "started": format_date(summary.started),
                "verdict": verdict_badge(summary.verdict.kind, summary.verdict.subtype)[1],
                "tokens/s": format_count(summary.tokens_per_second),
                "stall": format_share(summary.stall_fraction),
                "command": shlex.join(next(filter(None, commands), ())),
            }
        )
    if not runs:
        raise UsageError(f"there is no record in {root}/: name the folder that holds the runs")
    runs.sort(key=lambda run: run["started"])
    table = Table(header=list(runs[0]), rows=[list(run.values()) for run in runs])
    print_result(runs, Document(title="", blocks=[table]), as_json=as_json)


def make_documents(
    folders: Sequence[Path], *, is_running: bool = False
) -> tuple[Document, Document]:
    """What is in the folders: all of it for a page, and the answer for Markdown."""
    from fast_axolotl import __version__
    from fast_axolotl.record.protocol_result import PROTOCOL_FILE, ProtocolResult
    from fast_axolotl.report.comparison import protocol_document, runs_document, shown_run
    from fast_axolotl.report.document import Document
    from fast_axolotl.report.page import report_document

    protocols = [folder for folder in folders if (folder / PROTOCOL_FILE).is_file()]
    if len(protocols) > 1:
        both = " and ".join(map(str, protocols))
        raise UsageError(
            f"{both} are protocols, and a report shows only one: pass one of them, or use "
            "fast-axolotl compare"
        )
    protocol = ProtocolResult.read(protocols[0]) if protocols else None
    notes: list[str] = []
    runs: list[ReportRun] = []
    for arm in protocol.arms if protocol is not None else ():
        # The run that stands for an arm: the one that its verdict is of.
        run = shown_run(arm)
        if run is None:
            notes.append(f"{arm.name} has no measured run, so it has no charts.")
            continue
        try:
            runs.append(read_report_run(protocols[0] / run.folder, arm.name))
        except FastAxolotlError as error:
            notes.append(f"{arm.name} has no charts: {error}.")
    arm_runs = len(runs)
    singles = [folder for folder in folders if folder not in protocols]
    # The folders' own names; where those would be the same, their paths.
    names = [folder.absolute().name for folder in singles]
    if len(set(names)) < len(names):
        names = list(map(str, singles))
    for folder, name in zip(singles, names, strict=True):
        runs.append(replace(read_report_run(folder, name), is_running=is_running))
    title = protocol.title if protocol is not None else ", ".join(run.name for run in runs)
    page = report_document(
        title,
        runs,
        protocol=protocol,
        arm_runs=arm_runs,
        notes=notes,
        made=time.time(),
        version=__version__,
    )
    text = runs_document(runs[arm_runs:], is_named=protocol is not None)
    if protocol is not None:
        answer = protocol_document(protocol)
        text = Document(title=answer.title, blocks=[*answer.blocks, *text.blocks])
    return page, text


def read_report_run(folder: Path, name: str) -> ReportRun:
    """A recorded run with its figures."""
    from fast_axolotl.measure.summary import summarise
    from fast_axolotl.record.folder import read_training
    from fast_axolotl.report.runs import ReportRun

    record = read_training(folder)
    return ReportRun(name=name, record=record, summary=summarise(record))


def how_run_ended(record: RunRecord) -> str:
    """Empty while a process is writing into the record."""
    from fast_axolotl.measure.summary import summarise
    from fast_axolotl.measure.writers import find_writer

    files = list(Path(record.path).glob("*.jsonl"))
    if any(find_writer(file) is not None for file in files):
        return ""
    summary = summarise(record)
    words = {"exception": "failed", "interrupted": "was interrupted", "finished": "finished"}
    if how := words.get(summary.end_reason):
        return f"the run {how}{summary.error and ': '}{summary.error}"
    # A folder that cannot be written does not tell whether a process of another machine lives.
    quiet = time.time() - max(file.stat().st_mtime for file in files)
    return "the run was cut off: its processes are gone" if quiet > _DEAD_SECONDS else ""


def check_targets(*, output: Path | None = None, markdown: Path | None = None) -> None:
    """Refuse to replace any file but an earlier report of the same form, or an empty one."""
    from fast_axolotl.report.page import GENERATOR

    for path, flag, mark, what in (
        (output, "-o", f'content="{GENERATOR}"', "report of fast-axolotl"),
        (markdown, "--markdown", _MARKDOWN_MARK, "Markdown of a report"),
    ):
        if path is None or not path.exists():
            continue
        is_ours = False
        if path.is_file():
            with suppress(OSError), path.open("rb") as opened:
                head = opened.read(_HEAD_BYTES)
                is_ours = not head or mark.encode() in head
        if not is_ours:
            raise UsageError(
                f"{path} already exists and is not a {what}: choose another name with {flag}"
            )
    if output is not None and markdown is not None and output.absolute() == markdown.absolute():
        raise UsageError("-o and --markdown need different files")
