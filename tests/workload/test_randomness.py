"""Seeding draws the same numbers again, and without a GPU it does not call torch's slow function."""

import random

import numpy
import pytest
import torch

from paralab.workload.randomness import seed_everything


def draw():
    return torch.rand(1).item(), random.random(), numpy.random.rand()


def test_the_same_seed_draws_the_same_numbers():
    seed_everything(3)
    first = draw()
    assert draw() != first
    seed_everything(3)
    assert draw() == first


@pytest.mark.parametrize("has_gpu", [True, False])
def test_all_gpus_are_seeded_if_there_are_any(monkeypatch, has_gpu):
    """A proof seeds thousands of times. Without a GPU, `torch.manual_seed` took 5 % of its time."""
    seeds = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    seed_everything(3)
    seed_everything(4, gpus=False)
    assert seeds == [3] * has_gpu
