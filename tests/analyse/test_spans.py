"""How much stretches of time cover together, and in which lanes they can be drawn."""

from paralab.analyse.spans import covered, lanes


def test_covered_counts_time_once():
    assert covered([]) == 0
    assert covered([(0, 4), (3, 6), (8, 9)]) == 7
    assert covered([(0, 10), (2, 3)]) == 10
    assert covered([(8, 9), (0, 1), (1, 2)]) == 3


def test_lanes():
    #          0 1 2 3 4 5 6 7 8 9
    spans = [
        (0, 6),  # ├──────────┤
        (1, 3),  #   ├───┤               within the first
        (5, 8),  #           ├─────┤     crosses the first
        (8, 9),  #                 ├─┤   begins where the third ends
    ]
    assert lanes(spans, nested=True) == [0, 0, 1, 0]
    assert lanes(spans, nested=False) == [0, 1, 1, 0]


def test_two_that_begin_together_nest_the_shorter_in_the_longer():
    assert lanes([(0, 2), (0, 5)], nested=True) == [0, 0]
    assert lanes([(0, 2), (0, 5)], nested=False) == [1, 0]
