"""Intervals, how often they find what is not there, and losses that differ by chance or not."""

from __future__ import annotations

import math
import random
import re

import pytest

from fast_axolotl.protocol.losses import compare_losses
from fast_axolotl.protocol.matrix import compare_values
from fast_axolotl.protocol.statistics import (
    paired_difference,
    paired_ratio,
    t_quantile,
    unpaired_difference,
    unpaired_ratio,
)
from fast_axolotl.record.catalogue import FIGURES, Figure

SPEED, STALL, STEP = (
    FIGURES[name] for name in ("tokens_per_second", "host_stall_fraction", "step_p50_seconds")
)


def test_quantiles_are_those_of_the_tables() -> None:
    table = {0.3: 12.706, 1: 12.706, 4: 2.776, 4.9: 2.776, 30: 2.042, 40: 2.021, 120: 1.980}
    for degrees, quantile in table.items():
        assert t_quantile(degrees) == pytest.approx(quantile, abs=0.001)


def test_a_ratio_is_the_geometric_mean_over_pairs_with_its_interval() -> None:
    found = paired_ratio([100, 200, 50], [110, 210, 60])
    logs = [math.log(1.1), math.log(1.05), math.log(1.2)]
    assert found.value == pytest.approx(math.exp(sum(logs) / 3))
    # By hand: mean 0.10881, standard deviation 0.06778, 4.303 · 0.06778 / √3 = 0.16839.
    assert found.low == pytest.approx(math.exp(0.10881 - 0.16839), abs=1e-4)
    assert found.high == pytest.approx(math.exp(0.10881 + 0.16839), abs=1e-4)


def test_one_pair_has_a_ratio_and_no_interval() -> None:
    found = paired_ratio([100], [110])
    assert found.value == pytest.approx(1.1)
    assert (found.low, "--pairs" in found.reason) == (None, True)
    assert paired_difference([0.1], [0.2]).low is None


def test_pairs_with_a_missing_side_are_left_out() -> None:
    found = paired_ratio([100, None, 100, math.nan], [110, 120, 110, 100])
    assert found == paired_ratio([100, 100], [110, 110])
    assert found.value == pytest.approx(1.1)
    assert paired_ratio([None], [1.0]).reason == "no pair has this figure in both arms"


def test_zeros_and_negative_values_have_no_ratio_and_say_so() -> None:
    assert "0 has no ratio" in paired_ratio([0.0, 1.0], [1.0, 1.0]).reason
    assert "negative" in paired_ratio([-1.0, 1.0], [1.0, 1.0]).reason
    assert "0 has no ratio" in unpaired_ratio([0.0, 1.0], [1.0, 1.0]).reason


def test_runs_that_were_not_paired_are_compared_by_welch() -> None:
    found = unpaired_difference([1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0, 10.0])
    assert found.value == pytest.approx(3.5)
    # 5.52 degrees of freedom, taken for 5; with 5.52, scipy's ttest_ind gives −0.385 to 7.385.
    error = math.sqrt((5 / 3) / 4 + 10 / 5)
    assert found.low == pytest.approx(3.5 - 2.571 * error)
    assert found.low == pytest.approx(-0.385, abs=0.12)
    assert unpaired_ratio([100.0], [97.0]).low is None
    assert unpaired_ratio([], [97.0]).value is None


def test_identical_values_are_no_change() -> None:
    cell = compare_values(SPEED, [100.0] * 5, [100.0] * 5)
    assert (cell.ratio, cell.low, cell.high) == (1.0, 1.0, 1.0)
    assert cell.outcome == "no detectable change"


@pytest.mark.parametrize(("better", "outcome"), [("higher", "better"), ("lower", "worse")])
def test_a_direction_makes_a_change_better_or_worse(better: str, outcome: str) -> None:
    figure = Figure("x", "", "", better, "")  # type: ignore[arg-type]
    assert compare_values(figure, [100, 101, 99], [120, 121, 119]).outcome == outcome
    neutral = Figure("x", "", "", "", "")
    assert compare_values(neutral, [100, 101, 99], [120, 121, 119]).outcome == "changed"


def test_a_stall_near_zero_is_compared_by_its_difference() -> None:
    cell = compare_values(STALL, [0.30, 0.31, 0.29], [0.0, 0.0, 0.001])
    assert (cell.ratio, cell.outcome) == (None, "better")
    assert cell.difference == pytest.approx(-0.2997, abs=1e-3)
    assert "difference" in cell.reason
    # One that doubles far below a point has not changed; away from zero there is a ratio, too.
    assert compare_values(STALL, [0.0001] * 3, [0.0002] * 3).outcome == "no detectable change"
    cell = compare_values(STALL, [0.40, 0.41, 0.39], [0.20, 0.21, 0.19])
    assert cell.ratio == pytest.approx(0.5, abs=0.01)
    assert cell.difference == pytest.approx(-0.2)


def test_two_neighbouring_bins_of_a_histogram_are_no_change() -> None:
    assert compare_values(STEP, [0.0100] * 5, [0.0102] * 5).outcome == "no detectable change"
    assert compare_values(STEP, [0.0100] * 5, [0.0110] * 5).outcome == "worse"


def _share_of_findings(change: float, trials: int = 3000) -> float:
    """Five pairs of runs that drift together and have a noise of 2 % each."""
    rng = random.Random(7)
    found = 0
    for _ in range(trials):
        drift = [1.0 + 0.2 * rng.random() for _ in range(5)]
        runs = [[level * rng.lognormvariate(0, 0.02) for level in drift] for _ in range(2)]
        cell = compare_values(SPEED, runs[0], [value * change for value in runs[1]])
        found += cell.outcome != "no detectable change"
    return found / trials


def test_chance_is_taken_for_a_change_in_one_of_twenty_trials_and_changes_are_found() -> None:
    assert 0.035 < _share_of_findings(1.0) < 0.065
    assert _share_of_findings(0.95) > 0.80
    assert _share_of_findings(0.90) > 0.99


@pytest.mark.parametrize(
    ("change", "scatter", "least", "most"),
    [(1.0, 0.015, 0.03, 0.07), (1.05, 0.015, 0.95, 1.0), (1.05, 0.02, 0.80, 0.90)],
)
def test_five_pairs_find_what_they_are_said_to_find(
    change: float, scatter: float, least: float, most: float
) -> None:
    chosen = random.Random(0)

    def run(mean: float) -> float:
        return mean * math.exp(chosen.gauss(0.0, scatter))

    found = 0
    for _ in range(2000):
        estimate = paired_ratio([run(1.0) for _ in range(5)], [run(change) for _ in range(5)])
        assert estimate.low is not None
        assert estimate.high is not None
        found += not estimate.low <= 1.0 <= estimate.high
    assert least <= found / 2000 <= most, found / 2000


NAN = math.nan


@pytest.mark.parametrize(
    ("baseline", "arm", "is_equal", "words"),
    [
        ([(2.0, 1.5), (2.0, 1.5)], [(2.0, 1.5)], True, "2 each in 3 runs"),
        ([(2.0, 1.5), (2.0, 1.5)], [(2.0, 1.500001)], False, "first at logged loss 2"),
        # One run of the baseline cannot tell a difference from chance.
        ([(2.0, 1.5)], [(2.0, 1.500001)], None, "up to 1e-06, .* loss 2; .*give more --pairs"),
        ([(2.0, 1.5)], [(2.0,)], False, "1 to 2"),
        # What is not a number is equal to nothing, and in one arm it is never chance.
        ([(2.0, NAN)], [(2.0, NAN)], None, "not numbers, first at logged loss 2: mend that"),
        ([(2.0, 1.5)], [(2.0, NAN)], False, "drop-in logged some that are not numbers"),
        ([(1.0, 0.9), (1.0, 0.91)], [(1.0, 0.9), (NAN, NAN)], False, "at logged loss 1, and the"),
        # A baseline that differs from itself sets the measure; the larger spread of both counts.
        ([(2.0, 1.5), (2.0, 1.51)], [(2.0, 1.505)], None, "chance"),
        ([(2.0, 1.5), (2.0, 1.51)], [(2.0, 1.7)], False, "runs of one arm by up to 0.01"),
        ([(2.0,), (2.01,)], [(2.0,), (2.05,)], None, "chance"),
        # An arm that scatters where the baseline does not is different.
        ([(2.0, 1.5), (2.0, 1.5)], [(2.0, 1.5), (2.0, 1.6)], False, "DIFFERENT"),
        ([()], [()], None, "neither arm has logged any"),
        ([(1.0,)], [()], None, "one arm has logged none"),
    ],
)
def test_losses_are_equal_different_or_as_far_apart_as_chance_makes_them(
    baseline: list[tuple[float, ...]],
    arm: list[tuple[float, ...]],
    is_equal: bool | None,
    words: str,
) -> None:
    found = compare_losses(baseline, arm, "drop-in")
    assert found.is_equal is is_equal
    assert re.search(words, found.sentence)
    assert found.sentence.startswith("DIFFERENT") == (is_equal is False)
