"""How much of the package a Parquet row runs through, and a wait on its way to the HTML page.

    python tools/walks.py            the number of files and functions
    python tools/walks.py --names    and their names

Everything runs once before, so that imports and first calls do not count. All threads count.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pyarrow as pa
import pyarrow.parquet as pq

import fast_axolotl
from fast_axolotl.cli import main as run_command

PACKAGE = Path(fast_axolotl.__file__).parent


def walk(work: Callable[[], None]) -> set[tuple[str, str]]:
    """Files and functions of the package that run during the work."""
    seen: set[tuple[str, str]] = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            name = getattr(code, "co_qualname", f"{code.co_name}:{code.co_firstlineno}")
            seen.add((Path(code.co_filename).relative_to(PACKAGE).as_posix(), name))

    work()
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return seen


def main() -> None:
    """Walks both ways and prints what was seen."""
    with_names = "--names" in sys.argv  # a walk has arguments of its own
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pq.write_table(
            pa.table({"text": [str(number) for number in range(10_000)]}), folder / "rows.parquet"
        )

        def read_rows() -> None:
            for _ in fast_axolotl.open_dataset(folder / "rows.parquet"):
                pass

        def show_wait() -> None:
            with fast_axolotl.measure(folder / f"run-{time.monotonic_ns()}") as meter:
                for _ in meter.watch([0] * 300):
                    time.sleep(0.001)
            run = max(folder.glob("run-*"))
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
                sys.argv = ["fast-axolotl", "report", str(run), "-o", str(folder / "page.html")]
                run_command()
            assert (folder / "page.html").stat().st_size > 10_000

        for title, work in (("a Parquet row", read_rows), ("a wait", show_wait)):
            seen = walk(work)
            files = {file for file, _ in seen}
            print(f"{title}: {len(files)} files, {len(seen)} functions")
            if with_names:
                for file, function in sorted(seen):
                    print(f"  {file} {function}")


if __name__ == "__main__":
    main()
