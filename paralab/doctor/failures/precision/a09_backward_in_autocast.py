"""A09: backward runs inside autocast.

Symptom: Usually none. Under torch.compile, the gradients may be silently wrong.
Cause: backward already uses the dtypes that forward chose. PyTorch advises against running it under autocast.
Fix: End the autocast block after computing the loss.

  with torch.autocast("cuda"):
      loss = criterion(model(x), y)
-     loss.backward()
+ loss.backward()
"""

from paralab.doctor.failures.precision.scaling import autocasts_around, enabled, timelines
from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static.report import found, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.static.timeline import occurrences

ENTRY = describe(__doc__, silent=True)


@check("A09", source="script")
def backward_in_autocast(script: Script) -> Findings:
    """Report a backward pass inside autocast, in a script that trains."""
    if not script.methods_on("optimizer", "step") and not script.methods_on("scaler", "step"):
        return  # the script only measures time or memory
    for _, _, event in occurrences(timelines(script), "backward", "scaled backward"):
        cast = next(autocasts_around(script, event), None)
        if cast is not None and enabled(script, cast) is not False:
            why = f"`backward` runs inside `autocast` ({line_of(cast, event.call)}). Under torch.compile its gradients may be wrong."
            yield found(script, "A09", "warning", event.call, why, also=(cast,))
