"""S01: Parameters that take no part in the loss."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.logs.blame import blame
from paralab.doctor.logs.job import Logs
from paralab.doctor.messages import named
from paralab.doctor.registry import Entry, Message, check, entries

ENTRY = Entry(
    id="S01",
    title="Parameters that take no part in the loss",
    symptom="'Expected to have finished reduction in the prior iteration before starting a new one', one step after the cause.",
    cause="DDP waits for a gradient of every parameter; layers that forward or the loss leave out never deliver one.",
    fix="Remove or freeze them before wrapping, or say `find_unused_parameters=True`.",
    wrong="""\
model = Net()  # .auxiliary is not used in forward
model = DistributedDataParallel(model)
""",
    right="""\
model = Net()  # .auxiliary is not used in forward
model.auxiliary.requires_grad_(False)
model = DistributedDataParallel(model)
""",
    sources=("huggingface/accelerate#2017", "pytorch/pytorch#22049"),
    messages=(
        Message(
            r"Expected to have finished reduction in the prior iteration(?!.*training graph has changed)"
        ),
    ),
)

UNFINISHED = "Expected to have finished reduction in the prior iteration"
WHICH = re.compile(
    r"Parameter(?: indice)?s which did not receive grad for rank (?P<rank>\d+): (?P<names>[^\n]+)"
)


@check("S01", "H14", source="log")
def unused_parameters(logs: Logs) -> Iterator[Finding]:
    """H14 if only some ranks left the parameters out: the others waited for their average."""
    found = blame(logs)
    events = [e for e in found.roots if e.trace and UNFINISHED in e.trace.text]
    changed = any("training graph has changed" in e.trace.text for e in events if e.trace)
    lines = [line for line in logs.lines if WHICH.search(line.text)]
    if changed or not (events or lines):
        return
    text = events[0].trace.text if events and events[0].trace else lines[0].text
    which = WHICH.search(text)
    parameters = which["names"].strip() if which else "some parameters"
    ranks = {event.rank for event in events} or {int(which["rank"])} if which else {None}
    at = events[0].at if events else None
    where = f" at {at}" if at else ""
    waiting = {event.rank for event in found.victims} - ranks - {None}
    evidence = tuple(text for e in events[:3] for text in e.evidence()) or (str(lines[0]),)
    file, line = (at.file, at.line) if at else (None, None)
    if len(events) == 1 and waiting and events[0].rank is not None:
        why = (
            f"Only rank {events[0].rank} has parameters without a gradient ({parameters}). "
            f"{named(waiting)} used them and waited for their average{where}."
        )
        fix = entries["H14"].fix
        yield Finding("H14", "error", why, fix, file, line, events[0].rank, evidence)
        return
    why = f"Parameters got no gradient in the previous step, so DDP waits for them{where}: {parameters}."
    if which is None or which["names"].strip()[:1].isdigit():
        why += (
            " The numbers count model.parameters(); TORCH_DISTRIBUTED_DEBUG=INFO prints the names."
        )
    yield Finding("S01", "error", why, ENTRY.fix, file, line, None, evidence)
