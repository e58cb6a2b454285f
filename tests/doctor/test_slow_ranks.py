"""Slow training on observed ranks: windows on one clock, so that the test shows which rank waits
for what."""

from dataclasses import fields
from pathlib import Path

import pytest
from msgspec import structs

from paralab.doctor.catalog import apply
from paralab.doctor.events import Amp, Backward, Batch, Collective, Reduced, Start, Step, Wrap
from paralab.doctor.observation import Observation, WatchedRank
from paralab.doctor.place import Place, Site

STEP = 0.1  # seconds from one step to the next
STEPS = 12


def site(line):
    return Site((Place("train.py", line, "main"),))


def training(window, rank=0, steps=STEPS, before=(), threads=1, cores=8, host="lab"):
    """`window(rank)` returns the events of one step, with `t` relative to its start. The optimizer
    steps in the last millisecond."""
    events = [*before]
    for number in range(steps):
        begin = number * STEP
        for event in window(rank):
            events.append(structs.replace(event, t=begin + event.t, step=number))
        events.append(
            Step(
                t=begin + STEP - 0.001,
                step=number + 1,
                seconds=0.001,
                number=number + 1,
                site=site(40),
            )
        )
    start = Start(rank=rank, world=2, host=host, threads=threads, cores=cores, t=-1.0)
    parts = {
        "rank": rank,
        "start": start,
        "events": tuple(events),
        "doing": (),
        "lives": None,
        "state": None,
        "progress": 0,
    }
    return WatchedRank(
        **{each.name: parts[each.name] for each in fields(WatchedRank) if each.name in parts}
    )


def observation(window, ranks=2, over=True, **options):
    return Observation(
        Path(), [training(window, rank, **options) for rank in range(ranks)], ranks, over, 0
    )


def find_waste(seen):
    """Return findings of the waste checks only, because other checks use the same events."""
    return [finding for finding in apply("ranks", seen) if finding.id[0] == "W"]


def backward(t=0.04, seconds=0.03, buckets=1, line=30, **more):
    return Backward(t=t, seconds=seconds, seq=[1, buckets], site=site(line), loss=1.0, **more)


def test_a_healthy_training_has_nothing():
    assert (
        find_waste(
            observation(lambda rank: [Batch(t=0.0, wait=0.001), backward(t=0.04 + 0.001 * rank)])
        )
        == []
    )


def test_who_comes_last_is_named():
    (finding,) = find_waste(observation(lambda rank: [backward(t=0.01 + 0.03 * (rank == 1))]))
    assert (finding.id, finding.severity, finding.rank) == ("W03", "warning", 1)
    assert finding.gain == pytest.approx(0.3)
    few = observation(lambda rank: [backward(t=0.01 + 0.03 * (rank == 1))], steps=6)
    assert find_waste(few) == [], "too few steps to say"
    running = observation(lambda rank: [backward(t=0.01 + 0.03 * (rank == 1))], over=False)
    assert find_waste(running) == [], "numbers are told at the end"


def test_the_steps_of_a_toy_are_not_judged(monkeypatch):
    monkeypatch.setattr("tests.doctor.test_slow_ranks.STEP", 0.015)
    assert (
        find_waste(
            observation(
                lambda rank: [
                    Collective(t=0.001, op="all_reduce", seq=[3, 3], seconds=0.01, site=site(33))
                ]
            )
        )
        == []
    )


def test_clocks_of_two_machines_are_not_compared():
    seen = observation(lambda rank: [backward(t=0.01 + 0.03 * (rank == 1))])
    other = training(lambda rank: [backward(t=0.04)], 1, host="other")
    assert find_waste(Observation(seen.folder, [seen.ranks[0], other], 2)) == []


def test_collectives_of_the_users_own_that_take_long():
    def window(rank):
        return [
            Collective(
                t=0.05,
                op="all_reduce",
                seq=[3, 3],
                seconds=0.03 + 0.01 * (rank == 0),
                site=site(33),
            )
        ]

    (finding,) = find_waste(observation(window))
    assert (finding.id, finding.line) == ("W01", 33)
    assert finding.gain == pytest.approx(0.3), (
        "rank 0's further 10 ms are a wait for rank 1, and not sending"
    )


def wrapped(buckets, transfer=0.03, hidden=0.0, compute=0.05):
    """Return DDP's measurements of passes 4 to 10. Rank 0 waits 20 ms longer for rank 1, which is
    not communication."""

    def seen(rank):
        took = {
            "compute": compute,
            "transfer": transfer + 0.02 * (rank == 0),
            "hidden": hidden,
            "buckets": buckets,
        }
        said = [Reduced(model=0, iteration=number, **took) for number in range(4, 11)]
        return training(
            lambda rank: [backward()], rank, before=[Wrap(model=0, site=site(10)), *said]
        )

    return find_waste(Observation(Path(), [seen(0), seen(1)], 2))


def test_what_ddp_measured_of_itself():
    one = wrapped([24 * 2**20])
    assert [(f.id, f.line, round(f.gain, 3)) for f in one] == [("W01", 10, 0.3), ("W02", 10, 0.225)]
    assert "1 bucket (24.0 MiB in total)" in one[0].why
    assert wrapped([6 * 2**20] * 4, transfer=0.03, hidden=0.03) == [], "all of it hidden"
    assert [f.id for f in wrapped([4096], transfer=0.02)] == ["W01"], "too small to be cut"


def test_a_loss_that_is_not_finite():
    def window(rank):
        return [Backward(t=0.04, loss="nan", seq=[1, 1], site=site(30))]

    (finding,) = find_waste(observation(window))
    assert (finding.id, finding.severity, finding.line) == ("W06", "error", 30)
    scaled = find_waste(
        observation(lambda rank: [*window(rank), Amp(t=0.08, op="update", scale=2.0)])
    )
    assert scaled == [], "with a GradScaler it is another entry"
