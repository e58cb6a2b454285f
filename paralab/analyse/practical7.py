"""Practical 7, DDP optimisation and debugging: accumulation, mixed precision, what is wrong if it is slow; from what was measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paralab.analyse import cells
from paralab.analyse.blocks import Answer, Bar, Bars, Block, Cell, Section, Table
from paralab.analyse.lab import Lab, LabPart, Row, memory_of, memory_words, remarks_of, same_training, tell
from paralab.analyse.metrics import RULE
from paralab.analyse.uncertainty import Ratio
from paralab.analyse.wording import factor, faster, listed, more_or_less, share, split_words, times_as_fast
from paralab.units import plural, seconds, size

DDP, ACCUMULATE, SYNC = "DDP", "DDP, accumulate 4", "DDP, accumulate 4, no_sync() removed"
BF16, FP16 = "DDP, bf16", "DDP, fp16 with GradScaler"
BOTH, BOTH_FP16 = "DDP, accumulate 4 and bf16", "DDP, accumulate 4 and fp16"
FAINT, FAINT_BF16 = "small loss, fp32", "small loss, bf16"
FAINT_SCALED, FAINT_BARE = "small loss, fp16 with GradScaler", "small loss, fp16 without GradScaler"
LOST = 0.01  # a hundredth more of the gradients being zero is called underflow


def sections(comparison: dict[str, Any], folder: Path) -> tuple[Section, ...]:
    return tell(PARTS, comparison, folder)


def activations(row: Row) -> int | None:
    held = [entry.get("activations") for entry in row["peak_bytes"]]
    return max((int(value) for value in held if value), default=None)


def accumulation(lab: Lab) -> list[Block]:
    plain, four, every = lab[DDP], lab[ACCUMULATE], lab[SYNC]
    columns = ("set-up", "backward passes per step", "samples per pass and rank", "all-reduces per step", "data per step and rank")
    columns += ("optimiser steps per step", "step time", "memory")
    rows = tuple(
        (
            cells.name(row["name"]),
            cells.exact(row["observed"]["passes"]["backward"]),
            cells.exact(row["splits"][0]["shape"][0]),
            cells.exact(row["all_reduces_per_step"]),
            cells.held_bytes(row["bytes_per_step"]),
            cells.exact(row["observed"]["optimizer_steps"]),
            cells.step_time(row),
            cells.held_bytes(memory_of(row)),
        )
        for row in (plain, four, every)
    )
    passes = four["observed"]["passes"]["backward"]
    by_pass = Table(
        "All-reduces in each backward pass of one step",
        ("set-up", *(f"pass {number + 1}" for number in range(passes))),
        tuple((cells.name(row["name"]), *map(cells.exact, row["observed"]["all_reduces_by_pass"])) for row in (four, every)),
        "`if (step + 1) % ACCUM_STEPS == 0` is the last pass.",
    )
    return [
        Table(
            "Accumulation",
            columns,
            rows,
            f"All three train on the same {plain['batch']['size']} samples per optimiser step. " + memory_words(plain),
        ),
        by_pass,
        synchronised(four, every),
        optimiser_steps(four),
        divide(four),
        no_sync(lab, four, every),
        Answer(
            "Does accumulation save memory?",
            f"{size(memory_of(four))}, {more_or_less(memory_of(plain), memory_of(four))} than {size(memory_of(plain))} without: a pass holds the activations of "
            f"{four['splits'][0]['shape'][0]} samples ({size(activations(four))}) and not of {plain['splits'][0]['shape'][0]} ({size(activations(plain))}).",
            {
                "plain_bytes": memory_of(plain),
                "accumulated_bytes": memory_of(four),
                "activations_bytes": [activations(plain), activations(four)],
            },
            memory_of(four) < 0.995 * memory_of(plain),
        ),
    ]


def synchronised(four: Row, every: Row) -> Answer:
    counts = four["observed"]["all_reduces_by_pass"]
    quiet = sum(count == 0 for count in counts)
    return Answer(
        "Are the gradients synchronised in every backward pass?",
        f"With `no_sync()`, {quiet} of {len(counts)} passes have no all-reduce ({split_words(counts)}); without it the counts are "
        f"{split_words(every['observed']['all_reduces_by_pass'])}.",
        {"with_no_sync": counts, "without": every["observed"]["all_reduces_by_pass"]},
        quiet == 0,
    )


def optimiser_steps(row: Row) -> Answer:
    passes, steps = row["observed"]["passes"]["backward"], row["observed"]["optimizer_steps"]
    return Answer(
        "How often does the optimiser step?",
        f"{plural(steps, 'time')} for {plural(passes, 'backward pass')}: gradients are added up until then.",
        {"backward_passes": passes, "optimizer_steps": steps},
    )


def divide(row: Row) -> Answer:
    passes, proof = row["observed"]["passes"]["backward"], row["parity"] or {}
    text = f"Each pass gives the mean over its own samples; the sum of {passes} such means is {passes} times the mean over the batch, so each is divided by {passes}. "
    text += f"Divided like this, the training is {same_training(row)}."
    return Answer(
        "Why is the loss divided by ACCUM_STEPS?",
        text,
        {"passes": passes, "max_difference": proof.get("max_difference"), "equal": proof.get("equal")},
    )


def no_sync(lab: Lab, four: Row, every: Row) -> Answer:
    ratio = lab.ratio(SYNC, ACCUMULATE)
    reduces = (int(four["all_reduces_per_step"]), int(every["all_reduces_per_step"]))
    moved = (four["bytes_per_step"], every["bytes_per_step"])
    question = "What happens when no_sync() is removed?"
    evidence = {
        "all_reduces": reduces,
        "step_bytes": moved,
        "speed_up_of_no_sync": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
    }
    if reduces[0] == reduces[1]:
        return Answer(question, f"Nothing: {reduces[1]} all-reduces per step with and without it.", evidence)
    text = f"{reduces[1]} all-reduces per step instead of {reduces[0]}, {size(moved[1])} instead of {size(moved[0])}. "
    text += f"With `no_sync()` a step is {times_as_fast(ratio)}. The result stays the same: without it the training is {same_training(every)}."
    if not (every["parity"] or {}).get("equal"):
        text = text.replace("The result stays the same: without", "Without")
    return Answer(question, text, evidence)


def mixed(lab: Lab) -> list[Block]:
    plain = lab[DDP]
    rows = [(cells.name("fp32"), *_precision_cells(lab, DDP))]
    rows += [(cells.name(name.removeprefix("DDP, ")), *_precision_cells(lab, name)) for name in (BF16, FP16)]
    columns = (
        "precision",
        "step time",
        "times as fast as fp32",
        "memory",
        "activations",
        "largest relative difference of the loss",
        "skipped steps",
    )
    blocks: list[Block] = [
        Table("Mixed precision", columns, tuple(rows), f"{memory_words(plain)} {_left_out(lab, BF16, FP16)}".strip())
    ]
    low = lab.given(BF16, FP16)
    if not low:
        return [*blocks, Answer("Is mixed precision faster?", f"It does not run here: {_left_out(lab, BF16, FP16)}", {"tried": 2})]
    speeds = {row["name"]: lab.ratio(DDP, row["name"]) for row in low}
    best = max(speeds, key=lambda name: speeds[name].value)
    told = [f"{row['precision']} is {times_as_fast(speeds[row['name']])}" for row in low]
    blocks.append(
        Answer(
            "Is mixed precision faster?",
            f"Against fp32, {listed(told)}. " + _hardware(lab, speeds),
            {"fp32_seconds": plain["step_seconds"]["median"], **{row["precision"]: speeds[row["name"]].value for row in low}},
            faster(speeds[best]),
        )
    )
    least = min(low, key=memory_of)
    blocks.append(
        Answer(
            "Does it save memory?",
            f"{least['precision']} holds {size(memory_of(least))}, {more_or_less(memory_of(plain), memory_of(least))} than fp32; its activations are "
            f"{size(activations(least))} against {size(activations(plain))}. Parameters, gradients and optimiser stay in fp32.",
            {
                "fp32_bytes": memory_of(plain),
                "low_bytes": memory_of(least),
                "activations_bytes": [activations(plain), activations(least)],
            },
            memory_of(least) < 0.995 * memory_of(plain),
        )
    )
    off = [f"{row['precision']} by at most {share(difference(plain, row))}" for row in low]
    blocks.append(
        Answer(
            "Is the result numerically the same?",
            f"The loss of a step differs from fp32's: {listed(off)}. Low precision rounds, so an exact result is not to be had.",
            {row["precision"]: difference(plain, row) for row in low},
            all((difference(plain, row) or 0) < 1e-6 for row in low),
        )
    )
    return blocks


def _precision_cells(lab: Lab, name: str) -> tuple[Cell, ...]:
    if name not in lab:
        return (cells.missing(lab.why_not(name)), *(cells.missing("see left") for _ in range(5)))
    row = lab[name]
    ratio = cells.ratio(lab.ratio(DDP, name)) if name != DDP else Cell("1", 1)
    off = difference(lab[DDP], row) or 0.0
    return (
        cells.step_time(row),
        ratio,
        cells.held_bytes(memory_of(row)),
        cells.held_bytes(activations(row)),
        cells.measured_share(off),
        cells.exact(row["skipped_steps"]),
    )


def difference(before: Row, after: Row) -> float | None:
    """The largest relative difference of a step's loss, over the steps that both have."""
    pairs = [(a, b) for a, b in zip(before["losses"], after["losses"], strict=False) if a and b is not None]
    return max((abs(a - b) / abs(a) for a, b in pairs), default=None)


def _left_out(lab: Lab, *names: str) -> str:
    return " ".join(f"{name}: {lab.why_not(name)}" for name in names if name not in lab)


def _hardware(lab: Lab, speeds: dict[str, Ratio]) -> str:
    slow = [name for name, ratio in speeds.items() if ratio.value < 0.5]
    machine = lab.comparison["machine"]
    where = machine["gpus"][0]["name"] if machine["gpus"] else machine["cpu"]
    if slow:
        return f"So low precision is only worth it where the hardware has it: {where} seems to have no fast arithmetic for {listed([lab[n]['precision'] for n in slow])}."
    return "Low precision moves fewer bytes and uses faster arithmetic where the hardware has it."


def scaler(lab: Lab) -> list[Block]:
    rows = []
    for name in (FAINT, FAINT_SCALED, FAINT_BARE, FAINT_BF16):
        if name not in lab:
            rows.append((cells.name(name), cells.missing(lab.why_not(name)), *(cells.missing("see left") for _ in range(4))))
            continue
        row, found = lab[name], lab[name]["metrics"]["gradients"]
        scale = cells.exact(found["scale"]) if found["scale"] else cells.name("none")
        rows.append(
            (
                cells.name(name),
                scale,
                cells.exact(found["total"]),
                cells.exact(found["zeros"]),
                cells.measured_share(zeros(row)),
                cells.exact(row["skipped_steps"]),
            )
        )
    columns = ("set-up", "loss scale", "gradients", "of them zero", "share", "skipped steps")
    table = Table(
        "Gradients of the first step",
        columns,
        tuple(rows),
        "The workload `mlp:faint` has a loss of a thousandth, so its gradients are small. Some are zero in any precision (ReLU).",
    )
    if FAINT_BARE not in lab or FAINT_SCALED not in lab:
        return [
            table,
            Answer(
                "What happens without GradScaler?",
                f"It could not be run: {_left_out(lab, FAINT_BARE, FAINT_SCALED)}",
                {"gradients": lab[FAINT]["metrics"]["gradients"]["total"]},
            ),
        ]
    base, scaled, bare = zeros(lab[FAINT]), zeros(lab[FAINT_SCALED]), zeros(lab[FAINT_BARE])
    under = bare > base + LOST
    helps = scaled < bare - LOST
    evidence = {"fp32_zero_share": base, "with_scaler_share": scaled, "without_scaler_share": bare}
    lost = int(lab[FAINT_BARE]["metrics"]["gradients"]["zeros"] - lab[FAINT]["metrics"]["gradients"]["zeros"])
    return [
        table,
        Answer(
            "Do gradients underflow without GradScaler?",
            f"{share(bare)} of the gradients are zero in fp16 without it, {share(base)} in fp32"
            + (
                f": {lost:,} became zero because fp16 has nothing between 0 and 6e-8."
                if under
                else ": fp16's range is enough for this loss."
            ),
            evidence | {"lost": lost},
            under,
        ),
        Answer(
            "What does GradScaler do?",
            f"It multiplies the loss by {_scale(lab)} before the backward pass, and divides the gradients before the optimiser's step: "
            f"{share(scaled)} are zero with it, {share(bare)} without. "
            + ("It saves them." if helps else "Here it changes nothing that can be seen."),
            evidence,
            None,
        ),
        Answer(
            "Does bf16 need it?",
            f"bf16 has fp32's range: {share(zeros(lab[FAINT_BF16]))} of the gradients are zero without any scaling, {share(base)} in fp32."
            if FAINT_BF16 in lab
            else f"Not measured; bf16 does not run here: {lab.why_not(FAINT_BF16)} (fp32: {share(base)} zero).",
            {"bf16_zero_share": zeros(lab[FAINT_BF16]) if FAINT_BF16 in lab else None, "fp32_zero_share": base},
            zeros(lab[FAINT_BF16]) > base + LOST if FAINT_BF16 in lab else None,
        ),
    ]


def zeros(row: Row) -> float:
    found = row["metrics"]["gradients"]
    return float(found["zeros"]) / float(found["total"])


def _scale(lab: Lab) -> str:
    scale = lab[FAINT_SCALED]["metrics"]["gradients"]["scale"]
    return f"{scale:,.0f}" if scale else "its scale"


def effects(lab: Lab) -> list[Block]:
    amp = next((name for name in (BF16, FP16) if name in lab), None)
    both = next((name for name in (BOTH, BOTH_FP16) if name in lab), None)
    names = [ACCUMULATE, amp, both]
    heads = ("accumulation", "mixed precision" + (f" ({lab[amp]['precision']})" if amp else ""), "both")
    goals = ("a large batch in small passes", "faster arithmetic, fewer bytes", "both")
    why = lab.why_not(BF16)
    lines = [(cells.name("goal"), *map(cells.name, goals))]

    def line(title: str, of: Callable[[str], Cell]) -> None:
        lines.append((cells.name(title), *(of(name) if name else cells.missing(why) for name in names)))

    line("memory", lambda name: cells.held_bytes(memory_of(lab[name])))
    line("effect on memory", lambda name: cells.name(more_or_less(memory_of(lab[DDP]), memory_of(lab[name]))))
    line("step time", lambda name: cells.step_time(lab[name]))
    line("effect on speed (times as fast)", lambda name: cells.ratio(lab.ratio(DDP, name)))
    line("all-reduces per step", lambda name: cells.exact(lab[name]["all_reduces_per_step"]))
    line("data all-reduced per step and rank", lambda name: cells.held_bytes(lab[name]["bytes_per_step"]))
    line(
        "all-reduces per backward pass",
        lambda name: cells.exact(lab[name]["all_reduces_per_step"] / lab[name]["observed"]["passes"]["backward"]),
    )
    known = [name for name in names if name]
    note = (
        f"Against DDP in fp32: {seconds(lab[DDP]['step_seconds']['median'])}, {size(memory_of(lab[DDP]))}. {memory_words(lab[DDP])}"
    )
    bars = tuple(
        Bar(
            name,
            lab.ratio(DDP, name).value,
            lab.ratio(DDP, name).low,
            lab.ratio(DDP, name).high,
            times_as_fast(lab.ratio(DDP, name)),
        )
        for name in known
    )
    blocks: list[Block] = [
        Table("Accumulation against mixed precision", ("", *heads), tuple(lines), note),
        Bars("Speed against DDP in fp32", bars, "times", 1.0, "Error bars: 95 % interval over the rounds."),
    ]
    if amp is None:
        return [
            *blocks,
            Answer(
                "Which saves more memory?",
                f"Only accumulation could be measured ({size(memory_of(lab[ACCUMULATE]))}): {why}",
                {"accumulated_bytes": memory_of(lab[ACCUMULATE])},
            ),
        ]
    return [*blocks, saves_more(lab, amp), gains_more(lab, amp), combined(lab, amp, both)]


def saves_more(lab: Lab, amp: str) -> Answer:
    base, four, low = (memory_of(lab[name]) for name in (DDP, ACCUMULATE, amp))
    saved = {"accumulation": base - four, "mixed precision": base - low}
    best = max(saved, key=lambda name: saved[name])
    text = f"Of {size(base)}, accumulation leaves {size(four)} ({more_or_less(base, four)}), {lab[amp]['precision']} leaves {size(low)} ({more_or_less(base, low)}): "
    if abs(four - low) < 0.005 * base:
        text += "there is no difference worth the name."
    else:
        text += f"{best} {'saves more' if saved[best] > 0 else 'costs less'}."
    return Answer("Which saves more memory?", text, {"fp32_bytes": base, "accumulated_bytes": four, "low_precision_bytes": low})


def gains_more(lab: Lab, amp: str) -> Answer:
    four, low, against = lab.ratio(DDP, ACCUMULATE), lab.ratio(DDP, amp), lab.ratio(ACCUMULATE, amp)
    winner = {"faster": "mixed precision gains more", "slower": "accumulation gains more"}.get(
        against.verdict, "neither is measurably ahead"
    )
    if winner.endswith("more") and max(four.value, low.value) <= 1:
        winner = winner.replace("gains more", "loses less")
    text = f"At the same batch, accumulation is {times_as_fast(four)}, {lab[amp]['precision']} {times_as_fast(low)}: {winner}."
    return Answer(
        "Which gains more speed?",
        text,
        {"accumulation": four.value, "mixed_precision": low.value, "one_against_the_other": against.value},
    )


def combined(lab: Lab, amp: str, both: str | None) -> Answer:
    question = "Can both be combined?"
    if both is None:
        return Answer(question, f"It could not be run here: {lab.why_not(BOTH)}", {"tried": 1}, None)
    row, ratio = lab[both], lab.ratio(DDP, both)
    text = f"Together they are {times_as_fast(ratio)} with {size(memory_of(row))} ({more_or_less(memory_of(lab[DDP]), memory_of(row))}); alone they are "
    text += f"{factor(lab.ratio(DDP, ACCUMULATE).value)} and {factor(lab.ratio(DDP, amp).value)} times as fast with {size(memory_of(lab[ACCUMULATE]))} and {size(memory_of(lab[amp]))}."
    return Answer(question, text, {"speed_up": ratio.value, "peak_bytes": memory_of(row)}, True)


def debugging(lab: Lab) -> list[Block]:
    row, machine = lab[DDP], lab.comparison["machine"]
    metrics, step = row["metrics"], row["step_seconds"]["median"]
    late, threads = metrics["straggler"], row["observed"]["threads_per_device"] * row["devices"]
    on_cpu = row["peak_bytes"][0]["how"] == "counted"
    wait = metrics["data_wait_seconds"] or 0.0
    proof = row["parity"] or {}
    bad = sum(loss is None for loss in row["losses"])
    checks: list[tuple[str, str, Cell, bool]] = [
        ("hangs", "a rank that never ends", cells.name(row["observed"]["status"]), row["observed"]["status"] != "completed"),
        (
            "wrong result",
            "parameters differ from one device's",
            _digits(proof.get("max_difference")),
            not proof.get("equal", False),
        ),
        ("broken numbers", "losses that are not finite", cells.exact(bad), bad > 0),
        ("one slow rank", "the others wait for it", cells.measured_share(late["share_of_step"] if late else 0.0), late is not None),
        ("slow data", "the device waits between steps", cells.measured_share(wait / step), wait > RULE * step),
        (
            "slow network",
            f"communication above {share(RULE)} of a step",
            cells.measured_share(metrics["communication_share"]),
            metrics["keeps_rule"] is False,
        ),
        (
            "too many threads",
            f"more threads than {plural(machine['cores'], 'core')}",
            cells.exact(threads),
            on_cpu and threads > machine["cores"],
        ),
    ]
    table = Table(
        "Common problems, looked for in the DDP run",
        ("problem", "what it looks like", "measured", "seen here"),
        tuple((cells.name(name), cells.name(look), found, cells.yes_no(seen)) for name, look, found, seen in checks),
        remarks_of([row]),
    )
    slow = [(name, found) for name, _, found, seen in checks[3:] if seen]
    told = listed([f"{name} ({found.text})" for name, found in slow])
    return [
        table,
        Answer(
            "Is the run slow for one of the known reasons?",
            f"{told[:1].upper() + told[1:]}, in a step of {seconds(step)}."
            if slow
            else f"None of the four was seen in a step of {seconds(step)}.",
            {
                "step_seconds": step,
                "communication_share": metrics["communication_share"],
                "data_wait_share": wait / step,
                "straggler": late,
                "threads": threads,
            },
            bool(slow),
        ),
        Answer(
            "Is the result right?",
            f"The training is {same_training(row)}; {bad} of {len(row['losses'])} losses are not finite.",
            {"max_difference": proof.get("max_difference"), "not_finite": bad, "losses": len(row["losses"])},
            bool(proof.get("equal")) and not bad,
        ),
        Answer(
            "Did anything hang?",
            f"{plural(len(row['ranks']), 'rank')} ended: {row['observed']['status']} after {plural(row['observed']['steps'], 'step')} each.",
            {"ranks": len(row["ranks"]), "steps": row["observed"]["steps"], "status": row["observed"]["status"]},
            row["observed"]["status"] != "completed",
        ),
    ]


def _digits(value: float | None) -> Cell:
    return cells.missing("") if value is None else Cell(f"{value:.1e}", value, 0.0, max(value, 1e-10))


PARTS = (
    LabPart(
        "gradient accumulation",
        "Cut each rank's share into 4 backward passes (`practical7_accumulation.py`), with and without `no_sync()`.",
        (DDP, ACCUMULATE, SYNC),
        accumulation,
    ),
    LabPart(
        "mixed precision",
        "Train under autocast in every low precision that this machine has (`practical7_amp.py`).",
        (DDP,),
        mixed,
        likes=(BF16, FP16),
    ),
    LabPart(
        "GradScaler",
        "Train with a very small loss, in fp16 with and without GradScaler, and count gradients that are zero.",
        (FAINT,),
        scaler,
        likes=(FAINT_SCALED, FAINT_BARE, FAINT_BF16),
    ),
    LabPart(
        "accumulation against mixed precision",
        "Measure each alone and both together, at the same global batch.",
        (DDP, ACCUMULATE),
        effects,
        likes=(BF16, FP16, BOTH, BOTH_FP16),
    ),
    LabPart("debugging", "Look for the common problems of DDP in the recorded run.", (DDP,), debugging),
)
