"""S17: A gradient and its bucket have different memory layouts.

Symptom: 'Grad strides do not match bucket view strides', logged once, without a parameter name.
Cause: DDP lays out its buckets like the parameters when it wraps the model. Switching to
channels_last afterward changes the gradients.
Fix: Change the layout before wrapping, and call `.contiguous()` after permute. For 1×1 convolutions the warning is harmless.
Reported: pytorch/pytorch#47163 CompVis/latent-diffusion#281 XPixelGroup/HAT#154

+ model.to(memory_format=torch.channels_last)
  model = DistributedDataParallel(model)
- model.to(memory_format=torch.channels_last)
"""

import re
from collections.abc import Sequence
from typing import Any

from paralab.doctor.events import Backward, Wrap
from paralab.doctor.logs.job import Logs
from paralab.doctor.observation import Observation, WatchedRank
from paralab.doctor.rank_checks import ddp_wraps, listed, make_finding
from paralab.doctor.registry import Finding, Findings, check, describe, printed

ENTRY = describe(__doc__, printed(r"Grad strides do not match bucket view strides"))
GRADIENT = re.compile(r"\bgrad\.sizes\(\) = \[([\d, ]*)\], strides\(\) = \[([\d, ]*)\]")
BUCKET = re.compile(r"bucket_view\.sizes\(\) = \[([\d, ]*)\], strides\(\) = \[([\d, ]*)\]")


@check("S17", source="ranks")
def gradient_layout(seen: Observation) -> Findings:
    for rank in seen.ranks if seen.world > 1 else []:
        for wrap in ddp_wraps(rank):
            passes = [event.laid for event in rank.of(Backward) if event.laid]
            rows = [laid[str(wrap.model)] for laid in passes if str(wrap.model) in laid]
            if rows:
                yield _finding(rank, wrap, rows[-1])
                return


def _finding(rank: WatchedRank, wrap: Wrap, rows: list[list[Any]]) -> Finding:
    costly = [row for row in rows if not in_same_order(*row[1:])]
    name, shape, gradient, bucket = (costly or rows)[0]
    cost = "DDP rearranges the gradient in every step, but the result is correct."
    cost = cost if costly else "Only dimensions of size 1 differ, which costs nothing."
    why = (
        f"The gradient of {listed([row[0] for row in costly or rows])} has different strides from "
        f"its bucket. DDP laid out the bucket like the parameter when it wrapped the model here. {cost}"
    )
    evidence = f"rank {rank.rank}: {name} {shape}: gradient {gradient}, bucket {bucket}"
    return make_finding("S17", "warning" if costly else "suspect", why, wrap, evidence)


@check("S17", source="log")
def layout_in_log(logs: Logs) -> Findings:
    lines = [line for line in logs.lines if "Grad strides do not match bucket view" in line.text]
    if not lines:
        return
    gradient, bucket = _layout(logs, GRADIENT), _layout(logs, BUCKET)
    which = f"A gradient of shape {gradient[0]}" if gradient else "A gradient"
    evidence = (str(lines[0]),)
    if gradient and bucket and in_same_order(*gradient, bucket[1]):
        why = (
            f"{which} differs from DDP's bucket only in the strides of dimensions of size 1, which costs "
            "nothing. DDP warns only about the first gradient; `paralab doctor -- COMMAND` checks them all."
        )
        yield Finding("S17", "suspect", why, evidence=evidence)
        return
    why = f"{which} has a different memory layout from DDP's bucket, so DDP rearranges it in every step. The result is correct."
    yield Finding("S17", "warning", why, evidence=evidence)


def _layout(logs: Logs, pattern: re.Pattern[str]) -> tuple[list[int], list[int]] | None:
    """Return the shape and strides that DDP printed."""
    for line in logs.lines:
        if match := pattern.search(line.text):
            shape, strides = (
                [int(n) for n in one.split(",") if n.strip()] for one in match.groups()
            )
            return (shape, strides) if len(shape) == len(strides) else None
    return None


def in_same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two sets of strides differ only in dimensions of size 1."""
    return all(mine == its for size, mine, its in zip(shape, one, other, strict=True) if size > 1)
