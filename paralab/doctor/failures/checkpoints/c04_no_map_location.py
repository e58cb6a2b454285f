"""C04: torch.load without map_location."""

from __future__ import annotations

from paralab.doctor.registry import Entry

ENTRY = Entry(
    id="C04",
    title="torch.load without map_location",
    symptom="Every rank puts a copy of the weights on GPU 0, which then runs out of memory.",
    cause="Tensors go back to the device from which they were saved.",
    fix="`map_location='cpu'`, or the rank's own device.",
    wrong="""\
state = torch.load("net.pt")
""",
    right="""\
state = torch.load("net.pt", map_location="cpu")
""",
    limits="Needs GPUs to be seen; read in the script only.",
)
