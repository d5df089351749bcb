"""What the races of hash, dedupe, pack and pad share: sizes, sessions, and names of ours."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.children import warm_up
from benchmarks.command import Tell, execute, race_parser
from benchmarks.race import EARLIER, Remote, Session
from benchmarks.result import Case, Goal, Result
from fast_axolotl.errors import UsageError

OURS = "fast-axolotl"
ARRAYS = "fast-axolotl arrays"
ARROW = "fast-axolotl Arrow"
LISTS = "fast-axolotl lists"
TO_NUMPY = "fast-axolotl numpy"
TENSORS = "fast-axolotl torch"
PLAIN = "plain Python"
PLAIN_TENSORS = "plain + torch.tensor"
HASHLIB = "hashlib loop"

NOTES = (
    "answers are compared with ours before anything is timed, by a digest of each column",
    "one warm-up pass each, then interleaved repeats, each the median of as many passes as take "
    "0.2 s; ratios are of medians; what a pass gives is freed outside the timing",
    "kernels are compiled and packages imported before; inputs are in each one's own form before",
    "the earlier package and Axolotl run in processes of their own, timed inside them",
    "memory is that of a fresh process: RssAnon sampled every 2 ms, above what it was before",
)

_UNITS = {"": 1, "k": 1000, "m": 1_000_000}

Target = tuple[str, str, float, int | None]
"""Ours, a peer, the least ratio, and the size it was set at: ``None`` for every size."""


def run_operation(
    title: str,
    text: str | None,
    kernels: Sequence[str],
    cases: Callable[[Sequence[int], Session], Iterator[Case]],
    arguments: Sequence[str] | None,
) -> None:
    """The command of one operation; ``kernels`` is how the names of those that it uses begin."""

    def run(options: argparse.Namespace, folder: Path, tell: Tell) -> Result:
        if options.repeats < 1:
            raise UsageError(f"repeats must be at least 1, not {options.repeats}")
        tell("compiling kernels")
        warmth = warm_up(kernels)
        with ExitStack() as stack:
            session = Session(folder, options.repeats, stack, tell, options.peer_python)
            return Result(
                cases=list(cases(parse_sizes(options.sizes), session)),
                facts={"warm_up": warmth},
                notes=NOTES,
                versions=session.versions,
            )

    parser = race_parser(title, text)
    parser.add_argument("--sizes", default="10k,100k,1M", help="numbers of rows: 10k,1M,2500")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats of every peer")
    parser.add_argument("--peer-python", help="python of an environment with fast-axolotl 0.2.0")
    execute(parser, run, arguments)


def parse_sizes(text: str) -> tuple[int, ...]:
    """``10k,1M`` as (10000, 1000000): ascending, each once."""
    sizes = set()
    for part in filter(None, map(str.strip, text.split(","))):
        number = part.rstrip("kKmM")
        try:
            size = float(number) * _UNITS[part[len(number) :].lower()]
        except (ValueError, KeyError):
            size = 0.0
        if not 1 <= size < 2**63 or size != int(size):
            raise UsageError(f"cannot read {part!r} as a size; write 10k, 1M or 2500")
        sizes.add(int(size))
    if not sizes:
        raise UsageError(f"cannot read {text!r} as sizes; write 10k,100k,1M or plain numbers")
    return tuple(sorted(sizes))


def size_name(size: int) -> str:
    """The shortest way to write it: ``10k`` for 10000."""
    for unit, factor in (("M", 1_000_000), ("k", 1000)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def with_goals(case: Case, targets: Sequence[Target], *others: Goal) -> Case:
    """The case with its goals: the ratios that are asked for at its size, and others."""
    ratios = [
        case.ratio_goal(ours, peer, least)
        for ours, peer, least, size in targets
        if size in (None, case.rows)
    ]
    return replace(case, goals=(*ratios, *others))


def earlier_remote(
    session: Session,
    operation: str,
    gives: str,
    rows: int,
    write: Callable[[Path], Path],
    settings: Mapping[str, object] | None = None,
) -> Remote:
    """The earlier package on one of its operations; all of them take lists."""
    return Remote(
        name=EARLIER,
        gives=gives,
        rows=rows,
        process=session.earlier,
        operation=operation,
        write=write,
        settings=settings or {},
        rival=LISTS,
    )
