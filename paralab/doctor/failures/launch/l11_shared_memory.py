"""L11: Shared memory is too small for the loader's workers."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.logs.blame import blame
from paralab.doctor.logs.job import Logs
from paralab.doctor.messages import named
from paralab.doctor.registry import Entry, Message, check

ENTRY = Entry(
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
    messages=(
        Message(r"was killed by SIGBUS"),  # paralab's launcher
        Message(
            r"unable to (?:allocate shared memory\(shm\)|(?:write to|resize) file </torch_)|out of shared memory"
            r"|DataLoader worker .{0,40}Bus error",
            "A loader worker of {who} found no room in shared memory{at}. Batches pass through /dev/shm, "
            "and containers only get 64 MB of it by default.",
            kind="printed",
        ),
        Message(
            r"NCCL WARN .{0,80}No space left on device",
            "NCCL could not create its shared-memory segment: /dev/shm is full. Containers only get 64 MB "
            "of it by default.",
            kind="printed",
        ),
    ),
)


@check("L11", source="log")
def bus_error(logs: Logs) -> Iterator[Finding]:
    root = blame(logs).crash
    if root is None or root.signal != "SIGBUS":
        return
    where, file, line = (
        (f" at {root.at}", root.at.file, root.at.line) if root.at else ("", None, None)
    )
    why = f"{named([root.rank])} died of SIGBUS{where}. Usually /dev/shm is full; `df` makes it certain."
    yield Finding("L11", "suspect", why, ENTRY.fix, file, line, root.rank, root.evidence())
