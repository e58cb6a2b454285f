"""L07: Not the same model on every rank."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

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
    messages=(
        Message(
            r"DDP expects same model across all ranks, but Rank (?P<rank>\d+) has (?P<own>\d+) params, while "
            r"rank (?P<other>\d+) has inconsistent 0 params",
            "Rank {rank} compared its {own} parameters with rank {other}, but their number never "
            "arrived. Rank {other} failed or is not at this line. Its own log makes it certain.",
            fix="Look for the first error of the other rank. Then check that all ranks wrap the same model.",
            severity="suspect",
            blames=False,
        ),
        Message(
            r"DDP expects same model across all ranks, but Rank (?P<rank>\d+) has (?P<own>\d+) params, while "
            r"rank (?P<other>\d+) has inconsistent (?P<others>\d+) params",
            "Rank {rank} wraps a model with {own} parameters, rank {other} one with {others}{at}. DDP "
            "pairs parameters by position.",
            blames=False,
        ),
        Message(
            r"\[(?P<rank>\d+)\]: params\[(?P<index>\d+)\] in this process with sizes \[(?P<shape>[\d, ]*)\] "
            r"appears not to match",
            "Parameter {index} has shape ({shape}) on rank {rank} and another shape on rank 0{at}: the "
            "model depends on the rank.",
        ),
    ),
)
