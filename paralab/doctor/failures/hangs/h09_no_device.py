"""H09: A rank that does not say which GPU is its own."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="H09",
    title="A rank that does not say which GPU is its own",
    symptom="NCCL guesses the GPU from the rank and warns that this can hang; barrier() may never return.",
    cause="Neither `torch.cuda.set_device` nor `device_id=` was given, so the first collective has to guess.",
    fix="Set the device from LOCAL_RANK before the process group is made, and pass it as device_id.",
    wrong="""\
dist.init_process_group("nccl")
dist.barrier()
""",
    right="""\
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
dist.barrier()
""",
    sources=(
        "pytorch/pytorch#134617",
        "pytorch/pytorch#178977",
        "deepspeedai/DeepSpeed#7266",
        "pytorch/pytorch#159262",
    ),
    limits="Only NCCL guesses; on CPU ranks it can be read in the script and in logs, not provoked.",
    messages=(
        Message(
            r"using GPU (?P<gpu>\d+) (?:to perform barrier )?as (?:the )?devices? used by this process (?:is|are) "
            r"currently unknown|Guessing device ID based on global rank",
            "NCCL does not know the GPU of {who} and guessed it from the rank: the first collective came "
            "before torch.cuda.set_device. A wrong guess makes the job hang.",
            severity="warning",
            kind="printed",
        ),
    ),
)
