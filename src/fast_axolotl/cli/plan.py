"""``fast-axolotl plan``: from a short run to tokens/s, memory, time and money on other GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fast_axolotl.cli.options import ResultAsJson, examples, parse_names
from fast_axolotl.errors import UsageError

if TYPE_CHECKING:
    from fast_axolotl.plan.predict import Plan
    from fast_axolotl.report.document import Document

PLAN_EXAMPLES = examples(
    "plan outputs/fast-axolotl-measure --gpus 8,16,64 --tokens 10B",
    "plan outputs/fast-axolotl-measure --gpu H100-SXM,B200 --tokens 10B --price 2.5/h,5.5/h",
    "plan --model config.json --gpu H100-SXM --gpus 8,64,512 --tokens 1T",
)
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def plan(
    run: Annotated[
        Path | None, typer.Argument(help="The folder of a record.", metavar="[RUN]")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="config.json of the model; required without RUN.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Kinds of GPU, for example H100-SXM,B200. Default: that of the run."),
    ] = None,
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs (comma-separated).")] = "8,16,64",
    tokens: Annotated[
        str | None, typer.Option(help="Tokens to train on, for example 300M, 10B or 1.5T.")
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            help="Dollars per GPU and hour, for example 2.5/h, or one price per kind of GPU "
            "(comma-separated). Default: the median of a dated table."
        ),
    ] = None,
    network: Annotated[
        float | None,
        typer.Option(
            help="GB/s per GPU between nodes. Default: that of the usual network adapter."
        ),
    ] = None,
    sequence_len: Annotated[int, typer.Option(help="Without RUN: tokens per sample.")] = 4096,
    micro_batch: Annotated[
        int, typer.Option(help="Without RUN: samples per GPU and forward pass.")
    ] = 1,
    method: Annotated[
        Literal["full", "lora", "qlora"], typer.Option(help="Without RUN: training method.")
    ] = "full",
    as_json: ResultAsJson = False,
) -> None:
    """Predict tokens/s, memory, time and cost on other kinds and numbers of GPUs.

    The record of a short run calibrates the prediction: its throughput, memory, communication and
    what its loader can deliver. Every prediction has a 90 % interval and says what limits it:
    compute, memory, communication or data. Without a record, the intervals are wide.
    """
    from fast_axolotl.plan.hardware import Price, find_price
    from fast_axolotl.plan.memory import Layout
    from fast_axolotl.plan.predict import join_plans, make_plan
    from fast_axolotl.plan.shape import read_config
    from fast_axolotl.record.codec import to_json
    from fast_axolotl.record.devices import find_gpu
    from fast_axolotl.report.terminal import print_document

    positive = {"network": network, "micro-batch": micro_batch, "sequence-len": sequence_len}
    for name, value in positive.items():
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"--{name} {value:g}: pass a number above 0")
    amount = None
    if tokens is not None:
        unit = tokens[-1:].lower() if tokens[-1:].isalpha() else ""
        amount = _read_positive(tokens[:-1] if unit else tokens) * _COUNTS.get(unit, 0.0)
        if not amount:
            raise UsageError(
                f"cannot read {tokens!r} as a number of tokens; write 300M, 10B or 1.5T"
            )
    shape = None if model is None else read_config(model)
    reference = None
    if run is not None:
        from fast_axolotl.measure.summary import summarise
        from fast_axolotl.plan.reference import read_reference
        from fast_axolotl.record.run_folders import read_training

        record = read_training(run)
        shape, reference = read_reference(record, summarise(record), shape)
        layout = reference.layout
    elif shape is None or not parse_names(gpu or ""):
        raise UsageError("pass the folder of a record, or --model config.json and --gpu H100-SXM")
    else:
        layout = Layout(gpus=1, seq_len=sequence_len, micro_batch=micro_batch, method=method)
    kinds = list(dict.fromkeys(find_gpu(name) for name in parse_names(gpu or "")))
    if reference is not None and not kinds:
        kinds = [reference.gpu]
    costs = [find_price(kind) for kind in kinds]
    if price is not None:
        dollars = [
            _read_positive(text.removesuffix("/h").removeprefix("$")) for text in parse_names(price)
        ]
        if not all(dollars) or len(dollars) not in (1, len(kinds)):
            raise UsageError(
                f"--price {price!r}: write dollars per GPU and hour, such as 2.5/h; pass one "
                f"price, or {len(kinds)}: one per kind of GPU"
            )
        dollars *= 1 if len(dollars) == len(kinds) else len(kinds)
        costs = [Price(dollars=each, source="by --price") for each in dollars]
    counts = [int(name) if name.isdecimal() else 0 for name in parse_names(gpus)]
    if not counts or min(counts) < 1:
        raise UsageError(f"cannot read --gpus {gpus!r}; write 8,16,64")
    plans = [
        make_plan(
            shape,
            kind,
            counts,
            layout,
            reference=reference,
            tokens=amount,
            price=cost,
            network=network,
        )
        for kind, cost in zip(kinds, costs, strict=True)
    ]
    found = join_plans(plans)
    print(to_json(found)) if as_json else print_document(plan_document(found))


def _read_positive(text: str) -> float:
    """0 where it is no number, or none above 0."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 < value < float("inf") else 0.0


def plan_document(plan: Plan) -> Document:
    """The fastest and the cheapest candidate, all of them, and what to know about them."""
    from fast_axolotl.record.units import format_bytes, format_count, format_duration, format_share
    from fast_axolotl.report.document import Bullets, Card, Document, Row, Section, Table

    def dollars(value: float) -> str:
        return f"${value:,.2f}" if value < 100 else f"${value:,.0f}"

    rows: list[Row] = []
    rates: dict[str, float] = {}
    costs: dict[str, float] = {}
    for one in plan.candidates:
        rate, lasts, cost = one.tokens_per_second, one.seconds, one.dollars
        row = [f"{one.gpus} × {one.gpu}", "–", "–", format_bytes(one.memory_bytes)]
        row += [format_share(one.communication_share, decimals=0), "–", "–", one.binds]
        words = []
        if rate is not None:
            row[1] = format_count(rate.value)
            row[2] = f"{format_count(rate.low)} to {format_count(rate.high)}"
            words.append(f"{row[1]} tokens/s")
        if lasts is not None:
            row[5] = format_duration(lasts.value)
            words.append(row[5])
        if cost is not None:
            row[6] = f"{dollars(cost.value)} ({dollars(cost.low)} to {dollars(cost.high)})"
            words.append(dollars(cost.value))
        text = ", ".join([row[0], *words])
        rates |= {text: rate.value} if rate else {}
        costs |= {text: cost.value} if cost else {}
        rows.append(row)
    fastest = max(rates, key=rates.__getitem__, default="")
    cheapest = min(costs, key=costs.__getitem__, default="")
    headline = f"Fastest: {fastest}. Cheapest: {cheapest}."
    if not fastest:
        headline = "No candidate fits into GPU memory."
    elif cheapest in ("", fastest):
        headline = f"{'Fastest and cheapest' if cheapest else 'Fastest'}: {fastest}."
    title = f"Plan: {format_count(plan.parameters / 1e9)} B parameters on {plan.gpu}"
    title += "" if plan.tokens is None else f", {format_count(plan.tokens / 1e9)} B tokens"
    header = ["GPUs", "tokens/s", "90 %", "memory", "communication", "time", "cost", "limited by"]
    return Document(
        title=title,
        blocks=[
            Card(badges=[("plain", "Prediction, 90 % intervals")], headline=headline),
            Section(title="Candidates", blocks=[Table(header=header, rows=rows)]),
            Section(title="Notes", blocks=[Bullets(plan.notes)]),
        ],
    )
