"""Compare two records or protocols, and check limits for CI.

Runs of different protocols were not interleaved, so they are compared as two samples: what drifted
on the machine in between counts as a change. A limit is only broken when the whole 95 % interval
lies beyond it; one that is required, unless all of it lies within.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.measure.summary import summarise
from fast_axolotl.protocol.answer import find_missing
from fast_axolotl.protocol.build import differing_settings, judge_arm
from fast_axolotl.protocol.matrix import (
    build_matrix,
    describe_judgement,
    judge_matrix,
    make_row,
)
from fast_axolotl.record.catalogue import FIGURES, MATRIX
from fast_axolotl.record.folder import read_training
from fast_axolotl.record.protocol_result import PROTOCOL_FILE, Arm, Cell, Matrix, ProtocolResult

_LIMIT = re.compile(r"\s*(\w+)\s*([<>])\s*([+-]?)(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*")
_APART = (
    "The two sides were not run alternately: any change of the machine in between counts as a "
    "change."
)
_RECORD = ""
"""The name of the only arm of a record."""
_SINGLE = "With a single run on one side, a change cannot be told from noise."


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A limit, ``tokens_per_second < 0.97``, and what came of it."""

    limit: str
    figure: str
    sign: str
    """``<`` or ``>``: fails when the ratio B ÷ A is below the bound, or above it."""
    bound: float
    is_difference: bool = False
    """The bound has a sign of its own, ``> +0.02``, and is about B − A."""
    is_required: bool = False
    """Fails unless it is shown, instead of when it is."""
    is_broken: bool = False
    is_checked: bool = True
    sentence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What ``compare`` found."""

    first: str
    second: str
    matrix: Matrix
    arms: tuple[Arm, ...] = ()
    """Both sides: their settings, verdicts and phases of a step, without their runs."""
    alarms: tuple[str, ...] = ()
    """To be read before any speed: losses that differ."""
    notes: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()


def parse_check(text: str, *, is_required: bool = False) -> Check:
    """A limit as it is written on the command line."""
    found = _LIMIT.fullmatch(text)
    names = [figure.name for figure in MATRIX]
    if found is None:
        raise UsageError(
            f"cannot read the limit {text!r}; write 'tokens_per_second < 0.97' for a ratio, or "
            "'stall_fraction > +0.02' for a difference"
        )
    name, sign, prefix, number = found.groups()
    if name not in names:
        raise UsageError(f"there is no figure {name!r}; choose one of {', '.join(names)}")
    return Check(
        limit=" ".join(text.split()),
        figure=name,
        sign=sign,
        bound=float(prefix + number),
        is_difference=bool(prefix),
        is_required=is_required,
    )


def compare_folders(
    first: str | Path,
    second: str | Path | None = None,
    *,
    arm: str | None = None,
    limits: Sequence[Check] = (),
    is_single: bool = False,
    matters: float | None = None,
) -> Comparison:
    """Two folders with a record or a protocol each; or the arms of one protocol.

    Of two protocols the arm ``arm`` is compared: by default the last one that both have. With
    ``is_single`` a limit may be broken by two single runs. ``matters`` is the smallest change that
    does: 1 %, or what the protocol was told.
    """
    folders = (Path(first), Path(first if second is None else second))
    sides = [_read_side(folder, is_checked=bool(limits)) for folder in folders]
    is_apart = second is not None
    chosen = _choose_same(folders, sides, arm) if is_apart else _choose_two(first, sides[0], arm)
    names: list[str] = []
    cells: list[dict[str, Cell]] = []
    arms: list[Arm] = []
    notes: list[str] = []
    for folder, side, own in zip(folders, sides, chosen, strict=True):
        at = side.matrix.arms.index(own)
        name = f"{folder} {own}".strip() if is_apart else own
        names.append(f"{name} (B)" if name in names else name)
        cells.append({row.name: row.cells[at] for row in side.matrix.rows})
        arms.append(replace(side.arms[at], name=names[-1], runs=(), command=()))
        if is_apart:
            notes += [f"{folder}: the runs of {own}."] if own else side.notes
    notes += differing_settings({one.name: one.settings for one in arms})
    if second is None:
        # Pairs of runs, as the protocol has compared them; how they were judged is told anew.
        kept = sides[0].matrix
        spend = kept.spend
        how = [note for note in kept.notes if note != describe_judgement(kept)]
        rows = [replace(row, cells=tuple(side[row.name] for side in cells)) for row in kept.rows]
    else:
        unknown, how, spend = Cell(value=None, reason="not recorded"), [], 1.0
        both = {figure: [side.get(figure.name, unknown) for side in cells] for figure in MATRIX}
        rows = [
            make_row(figure, [(cell.values, cell.reason) for cell in two], is_paired=False)
            for figure, two in both.items()
        ]
        counts = (max((len(one.values) for one in side.values()), default=0) for side in cells)
        notes.append(_SINGLE if min(counts) <= 1 else _APART)
    matrix = judge_matrix(
        Matrix(arms=tuple(names), rows=tuple(rows), spend=spend),
        matters=sides[0].matrix.matters if matters is None else matters,
        times={names[1]: [row.name for row in rows if row.cells[1].is_deciding]},
    )
    how += filter(None, [describe_judgement(matrix)])
    unequal = [
        f"{folder}: {side.losses}"
        for folder, side in zip(folders, sides, strict=True)
        if side.are_losses_equal is False
    ]
    return Comparison(
        first=names[0],
        second=names[1],
        matrix=replace(matrix, notes=tuple(how)),
        arms=tuple(arms),
        alarms=tuple(dict.fromkeys(unequal)),
        notes=tuple(notes),
        checks=tuple(_check(limit, matrix, is_single) for limit in limits),
    )


def _choose_two(folder: str | Path, side: ProtocolResult, arm: str | None) -> list[str]:
    """The baseline of a protocol and one of its other arms, by default the last."""
    arms = side.matrix.arms
    if len(arms) < 2:
        raise UsageError(f"{folder} has fewer than two variants; pass a second folder")
    chosen = arm or arms[-1]
    if chosen not in arms[1:]:
        raise UsageError(f"there is no variant {chosen!r}, only {', '.join(arms[1:])}")
    if missing := find_missing(side.arms[0], side.arms[arms.index(chosen)]):
        raise DataError(missing, path=str(folder))
    return [arms[0], chosen]


def _choose_same(
    folders: Sequence[Path], sides: Sequence[ProtocolResult], arm: str | None
) -> list[str]:
    """An arm of either side: by default the last one that both have, else the last of each."""
    arms, others = (side.matrix.arms for side in sides)
    if arm is None and (_RECORD,) not in (arms, others):
        arm = next((name for name in arms[::-1] if name in others), None)
    chosen = []
    for folder, known in zip(folders, (arms, others), strict=True):
        chosen.append(_RECORD if known == (_RECORD,) else arm or known[-1])
        if chosen[-1] not in known:
            raise UsageError(f"{folder} has no variant {arm!r}; it has {', '.join(known)}")
    return chosen


def _read_side(folder: Path, *, is_checked: bool) -> ProtocolResult:
    """A protocol; or a record, as one with a single run of an arm without a name."""
    if (folder / PROTOCOL_FILE).exists():
        return ProtocolResult.read(folder)
    run = summarise(read_training(folder))
    end = f"{run.end_reason}{f': {run.error}' if run.error else ''}"
    if is_checked and run.end_reason in ("exception", "cut off"):
        reason = f"the run did not finish, so no limit is checked: {end}"
        raise DataError(reason, path=str(folder))
    return ProtocolResult(
        title=str(folder),
        started=run.started,
        seconds=run.duration_seconds,
        pairs=1,
        arms=(judge_arm(Arm(name=_RECORD, text="", command=()), run),),
        matrix=build_matrix({_RECORD: [run]}),
        notes=() if run.end_reason == "finished" else (f"{folder}: {end}.",),
    )


def _check(limit: Check, matrix: Matrix, is_single: bool) -> Check:
    option = "--require" if limit.is_required else "--fail-if"
    refused = f"{option} {limit.limit!r} cannot be checked"
    known = [row.cells for row in matrix.rows if row.name == limit.figure]
    unknown = Cell(value=None, reason="an earlier version wrote this protocol; run it again")
    for name, cell in zip(matrix.arms, known[0] if known else [unknown] * 2, strict=True):
        if cell.value is None:
            raise DataError(f"{refused}: {limit.figure} was not measured in {name}: {cell.reason}")
    value, low, high, kind = cell.ratio, cell.low, cell.high, "ratio"
    if limit.is_difference:
        value, low, high = cell.difference, cell.difference_low, cell.difference_high
        kind = "difference"
    if value is None:
        cure = "; write the bound without a sign" if limit.is_difference else ""
        if cell.difference is not None:
            example = "+0.02" if FIGURES[limit.figure].unit == "share" else "+1000000"
            cure = f"; set a limit on the difference: {limit.sign} {example}"
        raise DataError(f"{refused}: {cell.reason or f'it has no {kind}'}{cure}")
    is_checked = is_single
    found = f"{kind} {value:.4g}, from a single run on at least one side"
    if low is not None and high is not None:
        is_checked = True
        found = f"{kind} {value:.4g}, 95 % interval {low:.4g} to {high:.4g}"
    else:
        low = high = value
    is_shown = high < limit.bound if limit.sign == "<" else low > limit.bound
    is_broken = is_checked and is_shown is not limit.is_required
    if not is_checked:
        result = "not checked, may be noise; compare protocols, or pass --single to check it anyway"
    elif limit.is_required:
        result = "FAILED, not confirmed" if is_broken else "confirmed"
    else:
        result = "FAILED" if is_broken else "passes"
    sentence = f"{limit.limit}: {result}: {found}"
    return replace(limit, is_broken=is_broken, is_checked=is_checked, sentence=sentence)
