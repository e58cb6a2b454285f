"""Waste: a training that is right, and slower than it has to be; and runs of which nothing can come
any more."""

from __future__ import annotations

from paralab.doctor.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        id="W01",
        title="Communication takes over a tenth of the step",
        symptom="More ranks make it hardly faster.",
        cause="Too little computing between two synchronizations, for the bytes that they send.",
        fix="A larger batch per rank, accumulation with no_sync(), compressed gradients, or smaller buckets that hide more of it.",
        wrong="""\
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(model)
""",
        right="""\
loader = DataLoader(data, batch_size=64, sampler=sampler)
model = DistributedDataParallel(model)
model.register_comm_hook(None, default_hooks.bf16_compress_hook)
""",
    ),
    Entry(
        id="W02",
        title="One bucket: nothing overlaps",
        symptom="The gradients are sent after the backward pass, not during it.",
        cause="DDP sends a bucket when all its gradients are there. One that holds the whole model is full at the very end.",
        fix="Smaller buckets: about four of them.",
        wrong="""\
model = DistributedDataParallel(model)  # 24 MB of gradients, buckets of 25 MB
""",
        right="""\
model = DistributedDataParallel(model, bucket_cap_mb=6)
""",
    ),
    Entry(
        id="W03",
        title="One rank is slower than the others",
        symptom="All ranks are as slow as the slowest; the others' devices idle in every step.",
        cause="More or longer samples, logging or saving inside the step, a shared core, a slower or hotter device.",
        fix="Give every rank the same work; do what only one rank does outside the step.",
        wrong="""\
for batch in loader:
    step(batch)
    if rank == 0:
        write_pictures(model)
""",
        right="""\
for batch in loader:
    step(batch)
if rank == 0:
    write_pictures(model)
""",
    ),
    Entry(
        id="W04",
        title="Low precision slower than fp32",
        symptom="autocast makes the step longer.",
        cause="The device has no fast units for that precision (many CPUs), or the matrices are too small: the casts cost more.",
        fix="Measure both, and take fp32 where it is faster.",
        wrong="""\
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = model(batch).mean()
""",
        right="""\
loss = model(batch).mean()
""",
    ),
    Entry(
        id="W05",
        title="Stages of unequal length",
        symptom="The stages of a pipeline idle more than its schedule makes them.",
        cause="All wait for the longest stage in every slot; equally many layers are not equally much work.",
        fix="Cut where the times are equal, not the numbers of layers.",
        wrong="""\
stages = [layers[:6], layers[6:]]  # the last one has the large output layer as well
""",
        right="""\
stages = [layers[:8], layers[8:]]
""",
    ),
    Entry(
        id="W06",
        title="The loss is not finite",
        symptom="The loss is NaN or infinite from some step on, and stays so.",
        cause="One step with gradients that are not finite spoils every weight; nothing after it can be learnt.",
        fix="Stop there; go back to the last checkpoint, with a lower learning rate, clipping, or the bad sample left out.",
        wrong="""\
loss.backward()
optimizer.step()
""",
        right="""\
if not torch.isfinite(loss):
    raise ValueError(f"the loss is {loss.item()} in step {step}")
loss.backward()
optimizer.step()
""",
    ),
    Entry(
        id="W07",
        title="A rank stands still",
        symptom="No step is finished any more, and nobody says why.",
        cause="A process is stopped (Ctrl-Z, SIGSTOP, a debugger), waits for a disk, or computes without end.",
        fix="Look at its state and its stack; continue it, or end the job.",
        wrong="""\
breakpoint()  # on one rank: all others wait in their next collective
loss.backward()
""",
        right="""\
loss.backward()
""",
    ),
)
