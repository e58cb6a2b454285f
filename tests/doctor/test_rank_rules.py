"""Checks of observed ranks in cases that two CPU ranks cannot show: more ranks, GPUs, and the
arithmetic in messages."""

import subprocess
from dataclasses import fields, replace
from pathlib import Path

import pytest
from msgspec import structs

from paralab.doctor import watch
from paralab.doctor.catalog import apply
from paralab.doctor.events import (
    Amp,
    Backward,
    Batch,
    Collective,
    Destroy,
    End,
    Epoch,
    Forward,
    Group,
    Init,
    Load,
    Loader,
    Loss,
    Moved,
    Raised,
    Start,
    Step,
    Wrap,
    ZeroGrad,
)
from paralab.doctor.failures.dataparallel.replicas import pieces
from paralab.doctor.failures.hangs.different_calls import wait_for_each_other
from paralab.doctor.failures.pipeline.schedules import split_sizes
from paralab.doctor.observation import Observation, Reader, WatchedRank
from paralab.doctor.place import Place, Site
from paralab.doctor.rank_checks import differing, equal, odd_one_out
from paralab.doctor.rank_exceptions import with_exceptions_explained
from paralab.doctor.windows import windows
from paralab.observe import sites


def site(line):
    return Site((Place("train.py", line, "main"),))


def observe(*ranks, gpus=0):
    """Each rank is a list of events in the order of `t`."""
    made = []
    for number, events in enumerate(ranks):
        timed = tuple(structs.replace(e, t=float(i), seconds=0.1) for i, e in enumerate(events, 1))
        start = Start(rank=number, world=len(ranks), host="lab", gpus=gpus, cores=64)
        parts = {
            "rank": number,
            "start": start,
            "events": timed,
            "doing": (),
            "lives": None,
            "state": None,
            "progress": 0,
        }
        made.append(
            WatchedRank(
                **{
                    each.name: parts[each.name]
                    for each in fields(WatchedRank)
                    if each.name in parts
                }
            )
        )
    return Observation(Path(), made, len(ranks), True, 0)


def check_ranks(observation):
    return [(f.id, f.severity, f.line, f.rank) for f in apply("ranks", observation)]


def wrap(world=2, **more):
    model = {
        "names": ["w", "b"],
        "shapes": [[4, 8], [4]],
        "trainable": [True, True],
        "ranks": list(range(world)),
        "model": 0,
    }
    return Wrap(site=site(10), **{**model, **more})


def training(gradient, before=(), world=2, steps=3, parameters=None, sync=True):
    """Return steps in which the gradient of `w` has this norm."""
    events = [wrap(world), *before]
    for number in range(1, steps + 1):
        digest = [[gradient, 0.0], [1.0, 0.0]]
        events += [
            Forward(site=site(20), model=0, sync=sync, size=32, step=number - 1),
            Backward(site=site(21), loss=1.0, step=number - 1, seq=[number, number]),
            Step(
                site=site(22),
                number=number,
                step=number,
                names=["w", "b"],
                gradients=digest,
                parameters=parameters or digest,
            ),
        ]
    return events


# --- the arithmetic
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "number", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (7, 4, [2, 2, 2, 1]), (3, 4, [1, 1, 1, 0])],
)
def test_a_schedule_gives_the_first_parts_one_row_more(batch, number, sizes):
    assert split_sizes(batch, number) == sizes


@pytest.mark.parametrize(
    ("batch", "devices", "count"), [(8, 4, 4), (9, 4, 3), (36, 7, 6), (3, 4, 3), (0, 4, 0)]
)
def test_data_parallel_fills_from_the_first_device(batch, devices, count):
    assert pieces(batch, devices) == count


def test_digests_are_compared_up_to_rounding():
    assert equal([2.0, 1.0], [2.000001, 1.0001])
    assert not equal([2.0, 1.0], [2.001, 1.0])
    assert not equal([2.0, 1.0], [2.0, 1.1])  # the same norm, but another direction
    assert equal([-1.0, -1.0], [-1.0, 0.0]), "both are NaN"
    assert equal(None, None)
    assert not equal(None, [0.0, 0.0])
    assert differing([[[1.0, 0.0], [2.0, 0.0]], [[1.0, 0.0], [3.0, 0.0]]]) == [1]


def test_a_majority_knows_the_odd_one():
    assert odd_one_out({0: "a", 1: "a", 2: "b"}) == 2
    assert odd_one_out({0: "a", 1: "b"}) is None  # either may be wrong
    assert odd_one_out({0: "a", 1: "a", 2: "b", 3: "b"}) is None
    assert odd_one_out({0: "a", 1: "b", 2: "c"}) is None


# --- what one step applies
# -----------------------------------------------------------------------------------------------------


def sizes(*events):
    (rank,) = observe(list(events)).ranks
    return [len(window.micro_steps) for window in windows(rank)]


def test_a_window_ends_with_a_step_and_forgets_what_was_cleared():
    backward, step, other = (
        Backward(site=site(21)),
        Step(site=site(22)),
        Step(site=site(23), optimizer=1),
    )
    assert sizes(backward, backward, step, backward, step) == [2, 1]
    assert sizes(backward, ZeroGrad(optimizer=0), backward, step) == [1], (
        "a batch that was thrown away"
    )
    assert sizes(backward, ZeroGrad(optimizer=1), backward, step) == [2], (
        "another optimizer's gradients"
    )
    assert sizes(backward, ZeroGrad(), backward, step) == [1], "all gradients of a module"
    assert sizes(backward, step, other, backward) == [1, 0, 1]
    skipped = Amp(op="step", skipped=True)
    assert sizes(backward, backward, skipped, backward, backward, step) == [2, 2]


# --- accumulation


@pytest.mark.parametrize(("loaders", "expected"), [((0, 0), True), ((0, 1), False)])
def test_two_lines_of_one_loop_accumulate(loaders, expected):
    """`if last: … else: with no_sync(): …` has two backward passes. So have the losses of labeled
    and unlabeled data, but from two loaders."""
    events = [
        event
        for loader, line in zip(loaders, (21, 23), strict=True)
        for event in (Batch(loader=loader), Backward(site=site(line)))
    ]
    (rank,) = observe([*events, Step(site=site(25))]).ranks
    assert [window.is_accumulated for window in windows(rank)] == [expected]


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        ("synchronizes", "in no_sync", "G03"),
        ("synchronizes", "outside", "G02"),
        ("in no_sync", "in no_sync", None),
    ],
)
def test_a_step_that_synchronizes_twice_says_why(forward, backward, expected):
    """G03's check once found nothing, and no test noticed."""
    events = [wrap()]
    for number in range(1, 4):
        for last in (False, True):
            quiet = forward == "in no_sync" and not last
            seq = [number, number - 1] if quiet else [number, number]
            unsynced = backward == "in no_sync" and not last
            events += [
                Forward(site=site(20), model=0, sync=not quiet, size=8),
                Backward(site=site(21), loss=1.0, seq=seq, unsynced=unsynced),
            ]
        events.append(Step(site=site(22), number=number, names=["w", "b"]))
    ids = {
        (id, line)
        for id, _, line, _ in check_ranks(observe(events, events))
        if id in ("G02", "G03")
    }
    assert ids == ({(expected, 21)} if expected else set())


# --- more ranks than two
# -------------------------------------------------------------------------------------------------------


def test_of_three_ranks_the_one_with_another_model_is_named():
    other = wrap(3, names=["w", "b"], shapes=[[5, 8], [5]])
    assert check_ranks(observe([wrap(3)], [other], [wrap(3)])) == [("L07", "error", 10, 1)]
    assert check_ranks(observe([wrap(3)], [wrap(3)], [wrap(3)])) == []


def test_of_three_ranks_the_one_that_does_not_step_is_named():
    ranks = [training(1.0, world=3) for _ in range(3)]
    ranks[1] = [event for event in ranks[1] if not isinstance(event, Step)]
    observation = observe(*ranks)
    object.__setattr__(observation, "ranks", [_ended(rank) for rank in observation.ranks])
    assert check_ranks(observation) == [("S08", "error", 22, 1)]


def test_ranks_that_were_not_read_at_the_same_moment_have_not_parted():
    """Rank 0 was read during its second step. By the time rank 1 was read, it had finished its
    third."""
    whole = training(1.0)
    for read in range(1, len(whole)):
        assert check_ranks(observe(whole[:read], whole)) == [], read


def _ended(rank):
    object.__setattr__(rank, "events", (*rank.events, End(t=99.0)))
    return rank


# --- causes of one symptom
# -----------------------------------------------------------------------------------------------------


def test_equal_gradients_are_in_order():
    assert check_ranks(observe(training(1.0), training(1.0))) == []


def test_gradients_that_nothing_explains_are_said_to_be_so():
    (finding,) = apply("ranks", observe(training(1.0), training(2.0)))
    assert (finding.id, finding.severity, finding.line) == ("S08", "error", 22)
    assert "Nothing we observed explains this" in finding.why


@pytest.mark.processes
def test_a_job_that_runs_is_accused_of_what_was_found_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "LIVE_SECONDS", -60.0)
    wrong, order = (
        replace(observe(training(1.0), training(norm)), over=False) for norm in (2.0, 1.0)
    )
    said = []
    with subprocess.Popen(["true"]) as job:
        job_watch = watch.Watch(job, Reader(tmp_path), 60.0, said.append, False)
    for observation, count in [(wrong, 0), (order, 0), (wrong, 0), (wrong, 1), (wrong, 1)]:
        job_watch.look(observation)
        assert len(said) == count


def test_a_model_that_was_moved_after_wrapping_explains_them():
    moved = Moved(site=site(15), model=0, before="cuda:0 float32", after="cpu float32")
    assert check_ranks(observe(training(1.0, [moved]), training(2.0, [moved]))) == [
        ("S12", "error", 15, None)
    ]
    assert check_ranks(observe(training(1.0, [moved]), training(1.0, [moved]))) == [], (
        "moved, and no harm done"
    )


def test_parameters_that_differ_although_gradients_do_not():
    ranks = [training(1.0, parameters=[[size, 0.0], [1.0, 0.0]]) for size in (3.0, 4.0)]
    (finding,) = apply("ranks", observe(*ranks))
    assert (finding.id, finding.severity) == ("S08", "error")
    assert "w" in finding.why
    assert "b" not in finding.evidence[0].split(" ")


def test_sizes_that_differ_explain_what_a_rank_raised_later():
    """Rank 0 continued with meaningless numbers, which made it fail later."""
    gathered = {"op": "all_gather", "group": "0", "seq": [1, 1], "dtype": "int64", "site": site(12)}
    zero = [
        Collective(shape=[33], **gathered),
        Raised(type="RuntimeError", message="no room", stack=[["train.py", 41, "f"]]),
    ]
    one = [Collective(shape=[32], error="collective mismatch", **gathered)]
    assert check_ranks(observe(zero, one)) == [("H06", "error", 12, None)]


def alone(gradient, *exchange, later=0, replicas=2):
    """A rank that trains on its share of the data. `later` collectives run that nobody saw."""
    loader = Loader(site=site(5), replicas=replicas, sampler="DistributedSampler")
    events = [loader, Collective(op="broadcast", shape=[4, 8], site=site(6))]
    for number in (1, 2):
        digest = [[gradient * number, 0.0]]
        step = {"names": ["w"], "gradients": digest, "parameters": digest}
        last = later * (number - 1)
        events += [Batch(batch=number), Backward(site=site(21), seq=[last + 1, last])]
        events += [Step(site=site(22), number=number, step=number, **step), *exchange]
    return [*events, End()]


def test_ranks_that_divide_the_data_but_never_average_train_models_of_their_own():
    """A manual loop without DDP and without all_reduce was not reported."""
    shown = Collective(op="all_reduce", shape=[], site=site(30))
    found = [("S08", "error", 22, None)]
    assert check_ranks(observe(alone(1.0, shown), alone(2.0, shown))) == found
    assert check_ranks(observe(alone(1.0), alone(2.0))) == found
    assert check_ranks(observe(alone(1.0), alone(1.0))) == []
    trial = replace(observe(alone(1.0), alone(2.0)), ended_by_us=True)
    assert check_ranks(trial) == [("S08", "suspect", 22, None)], "they may average later"


@pytest.mark.parametrize(
    "more",
    [
        {"replicas": None},  # a search: every rank has all the data
        {"later": 1},  # all_reduce of torch.distributed._functional_collectives
        *({"exchange": Collective(op=op, shape=[4, 8])} for op in ("all_reduce", "isend")),
        {"exchange": Collective(op="all_gather_object")},  # perhaps weights
        {"exchange": Group(group="1")},
    ],
)
def test_ranks_that_may_exchange_weights_or_train_models_of_their_own_on_purpose(more):
    exchange = [more.pop("exchange")] if "exchange" in more else []
    assert check_ranks(observe(alone(1.0, *exchange, **more), alone(2.0, *exchange, **more))) == []


@pytest.mark.parametrize(
    ("line", "expected"), [(2, ("H03", "error", 2, 0)), (3, ("H02", "error", 3, 1))]
)
def test_a_collective_that_nobody_saw(tmp_path, line, expected):
    """DTensor gathers parameters without torch.distributed's functions. Rank 0 failed in such a
    call, and the report was empty."""
    script = tmp_path / "train.py"
    script.write_text("if rank == 0:\n    save(model)\nshow(model)\n")
    message = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    raised = Raised(type="RuntimeError", message=message, stack=[[str(script), line, "<module>"]])
    start = [Init(group="0", ranks=[0, 1]), Collective(op="barrier", seq=[1, 1], site=site(1))]
    job = observe([*start, raised, End()], [*start, Destroy(), End()])
    assert check_ranks(job) == [expected]
    failed = [structs.replace(start[1], error=message), raised, End()]
    assert ("H03", "error", 2, 0) not in check_ranks(observe(failed, [*start, Destroy(), End()]))


@pytest.mark.parametrize(
    ("mean", "wraps", "expected"),
    [
        (1.0, True, [("S14", "warning", 2, None)]),
        (2.0, True, []),  # loss = mse(model(x), y) / world
        (1.0, False, [("S14", "warning", 2, None)]),
        (2.0, False, []),
        (
            None,
            False,
            [],
        ),  # gradients are summed by hand, and nobody knows how the loss was divided
    ],
)
def test_the_sum_of_losses_that_are_already_divided_is_their_mean(tmp_path, mean, wraps, expected):
    script = tmp_path / "train.py"
    script.write_text("def f():\n    all_reduce(shown)\n    print(shown)\n")
    at = Site((Place(str(script), 2, "f"),))
    events = [wrap()] if wraps else []
    for _ in range(3):
        events += [Batch(), *([Loss(value=mean)] if mean else []), Backward(loss=1.0)]
        events += [Collective(op="all_reduce", shape=[], reduction="SUM", value=1.0, site=at)]
    assert check_ranks(observe(events, events)) == expected


# --- calls on one line


def test_a_watched_call_has_a_column():
    one, other = (sites.places(sites.where())[0], sites.places(sites.where())[0])
    assert one[:3] == other[:3]
    assert None not in (one[3], other[3])
    assert one[3] < other[3]


@pytest.mark.parametrize(
    ("line", "orders", "expected"),
    [
        ("x = (f(a), f(b)) if r else (f(b), f(a))", [(5, 11), (28, 34)], ["H05"]),
        ("x = (f(a), f(b)) if r else (f(b), f(a))", [(5, 11), (34, 28)], []),  # the same order
        ("for v in values: f(a) if v else f(b)", [(17, 32), (32, 17)], []),  # as the data decides
    ],
)
def test_a_swap_within_one_statement(tmp_path, line, orders, expected):
    script = tmp_path / "train.py"
    script.write_text(line + "\n")
    jobs = [
        [
            Collective(
                op="all_reduce",
                shape=[],
                seq=[number, number],
                site=Site((Place(str(script), 1, "main", column),)),
            )
            for number, column in enumerate(order, 1)
        ]
        for order in orders
    ]
    assert [one[0] for one in check_ranks(observe(*jobs))] == expected


# --- GPUs
# ----------------------------------------------------------------------------------------------------------------------


def test_every_rank_loads_onto_one_gpu():
    load = Load(site=site(30), path="/x/last.pt")
    assert check_ranks(observe([load], [load], gpus=2)) == [("C04", "warning", 30, None)]
    assert check_ranks(observe([load], [load], gpus=0)) == []
    mapped = Load(site=site(30), path="/x/last.pt", map_location="cpu")
    assert check_ranks(observe([mapped], [mapped], gpus=2)) == []


@pytest.mark.parametrize(("size", "expected"), [(8, []), (9, [("D03", "warning", 20, None)])])
def test_a_batch_that_does_not_fill_all_gpus(size, expected):
    wrapped = Wrap(
        site=site(10), kind="data_parallel", model=0, options={"device_ids": ["0", "1", "2", "3"]}
    )
    assert (
        check_ranks(observe([wrapped, Forward(site=site(20), model=0, size=size)], gpus=4))
        == expected
    )


def test_a_batch_norm_that_got_one_sample():
    message = (
        "Expected more than 1 value per channel when training, got input size torch.Size([1, 4])"
    )
    trace = 'Traceback (most recent call last):\n  File "t.py", line 7, in f\n    model(x)\n'
    text = f"{trace}ValueError: {message}\n"
    stack = [["t.py", 7, "f"]]
    raised = Raised(type="ValueError", message=message, stack=stack, text=text)
    job = observe([wrap()], [wrap(), raised])
    (finding,) = with_exceptions_explained(apply("ranks", job), job)
    assert (finding.id, finding.severity, finding.line, finding.rank) == ("S09", "error", 7, 1)


# --- passes over loaders
# -------------------------------------------------------------------------------------------------------


def evaluation(samples, total, replicas=2):
    loader = Loader(
        site=site(40),
        samples=total,
        replicas=replicas,
        sampler="DistributedSampler",
        made=[["train.py", 5, "main"]],
    )
    return [
        wrap(),
        loader,
        Forward(site=site(41), model=0, training=False, grad=False, size=4),
        Epoch(samples=samples, batches=2),
    ]


def divided(replica):
    loader = Loader(
        site=site(40),
        samples=64,
        batch_size=2,
        replicas=2,
        replica=replica,
        sampler="DistributedSampler",
        made=[["train.py", 5, "main"]],
    )
    batches = [Batch(batch=number, size=2, rows=[number, -number]) for number in (1, 2)]
    return [wrap(), loader, *(each for batch in batches for each in (batch, Backward()))]


def test_a_dataset_that_makes_up_its_samples_is_not_a_sampler_that_does_not_divide():
    # Equal seeds give `torch.randn` in __getitem__ the same rows, whatever the sampler does.
    assert check_ranks(observe(divided(0), divided(0))) == [("T01", "error", 5, None)]
    assert check_ranks(observe(divided(0), divided(1))) == []


RECEIVES = Collective(op="recv", peer=1, site=site(7))


@pytest.mark.parametrize(
    ("other", "ids"),
    [
        (Collective(op="recv", peer=0, site=site(7)), ["H04"]),
        (Collective(op="barrier", seq=[1, 1], site=site(8)), ["H04"]),
        (Collective(op="send", peer=0, site=site(8)), []),  # they match
        (Forward(seq=[1, 1], model=0, site=site(8)), []),  # it may be computing
        (Backward(seq=[1, 1], site=site(8)), []),
        (None, []),
    ],
)
def test_a_rank_that_receives_is_stuck_only_if_the_sender_waits_too(other, ids):
    job = observe([], [])
    doing = ((RECEIVES,), (other,) if other else ())
    ranks = [replace(rank, doing=each) for rank, each in zip(job.ranks, doing, strict=True)]
    job = replace(job, ranks=ranks, over=False, stalled_seconds=10.0)
    found = wait_for_each_other(job)
    assert [each.id for each in (found,) if each] == ids


def test_samples_that_are_evaluated_twice():
    assert check_ranks(observe(evaluation(7, 13), evaluation(7, 13))) == [
        ("T05", "suspect", 5, None)
    ]
    assert check_ranks(observe(evaluation(7, 14), evaluation(7, 14))) == []


@pytest.mark.parametrize(
    ("agent", "waits", "expected"),
    [
        ("lab:29500", True, [("H18", "error", 7, None)]),
        ("localhost:12355", True, []),  # the port is the same, so something else is wrong
        (None, True, []),  # without an agent, rank 0 listens where the program says
        ("lab:29500", False, []),  # they met
    ],
)
def test_a_port_of_its_own_under_torchrun(agent, waits, expected):
    meeting = Init(site=site(7), backend="gloo", address="lab:12355", agent=agent)
    error = "DistNetworkError: The client socket has timed out after 5000ms" if waits else None
    observation = observe(*[[structs.replace(meeting, error=error)]] * 2)
    assert [one for one in check_ranks(observation) if one[0] == "H18"] == expected


@pytest.mark.parametrize(("kind", "expected"), [("KeyError", ["H11"]), ("KeyboardInterrupt", [])])
def test_who_stops_the_job_by_hand_has_no_exception_to_cure(kind, expected):
    raised = Raised(type=kind, message="", stack=[["train.py", 3, "main"]])
    observation = observe([wrap(), raised, End()], [wrap(), Backward(site=site(9)), End()])
    assert [one[0] for one in check_ranks(observation) if one[0] == "H11"] == expected
