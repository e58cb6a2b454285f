"""Deadlines without processes: the test sets the status board and the clock."""

import pytest

from paralab.launch.ranks import failure_code
from paralab.launch.run_options import Deadlines
from paralab.launch.watchdog import Watchdog
from paralab.record.status_board import LEFT_EARLY, Post, StatusBoard
from tests.launch.fakes import Clock


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def watchdog(tmp_path, clock):
    board = StatusBoard.create(tmp_path / "board", 2)
    return Watchdog(board, [0, 1], Deadlines(30, 10, 20), tmp_path, tmp_path / "dumps")


def late(watchdog, codes=(None, None)):
    return [(late.rank, late.phase, late.deadline) for late in watchdog.find_late(list(codes))]


def test_each_phase_has_its_own_deadline(watchdog, clock):
    board = watchdog.board
    clock.now += 29
    assert late(watchdog) == []
    clock.now += 2
    assert late(watchdog) == [(0, "start", 30), (1, "start", 30)]
    board.post(0, "step", 0)
    board.post(1, "save", 4)
    clock.now += 11
    assert late(watchdog) == [(0, "step", 10)]
    clock.now += 10
    assert late(watchdog) == [(0, "step", 10), (1, "save", 20)]
    assert [rank.seconds for rank in watchdog.find_late([None, None])] == [21, 21]


def test_a_new_step_starts_the_clock_again(watchdog, clock):
    for step in range(5):
        watchdog.board.post(0, "step", step)
        watchdog.board.post(1, "step", step)
        clock.now += 9
        assert late(watchdog) == []


def test_a_rank_that_waits_or_has_ended_is_not_late(watchdog, clock):
    watchdog.board.post(0, "idle", 3)
    watchdog.board.post(1, "step", 3, waiting=True)  # to stop together
    clock.now += 1000
    assert late(watchdog) == []
    watchdog.board.post(1, "step", 3)
    clock.now += 1000
    assert late(watchdog) == [(1, "step", 10)]
    assert late(watchdog, codes=(None, 1)) == []


@pytest.mark.parametrize(
    ("code", "phase", "expected"),
    [(0, "end", 0), (0, "step", LEFT_EARLY), (3, "step", 3), (None, "step", None)],
)
def test_a_rank_that_leaves_with_code_0_before_its_end_has_failed(code, phase, expected):
    assert failure_code(code, Post(phase, 3, 0.0, False)) == expected
