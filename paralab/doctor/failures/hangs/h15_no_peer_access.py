"""H15: The GPUs cannot talk to each other directly."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="H15",
    title="The GPUs cannot talk to each other directly",
    symptom="All ranks freeze in the first all-reduce, with every GPU at 100 % load.",
    cause="PCIe access control (ACS), an IOMMU or the driver breaks the direct path between two GPUs.",
    fix="Switch ACS off or set iommu=pt; until then start with NCCL_P2P_DISABLE=1.",
    wrong="""\
subprocess.run(["torchrun", "--nproc_per_node=2", "train.py"])
""",
    right="""\
around = {**os.environ, "NCCL_P2P_DISABLE": "1"}
subprocess.run(["torchrun", "--nproc_per_node=2", "train.py"], env=around)
""",
    sources=(
        "NVIDIA/nccl#631",
        "pytorch/pytorch#85334",
        "NVIDIA/nccl#1160",
        "dmlc/xgboost#11242",
    ),
    limits="Needs two GPUs; what a log of it looks like is known, the cable itself is not looked at.",
)
