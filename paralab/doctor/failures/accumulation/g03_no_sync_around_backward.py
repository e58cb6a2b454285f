"""G03: no_sync covers backward but not forward.

Symptom: The results are correct, but no time is saved: every pass still synchronizes.
Cause: DDP decides in forward whether backward synchronizes, and forward runs outside `no_sync()`.
Fix: Move the forward pass into the `no_sync` block too.
Reported: facebookresearch/ClassyVision#706 KellerJordan/modded-nanogpt#31 pytorch/PiPPy#1133

- loss = criterion(model(x), y) / N
  with model.no_sync():
+     loss = criterion(model(x), y) / N
      loss.backward()
"""

import ast

from paralab.doctor.failures.accumulation.synchronizing import forwards_of, wasteful
from paralab.doctor.failures.accumulation.windows import quiet, timelines
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static.project import end, position
from paralab.doctor.static.report import At, at, code, found, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.static.timeline import Event, occurrences

ENTRY = describe(__doc__, silent=True)


@check("G03", source="script")
def quiet_backward_only(script: Script) -> Findings:
    """Report `no_sync`, or the DDP attribute behind it, set between forward and backward."""
    for _, _, event in occurrences(timelines(script), "backward"):
        forwards = forwards_of(script, event)
        if not forwards or forwards[-1].loops != event.loops:
            continue  # forward and backward are in separate loops: P06 reports this
        forward = forwards[-1].call
        name = f"`{code(forward.node.func)}(…)`"
        late = _switched_late(script, event, forwards[-1])
        if late is not None:
            why = (
                f"DDP reads this attribute in forward, and {name} ({line_of(forward, late)}) has already run. "
                "It takes effect one micro-batch late, so the wrong micro-batch synchronizes."
            )
            fix = "Set the attribute before the forward pass."
            yield found(script, "G03", "warning", late, why, fix, also=(forward,))
        elif _is_quiet_alone(script, event, forwards[-1]):
            why = (
                f"Only `{code(event.call.node)}` is inside `no_sync`. DDP has already decided in {name} "
                f"({line_of(forward, event.call)}) to synchronize, so every pass still does."
            )
            yield found(script, "G03", "warning", event.call, why, also=(forward,))


def _is_quiet_alone(script: Script, backward: Event, forward: Event) -> bool:
    """Return whether backward may run under `no_sync` while forward definitely does not."""
    around = list(forward.blocks())
    if any(quiet(script, *block) is not False for block in around):
        return False
    for item, scope in backward.blocks():
        names = {call.method for call in script.makers(item, scope)}
        names.update(getattr(one, "attr", "") for one in ast.walk(item))
        if names & {"no_sync", "no_backward_sync"} and (item, scope) not in around:
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
def forward_still_synchronizes(seen: Observation) -> Findings:
    for rank, window, inside in wasteful(seen):
        if not inside:
            return  # G02 reports this
        why = (
            f"This backward runs inside `no_sync()`, but its forward at {inside[0].forwards[-1].site} does "
            "not. DDP decides in forward, so every micro-batch still all-reduces its gradients."
        )
        count = f"{len(inside)} of {len(window.micro_steps)} backward passes"
        evidence = f"rank {rank.rank}: {count} ran inside no_sync() and still all-reduced"
        yield make_finding("G03", "warning", why, inside[0].backward, evidence)
        return
