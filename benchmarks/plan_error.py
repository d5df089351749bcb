"""How wrong are plans? Every published row is predicted: ``python -m benchmarks.plan_error``.

Rows are those of ``published_runs.csv`` and ``throughput_rows.csv`` (``--data``), each with the
model, GPUs and layout that its source states, others from the same kind of page, and 20 steps that
were timed on an H200; ``plan_models.json`` has the models' shapes and both of these. Each source
(a repository) in turn is left out: the constants of the step and the widths of the intervals are
fitted to all others, and its rows are predicted, without a run, and *calibrated* by each other row
of the source. Errors are |predicted ÷ measured − 1| of tokens/s. Beside them is a *baseline* in the
same test, constant MFU: the reference's share of the peak in FLOPs; without a run, the median share
of all other sources. Pairs of a source weigh as much as another source's in each class. Takes some
minutes. ``--fit`` writes the constants and the widths fitted to all rows into the package.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memory_gpu import LLAMAS
from fast_axolotl.errors import UsageError
from fast_axolotl.plan import steptime
from fast_axolotl.plan.memory import Layout, predict_memory
from fast_axolotl.plan.predict import Reference, interval_width, list_differences, make_plan
from fast_axolotl.plan.shape import Shape
from fast_axolotl.plan.steptime import predict_step
from fast_axolotl.record.devices import Gpu, find_gpu

_MODELS = json.loads(Path(__file__).with_name("plan_models.json").read_text(encoding="utf-8"))
_KERNELS = (("pytorch|foundation", "flash"), ("calculon|cli99", "triton"), ("", "cudnn"))
"""Of attention, by source; those of 2021 and 2022 came before flash attention."""
_TEXTBOOK = {
    "gemm": 0.7, "gemm_ampere": 1.1, "gemm_low": 0.6, "ultra": 1.15, "attention": 0.57,
    "flash": 0.59, "triton": 0.5, "half_length": 850.0, "experts": 0.6, "expert_seconds": 0.001,
    "link": 0.7, "exposed": 0.4, "ring": 0.4, "leak": 0.2, "jitter": 0.006, "host_rate": 15e9,
}  # fmt: skip
"""What a GPU alone does, or makers and papers say: where every fit begins, and stays near."""
_WIDTHS = {
    "same": 0.12, "model": 0.12, "layout": 0.12, "experts": 0.4, "octave": 0.1, "gpu": 0.2,
    "generation": 0.2, "precision": 0.15, "stack": 0.4, "stack_experts": 0.4, "stack_octave": 0.15,
    "unseen": 0.35,
}  # fmt: skip
"""Where the fit of widths begins; the last one is not fitted."""
_CONSTANTS = Path(steptime.__file__).with_name("constants.json")
_PRIOR = 0.1
"""How strongly: by leaving sources out, 0.3 is as good, 0.01 worse."""
_SOFT = 0.08
"""Errors above this, in logarithms, count linearly instead of squared."""


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
    more = _MODELS["more"]
    for numbers in more["rows"]:
        known = zip(more["columns"], map(str, numbers), strict=False)
        cases.append(_published(defaultdict(str, known)))
    return cases + [_h200(row) for row in _MODELS["h200"]["rows"]], left_out


def _published(row: dict[str, str]) -> Case:
    name, source, kind, note = row["model"], row["source"], row["dp_or_fsdp"], row["note"]
    plain = re.sub(r"[^a-z0-9.]", "", re.sub(r"\(.*?\)", "", name).lower())
    size = float(row["params"] or 0)
    if plain == "gptptdp":
        plain += "175b" if size < 3e11 else "530b"
    if re.match("nemotron3|deepseekv4", plain):
        raise UsageError("state-space layers or compressed attention, which plans refuse")
    shapes = [
        Shape(**dict(zip(_MODELS["columns"], numbers, strict=False)))
        for pattern, numbers in _MODELS["shapes"].items()
        if re.fullmatch(pattern, plain)
    ]
    total, active = _MODELS["sizes"].get(plain, (size, size))
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
        "attention_kernel": next(kernel for names, kernel in _KERNELS if re.match(names, source)),
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
    if is_sharded and not row["recompute"]:
        layout = _recompute_to_fit(shape, gpu, layout)
    if not row["micro_batch"] and pp == 1:
        layout = _largest_micro_batch(shape, gpu, layout, each)
    # NeMo's and MaxText's formulas count the whole square of attention, the others half of it.
    square = 2 if re.match("NVIDIA/NeMo|AI-Hyper", source) else 1
    attended = square * shape.attended(layout.seq_len)
    flops = 6.0 * (active_parameters(shape) + shape.attention_width * attended)
    variant = precision + (note if note.endswith(" TP") else "")
    gbits = re.search(r"-(\d+)Gbps", hardware)
    return Case(
        stack=(source, row["hardware"], variant), source=re.split("[@ ]", source)[0], name=name,
        shape=shape, gpu=gpu, layout=layout, network=float(gbits[1]) / 64 if gbits else None,
        tokens=float(row["tokens_per_s_per_gpu"] or 1e12 * float(row["tflops_per_gpu"]) / flops),
        memory=float(row["mem_gib"] or 0) or None,
    )  # fmt: skip


def guess_shape(total: float, active: float) -> Shape:
    """What is usual at that size: 128 times as wide as deep; experts where not all is active."""
    hidden = max(128, 128 * round((128 * active / 13) ** (1 / 3) / 128))
    layers = max(2, round((active - 64_000 * hidden) / (13 * hidden * hidden)))
    ffn = 3.5 * hidden
    experts = round(8 * (total - active) / (3 * layers * hidden * ffn)) + 8
    return Shape(
        layers=layers, hidden=hidden, heads=max(1, hidden // 128), kv_heads=max(1, hidden // 512),
        head_size=128, ffn=ffn, vocabulary=32_000, experts=experts if total > active else 0,
        top_k=8 if total > active else 0, expert_ffn=ffn / 8 if total > active else 0,
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
        is_fused=True,
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
    layout = Layout(
        gpus=1, seq_len=length, micro_batch=micro, accumulation=accumulation,
        method="lora" if lora else "full", recompute="full" if checkpointing else "none",
    )  # fmt: skip
    return Case(
        stack=("transformers, eager", "H200", "BF16"), source="ours, one H200", name=size,
        shape=_llama(size), gpu=find_gpu("H200"), layout=layout,
        tokens=layout.step_tokens / seconds,
    )  # fmt: skip


def _llama(size: str) -> Shape:
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary")
    sizes: dict[str, Any] = dict(zip(names, LLAMAS[size], strict=True))
    return Shape(**sizes, head_size=sizes["hidden"] // sizes["heads"])


def _find_gpu(text: str) -> Gpu:
    found = re.match("A100-40GB|A100|H100|.*", text)
    name = found[0] if found else text
    return find_gpu({"A100": "A100-80GB", "H100": "H100-SXM"}.get(name, name))


def _recompute_to_fit(shape: Shape, gpu: Gpu, layout: Layout) -> Layout:
    """With as little recomputation as fits, where a source does not state it."""
    ways = ("none", "selective", "full")
    layouts = [replace(layout, recompute=way) for way in ways]  # type: ignore[arg-type]
    room = 0.95e9 * gpu.memory_gb
    return next((x for x in layouts if predict_memory(shape, x).total < room), layouts[-1])


def _largest_micro_batch(shape: Shape, gpu: Gpu, layout: Layout, each: float) -> Layout:
    """The largest that fits and divides the batch of a GPU, where that is stated; 64k tokens."""
    best = replace(layout, accumulation=max(1, round(each)))
    for micro in range(1, min(int(each or 64), 65536 // layout.seq_len) + 1):
        count = max(1, round(each / micro))
        tried = replace(layout, micro_batch=float(micro), accumulation=count)
        if each % micro == 0 and predict_memory(shape, tried).total < 0.9e9 * gpu.memory_gb:
            best = tried
    return best


def active_parameters(shape: Shape) -> float:
    """The weights that one token is multiplied with."""
    idle = 1 - shape.top_k / shape.experts if shape.experts else 0.0
    matrices = shape.layers * shape.layer_weights - idle * shape.expert_parameters
    return matrices + shape.vocabulary * shape.hidden


def residuals(cases: Sequence[Case], constants: Mapping[str, float]) -> Any:
    """log(measured ÷ predicted) tokens/s."""
    found = []
    for case in cases:
        gpu = replace(case.gpu, network=case.network or case.gpu.network)
        step = predict_step(case.shape, gpu, case.layout, constants)
        predicted = case.layout.step_tokens / step.total / case.layout.gpus
        found.append(math.log(case.tokens / predicted))
    return np.array(found)


def group(cases: Sequence[Case]) -> list[list[int]]:
    """Numbers of the rows of each stack."""
    stacks = defaultdict(list)
    for number, case in enumerate(cases):
        stacks[case.stack].append(number)
    return list(stacks.values())


def fit(cases: Sequence[Case]) -> dict[str, float]:
    """The constants that predict the rows of each stack alike, and the stacks near 1; with a prior,
    by weighted least squares, again and again (Levenberg and Marquardt)."""
    names, start = list(_TEXTBOOK), np.log(list(_TEXTBOOK.values()))
    sources, stacks = Counter(case.source for case in cases), group(cases)
    of_stack, each = np.zeros(len(cases), int), np.zeros(len(cases))
    for number, rows in enumerate(stacks):
        of_stack[rows], each[rows] = number, len(rows) ** -0.4 if len(rows) > 1 else 0.0
    own = np.array([sources[cases[rows[0]].source] ** -0.5 for rows in stacks])
    weights = np.append(each / each.sum(), 0.5 * own / own.sum())
    count, membership = len(names), np.eye(len(stacks))[of_stack]

    def errors(point: Any) -> Any:
        """Of rows against the level of their stack, then the levels."""
        values = dict(zip(names, np.exp(point[:count]).tolist(), strict=True))
        return np.append(residuals(cases, values) - point[count:][of_stack], point[count:])

    def loss(found: Any, point: Any) -> float:
        soft = _SOFT * (np.hypot(_SOFT, found) - _SOFT)
        return float(weights @ soft + _PRIOR / 2 * ((point[:count] - start) ** 2).sum())

    first = residuals(cases, _TEXTBOOK)
    point = np.append(start, [np.median(first[rows]) for rows in stacks])
    found, damping = errors(point), 0.01
    best = loss(found, point)
    pull = np.append(np.full(count, _PRIOR), np.zeros(len(stacks)))
    slopes = np.zeros((len(found), len(point)))
    slopes[:, count:] = np.concatenate((-membership, np.eye(len(stacks))))
    for _ in range(40):
        for number in range(count):
            moved = point.copy()
            moved[number] += 1e-3
            slopes[:, number] = (errors(moved) - found) / 1e-3
        scaled = slopes * (weights * _SOFT / np.hypot(_SOFT, found))[:, None]
        matrix = slopes.T @ scaled + np.diag(pull)
        side = -(scaled.T @ found) - pull * (point - np.append(start, np.zeros(len(stacks))))
        step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), side)
        tried = point + np.clip(step, -0.5, 0.5)
        now = errors(tried)
        gain = best - loss(now, tried)
        if gain > 0:
            point, found, best = tried, now, best - gain
        damping *= 0.2 if gain > 0 else 4.0
        if abs(gain) < 1e-4 * best or damping > 1e6:
            break
    return {n: float(f"{v:.3g}") for n, v in zip(names, np.exp(point[:count]), strict=True)}


@dataclass(slots=True)
class Prediction:
    """One row, predicted from another of its source, or from none."""

    source: str
    kinds: tuple[str, ...]
    differences: dict[str, float]
    error: float
    """log(measured ÷ predicted), and the baseline's."""
    baseline: float


def predict_rows(cases: Sequence[Case], apart: Any) -> list[Prediction]:
    """All rows from none, and from every other row of their source with the same software."""
    flops = [
        (6.0 if c.layout.method == "full" else 3.84)
        * (active_parameters(c.shape)
           + c.shape.attention_width * c.shape.attended(c.layout.seq_len))
        for c in cases
    ]  # fmt: skip
    dtypes = {"fp8": "float8", "fp4": "float4", "bf16": "bfloat16"}
    peaks = [c.gpu.tflops.get(dtypes[c.layout.precision], c.gpu.bf16) for c in cases]
    shares = np.log([c.tokens * f / p for c, f, p in zip(cases, flops, peaks, strict=True)])
    found = []
    files = defaultdict(list)
    for number, case in enumerate(cases):
        others = [shares[n] for n, other in enumerate(cases) if other.source != case.source]
        differences = list_differences(None, case.shape, case.gpu, case.layout)
        far = float(shares[number] - np.median(others))
        single = ("not calibrated",)
        found.append(Prediction(case.source, single, differences, float(apart[number]), far))
        files[case.stack[0], case.stack[2]].append(number)
    for rows in files.values():
        for known, other in permutations(rows, 2):
            one, two = cases[known], cases[other]
            run = Reference(gpu=one.gpu, layout=one.layout, tokens_per_second=1.0)
            differences = list_differences(run, two.shape, two.gpu, two.layout, one.shape)
            names = ["calibrated" if one.gpu == two.gpu else "another kind of GPU"]
            if one.gpu != two.gpu:
                names.append("another kind of GPU, a length within 4 times")
                if max(two.layout.seq_len / one.layout.seq_len, 1) >= 4:
                    names[-1] = "another kind of GPU, at least 4 times as long"
            elif two.layout.seq_len >= 4 * one.layout.seq_len:
                names.append("... at least 4 times as long")
                if two.layout.seq_len >= 16 * one.layout.seq_len:
                    names[-1:] = ["... at least 16 times as long", names[-1]]
            elif one.shape.experts or two.shape.experts:
                names.append("... models with experts")
            elif one.shape != two.shape:
                names.append("... another dense model")
            elif sum(differences.values()) == 1.0:
                names.append("... only the number of GPUs")
            else:
                names.append("... the same dense model")
            error, far = apart[other] - apart[known], shares[other] - shares[known]
            found.append(
                Prediction(one.source, tuple(names), differences, float(error), float(far))
            )
    return found


def weigh(rows: Sequence[Prediction]) -> Any:
    """Every class the same, and in it every source by the root of its pairs."""
    counts = Counter((row.kinds[-1], row.source) for row in rows)
    classes: dict[str, float] = defaultdict(float)
    for (name, _), count in counts.items():
        classes[name] += count**0.5
    pairs = [(row.kinds[-1], row.source) for row in rows]
    return np.array([counts[pair] ** -0.5 / classes[pair[0]] for pair in pairs])


def fit_widths(rows: Sequence[Prediction]) -> dict[str, float]:
    """The widths with the least pinball loss."""
    names = [name for name in _WIDTHS if name != "unseen"]
    far = np.array([[row.differences.get(name, 0.0) for name in names] for row in rows]) ** 2
    errors, weights = np.abs([row.error for row in rows]), weigh(rows)
    sources: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        sources[row.kinds[-1]].add(row.source)
    # Of the few sources of a class, more have to be inside than of one that was not seen.
    shares = {kind: min(0.98, 0.9 * (1 + 1.5 / len(names) ** 2)) for kind, names in sources.items()}
    share = np.array([shares[row.kinds[-1]] for row in rows])

    def loss(point: Any, chosen: Any = slice(None)) -> float:
        over = errors[chosen] - np.sqrt(far[chosen] @ point**2)
        losses = np.where(over > 0, share[chosen] * over, (share[chosen] - 1) * over)
        return float(weights[chosen] @ losses)

    # What is part of every pair comes from the pairs that differ in nothing else.
    point, axes = np.array([_WIDTHS[name] for name in names]), np.eye(len(names))
    for name in ("same", "stack"):
        axis = axes[names.index(name)]
        alone = (far @ (1 - axis) == 0) & (far @ axis > 0)
        widths = [np.where(axis > 0, width, point) for width in np.geomspace(0.01, 2.0, 200)]
        point = min(widths, key=lambda one, alone=alone: loss(one, alone))  # type: ignore[misc]
    step, best = 0.5, loss(point)
    for _ in range(14):
        for axis in (axes[n] for n, name in enumerate(names) if name not in ("same", "stack")):
            for factor in (1 + step, 1 / (1 + step)):
                while (
                    now := loss(tried := np.where(axis > 0, point * factor, point))
                ) < best - 1e-7:
                    point, best = tried, now
        step *= 0.75
    values = zip(names, point, strict=True)
    return _WIDTHS | {name: float(f"{value:.3g}") for name, value in values}


def check_search(count: int) -> str:
    """Brute force over every layout of random jobs: is one that fits faster than the plan's?"""
    dice, slower = random.Random(0), []
    kinds = [find_gpu(name) for name in ("RTX-4090", "L40S", "A100-80GB", "H100-SXM", "B200")]
    for _ in range(count):
        shape, gpu = dice.choice([_llama(name) for name in LLAMAS]), dice.choice(kinds)
        gpus, length = dice.choice((1, 2, 4, 8, 16, 64)), dice.choice((2048, 4096, 16384))
        samples = gpus * dice.choice((1, 2, 4, 16))
        method: Any = dice.choice(("full", "lora", "qlora"))
        start = Layout(gpus=1, seq_len=length, accumulation=samples, method=method)
        (found,) = make_plan(shape, [(gpu, None)], [gpus], start).candidates
        best = 0.0
        for tp, pp, cp, way, again, store, passes in product(
            (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), ("ddp", "zero1", "zero2", "fsdp"),
            ("none", "selective", "full"), ("adamw", "offload"), (1, 2, 4, 8, 16),
        ):  # fmt: skip
            is_odd = (
                shape.heads % tp or shape.layers % pp or length < 1024 * cp or tp > gpu.node_size
            )
            is_odd = is_odd or (store == "offload" and method != "full")
            if gpus % (tp * pp * cp) or (pp > 1 and way in ("zero2", "fsdp")) or is_odd:
                continue
            micro = samples * tp * pp * cp / gpus / passes
            known: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "sharding": way}
            known |= {"recompute": again, "optimizer": store, "accumulation": passes}
            one = replace(start, gpus=gpus, micro_batch=micro, **known)
            if micro % 1 == 0 and predict_memory(shape, one).total <= 0.92e9 * gpu.memory_gb:
                best = max(best, one.step_tokens / predict_step(shape, gpu, one).total)
        rate = found.tokens_per_second.value if found.tokens_per_second else 0.0
        slower.append(best / rate - 1 if rate else float(best > 0))
    over = sum(share > 0.0401 for share in slower)
    return f"{over} of {count} jobs have a layout over 4 % faster; the worst is {max(slower):.1%}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The table of errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the published rows")
    parser.add_argument("--fit", action="store_true", help="write the package's constants, too")
    parser.add_argument(
        "--jobs", type=int, default=400, help="of the layout search, by brute force"
    )
    options = parser.parse_args(arguments)
    cases, left_out = load(options.data)
    sources = sorted({case.source for case in cases})
    print(f"{len(cases)} rows of {len(sources)} sources; left out: {dict(left_out)}")
    apart = np.zeros(len(cases))
    for source in sources:
        rows = [number for number, case in enumerate(cases) if case.source == source]
        constants = fit([case for case in cases if case.source != source])
        apart[rows] = residuals([cases[number] for number in rows], constants)
    found = predict_rows(cases, apart)
    without = {name: fit_widths([row for row in found if row.source != name]) for name in sources}
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for row in found:
        for name in (
            *row.kinds,
            f"   {row.source}, {row.kinds[0]}",
            f"{row.kinds[0]}, pairs alike",
        ):
            groups[name].append(row)
    print(f"{'':58}{'rows':>7}{'median':>8}{'p90':>8}{'inside':>8}{'±':>7}{'MFU':>8}{'p90':>8}")
    for name in sorted(groups, key=lambda name: (name[0] == " ", name)):
        group = groups[name]
        widths = np.array([interval_width(row.differences, without[row.source]) for row in group])
        counts = Counter(row.source for row in group)
        weights = np.array([1 / counts[row.source] for row in group])
        weights = np.ones(len(group)) if name.endswith("alike") else weights
        cells = []
        for logs in (np.array([x.error for x in group]), np.array([x.baseline for x in group])):
            errors = np.abs(np.exp(-logs) - 1)
            order = np.argsort(errors)
            ranks = np.cumsum(weights[order]) / weights.sum()
            cells.append([errors[order][np.searchsorted(ranks, q)] for q in (0.5, 0.8999)])
        inside = np.abs([row.error for row in group]) <= widths
        covered, half = np.average(inside, weights=weights), np.expm1(np.median(widths))
        (middle, high), (plain, most) = cells
        print(f"{name:58}{len(group):7}{middle:8.1%}{high:8.1%}{covered:8.1%}{half:7.0%}"
              f"{plain:8.1%}{most:8.1%}")  # fmt: skip
    if options.fit:
        table = json.loads(_CONSTANTS.read_text(encoding="utf-8"))
        for part, values in ("step", fit(cases)), ("widths", fit_widths(found)):
            for name, value in values.items():
                table[part][name][0] = value
        text = json.dumps(table, indent=2)
        text = re.sub(r"\[\s+([^\n]*)\s+(.*)\s+\]", r"[\1 \2]", text)
        _CONSTANTS.write_text(text + "\n", encoding="utf-8")
    for case in cases:
        if case.memory:
            need = predict_memory(case.shape, case.layout).total / 2**30
            where = f"memory, {case.name} ×{case.layout.gpus} at {case.layout.seq_len}"
            print(f"{where:54}{case.memory:9.1f} GiB, predicted {need:.1f}")
    print(f"layout search: {check_search(options.jobs)}")


if __name__ == "__main__":
    main()
