"""A09: backward inside autocast."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.failures.precision.scaling import autocasts_around, enabled, timelines
from paralab.doctor.finding import Finding
from paralab.doctor.registry import Entry, check
from paralab.doctor.static.names import AUTOCAST
from paralab.doctor.static.report import found, line_of
from paralab.doctor.static.script import Script

ENTRY = Entry(
    id="A09",
    title="backward runs inside autocast",
    symptom="Usually none. Under torch.compile the gradients may be wrong without a message.",
    cause="backward already uses the dtypes that forward chose. PyTorch advises against running it under autocast.",
    fix="End the autocast block after computing the loss.",
    example="""\
  with torch.autocast("cuda"):
      loss = criterion(model(x), y)
-     loss.backward()
+ loss.backward()
""",
    silent=True,
)


@check("A09", source="script")
def backward_in_autocast(script: Script) -> Iterator[Finding]:
    reported = set()
    for events in timelines(script):
        for event in events:
            cast = next(autocasts_around(script, event), None)
            if "backward" not in event.role or cast is None or event.call in reported:
                continue
            if cast.target == AUTOCAST and enabled(script, cast) is False:
                continue
            reported.add(event.call)
            why = (
                f"`backward` runs inside `autocast` ({line_of(cast, event.call)}). It already uses the dtypes of the "
                "forward pass; PyTorch advises against this, and with torch.compile gradients may be wrong."
            )
            fix = "End the `with` block before `backward`."
            yield found(script, "A09", "warning", event.call, why, fix, also=(cast,))
