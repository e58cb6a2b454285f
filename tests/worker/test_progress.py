"""A run reports its progress on the status board and stops where the launcher says."""

import torch

from paralab.record.status_board import StatusBoard
from paralab.record.writer import EventWriter
from paralab.worker.loop import Extras, train
from tests.worker.one_rank import make_plan, make_workload


def run(folder, board):
    workload = make_workload()
    threads = torch.get_num_threads()
    writer = EventWriter(folder / "rank0.jsonl")
    try:
        return train(workload, make_plan(workload, steps=5), 0, writer, 0.0, Extras(), board)
    finally:
        writer.close()
        torch.set_num_threads(threads)


def test_a_run_posts_its_last_step(tmp_path):
    board = StatusBoard.create(tmp_path / "board", 1)
    assert run(tmp_path, StatusBoard(tmp_path / "board", 1))
    assert (board.read(0).phase, board.read(0).step) == ("step", 4)


def test_a_run_stops_before_the_agreed_step(tmp_path):
    board = StatusBoard.create(tmp_path / "board", 1)
    board.stop(before=3, agreed=True)
    assert not run(tmp_path, board)
    events = (tmp_path / "rank0.jsonl").read_text()
    assert events.count('"event":"step"') == 3
    assert (board.read(0).step, board.read(0).waiting) == (3, True)
