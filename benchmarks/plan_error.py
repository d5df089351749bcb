"""How wrong are plans? Every published row is predicted: ``python -m benchmarks.plan_error``.

Rows are those of ``published_runs.csv`` and ``throughput_rows.csv`` (``--data``), each with the
model, GPUs and layout that its source states; ``plan_models.json`` has the models' shapes. A
*stack* is source, hardware and precision. Calibrated: each row of a stack in turn stands for the
user's run, and every other row of the stack is predicted. Uncalibrated: the constants are fitted
again without the repository of the row. Errors are |predicted ÷ measured − 1| of tokens/s.
``--fit`` prints constants fitted to all rows, for ``steptime.Constants``; ``--worst 20`` the rows
that are most unlike their stack.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np

from fast_axolotl.plan.hardware import GPUS, Gpu, find_gpu
from fast_axolotl.plan.memory import Layout, predict_memory
from fast_axolotl.plan.predict import Reference, interval_width
from fast_axolotl.plan.shape import Shape, guess_shape
from fast_axolotl.plan.steptime import Constants, predict_step

Array = np.ndarray
_MODELS = json.loads(Path(__file__).with_name("plan_models.json").read_text(encoding="utf-8"))
_TEXTBOOK = Constants(
    gemm=0.75, gemm_fp8=0.6, gemm_fp4=0.45, ultra=1.15, recompute=0.9, attention=0.4,
    attention_hopper=0.35, attention_blackwell=0.35, attention_triton=0.6, io=0.35, elementwise=1.0,
    quantise=0.5, experts=0.5, expert_launch=0.001, routing=1.0, link=0.7, exposed_tp=0.6,
    exposed_ep=0.6, exposed_cp=0.3, exposed_dp=0.3, leak=0.15, jitter=0.003, launch=0.0002,
)  # fmt: skip
"""Where every fit begins, and what it is drawn back to."""
_MOST = {"link": 0.9, "ultra": 1.4, "recompute": 1.1, "elementwise": 4.0, "quantise": 4.0,
         "routing": 5.0, "leak": 0.5}  # fmt: skip
"""Bounds that are not 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One published row."""

    stack: tuple[str, ...]
    source: str
    name: str
    shape: Shape
    gpu: Gpu
    layout: Layout
    network: float | None
    tokens: float
    """Per second and GPU, as published, or from the published TFLOP/s where it has none."""
    memory: float | None = None


def load(folder: Path) -> tuple[list[Case], Counter[str]]:
    """The rows that say enough, and how many do not, by reason."""
    cases: list[Case] = []
    left_out: Counter[str] = Counter()
    with (folder / "published_runs.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            case = _published(row)
            if isinstance(case, str):
                left_out[case] += 1
            else:
                cases.append(case)
    with (folder / "throughput_rows.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            cases.append(_foundry(row))
    return cases, left_out


def _published(row: dict[str, str]) -> Case | str:
    name, source, kind, note = row["model"], row["source"], row["dp_or_fsdp"], row["note"]
    plain = re.sub(r"[^a-z0-9.]", "", re.sub(r"\(.*?\)", "", name).lower())
    size = float(row["params"] or 0)
    if plain == "gptptdp":
        plain += "175b" if size < 3e11 else "530b"
    if re.match("nemotron3|deepseekv4", plain):
        return "state-space layers or compressed attention, which plans refuse"
    if "INCONSISTENT" in note:
        return "the layout does not multiply to the GPUs"
    shape = None if not size else guess_shape(size)
    for pattern, numbers in _MODELS["shapes"].items():
        if re.fullmatch(pattern, plain):
            shape = Shape(**dict(zip(_MODELS["columns"], numbers, strict=False)))
    if plain in _MODELS["sizes"]:
        total, active = _MODELS["sizes"][plain]
        shape = guess_shape(total, active=active, vocabulary=131_072)
    if shape is None or not row["n_gpus"]:
        return "the model or the number of GPUs is not stated"
    gpus, tp, pp, cp = (int(row[key] or 1) for key in ("n_gpus", "tp", "pp", "cp"))
    hardware = row["hardware"].replace("A3 H100-80GB", "H100-800Gbps").removeprefix("DGX-")
    gpu = _find_gpu(hardware)
    dp = gpus // (tp * pp * cp)
    total = float(row["global_batch"] or 0)
    micro = float(row["micro_batch"] or 1)
    is_sharded = "sdp" in kind or "zero3" in kind or not row["tp"]
    precision = row["precision"].upper()
    unstated_ep = 1 if row["tp"] else min(gpus, max(1, shape.experts))
    layout = Layout(
        gpus=gpus, tp=tp, pp=pp, cp=cp, ep=int(row["ep"] or unstated_ep),
        vp=int(row["vp"] or (4 if pp > 1 else 1)),
        shard=8 if kind.startswith("hsdp") else int(re.findall(r"\d+", kind)[0]) if "x" in kind else 0,
        sharding="fsdp" if is_sharded else "zero1",
        seq_len=int(row["seq_len"] or (8192 if "Llama 3" in name else 2048)),
        micro_batch=micro, accumulation=max(1, round((total or dp * micro) / dp / micro)),
        recompute="full" if "full" in row["recompute"] else "selective" if row["recompute"][:3] == "sel" else "none",
        method="lora" if row["task"] == "LoRA" else "full",
        precision="fp4" if "FP4" in precision else "fp8" if "FP8" in precision else "bf16",
        states="bf16" if "zero3" in kind else "mixed" if is_sharded else "master", is_fused=True,
        optimizer="offload" if "offload" in note else "adamw",
    )  # fmt: skip
    if not row["micro_batch"] and pp == 1:
        layout = _largest_micro_batch(shape, gpu, layout, max(1.0, total / dp) if total else None)
    flops = 6.0 * (shape.active_parameters + shape.attention_width * shape.attended(layout.seq_len))
    tokens = float(row["tokens_per_s_per_gpu"] or 1e12 * float(row["tflops_per_gpu"] or 0) / flops)
    gbits = re.search(r"-(\d+)Gbps", hardware)
    return Case(
        stack=(source, row["hardware"], precision), source=re.split("[@ ]", source)[0], name=name,
        shape=shape, gpu=gpu, layout=layout, network=float(gbits[1]) / 64 if gbits else None,
        tokens=tokens, memory=float(row["mem_gib"] or 0) or None,
    )  # fmt: skip


def _foundry(row: dict[str, str]) -> Case:
    """A row of llm-foundry: MPT with full sharding; it does not state its micro-batch."""
    hidden, gpus = int(row["attn_width_HxQ"]), int(row["gpus"])
    hardware, precision = row["accelerator"].split("/")
    shape = Shape(
        layers=int(row["layers"]), hidden=hidden, heads=hidden // 128, kv_heads=hidden // 128,
        head_size=128, ffn=4 * hidden, vocabulary=50368, is_gated=False, is_tied=True,
    )  # fmt: skip
    layout = Layout(
        gpus=gpus, sharding="fsdp", seq_len=int(row["seq_len"]), attention_kernel="triton",
        recompute="full" if row["recompute"] == "True" else "none",
        precision="fp8" if "fp8" in precision else "bf16", states="mixed" if "amp" in precision else "bf16",
    )  # fmt: skip
    gpu = _find_gpu(hardware.replace("_", "-"))
    return Case(
        stack=(row["source"], hardware, precision), source="llm-foundry", name=row["model"],
        shape=shape, gpu=gpu, network=None, tokens=float(row["tokens_per_s_per_gpu"]),
        layout=_largest_micro_batch(shape, gpu, layout, float(row["batch_seqs"]) / gpus),
    )  # fmt: skip


def _find_gpu(text: str) -> Gpu:
    for name in (
        text,
        "A100-40GB" if text.lower().startswith("a100-40") else text[:4] + "-SXM",
        "A100-80GB",
    ):
        if any(name.lower() == gpu.key.lower() or name in gpu.names for gpu in GPUS):
            return find_gpu(name)
    return find_gpu(text)


def _largest_micro_batch(shape: Shape, gpu: Gpu, layout: Layout, each: float | None) -> Layout:
    """The largest that fits and divides the batch of a GPU, up to 64k tokens."""
    best = replace(layout, micro_batch=1.0, accumulation=max(1, round(each or 1)))
    for micro in range(1, min(int(each or 64), 65536 // layout.seq_len) + 1):
        count = 1 if each is None else max(1, round(each / micro))
        tried = replace(layout, micro_batch=float(micro), accumulation=count)
        fits = predict_memory(shape, tried).total < 0.9e9 * gpu.memory_gb
        if fits and (each is None or each % micro == 0):
            best = tried
    return best


def residuals(cases: Sequence[Case], constants: Constants) -> Array:
    """log(measured ÷ predicted) tokens/s."""
    steps = (predict_step(c.shape, c.gpu, c.layout, constants, network=c.network) for c in cases)
    return np.array(
        [
            math.log(c.tokens * c.layout.gpus / s.tokens_per_second)
            for c, s in zip(cases, steps, strict=True)
        ]
    )


def fit(cases: Sequence[Case], rounds: int = 6) -> Constants:
    """Constants with small deviations inside of stacks and of stacks from 1, near the textbook."""
    names = [item.name for item in fields(Constants)]
    start = np.log([getattr(_TEXTBOOK, name) for name in names])
    most = np.log([_MOST.get(name, 1.0) for name in names])
    stacks, sources = defaultdict(list), Counter(case.source for case in cases)
    for number, case in enumerate(cases):
        stacks[case.stack].append(number)

    def loss(point: Array) -> float:
        found = residuals(cases, Constants(**dict(zip(names, np.exp(point).tolist(), strict=True))))
        inside = weight = outside = weights = 0.0
        for rows in stacks.values():
            level = float(np.median(found[rows]))
            each, own = len(rows) ** -0.4, sources[cases[rows[0]].source] ** -0.5
            apart = np.abs(found[rows] - level)
            inside += (
                each * float(np.minimum(apart, 0.28 + 0.3 * apart).sum()) if len(rows) > 1 else 0
            )
            weight += each * len(rows) if len(rows) > 1 else 0
            outside, weights = (
                outside + own * min(abs(level), 0.28 + 0.3 * abs(level)),
                weights + own,
            )
        return (
            inside / weight + 0.5 * outside / weights + 0.02 * float(np.mean((point - start) ** 2))
        )

    dice, point, step = np.random.default_rng(0), start, 0.3
    best = loss(point)
    for _ in range(rounds):
        moves = [
            sign * step * np.eye(len(names))[index]
            for index in dice.permutation(len(names))
            for sign in (1, -1)
        ]
        moves += [
            dice.normal(0, step / 2, len(names)) * (dice.random(len(names)) < 0.3)
            for _ in range(20)
        ]
        for move in moves:
            while (found := loss(tried := np.minimum(point + move, most))) < best - 1e-6:
                point, best = tried, found
        step *= 0.7
    return Constants(
        **{name: float(f"{value:.3g}") for name, value in zip(names, np.exp(point), strict=True)}
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--worst", type=int, default=0)
    options = parser.parse_args(arguments)
    cases, left_out = load(options.data)
    print(
        f"{len(cases)} rows of {len({c.stack for c in cases})} stacks; left out: {dict(left_out)}"
    )
    if options.fit:
        print(fit(cases, rounds=10))
        return
    found = residuals(cases, Constants())
    table: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    stacks = defaultdict(list)
    for number, case in enumerate(cases):
        stacks[case.stack].append(number)
    for rows in stacks.values():
        for known in rows:
            for other in rows:
                if known != other:
                    one, two = cases[known], cases[other]
                    own = Reference(gpu=one.gpu, layout=one.layout, tokens_per_second=1.0)
                    width = interval_width(own, two.shape, two.gpu, two.layout, one.shape)
                    apart = found[other] - found[known]
                    entry = (
                        abs(math.exp(-apart) - 1),
                        float(abs(apart) <= width),
                        1 / len(rows) / (len(rows) - 1),
                        width,
                    )
                    table["calibrated, all pairs of rows"].append((*entry[:2], 1.0, width))
                    table["calibrated, every stack counts the same"].append(entry)
                    kind = (
                        "models with experts"
                        if one.shape.experts or two.shape.experts
                        else "dense, same model"
                        if one.shape == two.shape
                        else "dense, other models"
                    )
                    table[f"calibrated, {kind}, stacks the same"].append(entry)
    for source in sorted({case.source for case in cases}):
        rows = [number for number, case in enumerate(cases) if case.source == source]
        constants = fit([case for case in cases if case.source != source], rounds=4)
        apart = residuals([cases[number] for number in rows], constants)
        for number, value in zip(rows, apart, strict=True):
            case = cases[number]
            width = interval_width(None, case.shape, case.gpu, case.layout)
            entry = (abs(math.exp(-value) - 1), float(abs(value) <= width), 1.0, width)
            table["not calibrated, source left out"].append(entry)
            table[f"  {source}"].append(entry)
            if "llama" in case.name.lower() and case.gpu.key == "H100-SXM":
                table["not calibrated, Llama on H100"].append(entry)
    print(f"{'':52}{'rows':>7}{'median':>8}{'p90':>8}{'inside 90 %':>13}{'± (median)':>12}")
    for name, entries in table.items():
        errors, inside, weights, widths = (
            np.array(column) for column in zip(*entries, strict=True)
        )
        order = np.argsort(errors)
        ranks = np.cumsum(weights[order]) / weights.sum()
        middle, high = (errors[order][np.searchsorted(ranks, share)] for share in (0.5, 0.9))
        print(
            f"{name:52}{len(errors):7}{middle:8.1%}{high:8.1%}{np.average(inside, weights=weights):13.1%}{np.median(np.exp(widths) - 1):12.0%}"
        )
    for case in cases:
        if case.memory:
            bytes_found = predict_memory(case.shape, case.layout).total / 2**30
            print(
                f"memory, {case.name} ×{case.layout.gpus} at {case.layout.seq_len}: published {case.memory} GiB, predicted {bytes_found:.1f} ({bytes_found / case.memory - 1:+.0%})"
            )
    levels = {stack: float(np.median(found[rows])) for stack, rows in stacks.items()}
    worst = sorted(range(len(cases)), key=lambda n: -abs(found[n] - levels[cases[n].stack]))
    for number in worst[: options.worst]:
        case = cases[number]
        print(
            f"{math.exp(found[number] - levels[case.stack]):.2f} of its stack: {case.name}, {case.stack}, {case.layout}"
        )


if __name__ == "__main__":
    main()
