"""Where a model can be cut into stages, found from one run of its own forward, and how long each
part takes.

A sub-module's call is a place to cut if everything that was computed before it and is used after it
passes through its arguments. A residual connection around it, or an encoder's output that a later
decoder uses, crosses such a cut: then it is none. To see that, every call's arguments get a marker
node in the autograd graph; a cut at marker i is clean when, from the output, no parameter used
before i can be reached without passing marker i.

    Sequential(a, b, Residual(c, d), e)     cuts: a | b | Residual | e       (d inside the residual is crossed by its input)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from paralab.errors import UsageError
from paralab.workload.batch import call_model, map_tensors, num_samples, tensors
from paralab.workload.summary import Layer

MEASUREMENTS = 3


class _Marker(torch.autograd.Function):
    """The identity, visible in the graph; stamps the time in both directions."""

    @staticmethod
    def forward(ctx: Any, trace: _Trace, call: int, *values: torch.Tensor) -> Any:
        ctx.trace, ctx.call = trace, call
        return tuple(
            value.clone() for value in values
        )  # not views: the module may change them in place

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.trace.came_back[ctx.call] = ctx.trace.now()
        return None, None, *grads


_MARKER_NODE: Any = _Marker._backward_cls  # the class of the nodes that _Marker leaves in the graph


@dataclass
class _Trace:
    """One forward pass: which modules were called, in order, and the graph that came of it."""

    device: torch.device
    names: list[str] = field(default_factory=list)  # by number of the call
    callers: list[int] = field(
        default_factory=list
    )  # the call inside which it happened, -1 for the model's own
    marked: list[bool] = field(default_factory=list)
    output: Any = None
    began: float = 0.0
    ended: float = 0.0
    started: dict[int, float] = field(default_factory=dict)
    came_back: dict[int, float] = field(default_factory=dict)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def first_call(self, name: str) -> int:
        """The call in which a module is first at work: its own, or that of the nearest parent that
        is called; -1 is the model."""
        while name and name not in self.names:
            name = name.rpartition(".")[0]
        return self.names.index(name) if name else -1


def find_layers(
    model: nn.Module,
    inputs: Any,
    loss: Callable[[Any], torch.Tensor],
    split_points: Iterable[str] = (),
    sometimes: Iterable[str] = (),
    begin: Callable[[], None] = lambda: None,
) -> tuple[tuple[Layer, ...], str | None]:
    """(the parts of the model in order, why there are no more of them). No part begins at a module
    that is called only `sometimes`. `begin` is called before each forward: it puts back what the
    one before has changed in the model."""
    # A floating-point input that wants a gradient shows in the graph where it is used, also past a
    # cut.
    watched = map_tensors(
        lambda t: t.detach().requires_grad_() if t.is_floating_point() else t, inputs
    )
    begin()
    trace = _run(model, watched)
    cuts, crossed = _clean_cuts(model, trace, watched)
    crossed = {name: "some calls of the forward leave it out" for name in sometimes} | crossed
    cuts = [cut for cut in cuts if trace.names[cut] not in crossed]
    wanted = list(split_points)
    for name in wanted:
        if name not in [trace.names[cut] for cut in cuts]:
            known = [module for module, _ in model.named_modules() if module]
            why = "it is not called exactly once with a tensor that depends on parameters"
            why = crossed.get(name, why) if name in known else "the model has no such sub-module"
            raise UsageError(
                f"The model cannot be cut at the split point {name!r}: {why}.",
                fix="a sub-module whose arguments carry everything that is used after it, e.g. one of: "
                + ", ".join(trace.names[cut] for cut in cuts[:8]),
            )
    cuts = [cut for cut in cuts if trace.names[cut] in wanted] if wanted else _distinct(trace, cuts)
    owners, reason = _owners(model, trace, cuts)
    if reason:
        return (), reason
    modules = dict(model.named_modules())
    layers = []
    samples = num_samples(inputs)
    kept, counted = _count(model, inputs, loss, cuts, begin)
    measured = _measure(model, inputs, loss, cuts, begin)
    for start, held, seconds, flops, size in zip(
        [-1, *cuts], owners, measured, counted, kept, strict=True
    ):
        weight = sum(p.nbytes for name in held for p in modules[name].parameters(recurse=False))
        layers.append(
            Layer(
                trace.names[start] if start >= 0 else "",
                tuple(held),
                seconds,
                weight,
                size / samples,
                flops,
            )
        )
    if wanted:
        reason = f"the workload names {len(wanted)} split points"
    elif crossed:
        name, what = next(iter(crossed.items()))
        reason = f"other sub-modules are no clean cuts (e.g. at {name!r}, {what})"
    return tuple(layers), reason


def _run(
    model: nn.Module,
    inputs: Any,
    only: list[int] | None = None,
    at_cut: Callable[[], None] = lambda: None,
) -> _Trace:
    """Call the model once with a marker before every sub-module's call (or only before these
    calls)."""
    trace = _Trace(next(model.parameters()).device)
    stack: list[int] = []

    def entering(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            call = len(trace.names)
            crossing = [t for t in tensors((args, kwargs)) if t.requires_grad]
            trace.names.append(name)
            trace.callers.append(stack[-1] if stack else -1)
            trace.marked.append(bool(crossing) and (only is None or call in only))
            stack.append(call)
            if only is not None and call in only:
                trace.started[call] = trace.now()
                at_cut()
            if not trace.marked[call]:
                return None
            fresh = iter(_Marker.apply(trace, call, *crossing))  # type: ignore[no-untyped-call]
            return map_tensors(lambda t: next(fresh) if t.requires_grad else t, (args, kwargs))

        return hook

    def leaving(module: nn.Module, args: Any, output: Any) -> None:
        stack.pop()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.callback(
                    module.register_forward_pre_hook(entering(name), with_kwargs=True).remove
                )
                hooks.callback(module.register_forward_hook(leaving).remove)
        trace.began = trace.now()
        trace.output = call_model(model, inputs)
        trace.ended = trace.now()
    return trace


def _clean_cuts(model: nn.Module, trace: _Trace, inputs: Any) -> tuple[list[int], dict[str, str]]:
    """Calls at which the model can be cut, and for the other marked ones what crosses them."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    first_use = {key: min(map(trace.first_call, names)) for key, names in owners.items()}
    first_use |= {id(tensor): -1 for tensor in tensors(inputs)}
    cuts, crossed = [], {}
    for call, name in enumerate(trace.names):
        if not trace.marked[call] or trace.names.count(name) > 1:
            continue
        around = [
            key for key in reachable(trace.output, stop_at=call) if first_use.get(key, call) < call
        ]
        if around:
            used = owners.get(around[0], [])
            if len(used) > 1:
                crossed[name] = (
                    f"{used[0]!r} before it and {used[1]!r} after it share a parameter (tied weights)"
                )
            else:
                crossed[name] = (
                    f"what {used[0] or 'the model itself'!r} computes is used past it"
                    if used
                    else "the input is used past it"
                )
        else:
            cuts.append(call)
    return cuts, crossed


def reachable(output: Any, stop_at: int = -1) -> list[int]:
    """ids of the parameters that the graph reaches from the output without passing marker
    `stop_at`."""
    found: list[int] = []
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors(output)]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, _MARKER_NODE) and node.call == stop_at:
            continue
        if (variable := getattr(node, "variable", None)) is not None:
            found.append(id(variable))
        waiting.extend(following for following, _ in node.next_functions)
    return found


def _distinct(trace: _Trace, cuts: list[int]) -> list[int]:
    """One cut per place: a container and its first child begin at the same one, and at the very
    first nothing is before it."""
    place: dict[int, int] = {-1: -1}
    for call, caller in enumerate(trace.callers):
        place[call] = place[caller] if call == caller + 1 else call
    seen = {-1}
    return [cut for cut in cuts if place[cut] not in seen and not seen.add(place[cut])]  # type: ignore[func-returns-value]


def _owners(model: nn.Module, trace: _Trace, cuts: list[int]) -> tuple[list[list[str]], str | None]:
    """The modules whose own parameters or buffers each part holds, or why they cannot be shared
    out."""
    last_inside = list(range(len(trace.names)))  # the last call that happened inside each call
    for call in reversed(range(len(trace.names))):
        if (caller := trace.callers[call]) >= 0:
            last_inside[caller] = max(last_inside[caller], last_inside[call])
    parts: list[list[str]] = [[] for _ in range(len(cuts) + 1)]
    part_of: dict[nn.Parameter, int] = {}
    used = set(reachable(trace.output))
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not own:
            continue
        if (
            name not in trace.names
            and not used & set(map(id, own))
            and not [*module.buffers(recurse=False)]
        ):
            parts[0].append(
                name
            )  # never called and nothing of it in the graph: it may lie anywhere
            continue
        call = trace.first_call(name)
        end = last_inside[call] if call >= 0 else len(trace.names)
        part, end_part = (sum(cut <= number for cut in cuts) for number in (call, end))
        if part != end_part:
            what = f"module {name!r}" if name else "the model itself"
            return (
                [],
                f"{what} has parameters or buffers of its own, and its forward goes over several parts",
            )
        for parameter in module.parameters(recurse=False):
            if (other := part_of.setdefault(parameter, part)) != part:
                return [], f"a parameter of {name!r} is tied: parts {other} and {part} both use it"
        parts[part].append(name)
    return parts, None


def _count(
    model: nn.Module,
    inputs: Any,
    loss: Callable[[Any], torch.Tensor],
    cuts: list[int],
    begin: Callable[[], None],
) -> tuple[list[int], list[float | None]]:
    """(bytes that autograd keeps for the backward pass, FLOPs of both passes) per part; the loss
    belongs to the last one.

    The backward pass has twice the FLOPs of the forward pass. None for RNNs, which torch cannot
    count."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    parts: list[dict[int, int]] = [{}]
    counter, marks = FlopCounterMode(display=False), [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            parts[-1][storage.data_ptr()] = storage.nbytes()
        return tensor

    def at_cut() -> None:
        parts.append({})
        marks.append(counter.get_total_flops())

    begin()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), counter:
        loss(_run(model, inputs, only=cuts, at_cut=at_cut).output)
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    flops = [
        None if recurrent else 3.0 * (b - a)
        for a, b in pairwise([*marks, counter.get_total_flops()])
    ]
    return [sum(part.values()) for part in parts], flops


def _measure(
    model: nn.Module,
    inputs: Any,
    loss: Callable[[Any], torch.Tensor],
    cuts: list[int],
    begin: Callable[[], None],
) -> list[float]:
    """Seconds of forward + backward per part, the shortest of several: noise only ever makes it
    longer. The first run warms up."""
    rounds: list[list[float]] = []
    for _ in range(1 + MEASUREMENTS):
        begin()
        trace = _run(model, inputs, only=cuts)
        value = loss(trace.output)
        turned = trace.now()
        value.backward()
        back = trace.now()
        forward = [trace.began, *(trace.started[cut] for cut in cuts), trace.ended]
        # No gradient comes back to a frozen beginning.
        backward = [back, *(trace.came_back.get(cut, back) for cut in cuts), turned]
        both = zip(pairwise(forward), pairwise(backward), strict=True)
        rounds.append([(f1 - f0) + (b0 - b1) for (f0, f1), (b0, b1) in both])
        model.zero_grad(set_to_none=True)
    return [min(column) for column in zip(*rounds[1:], strict=True)]
