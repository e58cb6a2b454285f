"""H16: torchrun's 'Root Cause' names the victim."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
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
)
