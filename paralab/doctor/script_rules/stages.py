"""Pipelines by hand over DDP: which of several backwards it is that exchanges the gradients."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding, Severity
from paralab.doctor.registry import check
from paralab.doctor.script.exchanging import exchanges_by_hand, given_away
from paralab.doctor.script.order import loops_apart
from paralab.doctor.script.pointing import called, found
from paralab.doctor.script.questions import roles, under
from paralab.doctor.script.reading import Script
from paralab.doctor.script.updates import backwards, steps
from paralab.doctor.script.values import Call, With, options


@check("P06", source="script")
def exchanged_too_early(script: Script) -> Iterator[Finding]:
    """All forwards, then all backwards, both with no_sync for all but the last. The last forward
    makes DDP ready to exchange, and the first backward that comes then does it."""
    if any(True for _ in script.methods("prepare_for_backward")) or not steps(script):
        return
    by_hand = exchanges_by_hand(script) or given_away(script) is not None
    severity: Severity = "suspect" if by_hand else "error"
    for backward in backwards(script):
        for forward in backward.wrapped:
            apart = loops_apart(forward, backward.call)
            used = under(forward, "no_sync") or under(backward.call, "no_sync")
            if apart is None or used is None or _always_quiet(forward):
                continue
            model = called(forward)
            why = (
                f"All forwards (`{model}(…)`, line {forward.line}) run before the first backward. `no_sync` is asked in the "
                "forward only: one of them makes DDP ready, and the first backward of this loop exchanges its gradients; those of "
                "the micro-batches after it are added on every rank alone, and the ranks' parameters drift apart."
            )
            if by_hand:
                why += " Certain unless something else averages gradients or parameters."
            fix = f"One block around both: forward and backward of a micro-batch in the same turn, `with {model}.no_sync():`."
            yield found(script, "P06", severity, backward.call, why, fix, also=(forward,))
            break


def _always_quiet(call: Call) -> bool:
    managers = [manager for block in call.inside(With) for manager in block.managers]
    return any(
        all("no_sync" in roles(option) for option in options(manager)) for manager in managers
    )
