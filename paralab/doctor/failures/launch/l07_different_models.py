"""L07: Not the same model on every rank."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="L07",
    title="Not the same model on every rank",
    symptom="'DDP expects same model across all ranks', or a parameter whose size 'appears not to match' the one of rank 0.",
    cause="The architecture depends on something that differs: the rank, random numbers, classes found in this rank's files.",
    fix="Decide it once, on rank 0, and broadcast the decision.",
    wrong="""\
classes = sorted({label for _, label in files_of(rank)})
model = DistributedDataParallel(Net(len(classes)))
""",
    right="""\
classes = [sorted({label for _, label in all_files()})]
dist.broadcast_object_list(classes, src=0)
model = DistributedDataParallel(Net(len(classes[0])))
""",
)
