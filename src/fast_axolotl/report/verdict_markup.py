"""The top of a page: what bounds the run, why, what to do, and the figures that say so."""

from __future__ import annotations

from fast_axolotl.record import RunSummary, Verdict
from fast_axolotl.record.comparison import Arm, Protocol
from fast_axolotl.report.content import Report, ReportRun
from fast_axolotl.report.markup import Safe, join, tag
from fast_axolotl.report.show import verdict_title
from fast_axolotl.report.values import format_length, format_value

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
        return _protocol_verdict(report.protocol)
    if len(report.runs) == 1:
        return _run_verdict(report.runs[0])
    cards = [_run_card(run) for run in report.runs]
    return tag(
        "section",
        tag("h2", "Verdicts", id="verdict"),
        tag("div", cards, class_="cards"),
        aria_labelledby="verdict",
    )


def _badge(kind: str, words: str) -> Safe:
    return tag("span", words, class_=f"badge {_TONES.get(kind, 'plain')}")


def _run_verdict(run: ReportRun) -> Safe:
    verdict = run.summary.verdict
    return tag(
        "section",
        tag("h2", "Verdict", id="verdict", class_="unseen"),
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
        tag("h3", run.name),
        tag("p", _badge(verdict.kind, verdict_title(verdict)), class_="badges"),
        tag("p", verdict.headline),
        _next(verdict.action),
        class_=f"card edge-{_TONES.get(verdict.kind, 'plain')}",
    )


def _protocol_verdict(protocol: Protocol) -> Safe:
    return tag(
        "section",
        tag("h2", "The answer", id="verdict", class_="unseen"),
        _loss_alarm(protocol),
        tag("div", _paragraphs(protocol), class_="answer"),
        tag("div", [_arm_card(arm) for arm in protocol.arms], class_="cards"),
        tag("p", _course(protocol), class_="small"),
        aria_labelledby="verdict",
    )


def _paragraphs(protocol: Protocol) -> list[Safe]:
    """The answer, with a line for each arm that it speaks of by name."""
    text = protocol.paragraph
    for arm in protocol.arms:
        text = text.replace(f" {arm.name}: ", f"\n{arm.name}: ")
    size = "headline" if len(protocol.paragraph) <= _MOST_LARGE else "headline long"
    return [tag("p", line, class_=size) for line in text.split("\n")]


def _loss_alarm(protocol: Protocol) -> Safe | None:
    """Runs that learn something else are not compared by their speed."""
    if protocol.are_losses_equal is not False:
        return None
    return tag("p", tag("strong", protocol.losses), class_="alarm", role="alert")


def _arm_card(arm: Arm) -> Safe:
    kind, _, subtype = arm.verdict.partition(" ")
    badge = None
    if kind in _TONES:
        title = verdict_title(Verdict(kind=kind, subtype=subtype, headline=""))  # type: ignore[arg-type]
        badge = tag("p", _badge(kind, title), class_="badges")
    failed = sum(run.status == "failed" for run in arm.runs)
    return tag(
        "article",
        tag("h3", arm.name),
        tag("p", arm.text, class_="small") if arm.text else None,
        badge,
        tag("p", arm.headline or "No run of this arm counts."),
        _next(arm.action),
        tag("p", tag("strong", f"{failed} of {len(arm.runs)} runs failed."), class_="failed")
        if failed
        else None,
        class_=f"card edge-{_TONES.get(kind, 'plain')}",
    )


def _course(protocol: Protocol) -> Safe:
    counted = sum(run.status == "done" and run.pair >= 0 for a in protocol.arms for run in a.runs)
    pairs = f"{protocol.pairs} pairs" if protocol.pairs != 1 else "One pair"
    parts = [f"{pairs}, {counted} runs that count, in {format_length(protocol.seconds)}."]
    if protocol.losses and protocol.are_losses_equal is not False:
        parts.append(protocol.losses)
    return join(" ".join(parts))
