"""H02–H05 and H07: ranks that call different collectives."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from paralab.doctor.finding import Finding, Severity
from paralab.doctor.registry import Entry, check
from paralab.doctor.static.facts import Call, If, Loop
from paralab.doctor.static.hints import is_for_one_rank
from paralab.doctor.static.models import buffers_of, wrapped_by
from paralab.doctor.static.names import COLLECTIVES, FRAMEWORK_COLLECTIVES, GROUP_POSITION
from paralab.doctor.static.project import dotted_key
from paralab.doctor.static.report import at, code, found, line_of, replace
from paralab.doctor.static.script import Script
from paralab.doctor.static.sequences import Difference, Guard, Leave, Meet, differences_of

ENTRY = Entry(
    id="H03",
    title="A collective that only some ranks call",
    symptom=(
        "Rank 0 waits in all_reduce, barrier, or gather until the timeout; the other ranks wait in their next "
        "collective or have exited."
    ),
    cause=(
        "The collective is inside a branch that only one rank enters (`if rank == 0:`), but it needs every "
        "rank of the group."
    ),
    fix="Call the collective on all ranks, and keep only the local work (printing, writing) in the branch.",
    example="""\
+ dist.all_reduce(loss)
  if dist.get_rank() == 0:
-     dist.all_reduce(loss)
      print(loss.item())
""",
    sources=("alan-turing-institute/autocast#386",),
)


@check("H02", "H03", "H04", "H05", "H07", source="script")
def ranks_part(script: Script) -> Iterator[Finding]:
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


def _leaves_early(script: Script, found_: Difference, leave: Leave) -> Finding:
    where = at(leave.node, leave.scope)
    other = found_.other
    assert other is not None
    assert leave.guard is not None
    why = (
        f"Rank {found_.rank} leaves here (`{code(leave.guard.test)}`). The other ranks continue to "
        f"`{code(other.call.node.func)}` ({line_of(other.call, where)}) and wait for it there."
    )
    fix = "Let all ranks leave at the same place; broadcast the decision if one rank makes it."
    severity: Severity = "error" if found_.sure else "suspect"
    return found(script, "H02", severity, where, why, fix, also=(other.call,))


def _extra(script: Script, found_: Difference, meet: Meet, guard: Guard) -> Finding:
    name = (
        "The all-reduce in `backward()`"
        if meet.op == "backward"
        else f"`{code(meet.call.node.func)}`"
    )
    test = line_of(at(guard.node, guard.scope), meet.call)
    why = (
        f"{name} needs all ranks, but only rank {found_.rank} gets here: "
        f"`{code(guard.test)}` ({test}) keeps the others out. They never call it, so it never ends."
    )
    fix = f"Call `{code(meet.call.node.func)}` on all ranks; keep only printing and saving in the branch."
    if not found_.sure:
        why += " Certain if the conditions on the way here hold on that rank."
    return found(script, "H03", "error" if found_.sure else "suspect", meet.call, why, fix)


def _other_order(script: Script, found_: Difference, one: Meet, other: Meet) -> Finding:
    why = (
        f"Here some ranks call `{code(one.call.node.func)}`, while the others call "
        f"`{code(other.call.node.func)}` ({line_of(other.call, one.call)}). Collectives match by "
        "their order, so these two wait for each other."
    )
    fix = "Call the collectives in the same order on all ranks."
    severity: Severity = "error" if found_.sure else "suspect"
    return found(script, "H04", severity, one.call, why, fix, also=(other.call,))


def _swapped(script: Script, one: Meet, other: Meet) -> Finding:
    why = (
        f"In the same place some ranks send `{code(one.call.node.args[0])}` and the others "
        f"`{code(other.call.node.args[0])}` ({line_of(other.call, one.call)}). Collectives match by "
        "their order, not by name: the two are mixed up without a message."
    )
    fix = "Use the same order on all ranks, or stack both into one tensor."
    return found(script, "H05", "error", one.call, why, fix, also=(other.call,))


def _forward(script: Script, found_: Difference, meet: Meet) -> Iterator[Finding]:
    """Report H07: the forward pass of a DDP model broadcasts the model's buffers, if any."""
    guard = meet.guard
    wrap = wrapped_by(script, meet.call.node.func, meet.call.scope)
    if guard is None or wrap is None:
        return
    if any(
        isinstance(value, ast.Constant) and value.value is False
        for name in ("broadcast_buffers", "forward_sync_buffers")
        for value in [wrap.argument(99, name)]
    ):
        return
    buffers = buffers_of(script, wrap.argument(0, "module"), wrap.scope)
    if buffers == "":
        return  # every layer is known, and none has buffers
    name = code(meet.call.node.func)
    why = f"`{name}` is the DDP wrapper, and only rank {found_.rank} calls it here (`{code(guard.test)}`). "
    if buffers:
        why += f"Its forward broadcasts the buffers of {buffers} to all ranks, which are not in forward."
    else:
        why += "Its forward broadcasts buffers. Certain if the model has any (BatchNorm does)."
    fix = f"Call `{name}.module(…)` in this branch, or validate on all ranks."
    ignored = script.attributes.get("_ddp_params_and_buffers_to_ignore")
    severity: Severity = "error" if buffers and guard.sure and not ignored else "suspect"
    edits = replace(script, meet.call.module, meet.call.node.func, f"{name}.module")
    yield found(script, "H07", severity, meet.call, why, fix, edits=edits)


_PARTS = re.compile(
    r"(^|_)(tp|pp|mp|cp|ep|model|tensor|pipe|node|local|expert|intra|inter|mesh|sub)", re.I
)


@check("H03", source="script")
def guarded_by_name(script: Script) -> Iterator[Finding]:
    """Suspect a collective under `if rank == 0:` without a matching call on the other ranks."""
    for call in script.methods(*COLLECTIVES, *FRAMEWORK_COLLECTIVES):
        known = call.target.startswith("torch.distributed.") or call.method in FRAMEWORK_COLLECTIVES
        group = call.argument(GROUP_POSITION.get(call.method, 99), "group")
        if not known or (group is not None and _is_part(script, group, call)):
            continue
        alike = [one for one in script.calls_in(call.scope) if one.method == call.method]
        if any(_is_for_others(one) for one in alike):
            continue
        for test in call.inside(If):
            if is_for_one_rank(test.test, test.taken) and not test.exits:
                why = (
                    f"`{code(test.test)}` keeps the other ranks out of `{code(call.node.func)}`, and nothing here "
                    "lets them call it. Certain if the group has more than one rank."
                )
                yield found(script, "H03", "suspect", call, why, ENTRY.fix)
                break


def _is_part(script: Script, group: ast.expr, call: Call) -> bool:
    """Return whether a group has only some ranks, judging by its name or a literal list."""
    listed = [one.argument(0, "ranks") for one in script.makers(group, call.scope)]
    return bool(_PARTS.search(code(group))) or any(isinstance(one, ast.List) for one in listed)


def _is_for_others(call: Call) -> bool:
    """Return whether a call is in a branch that rank 0 skips: `if rank != 0: barrier()`."""
    return any(is_for_one_rank(one.test, not one.taken) for one in call.inside(If))


@check("H05", source="script")
def order_of_a_set(script: Script) -> Iterator[Finding]:
    """Report collectives in a loop over a set, which each process iterates in its own order."""
    for call in script.methods(*COLLECTIVES):
        if not call.target.startswith("torch.distributed."):
            continue
        names = {one.id for one in ast.walk(call.node) if isinstance(one, ast.Name)}
        for loop in call.inside(Loop):
            items = getattr(loop.node, "iter", None)
            if not _is_set(script, items, call) or not _uses(script, names, loop, call):
                continue
            why = (
                f"`{code(call.node.func)}` runs once per element of the set `{code(items)}`. Each "
                "process iterates over a set of strings in its own order, so ranks combine "
                "different elements without a message."
            )
            yield found(script, "H05", "error", call, why, "Loop over `sorted(…)` of the set.")


def _is_set(script: Script, items: ast.AST | None, call: object) -> bool:
    if isinstance(items, ast.Call):
        return dotted_key(items.func) in ("set", "frozenset")
    return isinstance(items, (ast.Set, ast.SetComp))


def _uses(script: Script, names: set[str], loop: Loop, call: object) -> bool:
    """Return whether the collective sends something computed from the loop's item."""
    target = getattr(loop.node, "target", None)
    items = {one.id for one in ast.walk(target) if isinstance(one, ast.Name)} if target else set()
    body = getattr(loop.node, "body", [])
    for statement in body if isinstance(body, list) else []:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign) and items & {
                one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)
            }:
                items |= {
                    one.id
                    for target in node.targets
                    for one in ast.walk(target)
                    if isinstance(one, ast.Name)
                }
    return bool(names & items)
