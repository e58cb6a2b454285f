"""Practical 7: mixed precision against fp32, and what GradScaler is for."""

from __future__ import annotations

import math

from paralab.analyse import table_cells as cells
from paralab.analyse.blocks import Answer, Block, Cell, Table
from paralab.analyse.compare import loss_difference
from paralab.analyse.confidence import Ratio
from paralab.analyse.metric_types import GradientCounts
from paralab.analyse.phrases import SAME_SIZE, faster, listed, more_or_less, share, speed
from paralab.course.configurations import (
    BF16,
    DDP,
    FAINT,
    FAINT_BARE,
    FAINT_BF16,
    FAINT_SCALED,
    FP16,
)
from paralab.course.measurements import Measurements, Row, memory_of, memory_words
from paralab.units import plural, size

LOST = 0.01  # a hundredth more of the gradients being zero is called underflow
SAME_LOSS = 1e-6
SLOW = 0.5  # half the speed: the hardware has no arithmetic for it


def kept(row: Row) -> int | None:
    """Bytes that autograd keeps for the backward pass; None where only the allocator's peak is
    known."""
    return max(
        (int(entry.activations) for entry in row.peak_bytes if entry.activations),
        default=None,
    )


def saves(before: Row, after: Row) -> bool:
    return memory_of(after) < (1 - SAME_SIZE) * memory_of(before)


def mixed(lab: Measurements) -> list[Block]:
    plain, low = lab[DDP], lab.given(BF16, FP16)
    lines = [
        (cells.name("fp32" if name == DDP else name), *_precision_cells(lab, name))
        for name in (DDP, BF16, FP16)
    ]
    columns = (
        "precision",
        "step time",
        "times as fast",
        "memory",
        "kept for backward",
        "loss differs by",
        "skipped steps",
    )
    table = Table("Mixed precision", columns, tuple(lines), memory_words(plain))
    if not low:
        return [
            table,
            Answer(
                "Is mixed precision faster?",
                left_out(lab, BF16, FP16),
                {"precisions_tried": 2, "that_run": 0},
            ),
        ]
    return [table, amp_speed(lab, low), amp_memory(plain, low), amp_result(plain, low)]


def _precision_cells(lab: Measurements, name: str) -> tuple[Cell, ...]:
    if name not in lab:
        return (cells.missing(lab.why_not(name)), *(cells.missing("see left") for _ in range(5)))
    row = lab[name]
    return (
        cells.step_time(row),
        cells.ratio(lab.ratio(DDP, name)) if name != DDP else cells.exact(1),
        cells.held_bytes(memory_of(row)),
        cells.held_bytes(kept(row), "only the allocator's peak is known"),
        cells.measured_share(loss_difference(row.losses, lab[DDP].losses), "a loss is not finite"),
        cells.exact(row.skipped_steps),
    )


def difference(before: Row, after: Row) -> float:
    """The largest relative difference of a step's loss, over the steps that both have; infinite
    where one is not finite."""
    found = loss_difference(after.losses, before.losses)
    return math.inf if found is None else found


def left_out(lab: Measurements, *names: str) -> str:
    return "It could not be run here. " + " ".join(
        f"{name}: {lab.why_not(name)}" for name in names if name not in lab
    )


def amp_speed(lab: Measurements, low: list[Row]) -> Answer:
    speeds: dict[str, Ratio] = {row.precision: lab.ratio(DDP, row.name) for row in low}
    text = (
        "Against fp32, "
        + listed([speed(precision, ratio) for precision, ratio in speeds.items()])
        + "."
    )
    slow = [precision for precision, ratio in speeds.items() if ratio.value < SLOW]
    if slow:
        machine = lab.comparison.machine
        where = machine.gpus[0].name if low[0].peak_bytes[0].how == "allocator" else machine.cpu
        text += f" {where} seems to have no fast arithmetic for {listed(slow)}."
    best = max(speeds.values(), key=lambda ratio: ratio.value)
    evidence = {
        precision: {"speed_up": ratio.value, "low": ratio.low, "high": ratio.high}
        for precision, ratio in speeds.items()
    }
    return Answer("Is mixed precision faster?", text, evidence, faster(best))


def amp_memory(plain: Row, low: list[Row]) -> Answer:
    least = min(low, key=memory_of)
    before, after = memory_of(plain), memory_of(least)
    text = f"{least.precision} takes {size(after)}, fp32 {size(before)} ({more_or_less(before, after)}). Parameters, gradients and "
    text += "optimizer stay in fp32"
    now, then, weights = kept(least), kept(plain), plain.peak_bytes[0].parameters
    if now and then and now > then and weights:
        text += f"; for the backward pass {size(now)} are kept instead of {size(then)}, because autocast also keeps "
        text += "half-size copies of the "
        text += f"weights (of {size(weights)})"
    elif now and then:
        text += f"; for the backward pass {size(now)} are kept instead of {size(then)}"
    return Answer(
        "Does it save memory?",
        text + ".",
        {"bytes": [before, after], "kept_bytes": [then, now]},
        saves(plain, least),
    )


def amp_result(plain: Row, low: list[Row]) -> Answer:
    off = {row.precision: difference(plain, row) for row in low}
    text = f"The loss of a step differs from fp32's by at most {listed([f'{share(value)} ({name})' for name, value in off.items()])}, "
    fewest, most = min(len(row.losses) for row in low), len(plain.losses)
    text += f"in {most} steps." if fewest == most else f"in {fewest} to {most} steps."
    return Answer(
        "Is the result numerically the same?",
        text,
        {"largest_share": off},
        all(value < SAME_LOSS for value in off.values()),
    )


def scaler(lab: Measurements) -> list[Block]:
    lines = []
    for name in (FAINT, FAINT_SCALED, FAINT_BARE, FAINT_BF16):
        if name not in lab:
            lines.append(
                (
                    cells.name(name),
                    cells.missing(lab.why_not(name)),
                    *(cells.missing("see left") for _ in range(4)),
                )
            )
            continue
        found = gradients_of(lab[name])
        scale = cells.exact(found.scale) if found.scale else cells.name("none")
        counts = (
            cells.exact(found.total),
            cells.exact(found.zeros),
            cells.measured_share(zeros(lab[name])),
        )
        lines.append((cells.name(name), scale, *counts, cells.exact(lab[name].skipped_steps)))
    note = "The workload `mlp:faint` has a thousandth of the usual loss, so its gradients are small. Some are zero anyway (ReLU)."
    columns = ("set-up", "loss scale", "gradients", "of them zero", "share", "skipped steps")
    table = Table("Gradients of the first step", columns, tuple(lines), note)
    base = zeros(lab[FAINT])
    if FAINT_BARE not in lab or FAINT_SCALED not in lab:
        why = f"{left_out(lab, FAINT_BARE, FAINT_SCALED)} (In fp32, {share(base)} are zero.)"
        return [
            table,
            Answer("Do gradients underflow without GradScaler?", why, {"fp32_zero_share": base}),
        ]
    return [table, underflow(lab, base), what_scaling_does(lab), *_bf16_needs(lab, base)]


def zeros(row: Row) -> float:
    found = gradients_of(row)
    return found.zeros / found.total


def gradients_of(row: Row) -> GradientCounts:
    """Of a row that finished its first step."""
    assert row.metrics.gradients is not None, row.name
    return row.metrics.gradients


def underflow(lab: Measurements, base: float) -> Answer:
    bare = lab[FAINT_BARE]
    lost = gradients_of(bare).zeros - gradients_of(lab[FAINT]).zeros
    yes = zeros(bare) > base + LOST
    text = (
        f"Without it, {share(zeros(bare))} of the gradients are zero in fp16, in fp32 {share(base)}"
    )
    text += (
        f": {lost:,} more became zero, because fp16 has no number between 0 and 6e-8."
        if yes
        else ": fp16's range is enough for this loss."
    )
    return Answer(
        "Do gradients underflow without GradScaler?",
        text,
        {"without_share": zeros(bare), "fp32_share": base, "lost": lost},
        yes,
    )


def what_scaling_does(lab: Measurements) -> Answer:
    scaled, bare = zeros(lab[FAINT_SCALED]), zeros(lab[FAINT_BARE])
    scale, skipped = (
        gradients_of(lab[FAINT_SCALED]).scale,
        lab[FAINT_SCALED].skipped_steps,
    )
    helps = scaled < bare - LOST
    text = f"It multiplies the loss by {scale:,.0f} before the backward pass and divides the gradients again before the "
    text += "optimizer's step: "
    text += f"{share(scaled)} are zero with it, {share(bare)} without." + (
        " It saves them." if helps else " Here it changes nothing."
    )
    text += (
        f" {plural(skipped, 'step')} had to be skipped, because the scale was too large."
        if skipped
        else ""
    )
    evidence = {
        "scale": scale,
        "with_share": scaled,
        "without_share": bare,
        "skipped_steps": skipped,
    }
    return Answer("What does GradScaler do?", text, evidence)


def _bf16_needs(lab: Measurements, base: float) -> list[Answer]:
    if FAINT_BF16 not in lab:
        return []
    bf16 = zeros(lab[FAINT_BF16])
    text = f"bf16 has the range of fp32: without any scaling {share(bf16)} of the gradients are zero, in fp32 {share(base)}."
    return [
        Answer(
            "Does bf16 need it?", text, {"bf16_share": bf16, "fp32_share": base}, bf16 > base + LOST
        )
    ]
