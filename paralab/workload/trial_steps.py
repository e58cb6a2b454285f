"""Run the model a few times on one device to determine the facts that a plan needs.

For example, does a forward pass draw random numbers, change buffers, or skip submodules? Which
parameters get a gradient?"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from paralab.errors import UsageError
from paralab.workload.batch import call_model, copied, num_samples, take, tensors, unpack
from paralab.workload.cut_points import reachable
from paralab.workload.flops import FlopCounter
from paralab.workload.hooks import patched, watched
from paralab.workload.randomness import seed_everything
from paralab.workload.shard_units import ParameterUse
from paralab.workload.state import State, changes, put_back, state_of
from paralab.workload.summary import Trial
from paralab.workload.verify_controls import controlled
from paralab.workload.workload import Workload

BRANCH_SECONDS = 0.2  # time limit for finding the parameters that single samples use
MOST_BRANCHES = 64
OUTSIDE = "something outside the model"


@contextmanager
def _counting(model: nn.Module, calls: list[Counter[str]]) -> Iterator[None]:
    """Count how many times each submodule is called in this context, and append the counts to
    `calls`."""
    counts: Counter[str] = Counter()
    with watched(model, enter=lambda name, _: counts.update([name])):
        yield
    calls.append(counts)


class _Loss:
    """Computes the loss of some samples, and notes what the forward pass and the loss do."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        self.workload, self.model = workload, model
        self.split = workload.unpack or unpack
        self.use = ParameterUse(model)  # parameters that the loss reads itself
        self.inner_backward = False  # whether a backward pass runs before the loss is known

    def __call__(self, samples: Any, seed: int = 0) -> Any:
        seed_everything(seed)
        inputs, targets = self.split(copied(samples))
        autograd: Any = torch.autograd
        run = autograd._engine_run_backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self.inner_backward = True
            return run(*args, **kwargs)

        with patched(autograd, _engine_run_backward=run_backward):
            output = call_model(self.model, inputs)
            with self.use:
                return self.workload.loss(output, targets)


def try_step(
    workload: Workload,
    model: nn.Module,
    batch: Any,
    more: Callable[[], Any],
    has_values: bool = True,
) -> Trial:
    """Run forward and backward on two samples, to find mistakes before a run starts. Then call the
    model a few more times.

    `more` returns a larger batch, which may contain samples that take a different branch. The
    model's state is restored. Fake tensors have no values, so assume that the
    model draws random numbers only for dropout and changes no state."""
    two = take(batch, 0, 2)
    calls: list[Counter[str]] = []  # one per forward pass
    before = state_of(model)
    loss = _Loss(workload, model)
    flops, batch_norms = _train(loss, two, calls)

    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    unused = {name for name, p in trained if p.grad is None}
    sparse = [n for n, p in trained if p.grad is not None and p.grad.layout != torch.strided]
    model.zero_grad(set_to_none=True)
    with suppress(Exception):  # the data may be too small for a larger batch
        batch = more()
    unused |= _find_unused_by_some(workload, model, batch, calls)

    with torch.set_grad_enabled(loss.inner_backward):
        if has_values:
            dropout, random, state = _find_changes(model, lambda seed: loss(two, seed), calls)
        else:
            dropout, random, state = any(map(_drops, model.modules())), False, ()
        output = call_model(model, loss.split(copied(two))[0])
        unbatched = any(not tensor.ndim for tensor in tensors(output))
        with suppress(Exception):  # fewer samples, or a model that rejects this number
            three, _ = loss.split(copied(take(batch, 0, 3)))
            assert num_samples(three) == 3
            three = call_model(model, three)
            pairs = zip(tensors(output), tensors(three), strict=True)
            unbatched |= any(a.shape == b.shape for a, b in pairs)
    put_back(model, before)
    called = sorted(set().union(*calls))
    hooked = [name for name, p in trained if p._backward_hooks or p._post_accumulate_grad_hooks]
    return Trial(
        unused=tuple(name for name, _ in trained if name in unused),
        sparse=tuple(sparse),
        sometimes=tuple(name for name in called if len({each[name] for each in calls}) > 1),
        unbatched=unbatched,
        flops_per_sample=flops / num_samples(loss.split(two)[0]) or None,
        dropout=dropout,
        random=random,
        state=state,
        batch_norms=batch_norms,
        hooked=tuple(hooked),
        inner_backward=loss.inner_backward,
        read_by_loss=tuple(n for n, p in model.named_parameters() if id(p) in loss.use.users),
    )


def _train(loss: _Loss, samples: Any, calls: list[Counter[str]]) -> tuple[int, int]:
    """Run forward and backward. Return the FLOPs, or 0 if torch cannot count them, and how many
    times BatchNorm normalized over the batch."""
    counter = FlopCounter()
    # The counter does not support fused attention on a CPU, but it does count matrix products.
    with counter, sdpa_kernel(SDPBackend.MATH), _counting_batch_norms() as batch_norms:
        # Do not count in backward, where activation checkpointing calls modules again.
        with _counting(loss.model, calls):
            value = loss(samples)
        _require_loss(loss.workload, value)
        value.backward()
    recurrent = any(isinstance(module, nn.RNNBase) for module in loss.model.modules())
    return 0 if recurrent else counter.get_total_flops(), batch_norms[0]


def _require_loss(workload: Workload, loss: Any) -> None:
    if isinstance(loss, torch.Tensor) and not loss.ndim and loss.requires_grad:
        return
    what = f"{loss!r:.60}"
    if isinstance(loss, torch.Tensor) and loss.ndim:
        what = f"a tensor of shape {tuple(loss.shape)}"
    raise UsageError(
        f"loss(output, target) of {workload.name} returned {what}, not a single number that "
        "depends on the model.",
        fix="a mean, e.g. torch.nn.functional.cross_entropy(output, target)",
    )


@contextmanager
def _counting_batch_norms() -> Iterator[list[int]]:
    """Count how many times BatchNorm, as a module or a function, normalizes over the batch."""
    original, count = nn.functional.batch_norm, [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        training = kwargs.get("training", args[5] if len(args) > 5 else False)
        count[0] += bool(training)
        return original(*args, **kwargs)

    with patched(nn.functional, batch_norm=counted):
        yield count


def _find_unused_by_some(
    workload: Workload, model: nn.Module, batch: Any, calls: list[Counter[str]]
) -> set[str]:
    """Find parameters that get no gradient from some samples, so ranks may use different ones."""
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    split = workload.unpack or unpack
    unused: set[str] = set()
    deadline = time.perf_counter() + BRANCH_SECONDS
    with _settled(model):
        for number in range(min(num_samples(split(batch)[0]), MOST_BRANCHES)):
            if time.perf_counter() > deadline:
                break
            # The model may reject a single sample.
            with suppress(Exception), _counting(model, calls):
                inputs, targets = split(copied(take(batch, number, number + 1)))
                loss = workload.loss(call_model(model, inputs), targets)
                used = set(reachable(loss))
                unused |= {name for key, name in trained.items() if key not in used}
    return unused


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


@contextmanager
def _settled(model: nn.Module) -> Iterator[None]:
    """Turn off dropout and freeze BatchNorm. Afterward, restore the model's state."""
    before = state_of(model)
    with controlled(model, ["batch_norm"]):
        yield
    put_back(model, before)


def _find_changes(
    model: nn.Module, loss: Callable[[int], Any], calls: list[Counter[str]]
) -> tuple[bool, bool, tuple[str, ...]]:
    """Return whether only dropout draws random numbers, whether other code does, and which model
    state a forward pass changes.

    Two calls with different seeds, starting from the same state, show whether the model draws
    random numbers. Two calls in a row with the same seed show which state it changes. BatchNorm is
    frozen, because we already know that its statistics change."""

    def loss_from(state: State, seed: int) -> Any:
        put_back(model, state)
        return loss(seed)

    with _settled(model):
        states = []
        for _ in range(2):
            with _counting(model, calls):
                loss(1)
            states.append(state_of(model))
        changed = changes(*states)
        random = not _close(loss_from(states[0], 1), loss_from(states[0], 2))
        steady = _close(loss_from(states[0], 1), loss_from(states[0], 1))
    if not steady:
        changed, random = [*changed, OUTSIDE], False

    before = state_of(model)
    same = _close(loss_from(before, 1), loss_from(before, 2))
    return not random and steady and not same, random, tuple(changed)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two losses are equal. Allow rounding on a GPU, which adds in any order."""
    if one.is_cuda:
        return torch.allclose(one, other, rtol=1e-6, equal_nan=True)
    return torch.equal(one.nan_to_num(), other.nan_to_num())
