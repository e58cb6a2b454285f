"""M02: Limits of a process too low."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="M02",
    title="Limits of a process too low",
    symptom="'Too many open files' from a loader worker; or NCCL does not use InfiniBand.",
    cause="Every tensor that a worker hands over is an open file; InfiniBand needs memory that is locked.",
    fix="`ulimit -n 65536`, `ulimit -l unlimited`; in a container --ulimit memlock=-1.",
    wrong="""\
subprocess.run(["torchrun", "--nproc_per_node=8", "train.py"])
""",
    right="""\
resource.setrlimit(resource.RLIMIT_NOFILE, (65536, 65536))
subprocess.run(["torchrun", "--nproc_per_node=8", "train.py"])
""",
)
