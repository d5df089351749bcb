"""Two records or protocols beside each other, afterwards, and limits that may fail a build.

Runs of different protocols were not interleaved, so they are compared as two samples: what drifted
on the machine in between counts as a change. A limit is only broken when the whole 95 % interval
lies beyond it; one that is required is broken unless the whole interval lies within. Two single
runs have no interval, so neither can be checked unless that is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fast_axolotl.errors import DataError, UsageError
from fast_axolotl.protocol.answer import find_missing
from fast_axolotl.protocol.build import differing_settings
from fast_axolotl.protocol.matrix import (
    build_matrix,
    describe_judgement,
    judge_matrix,
    make_row,
    read_figures,
)
from fast_axolotl.record.catalogue import FIGURES, MATRIX
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
    alarms: tuple[str, ...] = ()
    """To be read before any speed: losses that differ."""
    notes: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()

    @property
    def is_broken(self) -> bool:
        """Whether any limit is."""
        return any(check.is_broken for check in self.checks)

    @property
    def is_unchecked(self) -> bool:
        """Whether any limit could not be checked."""
        return not all(check.is_checked for check in self.checks)


def parse_check(text: str, *, is_required: bool = False) -> Check:
    """A limit as it is written on the command line."""
    found = _LIMIT.fullmatch(text)
    names = {figure.name: figure.near_zero is not None for figure in MATRIX}
    if found is None:
        raise UsageError(
            f"cannot read the limit {text!r}; write 'tokens_per_second < 0.97' for a ratio, or "
            "'stall_fraction > +0.02' for a difference"
        )
    name, sign, prefix, number = found.groups()
    if name not in names:
        raise UsageError(f"there is no figure {name!r}; choose one of {', '.join(names)}")
    if prefix and not names[name]:
        zeros = [name for name, can_be_zero in names.items() if can_be_zero]
        raise UsageError(
            f"{name} is never near 0, so its limit is a ratio, without a sign; limits on a "
            f"difference are for {', '.join(zeros)}"
        )
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
    if second is None:
        found = _compare_arms(Path(first), arm)
    else:
        found = _compare_sides((Path(first), Path(second)), arm, is_checked=bool(limits))
    matrix = judge_matrix(
        found.matrix,
        matters=found.matrix.matters if matters is None else matters,
        times={found.second: [row.name for row in found.matrix.rows if row.cells[1].is_deciding]},
    )
    notes = (*matrix.notes, *filter(None, [describe_judgement(matrix)]))
    checks = tuple(_check(limit, matrix, is_single) for limit in limits)
    return replace(found, matrix=replace(matrix, notes=notes), checks=checks)


def _compare_arms(folder: Path, arm: str | None) -> Comparison:
    """An arm of a protocol beside its baseline."""
    if not (folder / PROTOCOL_FILE).exists():
        raise UsageError(f"{folder} holds no protocol; pass a second folder to compare it with")
    protocol = ProtocolResult.read(folder)
    matrix = protocol.matrix
    if len(matrix.arms) < 2:
        raise DataError("it has fewer than two variants to compare", path=str(folder))
    chosen = arm or matrix.arms[-1]
    if chosen not in matrix.arms[1:]:
        raise UsageError(f"there is no variant {chosen!r}, only {', '.join(matrix.arms[1:])}")
    at = matrix.arms.index(chosen)
    if missing := find_missing(protocol.arms[0], protocol.arms[at]):
        raise DataError(missing, path=str(folder))
    rows = tuple(replace(row, cells=(row.cells[0], row.cells[at])) for row in matrix.rows)
    # How the runs were judged is told anew.
    notes = tuple(note for note in matrix.notes if note != describe_judgement(matrix))
    return Comparison(
        first=matrix.arms[0],
        second=chosen,
        matrix=replace(matrix, arms=(matrix.arms[0], chosen), rows=rows, notes=notes),
        alarms=(protocol.losses,) if protocol.are_losses_equal is False else (),
        notes=protocol.differing_settings,
    )


def _compare_sides(folders: tuple[Path, Path], arm: str | None, *, is_checked: bool) -> Comparison:
    """Two folders, each a record or one arm of a protocol."""
    sides = [_read_side(folder, is_checked=is_checked) for folder in folders]
    arms, others = (side.matrix.arms for side in sides)
    if arm is None and arms and others and (_RECORD,) not in (arms, others):
        arm = next((name for name in arms[::-1] if name in others), None)
        if arm is None:
            raise UsageError(
                f"{folders[0]} has the variants {', '.join(arms)} and {folders[1]} has "
                f"{', '.join(others)}: they have none in common"
            )
    names: list[str] = []
    cells: list[dict[str, Cell]] = []
    notes: list[str] = []
    alarms: list[str] = []
    settings: dict[str, Mapping[str, Any]] = {}
    for folder, side in zip(folders, sides, strict=True):
        arms = side.matrix.arms
        if not arms:
            raise DataError("it has no variants to compare, only dedupe", path=str(folder))
        chosen = _RECORD if arms == (_RECORD,) else arm or arms[-1]
        if chosen not in arms:
            raise UsageError(f"{folder} has no variant {chosen!r}; it has {', '.join(arms)}")
        at = arms.index(chosen)
        name = f"{folder} {chosen}".strip()
        names.append(f"{name} (B)" if name in names else name)
        cells.append({row.name: row.cells[at] for row in side.matrix.rows})
        settings[names[-1]] = side.arms[at].settings
        notes += [f"{folder}: the runs of {chosen}."] if chosen else side.notes
        alarms += [f"{folder}: {side.losses}"] if side.are_losses_equal is False else []
    unknown = Cell(value=None, reason="not recorded")
    columns = {figure: [side.get(figure.name, unknown) for side in cells] for figure in MATRIX}
    rows = [
        make_row(figure, [(cell.values, cell.reason) for cell in both], is_paired=False)
        for figure, both in columns.items()
    ]
    most = (max((len(cell.values) for cell in side.values()), default=0) for side in cells)
    is_single = min(most) <= 1
    return Comparison(
        first=names[0],
        second=names[1],
        matrix=Matrix(arms=tuple(names), rows=tuple(rows)),
        alarms=tuple(alarms),
        notes=(*notes, *differing_settings(settings), _SINGLE if is_single else _APART),
    )


def _read_side(folder: Path, *, is_checked: bool) -> ProtocolResult:
    """A protocol; or a record, as one with a single run of an arm without a name."""
    if (folder / PROTOCOL_FILE).exists():
        return ProtocolResult.read(folder)
    run = read_figures(folder)
    end = f"{run.end_reason}{f': {run.error}' if run.error else ''}"
    if is_checked and run.end_reason in ("exception", "cut off"):
        reason = f"the run did not finish, so no limit is checked: {end}"
        raise DataError(reason, path=str(folder))
    return ProtocolResult(
        title=str(folder),
        started=run.started,
        seconds=run.duration_seconds,
        pairs=1,
        order=(_RECORD,),
        arms=(Arm(name=_RECORD, text="", command=(), settings=run.settings),),
        matrix=build_matrix({_RECORD: [run]}),
        losses="",
        are_losses_equal=None,
        paragraph="",
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
        can_differ = not limit.is_difference and cell.difference is not None
        example = "+0.02" if FIGURES[limit.figure].unit == "share" else "+1000000"
        cure = f"; set a limit on the difference: {limit.sign} {example}" if can_differ else ""
        raise DataError(f"{refused}: {cell.reason or 'it has no ratio'}{cure}")
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
        result = "FAILED" if is_broken else ""
    sentence = ": ".join(filter(None, [limit.limit, result, found]))
    return replace(limit, is_broken=is_broken, is_checked=is_checked, sentence=sentence)
