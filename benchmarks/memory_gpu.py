"""Is the memory that a plan predicts the memory that a training takes? On one real GPU.

``PYTHONPATH=src:. python -m benchmarks.memory_gpu``: small Llamas are made from a config and
trained for three steps with torch's fused AdamW: full fine-tunes in bf16 and in fp32 with autocast,
with LoRA written by hand, with and without checkpointing, with accumulation. The peak is torch's
own (``max_memory_allocated``), beside what ``plan.memory`` predicts. Needs torch and transformers,
about two minutes and 80 GB; cases that do not fit are left out, and the reason is printed.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from fast_axolotl.plan.memory import Layout, predict_memory
from fast_axolotl.plan.shape import Shape, parse_config
from fast_axolotl.record.units import format_bytes, format_share

_RANK = 16
LLAMAS = {
    "tiny": (2, 64, 4, 4, 128, 1000),
    "0.3B": (12, 1024, 16, 8, 4096, 32_000),
    "1.2B": (16, 2048, 32, 8, 8192, 128_256),
    "3B": (26, 3072, 24, 8, 8192, 32_000),
    "8B": (32, 4096, 32, 8, 14336, 128_256),
}
"""Layers, hidden size, heads, heads of keys and values, feed-forward width, vocabulary."""
_BASE = Layout(gpus=1, seq_len=2048)
_CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("0.3B", {"micro_batch": 8.0}),
    ("0.3B", {"micro_batch": 8.0, "recompute": "full"}),
    ("0.3B", {"micro_batch": 8.0, "states": "mixed"}),
    ("1.2B", {"micro_batch": 1.0}),
    ("1.2B", {"micro_batch": 8.0}),
    ("1.2B", {"micro_batch": 8.0, "recompute": "full"}),
    ("1.2B", {"micro_batch": 2.0, "accumulation": 4}),
    ("1.2B", {"micro_batch": 4.0, "states": "mixed", "recompute": "full"}),
    ("1.2B", {"micro_batch": 4.0, "method": "lora"}),
    ("1.2B", {"micro_batch": 4.0, "method": "lora", "recompute": "full"}),
    ("3B", {"micro_batch": 4.0}),
    ("3B", {"micro_batch": 16.0, "recompute": "full"}),
    ("3B", {"micro_batch": 1.0, "seq_len": 8192, "recompute": "full", "accumulation": 2}),
    ("3B", {"micro_batch": 4.0, "method": "lora"}),
    ("8B", {"micro_batch": 1.0, "recompute": "full"}),
    ("8B", {"micro_batch": 2.0, "method": "lora"}),
    ("8B", {"micro_batch": 8.0, "method": "lora", "recompute": "full"}),
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Every case that fits, predicted against measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    import torch

    free = torch.cuda.mem_get_info()[0]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    errors = []
    for size, changes in _CHANGES:
        layout, config = replace(_BASE, **changes), llama_config(size)
        shape: Shape = parse_config(config.to_dict())
        predicted = predict_memory(shape, layout)
        name = f"{size:5}" + ", ".join(f"{key} {value}" for key, value in changes.items())
        if predicted.total > 0.9 * free:
            print(f"{name}: left out, it needs {format_bytes(predicted.total)}")
            continue
        measured = _train(config, layout, options.device)
        error = predicted.total / measured - 1
        errors.append(abs(error))
        parts = ", ".join(
            f"{key} {format_bytes(value)}" for key, value in asdict(predicted).items()
        )
        print(f"{name}\n      measured {format_bytes(measured)}, predicted {error:+.1%}: {parts}")
    print(
        f"{len(errors)} cases: median error {format_share(median(errors))}, "
        f"largest {format_share(max(errors))}"
    )


def llama_config(size: str) -> Any:
    """A Llama of one of the sizes, as transformers makes it."""
    from transformers import LlamaConfig

    layers, hidden, heads, keys, ffn, vocabulary = LLAMAS[size]
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        intermediate_size=ffn,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
    )


def _train(config: Any, layout: Layout, device: str) -> int:
    """Peak bytes of three steps."""
    import torch
    from transformers import LlamaForCausalLM

    kind = torch.float32 if layout.states == "mixed" else torch.bfloat16
    with torch.device(device):
        torch.set_default_dtype(kind)
        try:
            model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
    model.config.use_cache = False
    if layout.method == "lora":
        _add_lora(model)
    if layout.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)
    size = (round(layout.micro_batch), layout.seq_len)
    rows = torch.randint(0, config.vocab_size, size, device=device)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        for _ in range(layout.accumulation):
            with torch.autocast(device, torch.bfloat16, enabled=kind is torch.float32):
                loss = model(input_ids=rows, labels=rows).loss
            (loss / layout.accumulation).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del model, optimizer, weights, loss, rows
    gc.collect()
    torch.cuda.empty_cache()
    return int(peak)


def _add_lora(model: Any) -> None:
    """Adapters beside every linear layer of the blocks; everything else is frozen."""
    import torch

    class Adapted(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base = base
            place = {"device": base.weight.device, "dtype": base.weight.dtype}
            self.down = torch.nn.Linear(base.in_features, _RANK, bias=False, **place)
            self.up = torch.nn.Linear(_RANK, base.out_features, bias=False, **place)

        def forward(self, rows: Any) -> Any:
            return self.base(rows) + self.up(self.down(rows))

    model.requires_grad_(False)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(block, name, Adapted(child))
    model.enable_input_require_grads()


if __name__ == "__main__":
    main()
