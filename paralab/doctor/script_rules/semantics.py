"""What DDP does and does not do: which gradients it averages, and what makes the ranks' models
differ."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from paralab.doctor.finding import Edit, Finding
from paralab.doctor.registry import check
from paralab.doctor.script.agreement import is_alone, is_ddp_backward
from paralab.doctor.script.editing import out_of_branch, swapped, with_keyword
from paralab.doctor.script.exchanging import exchanges_by_hand
from paralab.doctor.script.modules import (
    batch_norms,
    belongs,
    has_weights,
    inside_wrapper,
    is_off,
    is_on,
    is_wrapper,
    kind,
    wrappings,
)
from paralab.doctor.script.naming import DDP
from paralab.doctor.script.pointing import called, found, line_of, place, short, test_of
from paralab.doctor.script.questions import (
    exclusive,
    is_forward,
    rank_branch,
    roles,
    sources,
    under,
    who_takes,
)
from paralab.doctor.script.reading import Script
from paralab.doctor.script.settings import destination, uses_cuda, where
from paralab.doctor.script.updates import steps
from paralab.doctor.script.values import (
    Attr,
    Call,
    Class,
    Computed,
    Constant,
    Dotted,
    Entered,
    Happening,
    Loop,
    Made,
    Object,
    Trying,
    Value,
    options,
)
from paralab.doctor.script_rules.partings import goers, if_so, sure


def _backwards(script: Script) -> list[tuple[Call, Value]]:
    """Backward calls with the loss that they start from."""
    found = []
    for call in script.methods("backward"):
        loss = (
            call.args[0]
            if call.target in ("torch.autograd.backward",) and call.args
            else call.receiver
        )
        if loss is not None:
            found.append((call, loss))
    return found


# --- S01, S02, S05: the graph
# -----------------------------------------------------------------------------------------------------


@check("S01", source="script")
def part_is_never_used(script: Script) -> Iterator[Finding]:
    read = {
        node.attr
        for node in script.all_nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    words = {
        node.value
        for node in script.all_nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    if read & {
        "children",
        "named_children",
        "_modules",
        "named_modules",
        "modules",
        "get_submodule",
        "__dict__",
    }:
        return
    if any(
        call.target in ("builtins.getattr", "builtins.vars") and not _names_it(call)
        for call in script.calls
    ):
        return
    for wrapping, module in wrappings(script):
        if (
            "find_unused_parameters" in wrapping.keywords
            or "static_graph" in wrapping.keywords
            or "**" in wrapping.keywords
        ):
            continue
        for model in options(module):
            if not isinstance(model, Object) or not _is_plain_module(model.of):
                continue
            for store in script.stores:
                unused = (
                    store.name not in read and store.name not in words and has_weights(store.value)
                )
                if (
                    unused
                    and any(option is model for option in options(store.base))
                    and not _is_frozen(script, store.value)
                ):
                    why = (
                        f"`self.{store.name}` has parameters and no method reads it, so they take no part in the loss. DDP "
                        f"({place(wrapping, store)}) waits for their gradients and raises in the second step."
                    )
                    fix = (
                        f"Remove `self.{store.name}`, freeze it before DDP, or use it; find_unused_parameters=True if it is "
                        "used at times."
                    )
                    yield found(script, "S01", "error", store, why, fix, also=(wrapping,))


def _names_it(call: Call) -> bool:
    """`getattr(self, "head")`, not `getattr(self, f"layer{i}")`."""
    return isinstance(call.argument(1, "name"), Constant)


def _is_plain_module(of: Class) -> bool:
    return (
        len(of.bases) == 1
        and isinstance(of.bases[0], Dotted)
        and of.bases[0].name == "torch.nn.Module"
    )


def _is_frozen(script: Script, value: Value) -> bool:
    off = (
        call
        for call in script.methods("requires_grad_")
        if is_off(call.argument(0, "requires_grad"))
    )
    return any(any(option is value for option in options(call.receiver or Value())) for call in off)


@check("S02", source="script")
def reentrant_checkpoint(script: Script) -> Iterator[Finding]:
    looking = next(
        (
            call
            for call in script.calls_of(DDP)
            if is_on(call.keywords.get("find_unused_parameters"))
        ),
        None,
    )
    if looking is None or is_on(looking.keywords.get("static_graph")):
        return
    for call in script.calls_of("torch.utils.checkpoint.checkpoint"):
        given = call.keywords.get("use_reentrant")
        if given is None or is_on(given):
            how = "use_reentrant=True" if given else "no use_reentrant=, which means True"
            why = (
                f"`{called(call)}` with {how} runs a second backward inside the first, and find_unused_parameters=True "
                f"({place(looking, call)}) "
                'has marked its parameters as done by then: "Expected to mark a variable ready only once".'
            )
            yield found(
                script,
                "S02",
                "error",
                call,
                why,
                "Pass use_reentrant=False.",
                also=(looking,),
                edits=_not_reentrant(script, call),
            )


def _not_reentrant(script: Script, call: Call) -> tuple[Edit, ...]:
    keywords = call.node.keywords if isinstance(call.node, ast.Call) else []
    given = next((keyword.value for keyword in keywords if keyword.arg == "use_reentrant"), None)
    if given is None:
        return with_keyword(script, call.file, call.node, "use_reentrant=False")
    return swapped(script, call.file, given, "False") if isinstance(given, ast.Constant) else ()


@check("S05", source="script")
def two_forwards_before_backward(script: Script) -> Iterator[Finding]:
    for wrapping, module in wrappings(script):
        if any(
            is_off(wrapping.keywords.get(name))
            for name in ("broadcast_buffers", "forward_sync_buffers")
        ):
            continue
        norms = batch_norms(script, module)
        if not norms or any(
            True for _ in script.calls_of("torch.nn.SyncBatchNorm.convert_sync_batchnorm")
        ):
            continue
        for _, loss in _backwards(script):
            calls = {
                id(call.node): call
                for call in sources(loss)
                if _is_forward_of(call, wrapping) and not under(call, "no_grad")
            }
            ordered = sorted(calls.values(), key=lambda call: call.number)
            pairs = [
                (one, two)
                for one, two in itertools.combinations(ordered, 2)
                if not exclusive(one, two)
            ]
            if pairs:
                first, second = pairs[0]
                why = (
                    f"`{called(second)}` is called a second time (first in {place(first, second)}) before backward. Each "
                    f"forward overwrites the buffers of {kind(norms[0])} ({place(norms[0], second)}) with rank 0's, which the "
                    "first one's backward may still need. "
                    'Certain if backward says "modified by an inplace operation".'
                )
                fix = "DDP(…, broadcast_buffers=False), SyncBatchNorm, or one forward on both batches together."
                yield found(script, "S05", "suspect", second, why, fix, also=(first, wrapping))
                break


def _is_forward_of(call: Call, wrapping: Call) -> bool:
    return is_forward(call) and any(
        isinstance(way, Made) and way.call is wrapping for way in options(call.receiver or Value())
    )


# --- S06: past the wrapper
# --------------------------------------------------------------------------------------------------------


@check("S06", source="script")
def forward_past_the_wrapper(script: Script) -> Iterator[Finding]:
    if exchanges_by_hand(script):
        return
    seen = set()
    for backward, loss in _backwards(script):
        if is_alone(backward) and not any(
            step.context[:1] == backward.context[:1] for step in steps(script)
        ):
            continue  # nothing is trained with these gradients
        if _are_thrown_away(script, backward):
            continue
        calls = list(sources(loss))
        if any(is_forward(call) and "ddp" in roles(call.receiver) for call in calls):
            continue  # the hooks are armed
        for call in calls:
            past = _past_the_wrapper(script, call)
            if (
                past is None
                or under(past, "no_grad")
                or id(past.node) in seen
                or rank_branch(past) is not None
            ):
                continue  # where one rank is alone, there is nobody to average with
            seen.add(id(past.node))
            why = (
                f"`{called(past)}(…)` goes past DDP: DDP.forward does not run, so the gradients of `{called(backward)}()` "
                f"({place(backward, past)}) are not averaged. The ranks' models drift apart, with no message."
            )
            fix = "Call the wrapped model itself; let its forward do what the method does."
            yield found(
                script,
                "S06",
                "error",
                past,
                why,
                fix,
                also=(backward,),
                edits=_without_module(script, past),
            )


def _are_thrown_away(script: Script, backward: Call) -> bool:
    """The gradients of the weights are cleared before a step: only those of the input were wanted
    (an attack, say)."""
    cleared = min(
        (call.number for call in script.methods("zero_grad") if call.number > backward.number),
        default=None,
    )
    stepped = min(
        (call.number for call in steps(script) if call.number > backward.number), default=None
    )
    return cleared is not None and (stepped is None or cleared < stepped)


def _past_the_wrapper(script: Script, call: Call) -> Call | None:
    """The call by which this was reached, if it is a module's that DDP has wrapped before, not by
    way of DDP."""
    if call.method == "module" and is_wrapper(call.receiver):
        return call  # ddp.module(x)
    if inside_wrapper(call.receiver) and not call.method.startswith(
        ("state_dict", "parameters", "named_", "get_")
    ):
        return call  # ddp.module.loss(x)
    if not is_forward(call):
        return None
    wrapped = next(
        (
            w
            for w, module in wrappings(script)
            if w.number < call.number and _is_of(call.receiver, module)
        ),
        None,
    )
    if wrapped is None:
        return None
    entered = [context.call for context in call.inside(Entered) if context.call is not None]
    if any("ddp" in roles(outer.receiver) and is_forward(outer) for outer in entered):
        return None
    return next((outer for outer in entered if inside_wrapper(outer.receiver)), call)


def _is_of(value: Value | None, module: Value) -> bool:
    return value is not None and any(
        one is other for one in options(value) for other in options(module)
    )


def _without_module(script: Script, call: Call) -> tuple[Edit, ...]:
    """`model.module(x)` → `model(x)`, where it stands on one line."""
    node = call.node
    if (
        not isinstance(node, ast.Call)
        or not isinstance(node.func, ast.Attribute)
        or node.func.attr != "module"
    ):
        return ()
    return swapped(script, call.file, node.func, short(node.func.value, 1000))


# --- S07, S08, S12: changes after wrapping
# ----------------------------------------------------------------------------------------


# What follows from a change of requires_grad after DDP was made, by what it is changed to, and what
# would make it certain.
_CHANGED = {
    True: (
        "DDP averages the gradients of the parameters that required one when it was made; these were frozen then, so every rank "
        "trains them on its own batches only, with no message",
        "they were frozen when DDP was made",
    ),
    False: (
        "DDP still waits for the gradients of these parameters, and raises in the next step",
        "they stay so",
    ),
    None: (
        "DDP goes by what required a gradient when it was made. Parameters that are freed now are trained by every rank on its "
        "own batches only; for those that are frozen now it waits, and raises",
        "it was different when DDP was made",
    ),
}


@check("S07", source="script")
def requires_grad_after_wrapping(script: Script) -> Iterator[Finding]:
    changes = list(_requires_grad_changes(script))
    for wrapping, module in wrappings(script):
        again = [
            w.number
            for w, other in wrappings(script)
            if w.number > wrapping.number and _is_of(_inside(other), module)
        ]
        mine = [(at, to) for at, whose, to in changes if belongs(script, whose, module, wrapping)]
        frozen = [at for at, to in mine if at.number < wrapping.number and to is False]
        seen = set()
        for at, to in mine:
            if (
                at.number < wrapping.number
                or any(number > at.number for number in again)
                or id(at.node) in seen
            ):
                continue
            if not any(
                call.number > at.number or set(at.inside(Loop)) & set(call.inside(Loop))
                for call, _ in _backwards(script)
            ):
                continue  # for an export, after the training
            seen.add(id(at.node))
            if (to is False and "find_unused_parameters" in wrapping.keywords) or (
                to is True and exchanges_by_hand(script)
            ):
                continue
            if any(_is_put_back(at, other) or _is_put_back(other, at) for other, _ in mine):
                continue
            both = {way for other, way in mine if other.number > wrapping.number} >= {True, False}
            sure = (to is True and bool(frozen)) or (to is False and not both)
            what, certain = _CHANGED[to]
            more = "" if sure else f" Certain if {certain}."
            why = f"`{line_of(script, at)}` changes requires_grad after DDP was made in {place(wrapping, at)}: {what}.{more}"
            fix = "Change requires_grad before DDP(…), or wrap the module again afterwards (and make the optimizer anew)."
            yield found(
                script, "S07", "error" if sure else "suspect", at, why, fix, also=(wrapping,)
            )


def _is_put_back(at: Happening, later: Happening) -> bool:
    """`later` stands in a `finally` of the function that `at` stands in."""
    runs = [tuple(one.inside(Entered)) for one in (at, later)]
    ends = any(trying.part == "finally" for trying in later.inside(Trying))
    return ends and later.number > at.number and runs[0] == runs[1] and bool(runs[0])


def _inside(value: Value) -> Value:
    """`wrapper.module` is what the wrapper holds."""
    if isinstance(value, Attr) and value.name == "module" and isinstance(value.base, Made):
        return value.base.call.argument(0, "module") or value
    return value


def _requires_grad_changes(script: Script) -> Iterator[tuple[Happening, Value, bool | None]]:
    for store in script.stores:
        if store.name == "requires_grad":
            yield store, store.base, _truth(store.value)
    for call in script.methods("requires_grad_"):
        to = call.argument(0, "requires_grad")
        if call.receiver is not None:
            yield call, call.receiver, True if to is None else _truth(to)


def _truth(value: Value) -> bool | None:
    """True or False where it is known, also `not flag` of a flag that is known."""
    if isinstance(value, Computed) and value.op == "Not":
        inner = _truth(value.parents[0])
        return None if inner is None else not inner
    return bool(value.value) if isinstance(value, Constant) else None


@check("S08", source="script")
def step_of_some_ranks(script: Script) -> Iterator[Finding]:
    if not any(is_ddp_backward(call) for call in script.calls) or exchanges_by_hand(script):
        return
    stepping = [
        (call, rank_branch(call))
        for call in script.methods("step")
        if roles(call.receiver) & {"optimizer", "scaler"}
    ]
    gone = {branch.node for _, branch, _ in goers(script)}
    parted = [
        (call, branch)
        for call, branch in stepping
        if branch is not None and branch.node not in gone
    ]
    if {who_takes(branch) for _, branch in parted} >= {"rank 0 only", "all ranks but 0"}:
        return  # each has its own
    for call, branch in parted:
        why = (
            f"`{line_of(script, call)}` is called by {who_takes(branch)} (`{test_of(branch)}`): the others keep their old "
            "weights, and the models of the ranks differ from the first step on, with no message."
        )
        fix = "Step on all ranks; keep only printing and saving in the branch."
        edits = out_of_branch(script, call.file, branch.node, call.node)
        yield found(script, "S08", sure(branch), call, why + if_so(branch), fix, edits=edits)


@check("S12", source="script")
def wrapped_model_is_moved(script: Script) -> Iterator[Finding]:
    if not uses_cuda(script) or exchanges_by_hand(script):
        return
    backwards = [call for call in script.calls if is_ddp_backward(call)]
    for call in script.methods("cpu", "to"):
        wrapping = inside_wrapper(call.receiver) or next(
            (w for w, _ in wrappings(script) if _is_made_by(call.receiver, w)), None
        )
        if wrapping is None or (call.method == "to" and where(destination(call)) != "cpu"):
            continue
        loops = list(call.inside(Loop))
        later = [
            b
            for b in backwards
            if b.number > call.number or any(loop in b.context for loop in loops)
        ]
        if later:
            why = (
                f"`{line_of(script, call)}` moves the parameters of the DDP model ({place(wrapping, call)}), and it is "
                f"trained again in {place(later[0], call)}. DDP's buckets still belong to the old place: gradients are no "
                "longer averaged, with no message."
            )
            fix = "Copy the state instead: {name: tensor.cpu() for name, tensor in model.module.state_dict().items()}."
            yield found(script, "S12", "error", call, why, fix, also=(wrapping,))


def _is_made_by(value: Value | None, wrapping: Call) -> bool:
    return value is not None and any(
        isinstance(way, Made) and way.call is wrapping for way in options(value)
    )
