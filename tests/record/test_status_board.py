"""The status board between the launcher and its ranks, and how ranks at different steps agree on
where to stop."""

import random

from paralab.record.status_board import NEVER, StatusBoard, next_stop


def test_ranks_agree_on_a_step():
    running, waiting = False, True
    assert next_stop(NEVER, [(7, running), (8, running)]) == (9, False)
    assert next_stop(9, [(9, waiting), (8, running)]) == (9, False)
    assert next_stop(9, [(9, waiting), (9, running)]) == (
        10,
        False,
    )  # one rank has already passed the stop
    assert next_stop(10, [(10, waiting), (10, waiting)]) == (10, True)
    assert next_stop(10, [(10, waiting), (9, waiting)]) == (
        10,
        False,
    )  # one rank has not moved on since the stop moved up
    assert next_stop(0, [(8, waiting), (8, waiting)]) == (
        9,
        False,
    )  # requested before a resumed run began


def test_a_post_is_read_by_the_other_side(tmp_path):
    board = StatusBoard.create(tmp_path / "board", 2)
    assert [(post.phase, post.step) for post in board.posts] == [("start", NEVER), ("start", NEVER)]
    StatusBoard(tmp_path / "board", 2).post(1, "save", 7)
    assert (board.read(1).phase, board.read(1).step, board.read(0).phase) == ("save", 7, "start")
    assert not board.stops_before(0, 3)


def test_whatever_the_timing_all_stop_before_the_same_step():
    """Try random orders of events. No rank begins a step before all have begun the previous one. The
    launcher reads and posts at different times, and a resumed run does not begin at step 0."""
    for seed in range(300):
        dice = random.Random(seed)
        ranks = dice.choice([1, 2, 3, 4])
        first = dice.choice([0, 8])
        posts, steps, waits = [-1] * ranks, [first] * ranks, [False] * ranks
        stop, agreed, seen = NEVER, False, None
        for _ in range(20_000):
            rank = dice.randrange(ranks + 1)
            if rank == ranks:  # the launcher's turn: it reads or posts
                if seen is None:
                    seen = (
                        list(zip(posts, waits, strict=True))
                        if stop != NEVER or dice.random() < 0.3
                        else None
                    )
                else:
                    (stop, agreed), seen = next_stop(stop, seen), None
                    if agreed:
                        break
            elif waits[rank]:
                waits[rank] = steps[rank] >= stop
            elif posts[rank] < steps[rank]:  # the rank reaches its next step and begins it or waits
                posts[rank] = steps[rank]
                waits[rank] = stop != NEVER and steps[rank] >= stop
            elif min(posts) >= steps[rank]:  # all ranks have begun this step, so it can finish
                steps[rank] += 1
        assert agreed, seed
        assert posts == [stop] * ranks, seed
        assert all(waits), seed
