"""Converting to fp64 includes complex numbers. Otherwise, the rounding of complex64 looks like a
difference between strategies."""

import pytest
import torch
from torch import nn

from paralab.workload.fp64 import batch_in_fp64, loss_in_fp64, model_in_fp64


def test_complex_parameters_and_inputs_are_converted():
    model = nn.Module()
    model.a = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.b = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    model.register_buffer("n", torch.ones(2, dtype=torch.int32))
    model_in_fp64(model)
    assert (model.a.dtype, model.b.dtype) == (torch.complex128, torch.float64)
    assert model.n.dtype == torch.int32
    x, y = batch_in_fp64((torch.ones(2, dtype=torch.complex64), torch.ones(2)))
    assert (x.dtype, y.dtype) == (torch.complex128, torch.float64)


def test_plain_attributes_are_converted():
    """The weights of a random projection are often neither parameters nor buffers."""
    model = nn.Linear(4, 2)
    model.projection = torch.ones(2, 4)
    model.chosen = torch.tensor([1])
    model_in_fp64(model)
    assert (model.projection.dtype, model.chosen.dtype) == (torch.float64, torch.int64)


def test_a_loss_may_have_tensors_in_fp32():
    weight = torch.tensor([1.0, 3.0])
    output = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 1, 1, 0])
    with pytest.raises(RuntimeError):
        nn.CrossEntropyLoss(weight)(output, target)
    loss = loss_in_fp64(nn.CrossEntropyLoss(weight))(output, target)
    assert torch.equal(loss, nn.CrossEntropyLoss(weight.double())(output, target))
    with pytest.raises(RuntimeError):  # a converted copy would lose the change
        loss_in_fp64(lambda o, t: weight.index_add_(0, t, o[:, 0]).sum())(output, target)
