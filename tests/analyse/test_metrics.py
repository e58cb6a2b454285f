"""Where the time of a step went: each definition in docs/metrics.md, on a step drawn as a
picture."""

import json
from pathlib import Path

import pytest
from msgspec.structs import asdict

from paralab.analyse.figures import ideal_slots, schedule, split, timeline
from paralab.analyse.metrics import metrics_of, step_intervals
from paralab.analyse.recording import Recording, seconds_between
from paralab.analyse.result import Batch, Rank
from paralab.analyse.time_intervals import length
from paralab.plan.schedules import ideal_bubble
from tests.analyse.recordings import STEP, plan, write

RUNS = Path(__file__).parent.parent / "runs"


def measured(folder, *arguments, **options):
    return metrics_of(Recording.read(write(folder, *arguments, **options)))


#            0    1    2    3    4    5    6    7    8    9    10
# device     [ forward ][ backward     ·    ·    ·    ][  optimizer ]      the backward ends by waiting for its buckets
# bucket 0                  [ready ····· done]
# bucket 1                       [ready ···· ···· ··· done]
def two_buckets(rank):
    return [
        ("forward", 0, 2, {"device": f"cpu:{rank}", "accumulation": 0}),
        ("backward", 2, 8, {"device": f"cpu:{rank}", "accumulation": 0}),
        ("all_reduce", 3, 6, {"bucket": 0, "bytes": 100}),
        ("all_reduce", 5, 8, {"bucket": 1, "bytes": 50}),
        ("optimizer", 8, 9.5, {}),
    ]


@pytest.mark.parametrize("name", sorted(path.parent.name for path in RUNS.glob("*/events")))
def test_the_shares_of_a_step_add_up_to_one(name):
    """The shares once added up to 77%, because a rank that starts late or ends early is in no
    other part."""
    recording = Recording.read(RUNS / name)
    shares = metrics_of(recording).shares
    assert shares is not None
    assert min(asdict(shares).values()) >= 0
    assert sum(asdict(shares).values()) == pytest.approx(1, abs=1e-6)

    parts = ("compute", "optimizer", "exposed_communication", "exposed_waiting", "other", "skew")
    for step in recording.detailed:
        for rank in range(recording.world_size):
            intervals = step_intervals(recording, rank, step)
            total = sum(length(intervals[part]) for part in parts)
            assert total == pytest.approx(seconds_between([recording.step(step)]))


def test_ranks_that_start_at_different_times_have_a_share():
    recording = Recording.read(RUNS / "straggler")
    [step, *_] = recording.timed
    own = [each.end - each.start for each in step]
    begin, end = min(each.start for each in step), max(each.end for each in step)
    late = 1 - sum(own) / len(own) / (end - begin)
    shares = metrics_of(recording).shares
    assert late > 0.3
    assert shares is not None
    assert shares.skew == pytest.approx(late, abs=0.1)


def test_communication_is_hidden_while_the_device_computes(tmp_path):
    found = measured(tmp_path / "run", plan(), two_buckets)
    assert found["steps_measured"] == 9
    assert found["forward_seconds"] == pytest.approx(2)
    assert found["backward_seconds"] == pytest.approx(
        3
    )  # from 2 to 5: then its last bucket was ready
    assert found["communication_seconds"] == pytest.approx(5)  # from 3 to 8
    assert found["exposed_communication_seconds"] == pytest.approx(3)  # from 5 to 8
    assert found["overlap"] == pytest.approx(2 / 5)
    assert found["communication_share"] == pytest.approx(0.5)
    assert found["exposed_share"] == pytest.approx(0.3)
    assert found["keeps_rule"] is False
    assert found["optimizer_seconds"] == pytest.approx(1.5)
    assert found["other_seconds"] == pytest.approx(0.5)
    assert found["waiting_seconds"] == 0
    assert found["straggler"] is None
    assert found["data_seconds"] == pytest.approx(0.5)
    assert found["data_wait_seconds"] == pytest.approx(1)
    buckets = [(b["bucket"], b["bytes"], b["ready_seconds"]) for b in found["buckets"]]
    assert buckets == [(0, 100, 3), (1, 50, 5)]
    # A share of its own step: a bucket was ready at 106% of the median step.
    assert [b["ready_share"] for b in found["buckets"]] == [3 / STEP, 5 / STEP]
    parts = ("compute", "optimizer", "exposed_communication", "exposed_waiting", "other")
    assert sum(found[f"{part}_seconds"] for part in parts) == pytest.approx(STEP)


# rank 0     [ forward ][back]···············[opt]        ready at 3, waits until 7 for rank 1
# rank 1     [ forward       ][   back  ]····[opt]        ready at 7
def one_is_slow(rank):
    ready = 7 if rank else 3
    return [
        ("forward", 0, ready - 1, {"device": f"cpu:{rank}", "accumulation": 0}),
        ("backward", ready - 1, 9, {"device": f"cpu:{rank}", "accumulation": 0}),
        ("all_reduce", ready, 9, {"bucket": 0, "bytes": 100}),
        ("optimizer", 9, 10, {}),
    ]


def test_waiting_for_a_slower_rank_is_not_communication(tmp_path):
    found = measured(tmp_path / "run", plan(), one_is_slow)
    assert found["communication_seconds"] == pytest.approx(
        2
    )  # from 7, when the last rank was ready, to 9
    assert [rank["exposed_waiting_seconds"] for rank in found["per_rank"]] == [pytest.approx(4), 0]
    assert found["straggler"].to_dict() == {
        "rank": 1,
        "waited_seconds": pytest.approx(4),
        "share_of_step": pytest.approx(0.4),
        "last_in": 9,
        "of": 9,
    }


def test_no_rank_is_called_slow_for_what_others_do_not_wait_for(tmp_path):
    # Rank 1's bucket 1 is ready late, but both ranks are still sending bucket 0, so no rank waits.
    def late_but_hidden(rank):
        ready = 6 if rank else 4
        return [
            ("forward", 0, 2, {"device": f"cpu:{rank}", "accumulation": 0}),
            ("backward", 2, 9, {"device": f"cpu:{rank}", "accumulation": 0}),
            ("all_reduce", 3, 8, {"bucket": 0, "bytes": 100}),
            ("all_reduce", ready, 9, {"bucket": 1, "bytes": 100}),
            ("optimizer", 9, 10, {}),
        ]

    assert measured(tmp_path / "run", plan(), late_but_hidden)["straggler"] is None


# stage 0   F0 F1 ·· ·· B0 B1        12 slots, 4 of them idle
# stage 1   ·· F0 F1 B0 B1 ··
def pipelined(rank):
    def slot(event, stage, micro, start):
        where = {"device": f"cpu:{stage}", "stage": stage, "micro": micro, "accumulation": 0}
        return (event, start, start + 1, where)

    there = [slot("forward", stage, micro, stage + micro) for stage in (0, 1) for micro in (0, 1)]
    back = [
        slot("backward", stage, micro, 3 + (1 - stage) + micro)
        for stage in (0, 1)
        for micro in (0, 1)
    ]
    return [*there, *back, ("optimizer", 6, 7, {})]


def test_the_bubble(tmp_path):
    shape = plan("pipeline", ranks=1, stages=2, micro_batches=2)
    found = measured(tmp_path / "run", shape, pipelined)
    assert found["bubble"].to_dict() == {
        "measured": pytest.approx(1 / 3),
        "ideal": pytest.approx(1 / 3),
    }
    assert [device["seconds"] for device in found["busy"]] == [
        pytest.approx(5),
        pytest.approx(4),
    ]  # the first one steps, too
    assert found["balance"] == pytest.approx(5 / 4)
    recording = Recording.read(tmp_path / "run")
    drawn = schedule(recording)
    assert {(s.stage, s.micro, s.backward, s.start) for s in drawn.measured} == {
        (s.stage, s.micro, s.backward, s.start) for s in drawn.ideal
    }
    assert drawn.measured_bubble == pytest.approx(1 / 3)


def test_the_ideal_bubble():
    assert ideal_bubble(2, 4) == pytest.approx(1 / 5)
    assert ideal_bubble(4, 1) == pytest.approx(
        3 / 4
    )  # model parallelism: one device works at a time
    slots = ideal_slots(2, 4)
    idle = 2 * max(s.end for s in slots) - len(slots)
    assert idle / (2 * max(s.end for s in slots)) == pytest.approx(ideal_bubble(2, 4))


# In DataParallel, with one process, copying is communication, and the first device does it.
def data_parallel(rank):
    return [
        ("forward", 0, 5, {"device": "cpu:0", "accumulation": 0}),
        ("scatter", 0, 0.5, {}),
        ("replicate", 0.5, 1, {}),
        ("replica_forward", 1, 4, {"device": "cpu:0", "replica": 0}),
        ("replica_forward", 1, 4, {"device": "cpu:1", "replica": 1}),
        ("gather", 4, 5, {}),
        ("backward", 5, 9, {"device": "cpu:0", "accumulation": 0}),
        ("replica_backward", 5, 8, {"device": "cpu:0", "replica": 0}),
        ("replica_backward", 5, 8, {"device": "cpu:1", "replica": 1}),
        ("reduce", 8, 9, {}),
        ("optimizer", 9, 10, {}),
    ]


def test_data_parallel_communicates_inside_the_process(tmp_path):
    shape = plan("dp", ranks=1)
    names = ("cpu:0", "cpu:1")
    shape["ranks"][0]["devices"] = [
        {"name": n, "torch": "cpu", "role": "r", "virtual": True, "shared": False} for n in names
    ]
    found = measured(tmp_path / "run", shape, data_parallel)
    assert found["communication_seconds"] == pytest.approx(3)
    assert found["exposed_communication_seconds"] == pytest.approx(3)
    assert found["forward_seconds"] == pytest.approx(3)
    assert found["backward_seconds"] == pytest.approx(3)
    assert [device["seconds"] for device in found["busy"]] == [pytest.approx(10), pytest.approx(6)]
    assert found["balance"] == pytest.approx(10 / 6)


def test_flops_and_peak_by_exact_name(tmp_path):
    gpu = [{"name": "NVIDIA H200", "memory_bytes": 1, "capability": [9, 0]}]
    shape = plan("single", ranks=1, device="cuda", precision="bf16")

    def forward(rank):
        return [("forward", 0, 5, {"device": "cpu:0", "accumulation": 0})]

    enough = {"flops_per_sample": 989e12 * STEP / 128}
    found = measured(tmp_path / "known", shape, forward, machine={"gpus": gpu}, workload=enough)
    assert found["flops"]["share_of_peak"] == pytest.approx(0.5)
    gpu[0]["name"] = "NVIDIA H200 something else"
    found = measured(tmp_path / "unknown", shape, forward, machine={"gpus": gpu})
    assert found["flops"]["share_of_peak"] is None
    assert "bf16 peak" in found["flops"]["not_measured"]


def test_flops_count_the_samples_that_were_trained_on(tmp_path):
    """An epoch of 16 samples makes each batch smaller than the requested 64."""
    shape = plan("single", ranks=1)
    shape["ranks"][0]["samples_per_step"] = 16
    found = measured(tmp_path / "run", shape, lambda rank: [("forward", 0, 5, {})])
    assert found["flops"]["per_second"] == pytest.approx(16 * 1e6 / STEP)


def test_load_is_the_mean_while_it_trained(tmp_path):
    def load(rank):
        samples = ((1, 9), (50, 1), (60, 2))
        return [
            {"event": "load", "time": t, "cpu_share": share, "rss_bytes": 5, "devices": []}
            for t, share in samples
        ]

    found = measured(tmp_path / "run", plan(), two_buckets, extra=load)
    assert found["load"]["cores_per_rank"] == [1.5, 1.5]  # the sample at 1 s is warm-up


def test_the_timeline_shows_exposed_waiting(tmp_path):
    recording = Recording.read(write(tmp_path / "run", plan(), one_is_slow))
    drawn = timeline(recording)
    assert drawn.lanes == (
        "rank 0 · cpu:0",
        "rank 0 · all-reduce",
        "rank 1 · cpu:1",
        "rank 1 · all-reduce",
    )
    exposed = {
        (s.label, s.lane, round(s.start, 3), round(s.end, 3))
        for s in drawn.spans
        if s.kind == "wait" and s.start < STEP
    }
    assert {s.exposed for s in drawn.spans if s.label == "exposed communication"} == {True}
    assert not any(s.exposed for s in drawn.spans if s.label != "exposed communication")
    assert exposed == {
        ("waiting for a slower rank", 0, 3, 7),
        ("exposed communication", 0, 7, 9),
        ("exposed communication", 2, 7, 9),
    }
    backward = next(s for s in drawn.spans if s.kind == "backward" and s.lane == 0)
    assert (backward.start, backward.end) == (pytest.approx(2), pytest.approx(3))


def test_a_split_is_drawn_to_scale():
    batch = Batch(size=64, accumulate=2, micro_batches=1, arithmetic="64 = …")
    ranks = [
        Rank(
            rank=number,
            local_rank=number,
            node="",
            pid=None,
            devices=[f"cpu:{number}"],
            roles=["replica"],
            virtual=True,
            shared=False,
            samples_per_step=samples,
            split=[samples],
            replica=number,
            stage=None,
            shard=None,
        )
        for number, samples in enumerate((22, 22, 20))
    ]
    drawn = split(batch, ranks)
    assert [part.pieces for part in drawn.parts] == [(11, 11), (11, 11), (10, 10)]
    assert sum(sum(part.pieces) for part in drawn.parts) == drawn.total == 64


def test_of_a_long_run_only_the_steps_with_details_are_measured(tmp_path):
    """Every step has `data` and `step` events, but after the first 200 steps, only one in ten has
    the others. A run of 1000 steps once showed no compute and no communication."""
    folder = write(tmp_path / "run", plan(), two_buckets, steps=40)
    for path in (folder / "events").iterdir():
        events = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [
            e
            for e in events
            if e.get("step", 0) < 20 or e["step"] % 10 == 0 or e["event"] in ("data", "step")
        ]
        path.write_text("".join(json.dumps(event) + "\n" for event in kept))
    found = metrics_of(Recording.read(folder))
    assert found["steps_measured"] == 17 + 2
    assert found["communication_seconds"] == pytest.approx(5)


# A process per stage (1f1b, 2 stages, 2 micro-batches), and an all-reduce of stage 1 while stage 0
# still computes:
#
#            0   1   2   3   4   5   6   7
# rank 0     F0  F1  ·   B0  ·   B1            2 + 1 of 6 idle
# rank 1     ·   F0  B0  F1  B1  all-reduce
def one_stage_each(rank):
    def slot(event, micro, start):
        return (
            event,
            start,
            start + 1,
            {"device": f"cpu:{rank}", "stage": rank % 2, "micro": micro, "accumulation": 0},
        )

    if rank % 2 == 0:
        work = [
            slot("forward", 0, 0),
            slot("forward", 1, 1),
            slot("backward", 0, 3),
            slot("backward", 1, 5),
        ]
        return [
            *work,
            ("all_reduce", 6, 6.5, {"bucket": 0, "bytes": 8, "stage": 0}),
            ("optimizer", 6.5, 7, {}),
        ]
    work = [
        slot("forward", 0, 1),
        slot("backward", 0, 2),
        slot("forward", 1, 3),
        slot("backward", 1, 4),
    ]
    return [
        *work,
        ("all_reduce", 5.5, 6.5, {"bucket": 0, "bytes": 8, "stage": 1}),
        ("optimizer", 6.5, 7, {}),
    ]


def test_the_bubble_of_a_pipeline_over_processes(tmp_path):
    shape = plan("hybrid", ranks=4, micro_batches=2, schedule="1f1b", chunks=1) | {
        "stages": 2,
        "replicas": 2,
    }
    for rank in shape["ranks"]:
        rank |= {"replica": rank["rank"] // 2, "stage": rank["rank"] % 2}
    found = measured(tmp_path / "run", shape, one_stage_each)
    assert found["bubble"].to_dict() == {
        "measured": pytest.approx(4 / 12),
        "ideal": pytest.approx(1 / 3),
    }
    drawn = schedule(Recording.read(tmp_path / "run"))
    assert drawn.stages == ("stage 0 · rank 0 · cpu:0", "stage 1 · rank 1 · cpu:1")
    assert sorted((s.stage, s.micro, s.backward, s.start) for s in drawn.measured) == sorted(
        (s.stage, s.micro, s.backward, s.start) for s in drawn.ideal
    )
    assert found["straggler"] is None
