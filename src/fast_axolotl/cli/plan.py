"""``fast-axolotl plan``: from a short run to tokens/s, memory, time and money on other GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fast_axolotl.cli.options import ResultAsJson, examples, parse_names
from fast_axolotl.errors import UsageError

PLAN_EXAMPLES = examples(
    "plan outputs/fast-axolotl-measure --gpus 8,16,64 --tokens 10B",
    "plan outputs/fast-axolotl-measure --gpu B200 --gpus 8,64 --epochs 3 --price 5.5/h",
    "plan outputs/fast-axolotl-measure --gpu H100-SXM,B200 --tokens 10B --html plan.html",
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
    epochs: Annotated[
        float | None, typer.Option(help="Instead of --tokens: epochs over the data of the run.")
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
    html: Annotated[
        Path | None,
        typer.Option(help="Also write an HTML page with charts of time, cost and tokens/s."),
    ] = None,
    as_json: ResultAsJson = False,
) -> None:
    """Predict tokens/s, memory, time and cost on other kinds and numbers of GPUs.

    The record of a short run calibrates the prediction: its throughput, memory, communication,
    power and what its loader can deliver. Every prediction has a 90 % interval and says what limits
    it: compute, memory, communication or data. Without a record, the intervals are wide.
    """
    from fast_axolotl.cli.plan_page import plan_document
    from fast_axolotl.cli.report import check_targets
    from fast_axolotl.plan.hardware import Price, find_price
    from fast_axolotl.plan.memory import Layout
    from fast_axolotl.plan.predict import join_plans, make_plan
    from fast_axolotl.plan.shape import read_config
    from fast_axolotl.record.codec import to_json
    from fast_axolotl.record.devices import find_gpu
    from fast_axolotl.report.page import render_page, write_text
    from fast_axolotl.report.terminal import print_document

    if tokens is not None and epochs is not None:
        raise UsageError("--tokens and --epochs mean the same: pass one of them")
    numbers = {"epochs": epochs, "network": network, "micro-batch": micro_batch}
    for name, value in {**numbers, "sequence-len": sequence_len}.items():
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"--{name} {value:g}: pass a number above 0")
    amount = None if tokens is None else _parse_count(tokens)
    shape = None if model is None else read_config(model)
    reference = None
    if run is not None:
        from fast_axolotl.measure.summary import summarise
        from fast_axolotl.plan.reference import count_epoch_tokens, read_reference
        from fast_axolotl.record.run_folders import read_training

        record = read_training(run)
        summary = summarise(record)
        shape, reference = read_reference(record, summary, shape)
        layout = reference.layout
        if epochs is not None:
            amount = epochs * count_epoch_tokens(record, summary)
    elif shape is None or not parse_names(gpu or ""):
        raise UsageError("pass the folder of a record, or --model config.json and --gpu H100-SXM")
    elif epochs is not None:
        raise UsageError(
            "--epochs needs a record, which says how long one is; pass --tokens instead"
        )
    else:
        layout = Layout(gpus=1, seq_len=sequence_len, micro_batch=micro_batch, method=method)
    kinds = list(dict.fromkeys(find_gpu(name) for name in parse_names(gpu or "")))
    if reference is not None and not kinds:
        kinds = [reference.gpu]
    costs = [find_price(kind) for kind in kinds]
    if price is not None:
        asked = [parse_price(name) for name in parse_names(price)]
        if len(asked) not in (1, len(kinds)):
            raise UsageError(
                f"--price {price!r}: pass one price, or {len(kinds)}: one per kind of GPU"
            )
        asked *= 1 if len(asked) == len(kinds) else len(kinds)
        costs = [Price(dollars=dollars, source="by --price") for dollars in asked]
    try:
        counts = [int(name) for name in gpus.split(",")]
    except ValueError:
        raise UsageError(f"cannot read --gpus {gpus!r}; write 8,16,64") from None
    common: dict[str, Any] = {"reference": reference, "tokens": amount, "network": network}
    found = join_plans(
        [
            make_plan(shape, kind, counts, layout, price=cost, **common)
            for kind, cost in zip(kinds, costs, strict=True)
        ]
    )
    if html is not None:
        check_targets(output=html)
        write_text(html, render_page(plan_document(found, run)))
    if as_json:
        print(to_json(found))
    else:
        print_document(plan_document(found, run))


def _parse_count(text: str) -> float:
    try:
        unit = text[-1:].lower() if text[-1:].isalpha() else ""
        count = float(text.removesuffix(text[-1:]) if unit else text) * _COUNTS[unit]
    except (ValueError, KeyError):
        count = 0.0
    if not 0 < count < float("inf"):
        raise UsageError(f"cannot read {text!r} as a number of tokens; write 300M, 10B or 1.5T")
    return count


def parse_price(text: str) -> float:
    try:
        dollars = float(text.strip().removesuffix("/h").removeprefix("$"))
    except ValueError:
        dollars = 0.0
    if not 0 < dollars < float("inf"):
        raise UsageError(f"cannot read {text!r} as dollars per GPU and hour; write 2.5/h")
    return dollars
