"""A record as the reference of a plan: what ran, on what, how fast, and what it left unused.

Rates are of the steady phase with waiting for data taken out. Positions are those of the batches,
padding included, since padding is computed, too; ``real_share`` says how many of them are tokens.
The type of weights and moments is not in a record: bf16 is assumed, and memory that was measured
beyond the prediction is added to every candidate.
"""

from __future__ import annotations

from typing import Any, Literal

from fast_axolotl.errors import DataError
from fast_axolotl.plan.memory import Layout, adapter_parameters
from fast_axolotl.plan.predict import Reference
from fast_axolotl.plan.shape import Shape, shape_of_record
from fast_axolotl.record import RunRecord, RunSummary
from fast_axolotl.record.devices import find_gpu


def read_reference(
    record: RunRecord, summary: RunSummary, shape: Shape | None = None
) -> tuple[Shape, Reference]:
    """The model and the run; ``shape`` is the model's own, where its config was given."""
    models = [rank.models[-1] for rank in record.ranks.values() if rank.models]
    name = models[0].device_name if models else None
    if name is None:
        raise DataError(
            "does not name the model and the GPU, so it cannot calibrate a plan; measure a "
            "training on a GPU, or plan without a record: --model config.json --gpu H100-SXM",
            path=record.path,
        )
    model, config = models[0], summary.settings.get("config")
    settings = {**(config if isinstance(config, dict) else {}), **summary.settings}
    rate, stall = summary.tokens_per_second, min(0.95, summary.stall_fraction or 0.0)
    if not rate or not summary.steps_per_second:
        reason = summary.reasons.get("tokens_per_second", "the run is too short")
        raise DataError(f"has no tokens/s: {reason}", path=record.path)
    shape = shape or shape_of_record(model)

    def number(*names: str) -> int:
        found = (settings.get(name) for name in names)
        return next((value for value in found if isinstance(value, int) and value > 0), 1)

    tp, pp = number("tensor_parallel", "tensor_parallel_size"), number("pipeline_parallel")
    cp = number("context_parallel", "context_parallel_size", "sequence_parallel_degree")
    accumulation = number("gradient_accumulation", "gradient_accumulation_steps")
    stage = 3 if settings.get("fsdp") else settings.get("deepspeed_stage") or 0
    sharding: Any = ("ddp", "zero1", "zero2", "fsdp")[min(3, int(stage))]
    method: Literal["full", "lora", "qlora"] = "full"
    if model.num_adapter:
        method = "qlora" if settings.get("adapter") == "qlora" else "lora"
    positions = max(rate, summary.padded_tokens_per_second or rate)
    replicas = summary.data_parallel_size or max(1, summary.world_size // (tp * pp * cp))
    if replicas * tp * pp * cp != summary.world_size:
        tp = pp = cp = 1
        replicas = summary.world_size
    each = positions / summary.steps_per_second / (accumulation * replicas)
    seq_len = model.sequence_len or round(each / number("micro_batch_size", "batch_size"))
    layout = Layout(
        gpus=tp * pp * cp * replicas,
        tp=tp,
        pp=pp,
        cp=cp,
        sharding=sharding,
        seq_len=max(1, seq_len),
        attended=summary.mean_attended_length,
        micro_batch=each / max(1, seq_len),
        accumulation=accumulation,
        recompute="full" if model.is_checkpointed else "none",
        method=method,
        lora_rank=max(1, round(model.num_adapter / adapter_parameters(shape, 1))),
        precision="fp8" if model.dtype == "float8" else "bf16",
    )
    loader = None if summary.reader_ratio is None else rate * summary.reader_ratio
    exposed = summary.exposed_communication_fraction
    return shape, Reference(
        gpu=find_gpu(name),
        layout=layout,
        tokens_per_second=positions / (1 - stall),
        real_share=rate / positions,
        communication_share=None if exposed is None else min(0.9, exposed / (1 - stall)),
        memory_bytes=summary.gpu_memory_bytes,
        loader_tokens_per_second=loader,
        loader_scales=not settings.get("dispatcher"),
    )
