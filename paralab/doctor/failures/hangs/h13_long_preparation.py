"""H13: Rank 0 prepares data for longer than the others wait."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="H13",
    title="Rank 0 prepares data for longer than the others wait",
    symptom=(
        "'Socket Timeout' while fetching the NCCL id from the store, or a timeout in the "
        "first barrier."
    ),
    cause=(
        "The other ranks wait in a barrier with the default timeout while rank 0 downloads or "
        "tokenizes."
    ),
    fix=("Prepare the data before the job, or pass a long enough `timeout` to init_process_group."),
    wrong="""\
dist.init_process_group("nccl")
if dist.get_rank() == 0:
    download("https://example.org/corpus")
dist.barrier()
""",
    right="""\
dist.init_process_group("nccl", timeout=timedelta(hours=3))
if dist.get_rank() == 0:
    download("https://example.org/corpus")
dist.barrier()
""",
    sources=(
        "JIA-Lab-research/LongLoRA#45",
        "hiyouga/LlamaFactory#2424",
        "NVIDIA/nccl#865",
        "huggingface/accelerate#2528",
        "huggingface/transformers#17106",
    ),
    messages=(
        Message(
            r"\[(?P<waiting>\d+)\] is setting up NCCL communicator and retr(?:ie|ei)ving ncclUniqueId from "
            r"\[(?P<other>\d+)\] via c10d key-value store by key '[^']*', but (?:store->get|got error)",
            "Rank {waiting} waited in its first collective until the timeout, and rank {other} did not come. "
            "Rank {other} was still preparing data, or it had failed. Its own log makes it certain.",
            severity="suspect",
            kind="printed",
            blames=False,
        ),
    ),
)
