"""Add the fingerprints of what is installed here to those that are familiar.

    python tools/fingerprints.py            print what is missing
    python tools/fingerprints.py --write    add it, with the version it was proven on

To be run only after the tests have passed here with the replacements in place. The table,
``fingerprints.json``, has for each function or module: fingerprint → versions of its package.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from pathlib import Path

from fast_axolotl.axolotl import patches
from fast_axolotl.axolotl.fingerprints import fingerprint

TABLE = Path(patches.__file__).with_name("fingerprints.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="add what is missing to the table")
    write = parser.parse_args().write
    before = json.loads(TABLE.read_text(encoding="utf-8"))
    table = {}
    for name in patches.RELIED_ON:
        table[name] = known = before.get(name, {})
        found = fingerprint(name)
        if not found:
            print(f"{name}: no source")
            continue
        if found not in known:
            print(f"{name}: {found}")
        version = importlib.metadata.version(name.partition(".")[0])
        known[found] = " ".join(sorted({*known.get(found, "").split(), version.partition("+")[0]}))
    if write:
        TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
