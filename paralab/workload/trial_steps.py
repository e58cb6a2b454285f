"""Learn from a few forwards on one device what a plan must know.

Does the forward draw random numbers, change buffers, or skip submodules? Is the loss of a batch the
mean of the losses of its parts? If not, no way of splitting a batch can be right."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from paralab.errors import UsageError
from paralab.workload.batch import call_model, map_tensors, num_samples, take, tensors, unpack
from paralab.workload.layers import reachable
from paralab.workload.proof_controls import controlled, seeded_loss
from paralab.workload.randomness import seed_everything
from paralab.workload.state import changes, put_back, state_of
from paralab.workload.workload import Workload

BRANCH_SECONDS = 0.2  # for looking which parameters single samples use
MOST_BRANCHES = 64
MOST_SINGLES = 16  # samples whose loss is computed alone
OUTSIDE = "something outside the model"


@dataclass(frozen=True)
class Trial:
    """unused     trainable parameters that some samples, or all, give no gradient
    sparse     parameters whose gradient is a sparse tensor
    sometimes  sub-modules that are called for some samples, or in some calls, and not in others
    scalar     the model's output has a number in it, which is not per sample
    """

    unused: tuple[str, ...]
    sparse: tuple[str, ...]
    sometimes: tuple[str, ...]
    scalar: bool
    flops_per_sample: float | None
    dropout: bool
    random: bool
    state: tuple[str, ...]
    batch_norms: int


class Calls:
    """Which sub-modules are called, and how often."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.counts: list[Counter[str]] = []

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        counts: Counter[str] = Counter()
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                if name:
                    hooks.callback(
                        module.register_forward_pre_hook(
                            lambda *_, name=name: counts.update([name])
                        ).remove
                    )
            yield counts
        self.counts.append(counts)

    @property
    def sometimes(self) -> tuple[str, ...]:
        names = sorted({name for counts in self.counts for name in counts})
        return tuple(name for name in names if len({counts[name] for counts in self.counts}) > 1)


def try_step(workload: Workload, model: nn.Module, batch: Any, more: Callable[[], Any]) -> Trial:
    """Run forward and backward on two samples, so that mistakes show before anything starts, then a
    few forwards.

    `more` returns a larger batch, to find samples that take another branch. Leaves the model as it
    was."""
    split = workload.unpack or unpack
    two = take(batch, 0, 2)
    calls = Calls(model)
    before = state_of(model)

    def loss_of(samples: Any, seed: int = 0) -> Any:
        seed_everything(seed)
        inputs, targets = split(samples)
        return workload.loss(call_model(model, inputs), targets)

    counter = FlopCounterMode(display=False)
    # The counter does not know a CPU's fused attention; as plain matrix products it does.
    with counter, sdpa_kernel(SDPBackend.MATH), _batch_norms() as norms:
        with (
            calls.counting()
        ):  # not the backward pass, in which activation checkpointing calls modules again
            loss = loss_of(two)
        if isinstance(loss, torch.Tensor) and not loss.ndim and loss.requires_grad:
            loss.backward()
    _require_number(workload, loss)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    unused = {name for name, p in trained if p.grad is None}
    sparse = tuple(
        name for name, p in trained if p.grad is not None and p.grad.layout != torch.strided
    )
    model.zero_grad(set_to_none=True)
    with suppress(Exception):  # data that gives no larger batch
        batch = more()
    unused |= _unused_by_some(workload, model, batch, calls)
    with torch.no_grad():
        dropout, random, state = _what_changes(model, lambda seed: loss_of(two, seed), calls)
        scalar = any(not tensor.ndim for tensor in tensors(call_model(model, split(two)[0])))
    put_back(model, before)
    recurrent = any(
        isinstance(module, nn.RNNBase) for module in model.modules()
    )  # whose operators the counter does not know
    flops = None if recurrent else counter.get_total_flops() / num_samples(split(two)[0]) or None
    missing = tuple(name for name, _ in trained if name in unused)
    return Trial(missing, sparse, calls.sometimes, scalar, flops, dropout, random, state, norms[0])


def _require_number(workload: Workload, loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.ndim or not loss.requires_grad:
        what = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor) and loss.ndim
            else f"{loss!r:.60}"
        )
        raise UsageError(
            f"loss(output, target) of {workload.name} returned {what}, not one number that depends on the model.",
            fix="a mean, e.g. torch.nn.functional.cross_entropy(output, target)",
        )


@contextmanager
def _batch_norms() -> Iterator[list[int]]:
    """How often a forward normalizes over the batch, as a module or as a function."""
    original, found = nn.functional.batch_norm, [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        training = kwargs.get("training", args[5] if len(args) > 5 else False)
        found[0] += bool(training)
        return original(*args, **kwargs)

    nn.functional.batch_norm = counted
    try:
        yield found
    finally:
        nn.functional.batch_norm = original


def _unused_by_some(workload: Workload, model: nn.Module, batch: Any, calls: Calls) -> set[str]:
    """Parameters that single samples give no gradient: ranks would differ in what they use."""
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    samples = num_samples((workload.unpack or unpack)(batch)[0])
    unused: set[str] = set()
    until = time.perf_counter() + BRANCH_SECONDS
    with _settled(model):
        for number in range(min(samples, MOST_BRANCHES)):
            if time.perf_counter() > until:
                break
            with suppress(Exception), calls.counting():  # a model may not take a single sample
                inputs, targets = (workload.unpack or unpack)(take(batch, number, number + 1))
                loss = workload.loss(call_model(model, inputs), targets)
                used = set(reachable(loss))
                unused |= {name for key, name in trained.items() if key not in used}
    return unused


@contextmanager
def _settled(model: nn.Module) -> Iterator[None]:
    """Dropout off and BatchNorm frozen; what the forward changes is put back at the end."""
    before = state_of(model)
    with controlled(model, ["batch_norm"]):
        yield
    put_back(model, before)


def _what_changes(
    model: nn.Module, loss: Callable[[int], Any], calls: Calls
) -> tuple[bool, bool, tuple[str, ...]]:
    """(does only dropout draw random numbers, does something else, what does a forward change in
    the model).

    Two calls with different seeds from the same state tell whether numbers are drawn; two with the
    same seed, one after the other, what is left behind. BatchNorm's statistics, which are known to
    change, are frozen."""
    with _settled(model):
        first = state_of(model)
        kept = []
        for _ in range(2):
            with calls.counting():
                loss(1)
            kept.append(state_of(model))
        state = changes(*kept)

        def again(seed: int) -> Any:
            put_back(model, kept[0])
            return loss(seed)

        random = not _close(again(1), again(2))
        steady = _close(again(1), again(1))
        put_back(model, first)
    if not steady:
        state, random = [*state, OUTSIDE], False
    first = state_of(model)
    drawn = []
    for seed in (1, 2):
        put_back(model, first)
        drawn.append(loss(seed))
    put_back(model, first)
    return not random and steady and not _close(*drawn), random, tuple(state)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal; on a GPU, whose sums may come in any order, as good as equal."""
    if one.is_cuda:
        return torch.allclose(one, other, rtol=1e-6, equal_nan=True)
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def split_problem(
    workload: Workload, model: nn.Module, batch: Any, kinds: tuple[str, ...]
) -> str | None:
    """Why a batch of this workload cannot be split at all, found on one device in fp64: its halves,
    and a third and the rest, must have the loss of the whole as their weighted mean, and every
    sample the output that it has in the whole batch. None: they do.

    The model is changed: this is the last question asked of it."""
    split, weigh = workload.unpack or unpack, workload.weight or num_samples
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model.double()
        batch = map_tensors(lambda t: t.double() if t.is_floating_point() else t, batch)
        samples = num_samples(split(batch)[0])
        if samples < 4:
            return None
        alone = min(samples - 1, MOST_SINGLES)
        ways = [[samples // 2], [max(1, samples // 3)], list(range(1, alone + 1))]
        outputs = _Outputs(model)
        if "random" in kinds:
            workload = replace(workload, loss=seeded_loss(workload.loss))
        with controlled(model, kinds, split(take(batch, 0, 3))[0]), torch.no_grad():
            whole = outputs.loss(workload, batch)
            of_whole = outputs.last
            for cuts in ways:
                edges = [0, *cuts, samples]
                parts = [take(batch, *edge) for edge in pairwise(edges)]
                shares = [float(weigh(part)) for part in parts]
                losses, of_parts = [], []
                try:
                    for part in parts:
                        losses.append(outputs.loss(workload, part))
                        of_parts.append(outputs.last)
                except Exception:  # a model may not take a single sample; the ranks will say so if they come to one
                    continue
                if mixed := _mixed(
                    of_whole, of_parts, [stop - start for start, stop in pairwise(edges)]
                ):
                    return mixed
                if problem := _not_a_mean(whole, losses, shares, workload.weight is not None):
                    return problem
    finally:
        torch.set_default_dtype(before)
    return None


def _not_a_mean(
    whole: float, losses: list[float], shares: list[float], weighted: bool
) -> str | None:
    counting = [
        (loss, share) for loss, share in zip(losses, shares, strict=True) if share
    ]  # a mean over nothing is not a number
    losses, total = [loss for loss, _ in counting], sum(shares) or 1.0
    mean = sum(loss * share for loss, share in counting) / total
    size = max(abs(whole), *map(abs, losses), 1e-30)
    if abs(whole - mean) <= 1e-9 * size or not all(map(math.isfinite, [whole, *losses])):
        return None
    over = "what `weight` counts" if weighted else "the samples"
    listed = (
        " and ".join(f"{loss:.6g}" for loss in losses[:2])
        if len(losses) == 2
        else f"{losses[0]:.6g} and so on"
    )
    numbers = f"the loss of one batch is {whole:.6g}, of its {len(losses)} parts {listed}, whose mean is {mean:.6g}"
    if abs(whole - sum(losses)) <= 1e-9 * size:
        return f"the loss is a sum over {over}, not a mean: {numbers}"
    squares = sum(loss**2 * share for loss, share in counting) / total
    if abs(whole**2 - squares) <= 1e-9 * size**2:
        return f"the loss is the square root of a mean over {over}, which is not the mean of its parts: {numbers}"
    low, high = min(losses), max(losses)
    if len(losses) == 2 and low < whole < high:
        share, given = (whole - losses[1]) / (losses[0] - losses[1]), counting[0][1] / total
        return (
            f"the loss is not a mean over {over}: {numbers}. It would be a mean if the first part weighed {share:.1%} instead of "
            f"{given:.1%}, as with class weights or ignored targets: give the workload a `weight`"
        )
    return f"the loss is not a mean over {over}: {numbers}"


class _Outputs:
    """Calls a model, and keeps the output of every sub-module, in the order in which they end."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.last: dict[str, list[torch.Tensor]] = {}

    def loss(self, workload: Workload, batch: Any) -> float:
        found: dict[str, list[torch.Tensor]] = {}
        inputs, targets = (workload.unpack or unpack)(batch)
        seed_everything(0)
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():

                def keep(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                    found.setdefault(name, []).extend(
                        t.detach().clone() for t in tensors(output) if t.is_floating_point()
                    )

                hooks.callback(module.register_forward_hook(keep).remove)
            output = call_model(self.model, inputs)
        self.last = found
        return float(workload.loss(output, targets))


def _mixed(
    whole: dict[str, list[torch.Tensor]],
    parts: list[dict[str, list[torch.Tensor]]],
    sizes: list[int],
) -> str | None:
    """The first sub-module whose output for a sample depends on the others in the batch."""
    for name, outputs in whole.items():
        for number, tensor in enumerate(outputs):
            pieces = [
                part[name][number] for part in parts if len(part.get(name, [])) == len(outputs)
            ]
            fitting = [
                p.ndim and tensor.ndim and p.shape == (size, *tensor.shape[1:])
                for p, size in zip(pieces, sizes, strict=False)
            ]
            if (
                len(pieces) < len(sizes)
                or not all(fitting)
                or len(tensor) != sum(sizes)
                or not tensor.numel()
            ):
                continue
            worst = float((torch.cat(pieces) - tensor).abs().max())
            if worst > 1e-9 * max(float(tensor.abs().max()), 1e-30):
                where = f"{name!r}" if name else "the model"
                return f"{where} mixes the samples of a batch: its output for one changes by {worst:.2g} when others are left out"
    return None
