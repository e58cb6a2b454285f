"""When a configuration leaves a search. Rounds are simulated: a measurement takes longer by chance."""

import random

import pytest

from paralab.analyse.racing import MOST_ROUNDS, find_unsettled, is_slower, rank


@pytest.mark.parametrize(
    ("own", "slower"),
    [
        ([0.69, 1.20], False),  # its best round is the fastest of all
        ([0.90, 0.95], True),
        ([0.74, 0.95], False),  # two rounds: within 5% of 0.71
        ([0.74, 0.95, 0.8], True),  # three rounds: within 2%
        ([0.72, 0.95, 0.8], False),
        ([1.41], False),  # one round is not enough, unless it is twice as slow
        ([1.43], True),
        ([1.43, 0.71], False),
    ],
)
def test_the_best_round_decides(own, slower):
    assert is_slower(own, [0.70, 0.71, 0.72]) is slower


def test_what_is_measured_again():
    times = {"a": [0.70, 0.72], "b": [0.69, 1.20], "c": [0.90, 0.95], "d": [1.50], "e": [1.3]}
    assert rank(times) == ["b", "a", "e", "c", "d"]  # c and d are clearly slower
    assert find_unsettled(times, keep=1) == ["b", "a", "e"]
    assert find_unsettled(times, keep=3) == []  # the best three are known
    assert find_unsettled({"a": [1.0] * MOST_ROUNDS, "b": [1.0] * MOST_ROUNDS}, keep=1) == []


def search(seed, keep=3, layouts=20):
    """Return whether a race keeps the fastest of these layouts, whether its first round alone would
    have, and the number of measurements. One measurement in four takes 1.1 to 1.8 times as long."""
    chance = random.Random(seed)

    def measure(name):
        slow = chance.uniform(1.1, 1.8) if chance.random() < 0.25 else 1.0
        return (1 + 0.05 * name) * chance.gauss(1, 0.01) * slow

    times = {name: [measure(name)] for name in range(layouts)}
    at_once = 0 in rank(times)[:keep]
    while again := find_unsettled(times, keep):
        for name in again:
            times[name].append(measure(name))
    return 0 in rank(times)[:keep], at_once, sum(map(len, times.values()))


def test_noise_rarely_drops_the_best_layout():
    raced, at_once, spent = zip(*(search(seed) for seed in range(400)), strict=True)
    assert sum(at_once) < 0.8 * 400
    assert sum(raced) > 0.93 * 400
    assert sum(spent) < 2 * 20 * 400  # measurements; three rounds of everything are 3 * 20
