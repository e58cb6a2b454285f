"""G06: leftover micro-batches at the end of an epoch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from paralab.doctor.events import Backward, Epoch, Loader, Step, ZeroGrad
from paralab.doctor.failures.accumulation.windows import ASSUMED, Window, timelines, windows
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Entry, check
from paralab.doctor.static.facts import Loop
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.windows import accumulated

ENTRY = Entry(
    id="G06",
    title="Leftover micro-batches are dropped, or leak into the next epoch",
    symptom=(
        "No message. With 10 batches and N = 4, two batches per epoch are left over, and their gradients are "
        "added to the next epoch."
    ),
    cause="The step runs only at multiples of N, and the number of batches is not a multiple of N.",
    fix="Step after the last batch too, and divide by the number of passes that were accumulated.",
    example="""\
- if (i + 1) % N == 0:
+ if (i + 1) % N == 0 or i + 1 == len(loader):
      optimizer.step()
      optimizer.zero_grad()
""",
    sources=(
        "timoschick/pet#36",
        "meta-pytorch/torchtune#2745",
        "Lightning-AI/pytorch-lightning#19987",
        "tomhosking/torchseq#8",
        "huggingface/transformers#2533",
    ),
    silent=True,
)


@check("G06", source="script")
def leftover_batches(script: Script) -> Iterator[Finding]:
    """Report a loop that ends in the middle of a window and has no step after it."""
    for window in windows(script):
        node = window.loop[1].node
        if window.guard is None or window.number == 1 or not isinstance(node, ast.For):
            continue
        size, length = window.number or ASSUMED, window.length
        is_known = window.number is not None and length is not None
        iterations = length if is_known and length is not None else 2 * size + 1
        if iterations % size == 0 or _counts_on(script, window) or _steps_later(script, window):
            continue
        last = window.env(iterations - 1, iterations)
        steps = [
            window.happens(window.step, window.env(turn, iterations)) for turn in range(iterations)
        ]
        if True not in steps or steps[-1] is not False:
            continue
        if window.happens(window.backward, last) is not True and not window.is_apart:
            continue
        fate, leaks = _fate(script, window)
        rest = f"There are {length} batches: the gradients of the last {iterations % size} {fate}."
        if not is_known:
            rest = f"The gradients of the batches after the last full window {fate}."
            rest += f" Certain if the number of batches is not a multiple of `{window.size_text}`."
        why = f"`{code(window.step.call.node)}` runs only after every {window.number or window.size_text} batches. {rest}"
        fix = "Step after the last batch too (`or i + 1 == len(loader)`), and divide the loss by the size of that window."
        severity: Severity = "suspect" if not is_known else "error" if leaks else "warning"
        also = (window.backward.call,)
        yield found(script, "G06", severity, window.step.call, why, fix, also=also)


def _counts_on(script: Script, window: Window) -> bool:
    """Return whether the counter continues in the next epoch, so that the window fills up there."""
    node, scope = window.loop[1].node, window.step.scope_at(window.loop[0])
    names = {one.id for one in ast.walk(getattr(node, "target", node)) if isinstance(one, ast.Name)}
    if window.counter in names:
        return False
    around = [one for one in script.context(node, scope.module) if isinstance(one, Loop)]
    resets = [one for one in scope.definitions.get(window.counter, []) if one.how == "assign"]
    return not any(
        [part for part in script.context(one.node, scope.module) if isinstance(part, Loop)]
        == around
        for one in resets
    )


def _steps_later(script: Script, window: Window) -> bool:
    """Return whether there is a step after the loop."""
    outer = window.step.loops[:-1]
    for events in timelines(script):
        if window.step in events:
            later = events[events.index(window.step) + 1 :]
            return any(one.role == "step" and one.loops == outer for one in later)
    return False


def _fate(script: Script, window: Window) -> tuple[str, bool]:
    """Return what happens to the leftover gradients and whether they leak into another epoch."""
    outer = window.step.loops[:-1]
    if not outer:
        return "are never used", False
    for events in timelines(script):
        if window.step in events:
            for event in events:
                if event.role == "zero_grad" and event.loops == outer:
                    where = line_of(event.call, window.step.call)
                    return (
                        f"are never used: `{code(event.call.node)}` in {where} clears them",
                        False,
                    )
    return (
        "are added to the first step of the next epoch; those of the last epoch are never used",
        True,
    )


@check_each_rank("G06")
def left_over(rank: WatchedRank) -> Finding | None:
    """Report a pass over the loader that ended in the middle of a window."""
    sizes = [len(window.micro_steps) for window in accumulated(rank)]
    usual = max(set(sizes), key=sizes.count) if sizes else 0
    for epoch, count, fate in _leftovers(rank, usual) if sizes else ():
        step = next((step for step in reversed(rank.steps) if step.t < epoch.t), None)
        if step is None or not fate:
            continue
        then = "never reach a step"
        if fate == "leak":
            then = f"are added to the first step of the next epoch, which gets {count} too many"
        why = (
            f"{usual} micro-batches make one step, and the loader has {epoch.batches}. After the last "
            f"step {count} backward passes are left over, and their gradients {then}."
        )
        evidence = f"rank {rank.rank}: {epoch.batches} batches, {count} passes after the last step of epoch {epoch.epoch}"
        return make_finding("G06", "error" if fate == "leak" else "warning", why, step, evidence)
    return None


def _leftovers(rank: WatchedRank, usual: int) -> Iterator[tuple[Epoch, int, str | None]]:
    """Yield the end of each pass over a loader, the backward passes left over, and their fate."""
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
        elif (
            isinstance(event, Epoch)
            and pending
            and inside.get(event.loader, 0) >= event.batches > 0
        ):
            yield event, pending, _observed_fate(rank, place, pending, usual)


def _observed_fate(rank: WatchedRank, place: int, pending: int, usual: int) -> str | None:
    """Return `leak`, `dropped`, or None if the passes filled a usual window or it is unknown."""
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
