"""Launch and environment: what is wrong before the first step."""

from __future__ import annotations

from paralab.doctor.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        id="L01",
        title="The port is taken",
        symptom="'The server socket has failed to listen … EADDRINUSE … address already in use'.",
        cause="Another job, what is left of the last one, or another rank of this one listens on the same port.",
        fix="End the other job, or take another port; `torchrun --standalone` finds a free one. One rank alone serves a store.",
        wrong="""\
os.environ["MASTER_PORT"] = "29500"
dist.init_process_group("gloo", rank=rank, world_size=2)
""",
        right="""\
os.environ["MASTER_PORT"] = str(port_that_is_free)
dist.init_process_group("gloo", rank=rank, world_size=2)
""",
        sources=(
            "pytorch/pytorch#126510",
            "pytorch/pytorch#85604",
            "meta-pytorch/torchtune#392",
            "meta-pytorch/torchtune#1025",
            "vllm-project/vllm#39015",
        ),
        limits="Whether a port is free is known when it runs: in the script, only ranks against each other are seen.",
    ),
    Entry(
        id="L02",
        title="Started with python instead of a launcher",
        symptom="'environment variable RANK expected, but not set'.",
        cause="init_process_group reads RANK and WORLD_SIZE from the environment, where torchrun would have put them.",
        fix="Start it with torchrun.",
        wrong="""\
subprocess.run(["python", "train.py"])
""",
        right="""\
subprocess.run(["torchrun", "--nproc_per_node=2", "train.py"])
""",
    ),
    Entry(
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
    ),
    Entry(
        id="L04",
        title="Every rank also lives on GPU 0",
        symptom="nvidia-smi shows all processes on GPU 0, and only that one runs out of memory.",
        cause=(
            "`.cuda()` or torch.load came before set_device, or the rank over all machines was used where the local rank is meant."
        ),
        fix="Call set_device with LOCAL_RANK before anything touches a GPU.",
        wrong="""\
model = Net().cuda()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
""",
        right="""\
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = Net().cuda()
""",
        sources=("pytorch/pytorch#159262",),
        limits="Needs several GPUs to be seen in memory; read in the script only.",
    ),
    Entry(
        id="L05",
        title="This torch has no such backend",
        symptom="'Distributed package doesn't have NCCL built in'.",
        cause="A build of torch for CPUs, or for Windows or macOS, has gloo only.",
        fix="Use gloo where there is no GPU, or install the CUDA build.",
        wrong="""\
dist.init_process_group("nccl")
""",
        right="""\
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
""",
    ),
    Entry(
        id="L06",
        title="DDP or the sampler before the process group",
        symptom="'Default process group has not been initialized, please make sure to call init_process_group'.",
        cause="DistributedDataParallel and DistributedSampler ask the group for rank and world size, and it does not exist yet.",
        fix="Call init_process_group first.",
        wrong="""\
sampler = DistributedSampler(data)
dist.init_process_group("gloo")
""",
        right="""\
dist.init_process_group("gloo")
sampler = DistributedSampler(data)
""",
    ),
    Entry(
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
    ),
    Entry(
        id="L08",
        title="device_ids for a model that is on the CPU",
        symptom=(
            "'DistributedDataParallel device_ids and output_device arguments only work with … GPU modules', though "
            "CPU is named too."
        ),
        cause="The model was not moved to the GPU before it was wrapped, or a script for GPUs runs on CPU ranks.",
        fix="Move the model first; on CPU ranks leave device_ids out.",
        wrong="""\
model = DistributedDataParallel(Net(), device_ids=[local_rank])
""",
        right="""\
model = DistributedDataParallel(Net().to(local_rank), device_ids=[local_rank])
""",
    ),
    Entry(
        id="L09",
        title="Threads of the ranks and cores of the machine do not match",
        symptom="CPU work is slow: one thread per rank where there are cores to spare, or every rank uses all cores at once.",
        cause="torchrun sets OMP_NUM_THREADS=1 if nobody else did; mp.spawn sets nothing, so each rank takes the whole machine.",
        fix="Threads per rank = cores ÷ ranks.",
        wrong="""\
def worker(rank, ranks):
    train(rank)
""",
        right="""\
def worker(rank, ranks):
    torch.set_num_threads(len(os.sched_getaffinity(0)) // ranks)
    train(rank)
""",
        sources=(
            "pytorch/pytorch#22501",
            "Lightning-AI/pytorch-lightning#18677",
            "pytorch/pytorch#20037",
            "pytorch/pytorch#22451",
        ),
    ),
    Entry(
        id="L10",
        title="bf16 on this CPU ends with an illegal instruction",
        symptom="'Fatal Python error: Illegal instruction' in a Linear under CPU autocast; exit code 132 or signal 4.",
        cause="The CPU says that it has AMX, but in this virtual machine the instructions cannot be used (inferred).",
        fix="`ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16` before torch is imported.",
        wrong="""\
import torch

with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = model(x).mean()
""",
        right="""\
import os

os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
import torch

with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = model(x).mean()
""",
        silent=True,
        limits="Needs a CPU that lists AMX and does not carry it out, which tests cannot have: told from logs and by preflight.",
    ),
    Entry(
        id="L11",
        title="Shared memory is too small for the loader's workers",
        symptom="'DataLoader worker (pid …) is killed by signal: Bus error', or 'unable to allocate shared memory(shm)'.",
        cause="Workers hand batches over in /dev/shm, and a container has 64 MB of it unless told otherwise.",
        fix="Start the container with a larger --shm-size or --ipc=host, or use fewer workers.",
        wrong="""\
subprocess.run(["docker", "run", "image", "torchrun", "--nproc_per_node=2", "train.py"])
""",
        right="""\
subprocess.run(["docker", "run", "--shm-size=8g", "image", "torchrun", "--nproc_per_node=2", "train.py"])
""",
        sources=("pytorch/pytorch#5040", "pytorch/pytorch#108861", "NVlabs/Deep_Object_Pose#297"),
        limits="The size of /dev/shm is not in the script: told from logs (one of a real run with 1 MB), runs, and by preflight.",
    ),
)
