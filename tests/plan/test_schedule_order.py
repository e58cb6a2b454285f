"""The order of a pipeline's passes as a picture, compared with torch's, and its bubble."""

from types import SimpleNamespace

import pytest
from torch import nn
from torch.distributed import pipelining

from paralab.errors import UsageError
from paralab.plan.plan import Plan, label
from paralab.plan.schedules import (
    ONE_SLOT_EACH,
    PARTS_PER_RANK,
    SCHEDULES,
    ideal_bubble,
    misfit,
    order,
    simulate,
)
from paralab.workload.summary import Layer
from tests.plan.test_resolve import plan, summary

TORCH = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
}
SIZES = [(stages, micro) for stages in (2, 3, 4) for micro in (2, 3, 4, 6, 8, 12)]


def picture(schedule, stages, micro_batches):
    """Draw one line per rank and one column per slot. Passes of a rank's second part have a
    prime."""
    lines = []
    slots = simulate(order(schedule, stages, micro_batches))
    for rank in range(stages):
        cells = ["··"] * int(max(slot.end for slot in slots))
        for slot in slots:
            if slot.rank == rank:
                part, kind, micro = slot.action
                cells[int(slot.start)] = f"{kind}{micro}" + "'" * (part >= stages)
        lines.append(" ".join(cells))
    return lines


def test_the_schedules_as_pictures():
    assert picture("gpipe", 2, 4) == [
        "F0 F1 F2 F3 ·· ·· B0 B1 B2 B3",
        "·· F0 F1 F2 F3 B0 B1 B2 B3 ··",
    ]
    assert picture("1f1b", 2, 4) == [
        "F0 F1 ·· B0 F2 B1 F3 B2 ·· B3",
        "·· F0 B0 F1 B1 F2 B2 F3 B3 ··",
    ]
    assert picture("interleaved", 2, 2) == [
        "F0 F1 F0' F1' ·· B0' ·· B1' B0 B1",
        "·· F0 F1 F0' B0' F1' B1' B0 B1 ··",
    ]
    assert picture("zero-bubble", 2, 2) == [
        "F0 F1 F0' F1' ·· I0' W0' I1' W1' I0 W0 I1 W1",
        "·· F0 F1 F0' I0' F1' I1' W0' I0 W1' I1 W0 W1",
    ]


def torch_order(schedule, stages, micro_batches):
    """Return what torch.distributed.pipelining would run: (part, kind, micro-batch) per rank."""
    chunks = PARTS_PER_RANK[schedule]
    common = {
        "group_size": stages,
        "group_rank": 0,
        "num_stages": stages * chunks,
        "submod": nn.Identity(),
        "is_last": False,
    }
    parts = [SimpleNamespace(stage_index=chunk * stages, **common) for chunk in range(chunks)]
    made = TORCH[schedule](parts if chunks > 1 else parts[0], micro_batches)
    ranks = [actions for _, actions in sorted(made.pipeline_order.items())]
    named = [
        [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in actions if a]
        for actions in ranks
    ]
    return [[action for action in actions if action[1] in "FBIW"] for actions in named]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_order_equals_that_of_torch(schedule):
    for stages, micro_batches in SIZES:
        if misfit(schedule, stages, micro_batches):
            continue
        ours = order(schedule, stages, micro_batches)
        theirs = torch_order(schedule, stages, micro_batches)
        if schedule == "1f1b":
            # torch numbers the last rank's forward passes from 1 but runs them from 0, so compare
            # only the kinds.
            assert [[kind for _, kind, _ in actions] for actions in ours] == [
                [kind for _, kind, _ in rank] for rank in theirs
            ]
        else:
            assert [[tuple(action) for action in actions] for actions in ours] == theirs


def idle_share(slots):
    """Return the bubble: the idle fraction of rank time from the first start to the last end."""
    ranks = 1 + max(slot.rank for slot in slots)
    window = max(slot.end for slot in slots) - min(slot.start for slot in slots)
    return 1 - sum(slot.end - slot.start for slot in slots) / (ranks * window)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("full_backward", [1.0, 2.0])
def test_the_formula_equals_the_simulated_bubble(schedule, full_backward):
    for stages, micro_batches in SIZES:
        if not misfit(schedule, stages, micro_batches):
            seconds = {**ONE_SLOT_EACH, "B": full_backward}
            simulated = idle_share(simulate(order(schedule, stages, micro_batches), seconds))
            assert ideal_bubble(stages, micro_batches, schedule) == pytest.approx(simulated), (
                stages,
                micro_batches,
            )


def test_torch_refuses_what_we_refuse():
    for schedule in ("1f1b", "interleaved", "zero-bubble"):
        for stages, micro_batches in [(2, 1), (4, 3), (2, 5), (3, 7), (4, 9)]:
            if (
                schedule == "1f1b" or micro_batches >= stages
            ):  # torch runs fewer than `stages`, with a larger bubble than the formula
                refused = False
                try:
                    torch_order(schedule, stages, micro_batches)
                except ValueError:
                    refused = True
                assert refused == bool(misfit(schedule, stages, micro_batches)), (
                    schedule,
                    stages,
                    micro_batches,
                )


def layers(number):
    return tuple(Layer(str(n), (str(n),), 1.0, 100) for n in range(number))


@pytest.mark.parametrize(
    ("strategy", "options", "problem", "fix"),
    [
        ("pipeline", {"schedule": "1f2b"}, "Did you mean '1f1b'", "zero-bubble"),
        ("ddp", {"schedule": "1f1b"}, "ddp", "pipeline, hybrid"),
        (
            "pipeline",
            {"schedule": "1f1b", "stages": 4, "micro_batches": 3},
            "3 < 4 stages",
            "--micro-batches 8",
        ),
        (
            "pipeline",
            {"schedule": "interleaved", "micro_batches": 5},
            "5",
            "multiple of 2",
        ),
        (
            "pipeline",
            {"schedule": "zero-bubble", "stages": 3},
            "3 stages × 2 = 6",
            "--schedule 1f1b, or --stages 2",
        ),
        (
            "pipeline",
            {"schedule": "gpipe", "placement": "same"},
            "--placement same",
            "leave out",
        ),
        (
            "hybrid",
            {"schedule": "gpipe", "bucket_view": True},
            "--bucket-view",
            "leave out",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(strategy, options, problem, fix):
    with pytest.raises(UsageError) as refused:
        plan(strategy, **options)
    assert problem in refused.value.problem
    assert fix in (refused.value.fix or "")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_default_number_of_micro_batches_fits(schedule):
    for stages in (2, 3, 4):
        for batch in (4, 5, 7, 64):
            made = plan(
                "pipeline",
                of=summary(layers=layers(8)),
                stages=stages,
                batch_size=batch,
                schedule=schedule,
            )
            assert misfit(schedule, stages, made.micro_batches) is None


def test_a_process_per_stage():
    made = plan(
        "hybrid",
        of=summary(layers=layers(8)),
        schedule="interleaved",
        replicas=2,
        stages=2,
        batch_size=13,
    )
    assert [
        (r.rank, r.replica, r.stage, r.samples_per_step, [d.name for d in r.devices])
        for r in made.ranks
    ] == [
        (0, 0, 0, 7, ["cpu:0"]),
        (1, 0, 1, 7, ["cpu:1"]),
        (2, 1, 0, 6, ["cpu:2"]),
        (3, 1, 1, 6, ["cpu:3"]),
    ]
    assert [part.modules for part in made.stage_parts] == [
        ("0", "1"),
        ("2", "3"),
        ("4", "5"),
        ("6", "7"),
    ]
    assert made.arithmetic == "13 = 7 + 6 samples on 2 replicas, each in 4 micro-batches"
    assert made.backend == "gloo"
    assert Plan.from_json(made.to_json()) == made
    assert label(made) == "hybrid ×2 · 2 stages · interleaved · 4 micro-batches"
    alone = plan("pipeline", schedule="gpipe", stages=2)
    assert alone.world_size == 2
    assert alone.arithmetic == "64 = 4 micro-batches × 16 samples"
