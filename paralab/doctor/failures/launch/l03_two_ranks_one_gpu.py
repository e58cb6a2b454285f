"""L03: Two ranks on one GPU."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="L03",
    title="Two ranks on one GPU",
    symptom="'ncclInvalidUsage … Duplicate GPU detected : rank 0 and rank 1 both on CUDA device …'.",
    cause="Every rank takes 'cuda:0', because no device was set from LOCAL_RANK or because there are more ranks than GPUs.",
    fix="`torch.cuda.set_device(int(os.environ['LOCAL_RANK']))`, and no more ranks than GPUs.",
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
    limits="Needs NCCL; on CPU ranks it can be read in the script and in logs only.",
)
