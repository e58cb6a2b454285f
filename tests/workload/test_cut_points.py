"""Find where a model can be cut, from its own forward pass."""

import pytest
import torch
from torch import nn

from paralab.errors import UsageError
from paralab.workload.cut_points import find_layers


def cut(model, inputs=None, split_points=()):
    x = torch.randn(8, 4) if inputs is None else inputs
    return find_layers(model, x, lambda output: output.square().mean(), split_points)


class Chain(nn.Module):
    """The forward is a chain of the children, with functions between them."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))).flatten(1))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(x)))


class Skipping(nn.Module):
    """The head also uses the encoder's output, bypassing the body."""

    def __init__(self):
        super().__init__()
        self.encoder, self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        early = self.encoder(x)
        return self.head(self.body(early) + early)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.third.weight = self.first.weight

    def forward(self, x):
        return self.third(self.second(self.first(x)))


class OwnParameter(nn.Module):
    def __init__(self, late=False):
        super().__init__()
        self.shift, self.late = nn.Parameter(torch.zeros(4)), late
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.third(self.second(self.first(x + self.shift)))
        return x + self.shift if self.late else x


def test_a_sequential_is_cut_at_every_layer():
    layers, reason = cut(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    assert [(layer.name, layer.modules) for layer in layers] == [
        ("", ("0",)),
        ("1", ()),
        ("2", ("2",)),
    ]
    assert reason is None


def test_a_chain_of_children_needs_no_sequential():
    layers, _ = cut(Chain())
    assert [layer.modules for layer in layers] == [("first",), ("middle",), ("last",)]


def test_nested_containers_are_cut_once_per_place():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        nn.Sequential(nn.Sequential(nn.Linear(4, 4))),
    )
    assert [layer.modules for layer in cut(model)[0]] == [("0.0",), ("0.1",), ("1.0.0",)]


def test_a_residual_block_stays_whole():
    layers, reason = cut(nn.Sequential(Residual(), Residual()))
    assert [layer.modules for layer in layers] == [("0.inner", "0.outer"), ("1.inner", "1.outer")]
    assert "'0.inner'" in reason
    assert "input" in reason


def test_the_reason_names_what_crosses_a_cut():
    layers, reason = cut(Skipping())
    assert [layer.modules for layer in layers] == [("encoder", "body"), ("head",)]
    assert "'body'" in reason
    assert "'encoder'" in reason


def test_tied_weights_are_refused_with_the_reason():
    layers, reason = cut(Tied())
    assert len(layers) == 1
    assert all(word in reason for word in ("'first'", "'third'", "tied"))


class Returned(OwnParameter):
    """Multiple losses, with trained weights in the output."""

    def forward(self, x):
        return self.second(self.first(x)) * self.shift.sum(), self.shift


def test_a_parameter_in_the_output_is_used_in_the_last_part():
    model = Returned()
    loss = lambda output: output[0].mean() + output[1].sum()  # noqa: E731
    assert len(find_layers(model, torch.randn(8, 4), loss)[0]) == 1


class InPlace(Chain):
    def forward(self, x):
        return super().forward(x.sub_(1.0))


def test_a_model_may_change_its_inputs_in_place():
    """An input that requires a gradient cannot be changed in place, so paralab once refused the
    model."""
    x = torch.randn(8, 4)
    before = x.clone()
    layers, _ = cut(InPlace(), x)
    assert [layer.modules for layer in layers] == [("first",), ("middle",), ("last",)]
    assert torch.equal(x, before)


@pytest.mark.parametrize("late", [False, True])
def test_a_parameter_of_the_whole_model_is_in_the_part_that_uses_it(late):
    """A vision transformer has its position embedding in the model itself. paralab once refused
    it."""
    model = OwnParameter(late)
    layers, reason = cut(model)
    if late:  # the shift is used in the middle and at the end
        assert len(layers) == 1
        assert "'the model'" in reason
    else:
        assert [layer.modules for layer in layers] == [("", "first"), ("second",), ("third",)]
        assert reason is None


def test_a_cut_divides_no_buffers_and_no_frozen_parameters():
    """The graph does not show where a forward uses these."""
    outer = nn.Sequential(nn.Linear(4, 4), OwnParameter(), nn.Linear(4, 4))
    parts = [("0",), ("1", "1.first"), ("1.second",), ("1.third",), ("2",)]
    assert [layer.modules for layer in cut(outer)[0]] == parts
    outer[1].shift.requires_grad_(False)
    assert [layer.modules for layer in cut(outer)[0]] == parts

    outer[1].late = True
    whole = ("1", "1.first", "1.second", "1.third")
    layers, reason = cut(outer)
    assert [layer.modules for layer in layers] == [("0",), whole, ("2",)]
    assert "module '1'" in reason
    del outer[1].shift
    outer[1].register_buffer("shift", torch.ones(1, 4).expand(8, 4))
    assert [layer.modules for layer in cut(outer)[0]] == [("0",), whole, ("2",)]
    outer[1].late = False
    assert [layer.modules for layer in cut(outer)[0]] == parts


def test_a_model_without_cuts_is_one_part():
    """`hybrid --stages 1` needs no cuts, but paralab once refused a model without parts."""
    model = OwnParameter(late=True)
    model.shift.requires_grad_(False)
    model.register_buffer("scale", torch.ones(4))
    layers, reason = cut(model)
    assert [layer.modules for layer in layers] == [("", "first", "second", "third")]
    assert "the model itself" in reason


def test_a_module_that_is_called_twice_is_named():
    """The reason was once missing."""

    class Twice(Chain):
        def forward(self, x):
            return super().forward(x) + super().forward(x.flip(0))

    layers, reason = cut(Twice())
    assert len(layers) == 1
    assert "'first'" in reason
    assert "2 times" in reason


class Unused(Chain):
    def __init__(self):
        super().__init__()
        self.never = nn.Linear(3, 3)


def test_a_module_that_is_never_called_does_not_keep_a_model_from_being_cut():
    assert [layer.modules for layer in cut(Unused())[0]] == [
        ("first", "never"),
        ("middle",),
        ("last",),
    ]


def test_split_points_are_obeyed_and_checked():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    assert [layer.modules for layer in cut(model, split_points=["2"])[0]] == [
        ("0", "1"),
        ("2", "3"),
    ]
    with pytest.raises(UsageError, match="no such submodule"):
        cut(model, split_points=["7"])
    with pytest.raises(UsageError, match="'encoder'"):
        cut(Skipping(), split_points=["body"])


def test_time_is_measured_not_counted():
    layers, _ = cut(
        nn.Sequential(nn.Linear(4, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 4)),
        torch.randn(64, 4),
    )
    assert max(layers, key=lambda layer: layer.seconds).name == "1"
    assert sum(layer.parameter_bytes for layer in layers) == 4 * (
        4 * 2048 + 2048 * 2048 + 2048 * 4 + 2048 * 2 + 4
    )


def test_finding_layers_leaves_the_model_unchanged():
    model = Chain()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cut(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
