"""G02: every accumulated pass synchronizes."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.failures.accumulation.synchronizing import forwards_of, reduces, wasteful
from paralab.doctor.failures.accumulation.windows import quiet, windows
from paralab.doctor.finding import Finding, Severity
from paralab.doctor.observation import Observation
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Entry, check
from paralab.doctor.static.facts import Call
from paralab.doctor.static.hints import SYNCHRONIZERS, accumulations, is_parallel
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script

ENTRY = Entry(
    id="G02",
    title="Every accumulated pass synchronizes gradients",
    symptom="Correct results, slow steps: N all-reduces of all gradients instead of one.",
    cause="DDP synchronizes in every backward pass unless it runs under `no_sync()`.",
    fix="Run all passes of a step but the last under `model.no_sync()`.",
    example="""\
  for i, (x, y) in enumerate(loader):
-     (criterion(model(x), y) / N).backward()
+     with nullcontext() if (i + 1) % N == 0 else model.no_sync():
+         (criterion(model(x), y) / N).backward()
      if (i + 1) % N == 0:
          optimizer.step()
          optimizer.zero_grad()
""",
    sources=(
        "speechbrain/speechbrain#1802",
        "goodfire-ai/spd#215",
        "Lightning-AI/pytorch-lightning#2595",
    ),
    silent=True,
)


@check("G02", source="script")
def synchronizes_in_every_turn(script: Script) -> Iterator[Finding]:
    """Report several DDP backward passes per step in a project that never uses `no_sync`."""
    if script.methods("no_sync") or script.attributes.get("require_backward_grad_sync"):
        return
    judged: set[Call] = set()
    for window in windows(script):
        call = window.backward.call
        judged.add(call)
        forwards = forwards_of(script, window.backward)
        blocks = [
            quiet(script, *one) for event in (window.backward, *forwards) for one in event.blocks()
        ]
        if window.number == 1 or not forwards or None in blocks:
            continue
        many = str(window.number or f"`{window.size_text}`")
        model = code(forwards[0].call.node.func)
        why = (
            f"`{code(window.step.call.node)}` ({line_of(window.step.call, call)}) needs the sum over {many} backward "
            f"passes, but each of them all-reduces the gradients of `{model}`. One all-reduce would do."
        )
        fix = (
            f"Run all but the last forward and backward before a step in `with {model}.no_sync():`."
        )
        severity: Severity = "suspect" if window.is_optional else "warning"
        yield found(script, "G02", severity, call, why, fix, also=(window.step.call,))
    if is_parallel(script) and not script.imports(*SYNCHRONIZERS):
        for call, step in accumulations(script):
            if call not in judged:
                why = (
                    f"`{code(step.node)}` ({line_of(step, call)}) waits for several backward passes, and nothing calls "
                    "`no_sync`. Certain if the model is the DDP wrapper: then each pass all-reduces."
                )
                yield found(script, "G02", "suspect", call, why, ENTRY.fix, also=(step,))


@check("G02", source="ranks")
def synchronized_every_time(seen: Observation) -> Iterator[Finding]:
    """Report accumulation in which every micro-batch all-reduces the gradients."""
    for rank, window, inside in wasteful(seen):
        if inside:
            return  # G03
        count, early = len(window.micro_steps), window.micro_steps[:-1]
        seconds = sum(one.backward.seconds or 0.0 for one in early if reduces(one))
        why = (
            f"One optimizer step has {count} micro-batches, and each of them all-reduces all "
            f"gradients. The last one is enough: {count - 1} of {count} all-reduces are wasted."
        )
        reducing = sum(map(reduces, window.micro_steps))
        evidence = (
            f"rank {rank.rank}: {reducing} of {count} backward passes of a step all-reduce",
            f"backward passes that need not: {seconds * 1000:.1f} ms per step",
        )
        yield make_finding("G02", "warning", why, early[0].backward, evidence)
        return
