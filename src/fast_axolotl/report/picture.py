"""A page as a picture for a slide: verdict and matrix, taken by an installed Chromium or Chrome."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fast_axolotl.errors import DataError, MissingExtraError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
"""Commands that are looked for, in this order."""

_WIDTH, _HEIGHT = 1600, 900
_SCALE = 2
_MOST_SECONDS = 120.0
_DRAWING_MILLISECONDS = 20_000
"""Of the page's own clock, which stands still while the browser works."""


def find_browser(which: Callable[[str], str | None] = shutil.which) -> str:
    """The command of a browser that can take pictures."""
    for name in BROWSERS:
        if browser := which(name):
            return browser
    raise MissingExtraError(
        f"a picture needs a browser, and none of {', '.join(BROWSERS)} is installed: "
        "apt install chromium, or open the report and take a screenshot"
    )


def take_picture(page: Path, picture: Path, *, browser: str, scale: int = _SCALE) -> None:
    """Write the top of a page as PNG, 3200 × 1800, in a folder that is made if need be."""
    with tempfile.TemporaryDirectory(prefix="fast-axolotl-browser-") as profile:
        taken = Path(profile) / "picture.png"
        # A container's root may make no sandbox; the page is our own and may connect to nothing.
        sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        command = [
            browser,
            "--headless",
            *sandbox,
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            f"--user-data-dir={profile}/profile",
            f"--window-size={_WIDTH},{_HEIGHT}",
            f"--force-device-scale-factor={scale}",
            f"--virtual-time-budget={_DRAWING_MILLISECONDS}",
            f"--screenshot={taken}",
            # The window's own height is that of a window with a bar, which there is none of.
            f"{page.absolute().as_uri()}#slide={_HEIGHT}",
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_MOST_SECONDS, check=False
            )
            said = " ".join(done.stderr.split())[-300:] or "nothing"
        except subprocess.TimeoutExpired:
            said = f"no answer in {_MOST_SECONDS:.0f} s"
        except OSError as error:
            said = str(error)
        if not taken.exists() or not taken.stat().st_size:
            raise DataError(
                f"{browser} could not take a picture; its message: {said}", path=str(picture)
            )
        with written_beside(picture, "; choose another name with --png") as beside:
            shutil.copyfile(taken, beside)


@contextmanager
def written_beside(path: Path, cure: str = "") -> Iterator[Path]:
    """A file to write that takes the path's place: a full disk leaves no half of one."""
    target = path.resolve()  # a link stays one
    beside = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        beside.replace(target)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        reason = error.strerror or str(error)
        raise DataError(f"cannot be written: {reason}{cure}", path=str(path)) from error
