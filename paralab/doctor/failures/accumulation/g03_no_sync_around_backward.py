"""G03: no_sync around backward only."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.agreement import found as observed
from paralab.doctor.agreement import place_of
from paralab.doctor.failures.accumulation.synchronizing import forwards_of, wasteful
from paralab.doctor.failures.accumulation.windows import quiet, timelines
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation
from paralab.doctor.registry import Entry, check
from paralab.doctor.static.project import Scope, end, position
from paralab.doctor.static.report import At, at, code, found, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.static.timeline import Event

ENTRY = Entry(
    id="G03",
    title="no_sync around backward only",
    symptom="Correct results, but no time saved: every pass still synchronizes.",
    cause="DDP decides in forward whether the next backward synchronizes, and forward runs outside `no_sync()`.",
    fix="Move forward into the block too.",
    wrong="""\
loss = criterion(model(x), y) / N
with model.no_sync():
    loss.backward()
""",
    right="""\
with model.no_sync():
    loss = criterion(model(x), y) / N
    loss.backward()
""",
    sources=(
        "facebookresearch/ClassyVision#706",
        "KellerJordan/modded-nanogpt#31",
        "pytorch/PiPPy#1133",
    ),
    silent=True,
)


@check("G03", source="script")
def quiet_backward_only(script: Script) -> Iterator[Finding]:
    """`no_sync`, or DDP's switch for it, between forward and backward."""
    reported = set()
    for events in timelines(script):
        for event in events:
            if event.role != "backward" or event.call in reported:
                continue
            forwards = forwards_of(script, event)
            if not forwards or forwards[-1].loops != event.loops:
                continue  # P06
            backward = [quiet(script, *one) for one in _own_blocks(event, forwards)]
            quiet_forward = [quiet(script, *one) for one in forwards[-1].blocks()]
            where: At | None = None
            if (
                _mentions_no_sync(script, event, forwards)
                and True not in quiet_forward
                and None not in quiet_forward
            ):
                where = event.call if backward else None
            where = where or _switched_late(script, event, forwards[-1])
            if where is None:
                continue
            reported.add(event.call)
            forward = forwards[-1].call
            why = (
                f"This affects `{code(event.call.node)}` only, but DDP decides in forward, `{code(forward.node.func)}(…)` "
                f"({line_of(forward, where)}), whether backward synchronizes. So every pass still does."
            )
            fix = "Run the forward pass in the same `no_sync` block, or set the switch before it."
            yield found(script, "G03", "warning", where, why, fix, also=(forward,))


def _own_blocks(event: Event, forwards: list[Event]) -> list[tuple[ast.expr, Scope]]:
    """The with-blocks around backward that are not around forward."""
    shared = [item for item, _ in forwards[-1].blocks()]
    return [(item, scope) for item, scope in event.blocks() if item not in shared]


def _mentions_no_sync(script: Script, event: Event, forwards: list[Event]) -> bool:
    """May one of those blocks be `no_sync`?"""
    for item, scope in _own_blocks(event, forwards):
        calls = [item, *(one for one in ast.walk(item))]
        makers = [call.method for call in script.makers(item, scope)]
        if "no_sync" in makers or any(getattr(one, "attr", "") == "no_sync" for one in calls):
            return True
    return False


def _switched_late(script: Script, event: Event, forward: Event) -> At | None:
    """`model.require_backward_grad_sync = …` after the forward pass."""
    scope = event.call.scope
    stored = script.attributes.get("require_backward_grad_sync", [])
    if forward.call.scope is not scope:
        return None
    for one in stored:
        after = end(forward.call.node) < position(one.node) < position(event.call.node)
        if one.scope is scope and after and len(stored) == 1:
            return at(one.node, scope)
    return None


@check("G03", source="ranks")
def forward_still_synchronizes(seen: Observation) -> Iterator[Finding]:
    """`no_sync` was open around backward, but not around forward."""
    for rank, window, inside in wasteful(seen):
        if not inside:
            return  # G02
        count, forward = len(window.micro_steps), inside[0].forwards[-1]
        why = (
            f"This backward runs inside `no_sync()`, but its forward at {forward.site} does not. DDP decides in "
            f"forward, so all {count} micro-batches of a step still all-reduce their gradients."
        )
        fix = "Move the forward pass into the `no_sync()` block too."
        evidence = f"rank {rank.rank}: {len(inside)} of {count} backward passes ran inside no_sync() and still all-reduced"
        yield observed("G03", "warning", why, fix, place_of(inside[0].backward), [evidence])
        return
