"""Every unit is written in one way."""

from __future__ import annotations

import pytest

from fast_axolotl.record.units import count_words, format_duration, format_value


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (None, "s", "–"),
        (float("nan"), "share", "–"),
        (0.3417, "share", "34.2 %"),
        (0.0000412, "s", "41 µs"),
        (0.0412, "s", "41.2 ms"),
        (3.2, "s", "3.20 s"),
        (7384.0, "s", "2 h 03 min"),
        (9.44e9, "bytes", "9.44 GB"),
        (4.2e15, "bytes", "4,200 TB"),
        (999.6e6, "bytes/s", "1,000 MB/s"),
        (123.4e3, "bytes", "123 kB"),
        (0.0, "bytes/s", "0 B/s"),
        (2.5e19, "FLOP", "25,000 PFLOP"),
        (51234.5, "tokens/s", "51,234 tokens/s"),
        (1.24, "samples/s", "1.24 samples/s"),
        (True, "yes/no", "yes"),
    ],
)
def test_figures_have_their_units(value: float | None, unit: str, words: str) -> None:
    assert format_value(value, unit) == words


def test_durations_and_counts_are_read_at_a_glance() -> None:
    durations = [format_duration(one) for one in (8.24, 59.99, 750, 3840)]
    assert durations == ["8.2 s", "60.0 s", "12 min 30 s", "1 h 04 min"]
    counts = [count_words(*one) for one in ((1, "step"), (0, "step"), (2000, "fetch"))]
    assert counts == ["1 step", "0 steps", "2,000 fetches"]
