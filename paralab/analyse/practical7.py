"""Practical 7, DDP optimisation and debugging: accumulation, mixed precision, known problems; from what was measured."""

from __future__ import annotations

from collections.abc import Callable

from paralab.analyse import cells
from paralab.analyse.blocks import Answer, Bar, Bars, Block, Cell, Table
from paralab.analyse.lab import Lab, LabPart, Row, drawn_split, memory_of, memory_words, remarks_of, same_training
from paralab.analyse.metrics import RULE
from paralab.analyse.uncertainty import Ratio
from paralab.analyse.wording import (
    SAME_SIZE,
    capital,
    factor,
    faster,
    interval,
    listed,
    more_or_less,
    often,
    share,
    speed,
    split_words,
)
from paralab.units import plural, seconds, size

DDP, ACCUMULATE, SYNC = "DDP", "accumulate 4", "accumulate 4 without no_sync()"
BF16, FP16 = "bf16", "fp16 with GradScaler"
BOTH, BOTH_FP16 = "accumulate 4 and bf16", "accumulate 4 and fp16"
FAINT, FAINT_BF16 = "small loss, fp32", "small loss, bf16"
FAINT_SCALED, FAINT_BARE = "small loss, fp16 with GradScaler", "small loss, fp16 without GradScaler"
LOST = 0.01  # a hundredth more of the gradients being zero is called underflow
SAME_LOSS = 1e-6
SLOW = 0.5  # half the speed: the hardware has no arithmetic for it


def kept(row: Row) -> int | None:
    """Bytes that autograd keeps for the backward pass; None where only the allocator's peak is known."""
    return max((int(entry["activations"]) for entry in row["peak_bytes"] if entry.get("activations")), default=None)


def samples_per_pass(row: Row) -> int:
    return int(row["splits"][0]["shape"][0])


def saves(before: Row, after: Row) -> bool:
    return memory_of(after) < (1 - SAME_SIZE) * memory_of(before)


def accumulation(lab: Lab) -> list[Block]:
    plain, four, every = lab[DDP], lab[ACCUMULATE], lab[SYNC]
    lines = [
        (
            cells.name(row["name"]),
            cells.exact(row["observed"]["passes"]["backward"]),
            cells.exact(samples_per_pass(row)),
            cells.exact(row["all_reduces_per_step"]),
            cells.held_bytes(row["bytes_per_step"]),
            cells.exact(row["observed"]["optimizer_steps"]),
            cells.step_time(row),
            cells.held_bytes(memory_of(row)),
        )
        for row in (plain, four, every)
    ]
    columns = ("set-up", "passes", "samples per pass", "all-reduces", "data", "optimiser steps", "step time", "memory")
    note = (
        f"Per rank and optimiser step, in which all three train on the same {plain['batch']['size']} samples. {memory_words(plain)}"
    )
    passes = four["observed"]["passes"]["backward"]
    by_pass = [(cells.name(row["name"]), *map(cells.exact, row["observed"]["all_reduces_by_pass"])) for row in (four, every)]
    heads = ("set-up", *(f"pass {number + 1}" for number in range(passes)))
    return [
        Table("Accumulation", columns, tuple(lines), note),
        Table("All-reduces that begin in each backward pass", heads, tuple(by_pass), "One step of rank 0."),
        *drawn_split(four),
        synchronised(four, every),
        Answer(
            "How often does the optimiser step?",
            f"{capital(often(four['observed']['optimizer_steps']))} for {plural(passes, 'backward pass')}: until then "
            "gradients are added up.",
            {"backward_passes": passes, "optimizer_steps": four["observed"]["optimizer_steps"]},
        ),
        divide(four, passes),
        no_sync(lab, four, every),
        less_memory(plain, four),
    ]


def synchronised(four: Row, every: Row) -> Answer:
    counts, others = four["observed"]["all_reduces_by_pass"], every["observed"]["all_reduces_by_pass"]
    quiet = sum(count == 0 for count in counts)
    text = f"With `no_sync()`, {quiet} of {len(counts)} backward passes have no all-reduce ({split_words(counts)}); "
    text += f"without it the counts are {split_words(others)}."
    return Answer("Are the gradients synchronised in every backward pass?", text, {"with": counts, "without": others}, quiet == 0)


def divide(row: Row, passes: int) -> Answer:
    proof = row["parity"] or {}
    text = f"Each of the {passes} passes gives the mean over its own samples. Their sum would be {passes} times the mean "
    text += "over the batch, "
    text += f"so each is divided by {passes}. Divided like this, the training is {same_training(row)}."
    evidence = {"passes": passes, "max_difference": proof.get("max_difference"), "equal": proof.get("equal")}
    return Answer("Why is the loss divided by ACCUM_STEPS?", text, evidence)


def no_sync(lab: Lab, four: Row, every: Row) -> Answer:
    ratio = lab.ratio(SYNC, ACCUMULATE)
    reduces = [int(row["all_reduces_per_step"]) for row in (four, every)]
    moved = [row["bytes_per_step"] for row in (four, every)]
    if reduces[0] == reduces[1]:
        text = f"Nothing changes: {plural(reduces[1], 'all-reduce')} per step with and without it."
    else:
        text = (
            f"{plural(reduces[1], 'all-reduce')} per step instead of {reduces[0]}, {size(moved[1])} instead of {size(moved[0])}. "
        )
        text += f"{speed('With `no_sync()` a step', ratio)}. "
        equal = (every["parity"] or {}).get("equal")
        text += (
            "The result stays the same: without it, too, " if equal else "Without it "
        ) + f"the training is {same_training(every)}."
    evidence = {
        "all_reduces": reduces,
        "step_bytes": moved,
        "speed_up_of_no_sync": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
    }
    return Answer("What happens when no_sync() is removed?", text, evidence)


def less_memory(plain: Row, four: Row) -> Answer:
    text = f"{size(memory_of(four))} instead of {size(memory_of(plain))} ({more_or_less(memory_of(plain), memory_of(four))})"
    if kept(four) and kept(plain):
        text += f": a pass keeps {size(kept(four))} for {plural(samples_per_pass(four), 'sample')}, "
        text += f"not {size(kept(plain))} for {samples_per_pass(plain)}"
    held = [memory_of(plain), memory_of(four)]
    return Answer(
        "Does accumulation save memory?", text + ".", {"bytes": held, "kept_bytes": [kept(plain), kept(four)]}, saves(plain, four)
    )


def mixed(lab: Lab) -> list[Block]:
    plain, low = lab[DDP], lab.given(BF16, FP16)
    lines = [(cells.name("fp32" if name == DDP else name), *_precision_cells(lab, name)) for name in (DDP, BF16, FP16)]
    columns = ("precision", "step time", "times as fast", "memory", "kept for backward", "loss differs by", "skipped steps")
    table = Table("Mixed precision", columns, tuple(lines), memory_words(plain))
    if not low:
        return [table, Answer("Is mixed precision faster?", _left_out(lab, BF16, FP16), {"precisions_tried": 2, "that_run": 0})]
    return [table, amp_speed(lab, low), amp_memory(plain, low), amp_result(plain, low)]


def _precision_cells(lab: Lab, name: str) -> tuple[Cell, ...]:
    if name not in lab:
        return (cells.missing(lab.why_not(name)), *(cells.missing("see left") for _ in range(5)))
    row = lab[name]
    return (
        cells.step_time(row),
        cells.ratio(lab.ratio(DDP, name)) if name != DDP else cells.exact(1),
        cells.held_bytes(memory_of(row)),
        cells.held_bytes(kept(row), "only the allocator's peak is known"),
        cells.measured_share(difference(lab[DDP], row)),
        cells.exact(row["skipped_steps"]),
    )


def difference(before: Row, after: Row) -> float:
    """The largest relative difference of a step's loss, over the steps that both have."""
    pairs = [(a, b) for a, b in zip(before["losses"], after["losses"], strict=False) if a and b is not None]
    return max((abs(a - b) / abs(a) for a, b in pairs), default=0.0)


def _left_out(lab: Lab, *names: str) -> str:
    return "It could not be run here. " + " ".join(f"{name}: {lab.why_not(name)}" for name in names if name not in lab)


def amp_speed(lab: Lab, low: list[Row]) -> Answer:
    speeds: dict[str, Ratio] = {row["precision"]: lab.ratio(DDP, row["name"]) for row in low}
    text = "Against fp32, " + listed([speed(precision, ratio) for precision, ratio in speeds.items()]) + "."
    slow = [precision for precision, ratio in speeds.items() if ratio.value < SLOW]
    if slow:
        machine = lab.comparison["machine"]
        where = machine["gpus"][0]["name"] if low[0]["peak_bytes"][0]["how"] == "allocator" else machine["cpu"]
        text += f" {where} seems to have no fast arithmetic for {listed(slow)}."
    best = max(speeds.values(), key=lambda ratio: ratio.value)
    evidence = {precision: {"speed_up": ratio.value, "low": ratio.low, "high": ratio.high} for precision, ratio in speeds.items()}
    return Answer("Is mixed precision faster?", text, evidence, faster(best))


def amp_memory(plain: Row, low: list[Row]) -> Answer:
    least = min(low, key=memory_of)
    before, after = memory_of(plain), memory_of(least)
    text = (
        f"{least['precision']} takes {size(after)}, fp32 {size(before)} ({more_or_less(before, after)}). Parameters, gradients and "
    )
    text += "optimiser stay in fp32"
    now, then, weights = kept(least), kept(plain), plain["peak_bytes"][0].get("parameters")
    if now and then and now > then and weights:
        text += f"; for the backward pass {size(now)} are kept instead of {size(then)}, because autocast also keeps "
        text += "half-size copies of the "
        text += f"weights (of {size(weights)})"
    elif now and then:
        text += f"; for the backward pass {size(now)} are kept instead of {size(then)}"
    return Answer("Does it save memory?", text + ".", {"bytes": [before, after], "kept_bytes": [then, now]}, saves(plain, least))


def amp_result(plain: Row, low: list[Row]) -> Answer:
    off = {row["precision"]: difference(plain, row) for row in low}
    text = (
        f"The loss of a step differs from fp32's by at most {listed([f'{share(value)} ({name})' for name, value in off.items()])}, "
    )
    text += f"in {min(len(row['losses']) for row in low)} to {len(plain['losses'])} steps."
    return Answer(
        "Is the result numerically the same?", text, {"largest_share": off}, all(value < SAME_LOSS for value in off.values())
    )


def scaler(lab: Lab) -> list[Block]:
    lines = []
    for name in (FAINT, FAINT_SCALED, FAINT_BARE, FAINT_BF16):
        if name not in lab:
            lines.append((cells.name(name), cells.missing(lab.why_not(name)), *(cells.missing("see left") for _ in range(4))))
            continue
        found = lab[name]["metrics"]["gradients"]
        scale = cells.exact(found["scale"]) if found["scale"] else cells.name("none")
        counts = (cells.exact(found["total"]), cells.exact(found["zeros"]), cells.measured_share(zeros(lab[name])))
        lines.append((cells.name(name), scale, *counts, cells.exact(lab[name]["skipped_steps"])))
    note = "The workload `mlp:faint` has a thousandth of the usual loss, so its gradients are small. Some are zero anyway (ReLU)."
    columns = ("set-up", "loss scale", "gradients", "of them zero", "share", "skipped steps")
    table = Table("Gradients of the first step", columns, tuple(lines), note)
    base = zeros(lab[FAINT])
    if FAINT_BARE not in lab or FAINT_SCALED not in lab:
        why = f"{_left_out(lab, FAINT_BARE, FAINT_SCALED)} (In fp32, {share(base)} are zero.)"
        return [table, Answer("Do gradients underflow without GradScaler?", why, {"fp32_zero_share": base})]
    return [table, underflow(lab, base), what_scaling_does(lab), *_bf16_needs(lab, base)]


def zeros(row: Row) -> float:
    found = row["metrics"]["gradients"]
    return float(found["zeros"]) / float(found["total"])


def underflow(lab: Lab, base: float) -> Answer:
    bare = lab[FAINT_BARE]
    lost = int(bare["metrics"]["gradients"]["zeros"] - lab[FAINT]["metrics"]["gradients"]["zeros"])
    yes = zeros(bare) > base + LOST
    text = f"Without it, {share(zeros(bare))} of the gradients are zero in fp16, in fp32 {share(base)}"
    text += (
        f": {lost:,} more became zero, because fp16 has no number between 0 and 6e-8."
        if yes
        else ": fp16's range is enough for this loss."
    )
    return Answer(
        "Do gradients underflow without GradScaler?", text, {"without_share": zeros(bare), "fp32_share": base, "lost": lost}, yes
    )


def what_scaling_does(lab: Lab) -> Answer:
    scaled, bare = zeros(lab[FAINT_SCALED]), zeros(lab[FAINT_BARE])
    scale, skipped = lab[FAINT_SCALED]["metrics"]["gradients"]["scale"], lab[FAINT_SCALED]["skipped_steps"]
    helps = scaled < bare - LOST
    text = f"It multiplies the loss by {scale:,.0f} before the backward pass and divides the gradients again before the "
    text += "optimiser's step: "
    text += f"{share(scaled)} are zero with it, {share(bare)} without." + (
        " It saves them." if helps else " Here it changes nothing."
    )
    text += f" {plural(skipped, 'step')} had to be skipped, because the scale was too large." if skipped else ""
    evidence = {"scale": scale, "with_share": scaled, "without_share": bare, "skipped_steps": skipped}
    return Answer("What does GradScaler do?", text, evidence)


def _bf16_needs(lab: Lab, base: float) -> list[Answer]:
    if FAINT_BF16 not in lab:
        return []
    bf16 = zeros(lab[FAINT_BF16])
    text = f"bf16 has the range of fp32: without any scaling {share(bf16)} of the gradients are zero, in fp32 {share(base)}."
    return [Answer("Does bf16 need it?", text, {"bf16_share": bf16, "fp32_share": base}, bf16 > base + LOST)]


def effects(lab: Lab) -> list[Block]:
    amp = next((name for name in (BF16, FP16) if name in lab), None)
    both = next((name for name in (BOTH, BOTH_FP16) if name in lab), None)
    names = [ACCUMULATE, amp, both]
    goals = ("a large batch in small passes", "faster arithmetic, fewer bytes", "both")
    lines = [(cells.name("goal"), *map(cells.name, goals))]

    def line(title: str, of: Callable[[str], Cell]) -> None:
        lines.append((cells.name(title), *(of(name) if name else cells.missing(lab.why_not(BF16)) for name in names)))

    line("memory", lambda name: cells.held_bytes(memory_of(lab[name])))
    line("effect on memory", lambda name: cells.name(more_or_less(memory_of(lab[DDP]), memory_of(lab[name]))))
    line("step time", lambda name: cells.step_time(lab[name]))
    line("effect on speed (times as fast)", lambda name: cells.ratio(lab.ratio(DDP, name)))
    line("all-reduces per step", lambda name: cells.exact(lab[name]["all_reduces_per_step"]))
    line("data all-reduced per step and rank", lambda name: cells.held_bytes(lab[name]["bytes_per_step"]))
    line("data all-reduced per backward pass", lambda name: cells.held_bytes(_per_pass(lab[name])))
    note = f"Against DDP in fp32: {seconds(lab[DDP]['step_seconds']['median'])}, {size(memory_of(lab[DDP]))}, "
    note += f"{plural(int(lab[DDP]['all_reduces_per_step']), 'all-reduce')} of {size(lab[DDP]['bytes_per_step'])}. "
    note += f"{memory_words(lab[DDP])}"
    heads = ("", "accumulation", "mixed precision" + (f" ({lab[amp]['precision']})" if amp else ""), "both")
    blocks: list[Block] = [
        Table("Accumulation against mixed precision", heads, tuple(lines), note),
        Bars("Speed against DDP in fp32", tuple(_bar(lab, name) for name in names if name), "times", 1.0),
    ]
    if amp is None:
        return [*blocks, Answer("Which saves more memory?", _left_out(lab, BF16, FP16), {"precisions_that_run": 0})]
    return [*blocks, saves_more(lab, amp), gains_more(lab, amp), combined(lab, amp, both)]


def _per_pass(row: Row) -> float:
    return float(row["bytes_per_step"] / row["observed"]["passes"]["backward"])


def _bar(lab: Lab, name: str) -> Bar:
    ratio = lab.ratio(DDP, name)
    return Bar(name, ratio.value, ratio.low, ratio.high, f"{factor(ratio.value)} {interval(ratio)}")


def saves_more(lab: Lab, amp: str) -> Answer:
    base, four, low = (memory_of(lab[name]) for name in (DDP, ACCUMULATE, amp))
    text = (
        f"Of {size(base)}, accumulation leaves {size(four)} ({more_or_less(base, four)}) and {lab[amp]['precision']} {size(low)} "
    )
    text += f"({more_or_less(base, low)}): "
    if abs(four - low) < SAME_SIZE * base:
        text += "there is no difference."
    else:
        best, least = ("accumulation", four) if four < low else ("mixed precision", low)
        text += f"{best} {'saves more' if least < base else 'costs less'}."
    return Answer("Which saves more memory?", text, {"fp32_bytes": base, "accumulation_bytes": four, "mixed_precision_bytes": low})


def gains_more(lab: Lab, amp: str) -> Answer:
    four, low, against = lab.ratio(DDP, ACCUMULATE), lab.ratio(DDP, amp), lab.ratio(ACCUMULATE, amp)
    best = {"faster": "mixed precision", "slower": "accumulation"}.get(against.verdict)
    end = (
        "neither is measurably ahead" if not best else f"{best} {'gains more' if max(four.value, low.value) > 1 else 'loses less'}"
    )
    text = f"At the same batch, {speed('accumulation', four)} and {speed(lab[amp]['precision'], low)}: {end}."
    return Answer(
        "Which gains more speed?",
        text,
        {"accumulation": four.value, "mixed_precision": low.value, "one_against_the_other": against.value},
    )


def combined(lab: Lab, amp: str, both: str | None) -> Answer:
    question = "Can both be combined?"
    if both is None:
        return Answer(question, _left_out(lab, BOTH), {"combinations_that_run": 0})
    ratio = lab.ratio(DDP, both)
    text = f"{speed('Both together', ratio).replace('together is', 'together are')}, with {size(memory_of(lab[both]))}. "
    text += "Alone, accumulation is "
    text += f"{factor(lab.ratio(DDP, ACCUMULATE).value)} times as fast with {size(memory_of(lab[ACCUMULATE]))}, "
    text += f"{lab[amp]['precision']} "
    text += f"{factor(lab.ratio(DDP, amp).value)} times with {size(memory_of(lab[amp]))}."
    return Answer(question, text, {"speed_up": ratio.value, "peak_bytes": memory_of(lab[both])}, True)


def debugging(lab: Lab) -> list[Block]:
    row = lab[DDP]
    checks = problems(row, lab.comparison["machine"]["cores"])
    lines = [(cells.name(name), cells.name(look), found, cells.yes_no(seen)) for name, look, found, seen in checks]
    step, proof, bad = row["step_seconds"]["median"], row["parity"] or {}, sum(loss is None for loss in row["losses"])
    slow = [f"{name} ({found.text})" for name, _, found, seen in checks[3:] if seen]
    text = (
        f"{capital(listed(slow))}, in a step of {seconds(step)}."
        if slow
        else f"None of the four was seen in steps of {seconds(step)}."
    )
    status, ended = row["observed"]["status"], row["observed"]["steps"]
    return [
        Table(
            "Common problems, looked for in the DDP run",
            ("problem", "what it looks like", "measured", "seen here"),
            tuple(lines),
            remarks_of([row]),
        ),
        Answer(
            "Is the run slow for one of the known reasons?",
            text,
            {"step_seconds": step} | {name: found.value for name, _, found, _ in checks[3:]},
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
            f"The {plural(len(row['ranks']), 'rank')} ended as '{status}', after {plural(ended, 'step')} each.",
            {"ranks": len(row["ranks"]), "steps": ended, "status": status},
            status != "completed",
        ),
    ]


def problems(row: Row, cores: int) -> list[tuple[str, str, Cell, bool]]:
    """(problem, how it shows, what was measured, is it there); the first three are about the result, the rest about speed."""
    metrics, seen, proof = row["metrics"], row["observed"], row["parity"] or {}
    step, wait, late = row["step_seconds"]["median"], metrics["data_wait_seconds"] or 0.0, metrics["straggler"]
    threads = seen["threads_per_device"] * row["devices"]
    on_cpu = row["peak_bytes"][0]["how"] == "counted"
    bad = sum(loss is None for loss in row["losses"])
    off = proof.get("max_difference")
    differs = cells.missing("not proved") if off is None else Cell(f"{off:.1e}", off, 0.0, max(off, 1e-10))
    return [
        ("hang", "a rank does not end", cells.name(seen["status"]), seen["status"] != "completed"),
        ("wrong result", "parameters differ from one device's", differs, not proof.get("equal", False)),
        ("broken numbers", "losses that are not finite", cells.exact(bad), bad > 0),
        ("slow rank", "the others wait for one rank", cells.measured_share(late["share_of_step"] if late else 0.0), bool(late)),
        ("slow data", "the device waits between steps", cells.measured_share(wait / step), wait > RULE * step),
        (
            "slow communication",
            f"more than {share(RULE)} of a step",
            cells.measured_share(metrics["communication_share"]),
            metrics["keeps_rule"] is False,
        ),
        ("too many threads", f"more than {plural(cores, 'core')}", cells.exact(threads), on_cpu and threads > cores),
    ]


PARTS = (
    LabPart(
        "gradient accumulation",
        "4 backward passes per optimiser step (`practical7_accumulation.py`), with and without `no_sync()`.",
        (DDP, ACCUMULATE, SYNC),
        accumulation,
    ),
    LabPart(
        "mixed precision",
        "Train under autocast in every low precision that runs here (`practical7_amp.py`).",
        (DDP,),
        mixed,
        likes=(BF16, FP16),
    ),
    LabPart(
        "GradScaler",
        "Train with a very small loss in fp16, with and without GradScaler, and count the gradients that are zero.",
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
