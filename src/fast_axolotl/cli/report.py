"""``fast-axolotl report``: runs or a protocol as one HTML file that opens anywhere."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fast_axolotl.cli.options import AsJson
from fast_axolotl.errors import DataError, FastAxolotlError, UsageError

if TYPE_CHECKING:
    from fast_axolotl.record.comparison import Protocol
    from fast_axolotl.report.content import Report, ReportRun

__all__ = ["REPORT_EXAMPLES", "make_report", "report", "write_report"]

REPORT_EXAMPLES = (
    "Examples:\n\n  fast-axolotl report fast-axolotl-runs/20300131-120000-axolotl\n\n"
    "  fast-axolotl report protocol/ -o answer.html --png answer.png\n\n"
    "  fast-axolotl report runs/before runs/after --markdown comment.md"
)

_DEFAULT = Path("report.html")


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of records, or the folder of a protocol.", metavar="RUN…"),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The page to write; report.html, unless only --markdown or --png is asked for.",
        ),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write it as Markdown, too, for a pull request.")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(help="Write its top as a picture, too, for a slide; needs Chromium."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write runs or a protocol as one HTML file: verdict, matrix, charts, settings, raw data.

    The file opens offline and asks nothing of the network. It may be written while a run still
    goes on.
    """
    if output is None and markdown is None and png is None:
        output = _DEFAULT
    made = make_report(runs, now=time.time())
    written = _write_all(made, output=output, markdown=markdown, png=png)
    if as_json:
        print(json.dumps(_outcome(made, written), ensure_ascii=False, indent=2))
        return
    for note in made.notes:
        print(note)
    for path in written:
        print(f"{path}  {path.stat().st_size / 1e6:,.1f} MB")


def write_report(folders: Sequence[Path], output: Path) -> None:
    """Write the page of some folders."""
    _write_all(make_report(folders, now=time.time()), output=output, markdown=None, png=None)


def make_report(folders: Sequence[Path], *, now: float) -> Report:
    """Read what is in the folders."""
    from fast_axolotl import __version__
    from fast_axolotl.record.comparison import PROTOCOL_FILE, Protocol
    from fast_axolotl.report.content import Report

    protocols = [folder for folder in folders if (folder / PROTOCOL_FILE).is_file()]
    if len(protocols) > 1:
        names = " and ".join(map(str, protocols))
        raise UsageError(
            f"{names} are protocols, and a report shows one: give one of them, or "
            "fast-axolotl compare them"
        )
    protocol = Protocol.read(protocols[0]) if protocols else None
    notes: list[str] = []
    found: list[ReportRun] = []
    if protocol is not None:
        found += _arm_runs(protocol, protocols[0], notes)
    singles = [folder for folder in folders if folder not in protocols]
    found += [_read(folder, name) for folder, name in zip(singles, _names(singles), strict=True)]
    title = protocol.title if protocol is not None else ", ".join(run.name for run in found)
    return Report(
        title=title,
        runs=tuple(found),
        protocol=protocol,
        notes=tuple(notes),
        made=now,
        version=__version__,
    )


def _arm_runs(protocol: Protocol, folder: Path, notes: list[str]) -> list[ReportRun]:
    """The run of each arm that stands for it: the one that its verdict is of."""
    from fast_axolotl.report.content import shown_run

    found = []
    for arm in protocol.arms:
        run = shown_run(arm)
        if run is None:
            notes.append(f"No run of the arm {arm.name} counts, so it has no charts.")
            continue
        try:
            found.append(_read(folder / run.folder, arm.name))
        except FastAxolotlError as error:
            notes.append(f"The arm {arm.name} has no charts: {error}.")
    return found


def _read(folder: Path, name: str) -> ReportRun:
    from fast_axolotl.measure.summary import summarise
    from fast_axolotl.record import read_run
    from fast_axolotl.report.content import ReportRun

    record = read_run(folder)
    return ReportRun(name=name, record=record, summary=summarise(record))


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, with those of their parents where they would be the same."""
    names = [folder.absolute().name for folder in folders]
    if len(set(names)) == len(names):
        return names
    parents = [f"{folder.absolute().parent.name}/{folder.absolute().name}" for folder in folders]
    return parents if len(set(parents)) == len(parents) else [str(folder) for folder in folders]


def _write_all(
    made: Report, *, output: Path | None, markdown: Path | None, png: Path | None
) -> list[Path]:
    from fast_axolotl.report.picture import find_browser, take_picture

    browser = find_browser() if png is not None else ""
    written = []
    if output is not None or png is not None:
        from fast_axolotl.report.page import render_report

        page = render_report(made)
        if output is not None:
            _write_page(output, page)
            written.append(output)
        if png is not None:
            with tempfile.TemporaryDirectory(prefix="fast-axolotl-report-") as folder:
                path = Path(folder) / "report.html"
                _write(path, page)
                take_picture(path, png, browser=browser)
            written.append(png)
    if markdown is not None:
        _write(markdown, _markdown(made))
        written.append(markdown)
    return written


def _markdown(made: Report) -> str:
    if made.protocol is not None:
        from fast_axolotl.report.matrix import protocol_markdown

        return protocol_markdown(made.protocol)
    from fast_axolotl.report.markdown import runs_markdown

    return runs_markdown(made.runs)


def _write_page(path: Path, page: str) -> None:
    """Replaces an earlier report, and no other file."""
    from fast_axolotl.report.page import GENERATOR

    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as opened:
            if f'content="{GENERATOR}"' not in opened.read(4096):
                raise UsageError(
                    f"{path} is there already, and it is no report of fast-axolotl: "
                    "give another name with -o"
                )
    _write(path, page)


def _write(path: Path, text: str) -> None:
    """Beside it first, so that a full disk leaves no half of a file."""
    beside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A path in a record may hold bytes that are no text.
        beside.write_text(text, encoding="utf-8", errors="backslashreplace")
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        reason = error.strerror or str(error)
        raise DataError(f"cannot be written: {reason}", path=str(path)) from error


def _outcome(made: Report, written: Sequence[Path]) -> dict[str, Any]:
    return {
        "title": made.title,
        "files": [{"path": str(path), "bytes": path.stat().st_size} for path in written],
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
