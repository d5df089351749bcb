"""Makes the pictures of the README and the example report: ``make pictures``.

They show a real training, ``examples/chat_training.py``, measured as it is and then with what the
verdict advises. Its records on an H200 are in ``examples/h200``. ``--run FOLDER`` makes such
records on this machine first, and the pictures from those.

The live view is a frame of the first run, written as SVG. The report is drawn by Chromium.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from fast_axolotl.cli.report import make_documents
from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import read_run
from fast_axolotl.record.protocol_result import ProtocolResult
from fast_axolotl.report.comparison import protocol_document
from fast_axolotl.report.live import lay_out, take_moment
from fast_axolotl.report.page import render_page
from fast_axolotl.report.runs import ReportRun, show_short_summary
from fast_axolotl.report.terminal import print_document

REPOSITORY = Path(__file__).parents[1]
RECORDS = REPOSITORY / "examples" / "h200"
TRAINING = REPOSITORY / "examples" / "chat_training.py"
RESULTS = REPOSITORY / "benchmarks" / "results"
REPORT = REPOSITORY / "docs" / "h200-report.html"
IMAGES = REPOSITORY / "docs" / "images"
WIDTH = 92
LINE_HEIGHT = 24.4
"""Of Rich's SVG, in its own units."""
MOMENT = 45.0
"""Seconds after the start of the run."""

SVG = """\
<svg viewBox="0 0 1150 HEIGHT" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
<rect fill="#16181d" width="100%" height="100%" rx="8"/>
<g transform="translate(14, 14)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""
"""Rich's own template without its window frame, and without fonts from another place."""


def make_records(folder: Path) -> None:
    """Measure the training, then compare it with itself as the verdict advises."""
    program = [sys.executable, "-m", "fast_axolotl"]
    training = shlex.join([sys.executable, str(TRAINING), str(folder / "work")])
    before = folder / "before"
    command = [*program, "measure", "--output", str(before), "--", *shlex.split(training)]
    subprocess.run(command, check=True)
    action = summarise(read_run(before)).verdict.action
    workers = re.search(r"num_workers=(\d+)", action)
    if workers is None:
        sys.exit(f"the training is not data-bound here, so nothing is compared: {action}")
    command = [*program, "protocol", "--output", str(folder / "protocol"), "--pairs", "3"]
    command += ["--baseline", training, "--candidate", f"{training} --workers {workers[1]}"]
    subprocess.run(command, check=True)


def live_view(run: Path) -> str:
    """A frame of the live view as SVG: the run as it was before it ended."""
    with tempfile.TemporaryDirectory() as folder:
        files = {file: file.read_text("utf-8").splitlines(keepends=True) for file in run.iterdir()}
        starts = {file: json.loads(lines[0])["time"] for file, lines in files.items()}
        for file, lines in files.items():
            until = min(starts.values()) + MOMENT - starts[file]
            kept = [line for line in lines if json.loads(line).get("t", 0.0) <= until]
            (Path(folder) / file.name).write_text("".join(kept), encoding="utf-8")
        record = read_run(folder)
    moment = take_moment("runs/before", record, summarise, clock=0.0)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(lay_out(moment))
    console.print(Text())
    lines = console.export_text(clear=False).count("\n")
    height = str(round(LINE_HEIGHT * lines + 28))
    shape = SVG.replace("HEIGHT", height)
    return console.export_svg(code_format=shape, theme=MONOKAI, unique_id="live")


def answers(records: Path) -> str:
    """What the two commands say of the records."""
    before, protocol = read_run(records / "before"), ProtocolResult.read(records / "protocol")
    one, other = (shlex.quote(" ".join(arm.command)) for arm in protocol.arms)
    out = io.StringIO()
    with redirect_stdout(out):
        print("$ fast-axolotl measure --output runs/before --", *protocol.arms[0].command)
        show_short_summary(ReportRun(name="", record=before, summary=summarise(before)))
        print(f"\n$ fast-axolotl protocol --baseline {one} --candidate {other}")
        print_document(protocol_document(protocol), width=120)
    return out.getvalue().replace(str(records), "runs")


def take_picture(page: Path, height: int) -> bytes:
    """A page as Chromium shows it."""
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "report.png"
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += [f"--user-data-dir={folder}/profile", "--hide-scrollbars"]
        command += [f"--window-size=1400,{height}", "--virtual-time-budget=20000"]
        command += [f"--screenshot={taken}", page.absolute().as_uri()]
        # Without a desktop it complains about much that does not matter here.
        subprocess.run(command, check=True, timeout=120, stderr=subprocess.DEVNULL)
        return taken.read_bytes()


def main() -> None:
    """Write the pictures, the example report and the dated result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="make the records first, here")
    folder: Path | None = parser.parse_args().run
    if folder is not None:
        make_records(folder)
    records = folder or RECORDS
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "live.svg").write_text(live_view(records / "before"), encoding="utf-8")
    page = render_page(make_documents([records / "protocol"])[0])
    # The path of the machine on which this runs is nobody's business.
    REPORT.write_text(page.replace(f"{records}/", "runs/"), encoding="utf-8")
    (IMAGES / "report.png").write_bytes(take_picture(REPORT, height=1150))
    started = time.gmtime(read_run(records / "before").ranks[0].start.time)
    result = RESULTS / f"{time.strftime('%Y-%m-%d', started)}-chat-training.txt"
    result.write_text(answers(records), encoding="utf-8")


if __name__ == "__main__":
    main()
