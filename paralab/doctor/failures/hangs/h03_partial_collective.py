"""H03: A collective that only some ranks call. H02, H04, H05, and H07 share its checks of
scripts.

Symptom: Rank 0 waits in a collective until the timeout. The other ranks wait in their next collective, or have exited.
Cause: The collective is in a branch that only one rank enters (`if rank == 0:`), but every rank must call it.
Fix: Call the collective on all ranks, and keep only the local work (printing, saving) in the branch.
Reported: alan-turing-institute/autocast#386

+ dist.all_reduce(loss)
  if dist.get_rank() == 0:
-     dist.all_reduce(loss)
      print(loss.item())
"""

import ast
import re

from paralab.doctor.failures.hangs.h07_forward_on_one_rank import may_be_unwrapped
from paralab.doctor.failures.hangs.sequences import Difference, differences_of
from paralab.doctor.registry import Finding, Findings, check, describe
from paralab.doctor.static.bindings import dotted_key
from paralab.doctor.static.collective_tree import Guard, Leave, Meet
from paralab.doctor.static.facts import Call, If, Loop, is_constant, names_in
from paralab.doctor.static.hints import is_for_one_rank, is_for_others
from paralab.doctor.static.models import buffers_of, wrapped_by
from paralab.doctor.static.names import (
    COLLECTIVES,
    FRAMEWORK_COLLECTIVES,
    GATHERS,
    GROUP_POSITION,
    sounds_like,
)
from paralab.doctor.static.report import at, code, found, line_of, replace
from paralab.doctor.static.script import Script

ENTRY = describe(__doc__)
IF_REACHED = "if the enclosing conditions are true on that rank"


@check("H02", "H03", "H04", "H05", "H07", source="script")
def ranks_part(script: Script) -> Findings:
    """Report where rank 0 and rank 1 stop calling the same collectives."""
    differences = differences_of(script)
    waits = {
        one.more.guard.node
        for one in differences
        if isinstance(one.more, Meet) and one.more.op != "forward" and one.more.guard
    }
    for difference in differences:
        if isinstance(difference.more, Leave):
            yield _leaves_early(script, difference, difference.more)
        elif difference.more.op == "forward":
            if difference.more.guard is not None and difference.more.guard.node in waits:
                continue  # H03 reports it
            yield from _forward(script, difference, difference.more)
        elif difference.swapped and difference.other is not None:
            yield _swapped(script, difference.more, difference.other)
        elif difference.other is not None and difference.other.guard is not None:
            yield _other_order(script, difference, difference.more, difference.other)
        elif difference.more.guard is not None:
            yield _extra(script, difference, difference.more, difference.more.guard)


def _leaves_early(script: Script, difference: Difference, leave: Leave) -> Finding:
    where = at(leave.node, leave.scope)
    other = difference.other
    assert other is not None
    assert leave.guard is not None
    why = (
        f"Rank {difference.rank} leaves here (`{code(leave.guard.test)}`). The other ranks continue to "
        f"`{code(other.call.node.func)}` ({line_of(other.call, where)}) and wait for it there."
    )
    doubt = "" if difference.sure else IF_REACHED
    return found(script, "H02", "error", where, why, doubt=doubt, also=(other.call,))


def _extra(script: Script, difference: Difference, meet: Meet, guard: Guard) -> Finding:
    name = f"`{code(meet.call.node.func)}`"
    name = "The all-reduce in `backward()`" if meet.op == "backward" else name
    test = line_of(at(guard.node, guard.scope), meet.call)
    why = (
        f"{name} needs all ranks, but only rank {difference.rank} gets here: `{code(guard.test)}` "
        f"({test}) keeps the others out. Rank {difference.rank} waits forever."
    )
    doubt = (
        "" if difference.sure else "if the model is sharded" if meet.op in GATHERS else IF_REACHED
    )
    return found(script, "H03", "error", meet.call, why, doubt=doubt)


def _other_order(script: Script, difference: Difference, one: Meet, other: Meet) -> Finding:
    why = (
        f"Here some ranks call `{code(one.call.node.func)}`, while the others call "
        f"`{code(other.call.node.func)}` ({line_of(other.call, one.call)}), and both wait for each other."
    )
    doubt = "" if difference.sure else IF_REACHED
    return found(script, "H04", "error", one.call, why, doubt=doubt, also=(other.call,))


def _swapped(script: Script, one: Meet, other: Meet) -> Finding:
    why = (
        f"Here some ranks reduce `{code(one.call.node.args[0])}`, while the others reduce "
        f"`{code(other.call.node.args[0])}` ({line_of(other.call, one.call)}). Ranks match collectives by "
        "their order, so the two values are silently mixed up."
    )
    return found(script, "H05", "error", one.call, why, also=(other.call,))


def _forward(script: Script, difference: Difference, meet: Meet) -> Findings:
    """Report H07, because DDP's forward broadcasts the buffers of a model that has any."""
    guard = meet.guard
    wrap = wrapped_by(script, meet.call.node.func, meet.call.scope)
    if guard is None or wrap is None:
        return
    is_wrapper = script.kinds(meet.call.node.func, meet.call.scope) == {"ddp"}
    if not is_wrapper and may_be_unwrapped(script, meet.call):
        return
    options = ("broadcast_buffers", "forward_sync_buffers")
    if any(is_constant(wrap.argument(99, name), False) for name in options):
        return
    buffers = buffers_of(script, wrap.argument(0, "module"), wrap.scope)
    if buffers == "":
        return  # every layer is known, and none has buffers
    name = code(meet.call.node.func)
    why = (
        f"Only rank {difference.rank} calls the DDP wrapper `{name}` here (`{code(guard.test)}`), but its forward "
        f"broadcasts the buffers{f' of {buffers}' if buffers else ''} to all ranks."
    )
    ignored = script.attributes.get("_ddp_params_and_buffers_to_ignore")
    doubt = "" if guard.sure and not ignored else IF_REACHED
    doubt = doubt if buffers else "if the model has buffers (BatchNorm does)"
    if not is_wrapper:  # a caller unwraps it
        doubt = f"if `{name}` is the wrapper, not `{name}.module`"
    edits = replace(script, meet.call.module, meet.call.node.func, f"{name}.module")
    yield found(script, "H07", "error", meet.call, why, doubt=doubt, edits=edits)


_PARTS = re.compile(
    r"(^|_)(tp|pp|mp|cp|ep|model|tensor|pipe|node|local|expert|intra|inter|mesh|sub)", re.I
)


@check("H03", source="script")
def guarded_by_name(script: Script) -> Findings:
    """Flag a collective under `if rank == 0:` that the other ranks never match."""
    for call in script.methods(*COLLECTIVES, *FRAMEWORK_COLLECTIVES, "prepare"):
        known = call.target.startswith("torch.distributed.") or call.method in FRAMEWORK_COLLECTIVES
        known = known or (call.method == "prepare" and _wraps_a_model(script, call))
        group = call.argument(GROUP_POSITION.get(call.method, 99), "group")
        if not known or (group is not None and _is_part(script, group, call)):
            continue
        tests = [one for one in call.inside(If) if not one.exits]
        test = next((one.test for one in tests if is_for_one_rank(one.test, one.taken)), None)
        if test is None or any(
            is_for_others(way.test, way.taken)
            for one in script.calls_in(call.scope)
            if one.method == call.method
            for way in one.inside(If)
        ):
            continue  # a branch that rank 0 skips also calls it: `if rank != 0: barrier()`
        why = f"`{code(test)}` keeps the other ranks out of `{code(call.node.func)}`, and they do not call it anywhere else here."
        doubt = "if the group has more than one rank"
        yield found(script, "H03", "suspect", call, why, doubt=doubt)


def _wraps_a_model(script: Script, call: Call) -> bool:
    """Return whether Accelerate wraps a model in DDP here, which broadcasts its parameters."""
    is_own = code(call.receiver).endswith("accelerator")
    return is_own and any(
        script.is_kind(one, call.scope, "module", "ddp")
        or sounds_like(code(one).rpartition(".")[2]) == "module"
        for one in call.node.args
    )


def _is_part(script: Script, group: ast.expr, call: Call) -> bool:
    """Return whether a group contains only some ranks, judging by its name or a literal list."""
    listed = [one.argument(0, "ranks") for one in script.makers(group, call.scope)]
    return bool(_PARTS.search(code(group))) or any(isinstance(one, ast.List) for one in listed)


@check("H05", source="script")
def order_of_a_set(script: Script) -> Findings:
    """Report collectives in a loop over a set, which each process iterates in its own order."""
    for call in script.methods(*COLLECTIVES):
        if not call.target.startswith("torch.distributed."):
            continue
        for loop in call.inside(Loop):
            items = getattr(loop.node, "iter", None)
            made = dotted_key(items.func) if isinstance(items, ast.Call) else None
            is_set = made in ("set", "frozenset") or isinstance(items, (ast.Set, ast.SetComp))
            if is_set and names_in(call.node) & _computed_from_item(loop):
                why = (
                    f"`{code(call.node.func)}` runs once per element of the set `{code(items)}`. Each process "
                    "iterates over a set of strings in its own order, so ranks silently combine "
                    "different elements."
                )
                fix = "Loop over `sorted(…)` of the set."
                doubt = "if the elements are strings"
                yield found(script, "H05", "suspect", call, why, fix, doubt=doubt)


def _computed_from_item(loop: Loop) -> set[str]:
    """Return the loop's variables and the names that the loop computes from them."""
    names = names_in(getattr(loop.node, "target", None))
    for node in ast.walk(loop.node):
        if isinstance(node, ast.Assign) and names & names_in(node.value):
            names |= {name for target in node.targets for name in names_in(target)}
    return names
