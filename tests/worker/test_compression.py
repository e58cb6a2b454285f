"""What a rank sends instead of gradients, on one rank."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paralab.errors import ParalabError
from paralab.worker.compression import PowerSgd, make_compression
from paralab.worker.power_sgd import compress, orthonormal, starting_vectors
from tests.worker.one_rank import group_of_one

LARGE = 1e5  # more than fp16's largest number


class Bucket:
    """The part of DDP's bucket that a hook uses."""

    def __init__(self, parameters, flat):
        self.owners, self.flat = parameters, flat

    def buffer(self):
        return self.flat

    def gradients(self):
        parts = self.flat.split([each.numel() for each in self.owners])
        return [part.view(each.shape) for part, each in zip(parts, self.owners, strict=True)]

    def parameters(self):
        return self.owners

    def index(self):
        return 0

    def is_last(self):
        return True


class Sent(list):
    """Replaces `begin_collective`, and lists the kinds and bytes that were sent."""

    def __call__(self, kind, tensor):
        self.append((kind, tensor.nbytes))
        return lambda: None


def plan(kind, **more):
    defaults = {"compress": kind, "seed": 0, "powersgd_rank": 1, "control": (), "scaler": False}
    return SimpleNamespace(**(defaults | more))


@pytest.fixture(scope="module")  # gloo once crashed when the group ended right after a collective
def group():
    with group_of_one() as group:
        yield group


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(12, 10)  # 120 + 10 parameters


def reduce(compression, model, flat):
    sent = Sent()
    return compression.reduce(Bucket(list(model.parameters()), flat), sent).wait(), sent


@pytest.mark.parametrize(("kind", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("control", [(), ("rank_order",)])
def test_casts_send_two_bytes_per_number(group, model, kind, dtype, control):
    flat = torch.randn(130)
    compression = make_compression(plan(kind, control=control), group, model)
    reduced, sent = reduce(compression, model, flat.clone())
    assert reduced.equal(flat.to(dtype).float())
    assert sent == [("all_gather" if control else "all_reduce", 260)]
    compression.require_finite(0)


def test_an_overflow_in_fp16_is_an_error_unless_a_scaler_skips_the_step(group, model):
    flat = torch.full((130,), LARGE)
    for kind, scaler in (("bf16", False), ("fp16", True)):
        compression = make_compression(plan(kind, scaler=scaler), group, model)
        reduce(compression, model, flat.clone())
        compression.require_finite(0)
    compression = make_compression(plan("fp16"), group, model)
    reduced, _ = reduce(compression, model, flat.clone())
    assert reduced.isinf().all()
    with pytest.raises(ParalabError) as error:
        compression.require_finite(3)
    assert "--compress bf16" in error.value.fix


def test_powersgd_sends_thin_matrices_and_feeds_back_the_rest(group, model):
    """10 rows and 12 columns, and a bias that is not compressed: 10 numbers, 10, and 12."""
    compression = PowerSgd(plan("powersgd"), group, model)
    gradients = [torch.randn(130, dtype=torch.float64) for _ in range(5)]
    model.double()
    for gradient in gradients[:2]:  # DDP rebuilds its buckets
        reduced, sent = reduce(compression, model, gradient.clone())
        assert reduced.equal(gradient)
        assert sent == [("all_reduce", 130 * 8)]

    vectors, rest = starting_vectors(torch.empty(10, 12, dtype=torch.float64), 1, 0), 0.0
    for number, gradient in enumerate(gradients[2:]):
        if number == 2:  # a resumed run, with its own compression
            state = compression.own_state()
            compression = PowerSgd(plan("powersgd"), group, model)
            compression.restore_own(state)
        reduced, sent = reduce(compression, model, gradient.clone())
        assert sent == [("all_reduce", 80), ("all_reduce", 80), ("all_reduce", 96)]
        wanted = gradient[:120].view(10, 12) + rest
        mean, vectors = compress([wanted], vectors)
        rest = wanted - mean
        torch.testing.assert_close(reduced[:120].view(10, 12), mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(reduced[120:], gradient[120:], rtol=0, atol=1e-12)


def test_with_other_buckets_powersgd_starts_again(group, model):
    compression = PowerSgd(plan("powersgd"), group, model)
    for _ in range(3):
        reduce(compression, model, torch.randn(130))
    assert set(compression.state.error_dict) == {0}
    flat = torch.randn(120)
    first = Bucket([model.weight], flat.clone())
    compression.reduce(first, Sent()).wait()
    mean, _ = compress([flat.view(10, 12)], starting_vectors(flat.view(10, 12), 1, 0))
    torch.testing.assert_close(first.flat.view(10, 12), mean)


def test_the_theory():
    matrix = torch.outer(torch.arange(1.0, 7.0), torch.arange(1.0, 9.0)).double()
    mean, _ = compress([matrix, 3 * matrix], starting_vectors(matrix, 1, seed=5))
    torch.testing.assert_close(mean, 2 * matrix)  # of rank 1
    assert starting_vectors(torch.empty(4, 4), 1, 0) is None  # (4 + 4) · 1 · 2 is not below 4 · 4
    assert starting_vectors(torch.empty(9, 1), 1, 0) is None
    for rank in (2, 3):
        q = orthonormal(torch.randn(7, rank, dtype=torch.float64))
        torch.testing.assert_close(q.T @ q, torch.eye(rank).double(), atol=1e-6, rtol=0)
    assert orthonormal(torch.zeros(5, 1)).equal(torch.zeros(5, 1))
