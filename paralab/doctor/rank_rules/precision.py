"""Mixed precision: gradients that are scaled when they should not be, a scaler that is called in
the wrong order, steps left " "out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from paralab.doctor.agreement import found, place_of
from paralab.doctor.events import Amp, Autocast, Backward, Clip, Event, Scheduled, Step
from paralab.doctor.finding import Finding
from paralab.doctor.observation import Observation, RankSeen
from paralab.doctor.registry import check

MANY_SKIPS = 3  # steps left out one after the other, with a loss that is no number
TOO_MANY_SKIPS = 12  # whatever the loss: from 65536 the scale is at 16 by then


@check("A01", source="ranks")
def clipped_while_scaled(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks:
        scale: float | None = None  # of the gradients that are there now
        for event in rank.events:
            if isinstance(event, Amp):
                scale = _scale_after(event, scale)
            elif isinstance(event, Clip) and scale is not None:
                factor = f"{scale:g} times too large" if scale else "still multiplied by the scale"
                norm = f", of norm {event.norm:.4g}" if event.norm is not None else ""
                yield found(
                    "A01",
                    "error",
                    f"this clips gradients that are {factor}{norm}: against a limit of {event.most:g} nearly all of them are "
                    "cut, and after "
                    "the scaler has divided, almost nothing is left of the step",
                    "scaler.unscale_(optimizer) before clipping",
                    place_of(event),
                    [
                        f"rank {rank.rank}, step {event.step + 1}: scale {scale:g}, norm {event.norm}, limit {event.most}"
                    ],
                )
                return


def _scale_after(event: Amp, scale: float | None) -> float | None:
    if not event.enabled:
        return scale
    if event.op == "scale":
        return event.scale or 0.0
    return None if event.op in ("unscale_", "update", "step") else scale


def _failed(
    seen: Observation, entry: str, ops: tuple[str, ...], pattern: str, why: str, fix: str
) -> Iterator[Finding]:
    """A call of the scaler that raised, with what it means."""
    for rank in seen.ranks:
        for event in rank.of(Amp):
            if event.op in ops and event.error and re.search(pattern, event.error):
                yield found(
                    entry,
                    "error",
                    why,
                    fix,
                    place_of(event),
                    [f"rank {rank.rank}: {event.error.splitlines()[0][:160]}"],
                )
                return


@check("A02", source="ranks")
def unscaled_twice(seen: Observation) -> Iterator[Finding]:
    why = "unscale_ is called here a second time before update(): the gradients would be divided by the scale twice"
    fix = "call unscale_ once for each step: at the end of the window, not in every micro-batch"
    yield from _failed(
        seen, "A02", ("unscale_",), r"unscale_\(\) has already been called", why, fix
    )


@check("A03", source="ranks")
def never_updated(seen: Observation) -> Iterator[Finding]:
    why = "scaler.step() comes a second time without scaler.update() in between: the scaler does not know that a new step has begun"
    yield from _failed(
        seen,
        "A03",
        ("step",),
        r"step\(\) has already been called",
        why,
        "scaler.update() after every scaler.step()",
    )


@check("A04", source="ranks")
def stepped_past_the_scaler(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks:
        scale: float | None = None  # of the gradients that are there now
        for event, inside in _with_scaler(rank):
            if isinstance(event, Amp):
                scale = _scale_after(event, scale)
            elif (
                isinstance(event, Step)
                and not inside
                and scale is not None
                and _was_scaled(rank, event)
            ):
                factor = f"{scale:g}" if scale else "the scale"
                yield found(
                    "A04",
                    "error",
                    "the loss went through scaler.scale(), but this optimizer steps by itself: it applies gradients that are "
                    f"{factor} "
                    f"times too large, and steps over infinities that the scaler would have left out",
                    "scaler.step(optimizer) and scaler.update() in its place",
                    place_of(event),
                    [
                        f"rank {rank.rank}: step {event.number} outside scaler.step(), scale {factor}"
                    ],
                )
                return


def _was_scaled(rank: RankSeen, step: Step) -> bool:
    """The last backward before a step began from a scaled loss: nothing but the scaling came
    between the two."""
    before = [
        event
        for event in rank.events
        if event.t < step.t and isinstance(event, (Amp, Backward, Step))
    ]
    for event, earlier in zip(reversed(before), reversed(before[:-1]), strict=False):
        if isinstance(event, Backward):
            return isinstance(earlier, Amp) and earlier.op == "scale" and earlier.enabled
        if isinstance(event, Step):
            return False
    return False


def _with_scaler(rank: RankSeen) -> Iterator[tuple[Event, bool]]:
    """Every event, and whether scaler.step() was open then, or still is."""
    until = 0.0
    began = min(
        (event.t for event in rank.doing if isinstance(event, Amp) and event.op == "step"),
        default=math.inf,
    )
    for event in rank.events:
        if isinstance(event, Amp) and event.op == "step":
            until = event.t + (event.seconds or 0.0)
        yield event, event.t <= until or event.t >= began


@check("A05", source="ranks")
def half_parameters(seen: Observation) -> Iterator[Finding]:
    why = "the scaler divides gradients only of float32 parameters; these are float16 themselves (model.half(), or loaded so)"
    fix = "leave the parameters in float32 and let autocast compute in float16: no model.half(), no torch_dtype=float16"
    yield from _failed(
        seen, "A05", ("unscale_", "step"), "Attempting to unscale FP16 gradients", why, fix
    )


@check("A06", source="ranks")
def scaler_with_bfloat16(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks:
        dtypes = {event.dtype for event in rank.of(Autocast) if event.enabled}
        scaled = [event for event in rank.of(Amp) if event.op == "scale" and event.enabled]
        if dtypes != {"bfloat16"} or not scaled:
            continue
        yield found(
            "A06",
            "warning",
            f"autocast computes in bfloat16, whose range is that of float32: nothing underflows, and multiplying the loss by "
            f"{scaled[0].scale or 65536:g} gains nothing (on a GPU with bfloat16 gradients the scaler fails)",
            "drop the GradScaler, or GradScaler(enabled=False): loss.backward(); optimizer.step()",
            place_of(scaled[0]),
            [f"rank {rank.rank}: {len(scaled)} losses scaled, autocast dtypes: bfloat16 only"],
        )
        return


@check("A07", source="ranks")
def scheduled_after_a_skip(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks:
        skipped: Amp | None = None
        for event in rank.events:
            if isinstance(event, Amp) and event.op == "step":
                skipped = event if event.skipped else None
            elif isinstance(event, Scheduled) and skipped is not None:
                total = sum(bool(amp.skipped) for amp in rank.of(Amp))
                yield found(
                    "A07",
                    "warning",
                    f"the scaler left step {event.step + 1} out (infinities in the gradients: the scale was too large), and "
                    "the scheduler "
                    "went on nevertheless: the learning rate runs ahead of the steps, and PyTorch's warning about the order of "
                    "the two is "
                    "wrong",
                    "before = scaler.get_scale(); scaler.update(); if scaler.get_scale() >= before: scheduler.step()",
                    place_of(event),
                    [
                        f"rank {rank.rank}: {total} steps left out, {len(rank.steps)} made, {len(rank.of(Scheduled))} "
                        "scheduler steps"
                    ],
                )
                return


@check("A08", source="ranks")
def always_skipped(seen: Observation) -> Iterator[Finding]:
    for rank in seen.ranks:
        skips, no_number, first = 0, 0, None
        for event in rank.events:
            if isinstance(event, Backward) and event.loss is not None:
                no_number = no_number + 1 if isinstance(event.loss, str) else 0
                first = event if no_number == 1 else first
            elif isinstance(event, Amp) and event.op == "step" and event.enabled:
                skips = skips + 1 if event.skipped else 0
        if (skips < MANY_SKIPS or no_number < MANY_SKIPS) and skips < TOO_MANY_SKIPS:
            continue
        scales = [event.scale for event in rank.of(Amp) if event.op == "update" and event.scale]
        cause = (
            f"the loss is {first.loss} since then"
            if first and no_number >= MANY_SKIPS
            else "the gradients are never finite"
        )
        yield found(
            "A08",
            "error",
            f"the scaler has left out the last {skips} steps, one after the other, and {cause}: the script runs on, but "
            "nothing is trained; "
            "the scale is halved for ever",
            "find the first module whose output is NaN (torch.autograd.detect_anomaly(), or hooks): a log, sqrt or division of "
            "zero",
            place_of(first) if no_number >= MANY_SKIPS else None,
            [
                f"rank {rank.rank}: scale {' '.join(f'{scale:g}' for scale in scales[-5:])}, {len(rank.steps)} steps made"
            ],
        )
        return


@check("A11", source="ranks")
def never_scaled(seen: Observation) -> Iterator[Finding]:
    why = "scaler.step() without scaler.scale(): the loss went into backward as it is, and the scaler has no scale to divide by"
    fix = "scaler.scale(loss).backward()"
    yield from _failed(seen, "A11", ("step", "unscale_"), "_scale is None", why, fix)
