"""D07: GPUs of unequal speed or memory.

Symptom: 'There is an imbalance between your GPUs. You may want to exclude GPU …'.
Cause: Every GPU gets an equal share, so the weakest GPU limits step time and batch size.
Fix: List only equal GPUs in device_ids.
Limits: Needs unequal GPUs, so only logs and the machine check show it.

- model = nn.DataParallel(net)
+ model = nn.DataParallel(net, device_ids=[0, 1])
"""

from paralab.doctor.preflight import Facts
from paralab.doctor.registry import Finding, Findings, check, describe, printed
from paralab.units import size

ENTRY = describe(
    __doc__,
    printed(
        r"imbalance between your GPUs\. You may want to exclude GPU (?P<gpu>\d+) which",
        "GPU {gpu} has less than 75% of the memory or cores of the largest one. DataParallel gives "
        "every GPU the same share, so each step waits for GPU {gpu}.",
        severity="warning",
    ),
)


UNEQUAL = 0.75  # the threshold of nn.DataParallel


@check("D07", source="machine")
def unequal_gpus(facts: Facts) -> Findings:
    if len(facts.gpus) < 2:
        return
    large = max(facts.gpus, key=lambda gpu: gpu.memory_bytes)
    small = min(facts.gpus, key=lambda gpu: (gpu.memory_bytes, gpu.processors or 0))
    units = [gpu.processors for gpu in facts.gpus if gpu.processors]
    slower = bool(units) and min(units) < UNEQUAL * max(units)
    if small.memory_bytes >= UNEQUAL * large.memory_bytes and not slower:
        return
    number = facts.gpus.index(small)
    why = (
        f"GPU {number} ({small.name}, {size(small.memory_bytes)}) is weaker than {large.name} "
        f"({size(large.memory_bytes)}), so the others wait for it."
    )
    fix = f"Exclude it (CUDA_VISIBLE_DEVICES without {number}), or give it smaller batches and weight each loss by its batch size."
    yield Finding("D07", "warning", why, fix, evidence=facts.evidence("GPUs (torch)"))
