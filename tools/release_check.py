"""Does the wheel work for somebody who has nothing else: ``make release-check``.

Installs the one wheel in ``dist`` into an empty environment, with its dependencies and no extras,
and runs commands there, outside the repository: they check the installation, measure a loop, read a
file and run the demo, which takes a few minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

DIST = Path(__file__).parents[1] / "dist"
LOOP = """import time
from fast_axolotl import measure
with measure("runs/loop") as meter:
    for _ in meter.watch(range(300)):
        time.sleep(0.01)
        meter.step()
print(meter.summary())
"""
COMMANDS = (
    ("--version",),
    ("doctor",),
    ("measure", "--output", "runs/measured", "--", "python", "loop.py"),
    ("show", "--list", "runs"),
    ("read", "rows.jsonl"),
    ("demo",),
)


def main() -> None:
    wheels = list(DIST.glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"{DIST} holds {len(wheels)} wheels, not one: run make wheel")
    # What is here must not help: neither the source nor the packages of this environment.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory(prefix="fast-axolotl-release-") as folder:
        venv.create(f"{folder}/venv", with_pip=True)
        install = [f"{folder}/venv/bin/pip", "install", "--quiet", str(wheels[0])]
        subprocess.run(install, check=True, env=clean, cwd=folder)
        clean["PATH"] = f"{folder}/venv/bin:{clean['PATH']}"
        (Path(folder) / "loop.py").write_text(LOOP)
        (Path(folder) / "rows.jsonl").write_text('{"text": "a row"}\n' * 1000)
        for arguments in COMMANDS:
            command = [f"{folder}/venv/bin/fast-axolotl", *arguments]
            print("$ fast-axolotl", *arguments, flush=True)
            done = subprocess.run(
                command, env=clean, cwd=folder, stdout=subprocess.PIPE, text=True, check=False
            )
            print(done.stdout, flush=True)
            if done.returncode or not done.stdout.strip():
                sys.exit(f"fast-axolotl {arguments[0]} ended with {done.returncode}")
    print(f"{wheels[0].name} installs and runs in an empty environment")


if __name__ == "__main__":
    main()
