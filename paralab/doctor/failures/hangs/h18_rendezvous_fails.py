"""H18: The ranks never find each other."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
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
)
