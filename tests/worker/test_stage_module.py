"""A model's stages, all in one process. Together, they compute the same as the whole model."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paralab.errors import UsageError
from paralab.plan.plan import Stage
from paralab.worker.stages.stage_module import StageModule, free_other_stages
from paralab.workload.cut_points import find_layers
from paralab.workload.verify_controls import controlled

X = torch.randn(6, 8, dtype=torch.float64)
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask):
        return x + torch.tanh(self.linear(x)) * mask


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        mask = (x.sum(1, keepdim=True) > 0).to(
            x.dtype
        )  # computed before the cuts, an argument of every block
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.last(x)


class Checkpointed(Blocks):
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, 1.0, use_reentrant=False)
        return self.last(x)


class Past(Blocks):
    """A value that depends only on the inputs is computed before the cuts and used after them,
    without being an argument. Every process can compute it."""

    def forward(self, x):
        scale = torch.sigmoid(x.detach().sum(1, keepdim=True))
        scale[0] = 2.0
        low, high = torch.chunk(scale, 2)
        x = self.first(x)
        for block in self.blocks:
            x = block(x, 1.0)
        return self.last(x) * torch.cat([low, high])


class Branching(Blocks):
    """The model reads values of its inputs before the cut, and a shape that depends on them."""

    def forward(self, x):
        rows = (x[:, 0] > 0).nonzero().squeeze(1)
        return super().forward(x if x.max().item() > -1e9 and len(rows) < 7 else -x)


class PastParameters(Blocks):
    def forward(self, x):
        x = self.first(x)
        scale = torch.sigmoid(x.detach().sum(1, keepdim=True))
        for block in self.blocks:
            x = block(x, 1.0)
        return self.last(x) * scale


class Asking(Blocks):
    """The model reads values that depend on a parameter, which another process has."""

    def forward(self, x):
        return super().forward(x if self.first(x).max().item() > -1e9 else -x)


class Masking(Blocks):
    """As in transformers: only some samples need a mask."""

    def forward(self, x):
        mask = (x < 9.0).to(x.dtype) if bool((x > 9.0).any()) else 1.0
        x = self.first(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.last(x)


class Changing(Blocks):
    def forward(self, x):
        return super().forward(x.mul_(2.0))


class Views(nn.Module):
    """A view of a larger tensor crosses the cut. torch cannot detach a view in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.second(self.first(x)[:, 8:])[:, ::2])


def in_place():
    return nn.Sequential(
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 3),
    )


def norms():
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )


def stages_of(model):
    layers, _ = find_layers(copy.deepcopy(model), X, lambda output: output.square().mean())
    return tuple(
        Stage(layer.name, layer.modules, 1, layer.seconds, layer.parameter_bytes)
        for layer in layers
    )


def cut(model, parts):
    """Return a copy of the model per stage, each with only its own stage."""
    found = []
    for number in range(len(parts)):
        mine = copy.deepcopy(model)
        free_other_stages(mine, parts, {number})
        part = StageModule(
            mine, number, parts, CPU, CPU, lambda output, chunk, live: output.square().mean()
        )
        part.inputs = [X]
        found.append(part)
    return found


def there_and_back(parts, live):
    """Run forward through all stages and backward again. As in a schedule, this sends tensors,
    not graphs."""
    sent, kept = (), []
    for part in parts:
        received = tuple(t.detach().requires_grad_(t.requires_grad) for t in sent)
        part.live = live
        sent = part(*received)
        kept.append((received, sent))
    loss, grads = sent, None
    assert not any(
        t._is_view() or not t.is_contiguous() for _, outputs in kept[:-1] for t in outputs
    )
    for part, (received, outputs) in zip(reversed(parts), reversed(kept), strict=True):
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (o, g)
            for o, g in zip(outputs, grads or [None] * len(outputs), strict=True)
            if o.requires_grad
        ]
        run = lambda pairs=pairs: torch.autograd.backward(  # noqa: E731
            [o for o, _ in pairs], [g for _, g in pairs]
        )
        if live:
            with part.returning(0, last=True):
                run()
        else:
            run()
        grads = [t.grad for t in received]
    return loss


@pytest.mark.parametrize("make", [Blocks, Checkpointed, Views, in_place, norms, Past, Branching])
def test_the_stages_together_are_the_model(make):
    torch.manual_seed(0)
    model = make().double()
    parts = cut(model, stages_of(model))
    assert len(parts) > 2
    names = {name for name, _ in model.named_parameters()}
    assert all({name for name, _ in part.model[0].named_parameters()} == names for part in parts)
    for live in (
        False,
        True,
        True,
    ):  # first a trial, which changes nothing, then twice with cached shapes
        expected = copy.deepcopy(model)
        for part in parts:
            part.zero_grad()
        loss = there_and_back(parts, live)
        expected(X).square().mean().backward()
        assert loss.item() == pytest.approx(expected(X).square().mean().item(), abs=1e-14)
        for name, parameter in expected.named_parameters():
            [held] = [
                p
                for part in parts
                for n, p in part.model[0].named_parameters()
                if n == name and not p.is_meta
            ]
            assert torch.allclose(held.grad, parameter.grad, atol=1e-14), name
        if not live:
            buffers = [
                (n, b) for part in parts for n, b in part.model[0].named_buffers() if not b.is_meta
            ]
            assert all(torch.equal(b, dict(model.named_buffers())[n]) for n, b in buffers)
    assert not any(part.runs for part in parts)


def test_nothing_before_a_stage_is_computed_again():
    model = Blocks().double()
    last = cut(model, stages_of(model))[-1]
    calls = []
    last.model[0].first.register_forward_pre_hook(lambda *_: None)
    plain = nn.functional.linear
    received = torch.randn(6, 8, dtype=torch.float64)
    try:
        nn.functional.linear = lambda x, *rest: calls.append(x.is_meta) or plain(x, *rest)
        last(received)
        first, again = list(calls), calls.clear()
        last.live = True
        last(received)
    finally:
        nn.functional.linear = plain
    assert again is None
    assert first == [True] * 5 + [False]  # once for the shapes …
    assert calls == [False]  # … and then only this part


@pytest.mark.parametrize(("make", "words"), [(PastParameters, "(6, 1)"), (Asking, "blocks.0")])
def test_a_model_that_cannot_be_cut_is_refused(make, words):
    model = make().double()
    parts = cut(model, stages_of(model))
    with pytest.raises(UsageError) as refused:
        there_and_back(parts, live=True)
    assert words in refused.value.problem
    assert "--schedule" in refused.value.fix


@pytest.mark.parametrize("masked", [0, 1])
def test_a_micro_batch_with_another_number_of_tensors_is_refused(masked):
    """The next stage once failed with a KeyError, or waited for tensors that no stage sent."""
    model = Masking().double()
    first = cut(model, stages_of(model))[0]
    micros = [X, X]
    micros[masked] = X + 10.0 * (torch.arange(8) == 0)
    first.inputs = micros
    assert len(first()) == 1 + (masked == 0)
    first.live, first.micro_number = True, 1
    with pytest.raises(UsageError) as refused:
        first()
    assert "--schedule" in refused.value.fix


def test_a_trial_leaves_the_inputs_as_they_are():
    """A model that changes its inputs in place once changed them twice: in the trial and in
    training."""
    model = Changing().double()
    first, inputs = cut(model, stages_of(model))[0], X.clone()
    first.inputs = [inputs]
    first()
    assert torch.equal(inputs, X)


@pytest.mark.parametrize("kinds", [["state"], ["random"], ["state", "random"]])
def test_stages_of_a_forward_that_is_held_fixed(kinds):
    """Every stage runs the whole forward, most of it on shapes. Read-only buffers and seeded draws
    must work there too."""

    class Restless(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            self.mean.add_(x.detach().mean(0) if "state" in kinds else 0.0)
            return x - self.mean + (torch.randn_like(x) if "random" in kinds else 0.0)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8), Restless(), nn.Linear(8, 8), Restless(), nn.Linear(8, 3)
    ).double()
    stages = stages_of(model)
    with controlled(model, kinds, X[:3]):
        expected = model(X).square().mean().item()
        parts = cut(model, stages)
        assert len(parts) > 3
        for live in (False, True, True):
            assert there_and_back(parts, live).item() == pytest.approx(expected, abs=1e-14)
