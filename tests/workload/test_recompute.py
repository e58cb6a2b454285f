"""A recomputed block trains like a normal one, and blocks that would not are found in advance."""

import random

import pytest
import torch
from torch import nn

from paralab.worker.measure.memory import ActivationMeter
from paralab.workload.recompute import MODES, recompute
from paralab.workload.repeated_blocks import StepResult, find_blocks, repeated_blocks
from paralab.workload.state import put_back, state_of


class Block(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.wide, self.narrow, self.extra = nn.Linear(4, 8), nn.Linear(8, 4), extra()

    def forward(self, x, *, scale):
        return x + scale * self.extra(self.narrow(torch.tanh(self.wide(x))))


class Net(nn.Module):
    def __init__(self, *extras):
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(map(Block, extras))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.square().mean()


class PythonNoise(nn.Module):
    def forward(self, x):
        return torch.tanh(x * random.random())


class Cached(nn.Module):
    """It is like a transformer's key cache, which grows in each call."""

    def forward(self, x):
        self.seen = torch.cat([self.seen, x]) if hasattr(self, "seen") else x
        return torch.tanh(self.seen).mean(0) + x


def trainer(model, seed=0):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    before = state_of(model)

    def train():
        put_back(model, before)
        for module in model.modules():
            vars(module).pop("seen", None)
        torch.manual_seed(seed)
        random.seed(seed)
        model.zero_grad()
        model(x).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        return StepResult(gradients, state_of(model))

    return train


def test_blocks_are_siblings_that_look_alike():
    model = nn.Module()
    model.net = Net(nn.Identity, nn.Identity)
    model.plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))  # no parts
    model.other = nn.ModuleList([nn.Sequential(nn.Linear(4, size)) for size in (2, 3)])
    assert repeated_blocks(model) == ["net.blocks.0", "net.blocks.1"]


@pytest.mark.parametrize(
    ("extra", "modes"),
    [
        (lambda: nn.Dropout(0.5), MODES),
        (PythonNoise, MODES),  # torch.utils.checkpoint alone would draw different numbers
        (lambda: nn.BatchNorm1d(4), ()),  # would count each batch twice
        (Cached, ()),
        (lambda: nn.ReLU(inplace=True), ("full",)),  # changes a kept output
    ],
)
def test_a_trial_finds_what_can_be_computed_again(extra, modes):
    model = Net(extra, extra, extra)
    found = find_blocks(model, trainer(model))
    assert [(block.name, block.recomputes) for block in found] == [
        (f"blocks.{number}", modes) for number in range(3)
    ]
    assert type(model.blocks[0]) is Block
    assert {block.python_random for block in found} == {extra is PythonNoise}


def test_one_bad_block_does_not_exclude_the_others():
    model = Net(nn.Identity, nn.Identity)
    model.blocks[1].extra = nn.BatchNorm1d(4, affine=False)
    found = find_blocks(model, trainer(model))
    assert [(block.name, block.recomputes) for block in found] == [
        ("blocks.0", MODES),
        ("blocks.1", ()),
    ]


@pytest.mark.parametrize("mode", MODES)
def test_random_numbers_and_gradients_are_the_same_to_the_last_bit(mode):
    extras = [lambda: nn.Dropout(0.5), PythonNoise] * 2
    torch.manual_seed(0)
    plain = Net(*extras)
    again = Net(*extras)
    again.load_state_dict(plain.state_dict())
    for block in again.blocks:
        recompute(block, mode)
    expected, got = trainer(plain)().gradients, trainer(again)().gradients
    after = random.random(), float(torch.rand(()))
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    trainer(plain)()
    assert (random.random(), float(torch.rand(()))) == after  # the backward pass drew nothing


class Sines(nn.Module):
    """Each sine saves its input. So a block saves its own input and two more tensors."""

    def __init__(self):
        super().__init__()
        self.part = nn.Identity()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return torch.sin(torch.sin(torch.sin(x)))


class Products(Sines):
    """Products and sines alternate. Each saves its input, and parameters do not count."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(8))

    def forward(self, x):
        return torch.sin(torch.sin(x @ self.matrix) @ self.matrix)


@pytest.mark.parametrize(
    ("kind", "mode", "tensors"),
    [
        (Sines, None, 9),  # three blocks, three tensors each
        (Sines, "full", 5),  # three inputs, and two more of the last block
        (Products, None, 12),  # three blocks, four tensors each
        (Products, "selective", 10),  # the inputs and both products of three blocks, and one sine
        (Products, "full", 6),  # three inputs, and three more of the last block
    ],
)
def test_activations_are_what_is_kept_and_one_block_more(kind, mode, tensors):
    blocks = [kind() for _ in range(3)]
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    meter = ActivationMeter(parameters, enabled=True)
    for block in blocks if mode else []:
        recompute(block, mode, meter.watch)
    x = torch.randn(8, 8, requires_grad=True)
    with meter.counting("cpu:0"):
        y = x * 1.0
        for block in blocks:
            y = block(y)
        loss = y.sum()
    loss.backward()
    assert meter.peak["cpu:0"] == tensors * x.nbytes


class Cache:
    """As in transformers: all blocks share it, and each appends its own keys."""

    def __init__(self):
        self.layers = {}


class Attending(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.key, self.out = number, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, cache):
        kept = cache.layers.setdefault(self.number, [])
        kept.append(self.key(x))
        return x + self.out(torch.stack(kept).sum(0))


class Attentive(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(map(Attending, range(2)))

    def forward(self, x):
        x, cache = self.first(x), Cache()
        for block in self.blocks:
            x = block(x, cache)
        assert [len(kept) for kept in cache.layers.values()] == [1, 1]
        return x.square().mean()


@pytest.mark.parametrize("mode", MODES)
def test_a_block_that_changes_an_argument_is_recomputed_with_the_earlier_one(mode):
    """The cache of transformers once grew. Some masks hid this from the trial, and training
    failed."""
    model = Attentive()
    train = trainer(model)
    expected = train()
    undo = [recompute(block, mode) for block in model.blocks]
    gradients = train().gradients
    assert all(torch.equal(gradients[name], expected.gradients[name]) for name in gradients)
    for each in undo:
        each()
    assert len(find_blocks(model, train)) == 2


class Comparing(nn.Module):
    """nn.MultiheadAttention takes another path if its key is its value."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, key, value):
        return torch.sin(self.linear(key)) if key is value else torch.tanh(self.linear(key))


def test_arguments_that_are_one_tensor_still_are_when_a_block_is_recomputed():
    """Hooks of saved tensors, as paralab's count of activations, return two tensors."""
    block, x = Comparing(), torch.randn(3, 4)

    def gradient():
        block.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            y = x * block.linear.bias
            loss = block(y, y).square().sum()
        loss.backward()
        return block.linear.weight.grad.clone()

    expected = gradient()
    recompute(block, "full")
    assert torch.equal(gradient(), expected)
