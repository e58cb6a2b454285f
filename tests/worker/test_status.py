"""A rank's entry on the status board."""

from paralab.record.status_board import StatusBoard
from paralab.worker.status import RankStatus


def test_a_rank_reports_its_phase_and_step(tmp_path):
    board = StatusBoard.create(tmp_path / "board", 2)
    status = RankStatus(StatusBoard(tmp_path / "board", 2), rank=1)
    status.enter("step", 7)
    assert (board.read(1).phase, board.read(1).step) == ("step", 7)
    assert board.read(0).phase == "start"
    status.enter("save", 8)
    assert (board.read(1).phase, board.read(1).step) == ("save", 8)


def test_a_rank_stops_before_the_agreed_step(tmp_path):
    board = StatusBoard.create(tmp_path / "board", 1)
    status = RankStatus(StatusBoard(tmp_path / "board", 1), rank=0)
    assert not status.stops_before(3)
    board.stop(before=5, agreed=True)
    assert [status.stops_before(step) for step in (3, 4, 5)] == [False, False, True]


def test_without_a_board_nothing_stops_a_rank():
    status = RankStatus()
    status.enter("step", 1)
    assert not status.stops_before(10**6)
