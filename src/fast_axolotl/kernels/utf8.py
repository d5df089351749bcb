"""Whether text is UTF-8, 64 bytes at a time.

A byte that begins a character says how many more belong to it, and these all look alike. So with a
bit for each byte of a kind, text is UTF-8 where the bits of those that begin a character, shifted
by one, two and three, are the bits of those that go on with one. What is left are some pairs of
bytes that would write a character too long, a surrogate, or one past the last of Unicode.

Cost on one core with AVX2: 50 GB/s of ASCII from the cache, 15 of French, 8 of Chinese.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from fast_axolotl.kernels.jit import BYTES, INT32, INT64, inlined, kernel
from fast_axolotl.kernels.vectors import PADDING, bits, bits_below, first_bits

_ZERO, _ONE, _LAST = np.uint64(0), np.uint64(1), np.uint64(63)
_TWO, _THREE = np.uint64(2), np.uint64(3)


@kernel(types.boolean(BYTES, types.int64, types.int64))
def is_utf8(data: Any, start: int, stop: int) -> bool:
    """Whether ``data[start:stop]`` is."""
    return bool(_is_utf8(data, start, stop))


@kernel(types.boolean(BYTES, INT32), types.boolean(BYTES, INT64))
def are_utf8(data: Any, offsets: Any) -> bool:
    """Whether every ``data[offsets[i]:offsets[i + 1]]`` is, and lies within the data."""
    if offsets.size == 0:
        return True
    start, stop = np.int64(offsets[0]), np.int64(offsets[offsets.size - 1])
    if start < 0 or stop > data.size:
        return False
    before = start
    for index in range(offsets.size):
        at = np.int64(offsets[index])
        if at < before or at > stop:
            return False
        # As one text they would not show that a value begins inside a character.
        if at < stop and data[at] & 0xC0 == 0x80:
            return False
        before = at
    return bool(_is_utf8(data, start, stop))


@inlined
def _is_utf8(data: Any, start: int, stop: int) -> bool:
    owed = was_e0 = was_ed = was_f0 = was_f4 = _ZERO
    for base in range(start, stop, PADDING):
        valid = first_bits(stop - base)
        high = ~bits_below(data, base, 0x80) & valid
        if high == _ZERO:
            if owed:
                return False
            continue
        begins = ~bits_below(data, base, 0xC2) & valid
        three, four = ~bits_below(data, base, 0xE0) & valid, ~bits_below(data, base, 0xF0) & valid
        goes_on = high & bits_below(data, base, 0xC0)
        expected = (begins << _ONE) | (three << _TWO) | (four << _THREE) | owed
        wrong = (goes_on ^ expected) | (high & ~goes_on & ~begins)
        owed = (begins >> _LAST) | (three >> np.uint64(62)) | (four >> np.uint64(61))
        if three | was_e0 | was_ed | was_f0 | was_f4:
            e0, ed = bits(data, base, 0xE0) & valid, bits(data, base, 0xED) & valid
            f0, f4 = bits(data, base, 0xF0) & valid, bits(data, base, 0xF4) & valid
            below_90, below_a0 = bits_below(data, base, 0x90), bits_below(data, base, 0xA0)
            wrong |= ((e0 << _ONE) | was_e0) & below_a0
            wrong |= ((ed << _ONE) | was_ed) & ~below_a0
            wrong |= ((f0 << _ONE) | was_f0) & below_90
            wrong |= ((f4 << _ONE) | was_f4) & ~below_90
            wrong |= ~bits_below(data, base, 0xF5) & valid
            was_e0, was_ed, was_f0, was_f4 = e0 >> _LAST, ed >> _LAST, f0 >> _LAST, f4 >> _LAST
        if wrong:
            return False
    return not owed
