"""H15: The GPUs cannot access each other directly.

Symptom: All ranks hang in the first all-reduce, with every GPU at 100% load.
Cause: PCIe access control (ACS), an IOMMU, or the driver breaks direct access between two GPUs.
Fix: Turn off ACS or set iommu=pt. Until then, run with NCCL_P2P_DISABLE=1.
Limits: Needs two GPUs. Logs show the hang, not the hardware.
Reported: NVIDIA/nccl#631 #1160 pytorch/pytorch#85334 dmlc/xgboost#11242

- subprocess.run(["torchrun", "--nproc_per_node=2", "train.py"])
+ around = {**os.environ, "NCCL_P2P_DISABLE": "1"}
+ subprocess.run(["torchrun", "--nproc_per_node=2", "train.py"], env=around)
"""

from paralab.doctor.preflight import Facts
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Finding, Findings, check, describe
from paralab.units import seconds

ENTRY = describe(__doc__)


@check("H15", source="machine")
def broken_gpu_pair(facts: Facts) -> Findings:
    for pair in facts.pairs:
        first, second = pair.direct.ranks
        evidence = facts.evidence(f"GPU pair {first}-{second}")
        if pair.direct.seconds is not None:
            continue
        if pair.through_host and pair.through_host.seconds is not None:
            why = (
                f"{first} and {second} complete an all-reduce only with NCCL_P2P_DISABLE=1 "
                f"({seconds(pair.through_host.seconds)}), so direct access between them is broken: "
                f"{pair.direct.problem}."
            )
            yield Finding("H15", "error", why, evidence=evidence)
        else:
            why = f"{first} and {second} cannot complete an all-reduce, even with NCCL_P2P_DISABLE=1: {pair.direct.problem}."
            fix = (
                "NCCL_DEBUG=INFO shows where it stops. The versions of the driver, NCCL, and "
                "torch may not match."
            )
            doubt = "if idle GPUs fail as well"
            yield make_finding("H15", "suspect", why, None, evidence, fix=fix, doubt=doubt)
