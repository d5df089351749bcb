"""``fast-axolotl report``: runs or a protocol as one HTML file that opens anywhere."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_axolotl.cli.options import AsJson, examples, latest_run
from fast_axolotl.errors import DataError, FastAxolotlError, UsageError

if TYPE_CHECKING:
    from fast_axolotl.report.content import Report, ReportRun

REPORT_EXAMPLES = examples(
    "report",
    "report fast-axolotl-runs/20300131-120000-axolotl",
    "report protocol/ -o answer.html --png answer.png",
    "report runs/before runs/after --markdown comment.md",
)

_DEFAULT = Path("report.html")
_MARKDOWN_MARK = "<!-- fast-axolotl report -->"
"""First in the Markdown that is written, to be known again; a pull request shows nothing of it."""
_PNG_MARK = b"\x89PNG\r\n\x1a\n"
_PAGE_HEAD_BYTES = 4096
"""Within which a page names its maker."""


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders of records, or of a protocol. Default: the latest run in "
            "fast-axolotl-runs/.",
            metavar="[RUN…]",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The HTML file. Default: report.html, unless --markdown or --png is given.",
        ),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Also write Markdown, for a pull request.")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(help="Also write a picture of the top, for a slide; needs Chromium."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML file about runs or a protocol: verdict, comparison, charts, settings, data.

    The file contains everything it shows and works offline. You can write it while a run is still
    going on.
    """
    if output is None and markdown is None and png is None:
        output = _DEFAULT
    runs = runs or [latest_run()]
    made = make_report(runs, now=time.time())
    written = _write_all(made, output=output, markdown=markdown, png=png)
    found: dict[str, Any] = {
        "title": made.title,
        "files": [{"path": str(path), "bytes": path.stat().st_size} for path in written],
    }
    found |= {
        "runs": [
            {
                "name": run.name,
                "folder": run.summary.run_dir,
                "verdict": run.summary.verdict.kind,
                "subtype": run.summary.verdict.subtype,
                "headline": run.summary.verdict.headline,
            }
            for run in made.runs
        ],
        "answer": made.protocol.paragraph if made.protocol is not None else None,
        "notes": list(made.notes),
    }
    if as_json:
        print(json.dumps(found, ensure_ascii=False, indent=2))
        return
    for note in found["notes"]:
        print(note)
    for path in written:
        print(f"{path}  {path.stat().st_size / 1e6:,.1f} MB")


def write_report(folders: Sequence[Path], output: Path) -> None:
    """Write the page of some folders."""
    _write_all(make_report(folders, now=time.time()), output=output, markdown=None, png=None)


def make_report(folders: Sequence[Path], *, now: float) -> Report:
    """Read what is in the folders."""
    from fast_axolotl import __version__
    from fast_axolotl.record.protocol_result import PROTOCOL_FILE, ProtocolResult
    from fast_axolotl.report.content import Report, shown_run

    protocols = [folder for folder in folders if (folder / PROTOCOL_FILE).is_file()]
    if len(protocols) > 1:
        names = " and ".join(map(str, protocols))
        raise UsageError(
            f"{names} are protocols, and a report shows only one: pass one of them, or use "
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
            runs.append(_read(protocols[0] / run.folder, arm.name))
        except FastAxolotlError as error:
            notes.append(f"{arm.name} has no charts: {error}.")
    arm_runs = len(runs)
    singles = [folder for folder in folders if folder not in protocols]
    runs += [_read(folder, name) for folder, name in zip(singles, _names(singles), strict=True)]
    return Report(
        title=protocol.title if protocol is not None else ", ".join(run.name for run in runs),
        runs=tuple(runs),
        arm_runs=arm_runs,
        protocol=protocol,
        notes=tuple(notes),
        made=now,
        version=__version__,
    )


def _read(folder: Path, name: str) -> ReportRun:
    from fast_axolotl.measure.summary import summarise
    from fast_axolotl.record.run_folders import read_training
    from fast_axolotl.report.content import ReportRun

    record = read_training(folder)
    return ReportRun(name=name, record=record, summary=summarise(record))


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, with those of their parents where they would be the same."""
    names = [folder.absolute().name for folder in folders]
    if len(set(names)) == len(names):
        return names
    parents = [f"{folder.absolute().parent.name}/{folder.absolute().name}" for folder in folders]
    return parents if len(set(parents)) == len(parents) else [str(folder) for folder in folders]


def check_targets(
    *, output: Path | None = None, markdown: Path | None = None, png: Path | None = None
) -> None:
    """Refuse to replace any file but an earlier report of the same form, or an empty one."""
    from fast_axolotl.report.page import GENERATOR

    page_mark = f'content="{GENERATOR}"'.encode()
    for path, flag, mark, reach, what in (
        (output, "-o", page_mark, _PAGE_HEAD_BYTES, "report of fast-axolotl"),
        (markdown, "--markdown", _MARKDOWN_MARK.encode(), 0, "Markdown of a report"),
        (png, "--png", _PNG_MARK, 0, "PNG"),
    ):
        # A file that has the mark at its start, or within reach of it, is ours to replace.
        if path is None or not path.exists():
            continue
        if not path.is_file():
            raise UsageError(
                f"{path} already exists and is not a file: choose another name with {flag}"
            )
        try:
            with path.open("rb") as opened:
                head = opened.read(reach or len(mark))
        except OSError as error:
            reason = error.strerror or str(error)
            raise DataError(
                f"already exists and cannot be read ({reason}): choose another name with {flag}",
                path=str(path),
            ) from error
        if head and mark not in head:
            raise UsageError(
                f"{path} already exists and is not a {what}: choose another name with {flag}"
            )
    targets = [path.absolute() for path in (output, markdown, png) if path is not None]
    if len(set(targets)) < len(targets):
        raise UsageError("-o, --markdown and --png need different files")


def _write_all(
    made: Report, *, output: Path | None, markdown: Path | None, png: Path | None
) -> list[Path]:
    from fast_axolotl.report.picture import find_browser, take_picture

    check_targets(output=output, markdown=markdown, png=png)
    browser = find_browser() if png is not None else ""
    written = []
    if output is not None or png is not None:
        from fast_axolotl.report.page import render_report

        page = render_report(made)
        if output is not None:
            write_page(output, page)
            written.append(output)
        if png is not None:
            with tempfile.TemporaryDirectory(prefix="fast-axolotl-report-") as folder:
                path = Path(folder) / "report.html"
                write_page(path, page)
                take_picture(path, png, browser=browser)
            written.append(png)
    if markdown is not None:
        text = _markdown(made)
        # A comment ends at an empty line: what follows it is Markdown again.
        write_page(markdown, f"{_MARKDOWN_MARK}\n\n{text}\n")
        written.append(markdown)
    return written


def _markdown(made: Report) -> str:
    from fast_axolotl.report.matrix import escape_markdown, protocol_markdown, runs_markdown

    parts = []
    rest = made.runs[made.arm_runs :]
    if made.protocol is not None:
        parts.append(protocol_markdown(made.protocol))
        if rest:
            parts.append(f"## {escape_markdown(', '.join(run.name for run in rest))}")
    if rest or made.protocol is None:
        parts.append(runs_markdown(rest))
    return "\n\n".join(part.rstrip("\n") for part in parts)


def write_page(path: Path, text: str) -> None:
    from fast_axolotl.report.picture import written_beside

    with written_beside(path.resolve()) as beside:
        # A path in a record may hold bytes that are no text.
        beside.write_text(text, encoding="utf-8", errors="backslashreplace")
