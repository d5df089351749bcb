"""Makes the two pictures of the README: ``python tools/pictures.py``.

The live view is a frame of a recorded run, written as SVG. The report is the example report as a
browser shows it, written as PNG; it needs Chromium.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from fast_axolotl.measure.summary import summarise
from fast_axolotl.record import read_run
from fast_axolotl.report.live import lay_out, take_moment

REPOSITORY = Path(__file__).parents[1]
RUN = REPOSITORY / "tests" / "golden" / "runs" / "data-rate-device"
REPORT = REPOSITORY / "docs" / "h200-report.html"
IMAGES = REPOSITORY / "docs" / "images"
WIDTH = 92
LINE_HEIGHT = 24.4
"""Of Rich's SVG, in its own units."""
MOMENT = 7.0
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


def live_view() -> str:
    """A frame of the live view as SVG: the run as it was before it ended."""
    with tempfile.TemporaryDirectory() as folder:
        for file in RUN.iterdir():
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if json.loads(line).get("t", 0.0) <= MOMENT]
            (Path(folder) / file.name).write_text("".join(kept), encoding="utf-8")
        record = read_run(folder)
    moment = take_moment("runs/a", record, summarise, clock=0.0)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in lay_out(moment, width=WIDTH):
        console.print(line)
    console.print(Text())
    lines = console.export_text(clear=False).count("\n")
    height = str(round(LINE_HEIGHT * lines + 28))
    shape = SVG.replace("HEIGHT", height)
    return console.export_svg(code_format=shape, theme=MONOKAI, unique_id="live")


def main() -> None:
    """Write both pictures."""
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "live.svg").write_text(live_view(), encoding="utf-8")
    report = Path(sys.argv[1]) if len(sys.argv) > 1 else REPORT
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "report.png"
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += [f"--user-data-dir={folder}/profile", "--hide-scrollbars"]
        command += ["--window-size=1600,900", "--virtual-time-budget=20000"]
        command += [f"--screenshot={taken}", report.absolute().as_uri()]
        subprocess.run(command, check=True, timeout=120)
        (IMAGES / "report.png").write_bytes(taken.read_bytes())


if __name__ == "__main__":
    main()
