"""P06: Forward and backward of a pipeline stage under DDP have separate no_sync blocks.

Symptom: The replicas of a stage silently drift apart, or gradients are sent more often than needed.
Cause: DDP checks `no_sync()` in forward only. If all forward passes run first, the last one
prepares DDP to send, the first backward sends, and later gradients stay on each rank (measured with
torch 2.13).
Fix: Run forward and backward of a micro-batch in one `no_sync()` block, or use torch.distributed.pipelining.
Reported: pytorch/PiPPy#1133

  for number, x in enumerate(parts):
      with stage.no_sync() if number < last else nullcontext():
-         outputs.append(stage(x))
- for number, output in enumerate(outputs):
-     with stage.no_sync() if number < last else nullcontext():
-         loss_fn(output).backward()
+         loss_fn(stage(x)).backward()
"""

from paralab.doctor.failures.accumulation.windows import averaged_by, quiet, timelines
from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static.report import code, found, line_of
from paralab.doctor.static.script import Script
from paralab.doctor.static.timeline import Event, excludes, occurrences

ENTRY = describe(__doc__, silent=True)


@check("P06", source="script")
def synchronized_too_early(script: Script) -> Findings:
    """Report a loop of forward passes followed by a loop of backward passes, with `no_sync` in
    either of them."""
    if script.methods("prepare_for_backward"):
        return
    for events, place, backward in occurrences(timelines(script), "backward"):
        forward = _forward_in_earlier_loop(script, events, place)
        step = next((one for one in events[place:] if one.role == "step"), None)
        by = averaged_by(script, step) if step is not None else ""
        if forward is None or by is not None:
            continue
        model, call = code(forward.call.node.func), backward.call
        why = (
            f"All forward passes (`{model}(…)`, {line_of(forward.call, call)}) run before the first backward. DDP checks "
            "`no_sync` in forward only, so the first backward sends its gradients, and those of later "
            "micro-batches stay on each rank."
        )
        yield found(script, "P06", "error", call, why, also=(forward.call,))


def _forward_in_earlier_loop(script: Script, events: list[Event], place: int) -> Event | None:
    """Return the forward pass in the loop before this backward's loop, if `no_sync` is used."""
    backward = events[place]
    if not backward.loops:
        return None
    for event in reversed(events[:place]):
        if event.role != "forward" or excludes(event, backward):
            continue
        apart = event.loops[:-1] == backward.loops[:-1] and event.loops != backward.loops
        always = any(quiet(script, *one) is True for one in event.blocks())
        if not apart or not event.loops or always:
            return None  # forward is not in an earlier loop, or is always under no_sync
        blocks = [quiet(script, *one) for part in (event, backward) for one in part.blocks()]
        return event if None in blocks or True in blocks else None
    return None
