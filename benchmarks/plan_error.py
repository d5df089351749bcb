"""How wrong are plans? Every published row is predicted: ``python -m benchmarks.plan_error``.

Rows are those of ``published_runs.csv`` and ``throughput_rows.csv`` (``--data``), each with the
model, GPUs and layout that its source states, and 20 steps that were timed on an H200;
``plan_models.json`` has the models' shapes and these steps. A
*stack* is source, hardware and precision. Calibrated: each row of a stack in turn stands for the
user's run, and every other row of the stack is predicted; once with the package's constants, and
once with constants fitted without the repository of the row. Uncalibrated: the latter, without a
run. Errors are |predicted ÷ measured − 1| of tokens/s. Takes about a minute. ``--fit`` prints
constants fitted to all rows, for ``steptime.Constants``.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memory_gpu import LLAMAS
from fast_axolotl.errors import UsageError
from fast_axolotl.plan.memory import Layout, predict_memory
from fast_axolotl.plan.predict import Reference, interval_width
from fast_axolotl.plan.shape import Shape, guess_shape
from fast_axolotl.plan.steptime import Constants, predict_step
from fast_axolotl.record.devices import Gpu, find_gpu

_MODELS = json.loads(Path(__file__).with_name("plan_models.json").read_text(encoding="utf-8"))
_TEXTBOOK = Constants(
    gemm=0.75, gemm_low=0.55, ultra=1.15, attention=0.4, attention_hopper=0.35,
    attention_blackwell=0.35, attention_triton=0.6, elementwise=1.0, experts=0.5,
    expert_seconds=0.001, link=0.7, exposed_tp=0.6, exposed=0.4, leak=0.15, jitter=0.003,
)  # fmt: skip
"""Where every fit begins, and what it is drawn back to."""
_MOST = {"link": 0.9, "ultra": 1.4, "elementwise": 4.0, "leak": 0.5}
"""Bounds of constants, where they are not 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One published row."""

    stack: tuple[str, ...]
    source: str
    name: str
    shape: Shape
    gpu: Gpu
    layout: Layout
    network: float | None = None
    tokens: float
    """Per second and GPU, as published, or from the published TFLOP/s where it has none."""
    memory: float | None = None


def load(folder: Path) -> tuple[list[Case], Counter[str]]:
    """The rows that say enough, and how many do not, by reason."""
    cases: list[Case] = []
    left_out: Counter[str] = Counter()
    for name, read in (("published_runs.csv", _published), ("throughput_rows.csv", _foundry)):
        with (folder / name).open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                try:
                    cases.append(read(row))
                except UsageError as reason:
                    left_out[str(reason)] += 1
    return cases + [_h200(row) for row in _MODELS["h200"]["rows"]], left_out


def _published(row: dict[str, str]) -> Case:
    name, source, kind, note = row["model"], row["source"], row["dp_or_fsdp"], row["note"]
    plain = re.sub(r"[^a-z0-9.]", "", re.sub(r"\(.*?\)", "", name).lower())
    size = float(row["params"] or 0)
    if plain == "gptptdp":
        plain += "175b" if size < 3e11 else "530b"
    if re.match("nemotron3|deepseekv4", plain):
        raise UsageError("state-space layers or compressed attention, which plans refuse")
    if "INCONSISTENT" in note:
        raise UsageError("the layout does not multiply to the GPUs")
    total, active = _MODELS["sizes"].get(plain, (size, None))
    shapes = [
        Shape(**dict(zip(_MODELS["columns"], numbers, strict=False)))
        for pattern, numbers in _MODELS["shapes"].items()
        if re.fullmatch(pattern, plain)
    ]
    if not row["n_gpus"] or not (shapes or total):
        raise UsageError("the model or the number of GPUs is not stated")
    shape = shapes[0] if shapes else guess_shape(total, active)
    gpus, tp, pp, cp = (int(row[key] or 1) for key in ("n_gpus", "tp", "pp", "cp"))
    hardware = row["hardware"].replace("A3 H100-80GB", "H100-800Gbps").removeprefix("DGX-")
    batch, micro = float(row["global_batch"] or 0), float(row["micro_batch"] or 1)
    is_sharded = "sdp" in kind or "zero3" in kind or not row["tp"]
    each = batch * tp * pp * cp / gpus
    precision, recompute = row["precision"].upper(), row["recompute"] or "none"
    unstated: Any = {True: 1, False: min(gpus, max(1, shape.experts))}[bool(row["tp"])]
    known: dict[str, Any] = {
        "recompute": "selective" if recompute.startswith("sel") else recompute,
        "precision": "fp4" if "FP4" in precision else "fp8" if "FP8" in precision else "bf16",
        "states": "bf16" if "zero3" in kind else "mixed" if is_sharded else "master",
    }
    layout = Layout(
        gpus=gpus, tp=tp, pp=pp, cp=cp, ep=int(row["ep"] or unstated),
        vp=int(row["vp"] or (4 if pp > 1 else 1)),
        shard=8 if kind.startswith("hsdp") else 128 if "x" in kind else 0,
        sharding="fsdp" if is_sharded else "zero1",
        seq_len=int(row["seq_len"] or (8192 if "Llama 3" in name else 2048)),
        micro_batch=micro, accumulation=max(1, round(each / micro)), is_fused=True,
        method="lora" if row["task"] == "LoRA" else "full",
        optimizer="offload" if "offload" in note else "adamw", **known,
    )  # fmt: skip
    gpu = _find_gpu(hardware)
    if not row["micro_batch"] and pp == 1:
        layout = _largest_micro_batch(shape, gpu, layout, each)
    flops = 6.0 * (shape.active_parameters + shape.attention_width * shape.attended(layout.seq_len))
    gbits = re.search(r"-(\d+)Gbps", hardware)
    return Case(
        stack=(source, row["hardware"], precision), source=re.split("[@ ]", source)[0], name=name,
        shape=shape, gpu=gpu, layout=layout, network=float(gbits[1]) / 64 if gbits else None,
        tokens=float(row["tokens_per_s_per_gpu"] or 1e12 * float(row["tflops_per_gpu"]) / flops),
        memory=float(row["mem_gib"] or 0) or None,
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
        precision="fp8" if "fp8" in precision else "bf16",
        states="mixed" if "amp" in precision else "bf16",
    )  # fmt: skip
    gpu = _find_gpu(hardware.upper().replace("_", "-"))
    return Case(
        stack=(row["source"], hardware, precision), source="llm-foundry", name=row["model"],
        shape=shape, gpu=gpu, tokens=float(row["tokens_per_s_per_gpu"]),
        layout=_largest_micro_batch(shape, gpu, layout, float(row["batch_seqs"]) / gpus),
    )  # fmt: skip


def _h200(row: list[Any]) -> Case:
    """A step that was timed here: transformers' eager Llama on one H200."""
    size, micro, length, lora, checkpointing, accumulation, seconds = row
    layers, hidden, heads, keys, ffn, vocabulary = LLAMAS[size]
    shape = Shape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=keys, head_size=hidden // heads,
        ffn=ffn, vocabulary=vocabulary,
    )  # fmt: skip
    layout = Layout(
        gpus=1, seq_len=length, micro_batch=micro, accumulation=accumulation,
        method="lora" if lora else "full", recompute="full" if checkpointing else "none",
    )  # fmt: skip
    return Case(
        stack=("transformers, eager", "H200", "BF16"), source="ours, one H200", name=size,
        shape=shape, gpu=find_gpu("H200"), layout=layout, tokens=layout.step_tokens / seconds,
    )  # fmt: skip


def _find_gpu(text: str) -> Gpu:
    found = re.match("A100-40GB|A100|H100|.*", text)
    name = found[0] if found else text
    return find_gpu({"A100": "A100-80GB", "H100": "H100-SXM"}.get(name, name))


def _largest_micro_batch(shape: Shape, gpu: Gpu, layout: Layout, each: float) -> Layout:
    """The largest that fits and divides the batch of a GPU, where that is stated; 64k tokens."""
    best = replace(layout, accumulation=max(1, round(each)))
    for micro in range(1, min(int(each or 64), 65536 // layout.seq_len) + 1):
        count = max(1, round(each / micro))
        tried = replace(layout, micro_batch=float(micro), accumulation=count)
        if each % micro == 0 and predict_memory(shape, tried).total < 0.9e9 * gpu.memory_gb:
            best = tried
    return best


def residuals(cases: Sequence[Case], constants: Constants) -> Any:
    """log(measured ÷ predicted) tokens/s."""
    found = []
    for case in cases:
        step = predict_step(case.shape, case.gpu, case.layout, constants, network=case.network)
        predicted = case.layout.step_tokens / step.total / case.layout.gpus
        found.append(math.log(case.tokens / predicted))
    return np.array(found)


def group(cases: Sequence[Case]) -> list[list[int]]:
    """Numbers of the rows of each stack."""
    stacks = defaultdict(list)
    for number, case in enumerate(cases):
        stacks[case.stack].append(number)
    return list(stacks.values())


def fit(cases: Sequence[Case], rounds: int) -> Constants:
    """Constants with small deviations inside of stacks and of stacks from 1, near the textbook."""
    names = [item.name for item in fields(Constants)]
    start = np.log([getattr(_TEXTBOOK, name) for name in names])
    most = np.log([_MOST.get(name, 1.0) for name in names])
    sources, stacks = Counter(case.source for case in cases), group(cases)

    def soften(apart: Any) -> Any:
        return np.minimum(np.abs(apart), 0.28 + 0.3 * np.abs(apart))

    def loss(point: Any) -> float:
        values = dict(zip(names, np.exp(point).tolist(), strict=True))
        found = residuals(cases, Constants(**values))
        sums = np.zeros(4)
        for rows in stacks:
            level = np.median(found[rows])
            own = sources[cases[rows[0]].source] ** -0.5
            each = len(rows) ** -0.4 if len(rows) > 1 else 0.0
            sums += each * soften(found[rows] - level).sum(), each * len(rows), 0, 0
            sums += 0, 0, own * soften(level), own
        far = np.mean((point - start) ** 2)
        return float(sums[0] / sums[1] + 0.5 * sums[2] / sums[3] + 0.02 * far)

    dice, point, step = np.random.default_rng(0), start, 0.3
    best = loss(point)
    for _ in range(rounds):
        axes = np.eye(len(names))[dice.permutation(len(names))]
        moves = [sign * step * axis for axis in axes for sign in (1, -1)]
        moves += list(dice.normal(0, step / 2, (20, len(names))) * (dice.random(len(names)) < 0.3))
        for move in moves:
            while (found := loss(tried := np.minimum(point + move, most))) < best - 1e-6:
                point, best = tried, found
        step *= 0.7
    return Constants(**{n: float(f"{v:.3g}") for n, v in zip(names, np.exp(point), strict=True)})


def main(arguments: Sequence[str] | None = None) -> None:
    """The table of errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the published rows")
    parser.add_argument("--fit", action="store_true", help="only fit constants to all rows")
    options = parser.parse_args(arguments)
    cases, left_out = load(options.data)
    stacks = group(cases)
    print(f"{len(cases)} rows of {len(stacks)} stacks; left out: {dict(left_out)}")
    if options.fit:
        print(fit(cases, rounds=20))
        return
    table: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    apart = np.zeros(len(cases))
    for source in sorted({case.source for case in cases}):
        rows = [number for number, case in enumerate(cases) if case.source == source]
        constants = fit([case for case in cases if case.source != source], rounds=5)
        apart[rows] = residuals([cases[number] for number in rows], constants)
        for number in rows:
            case = cases[number]
            width = interval_width(None, case.shape, case.gpu, case.layout)
            names = ["not calibrated", f"   {source}"]
            if "llama" in case.name.lower() and case.gpu.key == "H100-SXM":
                names.append("not calibrated, Llama on H100")
            for name in names:
                table[name].append((apart[number], width, 1.0))
    inside = residuals(cases, Constants())
    for rows in stacks:
        for known, other in permutations(rows, 2):
            one, two = cases[known], cases[other]
            run = Reference(gpu=one.gpu, layout=one.layout, tokens_per_second=1.0)
            width = interval_width(run, two.shape, two.gpu, two.layout, one.shape)
            kind = "other dense models" if one.shape != two.shape else "the same dense model"
            kind = "models with experts" if one.shape.experts or two.shape.experts else kind
            weight = 1 / len(rows) / (len(rows) - 1)
            for name, found in (("", inside), (", source left out", apart)):
                error = found[other] - found[known]
                table[f"calibrated{name}"].append((error, width, 1.0))
                table[f"calibrated{name}, stacks count the same"].append((error, width, weight))
                table[f"calibrated{name}, {kind}"].append((error, width, weight))
    print(f"{'':54}{'rows':>6}{'median':>9}{'p90':>9}{'inside':>9}{'±':>7}")
    for name in sorted(table, key=lambda name: (name[0] == " ", name[0] == "n", name)):
        logs, widths, weights = (np.array(column) for column in zip(*table[name], strict=True))
        errors = np.abs(np.exp(-logs) - 1)
        order = np.argsort(errors)
        ranks = np.cumsum(weights[order]) / weights.sum()
        middle, high = (errors[order][np.searchsorted(ranks, share)] for share in (0.5, 0.9))
        covered = np.average(np.abs(logs) <= widths, weights=weights)
        half = np.expm1(np.median(widths))
        print(f"{name:54}{len(logs):6}{middle:9.1%}{high:9.1%}{covered:9.1%}{half:7.0%}")
    for case in cases:
        if case.memory:
            found = predict_memory(case.shape, case.layout).total / 2**30
            where = f"memory, {case.name} ×{case.layout.gpus} at {case.layout.seq_len}"
            print(f"{where:54}{case.memory:9.1f} GiB, predicted {found:.1f}")


if __name__ == "__main__":
    main()
