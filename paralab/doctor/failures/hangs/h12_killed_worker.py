"""H12: A worker was killed from outside."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
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
)
