"""Slow training of observed ranks: windows laid out on one clock, so that who waits for what can be read off."""

from pathlib import Path

import pytest

from paralab.doctor.events import Amp, Backward, Batch, Collective, Init, Loader, Pipeline, Reduced, Start, Step, Wrap, ZeroGrad
from paralab.doctor.observation import Observation, RankSeen
from paralab.doctor.place import Place, Site
from paralab.doctor.rules import apply

STEP = 0.1  # seconds from one step to the next
STEPS = 12


def site(line):
    return Site((Place("train.py", line, "main"),))


def training(window, rank=0, steps=STEPS, before=(), threads=1, cores=8, host="lab"):
    """`window(rank)`: the events of one step, with `t` from its begin. The optimiser steps in the last millisecond."""
    events = [*before]
    for number in range(steps):
        begin = number * STEP
        for event in window(rank):
            events.append(type(event)(**{**vars(event), "t": begin + event.t, "step": number}))
        events.append(Step(t=begin + STEP - 0.001, step=number + 1, seconds=0.001, number=number + 1, site=site(40)))
    start = Start(rank=rank, world=2, host=host, threads=threads, cores=cores, t=-1.0)
    return RankSeen(rank, start, tuple(events), (), None, len(events))


def observation(window, ranks=2, over=True, **options):
    return Observation(Path(), [training(window, rank, **options) for rank in range(ranks)], ranks, over, 0)


def found(seen):
    """Of the rules in slow.py only: others look at the same events."""
    mine = {"W01", "W02", "W03", "W06", "T06", "L09", "S04", "G02", "P05"}
    return [finding for finding in apply("ranks", seen) if finding.id in mine]


def backward(t=0.04, seconds=0.03, buckets=1, line=30, **more):
    return Backward(t=t, seconds=seconds, seq=[1, buckets], site=site(line), loss=1.0, **more)


def quiet(t, seconds=0.01, line=30):
    return Backward(t=t, seconds=seconds, seq=[2, 1], site=site(line), loss=1.0)


def test_a_healthy_training_has_nothing():
    assert found(observation(lambda rank: [Batch(t=0.0, wait=0.001), backward(t=0.04 + 0.001 * rank)])) == []


def test_who_comes_last_is_named():
    (finding,) = found(observation(lambda rank: [backward(t=0.01 + 0.03 * (rank == 1))]))
    assert (finding.id, finding.severity, finding.rank) == ("W03", "warning", 1)
    assert finding.gain == pytest.approx(0.3)
    few = observation(lambda rank: [backward(t=0.01 + 0.03 * (rank == 1))], steps=6)
    assert found(few) == [], "too few steps to say"
    running = observation(lambda rank: [backward(t=0.01 + 0.03 * (rank == 1))], over=False)
    assert found(running) == [], "numbers are told at the end"


def test_clocks_of_two_machines_are_not_compared():
    seen = observation(lambda rank: [backward(t=0.01 + 0.03 * (rank == 1))])
    other = training(lambda rank: [backward(t=0.04)], 1, host="other")
    assert found(Observation(seen.folder, [seen.ranks[0], other], 2)) == []


def test_collectives_of_the_users_own_that_take_long():
    def window(rank):
        return [Collective(t=0.05, op="all_reduce", seq=[3, 3], seconds=0.03 + 0.01 * (rank == 0), site=site(33))]

    (finding,) = found(observation(window))
    assert (finding.id, finding.line) == ("W01", 33)
    assert finding.gain == pytest.approx(0.3), "rank 0's further 10 ms are a wait for rank 1, and not sending"


def wrapped(buckets, transfer=0.03, hidden=0.0, compute=0.05):
    """What DDP says of its passes 4 to 10; rank 0 waits 20 ms more for rank 1, which is not sending."""

    def seen(rank):
        took = {"compute": compute, "transfer": transfer + 0.02 * (rank == 0), "hidden": hidden, "buckets": buckets}
        said = [Reduced(model=0, iteration=number, **took) for number in range(4, 11)]
        return training(lambda rank: [backward()], rank, before=[Wrap(model=0, site=site(10)), *said])

    return found(Observation(Path(), [seen(0), seen(1)], 2))


def test_what_ddp_measured_of_itself():
    one = wrapped([24 * 2**20])
    assert [(f.id, f.line, round(f.gain, 3)) for f in one] == [("W01", 10, 0.3), ("W02", 10, 0.225)]
    assert "1 bucket of together 24.0 MiB" in one[0].why
    assert wrapped([6 * 2**20] * 4, transfer=0.03, hidden=0.03) == [], "all of it hidden"
    assert [f.id for f in wrapped([4096], transfer=0.02)] == ["W01"], "too small to be cut"


def test_waiting_for_data_on_all_ranks_and_on_one():
    loader = Loader(t=-0.5, loader=0, site=site(20))
    (both,) = found(observation(lambda rank: [Batch(t=0.0, wait=0.04), backward(t=0.05)], before=[loader]))
    assert (both.id, both.rank, both.line, both.gain) == ("T06", None, 20, pytest.approx(0.4))
    one = found(observation(lambda rank: [Batch(t=0.0, wait=0.04 * (rank == 1)), backward(t=0.05)], before=[loader]))
    assert [(finding.id, finding.rank) for finding in one] == [("T06", 1)]


def test_loader_workers_of_all_ranks_against_the_cores():
    def window(rank):
        return [backward()]

    many = [Loader(t=-0.5, workers=4, site=site(20))]
    (finding,) = found(observation(window, before=many, cores=4))
    assert (finding.id, finding.severity, finding.line) == ("T06", "suspect", 20)
    assert "8 processes beside the ranks, on 4 cores" in finding.why
    assert found(observation(window, before=many, cores=16)) == []


def test_threads_of_all_ranks_against_the_cores():
    spawned = [Init(t=-1.0)]  # the process became a rank there, and its threads were counted then
    (finding,) = found(observation(lambda rank: [backward()], before=spawned, threads=4, cores=4))
    assert (finding.id, finding.severity) == ("L09", "warning")
    (doubted,) = found(observation(lambda rank: [backward()], before=[Init(t=2.0)], threads=4, cores=4))
    assert doubted.severity == "suspect"
    assert found(observation(lambda rank: [backward()], before=spawned, threads=1, cores=1)) == []


def test_a_needless_search_is_suspected():
    searched = Wrap(t=-0.5, model=0, options={"find_unused_parameters": True}, trainable=[True, True, False], site=site(10))

    def with_unused(*bytes):
        return [searched, *(Reduced(model=0, iteration=n, unused_bytes=b) for n, b in enumerate(bytes))]

    (finding,) = found(observation(lambda rank: [backward()], before=with_unused(0, 0, 0)))
    assert (finding.id, finding.severity, finding.line) == ("S04", "suspect", 10)
    assert "each of 2 parameters was used in each of 3 passes" in finding.why
    assert found(observation(lambda rank: [backward()], before=with_unused(0, 64, 0))) == []
    assert found(observation(lambda rank: [backward()], before=[searched])) == [], "nobody has looked"


def test_passes_that_all_reduce():
    (finding,) = found(observation(lambda rank: [backward(t, 0.01, buckets=2) for t in (0.01, 0.03, 0.05, 0.07)]))
    assert (finding.id, finding.line, finding.gain) == ("G02", 30, None)
    assert "8 all-reduces per optimiser step for 2 buckets" in finding.why


@pytest.mark.parametrize(
    "window",
    [
        lambda rank: [quiet(0.01), quiet(0.03), backward(0.05, 0.012)],  # only the last one
        lambda rank: [backward(0.01, 0.01), ZeroGrad(t=0.03), backward(0.05, 0.01)],  # a step that was skipped
        lambda rank: [backward(0.01, 0.01, line=30), backward(0.05, 0.01, line=31)],  # two losses, not one that accumulates
    ],
)
def test_passes_that_are_no_accumulation_without_no_sync(window):
    assert found(observation(window)) == []


def test_a_pipeline_with_one_micro_batch():
    def window(micro_batches):
        return lambda rank: [
            Pipeline(t=0.01, schedule="ScheduleGPipe", microbatches=micro_batches, stages=2, size=16, site=site(9))
        ]

    (finding,) = found(observation(window(1)))
    assert (finding.id, finding.line) == ("P05", 9)
    assert found(observation(window(4))) == []


def test_a_loss_that_is_not_finite():
    def window(rank):
        return [Backward(t=0.04, loss="nan", seq=[1, 1], site=site(30))]

    (finding,) = found(observation(window))
    assert (finding.id, finding.severity, finding.line) == ("W06", "error", 30)
    scaled = found(observation(lambda rank: [*window(rank), Amp(t=0.08, op="update", scale=2.0)]))
    assert scaled == [], "with a GradScaler it is another entry"
