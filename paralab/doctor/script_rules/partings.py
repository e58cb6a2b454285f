"""Where ranks part: collectives and forwards that only some of them come to, in another order, and
ranks that go away."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.finding import Edit, Severity
from paralab.doctor.script.agreement import is_collective, is_ddp_backward, synchronizes
from paralab.doctor.script.editing import swapped
from paralab.doctor.script.modules import is_off, is_wrapper
from paralab.doctor.script.naming import DDP
from paralab.doctor.script.pointing import (
    called,
    node_of,
    short,
    test_of,
)
from paralab.doctor.script.questions import (
    is_certain,
    never,
    origins,
    rank_branch,
    who_takes,
)
from paralab.doctor.script.reading import Script
from paralab.doctor.script.remembering import remembered
from paralab.doctor.script.values import (
    Branch,
    Call,
    Computed,
    Constant,
    Entered,
    Leave,
    Loop,
    Made,
    Value,
    options,
)

# --- who goes away
# --------------------------------------------------------------------------------------------------------------


@remembered
def goers(script: Script) -> list[tuple[Leave, Branch, Call]]:
    return list(_goers(script))


def _goers(script: Script) -> Iterator[tuple[Leave, Branch, Call]]:
    """Leaves by which some ranks end for good, and the first call in which the others wait for
    them."""
    waiting = [call for call in script.calls if synchronizes(call)]
    for leave in script.leaves:
        branch = rank_branch(leave)
        if (
            branch is None
            or leave.kind not in ("exit", "return", "break")
            or is_failure(leave)
            or never(leave)
        ):
            continue
        start = _frame(leave)
        loops = [loop for loop in leave.context if isinstance(loop, Loop)]
        if leave.kind == "return":
            outside = [
                call for call in waiting if call.context[: start + 1] != leave.context[: start + 1]
            ]
            around = [loop for loop in leave.context[:start] if isinstance(loop, Loop)]
            if any(
                call.number > leave.number or any(loop in call.context for loop in around)
                for call in outside
            ):
                continue  # these ranks go on elsewhere
            loops = [loop for loop in loops if loop not in around]
        if leave.kind == "break":
            loops = loops[-1:]
            if not loops or leave.context.index(loops[0]) > leave.context.index(branch):
                continue  # the loop itself is of these ranks only
        left = [
            call
            for call in waiting
            if call.number > leave.number and (leave.kind == "exit" or _within(call, leave, start))
        ]
        again = [call for call in waiting if any(loop in call.context for loop in loops)]
        others = [
            call
            for call in (*left, *again)
            if rank_branch(call) is None or not _same_way(rank_branch(call), branch)
        ]
        if leave.kind == "break":
            others = [call for call in again if call in others]
        others = _without_partners(
            others, [call for call in waiting if _is_before(call, leave, branch)]
        )
        # where the other ranks return, too, they do so perhaps together: what both ask besides the
        # rank is not known
        if others and not (leave.kind == "return" and _others_return(script, leave, branch)):
            yield (
                leave,
                branch,
                min(others, key=lambda call: (call.number < leave.number, call.number)),
            )


def _is_before(call: Call, leave: Leave, branch: Branch) -> bool:
    """In the same branch, before it is left."""
    return call.number < leave.number and branch in call.context


def _without_partners(calls: list[Call], made: list[Call]) -> list[Call]:
    """The calls that the leaving ranks have not made themselves just before: `if rank != 0:
    dist.barrier(); return`."""
    targets = [call.target for call in made]
    alone = []
    for call in calls:
        if call.target in targets:
            targets.remove(call.target)
        else:
            alone.append(call)
    return alone


def _frame(leave: Leave) -> int:
    """Where in its context the function that it stands in begins; -1 for a module."""
    return max(
        (number for number, context in enumerate(leave.context) if isinstance(context, Entered)),
        default=-1,
    )


def _others_return(script: Script, leave: Leave, branch: Branch) -> bool:
    """Does the other way of the branch return from the same run of the function, too?"""
    entered = leave.context[: _frame(leave) + 1]
    same = (
        other
        for other in script.leaves
        if other.kind == "return" and other.context[: _frame(other) + 1] == entered
    )
    return any(_other_way(mine, branch) for other in same for mine in other.inside(Branch))


def _within(call: Call, leave: Leave, start: int) -> bool:
    return call.context[: start + 1] == leave.context[: start + 1]


def _same_way(one: Branch | None, other: Branch) -> bool:
    return one is not None and one.node is other.node and one.taken is other.taken


def _other_way(one: Branch | None, other: Branch) -> bool:
    return one is not None and one.node is other.node and one.taken is not other.taken


def is_failure(leave: Leave) -> bool:
    """`sys.exit(1)`: the launcher ends the others."""
    if leave.kind != "exit" or leave.value is None:
        return False
    return not (isinstance(leave.value, Constant) and leave.value.value in (0, None))


def sure(branch: Branch) -> Severity:
    """A test that we cannot work out (`rank == options.chief`) may be the same on all ranks."""
    return "error" if is_certain(branch) else "suspect"


def if_so(branch: Branch) -> str:
    return "" if is_certain(branch) else f" Certain if `{test_of(branch)}` differs between ranks."


# --- collectives of some ranks
# --------------------------------------------------------------------------------------------------


def _of_the_item(call: Call, loop: Loop) -> bool:
    """Is what is sent worked out from the loop's item? A `broadcast(None)` for each item is the
    same, whatever the order."""
    sent = (origin for value in (*call.args, *call.keywords.values()) for origin in origins(value))
    return any(
        isinstance(origin, Computed) and origin.op == "Item" and loop.over in origin.parents
        for origin in sent
    )


def _is_set(value: Value) -> bool:
    node = node_of(value)
    made = getattr(value, "call", None)
    if made is not None and made.target in ("builtins.set", "builtins.frozenset"):
        return True
    return isinstance(node, ast.SetComp | ast.Set)


def _tensor(call: Call) -> Value | None:
    return call.argument(0, "tensor")


def _written(call: Call) -> str:
    return (
        ast.unparse(call.node.args[0])
        if isinstance(call.node, ast.Call) and call.node.args
        else called(call)
    )


def _partings(script: Script) -> Iterator[tuple[list[Call], list[Call]]]:
    """Stretches of collectives that only some ranks come to: what one part of the ranks calls, and
    what the other part calls, until the next one that all call."""
    mine: list[Call] = []
    others: list[Call] = []
    for call in script.calls:
        if not (is_collective(call) or is_ddp_backward(call)):
            continue
        branch = rank_branch(call)
        if branch is None:
            if mine or others:
                yield mine, others
            mine, others = [], []
        elif _is_first_part(branch):
            mine.append(call)
        else:
            others.append(call)
    if mine or others:
        yield mine, others


def _is_first_part(branch: Branch) -> bool:
    who = who_takes(branch)
    return who == "rank 0 only" or (who == "only some ranks" and branch.taken)


def _without_partner(mine: list[Call], others: list[Call]) -> list[Call]:
    left = list(others)
    alone = []
    for call in mine:
        partner = next((other for other in left if other.target == call.target), None)
        if partner:
            left.remove(partner)
        else:
            alone.append(call)
    return [*_not_awaited(alone, others), *_not_awaited(left, mine)]


def _not_awaited(calls: list[Call], others: list[Call]) -> list[Call]:
    awaited = {other.target for other in others if _is_repeated(other)}
    return [call for call in calls if call.target not in awaited]


def _is_repeated(call: Call) -> bool:
    """In a `while` of its own branch: followers that take what comes until they are told to
    stop."""
    branch = rank_branch(call)
    within = call.context[call.context.index(branch) :] if branch in call.context else ()
    return any(isinstance(loop, Loop) and isinstance(loop.node, ast.While) for loop in within)


# --- the model called by some ranks
# ---------------------------------------------------------------------------------------------


def _to_module(script: Script, call: Call) -> tuple[Edit, ...]:
    """`model(x)` → `model.module(x)`, if it is the wrapper, and some ranks', whenever this line is
    reached."""
    reached = [other for other in script.calls if other.node is call.node]
    if not isinstance(call.node, ast.Call) or not all(
        is_wrapper(other.receiver) and rank_branch(other) for other in reached
    ):
        return ()
    return swapped(script, call.file, call.node.func, f"{short(call.node.func, 1000)}.module")


def _wrappers(value: Value) -> list[Made]:
    return [
        option
        for option in options(value)
        if isinstance(option, Made) and option.call.target == DDP
    ]


def _keeps_buffers(made: Call) -> bool:
    return is_off(made.keywords.get("broadcast_buffers")) or is_off(
        made.keywords.get("forward_sync_buffers")
    )
