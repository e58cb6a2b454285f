"""Divide the experts of a model among the ranks, and send tokens to the ranks of their experts.

    rank 0   its tokens ─┐              ┌─ experts 0, 1 ─┐              ┌─ results for its tokens
                         ├─ all-to-all ─┤                ├─ all-to-all ─┤
    rank 1   its tokens ─┘              └─ experts 2, 3 ─┘              └─ results for its tokens

A token goes to each expert that it chose, so each rank sums the results of its own tokens. In
backward, the gradients take the same path in reverse. Each rank's loss is its share of the global
loss, so an expert's gradient, which comes from the tokens of all ranks, is complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from paralab.errors import ParalabError
from paralab.worker.sharding.shards import is_split
from paralab.worker.sharding.split_tensors import split_parameter
from paralab.worker.sum_gradients import Begin, sum_gradients
from paralab.workload.batch import map_tensors, tensors
from paralab.workload.expert_layers import read_call
from paralab.workload.expert_plan import ExpertLayer


class SplitExperts:
    """Divides the experts of these layers in place."""

    def __init__(
        self, model: nn.Module, layers: Sequence[ExpertLayer], mesh: DeviceMesh, begin: Begin
    ) -> None:
        self.group, self.begin = mesh.get_group(), begin
        for layer in layers:
            self._split(model.get_submodule(layer.name), layer, mesh)
        self.replicated = [p for p in model.parameters() if not is_split(p)]

    def sum_gradients(self, begin: Begin) -> None:
        """Sum the gradients of the other parameters, after the last backward pass."""
        sum_gradients(self.replicated, self.group, None, begin)

    def _split(self, module: Any, layer: ExpertLayer, mesh: DeviceMesh) -> None:
        own = layer.experts // mesh.size()
        for path, parameter in list(module.named_parameters()):
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, split_parameter(parameter, mesh, 0))
        experts = OwnExperts(module, module.forward, layer.experts, own)

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            return self._run(layer, experts, (args, kwargs))

        module.forward = forward

    def _run(self, layer: ExpertLayer, experts: OwnExperts, arguments: Any) -> torch.Tensor:
        call = read_call(arguments)
        if call is None:
            raise ParalabError(
                f"ep: {layer.name} was called with different arguments than in the proof.",
                fix="call it with tokens, chosen experts, and weights, or use ddp",
            )
        given = list(tensors(arguments))
        tokens, chosen, weights = (given[number] for number in call)
        route = self._plan_route(layer, chosen, experts.own)
        choices = math.prod(chosen.shape[1:])
        rows, column = tokens[route.order // choices], (-1, *[1] * (chosen.ndim - 1))
        local = (chosen.flatten()[route.order] % experts.own).view(column)
        scores = weights.flatten()[route.order].view(column)

        received = self._exchange(route, rows, local, scores)
        by_place = dict(zip(call, received, strict=True))
        result = experts.compute(layer.name, arguments, by_place, len(received[0]))
        [back] = self._exchange(route.reversed, result)
        # Restore the tokens' order, and add the results of each token's experts.
        return back[route.order.argsort()].view(len(chosen), choices, back.shape[1]).sum(1)

    def _plan_route(self, layer: ExpertLayer, chosen: torch.Tensor, own: int) -> Route:
        """Sort the pairs of tokens and experts by rank, and tell each rank how many it gets."""
        flat, ranks = chosen.flatten(), range(dist.get_world_size(self.group))
        owner = flat.div(own, rounding_mode="floor")
        sent = torch.stack([(owner == rank).sum() for rank in ranks])
        received = torch.empty_like(sent)
        note = self.begin("all_to_all", sent, self.group, "counts", layer.name)
        dist.all_to_all_single(received, sent, group=self.group)
        note()
        route = Route(layer.name, owner.argsort(stable=True), sent.tolist(), received.tolist())
        if sum(route.sent) != len(flat):
            raise ParalabError(
                f"ep: a token chose an expert outside 0 … {layer.experts - 1} in {layer.name}.",
                fix="valid expert numbers (to drop a token, give it weight 0), or ddp",
            )
        return route

    def _exchange(self, route: Route, *sent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        received: tuple[torch.Tensor, ...] = _Exchange.apply(self, route, *sent)  # type: ignore[no-untyped-call]
        return received

    def exchange(self, route: Route, sent: Sequence[torch.Tensor], unit: str) -> Any:
        """Send rows of several tensors in one all-to-all, as bytes."""
        packed = pack(sent)
        given = packed.new_empty(sum(route.received), packed.shape[1])
        note = self.begin("all_to_all", packed, self.group, unit, route.layer)
        dist.all_to_all_single(given, packed, route.received, route.sent, group=self.group)
        note()
        return unpack(given, sent)


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put the bytes of each row side by side."""
    rows = (each.contiguous().view(len(each), math.prod(each.shape[1:])) for each in tensors)
    return torch.cat([each.view(torch.uint8) for each in rows], 1)


def unpack(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return tensors with these dtypes and shapes, except for the number of rows."""
    sizes = [math.prod(each.shape[1:]) * each.element_size() for each in like]
    # Copy, because a single row counts as contiguous but may begin at an odd address.
    parts = [p.clone(memory_format=torch.contiguous_format) for p in packed.split(sizes, 1)]
    return tuple(
        part.view(each.dtype).view(len(packed), *each.shape[1:])
        for part, each in zip(parts, like, strict=True)
    )


class Route(NamedTuple):
    """How a layer's rows travel between ranks.

    order     the pairs of a token and a choice, sorted by the rank of the chosen expert
    sent      how many of them go to each rank
    received  how many come from each rank
    """

    layer: str
    order: torch.Tensor
    sent: list[int]
    received: list[int]

    @property
    def reversed(self) -> Route:
        return self._replace(sent=self.received, received=self.sent)


class OwnExperts:
    """This rank's experts of a layer. `compute` runs the layer's own forward with only these."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], experts: int, own: int
    ) -> None:
        self.module, self.forward, self.own = module, forward, own
        # The layer counts its experts in these attributes.
        self.numbers = {
            name: own
            for name, value in vars(module).items()
            if "expert" in name and type(value) is int and value == experts
        }

    def compute(
        self, name: str, arguments: Any, received: dict[int, torch.Tensor], rows: int
    ) -> torch.Tensor:
        numbers = count()
        args, kwargs = map_tensors(lambda _: received[next(numbers)], arguments)
        with self._only_own() as parameters:
            result = self.forward(*args, **kwargs)
            if not isinstance(result, torch.Tensor) or result.ndim != 2 or len(result) != rows:
                raise ParalabError(f"ep: {name} does not return one row per token.", fix="ddp")
            # If no tokens arrived, the parameters still need a gradient of zero, as on one device.
            # Backward must also reach the collective that returns the tokens' gradients.
            used = [*parameters, *(t for t in received.values() if t.is_floating_point())]
            empty = [tensor.flatten()[:0].sum().to(result.dtype) for tensor in used]
        return result + torch.stack(empty).sum()

    @contextmanager
    def _only_own(self) -> Iterator[list[torch.Tensor]]:
        """Replace the parameters with plain tensors that hold this rank's part."""
        modules = list(self.module.modules())
        split: list[tuple[nn.Module, str, Any]] = [
            (m, name, p) for m in modules for name, p in m._parameters.items() if p is not None
        ]
        plain: list[Any] = [parameter.to_local() for _, _, parameter in split]
        before = {name: getattr(self.module, name) for name in self.numbers}
        try:
            vars(self.module).update(self.numbers)
            for (module, name, _), tensor in zip(split, plain, strict=True):
                module._parameters[name] = tensor
            yield plain
        finally:
            vars(self.module).update(before)
            for module, name, parameter in split:
                module._parameters[name] = parameter


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: SplitExperts, route: Route, *sent: torch.Tensor) -> Any:
        ctx.given = split, route
        received = split.exchange(route, sent, "activations")
        ctx.mark_non_differentiable(*(t for t in received if not t.is_floating_point()))
        # If a block is recomputed, torch stops after its last saved tensor. Some ranks get no
        # tokens and save less, but all must reach this collective.
        ctx.save_for_backward(route.order)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        split, route = ctx.given
        needed = [number for number, needs in enumerate(ctx.needs_input_grad[2:]) if needs]
        back = split.exchange(route.reversed, [grads[number] for number in needed], "gradients")
        by_number = dict(zip(needed, back, strict=True))
        return None, None, *(by_number.get(number) for number in range(len(grads)))
