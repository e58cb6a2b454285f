"""L11: Shared memory is too small for the loader's workers."""

from __future__ import annotations

from paralab.doctor.registry import Entry

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
)
