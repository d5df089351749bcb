"""Losses of two arms: equal, different, and different only as much as chance makes them."""

from __future__ import annotations

import math

from fast_axolotl.protocol.losses import compare_losses


def test_equal_to_the_last_digit() -> None:
    check = compare_losses([(2.0, 1.5), (2.0, 1.5)], [(2.0, 1.5)], "drop-in")
    assert check.is_equal is True
    assert "2 each in 3 runs" in check.sentence


def test_what_is_not_a_number_in_both_arms_is_equal_to_nothing() -> None:
    found = compare_losses([(2.0, math.nan)], [(2.0, math.nan)], "drop-in")
    assert found.is_equal is None
    assert "not numbers, first at logged loss 2: mend that first" in found.sentence


def test_what_is_not_a_number_in_one_arm_is_never_chance() -> None:
    scattered = [(1.0, 0.9, 0.8), (1.0, 0.91, 0.8)]
    check = compare_losses(scattered, [(1.0, 0.9, math.nan), (1.0, math.nan, math.nan)], "drop-in")
    assert check.is_equal is False
    assert "drop-in logged some that are not numbers, first at logged loss 2" in check.sentence


def test_one_digit_makes_a_difference() -> None:
    check = compare_losses([(2.0, 1.5), (2.0, 1.5)], [(2.0, 1.500001)], "drop-in")
    assert check.is_equal is False
    assert check.sentence.startswith("DIFFERENT")
    assert "first at logged loss 2" in check.sentence


def test_one_run_of_the_baseline_cannot_tell_a_difference_from_chance() -> None:
    check = compare_losses([(2.0, 1.5)], [(2.0, 1.500001)], "drop-in")
    assert check.is_equal is None
    assert "differs from the baseline by up to 1e-06, first at logged loss 2" in check.sentence
    assert "give more --pairs" in check.sentence


def test_a_loss_that_is_not_a_number_in_one_arm_is_a_difference() -> None:
    check = compare_losses([(2.0, 1.5)], [(2.0, math.nan)], "drop-in")
    assert check.is_equal is False
    assert "not numbers, first at logged loss 2" in check.sentence


def test_another_number_of_losses_is_a_difference() -> None:
    check = compare_losses([(2.0, 1.5)], [(2.0,)], "drop-in")
    assert check.is_equal is False
    assert "1 to 2" in check.sentence


def test_a_baseline_that_differs_from_itself_sets_the_measure() -> None:
    near = compare_losses([(2.0, 1.5), (2.0, 1.51)], [(2.0, 1.505)], "drop-in")
    assert near.is_equal is None
    assert "chance" in near.sentence
    far = compare_losses([(2.0, 1.5), (2.0, 1.51)], [(2.0, 1.7)], "drop-in")
    assert far.is_equal is False
    assert "runs of one arm by up to 0.01" in far.sentence


def test_an_arm_that_scatters_where_the_baseline_does_not_is_different() -> None:
    check = compare_losses([(2.0, 1.5), (2.0, 1.5)], [(2.0, 1.5), (2.0, 1.6)], "drop-in")
    assert check.is_equal is False


def test_arms_that_both_scatter_are_held_against_the_larger_spread() -> None:
    check = compare_losses([(2.0,), (2.01,)], [(2.0,), (2.05,)], "candidate")
    assert check.is_equal is None


def test_nothing_logged_is_nothing_known() -> None:
    assert compare_losses([()], [()], "drop-in").is_equal is None
    assert "one arm has logged none" in compare_losses([(1.0,)], [()], "drop-in").sentence
