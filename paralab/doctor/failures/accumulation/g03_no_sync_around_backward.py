"""G03: no_sync around backward only."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.failures.accumulation.synchronizing import forwards_of, wasteful
from paralab.doctor.failures.accumulation.windows import quiet, timelines
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Entry, check
from paralab.doctor.static.project import end, position
from paralab.doctor.static.report import At, at, code, found, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.static.timeline import Event

ENTRY = Entry(
    id="G03",
    title="no_sync around backward only",
    symptom="Correct results, but no time saved: every pass still synchronizes.",
    cause="DDP decides in forward whether the next backward synchronizes, and forward runs outside `no_sync()`.",
    fix="Move forward into the block too.",
    example="""\
- loss = criterion(model(x), y) / N
  with model.no_sync():
+     loss = criterion(model(x), y) / N
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
    """Report `no_sync`, or the DDP attribute behind it, set between forward and backward."""
    reported = set()
    for events in timelines(script):
        for event in events:
            forwards = forwards_of(script, event) if event.role == "backward" else []
            if not forwards or forwards[-1].loops != event.loops or event.call in reported:
                continue  # in loops of their own: P06
            forward = forwards[-1].call
            name = f"`{code(forward.node.func)}(…)`"
            late = _switched_late(script, event, forwards[-1])
            if late is not None:
                reported.add(event.call)
                why = (
                    f"DDP reads this attribute in forward, and {name} ({line_of(forward, late)}) has already run. "
                    "So it takes effect one micro-batch late, and the wrong micro-batch synchronizes."
                )
                fix = "Set the attribute before the forward pass."
                yield found(script, "G03", "warning", late, why, fix, also=(forward,))
            elif _is_quiet_alone(script, event, forwards[-1]):
                reported.add(event.call)
                why = (
                    f"Only `{code(event.call.node)}` is inside `no_sync`. DDP decides in forward, {name} "
                    f"({line_of(forward, event.call)}), whether backward synchronizes, so every pass still does."
                )
                fix = "Move the forward pass into the `no_sync` block too."
                yield found(script, "G03", "warning", event.call, why, fix, also=(forward,))


def _is_quiet_alone(script: Script, backward: Event, forward: Event) -> bool:
    """Return whether backward may run in a `no_sync` block while forward certainly does not."""
    around = list(forward.blocks())
    if any(quiet(script, *block) is not False for block in around):
        return False
    for item, scope in backward.blocks():
        names = {call.method for call in script.makers(item, scope)}
        names.update(getattr(one, "attr", "") for one in ast.walk(item))
        if "no_sync" in names and (item, scope) not in around:
            return True
    return False


def _switched_late(script: Script, backward: Event, forward: Event) -> At | None:
    """Return `model.require_backward_grad_sync = …` if it is only set after the forward pass."""
    stored = script.attributes.get("require_backward_grad_sync", [])
    scope = backward.call.scope
    if len(stored) != 1 or forward.call.scope is not scope or stored[0].scope is not scope:
        return None
    node = stored[0].node
    is_late = end(forward.call.node) < position(node) < position(backward.call.node)
    return at(node, scope) if is_late else None


@check("G03", source="ranks")
def forward_still_synchronizes(seen: Observation) -> Iterator[Finding]:
    """Report `no_sync` blocks that were open around backward but not around forward."""
    for rank, window, inside in wasteful(seen):
        if not inside:
            return  # G02
        count, forward = len(window.micro_steps), inside[0].forwards[-1]
        why = (
            f"This backward runs inside `no_sync()`, but its forward at {forward.site} does not. DDP "
            f"decides in forward, so all {count} micro-batches of a step still all-reduce their "
            "gradients."
        )
        evidence = f"rank {rank.rank}: {len(inside)} of {count} backward passes ran inside no_sync() and still all-reduced"
        yield make_finding("G03", "warning", why, inside[0].backward, evidence)
        return
