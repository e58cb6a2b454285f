"""Where ranks part: collectives and forwards that only some of them come to, in another order, and
ranks that go away."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.finding import Edit, Finding, Severity
from paralab.doctor.rules import in_script
from paralab.doctor.script.agreement import is_collective, is_ddp_backward, synchronizes
from paralab.doctor.script.editing import swapped
from paralab.doctor.script.modules import has_buffers, is_known, is_off, is_wrapper
from paralab.doctor.script.naming import DDP
from paralab.doctor.script.pointing import (
    by_way_of,
    called,
    found,
    line_of,
    node_of,
    place,
    short,
    test_of,
)
from paralab.doctor.script.questions import (
    is_certain,
    is_forward,
    never,
    origins,
    rank_branch,
    roles,
    under,
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


@in_script("H02")
def a_rank_goes_away(script: Script) -> Iterator[Finding]:
    for leave, branch, waits in goers(script):
        who = who_takes(branch)
        why = (
            f"{who[0].upper()}{who[1:]}: `{line_of(script, leave)}` under `{test_of(branch)}` ends the work of these ranks, "
            f"with no error, while the others go on to `{called(waits)}` in {place(waits, leave)} and wait there for ranks "
            "that are gone."
        )
        fix = "Let all ranks leave at the same place; do only what is for one rank (printing, saving) in the branch."
        yield found(script, "H02", sure(branch), leave, why + if_so(branch), fix, also=(waits,))


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


@in_script("H03")
def collective_of_some_ranks(script: Script) -> Iterator[Finding]:
    gone = {branch.node for _, branch, _ in goers(script)}
    for mine, others in _partings(script):
        if [call.target for call in mine] == [call.target for call in others]:
            continue
        if sorted(call.target for call in mine) == sorted(call.target for call in others):
            continue  # H04
        for call in _without_partner(mine, others):
            branch = rank_branch(call)
            if branch is None or branch.node in gone:
                continue
            who = who_takes(branch)
            what = (
                "the gradients' all-reduce in `backward()`"
                if call.method == "backward"
                else f"`{called(call)}`"
            )
            why = (
                f"{what[0].upper()}{what[1:]} is called by {who} "
                f"(`{test_of(branch)}`{'' if branch.taken else ' is false here'}{by_way_of(call, branch)}). It ends when all "
                "ranks have called it, so it never ends."
            )
            fix = f"Call `{called(call)}` on all ranks, before or after the branch; keep only printing and saving in the branch."
            yield found(script, "H03", sure(branch), call, why + if_so(branch), fix)


@in_script("H04")
def collectives_in_another_order(script: Script) -> Iterator[Finding]:
    for mine, others in _partings(script):
        ops = [call.target for call in mine], [call.target for call in others]
        if ops[0] != ops[1] and sorted(ops[0]) == sorted(ops[1]):
            one, other = next(
                pair for pair in zip(mine, others, strict=True) if pair[0].target != pair[1].target
            )
            branch = rank_branch(one)
            assert branch
            why = (
                f"Under `{test_of(branch)}` the first collective is `{called(one)}` (line {one.line}), on the other ranks it "
                f"is `{called(other)}` ({place(other, one)}). Collectives meet by their order, so these two wait for each "
                "other."
            )
            yield found(
                script,
                "H04",
                sure(branch),
                one,
                why + if_so(branch),
                "Call the collectives in the same order on all ranks.",
                also=(other,),
            )


@in_script("H05")
def collectives_swapped(script: Script) -> Iterator[Finding]:
    for mine, others in _partings(script):
        if len(mine) < 2 or [call.target for call in mine] != [call.target for call in others]:
            continue
        first, second = ([_tensor(call) for call in calls] for calls in (mine, others))
        if {id(value) for value in first} != {id(value) for value in second}:
            continue
        swapped = [place for place in range(len(mine)) if first[place] is not second[place]]
        if swapped:
            one, other = mine[swapped[0]], others[swapped[0]]
            why = (
                f"In the same place some ranks reduce `{_written(one)}` (line {one.line}) and the others `{_written(other)}` "
                f"({place(other, one)}). Collectives meet by their order, not by name: the two are mixed up, without any "
                "message."
            )
            fix = "Reduce them in the same order on all ranks, or stack them into one tensor and reduce that."
            yield found(script, "H05", "error", one, why, fix, also=(other,))


@in_script("H05")
def collectives_in_the_order_of_a_set(script: Script) -> Iterator[Finding]:
    for call in script.calls:
        loop = next(call.inside(Loop), None)
        if (
            loop is None
            or not is_collective(call)
            or not _is_set(loop.over)
            or not _of_the_item(call, loop)
        ):
            continue
        why = (
            f"`{called(call)}` is called once for each item of a set. The order of a set of strings differs between "
            "processes, so the ranks reduce different items together, without any message."
        )
        yield found(script, "H05", "error", call, why, "Go through `sorted(…)` of the set.")


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


@in_script("H07")
def ddp_forward_of_some_ranks(script: Script) -> Iterator[Finding]:
    backwards = [call for call in script.calls if is_ddp_backward(call)]
    forwards = [call for call in script.calls if is_forward(call) and "ddp" in roles(call.receiver)]
    gone = {branch.node for _, branch, _ in goers(script)}
    for call in forwards:
        branch = rank_branch(call)
        wrapped = [option.call for option in _wrappers(call.receiver or Value())]
        if (
            branch is None
            or who_takes(branch) == "only some ranks"
            or any(_keeps_buffers(made) for made in wrapped)
        ):
            continue
        if branch.node in gone or any(_other_way(rank_branch(other), branch) for other in forwards):
            continue  # H02 says it; the others call it in their own branch
        if not under(call, "no_grad") and any(
            _same_way(rank_branch(other), branch) for other in backwards
        ):
            continue  # H03 says it
        buffers = has_buffers(script, wrapped[0].argument(0, "module")) if wrapped else None
        if not buffers and wrapped and is_known(script, wrapped[0].argument(0, "module")):
            continue  # no buffers, so its forward sends nothing
        name = called(call)
        why = f"`{name}(…)` is the DDP wrapper, and it is called by {who_takes(branch)} (`{test_of(branch)}`"
        why += f"{'' if branch.taken else ' is false here'}{by_way_of(call, branch)}). Its forward "
        if buffers:
            why += f"sends rank 0's buffers ({buffers}) to all ranks, which do not come: they are in another collective."
        else:
            why += "sends the model's buffers to all ranks, which do not come. Certain if the model has buffers (BatchNorm has)."
        fix = f"Call `{name}.module(…)` in this branch, or validate on all ranks."
        yield found(
            script,
            "H07",
            "error" if buffers else "suspect",
            call,
            why,
            fix,
            edits=_to_module(script, call),
        )


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
