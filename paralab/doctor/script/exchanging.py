"""What a script exchanges by its own hand, without DDP: gradients before a step, or the parameters themselves now and then.

Local SGD lets every rank step on its own gradients and averages the parameters every few steps: nothing drifts apart there.
"""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.script.naming import COLLECTIVES
from paralab.doctor.script.questions import is_forward, origins, roles
from paralab.doctor.script.reading import Script
from paralab.doctor.script.remembering import remembered
from paralab.doctor.script.updates import backwards, steps
from paralab.doctor.script.values import Call, Items, Loop, Made, Value

_AVERAGERS = ("torch.distributed.algorithms.model_averaging.", "torch.distributed.optim.PostLocalSGDOptimizer")
_WORDS = ("all_reduce", "allreduce", "all_gather", "allgather", "broadcast", "average_parameters", "average_model", "sync_param")
# A number that is worked out from parameters is not the parameters: a norm may be reduced for a log.
_NUMBERS = {"norm", "vector_norm", "sum", "mean", "item", "numel", "len", "max", "min", "isnan", "isfinite", "isinf", "all", "any"}


@remembered
def exchanges_by_hand(script: Script) -> bool:
    """Are gradients or parameters sent between ranks in the course of training (not only before it), other than by DDP?"""
    training = [*(backward.call for backward in backwards(script)), *steps(script)]
    return any(_in_the_course(call, training) for call in _exchanges(script))


def _exchanges(script: Script) -> Iterator[Call]:
    for call in script.calls:
        sends = call.into is None and (call.target in COLLECTIVES or any(word in call.method.lower() for word in _WORDS))
        sent = (*call.args, *call.keywords.values()) if sends else ()
        if call.target.startswith(_AVERAGERS) or any(_is_of_a_model(value) for value in sent):
            yield call


def _is_of_a_model(value: Value) -> bool:
    """A model, its parameters or their gradients, in whatever form they are sent; not an output of it."""

    def other(v: Value) -> bool:
        return isinstance(v, Made) and (is_forward(v.call) or v.call.method in _NUMBERS)

    items = value.items if isinstance(value, Items) else ()
    return any(roles(origin) & {"ddp", "fsdp", "module"} for part in (value, *items) for origin in origins(part, other))


def _in_the_course(call: Call, training: list[Call]) -> bool:
    """After the first backward or step, or in a loop with one. What stands before all training gives equal first weights only."""
    loops = [context for context in call.context if isinstance(context, Loop)]
    return any(call.number > other.number or any(loop in other.context for loop in loops) for other in training)
