"""Copying and restoring a model's state."""

import torch
from torch import nn

from paralab.workload.state import copy_of, restored


class Keeping(nn.Module):
    """It keeps an activation, which has a graph."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(2, 2), 0

    def forward(self, x):
        self.calls += 1
        self.kept = self.layer(x)
        return self.kept


def test_a_model_that_keeps_an_activation_can_be_copied():
    model = Keeping()
    model(torch.ones(1, 2))
    copied = copy_of(model)
    assert copied.kept.equal(model.kept)
    assert copied.kept.grad_fn is None
    assert copied.layer.weight.data_ptr() != model.layer.weight.data_ptr()


def test_restored_also_deletes_new_attributes():
    model = Keeping()
    with restored(model):
        model(torch.ones(1, 2))
        assert model.calls == 1
    assert model.calls == 0
    assert "kept" not in vars(model)
