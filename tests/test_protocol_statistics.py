"""Intervals, how often they find what is not there, and losses that differ by chance or not."""

from __future__ import annotations

import math
import random
import re

import pytest

from benchmarks.false_findings import NOISES, SPREAD, count
from fast_axolotl.protocol import matrix as matrix_module
from fast_axolotl.protocol.build import compare_losses
from fast_axolotl.protocol.matrix import describe_judgement, judge_matrix, make_row
from fast_axolotl.protocol.statistics import (
    adjust_by_holm,
    bound_spread,
    compare_runs,
    detectable_change,
    spend_at,
    t_probability,
    t_quantile,
)
from fast_axolotl.record.catalogue import FIGURES, MATRIX, Figure
from fast_axolotl.record.protocol_result import Cell, Matrix

SPEED, STALL, STEP = (
    FIGURES[name] for name in ("tokens_per_second", "host_stall_fraction", "step_p50_seconds")
)


CHANGED = ("better", "worse", "changed")
TIMES = ("start_to_step_seconds", "duration_seconds")
Values = list[float] | list[float | None]


def judge(figure: Figure, baseline: Values, arm: Values, matters: float = 0.01) -> Cell:
    """One figure of two arms, which decides alone."""
    row = make_row(figure, [(baseline, ""), (arm, "")])
    matrix = Matrix(arms=("baseline", "candidate"), rows=(row,))
    return judge_matrix(matrix, matters=matters).rows[0].cells[1]


def test_quantiles_and_probabilities_are_those_of_the_tables() -> None:
    table = {1: 12.7062, 4: 2.7764, 5.52: 2.4994, 30: 2.0423, 120: 1.9799, 1e3: 1.9623}
    for degrees, quantile in table.items():
        assert t_quantile(degrees) == pytest.approx(quantile, abs=1e-4)
        for level in (1e-6, 0.01, 0.05, 0.5, 0.999):
            found = t_probability(t_quantile(degrees, level), degrees)
            assert found == pytest.approx(level, rel=1e-9)
    assert t_quantile(4, 0.01) == pytest.approx(4.6041, abs=1e-4)
    # One degree is Cauchy's distribution, two have a closed form.
    for t in (0.001, 0.7, 3.0, 1e5):
        assert t_probability(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, rel=1e-9)
        assert t_probability(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-4)
    assert (t_probability(0.0, 3), t_probability(math.inf, 3)) == (1.0, 0.0)
    # The square root of the degrees over the quantile of 5 % of chi-squared.
    for degrees, bound in {1.9: 15.95, 2: 4.415, 4: 2.372, 5.5: 2.089, 9: 1.645, 30: 1.274}.items():
        assert bound_spread(degrees) == pytest.approx(bound, rel=0.02)


def test_the_correction_is_holms() -> None:
    assert adjust_by_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust_by_holm([0.02]) == [0.02]
    assert adjust_by_holm([0.9, 0.8]) == [1.0, 1.0]
    assert adjust_by_holm([]) == []


@pytest.mark.parametrize(("pairs", "degrees", "level"), [(3, 2, 0.05), (10, 5, 0.025)])
def test_a_detectable_change_is_found_in_four_of_five_protocols(
    pairs: int, degrees: int, level: float
) -> None:
    size = detectable_change(SPREAD * math.sqrt(2 / pairs), degrees, level, 0.0)
    found = count(NOISES["independent runs"], math.exp(size), protocols=1000, pairs=pairs)
    # The sum of two quantiles is a little small for three pairs; ten have looks before the last.
    assert 0.7 < found["share"] < 0.95


@pytest.mark.parametrize("name", NOISES)
def test_looks_at_the_pairs_find_no_more_than_chance_allows_and_outliers_hide_little(
    name: str,
) -> None:
    same = count(NOISES[name], 1.0, protocols=1500)
    assert same["share"] <= 0.055
    changed = count(NOISES[name], 1.05, protocols=200)
    assert changed["share"] >= 0.7
    assert changed["pairs"] < same["pairs"]
    large = count(NOISES[name], 2.0, protocols=200)
    assert large["pairs"] < 4


def test_looks_spend_the_five_percent_and_no_more() -> None:
    for most in (1, 2, 3, 4, 5, 10, 30):
        early = [spend_at(pairs, most) for pairs in range(3, most)]
        assert sum(early) + spend_at(most, most) == pytest.approx(1.0)
        assert spend_at(most, most) >= 0.5
    # A protocol that ends early for want of time spends there what is left.
    assert spend_at(5, 10, is_last=True) == pytest.approx(1 - 2 * 0.5 / 7)
    assert compare_runs([1, 2, 3], [2, 4, 7], spend=0.1).p_value == pytest.approx(
        10 * (compare_runs([1, 2, 3], [2, 4, 7]).p_value or 0.0)
    )


def test_outliers_are_left_out_of_the_ratio_that_decides_and_stay_in_the_mean() -> None:
    ratios = [1.10, 1.11, 1.09, 1.12, 1.10, 1.11, 1.09, 1.10, 3.0, 1.10]
    found = compare_runs([100.0] * 10, [100 * ratio for ratio in ratios])
    assert found.value == pytest.approx(1.103, abs=0.001)
    assert found.mean == pytest.approx(1.22, abs=0.01)
    # By hand: of the middle six; Winsorised squares of 0.000197, divided by 6 · 5.
    assert (found.error, found.degrees) == (pytest.approx(0.00256, abs=1e-5), 5.0)
    assert judge(SPEED, [100.0] * 10, [100 * ratio for ratio in ratios]).mean_ratio == found.mean


def test_chance_makes_a_row_better_or_worse_in_one_of_twenty_matrices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matrix_module, "detectable_change", lambda *_: 0.0)
    chosen = random.Random(3)
    figures = [figure for figure in MATRIX if figure.near_zero is None]
    figures += [Figure(f"x{at}", "", "", "lower", "") for at in range(15 - len(figures))]
    decided = labelled = uncorrected = 0
    for _ in range(1000):
        rows = []
        for figure in figures:
            values = ([chosen.lognormvariate(0, 0.05) for _ in range(5)] for _ in range(2))
            rows.append(make_row(figure, [(one, "") for one in values]))
        matrix = Matrix(arms=("baseline", "drop-in"), rows=tuple(rows))
        judged = judge_matrix(matrix, matters=0.01, times={"drop-in": TIMES})
        cells = [row.cells[1] for row in judged.rows]
        decided += any(cell.outcome in CHANGED for cell in cells if cell.is_deciding)
        labelled += any(cell.outcome in CHANGED for cell in cells if not cell.is_deciding)
        uncorrected += any((cell.p_value or 0.0) < 0.05 for cell in cells)
    assert uncorrected / 1000 > 0.35, "what every interval on its own would show"
    assert 0.03 < decided / 1000 < 0.065
    assert labelled / 1000 < 0.06
    labels = [row.label for row in judged.rows if row.name in ("tokens_per_second", *TIMES)]
    assert describe_judgement(judged).startswith(
        f"Primary metrics: {', '.join(labels)}. Any other row"
    )


def test_a_ratio_is_the_geometric_mean_over_pairs_with_its_interval() -> None:
    found = compare_runs([100, 200, 50], [110, 210, 60])
    logs = [math.log(1.1), math.log(1.05), math.log(1.2)]
    assert found.value == pytest.approx(math.exp(sum(logs) / 3))
    # By hand: mean 0.10881, standard deviation 0.06778, 4.303 · 0.06778 / √3 = 0.16839.
    assert found.low == pytest.approx(math.exp(0.10881 - 0.16839), abs=1e-4)
    assert found.high == pytest.approx(math.exp(0.10881 + 0.16839), abs=1e-4)


def test_what_cannot_be_compared_says_why() -> None:
    single = compare_runs([100], [110])
    assert single.value == pytest.approx(1.1)
    assert (single.low, "--pairs" in single.reason) == (None, True)
    assert compare_runs([0.1], [0.2], is_ratio=False).low is None
    # Pairs with a missing side are left out.
    found = compare_runs([100, None, 100, math.nan], [110, 120, 110, 100])
    assert found == compare_runs([100, 100], [110, 110])
    assert compare_runs([None], [1.0]).reason == "no pair has this figure in both variants"
    for is_paired in (True, False):
        zero = compare_runs([0.0, 1.0], [1.0, 1.0], is_paired=is_paired)
        assert "0 here, which has no ratio" in zero.reason
    assert "negative" in compare_runs([-1.0, 1.0], [1.0, 1.0]).reason


def test_runs_that_were_not_paired_are_compared_by_welch() -> None:
    found = compare_runs(
        [1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0, 10.0], is_paired=False, is_ratio=False
    )
    assert found.value == pytest.approx(3.5)
    # 5.52 degrees of freedom; scipy's ttest_ind gives the same interval and probability.
    assert found.low == pytest.approx(-0.385, abs=0.001)
    assert found.high == pytest.approx(7.385, abs=0.001)
    assert found.p_value == pytest.approx(0.06916, abs=1e-4)
    assert compare_runs([100.0], [97.0], is_paired=False).low is None
    assert compare_runs([], [97.0], is_paired=False).value is None


@pytest.mark.parametrize(
    ("ratios", "matters", "outcome"),
    [
        # Wholly within 1 %; significant and below 1 %; significant and above; too wide to tell.
        ((0.999, 1.001, 1.0, 0.998), 0.01, "no change that matters"),
        ((0.992, 0.9925, 0.9915, 0.992), 0.01, "no change that matters"),
        ((0.992, 0.9925, 0.9915, 0.992), 0.005, "worse"),
        ((0.98, 0.981, 0.979, 0.98), 0.01, "worse"),
        ((0.98, 0.981, 0.979, 0.98), 0.05, "no change that matters"),
        ((0.98, 1.03, 0.96, 1.01), 0.01, "no clear change"),
        ((0.98, 1.03, 0.96, 1.01), 0.10, "no change that matters"),
        ((1.3,), 0.01, "not compared"),
    ],
)
def test_only_a_change_that_is_clear_and_matters_is_better_or_worse(
    ratios: tuple[float, ...], matters: float, outcome: str
) -> None:
    cell = judge(SPEED, [100.0] * len(ratios), [100 * ratio for ratio in ratios], matters)
    assert cell.outcome == outcome
    if outcome != "not compared":
        assert cell.detectable is not None
        assert cell.detectable >= matters


def test_a_direction_makes_a_change_better_or_worse() -> None:
    for better, outcome in {"higher": "better", "lower": "worse", "": "changed"}.items():
        figure = Figure("x", "", "", better, "")  # type: ignore[arg-type]
        assert judge(figure, [100, 101, 99], [120, 121, 119]).outcome == outcome


def test_a_stall_near_zero_is_compared_by_its_difference() -> None:
    cell = judge(STALL, [0.30, 0.31, 0.29], [0.0, 0.0, 0.001])
    assert (cell.ratio, cell.outcome) == (None, "better")
    assert cell.difference == pytest.approx(-0.2997, abs=1e-3)
    assert "difference" in cell.reason
    # One that doubles far below a point has not changed; away from zero there is a ratio, too.
    cell = judge(STALL, [0.0001] * 3, [0.0002] * 3, matters=0.0)
    assert cell.outcome == "no change that matters", "the meter does not resolve it"
    cell = judge(STALL, [0.40, 0.41, 0.39], [0.20, 0.21, 0.19])
    assert cell.ratio == pytest.approx(0.5, abs=0.01)
    assert cell.difference == pytest.approx(-0.2)
    # Half a point is below 1 %, though it is a quarter more.
    assert judge(STALL, [0.020] * 3, [0.025] * 3).outcome == "no change that matters"
    assert judge(STALL, [0.020] * 3, [0.025] * 3, matters=0.001).outcome == "worse"


def test_equal_values_and_two_neighbouring_bins_of_a_histogram_are_no_change() -> None:
    cell = judge(SPEED, [100.0] * 5, [100.0] * 5, matters=0.0)
    assert (cell.ratio, cell.low, cell.high) == (1.0, 1.0, 1.0)
    assert cell.outcome == "no change that matters"
    assert judge(STEP, [0.0100] * 5, [0.0102] * 5).outcome == "no clear change"
    assert judge(STEP, [0.0100] * 5, [0.0110] * 5).outcome == "worse"
    # Runs in one bin are not as alike as they look.
    assert judge(STEP, [0.0100] * 2, [0.0108] * 2).outcome == "no clear change"


NAN = math.nan


@pytest.mark.parametrize(
    ("baseline", "arm", "is_equal", "words"),
    [
        ([(2.0, 1.5), (2.0, 1.5)], [(2.0, 1.5)], True, "2 in each of 3 runs"),
        ([(2.0, 1.5), (2.0, 1.5)], [(2.0, 1.500001)], False, "first at logged loss 2"),
        # One run of the baseline cannot tell a difference from chance.
        ([(2.0, 1.5)], [(2.0, 1.500001)], None, "up to 1e-06, .* loss 2. .*pass more --pairs"),
        ([(2.0, 1.5)], [(2.0,)], False, "some runs logged 1, others 2"),
        # What is not a number is equal to nothing, and in one arm it is never chance.
        ([(2.0, NAN)], [(2.0, NAN)], None, "NaN or infinite losses in the baseline and drop-in"),
        ([(2.0, 1.5)], [(2.0, NAN)], False, "NaN or infinite losses in drop-in"),
        ([(1.0, 0.9), (1.0, 0.91)], [(1.0, 0.9), (NAN, NAN)], False, "losses in drop-in only"),
        # A baseline that differs from itself sets the measure; the larger spread of both counts.
        ([(2.0, 1.5), (2.0, 1.51)], [(2.0, 1.505)], None, "chance"),
        (
            [(2.0, 1.5), (2.0, 1.51)],
            [(2.0, 1.7)],
            False,
            "runs of the same variant differ by up to 0.01",
        ),
        ([(2.0,), (2.01,)], [(2.0,), (2.05,)], None, "chance"),
        # An arm that scatters where the baseline does not is different.
        ([(2.0, 1.5), (2.0, 1.5)], [(2.0, 1.5), (2.0, 1.6)], False, "DIFFERENT"),
        ([()], [()], None, "neither variant logged any"),
        ([(1.0,)], [()], None, "one variant logged none"),
    ],
)
def test_losses_are_equal_different_or_as_far_apart_as_chance_makes_them(
    baseline: list[tuple[float, ...]],
    arm: list[tuple[float, ...]],
    is_equal: bool | None,
    words: str,
) -> None:
    found, sentence = compare_losses(baseline, arm, "drop-in")
    assert found is is_equal
    assert re.search(words, sentence)
    assert sentence.startswith("DIFFERENT") == (is_equal is False)
