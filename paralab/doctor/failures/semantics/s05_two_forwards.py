"""S05: Two forward passes before backward overwrite buffers.

Symptom: 'one of the variables needed for gradient computation has been modified by an inplace operation', with BatchNorm.
Cause: The second forward broadcasts the buffers again and overwrites values that the first backward still needs.
Fix: Call backward after each forward, run one forward on both batches, use SyncBatchNorm, or pass broadcast_buffers=False.
Limits: On the CPU, torch 2.12 and 2.13 do not change the version counter, so we could not reproduce it there. Always a suspect.
Reported: pytorch/pytorch#22095 #66504 #65907 #73332 #175024

  model = DistributedDataParallel(model)
- loss = model(real).mean() - model(fake).mean()
+ real_scores, fake_scores = model(torch.cat([real, fake])).chunk(2)
+ loss = real_scores.mean() - fake_scores.mean()
  loss.backward()
"""

from itertools import combinations

from paralab.doctor.registry import Findings, Message, check, describe
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.models import buffers_of, is_without_grad, option, wrapped_by
from paralab.doctor.static.project import position
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    Message(
        r"one of the variables needed for gradient computation has been modified by an inplace "
        r"operation: \[(?P<tensor>[^\]]+\])\]?(?!.{0,20}which is output \d+ of T?(?:Backward|AsStrided)).{0,80}?"
        r"is at version (?P<now>\d+); expected version (?P<then>\d+)",
        "Backward{at} needs a tensor [{tensor}] at version {then}, but something overwrote it "
        "(version {now}). With DDP, a second forward before backward overwrites the buffers "
        "when it broadcasts them. This is certain if a DDP model with BatchNorm is called twice.",
        severity="suspect",
    ),
)


@check("S05", source="script")
def two_forwards(script: Script) -> Findings:
    """Report a DDP model with BatchNorm that is called twice for one loss."""
    if script.methods("convert_sync_batchnorm"):
        return
    for backward in script.methods("backward"):
        calls = script.calls_to("ddp", script.contributors(backward.receiver, backward.scope))
        forwards = [call for call in calls if not is_without_grad(script, call)]
        forwards.sort(key=lambda call: position(call.node))
        for first, second in combinations(forwards, 2):
            wrap = wrapped_by(script, second.node.func, second.scope)
            if wrap is None or not _are_both_run(first, second):
                continue
            norms = buffers_of(script, wrap.argument(0, "module"), wrap.scope) or ""
            options = ("broadcast_buffers", "forward_sync_buffers")
            given = any(wrap.argument(99, name) for name in options)
            on = not given or any(option(script, wrap, name) for name in options)
            if "BatchNorm" in norms and on:
                why = (
                    f"`{code(second.node.func)}` runs a second time before backward (first in "
                    f"{line_of(first, second)}). Each forward overwrites the buffers of {norms} with those "
                    "of rank 0, which the first backward may still need."
                )
                doubt = "if backward reports 'modified by an inplace operation'"
                yield found(script, "S05", "suspect", second, why, doubt=doubt, also=(first, wrap))
                break


def _are_both_run(first: Call, second: Call) -> bool:
    """Return whether two calls to one model are in the same function, and not in opposite branches
    of the same `if`."""
    tests = {one.node: one.taken for one in first.inside(If)}
    return (
        first.scope is second.scope
        and code(first.node.func) == code(second.node.func)
        and all(tests.get(one.node, one.taken) == one.taken for one in second.inside(If))
    )
