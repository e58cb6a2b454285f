"""The arithmetic of time intervals, and the lanes in which they are drawn."""

from paralab.analyse.time_intervals import lanes, length, union, without


def test_length_counts_time_once():
    assert length([]) == 0
    assert length([(0, 4), (3, 6), (8, 9)]) == 7
    assert length([(0, 10), (2, 3)]) == 10
    assert length([(8, 9), (0, 1), (1, 2)]) == 3


def test_union_and_without():
    assert union([(5, 6), (1, 3), (0, 2), (4, 4)]) == [(0, 3), (5, 6)]
    assert without([(0, 10)], [(2, 4), (9, 12)]) == [(0, 2), (4, 9)]
    assert without([(0, 3), (5, 6)], [(0, 6)]) == []
    assert without([(0, 3)], []) == [(0, 3)]


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
