"""Converting to fp64 includes complex numbers. Otherwise, the rounding of complex64 looks like a
difference between strategies."""

import torch
from torch import nn

from paralab.workload.fp64 import batch_in_fp64, model_in_fp64


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
