"""L02: Started with python instead of a launcher."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
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
    messages=(
        Message(
            r"Error initializing torch\.distributed using env:// rendezvous: environment variable "
            r"(?P<name>\w+) expected, but not set",
            "init_process_group{at} reads {name} from the environment, where it is not set: the script "
            "was started with plain python.",
        ),
    ),
)
