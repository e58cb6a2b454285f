"""What a script exchanges by its own hand, without DDP: gradients before a step, or the parameters
themselves now and then.

Local SGD lets every rank step on its own gradients and averages the parameters every few steps:
nothing drifts apart there.
"""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.script.naming import COLLECTIVES
from paralab.doctor.script.questions import comes_from, is_forward, origins, roles
from paralab.doctor.script.reading import Script
from paralab.doctor.script.remembering import remembered
from paralab.doctor.script.updates import backwards, steps
from paralab.doctor.script.values import Attr, Call, Items, Loop, Made, Value, With

_MODELS = {"ddp", "fsdp", "module"}
_AVERAGERS = (
    "torch.distributed.algorithms.model_averaging.",
    "torch.distributed.optim.PostLocalSGDOptimizer",
)
_WORDS = (
    "all_reduce",
    "allreduce",
    "all_gather",
    "allgather",
    "broadcast",
    "average_parameters",
    "average_model",
    "sync_param",
)
# What a model is asked for its parameters by; what any other method of it gives is worked out with
# them: `model.module.predict(x)`.
_PARTS = {
    "parameters",
    "named_parameters",
    "buffers",
    "named_buffers",
    "state_dict",
    "modules",
    "named_modules",
    "children",
}
# A number that is worked out from parameters is not the parameters: a norm may be reduced for a
# log.
_NUMBERS = {
    "norm",
    "vector_norm",
    "sum",
    "mean",
    "item",
    "numel",
    "len",
    "max",
    "min",
    "isnan",
    "isfinite",
    "isinf",
    "all",
    "any",
}


@remembered
def exchanges_by_hand(script: Script) -> bool:
    """Are gradients or parameters sent between ranks in the course of training (not only before
    it), other than by DDP?"""
    training = [*(backward.call for backward in backwards(script)), *steps(script)]
    return any(_in_the_course(call, training) for call in _exchanges(script))


def given_away(script: Script) -> Call | None:
    """Where code that was not read gets the model in the course of training, and may average it: a
    library for local SGD."""
    training = [*(backward.call for backward in backwards(script)), *steps(script)]
    for call in script.calls:
        elsewhere = call.into is None and not call.target.startswith(("?", "torch.", "builtins."))
        around = any(
            call.result in block.managers for other in training for block in other.inside(With)
        )
        given = (
            (*call.args, *call.keywords.values())
            if elsewhere and (around or _in_the_course(call, training))
            else ()
        )
        if any(_is_of_a_model(value) for value in given):
            return call
    return None


def _exchanges(script: Script) -> Iterator[Call]:
    for call in script.calls:
        sends = call.into is None and (
            call.target in COLLECTIVES or any(word in call.method.lower() for word in _WORDS)
        )
        sent = (*call.args, *call.keywords.values()) if sends else ()
        if call.target.startswith(_AVERAGERS) or any(_is_of_a_model(value) for value in sent):
            yield call


def _is_of_a_model(value: Value) -> bool:
    """A model, its parameters or their gradients, in whatever form they are sent; not what it makes
    of a batch."""
    items = value.items if isinstance(value, Items) else ()
    sent = [part for part in (value, *items) if not comes_from(part, "loader")]
    return any(roles(origin) & _MODELS for part in sent for origin in origins(part, _is_worked_out))


def _is_worked_out(value: Value) -> bool:
    if not isinstance(value, Made):
        return False
    call = value.call
    asked = (
        call.receiver.base
        if isinstance(call.receiver, Attr) and call.receiver.name == "module"
        else call.receiver
    )
    of_a_model = bool(roles(asked) & _MODELS) and call.method not in _PARTS
    return is_forward(call) or of_a_model or call.method in _NUMBERS


def _in_the_course(call: Call, training: list[Call]) -> bool:
    """After the first backward or step, or in a loop with one. What stands before all training
    gives equal first weights only."""
    loops = [context for context in call.context if isinstance(context, Loop)]
    return any(
        call.number > other.number or any(loop in other.context for loop in loops)
        for other in training
    )
