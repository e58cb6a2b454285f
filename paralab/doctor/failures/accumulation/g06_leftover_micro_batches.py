"""G06: Leftover micro-batches are dropped, or leak into the next epoch.

Symptom: No error. With 10 batches and N = 4, the gradients of the last two batches leak into the next epoch.
Cause: The step runs after every N batches, and the number of batches is not a multiple of N.
Fix: Also step after the last batch, and divide each leftover loss by the number of leftover batches.
Reported: timoschick/pet#36 meta-pytorch/torchtune#2745 Lightning-AI/pytorch-lightning#19987
tomhosking/torchseq#8 huggingface/transformers#2533

- if (i + 1) % N == 0:
+ if (i + 1) % N == 0 or i + 1 == len(loader):
      optimizer.step()
      optimizer.zero_grad()
"""

import ast
from collections.abc import Iterator

from paralab.doctor.events import Backward, Epoch, Loader, Step, ZeroGrad
from paralab.doctor.failures.accumulation.windows import ASSUMED, Window, timelines, windows
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Finding, Findings, Severity, check, describe
from paralab.doctor.static.facts import Loop, names_in
from paralab.doctor.static.project import Scope
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.static.timeline import Event
from paralab.doctor.windows import accumulated

ENTRY = describe(__doc__, silent=True)


@check("G06", source="script")
def leftover_batches(script: Script) -> Findings:
    """Report a loop that stops in the middle of a window if no step follows the loop."""
    for window in windows(script):
        node, length = window.loop[1].node, window.length
        if window.guard is None or window.number == 1 or not isinstance(node, ast.For):
            continue
        if window.backward.call.target.endswith("Fabric.backward"):
            continue  # Fabric divides the batches among the ranks
        size = window.number or ASSUMED
        known = window.number is not None and length is not None
        turns = length if known and length is not None else 2 * size + 1
        if turns % size == 0 or _counts_on(script, window):
            continue
        if _outside_loop(script, window, "step", later=True):
            continue
        steps = [window.happens(window.step, window.env(turn, turns)) for turn in range(turns)]
        last = window.happens(window.backward, window.env(turns - 1, turns)) is True
        if True not in steps or steps[-1] is not False or not (last or window.is_apart):
            continue
        fate, leaks = _fate(script, window)
        why = f"`{code(window.step.call.node)}` runs only after every {window.number or window.size_text} batches. "
        if known:
            why += f"There are {length} batches: the gradients of the last {turns % size} {fate}."
        else:
            why += f"The gradients of the batches after the last full window {fate}."
        doubt = (
            "" if known else f"if the number of batches is not a multiple of `{window.size_text}`"
        )
        severity: Severity = "error" if leaks else "warning"
        step, also = window.step.call, (window.backward.call,)
        yield found(script, "G06", severity, step, why, doubt=doubt, also=also)


def _counts_on(script: Script, window: Window) -> bool:
    """Return whether the counter is never reset, so that the next epoch completes the window."""
    node, scope = window.loop[1].node, window.step.scope_at(window.loop[0])
    if window.counter in names_in(getattr(node, "target", node)):
        return False
    resets = [one for one in scope.definitions.get(window.counter, []) if one.how == "assign"]
    around = _loops(script, node, scope)
    return not any(_loops(script, one.node, scope) == around for one in resets)


def _loops(script: Script, node: ast.AST, scope: Scope) -> list[Loop]:
    return [part for part in script.context(node, scope.module) if isinstance(part, Loop)]


def _outside_loop(script: Script, window: Window, role: str, later: bool = False) -> Event | None:
    """Return a call with this role right outside the loop. With `later`, it must follow the
    loop."""
    events = next((events for events in timelines(script) if window.step in events), [])
    after = events[events.index(window.step) + 1 :] if later else events
    outer = window.step.loops[:-1]
    return next((one for one in after if one.role == role and one.loops == outer), None)


def _fate(script: Script, window: Window) -> tuple[str, bool]:
    """Describe what happens to the leftover gradients, and return whether they leak into another
    epoch."""
    if not window.step.loops[:-1]:
        return "are never used", False
    if zero := _outside_loop(script, window, "zero_grad"):
        where = line_of(zero.call, window.step.call)
        return f"are never used: `{code(zero.call.node)}` in {where} clears them", False
    leaks = "are added to the first step of the next epoch; those of the last epoch are never used"
    return leaks, True


@check_each_rank("G06")
def left_over(rank: WatchedRank) -> Finding | None:
    sizes = [len(window.micro_steps) for window in accumulated(rank)]
    usual = max(set(sizes), key=sizes.count) if sizes else 0
    for epoch, count, fate in _leftovers(rank, usual) if sizes else ():
        step = next((step for step in reversed(rank.steps) if step.t < epoch.t), None)
        if step is None or not fate:
            continue
        leaks = fate == "leak"
        why = (
            f"{usual} micro-batches make up one step, and the loader has {epoch.batches}. The "
            f"gradients of "
            f"the last {count} "
            + ("leak into the first step of the next epoch." if leaks else "never reach a step.")
        )
        return make_finding("G06", "error" if leaks else "warning", why, step)
    return None


def _leftovers(rank: WatchedRank, usual: int) -> Iterator[tuple[Epoch, int, str | None]]:
    """Yield each finished pass over a loader, its number of leftover backward passes, and what
    happened to their gradients."""
    inside: dict[int, int] = {}  # loader -> backward passes in this pass over it
    pending = 0
    for place, event in enumerate(rank.events):
        if isinstance(event, Loader):
            inside[event.loader] = 0
        elif isinstance(event, Backward):
            pending += 1
            inside = {loader: count + 1 for loader, count in inside.items()}
        elif isinstance(event, (Step, ZeroGrad)):
            pending = 0
        elif isinstance(event, Epoch) and pending:
            passes = inside.get(event.loader, 0)
            if passes >= event.batches > 0:
                yield event, pending, _observed_fate(rank, place, pending, usual)


def _observed_fate(rank: WatchedRank, place: int, pending: int, usual: int) -> str | None:
    """Return `leak` or `dropped`; None if unknown, or if the passes filled a whole window."""
    more = 0
    for event in rank.events[place:]:
        if isinstance(event, Backward):
            more += 1
        elif isinstance(event, ZeroGrad):
            return "dropped"
        elif isinstance(event, Step):
            return "leak" if more and pending + more != usual else None
    if more:
        return "leak" if pending + more > usual else None
    return "dropped" if rank.reached_end and not rank.raised else None
