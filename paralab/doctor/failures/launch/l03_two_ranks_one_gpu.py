"""L03: Two ranks on one GPU."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="L03",
    title="Two ranks on one GPU",
    symptom=(
        "'ncclInvalidUsage … Duplicate GPU detected : rank 0 and rank 1 both on CUDA device …'."
    ),
    cause=(
        "Every rank uses 'cuda:0' because nothing sets the device from LOCAL_RANK, or there "
        "are more ranks than GPUs. NCCL before 2.30 (torch before 2.14) always refuses this; "
        "later versions allow it with NCCL_MULTI_RANK_GPU_ENABLE=1, which is experimental."
    ),
    fix=(
        "Call `torch.cuda.set_device(int(os.environ['LOCAL_RANK']))`, and start at most one "
        "rank per GPU."
    ),
    wrong="""\
device = torch.device("cuda:0")
dist.init_process_group("nccl")
model = DistributedDataParallel(model.to(device))
""",
    right="""\
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
model = DistributedDataParallel(model.to(device))
""",
    sources=(
        "Peterande/D-FINE#289",
        "NVIDIA/Megatron-LM#661",
        "csguoh/MambaIR#39",
        "facebookresearch/fairchem#597",
        "verl-project/verl#161",
    ),
    limits="Needs NCCL; CPU ranks cannot provoke it, so it is read from scripts and logs.",
    messages=(
        Message(
            r"Duplicate GPU detected : rank (?P<rank>\d+) and rank (?P<other>\d+) both on CUDA device "
            r"(?P<device>\w+)",
            "Ranks {rank} and {other} both use the GPU {device}, and NCCL accepts one rank per GPU: no "
            "rank called torch.cuda.set_device(LOCAL_RANK), a device is fixed to cuda:0, or there are "
            "more ranks than GPUs.",
            kind="printed",
            blames=False,
        ),
        Message(
            r"CUDA error: invalid device ordinal|device >= 0 && device < num_gpus",
            "{who} asked for a GPU that does not exist{at}: there are more ranks than visible GPUs.",
            fix="Start at most one rank per GPU (--nproc_per_node), and check CUDA_VISIBLE_DEVICES.",
        ),
    ),
)
