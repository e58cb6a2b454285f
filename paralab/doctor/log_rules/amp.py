"""What GradScaler and autocast say when they are used wrongly."""

from __future__ import annotations

import re
from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.said import claims, errors, lines
from paralab.doctor.registry import check

TWICE = claims(r"unscale_\(\) has already been called on this optimizer since the last update")
NO_UPDATE = claims(
    r"step\(\) has already been called since the last update|(unscale_)\(\) is being called after step"
)
NO_CHECKS = claims(r"No inf checks were recorded (?:prior to update|for this optimizer)")
FP16 = claims(r"Attempting to unscale FP16 gradients")
BF16 = claims(r"_amp_\w*unscale_\w*\" not implemented for 'BFloat16'")
UNSCALED = claims(r"Attempted (?:step|unscale_) but _scale is None")
ORDER = re.compile(r"Detected call of `lr_scheduler\.step\(\)` before `optimizer\.step\(\)`")
SCALER = re.compile(r"GradScaler|grad_scaler|scaler|AMP|autocast", re.IGNORECASE)
DISABLED = re.compile(r"GradScaler is enabled, but CUDA is not available")


@check("A02", source="log")
def unscaled_twice(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, TWICE):
        yield said.finding(
            "A02",
            "error",
            f"{said.who} called scaler.unscale_ a second time{said.at} before scaler.update(): gradients are divided by the "
            "scale once per optimizer step, and here a micro-batch in between had done it already.",
            "call scaler.unscale_(optimizer) only in the micro-batch that steps, right before clipping, and scaler.update() "
            "after it",
        )


@check("A03", source="log")
def never_updated(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, NO_UPDATE):
        yield said.finding(
            "A03",
            "error",
            f"{said.who} came to scaler.unscale_{said.at} after a scaler.step, without a scaler.update() since: it is missing, or "
            "unscale_ stands behind the step."
            if said.match[1]
            else f"{said.who} came to scaler.step{said.at} for the second time without a scaler.update() since the first.",
            "call scaler.update() once after every scaler.step(optimizer)",
        )


@check("A04", source="log")
def stepped_past_the_scaler(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, NO_CHECKS):
        yield said.finding(
            "A04",
            "error",
            f"{said.who} came to scaler.update(){said.at}, but the scaler has seen no step: optimizer.step() was called past it, "
            "so the update was made with gradients that are still multiplied by the scale (65,536 at the start).",
            "write scaler.step(optimizer) instead of optimizer.step()",
        )


@check("A05", source="log")
def half_parameters(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, FP16):
        yield said.finding(
            "A05",
            "error",
            f"{said.who} has parameters in float16{said.at}: their gradients are float16 too, and dividing those by the scale "
            "would lose what scaling has saved.",
            "keep the parameters in float32 (no model.half(), no torch_dtype=float16) and let torch.autocast choose float16",
        )


@check("A06", source="log")
def scaler_with_bfloat16(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, BF16):
        yield said.finding(
            "A06",
            "error",
            f"{said.who} gave bfloat16 gradients to GradScaler{said.at}: bfloat16 has the range of float32, so nothing has to be "
            "scaled.",
            "drop the GradScaler with bfloat16: loss.backward(); optimizer.step()",
        )


@check("A07", source="log")
def scheduler_after_a_skipped_step(logs: Logs) -> Iterator[Finding]:
    if said := lines(logs, ORDER):
        scaled = any(
            SCALER.search(line.text) for line in logs.lines if "lr_scheduler" not in line.text
        )
        why = (
            f"PyTorch warns{said.at} that the scheduler came before the optimizer. If the script uses a GradScaler the order is "
            "right and the warning misleads: the first step was skipped because of an infinite gradient, and the scheduler "
            "moved on all the same."
        )
        why += (
            " The log mentions a scaler."
            if scaled
            else " Without a scaler the two calls stand in the wrong order."
        )
        yield said.finding(
            "A07",
            "warning" if scaled else "suspect",
            why,
            "scale = scaler.get_scale(); scaler.update(); if scaler.get_scale() >= scale: scheduler.step()",
        )


@check("A10", source="log")
def scaler_switched_off(logs: Logs) -> Iterator[Finding]:
    if said := lines(logs, DISABLED):
        yield said.finding(
            "A10",
            "warning",
            f"GradScaler was made for CUDA{said.at}, there is none here, and it switched itself off: float16 gradients are not "
            "scaled.",
            'name the device: torch.amp.GradScaler("cpu"), or none with float32 and bfloat16',
        )


@check("A11", source="log")
def never_scaled(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, UNSCALED):
        yield said.finding(
            "A11",
            "error",
            f"{said.who} came to the scaler's step{said.at}, but no loss has gone through scaler.scale(): loss.backward() was "
            "called on the plain loss.",
            "scaler.scale(loss).backward()",
        )
