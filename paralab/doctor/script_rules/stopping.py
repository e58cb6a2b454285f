"""Ranks that stop at different times: the loop is left on a rank's own numbers, or on a flag that
only some ranks set."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from paralab.doctor.finding import Finding
from paralab.doctor.registry import check
from paralab.doctor.script.agreed import is_agreed
from paralab.doctor.script.agreement import Agreement, in_a_job, is_collective, is_ddp_backward
from paralab.doctor.script.pointing import called, found, line_of, place, short, test_of
from paralab.doctor.script.questions import is_forward, origins, rank_branch, who_takes
from paralab.doctor.script.reading import Script
from paralab.doctor.script.values import (
    Branch,
    Call,
    Entered,
    Happening,
    Leave,
    Loop,
    Made,
    Value,
    options,
)
from paralab.doctor.script_rules.hangs import training_loops
from paralab.doctor.script_rules.partings import if_so, is_failure, sure


@check("H08", source="script")
def stop_on_own_numbers(script: Script) -> Iterator[Finding]:
    if not in_a_job(script):
        return
    agreement = Agreement()
    for leave, loops, wait in _leaves(script):
        for branch in _branches_within(leave, loops):
            own = agreement.own(branch.test, clocks=True)
            if own is None:
                continue
            clock = isinstance(own, Made) and own.call.target.startswith("time.")
            whose = "clock" if clock else "own batches"
            what = "skips the rest of this turn" if leave.kind == "continue" else "leaves the loop"
            why = (
                f"`{test_of(branch)}` is worked out from each rank's {whose} and was not reduced over the ranks. The rank "
                f"where it comes out differently {what} here, and the others wait for it in `{called(wait)}` "
                f"({place(wait, leave)})."
            )
            fix = (
                "Decide together: all_reduce the number (or a 0/1 flag with ReduceOp.MAX) before the test, so that all ranks "
                "see the same."
            )
            yield found(
                script, "H08", "suspect" if clock else "error", leave, why, fix, also=(wait,)
            )
            break


@check("H08", source="script")
def loop_while_own_numbers(script: Script) -> Iterator[Finding]:
    if not in_a_job(script):
        return
    agreement = Agreement()
    for loop, backward in training_loops(script):
        if isinstance(loop.node, ast.While) and any(
            agreement.own(test) is not None for test in (loop.over, *loop.again)
        ):
            at = Happening(backward.number, loop.node, loop.file, ())
            why = (
                f"`while {short(loop.node.test)}` is worked out from each rank's own batches. The rank where it becomes false "
                f"first leaves, and the others wait for it in `{called(backward)}` ({place(backward, at)})."
            )
            yield found(
                script,
                "H08",
                "error",
                at,
                why,
                "all_reduce the number that is tested, so that all ranks see the same.",
                also=(backward,),
            )


# --- a flag that some ranks set
# ---------------------------------------------------------------------------------------------------


@check("H08", source="script")
def stop_on_a_flag_of_some_ranks(script: Script) -> Iterator[Finding]:
    """`if rank == 0: flag.fill_(1)`, and nobody sends the flag: `if flag.item(): break`."""
    changes = _changes(script)
    if not in_a_job(script) or not any(rank_branch(change) for change, _ in changes):
        return
    tests: list[tuple[Happening, Value, str, Call]] = []
    for leave, loops, wait in _leaves(script):
        tests += [
            (leave, branch.test, test_of(branch), wait) for branch in _branches_within(leave, loops)
        ]
    for loop, backward in training_loops(script):
        if isinstance(loop.node, ast.While):
            at = Happening(backward.number, loop.node, loop.file, ())
            tests += [
                (at, test, short(loop.node.test), backward) for test in (loop.over, *loop.again)
            ]
    for at, test, text, wait in tests:
        change = _set_by_some(script, test, changes, at)
        branch = rank_branch(change) if change else None
        if change is None or branch is None:
            continue
        why = (
            f"`{text}` asks for what `{line_of(script, change)}` ({place(change, at)}) sets on {who_takes(branch)} "
            f"(`{test_of(branch)}`), and nothing sends it to the other ranks. There it stays as it was: some leave the loop here, "
            f"and the others wait for them in `{called(wait)}` ({place(wait, at)})."
        )
        fix = "Send the flag before anybody asks for it: dist.broadcast(flag, src=0), on all ranks."
        yield found(script, "H08", sure(branch), at, why + if_so(branch), fix, also=(change, wait))


def _changes(script: Script) -> list[tuple[Happening, Value]]:
    """Where tensors are changed in place, and which."""
    calls = [
        (call, call.receiver)
        for call in script.calls
        if call.method.endswith("_") and not call.method.startswith("_")
    ]
    stores = [(store, store.base) for store in script.stores if store.name == "[]"]
    return sorted(
        ((at, value) for at, value in (*calls, *stores) if value is not None),
        key=lambda pair: pair[0].number,
    )


def _set_by_some(
    script: Script, test: Value, changes: list[tuple[Happening, Value]], at: Happening
) -> Happening | None:
    """The change of a tensor behind a test that only some ranks make, if that tensor is nobody
    else's business."""
    asked = list(origins(test, lambda value: isinstance(value, Made) and is_forward(value.call)))
    if any(is_agreed(origin) for origin in asked):
        return None
    for flag in (
        origin
        for origin in asked
        if isinstance(origin, Made) and origin.call.target.startswith("torch.")
    ):
        own = [change for change, value in changes if any(way is flag for way in options(value))]
        parted = [change for change in own if rank_branch(change) is not None]
        ways = {(branch.node, branch.taken) for change in parted if (branch := rank_branch(change))}
        if (
            not parted
            or any((node, not taken) in ways for node, taken in ways)
            or any(map(partial(_gives, flag), script.calls))
        ):
            continue
        if not any(parted[-1].number < change.number < at.number for change in own):
            return parted[-1]
    return None


def _gives(flag: Value, call: Call) -> bool:
    """Is it given to code that was not read, which may send it, or to torch.distributed?"""
    quiet = call.into is not None or (
        call.target.startswith(("builtins.", "torch."))
        and not call.target.startswith("torch.distributed.")
    )
    return not quiet and any(
        way is flag for value in (*call.args, *call.keywords.values()) for way in options(value)
    )


# --- where loops are left
# ---------------------------------------------------------------------------------------------------------


def _leaves(script: Script) -> Iterator[tuple[Leave, list[Loop], Call]]:
    """Where loops are left, or a turn of them, by no test on the rank; and where the others then
    wait."""
    waits = [call for call in script.calls if is_ddp_backward(call) or is_collective(call)]
    for leave in script.leaves:
        loops = _left(leave)
        inside = [call for call in waits if any(loop in call.context for loop in loops)]
        if leave.kind == "continue":
            inside = [call for call in inside if call.number > leave.number]
        if (
            leave.kind != "raise"
            and inside
            and rank_branch(leave) is None
            and not is_failure(leave)
        ):
            yield leave, loops, inside[0]


def _left(leave: Leave) -> list[Loop]:
    """The loops that it leaves (or whose turn it ends)."""
    start = max(
        (number for number, context in enumerate(leave.context) if isinstance(context, Entered)),
        default=-1,
    )
    frame = leave.context if leave.kind == "exit" else leave.context[start + 1 :]
    loops = [
        context
        for context in frame
        if isinstance(context, Loop) and not isinstance(context.node, ast.comprehension)
    ]
    return loops[-1:] if leave.kind in ("break", "continue") else loops


def _branches_within(leave: Leave, loops: list[Loop]) -> Iterator[Branch]:
    """The tests between the outermost loop that it leaves and itself, the innermost first."""
    start = leave.context.index(loops[0])
    return (context for context in reversed(leave.context[start:]) if isinstance(context, Branch))
