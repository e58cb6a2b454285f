"""Practical 10, hybrid parallelism: data, model and pipeline together; its tables and answers, computed from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paralab.analyse import cells
from paralab.analyse.blocks import Answer, Block, Cell, Part, Section, Split, Table
from paralab.analyse.lab import Lab, LabPart, Row, memory_of, memory_words, remarks_of, same_training, tell
from paralab.analyse.wording import factor, listed, share, split_words, times_as_fast
from paralab.units import plural, rate, seconds, size

HYBRID, MICRO2, MICRO8 = (f"hybrid, {number} micro-batches" for number in (4, 2, 8))
HALF, DOUBLE = "hybrid, half the batch", "hybrid, twice the batch"
PIPELINE, MP = "one process, 4 micro-batches", "one process, no micro-batches"
SAME = "hybrid, second device = first"


def sections(comparison: dict[str, Any], folder: Path) -> tuple[Section, ...]:
    return tell(PARTS, comparison, folder)


def passes(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = row["observed"]["passes"]
    return found


def devices_of(rank: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(rank["devices"]))


def per_micro(row: Row) -> str:
    """Samples of the micro-batches of rank 0: `8`, or `3/3/2` where they differ."""
    samples, number = row["ranks"][0]["samples_per_step"], row["batch"]["micro_batches"]
    sizes = [samples // number + (piece < samples % number) for piece in range(number)]
    return str(sizes[0]) if len(set(sizes)) == 1 else split_words(sizes)


def first_look(lab: Lab) -> list[Block]:
    row = lab[HYBRID]
    stages = len(row["ranks"][0]["devices"])
    grid = Table(
        "Ranks and devices",
        ("rank", *(f"stage {stage}" for stage in range(stages)), "samples per step", "micro-batches", "samples per micro-batch"),
        tuple(
            (
                cells.exact(rank["rank"]),
                *(cells.name(device) for device in rank["devices"]),
                cells.exact(rank["samples_per_step"]),
                cells.exact(passes(row)["micro_batches"]),
                cells.name(per_micro(row)),
            )
            for rank in row["ranks"]
        ),
        remarks_of([row]),
    )
    world, used = len(row["ranks"]), len(devices_of(row["ranks"][0]))
    return [
        grid,
        counts_table("One step of one rank", [row]),
        drawn_split(row),
        Answer(
            "How many processes are there, and which devices does each use?",
            f"{plural(world, 'process')}: "
            + listed([f"rank {rank['rank']} uses {listed(devices_of(rank))}" for rank in row["ranks"]])
            + f", {plural(used, 'device')} each.",
            {"processes": world, "devices": {str(rank["rank"]): rank["devices"] for rank in row["ranks"]}},
        ),
        Answer(
            "How many micro-batches are processed?",
            f"{passes(row)['micro_batches']} per step on each rank, of {per_micro(row)} samples: {passes(row)['forward']} forward and {passes(row)['backward']} backward passes.",
            {"micro_batches": passes(row)["micro_batches"], "forward": passes(row)["forward"], "backward": passes(row)["backward"]},
        ),
        when_synchronised(row),
        Answer(
            "Is it the same training as on one device?",
            f"The hybrid is {same_training(row)}.",
            {"max_difference": (row["parity"] or {}).get("max_difference"), "equal": (row["parity"] or {}).get("equal")},
            bool((row["parity"] or {}).get("equal")),
        ),
    ]


def drawn_split(row: Row) -> Split:
    sizes = per_micro(row).split("/")
    number = row["batch"]["micro_batches"]
    pieces = tuple(int(value) for value in (sizes if len(sizes) > 1 else sizes * number))
    parts = tuple(Part(f"rank {rank['rank']} · {listed(devices_of(rank))}", pieces) for rank in row["ranks"])
    return Split(f"The batch: {row['batch']['arithmetic']}", row["batch"]["size"], parts)


def when_synchronised(row: Row) -> Answer:
    seen, counts = row["observed"]["buckets"], passes(row)
    question = "When does synchronisation happen?"
    if not seen:
        return Answer(question, f"Never: {plural(len(row['ranks']), 'process')}, 0 all-reduces.", {"all_reduces": 0})
    late = sum(found["in_last_pass"] for found in seen)
    before = sorted({found["passes_done_before"] for found in seen})
    text = f"{plural(int(row['all_reduces_per_step']), 'all-reduce')} per step; {late} of {len(seen)} begin in the backward pass of the last micro-batch, "
    text += f"when {listed(before, 'or')} of the {counts['backward']} backward passes of their stage are done"
    if late == len(seen):
        text += f": once per optimiser step, not once per micro-batch. {size(row['bytes_per_step'])} are exchanged."
    else:
        text += ": NOT only at the end."
    return Answer(
        question,
        text,
        {
            "all_reduces": row["all_reduces_per_step"],
            "in_last_pass": late,
            "passes_done_before": before,
            "step_bytes": row["bytes_per_step"],
        },
    )


def counts_table(title: str, rows: Sequence[Row]) -> Table:
    columns = (
        "set-up",
        "processes",
        "devices per rank",
        "micro-batches",
        "forward passes",
        "backward passes",
        "all-reduces per step",
        "data per step",
        "step time",
    )
    return Table(title, columns, tuple(_counts(row) for row in rows), "Passes are counted on rank 0, in one step.")


def _counts(row: Row) -> tuple[Cell, ...]:
    return (
        cells.name(row["name"]),
        cells.exact(row["processes"]),
        cells.exact(len(devices_of(row["ranks"][0]))),
        cells.exact(passes(row)["micro_batches"]),
        cells.exact(passes(row)["forward"]),
        cells.exact(passes(row)["backward"]),
        cells.exact(row["all_reduces_per_step"]),
        cells.held_bytes(row["bytes_per_step"]),
        cells.step_time(row),
    )


def micro_batches(lab: Lab) -> list[Block]:
    names = (MICRO2, HYBRID, MICRO8)
    rows = [lab[name] for name in names]
    columns = (
        "micro-batches",
        "samples per micro-batch",
        "forward passes",
        "backward passes",
        "all-reduces per step",
        "idle share, measured",
        "idle share, ideal",
    )
    columns += ("step time", "activations")
    table = Table(
        "MICRO_BATCHES",
        columns,
        tuple(
            (
                cells.exact(passes(row)["micro_batches"]),
                cells.name(per_micro(row)),
                cells.exact(passes(row)["forward"]),
                cells.exact(passes(row)["backward"]),
                cells.exact(row["all_reduces_per_step"]),
                cells.measured_share(row["metrics"]["bubble"]["measured"]),
                Cell(share(row["metrics"]["bubble"]["ideal"]), row["metrics"]["bubble"]["ideal"]),
                cells.step_time(row),
                cells.held_bytes(
                    max(int(entry["activations"] or 0) for entry in row["peak_bytes"]) or None, "only the allocator's peak"
                ),
            )
            for row in rows
        ),
        "Ideal: (stages − 1) ÷ (micro-batches + stages − 1), if every pass took equally long. Measured: between the first forward and the last backward of a step.",
    )
    numbers = [passes(row)["micro_batches"] for row in rows]
    same_sync = len({row["all_reduces_per_step"] for row in rows}) == 1 and len({row["bytes_per_step"] for row in rows}) == 1
    return [
        table,
        Answer(
            "How many forward and backward passes are there?",
            f"{listed([passes(row)['forward'] for row in rows])} forward and {listed([passes(row)['backward'] for row in rows])} backward passes per step and rank with {listed(numbers)} micro-batches: one of each per micro-batch.",
            {
                "micro_batches": numbers,
                "forward": [passes(row)["forward"] for row in rows],
                "backward": [passes(row)["backward"] for row in rows],
            },
        ),
        bubble(rows),
        fastest(lab, names),
        Answer(
            "Does the synchronisation change?",
            f"{listed([int(row['all_reduces_per_step']) for row in rows])} all-reduces of together {listed([size(row['bytes_per_step']) for row in rows])} per step: "
            + ("it stays, because gradients add up until the last micro-batch." if same_sync else "it changes."),
            {"all_reduces": [row["all_reduces_per_step"] for row in rows], "step_bytes": [row["bytes_per_step"] for row in rows]},
            not same_sync,
        ),
    ]


def bubble(rows: Sequence[Row]) -> Answer:
    measured = [row["metrics"]["bubble"]["measured"] for row in rows]
    ideal = [row["metrics"]["bubble"]["ideal"] for row in rows]
    shrinks = all(a > b for a, b in zip(measured, measured[1:], strict=False))
    text = (
        f"Ideally from {listed([share(value) for value in ideal])}; measured were {listed([share(value) for value in measured])}. "
    )
    if shrinks:
        text += "It does: more pieces fill the pipeline better."
    else:
        text += "It does not fall every time: small passes cost more per sample, and stages that take turns or share cores wait for each other."
    return Answer(
        "Does the idle share of the devices fall with more micro-batches?",
        text,
        {"measured_share": measured, "ideal_share": ideal},
        shrinks,
    )


def fastest(lab: Lab, names: Sequence[str]) -> Answer:
    best = min(names, key=lambda name: float(lab[name]["step_seconds"]["median"]))
    others = [name for name in names if name != best]
    number = passes(lab[best])["micro_batches"]
    told = [f"{passes(lab[name])['micro_batches']}: {times_as_fast(lab.ratio(name, best))}" for name in others]
    sure = all(lab.ratio(name, best).verdict == "faster" for name in others)
    text = (
        f"The shortest median has {number} micro-batches, {seconds(lab[best]['step_seconds']['median'])}; against {listed(told)}. "
    )
    text += "That is measurable against both." if sure else "So not against every other number measurably."
    return Answer(
        "Which number of micro-batches is the fastest?",
        text,
        {name: lab[name]["step_seconds"]["median"] for name in names} | {"fastest": number},
    )


def batch_sizes(lab: Lab) -> list[Block]:
    rows = [lab[name] for name in (HALF, HYBRID, DOUBLE)]
    columns = (
        "BATCH_SIZE",
        "samples per rank",
        "samples per micro-batch",
        "forward passes",
        "all-reduces per step",
        "data per step",
        "step time",
        "samples per second",
        "memory of the fullest device",
    )
    table = Table(
        "BATCH_SIZE",
        columns,
        tuple(
            (
                cells.exact(row["batch"]["size"]),
                cells.exact(row["ranks"][0]["samples_per_step"]),
                cells.name(per_micro(row)),
                cells.exact(passes(row)["forward"]),
                cells.exact(row["all_reduces_per_step"]),
                cells.held_bytes(row["bytes_per_step"]),
                cells.step_time(row),
                cells.per_second(row["samples_per_second"]),
                cells.held_bytes(memory_of(row)),
            )
            for row in rows
        ),
        memory_words(rows[0]),
    )
    sizes = [row["batch"]["size"] for row in rows]
    stay, change = [], []
    for name, values in {
        "forward passes": [passes(row)["forward"] for row in rows],
        "all-reduces": [int(row["all_reduces_per_step"]) for row in rows],
        "exchanged bytes": [size(row["bytes_per_step"]) for row in rows],
        "samples per micro-batch": [per_micro(row) for row in rows],
    }.items():
        (stay if len(set(values)) == 1 else change).append(f"{name} ({listed(list(dict.fromkeys(values)))})")
    ratio = lab.ratio(HALF, DOUBLE)
    growth = rows[2]["step_seconds"]["median"] / rows[0]["step_seconds"]["median"]
    speed = [row["samples_per_second"] for row in rows]
    return [
        table,
        Answer(
            "What changes with the batch size?",
            f"With {listed(sizes)} samples: {listed(change)} and the step time ({listed([seconds(row['step_seconds']['median']) for row in rows])})."
            if change
            else f"With {listed(sizes)} samples, only the step time ({listed([seconds(row['step_seconds']['median']) for row in rows])}).",
            {"batch_sizes": sizes, "step_seconds": [row["step_seconds"]["median"] for row in rows]},
        ),
        Answer(
            "What stays?",
            f"Per step: {listed(stay)}." if stay else f"Nothing of what was counted stays from {sizes[0]} to {sizes[-1]}.",
            {"batch_sizes": sizes, "stays": stay},
        ),
        Answer(
            "Does a larger batch train more samples per second?",
            f"{listed([rate(value) for value in speed])} samples per second: four times the batch takes {factor(growth)} times as long"
            + (", because the communication and the cost per pass do not grow with it." if ratio.value > 1 / 3.6 else "."),
            {"samples_per_second": speed, "step_ratio": growth},
            speed[-1] > 1.02 * speed[0],
        ),
    ]


def one_process(lab: Lab) -> list[Block]:
    two, pipe, plain = lab[HYBRID], lab[PIPELINE], lab[MP]
    reduces = int(pipe["all_reduces_per_step"])
    ratio, gain = lab.ratio(PIPELINE, HYBRID), lab.ratio(MP, PIPELINE)
    return [
        counts_table("Two processes and one", [two, pipe, plain]),
        Answer(
            "What happens to rank 1?",
            f"It does not exist: {plural(len(pipe['ranks']), 'process')}, and rank 0 trains on all {pipe['ranks'][0]['samples_per_step']} samples instead of {two['ranks'][0]['samples_per_step']}.",
            {"processes": len(pipe["ranks"]), "samples": pipe["ranks"][0]["samples_per_step"]},
        ),
        Answer(
            "Does synchronisation still happen?",
            f"{reduces} all-reduces per step, against {int(two['all_reduces_per_step'])} with two processes"
            + (": there is nobody to synchronise with." if not reduces else "."),
            {"one_process": reduces, "two_processes": two["all_reduces_per_step"]},
            reduces > 0,
        ),
        Answer(
            "Are two processes faster than one?",
            f"Two are {times_as_fast(ratio)}: {seconds(two['step_seconds']['median'])} on {plural(two['devices'], 'device')} against {seconds(pipe['step_seconds']['median'])} on {pipe['devices']}. {_remark(two)}".strip(),
            {"speed_up": ratio.value, "low": ratio.low, "high": ratio.high},
            None if ratio.low is None else ratio.verdict == "faster",
        ),
        Answer(
            "What do micro-batches bring in one process?",
            f"With {passes(pipe)['micro_batches']} micro-batches a step is {times_as_fast(gain)}, compared with none: the stages are idle for {share(pipe['metrics']['bubble']['measured'])} instead of {share(plain['metrics']['bubble']['measured'])} of the time.",
            {
                "speed_up": gain.value,
                "low": gain.low,
                "high": gain.high,
                "idle_share": [plain["metrics"]["bubble"]["measured"], pipe["metrics"]["bubble"]["measured"]],
            },
        ),
    ]


def _remark(row: Row) -> str:
    found = next((remark for remark in row["remarks"] if remark.startswith(("the devices share", "shared:"))), "")
    return f"But {found}." if found else ""


def broken(lab: Lab) -> list[Block]:
    good, bad = lab[HYBRID], lab[SAME]
    ratio = lab.ratio(SAME, HYBRID)
    used = [len(devices_of(row["ranks"][0])) for row in (good, bad)]
    memory = [memory_of(row) for row in (good, bad)]
    idle = [(row["metrics"]["bubble"] or {}).get("measured") for row in (good, bad)]
    table = Table(
        "Model parallelism, whole and broken",
        (
            "set-up",
            "devices of rank 0",
            "devices in all",
            "memory of the fullest device",
            "idle share",
            "step time",
            "same training",
        ),
        tuple(
            (
                cells.name(row["name"]),
                cells.name(listed(devices_of(row["ranks"][0]))),
                cells.exact(row["devices"]),
                cells.held_bytes(memory_of(row)),
                cells.measured_share(value),
                cells.step_time(row),
                cells.yes_no(bool((row["parity"] or {}).get("equal"))),
            )
            for row, value in zip((good, bad), idle, strict=True)
        ),
        remarks_of([good, bad]),
    )
    return [
        table,
        Answer(
            "Are several devices still used by a rank?",
            f"Rank 0 uses {listed(devices_of(bad['ranks'][0]))} for both stages: {plural(used[1], 'device')} instead of {used[0]}.",
            {"devices_whole": used[0], "devices_broken": used[1]},
            used[1] > 1,
        ),
        Answer(
            "What changes?",
            f"The fullest device holds {size(memory[1])} instead of {size(memory[0])}, and the stages no longer work at the same time: with both devices a step is {times_as_fast(ratio)}, {seconds(good['step_seconds']['median'])} against {seconds(bad['step_seconds']['median'])}. {_remark(good)}".strip(),
            {"memory_bytes": memory, "speed_up": ratio.value, "low": ratio.low, "high": ratio.high},
        ),
        Answer(
            "Is the result still right?",
            f"The broken set-up is {same_training(bad)}: where a stage computes does not change what it computes.",
            {"max_difference": (bad["parity"] or {}).get("max_difference"), "equal": (bad["parity"] or {}).get("equal")},
            bool((bad["parity"] or {}).get("equal")),
        ),
    ]


PARTS = (
    LabPart(
        "the hybrid",
        "Two processes, each a pipeline over two devices, with 4 micro-batches (`torchrun --nproc_per_node=2 sample.py`).",
        (HYBRID,),
        first_look,
    ),
    LabPart("micro-batches", "MICRO_BATCHES 2, 4 and 8, everything else the same.", (MICRO2, HYBRID, MICRO8), micro_batches),
    LabPart("batch size", "Half the BATCH_SIZE, the same, and twice, with 4 micro-batches.", (HALF, HYBRID, DOUBLE), batch_sizes),
    LabPart(
        "one process",
        "The same with one process: a pipeline, and model parallelism without micro-batches.",
        (HYBRID, PIPELINE, MP),
        one_process,
    ),
    LabPart("model parallelism broken", "The second device of each rank is its first (`SAME_DEVICE=1`).", (HYBRID, SAME), broken),
)
