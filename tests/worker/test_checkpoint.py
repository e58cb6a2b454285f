"""Save a training run and restore it, in one process."""

import json
import random

import pytest
import torch

from paralab.errors import ParalabError
from paralab.record.checkpoints import CheckpointPolicy
from paralab.worker.checkpoints.checkpoint import Saver
from paralab.worker.checkpoints.training_state import TrainingState
from paralab.worker.optimizer import make_optimizer, make_scheduler
from paralab.worker.strategies.single import Single
from tests.worker.one_rank import make_context, make_plan, make_workload

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Training:
    """A model with a buffer, an optimizer with state, and a scheduler."""

    def __init__(self, context, model):
        self.context, self.model = context, model
        self.optimizer = make_optimizer(context.workload, model)
        self.scheduler = make_scheduler(context.workload, self.optimizer)
        strategy = Single(context, model)
        self.state = TrainingState(context, strategy, self.optimizer, self.scheduler)

    def step(self):
        x = torch.randn(4, 3)
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def numbers(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def model():
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))


@pytest.fixture
def start(tmp_path):
    """Start training runs, each with its own seed, and close all of them at the end."""
    opened = []
    workload = make_workload(
        model=model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )

    def make(seed=0):
        entered = make_context(tmp_path, workload, make_plan(workload, seed=seed))
        opened.append(entered)
        return Training(*entered.__enter__())

    yield make
    for entered in opened:
        entered.__exit__(None, None, None)


def save(training, directory, step=2, keep=3):
    policy = CheckpointPolicy(str(directory), keep=keep)
    saver = Saver(training.state, policy, training.context.probe)
    saver.prepare()
    saver.begin(step, samples=8, epoch=0)
    saver.finish()
    return directory / f"step-{step:08d}"


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_restored_training_continues_bit_for_bit(start, tmp_path):
    training = start()
    training.step()
    training.step()
    folder = save(training, tmp_path / "checkpoints")
    saved, expected_draws = training.numbers(), (torch.rand(3), random.random())
    training.step()

    other = start(seed=5)
    other.step()
    assert not equal(other.numbers(), saved)
    other.state.restore(folder, same_topology=True)
    assert equal(other.numbers(), saved)
    assert torch.equal(torch.rand(3), expected_draws[0])
    assert random.random() == expected_draws[1]
    other.step()
    assert equal(other.numbers(), training.numbers())  # Adam's moments and the learning rate, too


def test_with_another_topology_the_random_streams_stay(start, tmp_path):
    training = start()
    training.step()
    folder = save(training, tmp_path / "checkpoints")
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    training.state.restore(folder, same_topology=False)
    assert torch.equal(torch.rand(3), expected)


def test_the_copy_is_from_the_step_that_began_the_save(start, tmp_path):
    training = start()
    training.step()
    policy = CheckpointPolicy(str(tmp_path / "checkpoints"))
    saver = Saver(training.state, policy, training.context.probe)
    saved = training.numbers()
    saver.begin(1, samples=4, epoch=0)
    training.step()  # while the thread writes
    saver.finish()
    training.state.restore(tmp_path / "checkpoints" / "step-00000001", same_topology=True)
    assert equal(training.numbers(), saved)


def test_the_manifest_and_the_number_of_checkpoints(start, tmp_path):
    training = start()
    training.step()
    for step in (1, 2, 3):
        folder = save(training, tmp_path / "checkpoints", step=step, keep=2)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["step"], manifest["samples_seen"], manifest["batch_size"]) == (3, 8, 4)
    assert manifest["topology"]["strategy"] == "single"
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000003"]


def test_a_parameter_that_is_not_finite_is_not_saved(start, tmp_path):
    training = start()
    training.step()
    with torch.no_grad():
        training.model[0].bias[0] = float("nan")
    with pytest.raises(ParalabError, match=r"0\.bias"):
        save(training, tmp_path / "checkpoints")
    assert not list((tmp_path / "checkpoints").glob("*/manifest.json"))


def test_a_damaged_checkpoint_is_refused(start, tmp_path):
    training = start()
    training.step()
    folder = save(training, tmp_path / "checkpoints")
    [data] = folder.glob("*.distcp")
    data.write_bytes(b"\0" * data.stat().st_size)
    with pytest.raises(ParalabError, match="step-00000002"):
        training.state.restore(folder, same_topology=True)


def test_state_that_cannot_be_read_back_is_refused_at_the_start(start, tmp_path):
    training = start()
    training.step()
    training.optimizer.param_groups[0]["note"] = object()
    with pytest.raises(ParalabError):
        save(training, tmp_path / "checkpoints")
