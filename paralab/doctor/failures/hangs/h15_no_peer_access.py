"""H15: The GPUs cannot access each other directly."""

from __future__ import annotations

from paralab.doctor.registry import Entry

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
