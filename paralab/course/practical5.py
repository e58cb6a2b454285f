"""Practical 5, data parallelism with nn.DataParallel: its tables and answers, computed from what
was measured."""

from __future__ import annotations

from paralab.analyse import table_cells as cells
from paralab.analyse.blocks import Answer, Bar, Bars, Block, Cell, Table
from paralab.analyse.confidence import Ratio
from paralab.analyse.events_summary import Copying
from paralab.analyse.figures import load_lines, memory_lines
from paralab.analyse.metrics import RULE
from paralab.analyse.phrases import (
    capital,
    factor,
    faster,
    interval,
    listed,
    more_or_less,
    often,
    reaches,
    share,
    speed,
    spread,
)
from paralab.course.batch_splits import arrived, inside, splits
from paralab.course.configurations import DP2, DP3, DP5, SINGLE
from paralab.course.measurements import (
    LabPart,
    Measurements,
    Row,
    drawn,
    is_equal,
    max_difference,
    memory_of,
    memory_parts,
    memory_words,
    remarks_of,
    same_training,
    sharing,
)
from paralab.units import plural, seconds, size

PROPORTIONAL = 0.9  # a speed-up of 90 % of the number of devices is called proportional
MORE_LOADED = 1.1  # device 0 works a tenth longer than the others
INSIDE_CALLS = "nn.DataParallel does it inside its calls"


def one_device(lab: Measurements) -> list[Block]:
    row = lab[SINGLE]
    times, metrics = row.step_seconds, row.metrics
    forward, backward, update = (
        metrics[f"{part}_seconds"] / times.median for part in ("forward", "backward", "optimizer")
    )
    parts = memory_parts(row)
    held = {name: value for name, value in parts.items() if name != "activations"}
    text = f"{size(memory_of(row))}: {listed([f'{name} {size(value)}' for name, value in parts.items()])}. "
    text += f"{share(sum(held.values()) / memory_of(row))} of it does not depend on the batch ({listed(list(held))})."
    return [
        Table("The baseline", _columns(row), (_setup(row),), memory_words(row)),
        Answer(
            "How long does one step take, and where does the time go?",
            f"{spread(times)}: {share(forward)} forward, {share(backward)} backward, {share(update)} optimizer.",
            {
                "step_seconds": times.median,
                "forward_share": forward,
                "backward_share": backward,
                "optimizer_share": update,
            },
        ),
        Answer(
            "How much memory does the training take?",
            text,
            {"peak_bytes": memory_of(row)}
            | {f"{name}_bytes": value for name, value in parts.items()},
        ),
    ]


def _columns(row: Row) -> tuple[str, ...]:
    steps = row.observed.steps
    return (
        "set-up",
        "step time",
        f"total time of {steps} steps",
        "memory of device 0",
        "samples per second",
    )


def _setup(row: Row) -> tuple[Cell, ...]:
    return (
        cells.name(row.name),
        cells.step_time(row),
        cells.duration(row.total_seconds),
        cells.held_bytes(row.peak_bytes[0].bytes),
        cells.per_second(row.samples_per_second),
    )


def data_parallel(lab: Measurements) -> list[Block]:
    row = lab[DP2]
    rank = row.ranks[0]
    held = {entry.device: entry.bytes for entry in row.peak_bytes}
    line: tuple[Cell, ...] = (
        cells.name(row.name),
        cells.exact(row.processes),
        cells.exact(row.devices),
    )
    line += (cells.step_time(row), cells.duration(row.total_seconds))
    columns = (
        "set-up",
        "processes",
        "devices used",
        "step time",
        f"total time of {row.observed.steps} steps",
    )
    replicas = [
        (
            cells.name(role),
            cells.name(device),
            cells.exact(samples),
            cells.held_bytes(held.get(device)),
        )
        for role, device, samples in zip(rank.roles, rank.devices, rank.split, strict=True)
    ]
    used = list(dict.fromkeys(rank.devices))
    on = [entry.device for entry in row.splits]
    text = (
        f"{plural(row.devices, 'device')} ({listed(used)}) by {plural(row.processes, 'process')}: "
    )
    text += f"in the first step, samples arrived inside the model on {listed(on)}."
    return [
        Table("The run", columns, (line,), remarks_of([row])),
        Table(
            "Each replica",
            ("replica", "device", "samples per step", "memory"),
            tuple(replicas),
            memory_words(row),
        ),
        Answer(
            "How many devices were used, by how many processes?",
            text,
            {"devices": row.devices, "processes": row.processes, "arrived_on": on},
        ),
    ]


def comparison_table(lab: Measurements) -> list[Block]:
    single, dp = lab[SINGLE], lab[DP2]
    ratio = lab.ratio(SINGLE, DP2)
    bars = (
        Bar(SINGLE, 1.0, text="1"),
        Bar(DP2, ratio.value, ratio.low, ratio.high, f"{factor(ratio.value)} {interval(ratio)}"),
    )
    before, after = memory_of(single), [entry.bytes for entry in dp.peak_bytes]
    memory = f"Device 0 holds {size(after[0])} ({more_or_less(before, after[0])}), the single device {size(before)}. "
    memory += f"All devices together hold {size(sum(after))}: every replica has its own parameters and gradients."
    return [
        Table(
            "Single device against DataParallel",
            _columns(single),
            (_setup(single), _setup(dp)),
            remarks_of([dp]),
        ),
        Bars(
            "Speed-up against one device",
            bars,
            "times",
            1.0,
            "Error bar: 95 % interval over the rounds.",
        ),
        got_faster(single, dp, ratio),
        proportional(dp, ratio),
        Answer(
            "How does the memory differ?",
            memory,
            {"single_bytes": before, "device_0_bytes": after[0], "all_devices_bytes": sum(after)},
        ),
        Answer(
            "Is it the same training?",
            f"DataParallel is {same_training(dp)}.",
            {
                "max_difference": max_difference(dp),
                "loss_difference": dp.loss_difference,
            },
            bool(is_equal(dp)),
        ),
    ]


def got_faster(single: Row, dp: Row, ratio: Ratio) -> Answer:
    """The verdict, and what the step gained (less to compute) and lost (copying)."""
    copied, step = dp.observed.copying, dp.step_seconds.median
    lost = sum(part.seconds for part in copied.values())
    compute = [row.metrics.compute_seconds for row in (single, dp)]
    text = f"{speed('DataParallel', ratio)}. Forward and backward take {seconds(compute[1])} instead of {seconds(compute[0])}"
    if copied:
        largest = max(copied, key=lambda kind: float(copied[kind].seconds))
        text += f"; copying takes {seconds(lost)} of each step ({share(lost / step)}), most of it to {largest}"
    if ratio.verdict != "faster" and sharing(dp):
        text += f"; {sharing(dp)}"
    evidence = {
        "single_step_seconds": single.step_seconds.median,
        "dp_step_seconds": step,
        "speed_up": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
        "compute_seconds": compute,
        "copying_seconds": lost if copied else None,
    }
    return Answer("Did it get faster?", text + ".", evidence, faster(ratio))


def proportional(row: Row, ratio: Ratio) -> Answer:
    question = "Is the speed-up proportional to the number of devices?"
    devices, exposed = row.devices, row.metrics.exposed_share
    if devices < 2:
        text = f"It cannot be told with 1 device ({factor(ratio.value)} times the speed {interval(ratio)}): {sharing(row)}."
        return Answer(question, text, {"speed_up": ratio.value, "devices": devices})
    reached = reaches(ratio, PROPORTIONAL * devices)
    text = f"{plural(devices, 'device')} gave {factor(ratio.value)} times the speed {interval(ratio)}, "
    text += f"{share(ratio.value / devices)} of the proportional {devices} times"
    if reached is None:
        text += f"; these rounds cannot tell whether the bar of {factor(PROPORTIONAL * devices)} times is reached"
    elif not reached and sharing(row):
        text += f"; {sharing(row)}"
    elif not reached and exposed and exposed > RULE:
        text += f"; {share(exposed)} of each step is copying or communication that nothing hides: a communication bottleneck"
        text += ", though not the only cause" if exposed < (1 - ratio.value / devices) / 2 else ""
    evidence = {
        "speed_up": ratio.value,
        "devices": devices,
        "efficiency_share": ratio.value / devices,
        "exposed_share": exposed,
    }
    return Answer(question, text + ".", evidence, reached)


def bottleneck(lab: Measurements) -> list[Block]:
    row = lab[DP2]
    gpu = {entry.device: entry.utilization for entry in row.metrics.load.gpu}
    unseen = row.metrics.balance is None
    busy = {entry.device: entry.share for entry in row.metrics.busy}
    lines = []
    for entry in row.peak_bytes:
        device = entry.device
        load = cells.measured_share(
            None if unseen else busy[device], "the replicas run inside one call"
        )
        line = (cells.name(device), load, cells.held_bytes(entry.bytes))
        lines.append(
            (*line, cells.measured_share(gpu.get(device), "NVML does not tell")) if gpu else line
        )
    cores = row.metrics.load.cores_per_rank[0]
    note = "" if cores is None else f"The process used {cores:.2g} cores on average. "
    columns = ("device", "busy share of a step", "memory", *(["load (NVML)"] if gpu else []))
    return [
        Table("Load and memory per device", columns, tuple(lines), note + memory_words(row)),
        *drawn(lab, DP2, lambda rounds: load_lines(rounds, "Load over time")),
        *drawn(lab, DP2, lambda rounds: memory_lines(rounds, "Memory over time")),
        more_loaded(row),
        where(row),
        memory_on_0(row),
    ]


def more_loaded(row: Row) -> Answer:
    question = "Is device 0 more loaded than the others?"
    gpu = [entry.utilization for entry in row.metrics.load.gpu]
    balance, busy = row.metrics.balance, row.metrics.busy
    if len(row.peak_bytes) < 2:
        text = f"There is 1 device, {row.peak_bytes[0].device}: all replicas share it."
        return Answer(question, text, {"devices": 1, "device": row.peak_bytes[0].device})
    if len(gpu) > 1:
        mean = sum(gpu[1:]) / len(gpu[1:])
        text = f"NVML saw a load of {share(gpu[0])} on device 0 and {listed([share(value) for value in gpu[1:]])} on the others."
        return Answer(
            question,
            text,
            {"device_0_share": gpu[0], "others_share": gpu[1:]},
            gpu[0] >= MORE_LOADED * mean,
        )
    if balance is None:
        return Answer(
            question,
            f"It cannot be told: {row.devices} devices, but no load of theirs.",
            {"devices": row.devices},
        )
    others = listed([f"{entry.device} in {share(entry.share)}" for entry in busy[1:]])
    text = f"Device 0 works in {share(busy[0].share)} of a step, {others}: {factor(balance)} times as long."
    return Answer(
        question,
        text,
        {"balance": balance, "busy_share": [entry.share for entry in busy]},
        balance >= MORE_LOADED,
    )


def where(row: Row) -> Answer:
    copied, step = row.observed.copying, row.step_seconds.median
    compute, update = row.metrics.compute_seconds or 0.0, row.metrics.optimizer_seconds or 0.0
    lost = sum(part.seconds for part in copied.values())
    alone = lost + update
    text = f"Of {seconds(step)} per step, the replicas compute together for {seconds(compute)} ({share(compute / step)}); "
    text += f"device 0 alone copies for {seconds(lost)} and updates for {seconds(update)}. "
    if alone > compute:
        text += f"So device 0 is the bottleneck, with {share(alone / step)} of the step for itself."
    else:
        text += f"The computation is the larger part, but the {share(alone / step)} of device 0 stay however many devices there are."
    evidence = {
        "compute_seconds": compute,
        "copying_seconds": lost,
        "optimizer_seconds": update,
        "step_seconds": step,
    }
    return Answer("Where is the bottleneck?", text, evidence)


def memory_on_0(row: Row) -> Answer:
    question = "Does device 0 need more memory?"
    first, others = row.peak_bytes[0], [entry.bytes for entry in row.peak_bytes[1:]]
    if not others:
        return Answer(
            question,
            f"It is the only device, with {size(first.bytes)}.",
            {"device_0_bytes": first.bytes},
        )
    state = first.optimizer or 0
    text = f"Device 0 holds {size(first.bytes)}, the fullest other one {size(max(others))}"
    if 0 < first.bytes - max(others) < 2 * state:
        text += f": only device 0 has the optimizer's state ({size(state)})"
    evidence = {
        "device_0_bytes": first.bytes,
        "other_bytes": max(others),
        "optimizer_bytes": state,
    }
    return Answer(question, text + ".", evidence, first.bytes > 1.01 * max(others))


MECHANISM = {
    "scatter": "splits the input",
    "replicate": "copies the model to the other devices",
    "gather": "collects the outputs on device 0",
    "reduce": "adds the gradients up on device 0",
}


def mechanism(lab: Measurements) -> list[Block]:
    row = lab[DP2]
    copied, step = row.observed.copying, row.step_seconds.median
    lines = []
    for kind, words in MECHANISM.items():
        part = copied.get(kind)
        counts = (
            cells.exact(part.times if part else None, INSIDE_CALLS),
            cells.duration(part.seconds if part else None, INSIDE_CALLS),
        )
        lines.append(
            (
                cells.name(kind),
                cells.words(words),
                *counts,
                cells.held_bytes(part.bytes if part else None, INSIDE_CALLS),
            )
        )
    columns = ("call", "what it does", "times per step", "time", "bytes")
    return [
        Table("What DataParallel does in one step", columns, tuple(lines), remarks_of([row])),
        replicates(row, copied.get("replicate")),
        Answer(
            "Does it split the input automatically?",
            f"One call with {row.batch.size} samples, and {listed(arrived(row))} arrived inside the model.",
            {"batch": row.batch.size, "arrived": arrived(row)},
            sum(arrived(row)) == row.batch.size and len(arrived(row)) > 1,
        ),
        collects(
            row, {kind: copied[kind] for kind in ("gather", "reduce") if kind in copied}, step
        ),
    ]


def replicates(row: Row, copy: Copying | None) -> Answer:
    shared = len(row.peak_bytes) < len(row.ranks[0].roles)
    held = [entry.parameters for entry in row.peak_bytes]
    text = f"Held as parameters: {listed([size(value) for value in held])} on {plural(len(held), 'device')}"
    text += f", which {plural(len(row.ranks[0].roles), 'replica')} share" if shared else ""
    if copy:
        amount = f" of {size(copy.bytes)}" if copy.bytes else ""
        text += f". The copying{amount} comes {often(copy.times)} per step and takes {seconds(copy.seconds)}"
    return Answer(
        "Does it replicate the model on each device?",
        f"{text}.",
        {"parameters_bytes": held, "replicate": copy.to_dict() if copy else None},
        all(value == held[0] for value in held),
    )


def collects(row: Row, found: dict[str, Copying], step: float) -> Answer:
    first = row.peak_bytes[0].device
    names = {"gather": "outputs", "reduce": "gradients"}
    told = [
        (f"{size(part.bytes)} of " if part.bytes else "")
        + f"{names[kind]} in {seconds(part.seconds)}"
        for kind, part in found.items()
    ]
    total = sum(part.seconds for part in found.values())
    text = f"On {first}: {listed(told)}, {share(total / step)} of a step of {seconds(step)}."
    if "reduce" not in found:
        text += " The gradients are added up inside the backward pass, where the time cannot be told apart."
    return Answer(
        "Does it collect outputs and gradients on device 0?",
        capital(text),
        {"device": first, "step_seconds": step}
        | {kind: part.to_dict() for kind, part in found.items()},
        bool(found),
    )


PARTS = (
    LabPart(
        "one device",
        "Train on one device: the baseline (`practical5_single.py`).",
        (SINGLE,),
        one_device,
    ),
    LabPart(
        "DataParallel",
        "Train the same with DataParallel over two devices (`practical5_dp.py`).",
        (DP2,),
        data_parallel,
    ),
    LabPart(
        "the comparison",
        "Compare both set-ups, measured in turns.",
        (SINGLE, DP2),
        comparison_table,
    ),
    LabPart(
        "the split, seen from inside the model",
        "Print device and shape in the model's forward pass.",
        (DP2,),
        inside,
    ),
    LabPart(
        "even and odd splits", "Give the same batch to 2, 3 and 5 devices.", (DP2, DP3, DP5), splits
    ),
    LabPart(
        "the bottleneck",
        "Watch load and memory of each device while it trains (`watch -n 1 nvidia-smi`).",
        (DP2,),
        bottleneck,
    ),
    LabPart(
        "what DataParallel does",
        "Find each statement about DataParallel in the recorded events.",
        (DP2,),
        mechanism,
    ),
)
