"""The same command trains the same model: neither the order of threads nor a resume changes what
they draw."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paralab.record.checkpoints import CheckpointPolicy
from paralab.record.status_board import StatusBoard
from paralab.record.writer import EventWriter
from paralab.worker.loop import Extras, train
from paralab.worker.random_streams import RandomStreams
from paralab.workload.load import load_workload
from tests.worker.one_rank import plan_workload

STEPS = 8
WORKLOAD = f"{Path(__file__).parent.parent}/parity/hunters.py:dropping"


@pytest.fixture(scope="module", params=["dp", "pipeline"])
def plan(request):
    split = {"micro_batches": 3} if request.param == "pipeline" else {"replicas": 3}
    return plan_workload(WORKLOAD, request.param, steps=STEPS, samples=48, **split)


def trained(plan, folder, name, policy=None):
    threads = torch.get_num_threads()
    writer = EventWriter(folder / f"{plan.strategy}-{name}.jsonl")
    weights = folder / f"{plan.strategy}-{name}.pt"
    try:
        train(
            load_workload(plan.workload),
            plan,
            0,
            writer,
            0.0,
            Extras(save_weights=weights, policy=policy),
            StatusBoard.create(folder / "board", 1),
        )
    finally:
        writer.close()
        torch.set_num_threads(threads)
    return torch.load(weights, weights_only=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_trainings_are_equal_bit_for_bit_and_so_is_a_resumed_one(plan, tmp_path):
    folder = tmp_path
    directory = str(folder / f"checkpoints-{plan.strategy}")
    whole = trained(plan, folder, "whole", CheckpointPolicy(directory, every=3))
    again = trained(plan, folder, "again")
    resume = str(folder / f"checkpoints-{plan.strategy}" / "step-00000003")
    resumed = trained(
        plan,
        folder,
        "resumed",
        CheckpointPolicy(f"{directory}-2", resume=resume, done=3, samples=36, same_topology=True),
    )
    assert plan.draws
    for name, value in whole.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, resumed[name])


def test_a_thread_draws_from_its_stream_in_any_order():
    def drawn(streams, order):
        found = {}
        for number in order:
            with streams.drawing(lambda number=number: number):
                found.setdefault(number, []).append(nn.functional.dropout(torch.ones(64), 0.5))
        return {number: torch.cat(values) for number, values in found.items()}

    torch.manual_seed(0)
    one = drawn(RandomStreams(2, seed=7), [0, 0, 1, 1])
    expected = torch.rand(4)
    torch.manual_seed(0)
    other = drawn(RandomStreams(2, seed=7), [1, 0, 1, 0])
    assert all(torch.equal(one[number], other[number]) for number in one)
    assert not torch.equal(one[0], one[1])
    assert torch.equal(torch.rand(4), expected)  # the process's own generator is unchanged


def test_activation_checkpointing_draws_the_same_numbers_on_the_way_back():
    """Checkpointing saves and restores the generator's state. Inside a stream, that is the
    stream's state."""
    streams = RandomStreams(16, seed=3)

    def gradient(number):
        x = torch.ones(512, requires_grad=True)
        with streams.drawing(lambda: number):
            output = checkpoint(
                lambda t: nn.functional.dropout(t * 1.0, 0.5), x, use_reentrant=False
            )
            output.sum().backward()
        return torch.equal(output.detach(), x.grad)

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(gradient, range(16)))
