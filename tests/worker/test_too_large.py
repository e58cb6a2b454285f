"""paralab plans a model with a trillion parameters on this machine, which does not have the
memory for it."""

import pytest
import torch

from paralab.worker.inspection import inspect_workload as inspecting
from paralab.worker.inspection import too_large
from paralab.worker.inspection.too_large import fake_if_too_large
from paralab.workload.summary import Inspection
from tests.worker.one_rank import make_workload

WIDE = 2**20


def huge():
    layers = [torch.nn.Linear(3, WIDE), torch.nn.Dropout(0.1), torch.nn.Linear(WIDE, WIDE)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDE, 2))


def inspect(monkeypatch, model, **fields):
    monkeypatch.setattr(inspecting, "load_workload", lambda name: make_workload(model=model))
    monkeypatch.setattr(inspecting.gc, "freeze", lambda: None)
    asked = Inspection("own.py:workload", "cpu", layers=True, units=True, **fields)
    return inspecting.inspect_workload(asked)


def test_a_huge_model(monkeypatch):
    found = inspect(monkeypatch, huge, large=True)
    assert found.too_large
    assert found.parameters > WIDE**2
    assert (found.dropout, found.unused, found.optimizer) == (True, (), "SGD")
    assert [layer.parameter_bytes for layer in found.layers][-2:] == [
        4 * (WIDE**2 + WIDE),
        8 * WIDE + 8,
    ]
    assert {layer.seconds for layer in found.layers} == {0.0}
    assert max(unit.parameter_bytes for unit in found.units) == 4 * (WIDE**2 + WIDE)
    assert found.optimizer_bytes_per_byte == 1.0  # momentum


def test_a_model_that_fits_is_inspected_with_data(monkeypatch):
    small = lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))  # noqa: E731
    found = inspect(monkeypatch, small, large=True)
    assert not found.too_large
    assert all(layer.seconds > 0 for layer in found.layers)


@pytest.mark.parametrize(("memory", "is_fake"), [(64, False), (63, True), (None, False)])
def test_the_parameters_and_gradients_must_fit(monkeypatch, memory, is_fake):
    """8 parameters of 4 bytes and their gradients need 64 bytes."""
    monkeypatch.setattr(too_large, "memory_bytes", lambda: memory)
    assert (fake_if_too_large(make_workload(), "cpu") is not None) is is_fake


def test_a_model_that_cannot_be_built_on_the_meta_device(monkeypatch):
    """The model reads a value, which has no fake counterpart. Assume that it fits."""
    monkeypatch.setattr(too_large, "memory_bytes", lambda: 1)

    def model():
        layer = torch.nn.Linear(3, 2)
        assert float(layer.weight.detach().sum()) < 100
        return layer

    assert fake_if_too_large(make_workload(model=model), "cpu") is None
