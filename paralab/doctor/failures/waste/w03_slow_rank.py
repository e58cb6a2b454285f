"""W03: One rank is slower than the others."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="W03",
    title="One rank is slower than the others",
    symptom="All ranks are as slow as the slowest; the others' devices idle in every step.",
    cause="More or longer samples, logging or saving inside the step, a shared core, a slower or hotter device.",
    fix="Give every rank the same work; do what only one rank does outside the step.",
    wrong="""\
for batch in loader:
    step(batch)
    if rank == 0:
        write_pictures(model)
""",
    right="""\
for batch in loader:
    step(batch)
if rank == 0:
    write_pictures(model)
""",
)
