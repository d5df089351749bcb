"""The top of a page: what bounds the run, why, what to do, and the figures that say so."""

from __future__ import annotations

from collections.abc import Sequence

from fast_axolotl.record import RunSummary, Verdict
from fast_axolotl.record.protocol_result import Arm, Matrix, ProtocolResult
from fast_axolotl.report.alarms import find_alarms
from fast_axolotl.report.content import (
    Report,
    ReportRun,
    counted_runs,
    describe_progress,
    describe_run,
    no_counted_run,
    shown_run,
)
from fast_axolotl.report.downsampling import finite
from fast_axolotl.report.markup import Safe, join, named, tag
from fast_axolotl.report.show import verdict_title
from fast_axolotl.report.values import count_words, format_length, format_value

__all__ = ["verdict_section"]

_TONES = {
    "compute": "good",
    "mixed": "warn",
    "communication": "warn",
    "inconclusive": "plain",
    "data": "bad",
    "io": "bad",
    "swap": "bad",
}

_MOST_LARGE = 320
"""Characters of an answer in large letters."""

_TILES = (
    ("stall_fraction", "waiting for data", "share"),
    ("tokens_per_second", "real tokens", "tokens/s"),
    ("rows_per_second", "reader", "rows/s"),
    ("step_p50_seconds", "step, median", "s"),
    ("mfu", "MFU", "share"),
    ("working_set_bytes", "working set", "bytes"),
)


def verdict_section(report: Report) -> Safe:
    """The answer."""
    if report.protocol is not None:
        return _protocol_verdict(report, report.protocol)
    if len(report.runs) == 1:
        return _run_verdict(report.runs[0])
    cards = [_run_card(run) for run in report.runs]
    return tag(
        "section",
        tag("h2", "Verdicts", id="verdict"),
        _alarms(report.runs),
        tag("div", cards, class_="cards"),
        aria_labelledby="verdict",
    )


def _badge(kind: str, words: str) -> Safe:
    return tag("span", words, class_=f"badge {_TONES.get(kind, 'plain')}")


def _alarms(runs: Sequence[ReportRun]) -> list[Safe]:
    """What to know before any verdict, with the runs' names where there are several."""
    return [
        _alarm(join(named(run.name) if len(runs) > 1 else None, ": " if runs[1:] else None, alarm))
        for run in runs
        for alarm in find_alarms(run.summary, run.record)
    ]


def _alarm(words: str) -> Safe:
    return tag("p", tag("strong", words), class_="alarm", role="alert")


def _run_verdict(run: ReportRun) -> Safe:
    verdict = run.summary.verdict
    return tag(
        "section",
        tag("h2", "Verdict", id="verdict", class_="unseen"),
        _alarms([run]),
        tag(
            "div",
            tag("p", _badge(verdict.kind, verdict_title(verdict)), class_="badges"),
            tag("p", verdict.headline, class_="headline"),
            _next(verdict.action),
            _tiles(run.summary),
            _why(verdict),
            class_=f"answer edge-{_TONES.get(verdict.kind, 'plain')}",
        ),
        aria_labelledby="verdict",
    )


def _why(verdict: Verdict) -> Safe | None:
    if not verdict.evidence:
        return None
    items = [tag("li", line) for line in verdict.evidence]
    return tag("div", tag("h3", "Why"), tag("ul", items), class_="why")


def _next(action: str) -> Safe | None:
    if not action:
        return None
    return tag("p", tag("strong", "Next "), action, class_="next")


def _tiles(summary: RunSummary) -> Safe | None:
    tiles = [
        tag("div", tag("dt", label), tag("dd", format_value(value, unit)))
        for name, label, unit in _TILES
        if (value := getattr(summary, name)) is not None
    ]
    return tag("dl", tiles, class_="tiles") if tiles else None


def _run_card(run: ReportRun) -> Safe:
    verdict = run.summary.verdict
    return tag(
        "article",
        tag("h3", named(run.name)),
        tag("p", _badge(verdict.kind, verdict_title(verdict)), class_="badges"),
        tag("p", verdict.headline),
        _next(verdict.action),
        class_=f"card edge-{_TONES.get(verdict.kind, 'plain')}",
    )


def _protocol_verdict(report: Report, protocol: ProtocolResult) -> Safe:
    runs = {run.name: run for run in reversed(report.runs)}
    progress = describe_progress(protocol)
    cards = [_arm_card(arm, protocol, runs.get(arm.name)) for arm in protocol.arms]
    return tag(
        "section",
        tag("h2", "The answer", id="verdict", class_="unseen"),
        _loss_alarm(protocol),
        _alarms(report.runs),
        tag("p", tag("strong", progress), class_="progress") if progress else None,
        tag("div", _paragraphs(protocol), class_="answer") if protocol.paragraph else None,
        tag("div", cards, class_="cards"),
        tag("p", _course(protocol), class_="small") if protocol.arms else None,
        aria_labelledby="verdict",
    )


def _paragraphs(protocol: ProtocolResult) -> list[Safe]:
    """The answer, a paragraph for each arm."""
    size = "headline" if len(protocol.paragraph) <= _MOST_LARGE else "headline long"
    return [tag("p", line, class_=size) for line in protocol.paragraph.split("\n")]


def _loss_alarm(protocol: ProtocolResult) -> Safe | None:
    """Runs that learn something else are not compared by their speed."""
    if protocol.are_losses_equal is not False:
        return None
    return _alarm(protocol.losses)


def _arm_card(arm: Arm, protocol: ProtocolResult, run: ReportRun | None) -> Safe:
    kind = arm.verdict.partition(" ")[0]
    failed = sum(one.status == "failed" for one in arm.runs)
    which = describe_run(arm)
    stall = _median_stall(arm, protocol.matrix, run)
    return tag(
        "article",
        tag("h3", named(arm.name)),
        tag("p", arm.text, class_="small") if arm.text else None,
        _arm_badges(arm),
        tag("p", arm.headline or no_counted_run(protocol)),
        _next(arm.action),
        tag("p", "Run ", named(which), f". {stall}".rstrip(), class_="small which")
        if which
        else None,
        tag("p", tag("strong", f"{failed} of {len(arm.runs)} runs failed."), class_="failed")
        if failed
        else None,
        class_=f"card edge-{_TONES.get(kind, 'plain')}",
    )


def _arm_badges(arm: Arm) -> Safe | None:
    kind, _, subtype = arm.verdict.partition(" ")
    badges = []
    if kind in _TONES:
        title = verdict_title(Verdict(kind=kind, subtype=subtype, headline=""))  # type: ignore[arg-type]
        badges.append(_badge(kind, title))
    run = shown_run(arm)
    if run is not None and run.pair < 0:
        badges.append(_badge("", "warm-up run"))
    return tag("p", badges, class_="badges") if badges else None


def _median_stall(arm: Arm, matrix: Matrix, run: ReportRun | None) -> str:
    """What the matrix has of all runs; the headline is of the one that is shown."""
    source = (run.summary.stall_source if run is not None else "") or "host"
    rows = [row for row in matrix.rows if row.name == f"{source}_stall_fraction"]
    values = [finite(row.cells[matrix.arms.index(arm.name)].value) for row in rows]
    if not values or values[0] is None:
        return ""
    return f"Median stall of its runs: {format_value(values[0], 'share')}."


def _course(protocol: ProtocolResult) -> Safe:
    counted = sum(len(counted_runs(arm)) for arm in protocol.arms)
    runs = f"{count_words(counted, 'run')} that {'counts' if counted == 1 else 'count'}"
    pairs = "One pair" if protocol.pairs == 1 else count_words(protocol.pairs, "pair")
    parts = [f"{pairs}, {runs}, in {format_length(protocol.seconds)}."]
    if protocol.losses and protocol.are_losses_equal is not False:
        parts.append(protocol.losses)
    return join(" ".join(parts))
