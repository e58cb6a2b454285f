"""Is it faster, and how certain is that? The rounds are invented, so the answer is known."""

import random

import pytest

from paralab.analyse.confidence import speed_up


def test_the_worked_example():
    ratio = speed_up([50, 90, 52], [25, 44, 26])
    assert ratio.value == pytest.approx(2.015, abs=0.01)
    assert ratio.low < ratio.value < ratio.high
    assert ratio.verdict == "faster"


def test_a_slow_round_for_both_does_not_choose_the_winner():
    alone = speed_up([10, 10.1, 9.9, 10, 10], [10.05, 10, 9.95, 10, 10.02])
    disturbed = speed_up([10, 30.3, 9.9, 10, 20], [10.05, 30, 9.95, 10, 20.04])
    assert alone.verdict == disturbed.verdict == "no difference"


def test_one_round_tells_nothing():
    ratio = speed_up([10], [5])
    assert (ratio.value, ratio.low, ratio.high) == (pytest.approx(2), None, None)
    assert "too few rounds" in ratio.verdict


def test_a_sure_difference_below_one_percent_is_none():
    assert speed_up([10.05] * 5, [10.0] * 5).verdict == "no difference"


def test_the_same_thing_twice_is_called_different_in_about_one_case_in_twenty():
    generator = random.Random(0)

    def noisy():
        return [10 * generator.lognormvariate(0, 0.05) for _ in range(5)]

    wrong = sum(speed_up(noisy(), noisy()).verdict in ("faster", "slower") for _ in range(2000))
    assert 0.02 < wrong / 2000 < 0.08


def test_rounds_that_differ_too_much_are_not_called_equal():
    assert speed_up([10, 10, 10], [5, 10, 20]).verdict == "too noisy"
    assert speed_up([10, 10, 10], [5, 10, 20]).is_faster is None
    assert speed_up([10, 10.1, 10], [10.1, 10, 10]).is_faster is False
