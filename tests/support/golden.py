"""Golden files: what users see, kept as text, and how it is made and compared.

``FAST_AXOLOTL_UPDATE_GOLDEN=1 python -m pytest tests/test_golden.py`` writes them anew; the
difference is then read in ``git diff``.
"""

from __future__ import annotations

import contextlib
import difflib
import html.parser
import io
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import fast_axolotl
from fast_axolotl.cli import main

GOLDEN = Path(__file__).parents[1] / "golden"
RUNS = sorted(path.name for path in (GOLDEN / "runs").iterdir())
PROTOCOLS = sorted(path.name for path in (GOLDEN / "protocols").iterdir())

_UPDATE = "FAST_AXOLOTL_UPDATE_GOLDEN"
_MOST_DIFFERING = 120
"""Lines of a difference that are printed."""
_DIGITS = 9
"""Of a figure: the last ones depend on the version of Python, which sums in its own way."""


def check(name: str, found: object) -> None:
    """Compare with a golden file, or write it; what is no text is written as JSON."""
    plain = json.dumps(_rounded(found), indent=1, ensure_ascii=False)
    text = found if isinstance(found, str) else plain
    text = f"{text.rstrip()}\n"
    path = GOLDEN / "expected" / name
    if os.environ.get(_UPDATE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    if known == text:
        return
    before, now = known.splitlines(), text.splitlines()
    lines = list(difflib.unified_diff(before, now, name, "now", lineterm=""))
    more = len(lines) - _MOST_DIFFERING
    told = "\n".join([*lines[:_MOST_DIFFERING], *([f"… {more} lines more"] if more > 0 else [])])
    pytest.fail(f"{name} is not as it was. If that is meant: {_UPDATE}=1\n{told}", pytrace=False)


def check_calls(name: str, **known: object) -> None:
    """What wrong calls say, of the package, ``fa``, and of what else is known in them.

    A case more is a line more in the golden file, with no answer yet.
    """
    file = f"calls/{name}.json"
    calls = json.loads((GOLDEN / "expected" / file).read_text(encoding="utf-8"))
    names = {"fa": fast_axolotl, "np": np, "pa": pa, **known}
    check(file, {call: _describe_error(call, names) for call in calls})


def _describe_error(call: str, names: dict[str, object]) -> str:
    try:
        found = eval(call, names)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is written down
        text = f"{type(error).__name__}: {error}".replace(str(Path.cwd()), "HERE")
        text = re.sub(r"(cannot store the columns|is encrypted) \(.*\)", r"\1 (BY PYARROW)", text)
        # How scalars are written depends on the version of numpy.
        return re.sub(r" at 0x\w+|\bnp\.\w+\(([^()]*)\)", r"\1", text)
    return f"no error, a {type(found).__name__}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Answer:
    """What a command left."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out, parse_constant=pytest.fail)

    def text(self, arguments: Sequence[str]) -> str:
        """As it stands in a terminal, below what was typed."""
        code = f"[exit code {self.code}]\n" if self.code else ""
        return f"$ fast-axolotl {' '.join(arguments)}\n{self.err}{self.out}{code}\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def command(*arguments: str, width: int = 0) -> Answer:
    """The command line, in this process; with a width in a terminal, else into a pipe."""
    with terminal(width) as (out, err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fast-axolotl", *arguments])
        # Whoever started the tests does not name the program.
        patch.setattr(sys.modules["__main__"], "__package__", None)
        patch.setattr(warnings, "showwarning", warnings.showwarning)
        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            signal.signal(signal.SIGTERM, before)
    code = ended.value.code
    assert code is None or isinstance(code, int), code
    return Answer(code=code or 0, out=plain(out.getvalue()), err=plain(err.getvalue()))


@contextlib.contextmanager
def terminal(width: int = 0) -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Takes what is printed; the same whatever the tests are started in."""
    kind = _Terminal if width else io.StringIO
    out, err = kind(), kind()
    with pytest.MonkeyPatch.context() as patch:
        for name in [*os.environ]:
            if name.startswith(("FAST_AXOLOTL", "FORCE_COLOR", "TTY_")):
                patch.delenv(name)
        for name, value in {"TERM": "xterm", "NO_COLOR": "1", "LINES": "50"}.items():
            patch.setenv(name, value)
        patch.setenv("COLUMNS", str(width or 100))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield out, err


def plain(text: str) -> str:
    """Without colours, the ends of lines that nobody sees, and the version."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace(fast_axolotl.__version__, "VERSION")
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


_BLOCKS = re.compile(
    "p|div|section|h[1-4]|li|ul|tr|table|figure|figcaption|header|footer|main|nav|details|summary|"
    "dt|dd|dl|pre|title|noscript|thead|tbody|caption"
)
_VOID = ("meta", "link", "br", "hr", "input")


class Page(html.parser.HTMLParser):
    """An HTML page: its words, its elements with their attributes, and the data that it embeds.

    What opens also closes.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, Any] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open += [tag] if tag not in _VOID else []
        self.parts.append("\n" if _BLOCKS.fullmatch(tag) else " | " if tag in ("td", "th") else " ")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self.parts.append("\n" if _BLOCKS.fullmatch(tag) else "")

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] not in ("style", "script"):
            self.parts.append(data)
        elif (name := self.elements[-1][1].get("id")) in ("report-data", "report-figures"):
            self.data[name] = json.loads(data, parse_constant=pytest.fail)


def read_page(text: str) -> tuple[str, dict[str, Any]]:
    """The words of an HTML page, and its charts: every column of numbers as its length and sum."""
    page = Page(text)
    lines = (" ".join(line.split()) for line in "".join(page.parts).splitlines())
    words = plain("\n".join(line for line in lines if line))
    words = re.sub(r"(VERSION on )[\d-]+ [\d:]+ UTC", r"\1DATE", words)
    series = [run["series"] for run in page.data["report-data"]["runs"]]
    return words, digest({"series": series, "figures": page.data["report-figures"]})


def digest(value: Any) -> Any:
    """Long lists by their length and sum."""
    if isinstance(value, dict):
        return {key: digest(one) for key, one in value.items()}
    if not isinstance(value, list):
        return value
    numbers = [one for one in value if isinstance(one, int | float)]
    empty = value.count(None)
    if len(value) > 4 and len(numbers) + empty == len(value) > empty:
        return f"{len(value)} values, {empty} empty, sum {sum(numbers):.6g}"
    return [digest(one) for one in value]
