"""The measured matmul rate: units, blocks, and what is put back."""

from __future__ import annotations

import pytest

from fast_axolotl.errors import UsageError
from fast_axolotl.integrations.model_shape import measure_matmul_tflops

torch = pytest.importorskip("torch")


class Clock:
    """Advances a fixed time at every look."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self.seconds = seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def test_the_rate_is_operations_over_time() -> None:
    # Every timed call takes 50 ms by this clock, so a block is one matmul.
    rate = measure_matmul_tflops("cpu", "float32", 0.5, size=100, clock=Clock(0.05))
    assert rate == pytest.approx(2 * 100**3 / 0.05 / 1e12)


@pytest.mark.parametrize("dtype", ["float32", "tf32", "bf16"])
def test_a_real_rate_is_positive_and_settings_are_put_back(dtype: str) -> None:
    before = torch.get_float32_matmul_precision()
    assert measure_matmul_tflops("cpu", dtype, 0.01, size=128) > 0
    assert torch.get_float32_matmul_precision() == before


def test_a_type_without_a_plain_matmul_is_refused() -> None:
    with pytest.raises(UsageError, match="float8"):
        measure_matmul_tflops("cpu", "float8", 0.01, size=16)
