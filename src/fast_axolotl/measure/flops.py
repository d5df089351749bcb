"""FLOPs per token of a model, and the share of the hardware's peak that a run reaches.

The count is of matrix multiplications, a multiplication and an addition being two. A token costs a
weight 2 forward, 2 backward to hand the gradient on, and 2 more where the weight itself is trained;
attention over ``T`` positions costs ``4·H·Q·T`` a layer forward and twice that backward. So:

    model FLOPs = 6·trained + 4·frozen + 12·L·H·Q·T      (PaLM, arXiv:2204.02311, appendix B)

with ``trained + frozen`` the weights one token passes through. That is 6N for a full fine-tune, and
4 for all but the adapters of LoRA. A mixture of experts counts the experts that a token meets. For
packed sequences ``T`` is Σℓ²/Σℓ, because a token attends to its own sequence only. Activation
checkpointing runs the forward pass again: hardware FLOPs have it, model FLOPs do not.

By the same convention a causal mask halves nothing, and softmax, norms, rotary embeddings and the
optimizer are not counted. What cannot be known is ``None`` with a reason.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fast_axolotl.record import ModelShape
from fast_axolotl.record.arithmetic import ratio, times
from fast_axolotl.record.devices import find_peak

_NOTES = ("towers", "layers", "attention_width")
"""Reasons of a shape that do not forbid a figure and belong beside it: what it leaves out."""


class Flops(NamedTuple):
    """What one token costs in training, forward and backward."""

    model: float
    """FLOPs that the mathematics needs: the numerator of MFU."""
    hardware: float
    """FLOPs that are executed, recomputed activations included: the numerator of HFU."""
    convention: str
    """The formula with its numbers, for printing beside the figure."""


def flops_per_token(shape: ModelShape, attended_length: float) -> Flops:
    """What one token costs, where attention reaches over ``attended_length`` positions.

    That length is the sequence length, or Σℓ²/Σℓ over sequences of lengths ℓ.
    """
    trained = shape.num_parameters - shape.num_frozen
    parts = []
    if trained:
        parts.append(f"6·{trained:.4g} trained weights")
    if shape.num_frozen:
        parts.append(f"4·{shape.num_frozen:.4g} frozen weights")
    # Positions that a token attends to, times the width of attention, summed over the layers.
    attended = 0.0
    window, width = shape.attention_window, shape.attention_width
    near_layers = 0 if window is None else shape.window_layers
    kinds = [(shape.layers - near_layers, width, attended_length, "")]
    if window is not None:
        near_width = width if shape.window_width is None else shape.window_width
        reach = min(attended_length, window)
        kinds.append((near_layers, near_width, reach, " within their window"))
    for layers, width, reach, where in kinds:
        attended += layers * width * reach
        if layers:
            text = f"12·{layers} layers·width {width}·attended length {reach:.6g}"
            parts.append(text + where)
    convention = f"model FLOPs per token = {' + '.join(parts)}"
    convention += "; real tokens only; causal masking not discounted"
    if shape.is_checkpointed:
        convention += "; HFU adds one forward pass for checkpointed activations"
    notes = [shape.reasons[name] for name in _NOTES if name in shape.reasons]
    attention = 4.0 * attended
    model = 6.0 * trained + 4.0 * shape.num_frozen + 3.0 * attention
    recomputed = 2.0 * shape.num_parameters + attention if shape.is_checkpointed else 0.0
    return Flops(model, model + recomputed, "; ".join([convention, *notes]))


def utilisation(
    shape: ModelShape | None,
    *,
    tokens_per_second: float | None,
    attended_length: float | None = None,
    num_devices: int | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """How much of the hardware a run of ``tokens_per_second`` real tokens on ``num_devices``
    devices together uses: figures by their names, and a reason for each that is missing.

    ``attended_length`` is Σℓ²/Σℓ as measured. Where it was not, ``shape.sequence_len`` stands in,
    unless sequences are packed: a pack's length says nothing about the sequences inside it.
    ``num_devices`` is the shape's own where it is not given: tokens and devices must be those of
    the same ranks.
    """
    if shape is None:
        return _unknown("the model was not detected, so its weights and layers are not known")
    if blocked := shape.reasons.get("model_flops_per_token"):
        return _unknown(blocked)
    length = attended_length
    if length is None and not shape.is_packed:
        length = shape.sequence_len
    if length is None:
        return _unknown("sequence lengths were not recorded, so the attended length is not known")
    flops = flops_per_token(shape, length)
    devices = shape.num_devices if num_devices is None else num_devices
    peak, source = find_peak(shape.device_name, shape.dtype)
    if shape.peak_tflops is not None:
        peak, source = shape.peak_tflops, "set with --peak-tflops"
    reasons = {} if peak is not None else dict.fromkeys(("mfu", "hfu", "peak_tflops"), source)
    if tokens_per_second is None:
        rates = ("model_flops_per_second", "mfu", "hfu")
        reasons.update(dict.fromkeys(rates, "tokens were not counted"))
    rate, hardware = times(tokens_per_second, flops.model), times(tokens_per_second, flops.hardware)
    whole = times(peak, 1e12 * devices)
    mfu, hfu = ratio(rate, whole), ratio(hardware, whole)
    if mfu is not None and mfu > 1.0:
        reasons["mfu"] = reasons["hfu"] = (
            f"{mfu:.0%} of the peak of {peak:g} TFLOP/s is impossible: the training uses "
            f"another data type than {shape.dtype}, or the peak is wrong; set it with "
            "--peak-tflops"
        )
        mfu = hfu = None
    figures = {
        "model_flops_per_token": flops.model,
        "model_flops_per_second": rate,
        "mfu": mfu,
        "hfu": hfu,
        "peak_tflops": peak,
        "peak_source": "" if peak is None else source,
        "flops_convention": flops.convention,
    }
    return figures, reasons


def _unknown(reason: str) -> tuple[dict[str, Any], dict[str, str]]:
    missing = ("model_flops_per_token", "model_flops_per_second", "mfu", "hfu", "peak_tflops")
    texts = {"peak_source": "", "flops_convention": ""}
    return {**dict.fromkeys(missing), **texts}, dict.fromkeys(missing, reason)
