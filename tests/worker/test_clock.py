"""The offset between two clocks, from questions and answers."""

import pytest

from paralab.worker.measure import clock
from paralab.worker.measure.clock import ALIGNED, QUESTIONS, best_offset, offset_to_rank_0
from tests.worker.one_rank import group_of_one


def test_the_fastest_round_trip_decides():
    #         asked    rank 0's  arrived
    trips = [(10.000, 510.020, 10.004), (11.000, 511.500, 11.900), (12.000, 512.030, 12.010)]
    offset = best_offset(trips)
    assert offset.seconds == pytest.approx(500.018)
    assert offset.uncertainty == pytest.approx(0.002)


def test_ranks_of_one_machine_share_a_clock():
    with group_of_one():
        assert offset_to_rank_0() is ALIGNED


class TwoMachines:
    """A fake torch.distributed for rank 1 on another machine. Rank 0's clock is 500 s ahead, and
    every message takes 1 ms."""

    def __init__(self):
        self.now, self.answers = 100.0, 0

    def get_rank(self):
        return 1

    def get_world_size(self):
        return 2

    def all_gather(self, marks, mine):
        marks[0].fill_(0)
        marks[1].copy_(mine)

    def send(self, tensor, rank):
        self.now += 0.001

    def recv(self, tensor, rank):
        tensor.fill_(self.now + 500.0)
        self.now += 0.001
        self.answers += 1

    def perf_counter(self):
        return self.now


def test_a_rank_on_another_machine_measures_the_offset(monkeypatch):
    other = TwoMachines()
    monkeypatch.setattr(clock, "dist", other)
    monkeypatch.setattr(clock, "time", other)
    offset = offset_to_rank_0()
    assert other.answers == QUESTIONS
    assert offset.seconds == pytest.approx(500.0)
    assert offset.uncertainty == pytest.approx(0.001)
