"""How wrong are plans? Every published row is predicted: ``python -m benchmarks.plan_error``.

Rows are those of ``published_runs.csv`` and ``throughput_rows.csv`` (``--data``), each with the
model, the GPUs and the layout that its source states. A *stack* is source, hardware and precision.
Calibrated: each row of a stack in turn stands for the user's own run, and every other row of that
stack is predicted. Uncalibrated: the constants are fitted again without the source (repository) of
the row. Errors are of tokens/s: |predicted ÷ measured − 1|. ``--fit`` prints constants fitted to
all rows, for ``steptime.Constants``; ``--worst`` lists the rows with the largest errors.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

import numpy as np

from fast_axolotl.errors import UsageError
from fast_axolotl.plan.hardware import GPUS, Gpu
from fast_axolotl.plan.memory import Layout, predict_memory
from fast_axolotl.plan.shape import Shape, guess_shape
from fast_axolotl.plan.steptime import DEFAULTS, Constants, predict_step

# layers, hidden, heads, kv heads, head size, ffn, vocabulary, gated, then experts: number, top k, ffn, shared, dense layers
_MODELS: dict[str, tuple[int, ...]] = {
    "llama(2)?7b": (32, 4096, 32, 32, 128, 11008, 32000, 1),
    "llama213b": (40, 5120, 40, 40, 128, 13824, 32000, 1),
    "llama234b": (48, 8192, 64, 8, 128, 22016, 32000, 1),
    "llama270b": (80, 8192, 64, 8, 128, 28672, 32000, 1),
    r"llama3(\.1)?8b": (32, 4096, 32, 8, 128, 14336, 128256, 1),
    r"llama3(\.1)?70b": (80, 8192, 64, 8, 128, 28672, 128256, 1),
    r"llama3(\.1)?405b": (126, 16384, 128, 8, 128, 53248, 128256, 1),
    "nemotron8b": (32, 4096, 32, 32, 128, 16384, 256000, 0),
    "nemotron22b": (40, 6144, 48, 48, 128, 24576, 256000, 0),
    "nemotron415b": (32, 6144, 48, 8, 128, 24576, 256000, 0),
    "nemotron4340b": (96, 18432, 96, 8, 192, 73728, 256000, 0),
    "gpt35b": (24, 4096, 32, 32, 128, 16384, 51200, 0),
    "gpt320b": (44, 6144, 48, 48, 128, 24576, 51200, 0),
    "gpt3175b": (96, 12288, 96, 96, 128, 49152, 51200, 0),
    "gptptdp175b": (96, 12288, 96, 96, 128, 49152, 51200, 0),
    "megatron22b": (48, 6144, 64, 64, 96, 24576, 51200, 0),
    "(turing|mtnlg|gptptdp)530b": (105, 20480, 128, 128, 160, 81920, 51200, 0),
    "megatron1t": (128, 25600, 160, 160, 160, 102400, 51200, 0),
    "gptoss120b": (36, 2880, 64, 8, 64, 0, 201088, 1, 128, 4, 2880, 0, 0, 23_592_960, 128, 18),
    "qwen330ba3b": (48, 2048, 32, 4, 128, 0, 151936, 1, 128, 8, 768, 0, 0),
    "qwen3235ba22b": (94, 4096, 64, 4, 128, 0, 151936, 1, 128, 8, 1536, 0, 0),
    "deepseekv3": (61, 7168, 128, 1, 160, 18432, 129280, 1, 256, 8, 2048, 2048, 3, 187_107_328),
    "kimik2": (61, 7168, 64, 1, 160, 18432, 163840, 1, 384, 8, 2048, 2048, 1, 101_122_048),
    "mixtral8x7b": (32, 4096, 32, 8, 128, 0, 32000, 1, 8, 2, 14336, 0, 0),
    "mixtral8x22b": (56, 6144, 48, 8, 128, 0, 32768, 1, 8, 2, 16384, 0, 0),
}  # fmt: skip
_SIZES = {
    "gemma42b": (2.3e9, 2.3e9), "gemma44b": (4.5e9, 4.5e9),
    "gemma426b": (26e9, 4e9), "gemma431b": (31e9, 31e9), "gemma312b": (12e9, 12e9),
}  # fmt: skip
"""Parameters, and those that one token meets, of models whose matrices are not listed here."""


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
    """Per second and GPU, as published."""
    memory: float | None
    is_converted: bool = False


def find_shape(name: str, parameters: float | None) -> Shape | None:
    plain = re.sub(r"\(.*?\)", "", name).lower()
    plain = re.sub(r"[^a-z0-9.]", "", plain)
    if parameters and plain == "gptptdp":
        plain += "175b" if parameters < 3e11 else "530b"
    for pattern, numbers in _MODELS.items():
        if re.fullmatch(pattern, plain):
            more = dict(zip(("experts", "top_k", "expert_ffn", "shared_ffn", "dense_layers", "attention_weights", "window", "window_layers"), numbers[8:], strict=False))
            layers, hidden, heads, keys, size, ffn, vocabulary, gated = numbers[:8]
            return Shape(layers=layers, hidden=hidden, heads=heads, kv_heads=keys, head_size=size, ffn=ffn, vocabulary=vocabulary, is_gated=bool(gated), **more)
    if plain in _SIZES:
        total, active = _SIZES[plain]
        return guess_shape(total, active=active, vocabulary=131_072)
    return guess_shape(parameters) if parameters else None


def _gpu(text: str) -> Gpu:
    name = text.lower().removeprefix("dgx-").removeprefix("a3 ")
    known = {gpu.key.lower(): gpu for gpu in GPUS} | {n.lower(): gpu for gpu in GPUS for n in gpu.names}
    for key in (name, name.replace("h100", "h100-sxm"), *(["h100-sxm"] if name.startswith("h100") else [])):
        if key in known:
            return known[key]
    if name.startswith("h100"):
        return known["h100-sxm"]
    if name.startswith("a100"):
        return known["a100-40gb" if "40gb" in name else "a100-80gb"]
    raise UsageError(f"hardware {text!r} is not known")


def load(folder: Path) -> tuple[list[Case], list[str]]:
    cases, left_out = [], []
    def number(text: str | None) -> float | None:
        return float(text) if text else None
    for row in csv.DictReader((folder / "published_runs.csv").open(encoding="utf-8")):
        name, source = row["model"], row["source"]
        where = f"{name}, {row['hardware']} ×{row['n_gpus']}, {source.split(' ')[0]}"
        shape = find_shape(name, number(row["params"]))
        gpus = int(row["n_gpus"] or 0)
        tp, pp, cp = (int(row[key] or 1) for key in ("tp", "pp", "cp"))
        if shape is None or not gpus:
            left_out.append(f"{where}: model or number of GPUs is not stated")
            continue
        if re.match("Nemotron_3|DeepSeekV4", name):
            left_out.append(f"{where}: state-space layers and compressed attention are not modelled")
            continue
        if "INCONSISTENT" in row["note"]:
            left_out.append(f"{where}: its layout does not multiply to its GPUs")
            continue
        gpu = _gpu(row["hardware"])
        text = row["precision"].upper()
        seq = int(row["seq_len"] or (8192 if "Llama 3" in name else 2048))
        micro = number(row["micro_batch"])
        dp = gpus // (tp * pp * cp)
        total = number(row["global_batch"])
        kind = row["dp_or_fsdp"]
        sizes = [int(size) for size in re.findall(r"\d+", kind)]
        is_sharded = "sdp" in kind or "zero3" in kind or not row["tp"]
        shard = 8 if kind.startswith("hsdp") else sizes[0] if "x" in kind else 0
        recompute = "full" if "full" in row["recompute"] else "selective" if "sel" in row["recompute"] else "none"
        layout = Layout(
            gpus=gpus, tp=tp, pp=pp, cp=cp, ep=int(row["ep"] or (1 if row["tp"] else min(gpus, max(1, shape.experts)))),
            vp=int(row["vp"] or (4 if pp > 1 else 1)), shard=shard, sharding="fsdp" if is_sharded else "zero1",
            seq_len=seq, micro_batch=micro or 1.0, accumulation=max(1, round((total or dp) / dp / (micro or 1.0))),
            recompute=recompute, method="lora" if row["task"] == "LoRA" else "full",
            precision="fp4" if "FP4" in text else "fp8" if "FP8" in text else "bf16",
            states="bf16" if is_sharded else "master", is_fused=True,
            optimizer="offload" if "offload" in row["note"] else "adamw",
        )  # fmt: skip
        if micro is None and pp == 1:
            layout = fit_micro_batch(shape, gpu, layout, max(1.0, total / dp) if total else None)
        tokens, tflops = number(row["tokens_per_s_per_gpu"]), number(row["tflops_per_gpu"])
        is_converted = tokens is None
        if tokens is None:
            attention = 6.0 * shape.attention_width * shape.attended(seq)
            tokens = (tflops or 0.0) * 1e12 / (6.0 * shape.active_parameters + attention)
        gbits = re.search(r"-(\d+)Gbps", row["hardware"].replace("A3 H100-80GB", "A3-800Gbps"))
        cases.append(Case(
            stack=(source, row["hardware"], text), source=re.split("[@ ]", source)[0], name=name, shape=shape, gpu=gpu,
            layout=layout, network=float(gbits[1]) / 64 if gbits else None, tokens=tokens,
            memory=number(row["mem_gib"]), is_converted=is_converted,
        ))  # fmt: skip
    for row in csv.DictReader((folder / "throughput_rows.csv").open(encoding="utf-8")):
        hidden, layers, seq = (int(row[key]) for key in ("attn_width_HxQ", "layers", "seq_len"))
        heads = max(1, hidden // 128)
        gpus = int(row["gpus"])
        gpu = _gpu(row["accelerator"].split("/")[0].replace("_", "-"))
        shape = Shape(layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_size=128, ffn=4 * hidden, vocabulary=50368, is_gated=False, is_tied=True)
        each = float(row["batch_seqs"]) / gpus
        layout = Layout(
            gpus=gpus, sharding="fsdp", seq_len=seq, recompute="full" if row["recompute"] == "True" else "none",
            attention_kernel="triton", precision="fp8" if "fp8" in row["accelerator"] else "bf16", states="mixed" if "amp" in row["accelerator"] else "bf16",
        )  # fmt: skip
        layout = fit_micro_batch(shape, gpu, layout, each)
        source = row["source"].split(":")[0]
        cases.append(Case(
            stack=(source, *row["accelerator"].split("/")), source="llm-foundry", name=row["model"], shape=shape, gpu=gpu,
            layout=layout, network=None, tokens=float(row["tokens_per_s_per_gpu"]), memory=None,
        ))  # fmt: skip
    return cases, left_out


def fit_micro_batch(shape: Shape, gpu: Gpu, layout: Layout, each: float | None) -> Layout:
    """The largest micro-batch that fits and divides the batch of a GPU, where none is stated."""
    best = replace(layout, micro_batch=1.0, accumulation=max(1, round(each or 1)))
    for micro in range(1, min(int(each or 64), 65536 // layout.seq_len) + 1):
        if each is None or each % micro == 0:
            count = 1 if each is None else max(1, round(each / micro))
            tried = replace(layout, micro_batch=float(micro), accumulation=count)
            if predict_memory(shape, tried).total < 0.9e9 * gpu.memory_gb:
                best = tried
    return best


def residuals(cases: Sequence[Case], constants: Constants) -> np.ndarray:
    """log(measured ÷ predicted) tokens/s."""
    out = []
    for case in cases:
        step = predict_step(case.shape, case.gpu, case.layout, constants, network=case.network)
        out.append(math.log(case.tokens / (step.tokens_per_second / case.layout.gpus)))
    return np.array(out)
