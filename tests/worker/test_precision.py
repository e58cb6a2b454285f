"""How each precision affects the model, the batch, and a step."""

import pytest
import torch
from torch import nn

from paralab.worker.precision import Precision
from tests.worker.one_rank import group_of_one, make_plan, make_workload


@pytest.fixture
def make(monkeypatch):
    """Create a precision by name and strategy. Afterward, restore the process's settings."""
    workload, dtype = make_workload(), torch.get_default_dtype()
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield lambda name, strategy="single", **options: Precision(
        make_plan(workload, strategy, precision=name, **options)
    )
    torch.set_default_dtype(dtype)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


@pytest.mark.parametrize(
    ("name", "strategy", "parameters", "output"),
    [
        ("fp64", "single", torch.float64, torch.float64),
        ("fp32", "single", torch.float32, torch.float32),
        ("bf16", "single", torch.float32, torch.bfloat16),
        ("fp16", "single", torch.float32, torch.float16),
        ("bf16", "fsdp", torch.float32, torch.float32),  # FSDP casts modules, not operators
    ],
)
def test_types(make, name, strategy, parameters, output):
    precision = make(name, strategy)
    model = precision.cast_model(nn.Linear(3, 2))
    batch = precision.cast_batch({"x": torch.randn(4, 3), "ids": torch.arange(4)})
    with precision.autocast():
        result = model(batch["x"])
    assert {p.dtype for p in model.parameters()} == {parameters}
    assert result.dtype == output
    assert batch["ids"].dtype == torch.int64


def step(precision, gradient):
    """One step of SGD with lr=1 on one number that starts at 0."""
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    precision.backward(parameter * gradient)
    precision.step(optimizer)
    return parameter.item()


def test_the_scaler_unscales_gradients_and_skips_infinite_ones(make):
    precision = make("fp16", loss_scale=8.0)
    loss = torch.zeros(())
    assert precision.scale_like(loss).item() == 8.0
    assert step(precision, 2.0) == -2.0
    assert step(precision, float("inf")) == 0.0  # skipped
    assert precision.scale_like(loss).item() == 4.0
    assert make("fp32").scale_like(loss) is None


def test_a_step_that_another_rank_skips_is_skipped(make, monkeypatch):
    precision = make("fp16", loss_scale=8.0)

    def reduce(flag, op, group):
        flag.fill_(1.0)  # the other rank has an infinite gradient

    monkeypatch.setattr("torch.distributed.all_reduce", reduce)
    with group_of_one() as group:
        precision.agreed_over = group
        assert step(precision, 2.0) == 0.0
