"""A06: GradScaler with bf16.

Symptom: No error on CPU. On CUDA with bf16 gradients: 'not implemented for BFloat16'.
Cause: bf16 has the range of fp32, so nothing needs scaling. The scaler only adds work and may skip steps.
Fix: Remove the scaler, or enable it for fp16 only.
Reported: pytorch/pytorch#127176 huggingface/trl#4901 huggingface/accelerate#1036

- scaler = torch.amp.GradScaler("cuda")
  with torch.autocast("cuda", dtype=torch.bfloat16):
      loss = criterion(model(x), y)
- scaler.scale(loss).backward()
+ loss.backward()
"""

from paralab.doctor.events import Amp, Autocast
from paralab.doctor.failures.precision.scaling import calls_on_scaler, dtypes, enabled
from paralab.doctor.observation import WatchedRank
from paralab.doctor.rank_checks import check_each_rank, make_finding
from paralab.doctor.registry import Finding, Findings, Message, check, describe
from paralab.doctor.static.facts import Call, If
from paralab.doctor.static.names import AUTOCAST, SCALER
from paralab.doctor.static.report import found, line_of
from paralab.doctor.static.script import Script

ENTRY = describe(
    __doc__,
    Message(
        r"_amp_\w*unscale_\w*\" not implemented for 'BFloat16'",
        "{who} passed bfloat16 gradients to GradScaler{at}. bfloat16 has the range of float32, "
        "so nothing needs scaling.",
    ),
    silent=True,
)


@check("A06", source="script")
def scaler_for_bfloat16(script: Script) -> Findings:
    """Report a scaler that is always on in a project whose autocasts all compute in bf16."""
    casts = [call for call in script.calls_of(AUTOCAST) if enabled(script, call) is not False]
    if not casts or not all(_is_bfloat16(script, cast) for cast in casts):
        return
    scales = calls_on_scaler(script, "scale")
    for scaler in {one for call in scales for one in script.makers(call.receiver, call.scope)}:
        if scaler.target == SCALER and enabled(script, scaler) and not scaler.inside(If):
            why = (
                f"`autocast` ({line_of(casts[0], scaler)}) computes in bf16, so this scaler does "
                "not help, and it costs a pass over all gradients in every step."
            )
            yield found(script, "A06", "warning", scaler, why, also=(casts[0],))


def _is_bfloat16(script: Script, cast: Call) -> bool:
    given = cast.argument(1, "dtype")
    if given is None and not cast.unpacks:
        device = cast.argument(0, "device_type")
        return getattr(device, "value", None) == "cpu"  # on the CPU, bf16 is the default
    return dtypes(script, given, cast.scope) == {"torch.bfloat16"}


@check_each_rank("A06")
def scaled_bfloat16(rank: WatchedRank) -> Finding | None:
    names = {event.dtype for event in rank.of(Autocast) if event.enabled}
    scaled = [event for event in rank.of(Amp) if event.op == "scale" and event.enabled]
    if names != {"bfloat16"} or not scaled:
        return None
    why = (
        f"autocast computes in bf16, which does not underflow, so multiplying {len(scaled)} losses by "
        f"{scaled[0].scale or 65536:g} gained nothing. With bf16 gradients on a GPU, the scaler fails."
    )
    return make_finding("A06", "warning", why, scaled[0])
