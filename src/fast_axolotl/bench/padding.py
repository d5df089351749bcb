"""``fast-axolotl bench pad``: sequences of 10 to 256 tokens brought to 256."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fast_axolotl.bench import plain
from fast_axolotl.bench.contest import Entry, Session
from fast_axolotl.bench.operation_result import OperationCase
from fast_axolotl.bench.tokens import TokenOperation, token_case, token_entries

__all__ = ["KERNELS", "memory_entries", "pad_cases", "pad_operation"]

KERNELS = ("fill.",)


def pad_operation() -> TokenOperation:
    """The earlier package's benchmark."""
    from fast_axolotl.packing import pad_sequences

    return TokenOperation(
        name="pad",
        function=pad_sequences,
        plain=plain.pad,
        settings={"target_length": 256, "pad_value": 0},
        low=10,
        high=256,
        most_lists=1_000_000,
        bytes_per_sequence=4 * 133 + 4 * 256,
        columns=lambda found: {"rows": found},
        text="sequences of 10–256 tokens to 256",
    )


def memory_entries(size: int) -> tuple[Entry, ...]:
    """For ``peaks``, in a fresh process."""
    return token_entries(pad_operation(), size)


def pad_cases(sizes: Sequence[int], session: Session) -> Iterator[OperationCase]:
    """Every size."""
    for size in sizes:
        yield token_case(pad_operation(), size, __name__, session)
