"""64 bytes at a time: comparisons that give a word with a bit for each byte, and copies.

Vectors know no checks of bounds. What is read lies within the data: ``bits`` and ``bits_below``
take the last bytes together with others before them, so data has at least ``PADDING`` bytes. What
is written needs ``PADDING`` bytes to spare.

Kernels of other files are made of these, and the cache of a kernel does not see a change here. So a
function of this file that is to do something else gets another name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fast_axolotl.kernels.jit import inlined

PADDING = 64
"""Bytes that are read and written together; an output is so much longer than what it receives."""

_ONE, _ALL = np.uint64(1), np.uint64(2**64 - 1)


@inlined
def first_bits(count: int) -> Any:
    """A word in which so many of the lowest bits are set."""
    return _ALL if count >= 64 else (_ONE << np.uint64(count)) - _ONE


@inlined
def bits(data: Any, at: int, byte: int) -> Any:
    """Bit ``i`` is set where ``data[at + i]`` is the byte; none is behind the end of the data."""
    # A branch here would take as long as the comparison, so the last bytes are read with others.
    whole = min(at, data.size - PADDING)
    return compare(data, whole, byte) >> np.uint64(at - whole)


@inlined
def bits_below(data: Any, at: int, byte: int) -> Any:
    """Bit ``i`` is set where ``data[at + i]`` is less than the byte."""
    whole = min(at, data.size - PADDING)
    return compare_below(data, whole, byte) >> np.uint64(at - whole)


def _comparison(operator: str) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def compare(typing: Any, data: Any, at: Any, byte: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            vector, number = ir.VectorType(ir.IntType(8), PADDING), ir.IntType(32)
            loaded = builder.load(_vector_at(context, builder, signature, arguments, 0), align=1)
            wanted = builder.trunc(arguments[2], ir.IntType(8))
            single = builder.insert_element(ir.Constant(vector, ir.Undefined), wanted, number(0))
            zeros = ir.VectorType(number, PADDING)([0] * PADDING)
            all_wanted = builder.shuffle_vector(single, single, zeros)
            found = builder.icmp_unsigned(operator, loaded, all_wanted)
            return builder.bitcast(found, ir.IntType(64))

        return types.uint64(data, at, types.int64), generate

    return compare


compare = _comparison("==")
"""``bits`` of 64 bytes that are there."""
compare_below = _comparison("<")


@intrinsic  # type: ignore[untyped-decorator]
def copy_block(typing: Any, out: Any, to: Any, data: Any, at: Any) -> Any:
    """Copies 64 bytes."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        loaded = builder.load(_vector_at(context, builder, signature, arguments, 2), align=1)
        target = _vector_at(context, builder, signature, arguments, 0)
        builder.store(loaded, target, align=1)
        return context.get_dummy_value()

    return types.void(out, to, data, at), generate


def _counter(name: str, *settings: int) -> Any:
    """A function of 64 bits that LLVM knows by name."""

    @intrinsic  # type: ignore[untyped-decorator]
    def count(typing: Any, bits: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            flags = [ir.IntType(1)(setting) for setting in settings]
            return getattr(builder, name)(arguments[0], *flags)

        return types.int64(types.uint64), generate

    return count


count_bits = _counter("ctpop")
first_bit = _counter("cttz", 1)
leading_zeros = _counter("ctlz", 1)


def _vector_at(
    context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any, index: int
) -> Any:
    """Where 64 bytes of an array begin; its place is the argument behind it."""
    array = context.make_array(signature.args[index])(context, builder, arguments[index])
    vector = ir.VectorType(ir.IntType(8), PADDING)
    place = builder.gep(array.data, [arguments[index + 1]])
    return builder.bitcast(place, vector.as_pointer())
