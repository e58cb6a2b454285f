"""S05: Two forward passes before backward overwrite buffers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from paralab.doctor.finding import Finding
from paralab.doctor.registry import Entry, Message, check
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.models import buffers_of, is_without_grad, option, wrapped_by
from paralab.doctor.static.project import position
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script

ENTRY = Entry(
    id="S05",
    title="Two forward passes before backward overwrite buffers",
    symptom=(
        "'one of the variables needed for gradient computation has been modified by an inplace operation', with "
        "DDP and BatchNorm."
    ),
    cause="The second forward broadcasts the buffers again and overwrites values that the first backward still needs.",
    fix="Call backward after each forward, run one forward on both batches, or turn off the broadcast (forward_sync_buffers=False).",
    example="""\
  model = DistributedDataParallel(model)
- loss = model(real).mean() - model(fake).mean()
+ real_scores, fake_scores = model(torch.cat([real, fake])).chunk(2)
+ loss = real_scores.mean() - fake_scores.mean()
  loss.backward()
""",
    sources=(
        "pytorch/pytorch#22095",
        "pytorch/pytorch#66504",
        "pytorch/pytorch#65907",
        "pytorch/pytorch#73332",
        "pytorch/pytorch#175024",
    ),
    limits="torch 2.12 and 2.13 keep the version counter on CPU, so we could not reproduce it there. Always a suspect.",
    messages=(
        Message(
            r"one of the variables needed for gradient computation has been modified by an inplace "
            r"operation: \[(?P<tensor>[^\]]+\])\]?(?!.{0,20}which is output \d+ of T?(?:Backward|AsStrided)).{0,80}?"
            r"is at version (?P<now>\d+); expected version (?P<then>\d+)",
            "Backward{at} needs a tensor [{tensor}] at version {then}, but it has been overwritten "
            "(version {now}). With DDP, a second forward before backward does that: it broadcasts the "
            "buffers. Certain if the model has BatchNorm, is wrapped, and is called twice.",
            severity="suspect",
        ),
    ),
)


@check("S05", source="script")
def two_forwards(script: Script) -> Iterator[Finding]:
    """Report a DDP model with BatchNorm that is called twice for one loss."""
    if script.methods("convert_sync_batchnorm"):
        return
    for backward in script.methods("backward"):
        if backward.receiver is None:
            continue
        forwards = [
            call
            for call in script.contributors(backward.receiver, backward.scope)
            if script.is_kind(call.node.func, call.scope, "ddp")
            and not is_without_grad(script, call)
        ]
        forwards.sort(key=lambda call: position(call.node))
        for first, second in combinations(forwards, 2):
            wrap = wrapped_by(script, second.node.func, second.scope)
            if wrap is None or not _are_both_run(first, second):
                continue
            norms = buffers_of(script, wrap.argument(0, "module"), wrap.scope) or ""
            on = (option(script, wrap, n) for n in ("broadcast_buffers", "forward_sync_buffers"))
            given = [wrap.argument(99, n) for n in ("broadcast_buffers", "forward_sync_buffers")]
            if "BatchNorm" not in norms or (any(given) and True not in on):
                continue
            why = (
                f"`{code(second.node.func)}` runs a second time ({line_of(first, second)} was the "
                f"first) before backward. Each forward overwrites the buffers of {norms} with rank "
                "0's, which the first backward may still need. Certain if backward reports 'modified by "
                "an inplace operation'."
            )
            fix = "Pass broadcast_buffers=False to DDP, use SyncBatchNorm, or run one forward on both batches."
            yield found(script, "S05", "suspect", second, why, fix, also=(first, wrap))
            break


def _are_both_run(first: Call, second: Call) -> bool:
    """Return whether two calls of one model are in one function, not in two branches of a test."""
    tests = {one.node: one.taken for one in first.inside(If)}
    return (
        first.scope is second.scope
        and code(first.node.func) == code(second.node.func)
        and all(tests.get(one.node, one.taken) == one.taken for one in second.inside(If))
    )
