"""A global batch becomes weighted micro-batches."""

import pytest
import torch

from paralab.worker.batches import count_samples, load_batches
from paralab.worker.rank_context import MicroBatch
from paralab.workload.batch import num_samples
from tests.worker.one_rank import make_context, make_plan, make_workload

NOTHING = MicroBatch(inputs=None, targets=None, share=0.0)


def draw(steps):
    """Return the sizes of all micro-batches, with a list per accumulation step."""
    return [[num_samples(micro.inputs) for micro in step] for step in steps]


def shares(steps):
    return [[micro.share for micro in step] for step in steps]


def test_accumulation_steps_share_a_batch(tmp_path):
    workload = make_workload()
    plan = make_plan(workload, accumulate=3, batch_size=4)
    with make_context(tmp_path, workload, plan) as (context, _):
        batches = list(load_batches(context))
    # 10 samples in batches of 4
    assert [draw(steps) for _, steps in batches[:3]] == [
        [[2], [1], [1]],
        [[2], [1], [1]],
        [[1], [1]],
    ]
    assert shares(batches[0][1]) == [[0.5], [0.25], [0.25]]
    assert shares(batches[2][1]) == [[0.5], [0.5]]
    assert [count_samples(steps) for _, steps in batches[:3]] == [4, 4, 2]


def test_finished_steps_are_skipped(tmp_path):
    workload = make_workload()
    plan = make_plan(workload, steps=5)
    with make_context(tmp_path, workload, plan) as (context, _):
        everything = list(load_batches(context))
        rest = list(load_batches(context, done=2))
    assert [batch.step for batch, _ in rest] == [2, 3, 4]
    for (_, expected), (_, steps) in zip(everything[2:], rest, strict=True):
        assert torch.equal(expected[0][0].inputs, steps[0][0].inputs)


def test_a_weight_decides_the_shares(tmp_path):
    weighted = make_workload(
        data=(torch.arange(4.0)[:, None], torch.zeros(4, 1)),
        weight=lambda batch: float(batch[0].sum()),  # a sample weighs its value: 0, 1, 2 or 3
    )
    plan = make_plan(weighted, samples=4, accumulate=4, steps=1)
    with make_context(tmp_path, weighted, plan) as (context, _):
        [(_, steps)] = load_batches(context)
    for [micro] in steps:
        assert micro.share == pytest.approx(micro.inputs.item() / 6)
    assert count_samples(steps) == 3  # a weight of zero does not count


def test_a_rank_without_samples_gets_two_that_count_nothing(tmp_path):
    workload = make_workload()
    plan = make_plan(workload, "ddp", replicas=3, batch_size=6, samples=8)  # 8 = 6 + 2
    sizes = {}
    for rank in range(3):
        with make_context(tmp_path, workload, plan, rank) as (context, _):
            sizes[rank] = [(draw(steps), shares(steps)) for _, steps in load_batches(context)][:2]
    assert sizes[0] == [([[2]], [[2 / 6]]), ([[1]], [[0.5]])]
    assert sizes[1] == [([[2]], [[2 / 6]]), ([[1]], [[0.5]])]
    assert sizes[2] == [([[2]], [[2 / 6]]), ([[2]], [[0.0]])]


def test_samples_that_count_nothing_have_no_loss_even_if_their_logits_are_masked(tmp_path):
    """The loss of a rank without samples was once 0 × the sum of its outputs, which is NaN for
    logits of -inf."""
    workload = make_workload()
    model = torch.nn.Linear(3, 2)
    logits = model(torch.randn(2, 3)).masked_fill(torch.tensor([True, False]), -torch.inf)
    with make_context(tmp_path, workload, make_plan(workload)) as (context, _):
        loss = context.weighted_loss({"logits": logits, "hidden": logits[0, 1]}, NOTHING)
    loss.backward()
    assert loss.item() == 0.0
    assert not any(parameter.grad.count_nonzero() for parameter in model.parameters())


def test_inputs_follow_the_precision(tmp_path):
    workload = make_workload(data=(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])))
    plan = make_plan(workload, samples=4, precision="fp64", steps=1)
    with make_context(tmp_path, workload, plan) as (context, _):
        [(_, [[micro]])] = load_batches(context)
    assert (micro.inputs.dtype, micro.targets.dtype) == (torch.float64, torch.int64)
