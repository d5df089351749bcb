"""The kernel says of any bytes what Python says of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fast_axolotl.kernels import utf8

pytestmark = pytest.mark.kernels

SPARE = b"\x80" * utf8.PADDING
"""Behind the text: the kernel is given at least so much data, and must not read it as text."""

pieces = st.sampled_from(
    ["a", "é", "引", "😀", "x" * 61, "\u07ff", "\u0800", "\uffff", "\U0010ffff"]
)
texts = st.lists(pieces, max_size=40).map(lambda parts: "".join(parts).encode())


def is_utf8(text: bytes, before: int = 0) -> bool:
    data = np.frombuffer(b"\xe5" * before + text + SPARE, np.uint8)
    return bool(utf8.is_utf8(data, before, before + len(text)))


def python_says(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(text=texts, before=st.integers(0, 130))
def test_text_is_utf8(text: bytes, before: int) -> None:
    assert is_utf8(text, before)


@given(text=texts, place=st.integers(0, 500), junk=st.binary(max_size=3), cut=st.integers(0, 3))
def test_bytes_that_were_changed_anywhere_are_what_python_says(
    text: bytes, place: int, junk: bytes, cut: int
) -> None:
    place %= len(text) + 1
    changed = text[:place] + junk + text[place + cut :]
    assert is_utf8(changed) == python_says(changed)


def test_every_beginning_of_a_character_is_what_python_says_wherever_a_block_ends() -> None:
    seconds = (0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xFF)
    for first in range(0x80, 0x100):
        for second in seconds:
            for tail in (b"", b"\x80", b"\x80\x80", b"a", b"\x80\xbf\xbf"):
                text = bytes([first, second]) + tail
                for before in (0, 60, 61, 62, 63):
                    found = is_utf8(b"a" * before + text + b"a" * 5)
                    assert found == python_says(text), text


@given(parts=st.lists(texts | st.binary(max_size=4), max_size=12))
def test_values_are_what_arrow_says(parts: list[bytes]) -> None:
    data = b"".join(parts) + SPARE
    for kind in (np.int32, np.int64):
        offsets = np.cumsum([0, *map(len, parts)], dtype=kind)
        expected = all(map(python_says, parts))
        assert utf8.are_utf8(np.frombuffer(data, np.uint8), offsets) == expected
    array = pa.array(parts, pa.binary()).view(pa.string())
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        assert not expected
    else:
        assert expected


@pytest.mark.parametrize(
    "offsets", [[0, 5, 3], [-1, 2], [0, 200], [0, 200, 3], [3, 2], [0, 70, 60, 80]]
)
def test_offsets_out_of_order_or_place_are_refused(offsets: list[int]) -> None:
    data = np.full(100, ord("a"), np.uint8)
    assert not utf8.are_utf8(data, np.array(offsets, np.int32))
    assert utf8.are_utf8(data, np.array([0, 0, 70, 100], np.int32))
    assert utf8.are_utf8(data, np.array([], np.int32))
