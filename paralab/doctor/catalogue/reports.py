"""Reports that mislead: what is printed when a rank dies, hangs or leaves, and whom it blames."""

from __future__ import annotations

from paralab.doctor.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
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
    ),
    Entry(
        id="H11",
        title="An exception on one rank, and its echoes on the others",
        symptom="One rank has a Python traceback; the others say 'Connection closed by peer' (gloo), or hang (NCCL).",
        cause="A bad sample, a failed assertion or a full GPU on one rank; the other messages only follow from it.",
        fix="Repair the rank whose error came first and is no transport error; `@record` makes torchrun print it.",
        wrong="""\
def main():
    train()


main()
""",
        right="""\
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    train()


main()
""",
    ),
    Entry(
        id="H12",
        title="A worker was killed from outside",
        symptom="torchrun: exitcode -9, 'Signal 9 (SIGKILL)'; the other ranks: 'Connection reset by peer'. No traceback anywhere.",
        cause=(
            "The machine or the container ran out of memory and the kernel chose this process, or the scheduler took the job away."
        ),
        fix=(
            "Use less memory on the host: fewer loader workers, no copies of the data per rank, less pinned memory; "
            "or ask for more."
        ),
        wrong="""\
samples = [load(path) for path in paths]
loader = DataLoader(samples, batch_size=32, num_workers=16)
""",
        right="""\
samples = LoadedWhenNeeded(paths)
loader = DataLoader(samples, batch_size=32, num_workers=2)
""",
        sources=(
            "lmzpai/roboMamba#10",
            "yangjianxin1/Firefly#171",
            "lzhxmu/CPPO#6",
            "hiyouga/LlamaFactory#163",
        ),
    ),
    Entry(
        id="H16",
        title="torchrun's 'Root Cause' names the victim",
        symptom="'Root Cause (first observed failure)' shows a rank whose only error is a lost connection or a timeout.",
        cause="torchrun reports the process that died first. That is the one which waited, not the one which left or got stuck.",
        fix="Keep one log per rank and look for the rank without an error or with the smallest last step; use `@record`.",
        wrong="""\
subprocess.run(["torchrun", "--nproc_per_node=2", "train.py"])
""",
        right="""\
subprocess.run(["torchrun", "--nproc_per_node=2", "--redirects=3", "--log-dir=logs", "train.py"])
""",
        sources=(
            "yangjianxin1/Firefly#171",
            "xiuqhou/Salience-DETR#4",
            "Facico/Chinese-Vicuna#113",
        ),
        limits="It is torchrun's report that misleads: told from logs; observed ranks name the culprit themselves.",
    ),
    Entry(
        id="H17",
        title="The process group is not destroyed, or by one rank only",
        symptom="'destroy_process_group() was not called before program exit', or the job hangs when it should end.",
        cause="destroy_process_group is missing, or stands in a branch that not every rank enters.",
        fix="Call it on every rank when training ends, best in a `finally`.",
        wrong="""\
train(model, loader)
if dist.get_rank() == 0:
    dist.destroy_process_group()
""",
        right="""\
train(model, loader)
dist.destroy_process_group()
""",
        sources=("pytorch/pytorch#75097", "pytorch/pytorch#126275", "pytorch/pytorch#122358"),
        limits="Only NCCL prints the warning; gloo ends quietly.",
    ),
    Entry(
        id="H18",
        title="The ranks never find each other",
        symptom="'Timed out after … seconds waiting for clients. 1/2 clients joined', or 'The client socket has timed out'.",
        cause=(
            "WORLD_SIZE, MASTER_ADDR or MASTER_PORT are wrong (also set by the program, over what torchrun has set), a firewall is "
            "in between, or not every rank was started."
        ),
        fix="Start as many ranks as WORLD_SIZE says, all with the same reachable MASTER_ADDR and MASTER_PORT; torchrun does it.",
        wrong="""\
around = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "2"}
subprocess.run(["python", "train.py"], env=around)
""",
        right="""\
subprocess.run(["torchrun", "--nproc_per_node=2", "train.py"])
""",
    ),
    Entry(
        id="H19",
        title="TORCH_DISTRIBUTED_DEBUG=DETAIL brings the job down itself",
        symptom=(
            "Healthy scripts on gloo with DDP die with SIGSEGV (exit code -11) while the model is wrapped; elsewhere false alarms."
        ),
        cause="A fault in the extra checks that DETAIL switches on, in torch itself (seen with 2.12 and 2.13).",
        fix="Use INFO; for collectives that do not meet, use the flight recorder or `paralab doctor -- COMMAND`.",
        wrong="""\
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
import torch  # reads it

dist.init_process_group("gloo")
model = DistributedDataParallel(model)
""",
        right="""\
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
import torch  # reads it

dist.init_process_group("gloo")
model = DistributedDataParallel(model)
""",
        sources=(
            "pytorch/pytorch#148976",
            "pytorch/pytorch#129672",
            "pytorch/pytorch#178977",
            "pytorch/pytorch#75011",
        ),
        silent=True,
        limits="Seen on gloo; whether NCCL is affected was not tried. A variable of the surroundings is not in the script.",
    ),
)
