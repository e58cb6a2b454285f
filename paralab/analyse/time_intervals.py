"""Operations on sorted, disjoint time intervals: compute what overlaps and what is exposed.

compute   ████████████····        union      ████████████████
transfer  ······██████████        overlap    ······██████····     both at once
                                  exposed    ············████     transfer without compute
"""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """[(0, 2), (1, 3), (5, 6)] -> [(0, 3), (5, 6)]; empty intervals are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def without(intervals: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """Remove the second set from the first: [(0, 10)] without [(2, 4)] -> [(0, 2), (4, 10)]."""
    left = union(intervals)
    for cut_start, cut_end in union(removed):
        left = [
            piece
            for start, end in left
            for piece in ((start, min(end, cut_start)), (max(start, cut_end), end))
            if piece[1] > piece[0]
        ]
    return left


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in union(intervals))


def lanes(spans: Sequence[Interval], nested: bool) -> list[int]:
    """Assign each span to the first lane in which it does not cross another span. Unless `nested`
    is true, it must not lie inside another span either.

    a ├──────────┤                    nested: a and b share lane 0 (b is inside a), c crosses a: lane 1
    b   ├───┤                         apart:  b and c have their own lanes, d comes after a: lane 0
    c          ├─────┤
    d                  ├──┤
    """
    lane_of = [0] * len(spans)
    open_ends: list[list[float]] = []  # for each lane, the ends of open spans, innermost last
    # If two spans start together, the longer one comes first because it can contain the other.
    for number in sorted(range(len(spans)), key=lambda n: (spans[n][0], -spans[n][1])):
        start, end = spans[number]
        for ends in open_ends:
            while ends and ends[-1] <= start:
                ends.pop()
        free = [not ends or (nested and end <= ends[-1]) for ends in open_ends]
        lane = free.index(True) if True in free else len(open_ends)
        if lane == len(open_ends):
            open_ends.append([])
        open_ends[lane].append(end)
        lane_of[number] = lane
    return lane_of
