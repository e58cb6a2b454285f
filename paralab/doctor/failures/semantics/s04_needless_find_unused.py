"""S04: find_unused_parameters without need."""

from __future__ import annotations

from paralab.doctor.registry import Entry, Message

ENTRY = Entry(
    id="S04",
    title="find_unused_parameters without need",
    symptom="'find_unused_parameters=True was specified … but did not find any unused parameters', and slower steps.",
    cause="DDP walks through the autograd graph in every step to look for parameters that are not there.",
    fix="Leave it out.",
    wrong="""\
model = DistributedDataParallel(model, find_unused_parameters=True)
""",
    right="""\
model = DistributedDataParallel(model)
""",
    sources=("ecmwf/WeatherGenerator#1280",),
    messages=(
        Message(
            r"find_unused_parameters=True was specified in DDP constructor, but did not find any unused",
            "DDP searches the whole graph for unused parameters in every step and found none.",
            severity="warning",
            kind="printed",
        ),
    ),
)
