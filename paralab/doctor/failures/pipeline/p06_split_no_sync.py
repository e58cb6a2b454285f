"""P06: Pipeline with DDP: no_sync left between forward and backward."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="P06",
    title="Pipeline with DDP: no_sync left between forward and backward",
    symptom="The replicas of a stage drift apart without a message; or gradients are sent more often per step than needed.",
    cause=(
        "Forward and backward of a micro-batch run in two no_sync() blocks, and DDP looks at the first only. With all forwards "
        "before the backwards, the last forward makes it ready to send, the first backward does it, and what the later ones "
        "add stays on each rank. (Measured with torch 2.13; without other forwards in between, two blocks do no harm.)"
    ),
    fix="One no_sync() block around both; torch.distributed.pipelining does the right thing for stages under DDP.",
    wrong="""\
for number, x in enumerate(parts):
    with stage.no_sync() if number < last else nullcontext():
        outputs.append(stage(x))
for number, output in enumerate(outputs):
    with stage.no_sync() if number < last else nullcontext():
        loss_fn(output).backward()
""",
    right="""\
for number, x in enumerate(parts):
    with stage.no_sync() if number < last else nullcontext():
        loss_fn(stage(x)).backward()
""",
    sources=("pytorch/PiPPy#1133",),
    silent=True,
)
