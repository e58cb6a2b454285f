"""H15: The GPUs cannot access each other directly."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.preflight import Facts
from paralab.doctor.registry import Entry, check
from paralab.units import seconds

ENTRY = Entry(
    id="H15",
    title="The GPUs cannot access each other directly",
    symptom="All ranks hang in the first all-reduce, with every GPU at 100 % load.",
    cause=(
        "PCIe access control (ACS), an IOMMU, or the driver breaks direct access between two GPUs."
    ),
    fix="Turn off ACS or set iommu=pt. Until then, run with NCCL_P2P_DISABLE=1.",
    example="""\
- subprocess.run(["torchrun", "--nproc_per_node=2", "train.py"])
+ around = {**os.environ, "NCCL_P2P_DISABLE": "1"}
+ subprocess.run(["torchrun", "--nproc_per_node=2", "train.py"], env=around)
""",
    sources=(
        "NVIDIA/nccl#631",
        "pytorch/pytorch#85334",
        "NVIDIA/nccl#1160",
        "dmlc/xgboost#11242",
    ),
    limits="Needs two GPUs. Logs show the hang, not the hardware.",
)


@check("H15", source="machine")
def broken_gpu_pair(facts: Facts) -> Iterator[Finding]:
    """Report two GPUs that complete an all-reduce only through host memory, or not at all."""
    for pair in facts.pairs:
        first, second = pair.direct.ranks
        evidence = facts.evidence(f"GPU pair {first}-{second}")
        if pair.direct.seconds is not None:
            continue
        if pair.through_host and pair.through_host.seconds is not None:
            why = (
                f"{first} and {second} do not complete an all-reduce ({pair.direct.problem}), but do "
                f"with NCCL_P2P_DISABLE=1 ({seconds(pair.through_host.seconds)}): direct access between "
                "them is broken."
            )
            yield Finding("H15", "error", why, ENTRY.fix, evidence=evidence)
        else:
            why = (
                f"{first} and {second} do not complete an all-reduce, not even with "
                f"NCCL_P2P_DISABLE=1: {pair.direct.problem}. Certain if idle GPUs fail as well."
            )
            fix = "NCCL_DEBUG=INFO shows where it stops. Driver, NCCL, and torch may not match."
            yield Finding("H15", "suspect", why, fix, evidence=evidence)
