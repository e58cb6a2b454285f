"""Under verify's controls, forward gives each sample the same output, no matter how the batch is
split."""

import copy
from collections import Counter, defaultdict, deque

import pytest
import torch
from torch import nn

from paralab.workload.sample_draws import seeded_loss
from paralab.workload.state import changes, put_back, state_of
from paralab.workload.verify_controls import casts_in_vain, controlled

X = torch.randn(12, 8, dtype=torch.float64)


class Drawing(nn.Module):
    """The model draws random numbers in every layout that a forward may use."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x)
        h = h + torch.randn_like(h) + torch.rand(len(x), 1)
        h = h + torch.empty(8, len(x)).normal_().T  # samples along another axis
        h = h * torch.bernoulli(torch.full_like(h, 0.5))
        h = h + torch.rand(())  # one number for all samples
        tokens = h.reshape(len(x) * 2, 4)  # two rows per sample
        return (tokens + torch.randn(len(x) * 2, 4)).reshape(len(x), 8) + torch.dropout(
            h, 0.5, True
        )


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.history = nn.Linear(8, 8), 0, []
        self.register_buffer("mean", torch.zeros(8))
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        self.calls += 1
        self.history.append(len(x))
        self.mean.add_(x.mean(0))
        return self.linear(x) * self.calls + self.mean + len(self.history)


def norms():
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False, eps=1e-3)
    )


CASES = [(Drawing, "random"), (Counting, "state"), (norms, "batch_norm")]


@pytest.mark.parametrize(("make", "kind"), CASES)
@pytest.mark.parametrize("cuts", [[6, 6], [1, 11], [5, 4, 3], [8, 2, 2]])
def test_parts_of_a_batch_give_what_the_whole_gives(make, kind, cuts):
    torch.set_default_dtype(torch.float64)
    try:
        model = make()
        with torch.no_grad():
            if kind != "batch_norm" or 1 not in cuts:  # it rejects a single sample
                loose = torch.cat([model(part) for part in X.split(cuts)])
                assert not torch.allclose(loose, model(X))
            with controlled(model, [kind], X[:3]):
                whole = model(X)
                assert torch.allclose(torch.cat([model(part) for part in X.split(cuts)]), whole)
                # The controls also apply to a copy of the model (a replica).
                assert torch.allclose(copy.deepcopy(model)(X[:5]), whole[:5])
    finally:
        torch.set_default_dtype(torch.float32)


def test_noise_is_not_the_same_for_every_sample_and_every_draw():
    model = nn.Sequential(Drawing().double())
    with controlled(model, ["random"], X[:3]), torch.no_grad():
        noise = model(X) - model[0].linear(X)
    assert len({tuple(row) for row in noise.tolist()}) == len(X)
    assert len(set(noise.flatten().tolist())) > 50


def test_the_generator_of_the_process_does_not_advance():
    model = nn.Sequential(Drawing().double())
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with controlled(model, ["random"], X[:3]), torch.no_grad():
        model(X)
    assert torch.equal(torch.rand(4), expected)


def test_a_loss_that_draws_is_seeded_by_its_targets():
    loss = seeded_loss(lambda output, target: (output + torch.randn(len(target))).tolist())
    output, target = torch.zeros(6), torch.arange(6)
    whole = loss(output, target)
    assert loss(output[:2], target[:2]) + loss(output[2:], target[2:]) == whole
    assert len(set(whole)) == 6


def test_gradients_flow_through_a_held_forward():
    model = nn.Sequential(Counting().double(), Drawing().double())
    with controlled(model, ["state", "random"], X[:3]):
        model(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_state_is_copied_compared_and_restored():
    model = nn.Sequential(Counting().double())
    before = state_of(model)
    model(X)
    model[0].generator.manual_seed(5)
    after = state_of(model)
    assert changes(before, after) == ["0.mean", "0.calls", "0.history", "0.generator"]
    put_back(model, before)
    assert changes(before, state_of(model)) == []
    assert (model[0].calls, model[0].history) == (0, [])
    model(X)  # a copy was restored: the next forward does not change `before`
    put_back(model, before)
    assert model[0].history == []
    assert changes(before, before) == []


def test_a_buffer_with_two_names_stays_one():
    model = nn.Module()
    model.register_buffer("one", torch.zeros(2))
    model.register_buffer("two", model.one)
    put_back(model, state_of(model))
    assert model.one is model.two


def test_generators_and_tensors_inside_containers_are_restored():
    """A list of generators was once restored as a list of their states. Moving an item from one
    list to another is a change, and dict keys stay the same objects."""
    model, key = nn.Module(), object()
    weight = torch.ones(2, requires_grad=True)
    model.generators, model.queues = [torch.Generator()], [[1], [2]]
    model.outputs, model.by_object = deque([weight * 2]), {key: 1}
    before = state_of(model)
    first = torch.rand(3, generator=model.generators[0])
    model.queues[0].append(model.queues[1].pop())
    model.by_object[key] += 1
    assert changes(before, state_of(model)) == ["generators", "queues", "by_object"]

    put_back(model, before)
    assert torch.equal(torch.rand(3, generator=model.generators[0]), first)
    assert (model.queues, model.by_object) == ([[1], [2]], {key: 1})
    assert torch.equal(model.outputs[0], torch.full((2,), 2.0))


def test_a_counter_stays_a_counter():
    """A copy once counted pairs, and a defaultdict could not be copied."""
    model = nn.Module()
    model.calls, model.lists = Counter("aab"), defaultdict(list, a=[1])
    before = state_of(model)
    model.calls["a"] += 1
    model.lists["b"].append(2)
    assert changes(before, state_of(model)) == ["calls", "lists"]
    put_back(model, before)
    assert (model.calls, model.lists) == (Counter("aab"), {"a": [1]})
    assert model.lists["new"] == []


def test_a_cast_to_fp32_does_not_amplify_rounding_in_fp64():
    """Gemma's norms compute in fp32. `verify` once called ddp and tp wrong for it: 5e-9."""
    x = torch.full((4,), 1 / 3, dtype=torch.float64)
    with controlled(nn.Linear(1, 1), ["casts"]):
        softmax = nn.functional.softmax(x, dim=-1, dtype=torch.float32)
        casts = (x.float(), x.to(torch.float32), x.to(dtype=torch.float32), softmax)
        assert {each.dtype for each in casts} == {torch.float64}
        assert torch.ones(1).half().float().dtype is torch.float32
        assert x.to(torch.float16).dtype is torch.float16
    assert x.float().dtype is x.to(torch.float32).dtype is torch.float32


def test_casts_are_ignored_only_if_the_model_works_without_them():
    """Gemma's norms cast to fp32. verify once called ddp wrong, because the gradients differed
    by 5e-9."""
    numbers = torch.rand(3, 3, dtype=torch.float64)
    other = torch.ones(3, 3)
    assert casts_in_vain(lambda: numbers.float() + 1)
    assert casts_in_vain(lambda: torch.softmax(numbers, 0).to(torch.float32))
    assert not casts_in_vain(lambda: numbers + 1)
    assert not casts_in_vain(lambda: numbers.float() @ other)  # needs the cast
