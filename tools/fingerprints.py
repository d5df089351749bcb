"""Add the fingerprints of the installed Axolotl to the table of those that are familiar.

    python tools/fingerprints.py            print what is missing
    python tools/fingerprints.py --write    add it to the table

To be run only after the tests against that Axolotl have passed with the replacements in place.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fast_axolotl.axolotl import patches
from fast_axolotl.axolotl.patching import fingerprint

TABLE = Path(patches.__file__)
HEAD = "_FINGERPRINTS = {\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="add what is missing to the table")
    write = parser.parse_args().write
    names = sorted(
        {name for item in patches.REPLACEMENTS for name in (item.target, *item.relies_on)}
    )
    table = {name: list(patches.KNOWN.get(name, ())) for name in names}
    for name, known in table.items():
        found = fingerprint(name)
        if not found:
            print(f"{name}: no source")
        elif found not in known:
            print(f"{name}: {found}")
            known.append(found)
    if write:
        head, _, rest = TABLE.read_text(encoding="utf-8").partition(HEAD)
        tail = rest.partition("}\n")[2]
        rows = [f'    "{name}": "{" ".join(known)}",\n' for name, known in table.items()]
        TABLE.write_text(f"{head}{HEAD}{''.join(rows)}}}\n{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
