"""Practical 7, DDP optimisation and debugging: accumulation, mixed precision, known problems; from
what was measured."""

from __future__ import annotations

from collections.abc import Callable

from paralab.analyse import table_cells as cells
from paralab.analyse.blocks import Answer, Bar, Bars, Block, Cell, Table
from paralab.analyse.metrics import RULE
from paralab.analyse.phrases import (
    SAME_SIZE,
    capital,
    factor,
    interval,
    listed,
    more_or_less,
    often,
    share,
    speed,
    split_words,
)
from paralab.analyse.verdict import is_same_training
from paralab.course.configurations import (
    ACCUMULATE,
    BF16,
    BOTH,
    BOTH_FP16,
    DDP,
    FAINT,
    FAINT_BARE,
    FAINT_BF16,
    FAINT_SCALED,
    FP16,
    SYNC,
)
from paralab.course.low_precision import kept, left_out, mixed, saves, scaler
from paralab.course.measurements import (
    LabPart,
    Measurements,
    Row,
    drawn_split,
    is_equal,
    max_difference,
    memory_of,
    memory_words,
    remarks_of,
    same_training,
)
from paralab.units import plural, seconds, size


def samples_per_pass(row: Row) -> int:
    return int(row.splits[0].shape[0])


def accumulation(lab: Measurements) -> list[Block]:
    plain, four, every = lab[DDP], lab[ACCUMULATE], lab[SYNC]
    lines = [
        (
            cells.name(row.name),
            cells.exact(row.observed.passes.backward),
            cells.exact(samples_per_pass(row)),
            cells.exact(row.all_reduces_per_step),
            cells.held_bytes(row.bytes_per_step),
            cells.exact(row.observed.optimizer_steps),
            cells.step_time(row),
            cells.held_bytes(memory_of(row)),
        )
        for row in (plain, four, every)
    ]
    columns = (
        "set-up",
        "passes",
        "samples per pass",
        "all-reduces",
        "data",
        "optimizer steps",
        "step time",
        "memory",
    )
    note = f"Per rank and optimizer step, in which all three train on the same {plain.batch.size} samples. {memory_words(plain)}"
    passes = four.observed.passes.backward
    by_pass = [
        (cells.name(row.name), *map(cells.exact, row.observed.all_reduces_by_pass))
        for row in (four, every)
    ]
    heads = ("set-up", *(f"pass {number + 1}" for number in range(passes)))
    return [
        Table("Accumulation", columns, tuple(lines), note),
        Table(
            "All-reduces that begin in each backward pass",
            heads,
            tuple(by_pass),
            "One step of rank 0.",
        ),
        *drawn_split(four),
        synchronized(four, every),
        Answer(
            "How often does the optimizer step?",
            f"{capital(often(four.observed.optimizer_steps))} for {plural(passes, 'backward pass')}: until then "
            "gradients are added up.",
            {"backward_passes": passes, "optimizer_steps": four.observed.optimizer_steps},
        ),
        divide(four, passes),
        no_sync(lab, four, every),
        less_memory(plain, four),
    ]


def synchronized(four: Row, every: Row) -> Answer:
    counts, others = (
        four.observed.all_reduces_by_pass,
        every.observed.all_reduces_by_pass,
    )
    quiet = sum(count == 0 for count in counts)
    text = f"With `no_sync()`, {quiet} of {len(counts)} backward passes have no all-reduce ({split_words(counts)}); "
    text += f"without it the counts are {split_words(others)}."
    return Answer(
        "Are the gradients synchronized in every backward pass?",
        text,
        {"with": counts, "without": others},
        quiet == 0,
    )


def divide(row: Row, passes: int) -> Answer:
    text = f"Each of the {passes} passes gives the mean over its own samples. Their sum would be {passes} times the mean "
    text += "over the batch, "
    text += (
        f"so each is divided by {passes}. Divided like this, the training is {same_training(row)}."
    )
    evidence = {
        "passes": passes,
        "max_difference": max_difference(row),
        "equal": is_equal(row),
    }
    return Answer("Why is the loss divided by ACCUM_STEPS?", text, evidence)


def no_sync(lab: Measurements, four: Row, every: Row) -> Answer:
    ratio = lab.ratio(SYNC, ACCUMULATE)
    reduces = [int(row.all_reduces_per_step) for row in (four, every)]
    moved = [row.bytes_per_step for row in (four, every)]
    if reduces[0] == reduces[1]:
        text = f"Nothing changes: {plural(reduces[1], 'all-reduce')} per step with and without it."
    else:
        text = f"{plural(reduces[1], 'all-reduce')} per step instead of {reduces[0]}, {size(moved[1])} instead of {size(moved[0])}. "
        text += f"{speed('With `no_sync()` a step', ratio)}. "
        equal = is_equal(every)
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
        text += (
            f": a pass keeps {size(kept(four))} for {plural(samples_per_pass(four), 'sample')}, "
        )
        text += f"not {size(kept(plain))} for {samples_per_pass(plain)}"
    held = [memory_of(plain), memory_of(four)]
    return Answer(
        "Does accumulation save memory?",
        text + ".",
        {"bytes": held, "kept_bytes": [kept(plain), kept(four)]},
        saves(plain, four),
    )


def effects(lab: Measurements) -> list[Block]:
    amp = next((name for name in (BF16, FP16) if name in lab), None)
    both = next((name for name in (BOTH, BOTH_FP16) if name in lab), None)
    names = [ACCUMULATE, amp, both]
    goals = ("a large batch in small passes", "faster arithmetic, fewer bytes", "both")
    lines = [(cells.name("goal"), *map(cells.words, goals))]

    def line(title: str, of: Callable[[str], Cell]) -> None:
        lines.append(
            (
                cells.name(title),
                *(of(name) if name else cells.missing(lab.why_not(BF16)) for name in names),
            )
        )

    line("memory", lambda name: cells.held_bytes(memory_of(lab[name])))
    line(
        "effect on memory",
        lambda name: cells.words(more_or_less(memory_of(lab[DDP]), memory_of(lab[name]))),
    )
    line("step time", lambda name: cells.step_time(lab[name]))
    line("effect on speed (times as fast)", lambda name: cells.ratio(lab.ratio(DDP, name)))
    line("all-reduces per step", lambda name: cells.exact(lab[name].all_reduces_per_step))
    line(
        "data all-reduced per step and rank",
        lambda name: cells.held_bytes(lab[name].bytes_per_step),
    )
    line("data all-reduced per backward pass", lambda name: cells.held_bytes(_per_pass(lab[name])))
    note = f"Against DDP in fp32: {seconds(lab[DDP].step_seconds.median)}, {size(memory_of(lab[DDP]))}, "
    note += f"{plural(int(lab[DDP].all_reduces_per_step), 'all-reduce')} of {size(lab[DDP].bytes_per_step)}. "
    note += f"{memory_words(lab[DDP])}"
    heads = (
        "",
        "accumulation",
        "mixed precision" + (f" ({lab[amp].precision})" if amp else ""),
        "both",
    )
    blocks: list[Block] = [
        Table("Accumulation against mixed precision", heads, tuple(lines), note),
        Bars(
            "Speed against DDP in fp32",
            tuple(_bar(lab, name) for name in names if name),
            "times",
            1.0,
        ),
    ]
    if amp is None:
        return [
            *blocks,
            Answer(
                "Which saves more memory?", left_out(lab, BF16, FP16), {"precisions_that_run": 0}
            ),
        ]
    return [*blocks, saves_more(lab, amp), gains_more(lab, amp), combined(lab, amp, both)]


def _per_pass(row: Row) -> float:
    return float(row.bytes_per_step / row.observed.passes.backward)


def _bar(lab: Measurements, name: str) -> Bar:
    ratio = lab.ratio(DDP, name)
    return Bar(name, ratio.value, ratio.low, ratio.high, f"{factor(ratio.value)} {interval(ratio)}")


def saves_more(lab: Measurements, amp: str) -> Answer:
    base, four, low = (memory_of(lab[name]) for name in (DDP, ACCUMULATE, amp))
    text = f"Of {size(base)}, accumulation leaves {size(four)} ({more_or_less(base, four)}) and {lab[amp].precision} {size(low)} "
    text += f"({more_or_less(base, low)}): "
    if abs(four - low) < SAME_SIZE * base:
        text += "there is no difference."
    else:
        best, least = ("accumulation", four) if four < low else ("mixed precision", low)
        text += f"{best} {'saves more' if least < base else 'costs less'}."
    return Answer(
        "Which saves more memory?",
        text,
        {"fp32_bytes": base, "accumulation_bytes": four, "mixed_precision_bytes": low},
    )


def gains_more(lab: Measurements, amp: str) -> Answer:
    four, low, against = lab.ratio(DDP, ACCUMULATE), lab.ratio(DDP, amp), lab.ratio(ACCUMULATE, amp)
    best = {"faster": "mixed precision", "slower": "accumulation"}.get(against.verdict)
    end = (
        "neither is measurably ahead"
        if not best
        else f"{best} {'gains more' if max(four.value, low.value) > 1 else 'loses less'}"
    )
    text = f"At the same batch, {speed('accumulation', four)} and {speed(lab[amp].precision, low)}: {end}."
    return Answer(
        "Which gains more speed?",
        text,
        {
            "accumulation": four.value,
            "mixed_precision": low.value,
            "one_against_the_other": against.value,
        },
    )


def combined(lab: Measurements, amp: str, both: str | None) -> Answer:
    question = "Can both be combined?"
    if both is None:
        return Answer(question, left_out(lab, BOTH), {"combinations_that_run": 0})
    ratio = lab.ratio(DDP, both)
    text = f"{speed('Both together', ratio).replace('together is', 'together are')}, with {size(memory_of(lab[both]))}. "
    text += "Alone, accumulation is "
    text += f"{factor(lab.ratio(DDP, ACCUMULATE).value)} times as fast with {size(memory_of(lab[ACCUMULATE]))}, "
    text += f"{lab[amp].precision} "
    text += f"{factor(lab.ratio(DDP, amp).value)} times with {size(memory_of(lab[amp]))}."
    return Answer(
        question, text, {"speed_up": ratio.value, "peak_bytes": memory_of(lab[both])}, True
    )


def debugging(lab: Measurements) -> list[Block]:
    row = lab[DDP]
    checks = problems(row, lab.comparison.machine.cores)
    lines = [
        (cells.name(name), cells.words(look), found, cells.yes_no(seen))
        for name, look, found, seen in checks
    ]
    step, bad = row.step_seconds.median, sum(loss is None for loss in row.losses)
    slow = [f"{name} ({found.text})" for name, _, found, seen in checks[3:] if seen]
    text = (
        f"{capital(listed(slow))}, in a step of {seconds(step)}."
        if slow
        else f"None of the four was seen in steps of {seconds(step)}."
    )
    status, ended = row.observed.status, row.observed.steps
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
            f"The training is {same_training(row)}; {bad} of {len(row.losses)} losses are not finite.",
            {
                "max_difference": max_difference(row),
                "not_finite": bad,
                "losses": len(row.losses),
            },
            bool(is_same_training(row)) and not bad,
        ),
        Answer(
            "Did anything hang?",
            f"The {plural(len(row.ranks), 'rank')} ended as '{status}', after {plural(ended, 'step')} each.",
            {"ranks": len(row.ranks), "steps": ended, "status": status},
            status != "completed",
        ),
    ]


def problems(row: Row, cores: int) -> list[tuple[str, str, Cell, bool]]:
    """(problem, how it shows, what was measured, is it there); the first three are about the
    result, the rest about speed."""
    metrics, seen = row.metrics, row.observed
    step, wait, late = (
        row.step_seconds.median,
        metrics.data_wait_seconds or 0.0,
        metrics.straggler,
    )
    threads = seen.threads_per_device * row.devices
    on_cpu = row.peak_bytes[0].how == "counted"
    bad = sum(loss is None for loss in row.losses)
    off = max_difference(row)
    differs = (
        cells.missing("not proved")
        if off is None
        else Cell(f"{off:.1e}", off, 0.0, max(off, 1e-10))
    )
    return [
        ("hang", "a rank does not end", cells.name(seen.status), seen.status != "completed"),
        (
            "wrong result",
            "parameters differ from one device's",
            differs,
            is_same_training(row) is False,
        ),
        ("broken numbers", "losses that are not finite", cells.exact(bad), bad > 0),
        (
            "slow rank",
            "the others wait for one rank",
            cells.measured_share(late.share_of_step if late else 0.0),
            bool(late),
        ),
        (
            "slow data",
            "the device waits between steps",
            cells.measured_share(wait / step),
            wait > RULE * step,
        ),
        (
            "slow communication",
            f"more than {share(RULE)} of a step",
            cells.measured_share(metrics.communication_share),
            metrics.keeps_rule is False,
        ),
        (
            "too many threads",
            f"more than {plural(cores, 'core')}",
            cells.exact(threads),
            on_cpu and threads > cores,
        ),
    ]


PARTS = (
    LabPart(
        "gradient accumulation",
        "4 backward passes per optimizer step (`practical7_accumulation.py`), with and without `no_sync()`.",
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
    LabPart(
        "debugging", "Look for the common problems of DDP in the recorded run.", (DDP,), debugging
    ),
)
