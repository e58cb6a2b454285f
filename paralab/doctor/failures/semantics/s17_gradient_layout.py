"""S17: A gradient is laid out otherwise than its bucket."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.layouts import in_same_order
from paralab.doctor.logs.job import Logs
from paralab.doctor.registry import Entry, Message, check

ENTRY = Entry(
    id="S17",
    title="A gradient is laid out otherwise than its bucket",
    symptom="'Grad strides do not match bucket view strides', once, without a name.",
    cause=(
        "DDP lays out its buckets as the parameters were when it wrapped them; a model that goes to channels_last afterwards "
        "has gradients in another memory order. A 1×1 convolution of permuted or channels_last data differs in name only."
    ),
    fix="Change the layout before wrapping, `.contiguous()` after permute; for 1×1 convolutions it costs nothing and can stay.",
    wrong="""\
model = DistributedDataParallel(model)
model.to(memory_format=torch.channels_last)
""",
    right="""\
model.to(memory_format=torch.channels_last)
model = DistributedDataParallel(model)
""",
    sources=("pytorch/pytorch#47163", "CompVis/latent-diffusion#281", "XPixelGroup/HAT#154"),
    messages=(Message(r"Grad strides do not match bucket view strides", kind="printed"),),
)

GRADIENT = re.compile(r"\bgrad\.sizes\(\) = \[([\d, ]*)\], strides\(\) = \[([\d, ]*)\]")
BUCKET = re.compile(r"bucket_view\.sizes\(\) = \[([\d, ]*)\], strides\(\) = \[([\d, ]*)\]")


@check("S17", source="log")
def gradient_layout(logs: Logs) -> Iterator[Finding]:
    told = [line for line in logs.lines if "Grad strides do not match bucket view" in line.text]
    if not told:
        return
    gradient, bucket = _layout(logs, GRADIENT), _layout(logs, BUCKET)
    which = f"A gradient of shape {gradient[0]}" if gradient else "A gradient"
    evidence = (str(told[0]),)
    if gradient and bucket and in_same_order(*gradient, bucket[1]):
        why = (
            f"{which} differs from DDP's bucket only in the strides of dimensions of size 1, which costs "
            "nothing. DDP only warns about the first one: `paralab doctor -- COMMAND` checks them all."
        )
        yield Finding("S17", "suspect", why, ENTRY.fix, evidence=evidence)
        return
    why = f"{which} has another memory layout than DDP's bucket, so it is copied in every step. The result is right."
    yield Finding("S17", "warning", why, ENTRY.fix, evidence=evidence)


def _layout(logs: Logs, pattern: re.Pattern[str]) -> tuple[list[int], list[int]] | None:
    """Shape and strides, as DDP prints them."""
    for line in logs.lines:
        if match := pattern.search(line.text):
            shape, strides = (
                [int(n) for n in group.split(",") if n.strip()] for group in match.groups()
            )
            return (shape, strides) if len(shape) == len(strides) else None
    return None
