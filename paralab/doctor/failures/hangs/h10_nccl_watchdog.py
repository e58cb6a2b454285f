"""H10: The NCCL watchdog ended the job."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="H10",
    title="The NCCL watchdog ended the job",
    symptom=(
        "'Watchdog caught collective operation timeout: WorkNCCL(SeqNum=…, OpType=…, NumelIn=…)', on every rank that waited."
    ),
    cause=(
        "Some rank did not come to a collective. The message is printed by those who waited, and it does not say "
        "who was missing."
    ),
    fix=(
        "Compare 'last enqueued' over the ranks: the smallest one is where to look. Record per-rank logs and the "
        "flight recorder."
    ),
    wrong="""\
subprocess.run(["torchrun", "--nproc_per_node=8", "train.py"])
""",
    right="""\
recorder = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
command = ["torchrun", "--nproc_per_node=8", "--redirects=3", "--log-dir=logs", "train.py"]
subprocess.run(command, env={**os.environ, **recorder})
""",
    sources=(
        "pytorch/pytorch#118369",
        "XPixelGroup/BasicSR#737",
        "hiyouga/LlamaFactory#7396",
        "NVIDIA/Megatron-LM#1207",
        "meta-llama/llama-cookbook#65",
    ),
    limits="NCCL only: read from logs. On gloo the hang itself is watched.",
)
