"""Practical 5, data parallelism with nn.DataParallel: its tables and answers, computed from what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paralab.analyse import cells
from paralab.analyse.blocks import Answer, Bar, Bars, Block, Part, Section, Split, Table
from paralab.analyse.lab import Lab, LabPart, Row, memory_of, memory_words, remarks_of, same_training, sharing, tell
from paralab.analyse.wording import (
    factor,
    faster,
    interval,
    listed,
    more_or_less,
    reaches,
    share,
    split_words,
    spread,
    times_as_fast,
)
from paralab.units import plural, seconds, size

SINGLE = "single"
DP2, DP3, DP5 = (f"DataParallel, {number} devices" for number in (2, 3, 5))
PROPORTIONAL = 0.9  # a speed-up of 90 % of the number of devices is called proportional
MORE_LOADED = 1.1  # device 0 works a tenth longer than the others
SRUN = "srun --partition=gpu --gres=gpu:3 --cpus-per-task=16 --mem=16G python practicals/practical5_dp.py"


def sections(comparison: dict[str, Any], folder: Path) -> tuple[Section, ...]:
    return tell(PARTS, comparison, folder)


def one_device(lab: Lab) -> list[Block]:
    row = lab[SINGLE]
    times, metrics, steps = row["step_seconds"], row["metrics"], row["observed"]["steps"]
    forward, backward, update = (metrics[f"{part}_seconds"] / times["median"] for part in ("forward", "backward", "optimizer"))
    columns = ("set-up", "step time", f"total time of {steps} steps", "memory of the device", "samples per second")
    table = Table("The baseline", columns, (_setup(row, total=True),), memory_words(row))
    return [
        table,
        Answer(
            "How long does one step take, and where does the time go?",
            f"{spread(times)}: {share(forward)} forward, {share(backward)} backward, {share(update)} optimiser.",
            {"step_seconds": times["median"], "forward_share": forward, "backward_share": backward, "optimizer_share": update},
        ),
        Answer("How much memory does the training take?", _memory_words(row), {"peak_bytes": memory_of(row)} | _parts(row)),
    ]


def _setup(row: Row, total: bool) -> tuple[Any, ...]:
    first = (cells.name(row["name"]), cells.step_time(row))
    if not total:
        return first
    return (
        *first,
        cells.duration(row["total_seconds"]),
        cells.held_bytes(memory_of(row)),
        cells.per_second(row["samples_per_second"]),
    )


def _parts(row: Row) -> dict[str, Any]:
    entry = row["peak_bytes"][0]
    return {f"{part}_bytes": entry[part] for part in ("parameters", "gradients", "optimizer", "activations") if entry.get(part)}


def _memory_words(row: Row) -> str:
    parts = {name.removesuffix("_bytes"): value for name, value in _parts(row).items()}
    biggest = max(parts, key=lambda name: float(parts[name]))
    held = listed([f"{name} {size(value)}" for name, value in parts.items()])
    return f"{size(memory_of(row))}: {held}. The largest part is the {biggest}."


def data_parallel(lab: Lab) -> list[Block]:
    row = lab[DP2]
    steps, rank = row["observed"]["steps"], row["ranks"][0]
    held = {entry["device"]: entry["bytes"] for entry in row["peak_bytes"]}
    table = Table(
        "The run",
        ("set-up", "processes", "devices used", "step time", f"total time of {steps} steps"),
        (
            (
                cells.name(row["name"]),
                cells.exact(row["processes"]),
                cells.exact(row["devices"]),
                cells.step_time(row),
                cells.duration(row["total_seconds"]),
            ),
        ),
        remarks_of([row]),
    )
    replicas = [
        (cells.name(role), cells.name(device), cells.exact(samples), cells.held_bytes(held.get(device)))
        for role, device, samples in zip(rank["roles"], rank["devices"], rank["split"], strict=True)
    ]
    per_device = Table("Each replica", ("replica", "device", "samples per step", "memory"), tuple(replicas), memory_words(row))
    used = list(dict.fromkeys(rank["devices"]))
    busy = [entry["device"] for entry in row["splits"]]
    return [
        table,
        per_device,
        Answer(
            "How many devices were used, by how many processes?",
            f"{plural(row['devices'], 'device')} ({listed(used)}) by {plural(row['processes'], 'process')}: samples arrived inside the "
            f"model on {listed(busy)} in the first step.",
            {"devices": row["devices"], "processes": row["processes"], "arrived_on": busy},
        ),
    ]


def comparison_table(lab: Lab) -> list[Block]:
    single, dp = lab[SINGLE], lab[DP2]
    ratio, devices = lab.ratio(SINGLE, DP2), dp["devices"]
    columns = ("set-up", "step time", "total time", "memory of device 0", "samples per second")
    table = Table(
        "Single device against DataParallel", columns, tuple(_setup(row, total=True) for row in (single, dp)), remarks_of([dp])
    )
    speed = Bar(DP2, ratio.value, ratio.low, ratio.high, times_as_fast(ratio))
    evidence = {
        "single_step_seconds": single["step_seconds"]["median"],
        "dp_step_seconds": dp["step_seconds"]["median"],
        "speed_up": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
    }
    reason, numbers = why(dp)
    before, after = memory_of(single), dp["peak_bytes"]
    total = sum(entry["bytes"] for entry in after)
    return [
        table,
        Bars(
            "Speed-up against one device",
            (Bar(SINGLE, 1.0, text="1"), speed),
            "times",
            1.0,
            "Error bar: 95 % interval over the rounds.",
        ),
        Answer("Did it get faster?", f"{_capital(times_as_fast(ratio))}. {reason}", evidence | numbers, faster(ratio)),
        proportional(dp, ratio, devices),
        Answer(
            "How does the memory differ?",
            f"Device 0 holds {size(after[0]['bytes'])}, {more_or_less(before, after[0]['bytes'])} than the single device's {size(before)}; "
            f"all devices together hold {size(total)}, because every replica has its own copy of the parameters and gradients.",
            {"single_bytes": before, "device_0_bytes": after[0]["bytes"], "all_devices_bytes": total},
        ),
        Answer(
            "Is it the same training?",
            f"DataParallel is {same_training(dp)}.",
            {"max_difference": (dp["parity"] or {}).get("max_difference"), "loss_difference": dp["loss_difference"]},
            bool(dp["parity"] and dp["parity"]["equal"]),
        ),
    ]


def proportional(row: Row, ratio: Any, devices: int) -> Answer:
    reached = reaches(ratio, PROPORTIONAL * devices)
    told = f"{plural(devices, 'device')} gave {factor(ratio.value)} times the speed {interval(ratio)}, "
    told += f"{share(ratio.value / devices)} of the proportional {devices} times"
    if reached is None:
        told += f"; {factor(PROPORTIONAL * devices)} lies within the interval, or there is none, so these rounds cannot tell"
    elif not reached and sharing(row):
        told += f"; {sharing(row)}"
    return Answer(
        "Is the speed-up proportional to the number of devices?",
        told + ".",
        {"speed_up": ratio.value, "devices": devices, "efficiency_share": ratio.value / devices},
        reached,
    )


def why(row: Row) -> tuple[str, dict[str, Any]]:
    """(what of the step is DataParallel's own work, the numbers)."""
    copied = row["observed"]["copying"]
    step = row["step_seconds"]["median"]
    lost = sum(part["seconds"] for part in copied.values())
    shared = sharing(row)
    sentences = []
    if copied:
        largest = max(copied, key=lambda kind: float(copied[kind]["seconds"]))
        sentences.append(
            f"Copying takes {seconds(lost)} of each step ({share(lost / step)}), most of it to {largest} ({seconds(copied[largest]['seconds'])})"
        )
    else:
        sentences.append("What the copying costs cannot be told apart: nn.DataParallel does it inside its calls")
    if shared:
        sentences.append(shared)
    return ". ".join(map(_capital, sentences)) + ".", {"copying_seconds": lost if copied else None, "copying_share": lost / step}


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def inside(lab: Lab) -> list[Block]:
    row = lab[DP2]
    shapes = [split["shape"] for split in row["splits"]]
    rows = tuple(
        (
            cells.exact(number),
            cells.name(split["device"]),
            cells.name(f"torch.Size({split['shape']})"),
            cells.name(f"Inside model on device {split['physical']}, shape: torch.Size({split['shape']})"),
        )
        for number, split in enumerate(row["splits"])
    )
    sizes, batch = [shape[0] for shape in shapes], row["batch"]["size"]
    whole = sum(sizes) == batch
    return [
        Table("What the model prints in its forward pass", ("replica", "device", "shape", "line"), rows),
        drawn_split(row),
        Answer(
            "What does the model see of the batch?",
            f"The program passes {batch} samples; inside, {plural(len(sizes), 'replica')} see {listed(sizes)}"
            + (
                f", together {sum(sizes)}. Only the first dimension is cut."
                if whole
                else f", together {sum(sizes)} and not {batch}."
            ),
            {"batch": batch, "inside": sizes},
        ),
    ]


def drawn_split(row: Row) -> Split:
    rank = row["ranks"][0]
    parts = tuple(
        Part(f"{role} · {device}", (samples,))
        for role, device, samples in zip(rank["roles"], rank["devices"], rank["split"], strict=True)
    )
    return Split(f"{row['name']}: {split_words(rank['split'])}", row["batch"]["size"], parts)


def splits(lab: Lab) -> list[Block]:
    rows = lab.given(DP2, DP3, DP5)
    seen = {row["devices_asked"]: row for row in map(_with_replicas, rows)}
    table = Table(
        "Who gets how many samples",
        ("devices", "batch", "batch ÷ devices, rounded up", "split, as it arrived inside the model", "equal"),
        tuple(
            (
                cells.exact(number),
                cells.exact(row["batch"]["size"]),
                cells.exact(-(-row["batch"]["size"] // number)),
                cells.split(arrived(row)),
                cells.yes_no(len(set(arrived(row))) == 1),
            )
            for number, row in seen.items()
        ),
    )
    even = [number for number, row in seen.items() if len(set(arrived(row))) == 1]
    odd = [number for number in seen if number not in even]
    as_rule = all(list(chunks(row["batch"]["size"], number)) == arrived(row) for number, row in seen.items())
    batch = rows[0]["batch"]["size"]
    arrivals = {str(number): arrived(row) for number, row in seen.items()}
    equal = [f"{batch} ÷ {n} = {batch // n} without remainder" for n in even]
    uneven = [f"{batch} ÷ {n} leaves a remainder of {batch % n}, so {split_words(arrivals[str(n)])}" for n in odd]
    return [
        table,
        *(drawn_split(row) for row in rows),
        Answer(
            "Who splits the batch?",
            f"DataParallel does, in its forward call: every set-up was given {batch} samples, and what arrived was {listed([split_words(a) for a in arrivals.values()])}"
            + (", in each case the chunks of torch.chunk." if as_rule else ", which is NOT what torch.chunk gives."),
            {"batch": batch, "arrived": arrivals, "as_torch_chunk": as_rule},
        ),
        Answer(
            "When is the split equal?",
            f"When the number of devices divides the batch: here {listed(equal)}."
            if even
            else f"Here never: none of {listed(odd)} divides {batch}.",
            {"batch": batch, "equal_with_devices": even},
        ),
        Answer(
            "When is it uneven, and why?",
            (
                f"{listed(uneven)}: every device gets the quotient rounded up, and the last one what is left."
                if odd
                else f"Here never: {listed(even)} divide {batch}."
            ),
            {"batch": batch, "uneven_with_devices": odd, "remainders": [batch % n for n in odd]},
        ),
        Answer(
            "How are three GPUs allocated on a cluster?",
            f"`{SRUN}`; this machine has {plural(len(lab.comparison['machine']['gpus']), 'GPU')}"
            + (", so the devices above are shares of its cores." if not lab.comparison["machine"]["gpus"] else "."),
            {"gpus_here": len(lab.comparison["machine"]["gpus"]), "gpus_asked_for": 3},
        ),
    ]


def _with_replicas(row: Row) -> Row:
    return row | {"devices_asked": len(row["ranks"][0]["roles"])}


def arrived(row: Row) -> list[int]:
    return [split["shape"][0] for split in row["splits"]]


def chunks(samples: int, parts: int) -> list[int]:
    """As torch.chunk: 64 over 3 -> 22 22 20. Parts that get nothing are left out, as nothing arrives there."""
    each = -(-samples // parts)
    return [size for part in range(parts) if (size := min(each, samples - part * each)) > 0]


def bottleneck(lab: Lab) -> list[Block]:
    row = lab[DP2]
    held = {entry["device"]: entry["bytes"] for entry in row["peak_bytes"]}
    gpu = {entry["device"]: entry for entry in row["metrics"]["load"]["gpu"]}
    unseen = row["metrics"]["balance"] is None
    reason = "nn.DataParallel's replicas run inside one call"
    busy = {entry["device"]: entry for entry in row["metrics"]["busy"]}
    columns = ["device", "busy share of a step", "memory"] + (["load (NVML)"] if gpu else [])
    rows = []
    for device in held:
        line = [
            cells.name(device),
            cells.measured_share(None if unseen else busy[device]["share"], reason),
            cells.held_bytes(held[device]),
        ]
        rows.append(
            tuple(
                line + ([cells.measured_share(gpu[device]["utilization"])] if device in gpu else [cells.missing("")] if gpu else [])
            )
        )
    cores = row["metrics"]["load"]["cores_per_rank"][0]
    note = "" if cores is None else f"The process used {cores:.2g} cores on average. "
    table = Table("Load and memory per device", tuple(columns), tuple(rows), note + memory_words(row))
    return [table, more_loaded(row), where(row), memory_on_0(row)]


def more_loaded(row: Row) -> Answer:
    question = "Is device 0 more loaded than the others?"
    gpu = {entry["device"]: entry["utilization"] for entry in row["metrics"]["load"]["gpu"]}
    if len(row["peak_bytes"]) < 2:
        return Answer(
            question, f"It is the only one: all replicas share {row['peak_bytes'][0]['device']}.", {"devices": row["devices"]}
        )
    if len(gpu) > 1:
        first, others = next(iter(gpu.values())), list(gpu.values())[1:]
        ratio = first / max(1e-9, sum(others) / len(others))
        text = f"NVML saw a load of {share(first)} on device 0 and {listed([share(o) for o in others])} on the others."
        return Answer(question, text, {"device_0_share": first, "others_share": others}, ratio >= MORE_LOADED)
    balance, busy = row["metrics"]["balance"], row["metrics"]["busy"]
    if balance is None:
        return Answer(question, "It cannot be told: there is no load of two devices.", {"devices": row["devices"]})
    text = f"Device 0 works in {share(busy[0]['share'])} of a step, {listed([entry['device'] for entry in busy[1:]])} in {listed([share(entry['share']) for entry in busy[1:]])}: "
    text += f"{factor(balance)} times as long."
    return Answer(question, text, {"balance": balance, "busy_share": [entry["share"] for entry in busy]}, balance >= MORE_LOADED)


def where(row: Row) -> Answer:
    copied, step = row["observed"]["copying"], row["step_seconds"]["median"]
    compute, update = row["metrics"]["compute_seconds"], row["metrics"]["optimizer_seconds"]
    question = "Where is the bottleneck?"
    if not copied:
        text = f"The copying cannot be told apart from the {seconds(compute)} of forward and backward in a step of {seconds(step)}."
        return Answer(question, text, {"compute_seconds": compute, "step_seconds": step})
    lost = sum(part["seconds"] for part in copied.values())
    alone = lost + update
    text = f"Of {seconds(step)}, all replicas compute for {seconds(compute)} ({share(compute / step)}), while device 0 alone copies for {seconds(lost)} and updates for {seconds(update)}. "
    if alone > compute:
        text += f"So device 0 is the bottleneck: its own work is {share(alone / step)} of the step."
    else:
        text += f"So the computation is the larger part; device 0's own work, {share(alone / step)} of the step, is what more devices cannot shorten."
    return Answer(
        question, text, {"compute_seconds": compute, "copying_seconds": lost, "optimizer_seconds": update, "step_seconds": step}
    )


def memory_on_0(row: Row) -> Answer:
    first, others = row["peak_bytes"][0]["bytes"], [entry["bytes"] for entry in row["peak_bytes"][1:]]
    question = "Does device 0 need more memory?"
    if not others:
        return Answer(question, f"It is the only device, with {size(first)}.", {"device_0_bytes": first})
    most = max(others)
    optimizer = row["peak_bytes"][0].get("optimizer") or 0
    text = f"Device 0 holds {size(first)}, the fullest other one {size(most)}"
    if first > most and optimizer > 0.5 * (first - most):
        text += f": only device 0 has the optimiser's state ({size(optimizer)})"
    return Answer(
        question, text + ".", {"device_0_bytes": first, "other_bytes": most, "optimizer_bytes": optimizer}, first > 1.01 * most
    )


MECHANISM = {
    "scatter": "splits the input",
    "replicate": "copies the model to the other devices",
    "gather": "collects the outputs on device 0",
    "reduce": "adds the gradients up on device 0",
}


def mechanism(lab: Lab) -> list[Block]:
    row = lab[DP2]
    copied, step = row["observed"]["copying"], row["step_seconds"]["median"]
    reason = "nn.DataParallel does it inside its calls"
    lines = []
    for kind, words in MECHANISM.items():
        part = copied.get(kind)
        lines.append(
            (
                cells.name(kind),
                cells.name(words),
                cells.exact(part["times"] if part else None, reason),
                cells.duration(part["seconds"] if part else None, reason),
                cells.held_bytes(part["bytes"] if part else None, reason),
            )
        )
    table = Table(
        "What DataParallel does in one step",
        ("call", "what it does", "times per step", "time", "bytes"),
        tuple(lines),
        remarks_of([row]),
    )
    sizes, batch = arrived(row), row["batch"]["size"]
    copies = [entry["parameters"] for entry in row["peak_bytes"]]
    first = row["peak_bytes"][0]["device"]
    return [table, *_statements(copied, step, copies, sizes, batch, first)]


def _statements(copied: dict[str, Any], step: float, copies: list[int], sizes: list[int], batch: int, first: str) -> list[Answer]:
    replicate, gather, reduce = (copied.get(kind) for kind in ("replicate", "gather", "reduce"))
    held = f"{plural(len(copies), 'device')} held {listed([size(value) for value in copies])} of parameters"
    often = (
        f"; the copying of {size(replicate['bytes'])} came {plural(replicate['times'], 'time')} per step and took {seconds(replicate['seconds'])}"
        if replicate
        else ""
    )
    collected = (
        f"{size(gather['bytes'])} of outputs in {seconds(gather['seconds'])}, {size(reduce['bytes'])} of gradients in {seconds(reduce['seconds'])} ({share((gather['seconds'] + reduce['seconds']) / step)} of the step)"
        if gather and reduce
        else ""
    )
    return [
        Answer(
            "Does it replicate the model on each device?",
            f"{held}{often}.",
            {"parameters_bytes": copies, "replicate": replicate},
            all(value == copies[0] for value in copies),
        ),
        Answer(
            "Does it split the input automatically?",
            f"One call with {batch} samples, and {listed(sizes)} arrived inside the model.",
            {"batch": batch, "arrived": sizes},
            sum(sizes) == batch and len(sizes) > 1,
        ),
        Answer(
            "Does it collect outputs and gradients on device 0?",
            f"On {first}: {collected}."
            if collected
            else f"On {first}, inside calls that cannot be told apart: {plural(batch, 'output')} came back there for the loss.",
            {"device": first, "batch": batch, "gather": gather, "reduce": reduce},
            True,
        ),
    ]


PARTS = (
    LabPart("one device", "Train on one device: the baseline (`practical5_single.py`).", (SINGLE,), one_device),
    LabPart(
        "DataParallel",
        "Train the same model on the same batches with DataParallel over two devices (`practical5_dp.py`).",
        (DP2,),
        data_parallel,
    ),
    LabPart("the comparison", "Compare both set-ups, measured in turns.", (SINGLE, DP2), comparison_table),
    LabPart("the split, seen from inside the model", "Print device and shape inside the model's forward pass.", (DP2,), inside),
    LabPart("even and odd splits", "Give the same batch to 2, 3 and 5 devices.", (DP2, DP3, DP5), splits),
    LabPart(
        "the bottleneck", "Look at load and memory of each device while it trains (`watch -n 1 nvidia-smi`).", (DP2,), bottleneck
    ),
    LabPart("what DataParallel does", "Find each statement about DataParallel in the recorded events.", (DP2,), mechanism),
)
