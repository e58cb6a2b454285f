"""The same command trains the same model: the order of threads does not decide what they draw, nor
does a resume."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paralab.plan.plan import Plan
from paralab.record.checkpoints import CheckpointPolicy
from paralab.record.writer import EventWriter
from paralab.worker.loop import train
from paralab.worker.random_streams import RandomStreams
from paralab.worker.setup import Extras
from paralab.workload.load import load_workload
from tests.conftest import run_paralab

STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("streams")
    shutil.copy(Path(__file__).parent.parent / "parity" / "hunters.py", made)
    return made


@pytest.fixture(scope="module", params=["dp", "pipeline"])
def plan(request, folder):
    options = [
        "--workload",
        "hunters.py:dropping",
        "--steps",
        str(STEPS),
        "--samples",
        "48",
        "--json",
    ]
    options += ["--micro-batches", "3"] if request.param == "pipeline" else ["--replicas", "3"]
    return Plan.from_json(json.loads(run_paralab("plan", request.param, *options, cwd=folder).out))


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
        )
    finally:
        writer.close()
        torch.set_num_threads(threads)
    return torch.load(weights, weights_only=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.processes
def test_two_trainings_are_the_same_bit_for_bit_and_so_is_a_resumed_one(plan, folder):
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


def test_a_thread_draws_from_its_stream_whatever_the_others_do():
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
    assert torch.equal(torch.rand(4), expected)  # the process's own generator was left alone


def test_activation_checkpointing_draws_the_same_numbers_on_the_way_back():
    """It saves the generator's state and puts it back: in a stream that must be the stream's."""
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
