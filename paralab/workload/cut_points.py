"""Run a model to find where it can be cut into stages, and measure how long each part takes.

A submodule call is a clean cut if its arguments contain everything that is computed before the call
and used after it. A residual connection around the call crosses the cut, and so does an encoder
output that a later decoder uses. To detect such crossings, each call's arguments get a marker node
in the autograd graph. A cut at marker i is clean if every path from the output to a parameter used
before i passes through marker i.

    Sequential(a, b, Residual(c, d), e)     cuts: a | b | Residual | e
                                            (d is not a cut: the residual's input crosses it)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from paralab.errors import UsageError
from paralab.workload.batch import call_model, copied, map_tensors, num_samples, tensors
from paralab.workload.flops import FlopCounter
from paralab.workload.hooks import Intercepting, watched
from paralab.workload.randomness import seed_everything
from paralab.workload.state import put_back, state_of
from paralab.workload.summary import Layer

MEASUREMENTS = 3


class _Marker(torch.autograd.Function):
    """An identity function that is visible in the graph and records when it runs."""

    @staticmethod
    def forward(ctx: Any, trace: _Trace, call: int, *values: torch.Tensor) -> Any:
        ctx.trace, ctx.call = trace, call
        # Return copies, because the module may change its arguments in place.
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.trace.returned[ctx.call] = ctx.trace.now()
        return None, None, *grads


_MARKER_NODE: Any = _Marker._backward_cls  # the class of _Marker's graph nodes


@dataclass
class _Trace:
    """One forward pass: the submodule calls in order, and the resulting graph."""

    device: torch.device
    names: list[str] = field(default_factory=list)  # the submodule of each call
    callers: list[int] = field(default_factory=list)  # the enclosing call; -1 for the model
    marked: list[bool] = field(default_factory=list)
    output: Any = None
    loss: Any = None
    times: list[float] = field(default_factory=list)  # times of the start, each cut, and the end
    returned: dict[int, float] = field(default_factory=dict)  # call number -> time in backward
    last_use: dict[int, int] = field(default_factory=dict)  # storage -> the call of its last use

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def first_call(self, name: str) -> int:
        """Return the number of a module's first call. If a module is never called, use its nearest
        called parent. The number -1 means the model itself."""
        while name and name not in self.names:
            name = name.rpartition(".")[0]
        return self.names.index(name) if name else -1


def find_layers(
    model: nn.Module,
    inputs: Any,
    loss: Callable[[Any], torch.Tensor],
    split_points: Iterable[str] = (),
    sometimes: Iterable[str] = (),
) -> tuple[tuple[Layer, ...], str | None]:
    """Return the model's parts in order, and why there are no more. No part begins at a module in
    `sometimes`, because only some forward passes call these."""
    state = state_of(model)

    def reset() -> None:
        """Undo the previous forward pass's changes to the model, and reset the seed."""
        put_back(model, state)
        seed_everything(0)

    # Floating-point inputs require gradients, so that the graph shows where they are used.
    visible = map_tensors(lambda t: t.detach().requires_grad_(t.is_floating_point()), inputs)
    reset()
    trace = _run(model, visible)
    cuts, crossed = _find_cuts(model, trace, visible)
    crossed = {name: "some forward passes do not call it" for name in sometimes} | crossed
    cuts = [cut for cut in cuts if trace.names[cut] not in crossed]
    cuts, reason = _choose_cuts(model, trace, cuts, crossed, list(split_points))
    cuts, owners, divided = _assign_modules(model, trace, cuts)
    reason = divided or reason
    reset()

    def run(at_cut: Callable[[], None] = lambda: None) -> _Trace:
        model.zero_grad(set_to_none=True)
        reset()
        trace = _run(model, inputs, cuts, at_cut)
        trace.loss = loss(trace.output)
        return trace

    activations, flops = _count(model, run)
    seconds = _measure(cuts, run)
    model.zero_grad(set_to_none=True)
    reset()
    modules = dict(model.named_modules())
    layers = [
        Layer(
            name=trace.names[cut] if cut >= 0 else "",
            modules=tuple(owners[n]),
            seconds=seconds[n],
            parameter_bytes=sum(
                p.nbytes for name in owners[n] for p in modules[name].parameters(recurse=False)
            ),
            activation_bytes_per_sample=activations[n] / num_samples(inputs),
            flops=flops[n],
        )
        for n, cut in enumerate([-1, *cuts])
    ]
    return tuple(layers), reason


def _storage(tensor: torch.Tensor) -> int:
    """Identify a tensor's storage, which its views share."""
    strided = tensor.layout is torch.strided
    return tensor.untyped_storage()._cdata if strided else id(tensor)


def _choose_cuts(
    model: nn.Module, trace: _Trace, cuts: list[int], crossed: dict[str, str], wanted: list[str]
) -> tuple[list[int], str | None]:
    """Return the cuts to use, and why there are no more."""
    if not wanted:
        name, what = next(iter(crossed.items()), ("", ""))
        reason = f"other submodules are not clean cuts (at {name!r}, {what})" if name else None
        return _remove_duplicates(trace, cuts), reason

    possible, modules = [trace.names[cut] for cut in cuts], dict(model.named_modules())
    for name in wanted:
        if name in possible:
            continue
        why = "it is not called exactly once with a tensor that depends on parameters"
        why = crossed.get(name, why) if name in modules else "the model has no such submodule"
        raise UsageError(
            f"The model cannot be cut at the split point {name!r}: {why}.",
            fix="a submodule whose arguments contain everything that later modules use, such as "
            + ", ".join(possible[:8]),
        )
    chosen = [cut for cut in cuts if trace.names[cut] in wanted]
    return chosen, f"the workload has {len(wanted)} split points"


def _run(
    model: nn.Module,
    inputs: Any,
    only: list[int] | None = None,
    at_cut: Callable[[], None] = lambda: None,
) -> _Trace:
    """Call the model with a marker before each submodule call. With `only`, use markers only before
    these calls, and also call `at_cut` there."""
    trace = _Trace(next(model.parameters()).device)
    stack: list[int] = []

    def enter(name: str, arguments: Any) -> Any:
        call = len(trace.names)
        crossing = [t for t in tensors(arguments) if t.requires_grad]
        trace.names.append(name)
        trace.callers.append(stack[-1] if stack else -1)
        trace.marked.append(bool(crossing) and (only is None or call in only))
        stack.append(call)
        if only is not None and call in only:
            trace.times.append(trace.now())
            at_cut()
        if not trace.marked[call]:
            return None
        fresh = iter(_Marker.apply(trace, call, *crossing))  # type: ignore[no-untyped-call]
        return map_tensors(lambda t: next(fresh) if t.requires_grad else t, arguments)

    def leave(name: str, output: Any) -> None:
        stack.pop()

    def note(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        trace.last_use |= {_storage(t): len(trace.names) - 1 for t in tensors((args, kwargs))}
        return func(*args, **kwargs)

    with watched(model, enter, leave), Intercepting(note) if only is None else nullcontext():
        trace.times.append(trace.now())
        trace.output = call_model(model, copied(inputs))
        trace.times.append(trace.now())
    return trace


def _find_cuts(model: nn.Module, trace: _Trace, inputs: Any) -> tuple[list[int], dict[str, str]]:
    """Return the clean cuts. For every other marked call, say what crosses it."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    first_use = {key: min(map(trace.first_call, names)) for key, names in owners.items()}
    first_use |= {id(tensor): -1 for tensor in tensors(inputs)}
    cuts, crossed = [], {}
    for call, name in enumerate(trace.names):
        if not trace.marked[call]:
            continue
        if (calls := trace.names.count(name)) > 1:
            crossed[name] = f"which is called {calls} times"
            continue
        reached = reachable(trace.output, stop_at=call)
        around = [key for key in reached if first_use.get(key, call) < call]
        if not around:
            cuts.append(call)
            continue
        used = owners.get(around[0], [])
        source = f"the output of {used[0] or 'the model'!r}" if used else "the input"
        crossed[name] = f"{source} is also used after it"
        if len(used) > 1:
            tied = f"{used[0]!r} before it and {used[1]!r} after it"
            crossed[name] = f"{tied} share a parameter (tied weights)"
    return cuts, crossed


def reachable(output: Any, stop_at: int = -1) -> list[int]:
    """Return ids of parameters that the graph reaches without passing marker `stop_at`."""
    parameters = [id(tensor) for tensor in tensors(output) if isinstance(tensor, nn.Parameter)]
    visited: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors(output)]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if isinstance(node, _MARKER_NODE) and node.call == stop_at:
            continue
        if (variable := getattr(node, "variable", None)) is not None:
            parameters.append(id(variable))
        waiting.extend(following for following, _ in node.next_functions)
    return parameters


def _remove_duplicates(trace: _Trace, cuts: list[int]) -> list[int]:
    """Keep only one cut at each place, because a container and its first child begin at the same
    place. Remove a cut at the start of the model, because no layers come before it."""
    place: dict[int, int] = {-1: -1}
    for call, caller in enumerate(trace.callers):
        place[call] = place[caller] if call == caller + 1 else call
    first: dict[int, int] = {}
    for cut in cuts:
        first.setdefault(place[cut], cut)
    return [cut for where, cut in first.items() if where != -1]


def _assign_modules(
    model: nn.Module, trace: _Trace, cuts: list[int]
) -> tuple[list[int], list[list[str]], str | None]:
    """Return the cuts that divide no module's own tensors, the names of the modules in each part,
    and why there are no more cuts. List only modules that have their own parameters or buffers.

    A clean cut has all uses of a parameter on one side, as far as the graph shows them. It does not
    show the uses of buffers and frozen parameters, so the trace lists those."""
    called: dict[str, int] = {}
    call_of: dict[nn.Parameter, int] = {}
    reason, in_graph = None, set(reachable(trace.output))
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        buffers = list(module.buffers(recurse=False))
        if not parameters and not buffers:
            continue
        hidden = [*buffers, *(p for p in parameters if id(p) not in in_graph)]
        if name not in trace.names and not buffers and len(hidden) == len(parameters):
            called[name] = -1  # unused modules can be in any part
            continue

        called[name] = call = trace.first_call(name)
        what = f"module {name!r}" if name else "the model itself"
        what += " has buffers or frozen parameters that are used in multiple parts"
        together = [(call, trace.last_use.get(_storage(tensor), call), what) for tensor in hidden]
        for parameter in parameters:
            first, last = sorted((call, call_of.setdefault(parameter, call)))
            together.append((first, last, f"a parameter of {name!r} is tied: two parts use it"))
        for first, last, why in together:
            if any(first < cut <= last for cut in cuts):
                cuts, reason = [c for c in cuts if not first < c <= last], reason or why

    parts: list[list[str]] = [[] for _ in range(len(cuts) + 1)]
    for name, call in called.items():
        parts[sum(cut <= call for cut in cuts)].append(name)
    return cuts, parts, reason


def _count(
    model: nn.Module, run: Callable[[Callable[[], None]], _Trace]
) -> tuple[list[int], list[float | None]]:
    """For each part, count the bytes that autograd saves for backward, and the FLOPs of forward and
    backward. The loss belongs to the last part.

    Assume that backward takes twice the FLOPs of forward. If the model contains an RNN, return None
    for the FLOPs, because torch cannot count them."""
    known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    parts: list[dict[int, int]] = [{}]
    counter, marks = FlopCounter(), [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            parts[-1][storage._cdata] = storage.nbytes()
        return tensor

    def at_cut() -> None:
        parts.append({})
        marks.append(counter.get_total_flops())

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), counter:
        run(at_cut)
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    marks.append(counter.get_total_flops())
    flops = [None if recurrent else 3.0 * (after - before) for before, after in pairwise(marks)]
    return [sum(part.values()) for part in parts], flops


def _measure(cuts: list[int], run: Callable[[], _Trace]) -> list[float]:
    """Measure each part's forward + backward time in seconds. Take the shortest of several runs,
    because noise only makes a run longer. The first run is a warm-up."""
    rounds: list[list[float]] = []
    for _ in range(1 + MEASUREMENTS):
        trace = run()
        turned = trace.now()
        trace.loss.backward()
        back = trace.now()
        # If the first parts are frozen, no gradient reaches their markers.
        backward = [back, *(trace.returned.get(cut, back) for cut in cuts), turned]
        both = zip(pairwise(trace.times), pairwise(backward), strict=True)
        rounds.append([(f1 - f0) + (b0 - b1) for (f0, f1), (b0, b1) in both])
    return [min(column) for column in zip(*rounds[1:], strict=True)]
