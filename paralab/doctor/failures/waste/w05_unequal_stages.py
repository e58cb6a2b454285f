"""W05: Stages of unequal length."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="W05",
    title="Stages of unequal length",
    symptom="The stages of a pipeline idle more than its schedule makes them.",
    cause="All wait for the longest stage in every slot; equally many layers are not equally much work.",
    fix="Cut where the times are equal, not the numbers of layers.",
    wrong="""\
stages = [layers[:6], layers[6:]]  # the last one has the large output layer as well
""",
    right="""\
stages = [layers[:8], layers[8:]]
""",
)
