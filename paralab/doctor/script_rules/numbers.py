"""Numbers that are shown or set wrongly when there are several ranks: losses, metrics, learning
rates, batch sizes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.registry import check
from paralab.doctor.script.agreement import Agreement
from paralab.doctor.script.modules import wrappings
from paralab.doctor.script.naming import LOADER
from paralab.doctor.script.pointing import called, found, line_of, place, short, test_of
from paralab.doctor.script.questions import (
    comes_from,
    is_dotted,
    is_forward,
    origins,
    rank_branch,
    roles,
    under,
    who_takes,
)
from paralab.doctor.script.reading import Script
from paralab.doctor.script.settings import default_of
from paralab.doctor.script.values import Attr, Call, Choice, Computed, Made, Value, options

ALL_REDUCE = "torch.distributed.all_reduce"
_SHOWN = (
    "print",
    "info",
    "debug",
    "warning",
    "log",
    "add_scalar",
    "add_scalars",
    "log_metric",
    "log_metrics",
    "set_postfix",
    "write",
)
_SUM = re.compile(r"\bsum(med)?\b", re.IGNORECASE)
_SCALES = ("div_", "div", "mul_", "mul", "true_divide", "true_divide_", "__itruediv__")
# What keeps a mean a mean on its way into all_reduce.
_KEEPS = (
    "detach",
    "clone",
    "item",
    "float",
    "to",
    "cuda",
    "cpu",
    "tensor",
    "as_tensor",
    "double",
    "reshape",
    "view",
    "squeeze",
)


@check("S13", source="script")
def reduced_before_backward(script: Script) -> Iterator[Finding]:
    for reduce in script.calls_of(ALL_REDUCE, "torch.distributed.reduce"):
        given = reduce.argument(0, "tensor")
        if given is None or not _has_graph(given):
            continue
        for backward in script.methods("backward"):
            loss = backward.receiver
            if loss is None or backward.number < reduce.number:
                continue
            if any(any(origin is option for option in options(given)) for origin in origins(loss)):
                why = (
                    f"`{line_of(script, reduce)}` changes the loss itself before `{called(backward)}()` "
                    f"({place(backward, reduce)}). Autograd knows nothing of the all-reduce, so what follows it (a division "
                    "by the ranks) makes the gradients too small or wrong."
                )
                fix = "Reduce a copy: shown = loss.detach().clone(); dist.all_reduce(shown)."
                yield found(script, "S13", "error", reduce, why, fix, also=(backward,))
                break


def _has_graph(value: Value) -> bool:
    """Computed from a forward, and not detached on the way."""

    def cut(v: Value) -> bool:
        if isinstance(v, Made) and (
            is_forward(v.call) or v.call.method in ("detach", "item", "tolist", "numpy")
        ):
            return True
        if isinstance(v, Made) and under(v.call, "no_grad"):
            return True
        return isinstance(v, Attr) and v.name in ("data", "grad")

    return any(
        isinstance(o, Made) and is_forward(o.call) and not under(o.call, "no_grad")
        for o in origins(value, cut)
    )


@check("S14", source="script")
def sum_is_shown_as_mean(script: Script) -> Iterator[Finding]:
    for reduce in script.calls_of(ALL_REDUCE):
        op, given = reduce.argument(1, "op"), reduce.argument(0, "tensor")
        if (
            given is None
            or not (op is None or is_dotted(op, "torch.distributed.ReduceOp.SUM"))
            or reduce.argument(2, "group")
        ):
            continue
        by = _own_share(given)
        if by is None and not _is_mean_loss(given):
            continue
        scaled = any(
            call.method in _SCALES and _is_one_of(call.receiver, given) for call in script.calls
        )
        shown = next(
            (
                call
                for call in script.calls
                if call.number > reduce.number and _shows_undivided(call, given)
            ),
            None,
        )
        if shown and not scaled:
            why = (
                f"`{line_of(script, reduce)}` adds up the mean losses of all ranks, and {place(shown, reduce)} shows the sum: "
                "with 8 ranks it is 8 times too large."
            )
            if by is not None:
                why += (
                    f" Certain if `{short(by)}` counts what this rank has seen, not what all have."
                )
            fix = "Divide by dist.get_world_size() after the all_reduce (with NCCL: op=dist.ReduceOp.AVG)."
            yield found(
                script, "S14", "error" if by is None else "suspect", reduce, why, fix, also=(shown,)
            )


def _is_one_of(value: Value | None, given: Value) -> bool:
    return value is not None and any(
        one is other for one in options(value) for other in options(given)
    )


def _kept(value: Value) -> Value:
    """What it was before `torch.tensor(…)`, `.detach()` and the like, which keep the number."""
    while isinstance(value, Made) and value.call.method in _KEEPS:
        before = value.call.receiver or (value.call.args[0] if value.call.args else None)
        if before is None:
            break
        value = next(iter(options(before)))
    return value


def _own_share(value: Value) -> ast.expr | None:
    """`total / len(loader)`, `total / seen`: what a mean of this rank's losses is divided by, as it
    is written."""
    current = _kept(value)
    if (
        not isinstance(current, Computed)
        or current.op != "Div"
        or not isinstance(current.node, ast.BinOp)
    ):
        return None
    total, count = current.parents
    shared = any(
        "world" in roles(origin) for origin in origins(current, _is_data)
    )  # data may well depend on the number of ranks
    if shared or not any(map(_is_forward, origins(total))):
        return None
    counts = (
        count.call.args
        if isinstance(count, Made) and count.call.target == "builtins.max"
        else (count,)
    )  # `max(1, seen)`
    added = any(
        isinstance(way, Computed) and isinstance(way.node, ast.AugAssign)
        for one in counts
        for way in options(one)
    )
    asked = (
        isinstance(count, Made)
        and count.call.target == "builtins.len"
        and "loader" in roles(count.call.args[0])
    )
    return current.node.right if added or asked else None


def _is_forward(value: Value) -> bool:
    return isinstance(value, Made) and is_forward(value.call)


def _is_data(value: Value) -> bool:
    return "loader" in roles(value)


def _is_mean_loss(value: Value) -> bool:
    """A mean over a batch (a loss, `.mean()`) that reached this place unchanged. Sums and counts
    may be added up."""
    for way in options(value):
        current = _kept(way)
        if not isinstance(current, Made):
            return False
        is_loss = "loss value" in roles(current) or (
            current.call.method == "__call__" and "loss" in roles(current.call.receiver)
        )
        made = (
            current.call.receiver.call.keywords if isinstance(current.call.receiver, Made) else {}
        )
        summed = any(
            getattr(v, "value", None) in ("sum", "none")
            for v in (*current.call.keywords.values(), *made.values())
        )
        if summed or not (is_loss or current.call.method == "mean"):
            return False
    return True


def _texts(node: ast.AST) -> Iterator[str]:
    parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return (part for part in parts if isinstance(part, str))


def _shows_undivided(call: Call, given: Value) -> bool:
    """Is the value printed or logged, on a way with no division and no multiplication, and not by
    the name of a sum?"""
    if call.method not in _SHOWN or any(_SUM.search(text) for text in _texts(call.node)):
        return False

    def stop(value: Value) -> bool:
        divided = isinstance(value, Computed) and value.op in ("Div", "Mult", "FloorDiv")
        return divided or (isinstance(value, Made) and value.call.method in (*_SCALES, "mean"))

    return any(
        _is_one_of(origin, given)
        for value in (*call.args, *call.keywords.values())
        for origin in origins(value, stop)
    )


@check("S14", source="script")
def metric_of_one_share(script: Script) -> Iterator[Finding]:
    if not any(
        "sampler" in roles(loader.keywords.get("sampler")) for loader in script.calls_of(LOADER)
    ):
        return
    agreement = Agreement()
    for call in script.methods(*_SHOWN):
        branch = rank_branch(call)
        if branch is None or who_takes(branch) != "rank 0 only":
            continue
        for value in (*call.args, *call.keywords.values()):
            own = agreement.own(value)
            share = _share(own) if own else None
            if share is not None and not agreement.comes_from_agreed(value):
                why = (
                    f"`{line_of(script, call)}` shows what rank 0 has found on its own share of the samples (the loader of "
                    f"{place(share, call)} has a DistributedSampler, under `{test_of(branch)}` only rank 0 reports). Certain "
                    "if it is meant for all samples."
                )
                fix = "all_reduce the sums and the counts before dividing, on all ranks."
                yield found(script, "S14", "suspect", call, why, fix)
                break


def _share(own: Value) -> Call | None:
    """The loader with a DistributedSampler that an evaluated batch (under no_grad) comes from."""
    if not isinstance(own, Made) or not under(own.call, "no_grad"):
        return None
    loaders = (o.call for o in origins(own) if isinstance(o, Made) and o.call.target == LOADER)
    return next(
        (loader for loader in loaders if "sampler" in roles(loader.keywords.get("sampler"))), None
    )


@check("S15", source="script")
def rate_scaled_twice(script: Script) -> Iterator[Finding]:
    for call in script.calls:
        if "optimizer" not in roles(call.result) or call.argument(1, "lr") is None:
            continue
        rate = call.argument(1, "lr")
        assert rate is not None
        products = {
            id(o.node): o
            for o in origins(rate)
            if isinstance(o, Computed) and o.op == "Mult" and _times_world(o)
        }
        if len(products) > 1:
            lines = sorted(
                {getattr(product.node, "lineno", call.line) for product in products.values()}
            )
            why = (
                f"The learning rate of `{called(call)}` is multiplied by the number of ranks {len(products)} times (lines "
                f"{', '.join(map(str, lines))}): on 8 ranks it is {8 ** len(products)} times the base rate."
            )
            yield found(
                script, "S15", "error", call, why, "Multiply once, where the rate is decided."
            )


def _times_world(product: Computed) -> bool:
    return any("world" in roles(parent) for parent in product.parents)


@check("S16", source="script")
def whole_batch_on_every_rank(script: Script) -> Iterator[Finding]:
    if not wrappings(script):
        return
    for call in script.calls_of(LOADER):
        size = call.argument(1, "batch_size")
        if (
            isinstance(size, Attr)
            and size.name.startswith(("global_batch", "total_batch", "effective_batch"))
            and not comes_from(size, "world")
        ):
            if "sampler" not in roles(call.keywords.get("sampler")) or isinstance(size, Choice):
                continue
            default = default_of(script, size)
            number = getattr(default, "value", None)
            shown = f" ({number} by default)" if isinstance(number, int) else ""
            why = (
                f"Every rank takes `{size.name}`{shown} samples per step, so all ranks together take that many times the "
                "number of ranks. Certain if the name means what it says: the batch of all ranks."
            )
            yield found(
                script,
                "S16",
                "suspect",
                call,
                why,
                f"batch_size={size.name} // dist.get_world_size().",
            )
