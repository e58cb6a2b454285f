"""Practical 10, hybrid parallelism: data, model and pipeline together; its tables and answers,
computed from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from paralab.analyse import table_cells as cells
from paralab.analyse.blocks import Answer, Block, Cell, Table
from paralab.analyse.events_summary import Passes
from paralab.analyse.figures import schedule
from paralab.analyse.metric_types import Bubble
from paralab.analyse.phrases import alike, factor, faster, listed, share, speed, split_words
from paralab.analyse.result import Rank
from paralab.course.configurations import DOUBLE, HALF, HYBRID, MICRO2, MICRO8, MP, PIPELINE, SAME
from paralab.course.measurements import (
    LabPart,
    Measurements,
    Row,
    drawn,
    drawn_split,
    is_equal,
    memory_of,
    memory_words,
    proof_evidence,
    remarks_of,
    same_training,
    sharing,
)
from paralab.units import plural, rate, seconds, size

MORE_SAMPLES = 1.02


def passes(row: Row) -> Passes:
    return row.observed.passes


def bubble_of(row: Row) -> Bubble:
    """Of a row with several stages."""
    assert row.metrics.bubble is not None, row.name
    return row.metrics.bubble


def devices_of(rank: Rank) -> list[str]:
    return list(dict.fromkeys(rank.devices))


def per_micro(row: Row) -> str:
    """Samples of the micro-batches of rank 0: `8`, or `3/3/2` where they differ."""
    samples, number = row.ranks[0].samples_per_step, row.batch.micro_batches
    sizes = [samples // number + (piece < samples % number) for piece in range(number)]
    return str(sizes[0]) if len(set(sizes)) == 1 else split_words(sizes)


def first_look(lab: Measurements) -> list[Block]:
    row = lab[HYBRID]
    stages = len(row.ranks[0].devices)
    lines = [
        (
            cells.exact(rank.rank),
            *(cells.name(device) for device in rank.devices),
            cells.exact(rank.samples_per_step),
            cells.exact(passes(row).micro_batches),
            cells.name(per_micro(row)),
        )
        for rank in row.ranks
    ]
    heads = (
        "rank",
        *(f"stage {stage}" for stage in range(stages)),
        "samples per step",
        "micro-batches",
        "samples per micro-batch",
    )
    world = len(row.ranks)
    used = listed([f"rank {rank.rank} uses {listed(devices_of(rank))}" for rank in row.ranks])
    micro = f"{passes(row).micro_batches} per step on each rank, of {per_micro(row)} samples each: "
    micro += f"{passes(row).forward} forward "
    micro += f"and {passes(row).backward} backward passes through all stages."
    return [
        Table("Ranks and devices", heads, tuple(lines), remarks_of([row])),
        counts_table("One step", [row]),
        *drawn_split(row),
        *drawn(lab, HYBRID, lambda rounds: schedule(rounds[-1])),
        Answer(
            "How many processes are there, and which devices does each use?",
            f"{plural(world, 'process')}: {used}.",
            {
                "processes": world,
                "devices": {str(rank.rank): rank.devices for rank in row.ranks},
            },
        ),
        Answer(
            "How many micro-batches are processed?",
            micro,
            {"samples": per_micro(row)} | passes(row).to_dict(),
        ),
        when_synchronized(row),
        Answer(
            "Is it the same training as on one device?",
            f"The hybrid is {same_training(row)}.",
            proof_evidence(row),
            is_equal(row),
        ),
    ]


def when_synchronized(row: Row) -> Answer:
    seen, whole = row.observed.buckets, passes(row).backward
    question = "When does synchronization happen?"
    if not seen:
        return Answer(
            question,
            f"Never: {plural(len(row.ranks), 'process')}, 0 all-reduces.",
            {"all_reduces": 0},
        )
    late = sum(found.in_last_pass for found in seen)
    before = sorted({found.passes_done_before for found in seen})
    text = f"{late} of the {plural(len(seen), 'all-reduce')} of a step begin in the backward pass of the last micro-batch, when "
    text += f"{listed(before, 'or')} of {whole} backward passes of their stage are done"
    if late == len(seen):
        text += f": once per optimizer step, not per micro-batch. Each rank exchanges {size(row.bytes_per_step)}."
    else:
        text += f": {len(seen) - late} begin earlier."
    evidence = {
        "all_reduces": len(seen),
        "in_last_pass": late,
        "passes_done_before": before,
        "step_bytes": row.bytes_per_step,
    }
    return Answer(question, text, evidence)


def counts_table(title: str, rows: Sequence[Row]) -> Table:
    lines = [
        (
            cells.name(row.name),
            cells.exact(row.processes),
            cells.exact(len(devices_of(row.ranks[0]))),
            cells.exact(passes(row).micro_batches),
            cells.exact(passes(row).forward),
            cells.exact(passes(row).backward),
            cells.exact(row.all_reduces_per_step),
            cells.step_time(row),
        )
        for row in rows
    ]
    columns = (
        "set-up",
        "processes",
        "devices per rank",
        "micro-batches",
        "forward",
        "backward",
        "all-reduces",
        "step time",
    )
    return Table(
        title,
        columns,
        tuple(lines),
        "Micro-batches, passes and all-reduces of one rank in one optimizer step.",
    )


def micro_batches(lab: Measurements) -> list[Block]:
    names = (MICRO2, HYBRID, MICRO8)
    rows = [lab[name] for name in names]
    lines = [
        (
            cells.exact(passes(row).micro_batches),
            cells.name(per_micro(row)),
            cells.exact(passes(row).forward),
            cells.exact(passes(row).backward),
            cells.exact(row.all_reduces_per_step),
            cells.measured_share(bubble_of(row).measured),
            Cell(share(bubble_of(row).ideal), bubble_of(row).ideal),
            cells.step_time(row),
        )
        for row in rows
    ]
    columns = (
        "micro-batches",
        "samples each",
        "forward",
        "backward",
        "all-reduces",
        "idle, measured",
        "idle, ideal",
        "step time",
    )
    note = "Idle: share of the devices' time between the first forward and the last backward pass. Ideal: (stages − 1) ÷ "
    note += "(micro-batches + "
    note += "stages − 1), if every pass took equally long."
    numbers = [passes(row).micro_batches for row in rows]
    forward, backward = ([passes(row)[way] for row in rows] for way in ("forward", "backward"))
    reduces, moved = (
        [int(row.all_reduces_per_step) for row in rows],
        [row.bytes_per_step for row in rows],
    )
    changes = len(set(reduces)) > 1 or len(set(moved)) > 1
    sync = f"{alike(reduces)} all-reduces per step, together {alike([size(value) for value in moved])}, with "
    sync += f"{listed(numbers)} micro-batches"
    sync += "." if changes else ": gradients add up until the last micro-batch."
    return [
        Table("MICRO_BATCHES", columns, tuple(lines), note),
        *(
            block
            for name in names
            for block in drawn(lab, name, lambda rounds: schedule(rounds[-1]))
        ),
        Answer(
            "How many forward and backward passes are there?",
            f"With {listed(numbers)} micro-batches, {listed(forward)} forward and {listed(backward)} backward passes per "
            "step and rank"
            + (": one of each per micro-batch." if forward == backward == numbers else "."),
            {"micro_batches": numbers, "forward": forward, "backward": backward},
        ),
        bubble(rows),
        fastest(lab, names),
        Answer(
            "Does the synchronization change?",
            sync,
            {"all_reduces": reduces, "step_bytes": moved},
            changes,
        ),
    ]


def bubble(rows: Sequence[Row]) -> Answer:
    measured = [bubble_of(row).measured for row in rows]
    ideal = [bubble_of(row).ideal for row in rows]
    falls = all(before > after for before, after in pairwise(measured))
    text = f"Measured were {listed([share(value) for value in measured])}, ideal are {listed([share(value) for value in ideal])}"
    text += (
        ": more pieces fill the pipeline better."
        if falls
        else ": here it does not fall every time."
    )
    question = "Does the idle share of the devices fall with more micro-batches?"
    return Answer(question, text, {"measured_share": measured, "ideal_share": ideal}, falls)


def fastest(lab: Measurements, names: Sequence[str]) -> Answer:
    best = min(names, key=lambda name: float(lab[name].step_seconds.median))
    number = passes(lab[best]).micro_batches
    ratios = {
        passes(lab[name]).micro_batches: lab.ratio(name, best) for name in names if name != best
    }
    told = [speed(f"compared with {other} it", ratio) for other, ratio in ratios.items()]
    text = f"{number}, with {seconds(lab[best].step_seconds.median)} per step: {listed(told)}"
    text += f"; {sharing(lab[best])}." if sharing(lab[best]) else "."
    evidence = {
        "step_seconds": {name: lab[name].step_seconds.median for name in names},
        "fastest": number,
    }
    return Answer("Which number of micro-batches is the fastest?", text, evidence)


def batch_sizes(lab: Measurements) -> list[Block]:
    rows = [lab[name] for name in (HALF, HYBRID, DOUBLE)]
    lines = [
        (
            cells.exact(row.batch.size),
            cells.exact(row.ranks[0].samples_per_step),
            cells.name(per_micro(row)),
            cells.exact(passes(row).forward),
            cells.exact(row.all_reduces_per_step),
            cells.held_bytes(row.bytes_per_step),
            cells.step_time(row),
            cells.per_second(row.samples_per_second),
            cells.held_bytes(memory_of(row)),
        )
        for row in rows
    ]
    columns = (
        "BATCH_SIZE",
        "per rank",
        "per micro-batch",
        "forward",
        "all-reduces",
        "data",
        "step time",
        "samples/s",
        "memory",
    )
    sizes, times = (
        [row.batch.size for row in rows],
        [row.step_seconds.median for row in rows],
    )
    counted: dict[str, Sequence[object]] = {
        "samples per micro-batch": [per_micro(row) for row in rows],
        "forward passes": [passes(row).forward for row in rows],
        "all-reduces": [int(row.all_reduces_per_step) for row in rows],
        "exchanged data": [size(row.bytes_per_step) for row in rows],
    }
    stays = [f"{name} ({values[0]})" for name, values in counted.items() if len(set(values)) == 1]
    changes = [
        f"{name} ({listed(values)})" for name, values in counted.items() if len(set(values)) > 1
    ]
    per_second = [row.samples_per_second or 0.0 for row in rows]
    more = f"{listed([rate(value) for value in per_second])} samples per second: {sizes[-1] / sizes[0]:g} times the "
    more += "batch takes "
    more += f"{factor(times[-1] / times[0])} times as long"
    gains = per_second[-1] > MORE_SAMPLES * per_second[0]
    more += (
        ", because communication and the cost of each pass grow less than the batch."
        if gains
        else "."
    )
    return [
        Table(
            "BATCH_SIZE",
            columns,
            tuple(lines),
            f"Data per step and rank; memory of the fullest device. {memory_words(rows[0])}",
        ),
        Answer(
            "What changes with the batch size?",
            f"With {listed(sizes)} samples: "
            f"{listed([*changes, f'the step time ({listed([seconds(value) for value in times])})'])}.",
            {"batch_sizes": sizes, "step_seconds": times, "changes": changes},
        ),
        Answer(
            "What stays?",
            f"Per step: {listed(stays)}."
            if stays
            else f"Nothing of what was counted with {listed(sizes)} samples.",
            {"batch_sizes": sizes, "stays": stays, "forward_passes": counted["forward passes"]},
        ),
        Answer(
            "Does a larger batch train more samples per second?",
            more,
            {"samples_per_second": per_second, "step_seconds": times},
            gains,
        ),
    ]


def one_process(lab: Measurements) -> list[Block]:
    two, pipe, plain = lab[HYBRID], lab[PIPELINE], lab[MP]
    reduces = [int(row.all_reduces_per_step) for row in (two, pipe)]
    ratio, gain = lab.ratio(PIPELINE, HYBRID), lab.ratio(MP, PIPELINE)
    idle = [bubble_of(row).measured for row in (plain, pipe)]
    held = [row.ranks[0].samples_per_step for row in (two, pipe)]
    processes = f"{speed('With two, a step', ratio)}: {seconds(two.step_seconds.median)} on "
    processes += f"{plural(two.devices, 'device')} against "
    processes += (
        f"{seconds(pipe.step_seconds.median)} on {pipe.devices}"
        + (f"; {sharing(two)}" if sharing(two) else "")
        + "."
    )
    pieces = passes(pipe).micro_batches
    brings = f"{speed(f'With {pieces} of them a step', gain)}; the stages are idle for {share(idle[1])} of the time, "
    brings += f"without for {share(idle[0])}."
    return [
        counts_table("Two processes and one", [two, pipe, plain]),
        Answer(
            "What happens to rank 1?",
            f"There is none: {plural(len(pipe.ranks), 'process')}, in which rank 0 trains on all {held[1]} samples "
            f"instead of {held[0]}.",
            {"processes": len(pipe.ranks), "samples": held},
        ),
        Answer(
            "Does synchronization still happen?",
            f"{reduces[1]} all-reduces per step, with two processes {reduces[0]}"
            + (": there is nobody to exchange with." if not reduces[1] else "."),
            {"two_processes": reduces[0], "one_process": reduces[1]},
            reduces[1] > 0,
        ),
        Answer(
            "Are two processes faster than one?",
            processes,
            {"speed_up": ratio.value, "low": ratio.low, "high": ratio.high},
            faster(ratio),
        ),
        Answer(
            "What do micro-batches bring in one process?",
            brings,
            {"speed_up": gain.value, "low": gain.low, "high": gain.high, "idle_share": idle},
        ),
    ]


def broken(lab: Measurements) -> list[Block]:
    good, bad = lab[HYBRID], lab[SAME]
    lines = [
        (
            cells.name(row.name),
            cells.name(listed(devices_of(row.ranks[0]))),
            cells.exact(row.devices),
            cells.held_bytes(memory_of(row)),
            cells.measured_share(
                row.metrics.bubble.measured if row.metrics.bubble else None,
                "there is no pipeline",
            ),
            cells.step_time(row),
            cells.yes_no(is_equal(row)),
        )
        for row in (good, bad)
    ]
    columns = (
        "set-up",
        "devices of rank 0",
        "devices",
        "memory",
        "idle",
        "step time",
        "same training",
    )
    ratio = lab.ratio(SAME, HYBRID)
    used = [len(devices_of(row.ranks[0])) for row in (good, bad)]
    memory, times = (
        [memory_of(row) for row in (good, bad)],
        [row.step_seconds.median for row in (good, bad)],
    )
    changed = f"The fullest device holds {size(memory[1])} instead of {size(memory[0])}, and the stages take turns on it. "
    changed += f"{speed('With two devices per rank, a step', ratio)}, {seconds(times[0])} against {seconds(times[1])}"
    changed += f"; {sharing(good)}." if sharing(good) else "."
    return [
        Table(
            "Model parallelism, whole and broken", columns, tuple(lines), remarks_of([good, bad])
        ),
        Answer(
            "Are several devices still used by a rank?",
            f"Rank 0 has {listed(devices_of(bad.ranks[0]))} for both stages: {plural(used[1], 'device')} instead of {used[0]}.",
            {"devices_whole": used[0], "devices_broken": used[1]},
            used[1] > 1,
        ),
        Answer(
            "What changes?",
            changed,
            {
                "bytes": memory,
                "step_seconds": times,
                "speed_up": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
            },
        ),
        Answer(
            "Is the result still right?",
            f"The broken set-up is {same_training(bad)}: where a stage computes does not change what it computes.",
            proof_evidence(bad),
            is_equal(bad),
        ),
    ]


PARTS = (
    LabPart(
        "the hybrid",
        "2 processes, each a pipeline over 2 devices, 4 micro-batches (`sample.py` under `torchrun`).",
        (HYBRID,),
        first_look,
    ),
    LabPart(
        "micro-batches",
        "MICRO_BATCHES 2, 4 and 8, everything else the same.",
        (MICRO2, HYBRID, MICRO8),
        micro_batches,
    ),
    LabPart(
        "batch size",
        "Half the BATCH_SIZE, the same, and twice, with 4 micro-batches.",
        (HALF, HYBRID, DOUBLE),
        batch_sizes,
    ),
    LabPart(
        "one process",
        "One process: a pipeline, and model parallelism without micro-batches.",
        (HYBRID, PIPELINE, MP),
        one_process,
    ),
    LabPart(
        "model parallelism broken",
        "The second device of each rank is its first (`SAME_DEVICE=1`).",
        (HYBRID, SAME),
        broken,
    ),
)
