"""Practical 6, DistributedDataParallel and collective communication: its tables and answers, computed from what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paralab.analyse import cells
from paralab.analyse.blocks import Answer, Bar, Bars, Block, Cell, Part, Section, Split, Table
from paralab.analyse.lab import Lab, LabPart, Row, memory_of, memory_words, remarks_of, same_training, sharing, tell
from paralab.analyse.metrics import RULE
from paralab.analyse.practical5 import DP2, MORE_LOADED, SINGLE, proportional
from paralab.analyse.uncertainty import Ratio, speed_up
from paralab.analyse.wording import factor, faster, interval, listed, share, split_words, times_as_fast
from paralab.units import plural, seconds, size

DDP2, DP4, DDP4 = "DDP, 2 ranks", "DataParallel, 4 devices", "DDP, 4 ranks"
ODD = "DDP, one sample more"
SMALL, LARGE = "DDP, small buckets", "DDP, one bucket"


def sections(comparison: dict[str, Any], folder: Path) -> tuple[Section, ...]:
    return tell(PARTS, comparison, folder)


def ranks(lab: Lab) -> list[Block]:
    row = lab[DDP2]
    world = len(row["ranks"])
    table = Table(
        "Every process",
        ("rank", "local rank", "world size", "device", "process", "line"),
        tuple(
            (
                cells.exact(rank["rank"]),
                cells.exact(rank["local_rank"]),
                cells.exact(world),
                cells.name(listed(rank["devices"])),
                Cell(str(rank["pid"]), rank["pid"], 0, float("inf")),  # another number in every run
                cells.name(f"Rank: {rank['rank']} | Local Rank: {rank['local_rank']}"),
            )
            for rank in row["ranks"]
        ),
        remarks_of([row]),
    )
    pids = [rank["pid"] for rank in row["ranks"]]
    pairs = [f"rank {rank['rank']} → {listed(rank['devices'])}" for rank in row["ranks"]]
    own = len({device for rank in row["ranks"] for device in rank["devices"]}) == world
    same = all(rank["rank"] == rank["local_rank"] for rank in row["ranks"])
    return [
        table,
        Answer(
            "How many processes are there?",
            f"{world}, one per rank, with {plural(len(set(pids)), 'different process number')} ({listed(pids)}).",
            {"processes": world, "process_numbers": pids},
        ),
        Answer(
            "Which device does each rank use?",
            f"{listed(pairs)}: "
            + ("each rank has a device of its own." if own else "the ranks share a device, because there are not enough."),
            {"world_size": world, "map": pairs, "own_device_each": own},
        ),
        Answer(
            "Is the local rank the same as the rank?",
            f"All {plural(world, 'rank')} are on one machine, so local rank and rank are {'equal' if same else 'NOT equal'}; they differ from the second machine on.",
            {"ranks": [rank["rank"] for rank in row["ranks"]], "local_ranks": [rank["local_rank"] for rank in row["ranks"]]},
            same,
        ),
    ]


def manual_split(lab: Lab) -> list[Block]:
    even, odd = lab[DDP2], lab[ODD]
    table = Table(
        "BATCH_SIZE // world_size",
        ("BATCH_SIZE", "world size", "BATCH_SIZE // world_size", "samples of each rank", "samples that // would drop"),
        tuple(
            (
                cells.exact(row["batch"]["size"]),
                cells.exact(len(row["ranks"])),
                cells.exact(row["batch"]["size"] // len(row["ranks"])),
                cells.split(arrived(row)),
                cells.exact(row["batch"]["size"] % len(row["ranks"])),
            )
            for row in (even, odd)
        ),
        "The samples are counted inside the model.",
    )
    batch, world, size_odd = even["batch"]["size"], len(even["ranks"]), odd["batch"]["size"]
    lost = size_odd % world
    kept = sum(arrived(odd)) == size_odd
    proof = odd["parity"] or {}
    return [
        table,
        drawn_split(even),
        drawn_split(odd),
        Answer(
            "How is the batch distributed?",
            f"Each rank takes its own part: {batch} // {world} = {batch // world}, and {split_words(arrived(even))} arrived inside the models. "
            "No process splits for the others.",
            {"batch": batch, "world_size": world, "arrived": arrived(even)},
        ),
        Answer(
            f"What happens with a batch of {size_odd}?",
            f"`{size_odd} // {world}` gives {size_odd // world} per rank and drops {plural(lost, 'sample')}. Here {split_words(arrived(odd))} arrived"
            + (
                f": nothing is dropped, each rank's loss is weighted by its share, and the training is {same_training(odd)}."
                if kept
                else "."
            ),
            {
                "batch": size_odd,
                "dropped_by_floor_division": lost,
                "arrived": arrived(odd),
                "max_difference": proof.get("max_difference"),
            },
        ),
    ]


def arrived(row: Row) -> list[int]:
    return [split["shape"][0] for split in row["splits"]]


def drawn_split(row: Row) -> Split:
    parts = tuple(Part(f"rank {rank['rank']} · {listed(rank['devices'])}", (rank["samples_per_step"],)) for rank in row["ranks"])
    return Split(f"{row['name']}: {row['batch']['arithmetic']}", row["batch"]["size"], parts)


def communication(lab: Lab) -> list[Block]:
    row = lab[DDP2]
    metrics, seen = row["metrics"], row["observed"]["buckets"]
    rows = []
    for number, (found, timed) in enumerate(zip(seen, metrics["buckets"], strict=True)):
        rows.append(
            (
                cells.exact(number),
                cells.held_bytes(found["bytes"]),
                cells.measured_share(found["share_of_backward"]),
                cells.duration(timed["transfer_seconds"]),
            )
        )
    columns = ("all-reduce", "data", "begins after this share of backward()", "transfer")
    note = f"Rank 0, last step. The gradients of one step are {size(row['bytes_per_step'])}."
    first, last = (seen[0]["share_of_backward"], seen[-1]["share_of_backward"]) if seen else (None, None)
    hidden = metrics["overlap"]
    return [
        Table("The all-reduces of one step", columns, tuple(rows), note),
        Answer(
            "When does the communication happen?",
            f"Inside `loss.backward()`: the first all-reduce begins after {share(first)} of it, the last after {share(last)}, each when the last "
            f"gradient of its bucket is ready. {share(hidden)} of the communication is hidden behind computation.",
            {"first_share": first, "last_share": last, "hidden_share": hidden},
        ),
        Answer(
            "Which buckets, and how much data?",
            f"{plural(len(seen), 'bucket')} of {listed([size(found['bytes']) for found in seen])}: {size(row['bytes_per_step'])} per step and rank, "
            f"once the {size(lab.comparison['workload']['parameter_bytes'])} of gradients.",
            {"buckets_bytes": [found["bytes"] for found in seen], "step_bytes": row["bytes_per_step"]},
        ),
        why_needed(row),
        ten_percent(row),
    ]


def why_needed(row: Row) -> Answer:
    parts, proof = row["observed"]["loss_parts"], row["parity"] or {}
    world, batch = len(parts), row["batch"]["size"]
    own = [part * batch / rank["samples_per_step"] for part, rank in zip(parts, row["ranks"], strict=True)]
    differ = len({round(value, 6) for value in own}) > 1
    text = (
        f"The {world} ranks see different samples: in the first step their losses are {listed([f'{value:.4f}' for value in own])}"
    )
    text += ", so their gradients differ too. " if differ else ". "
    if proof.get("equal"):
        text += f"With the all-reduce all ranks hold the same parameters, {same_training(row)}; without it they would drift apart."
    else:
        text += f"With the all-reduce the training is {same_training(row)}."
    return Answer(
        "Why is it needed?", text, {"losses": own, "max_difference": proof.get("max_difference"), "equal": proof.get("equal")}
    )


def ten_percent(row: Row) -> Answer:
    metrics = row["metrics"]
    text = f"The communication takes {seconds(metrics['communication_seconds'])}, {share(metrics['communication_share'])} of the step; "
    text += (
        f"{share(metrics['exposed_share'])} of the step is waiting that nothing hides. The rule of thumb is below {share(RULE)}."
    )
    evidence = {name: metrics[name] for name in ("communication_seconds", "communication_share", "exposed_share")}
    return Answer("Does the communication stay below a tenth of the step?", text, evidence, metrics["keeps_rule"])


def bucket_sizes(lab: Lab) -> list[Block]:
    names = (SMALL, DDP2, LARGE)
    rows = []
    for row in lab.given(*names):
        metrics = row["metrics"]
        rows.append(
            (
                cells.name(row["name"]),
                cells.exact(row["all_reduces_per_step"]),
                cells.step_time(row),
                cells.duration(metrics["communication_seconds"]),
                cells.duration(metrics["exposed_communication_seconds"]),
                cells.measured_share(metrics["overlap"]),
            )
        )
    columns = ("set-up", "buckets", "step time", "communication", "exposed", "hidden share")
    small, large = lab[SMALL], lab[LARGE]
    ratio = lab.ratio(LARGE, SMALL)
    hides = (small["metrics"]["overlap"] or 0.0) - (large["metrics"]["overlap"] or 0.0)
    default = lab.ratio(DDP2, SMALL)
    evidence = {
        "small_buckets": small["all_reduces_per_step"],
        "large_buckets": large["all_reduces_per_step"],
        "small_hidden_share": small["metrics"]["overlap"],
        "large_hidden_share": large["metrics"]["overlap"],
    }
    best = min(names, key=lambda name: float(lab[name]["step_seconds"]["median"]))
    return [
        Table(
            "Bucket sizes",
            columns,
            tuple(rows),
            f"PyTorch's default is 25 MB, the first bucket 1 MB: here {plural(int(lab[DDP2]['all_reduces_per_step']), 'bucket')}.",
        ),
        Answer(
            "Do small buckets hide more of the communication?",
            f"With {plural(int(small['all_reduces_per_step']), 'bucket')} {share(small['metrics']['overlap'])} is hidden, with "
            f"{plural(int(large['all_reduces_per_step']), 'bucket')} {share(large['metrics']['overlap'])}: the sooner a bucket is full, the sooner its all-reduce begins.",
            evidence,
            hides > 0.02,
        ),
        Answer(
            "Is that faster?",
            f"Small buckets against one bucket: {times_as_fast(ratio)}; against the default: {times_as_fast(default)}. "
            f"The shortest median has {best} ({seconds(lab[best]['step_seconds']['median'])}).",
            {"speed_up": ratio.value, "low": ratio.low, "high": ratio.high, "against_default": default.value},
            faster(ratio),
        ),
    ]


def balance(lab: Lab) -> list[Block]:
    dp, ddp = lab[DP2], lab[DDP2]
    rows: list[tuple[Cell, ...]] = []
    for row in (dp, ddp):
        load = {entry["device"]: entry["utilization"] for entry in row["metrics"]["load"]["gpu"]}
        unseen = row["metrics"]["balance"] is None and row["strategy"] == "dp"
        busy = {(int(entry["rank"]), entry["device"]): entry["share"] for entry in row["metrics"]["busy"]}
        for entry in row["peak_bytes"]:
            value = None if unseen else busy[entry["rank"], entry["device"]]
            line = (
                cells.name(f"{row['name']}: rank {entry['rank']}, {entry['device']}"),
                cells.measured_share(value, "the replicas run inside one call"),
                cells.held_bytes(entry["bytes"]),
            )
            rows.append((*line, cells.measured_share(load.get(entry["device"]))) if load else line)
    gpu = ("load (NVML)",) if len(rows[0]) > 3 else ()
    table = Table("Load and memory", ("device", "busy share of a step", "memory", *gpu), tuple(rows), memory_words(ddp))
    memory = [entry["bytes"] for entry in ddp["peak_bytes"]]
    spread = max(memory) / min(memory)
    even = ddp["metrics"]["balance"]
    dp_even = dp["metrics"]["balance"]
    other = f" With DataParallel it was {factor(dp_even)} times." if dp_even else ""
    blocks: list[Block] = [table]
    if even is not None:
        blocks.append(
            Answer(
                "Is the load balanced?",
                f"Rank 0's device works {factor(even)} times as long as the others.{other}",
                {"ddp_balance": even, "dp_balance": dp_even},
                1 / MORE_LOADED < even < MORE_LOADED,
            )
        )
    blocks += [
        Answer(
            "Is the memory balanced?",
            f"The ranks hold {listed([size(value) for value in memory])}. With DataParallel the devices hold {listed([size(e['bytes']) for e in dp['peak_bytes']])}.",
            {"ddp_bytes": memory, "dp_bytes": [entry["bytes"] for entry in dp["peak_bytes"]]},
            spread < 1.02,
        ),
        still_bottleneck(dp, ddp),
    ]
    return blocks


def still_bottleneck(dp: Row, ddp: Row) -> Answer:
    even, late = ddp["metrics"]["balance"], ddp["metrics"]["straggler"]
    first = (even is not None and even >= MORE_LOADED) or bool(late and int(late["rank"]) == 0)
    copied = sum(part["seconds"] for part in dp["observed"]["copying"].values())
    text = (
        f"With DDP the others wait for rank {int(late['rank'])} for {share(late['share_of_step'])} of a step. "
        if late
        else "With DDP no rank is waited for step after step. "
    )
    if copied:
        text += f"DataParallel's device 0 copies for {seconds(copied)} in every step while the others wait; with DDP each rank updates its own copy, and the ranks exchange {size(ddp['bytes_per_step'])} as equals."
    else:
        text += f"Each rank updates its own copy, and the ranks exchange {size(ddp['bytes_per_step'])} as equals."
    return Answer(
        "Is device 0 still a bottleneck?",
        text,
        {"balance": even, "straggler": late, "dp_copying_seconds": copied or None, "step_bytes": ddp["bytes_per_step"]},
        first,
    )


def dp_against_ddp(lab: Lab) -> list[Block]:
    dp, ddp = lab[DP2], lab[DDP2]
    pairs = [(2, DP2, DDP2)] + ([(4, DP4, DDP4)] if DP4 in lab and DDP4 in lab else [])
    lines: list[tuple[Cell, ...]] = [
        (cells.name("processes"), cells.exact(dp["processes"]), cells.exact(ddp["processes"])),
        (
            cells.name("data split"),
            cells.name(f"by DataParallel: {split_words(dp['ranks'][0]['split'])}"),
            cells.name(f"by each rank: {split_words(arrived(ddp))}"),
        ),
        (cells.name("device usage (busy share)"), *(_usage(row) for row in (dp, ddp))),
        (cells.name("communication per step"), *(_communication(row) for row in (dp, ddp))),
        (cells.name("step time"), cells.step_time(dp), cells.step_time(ddp)),
    ]
    for number, left, right in pairs:
        lines.append(
            (cells.name(f"speed-up with {number} devices"), *(cells.ratio(lab.ratio(SINGLE, name)) for name in (left, right)))
        )
        lines.append(
            (
                cells.name(f"efficiency with {number} devices"),
                *(cells.measured_share(lab[name]["efficiency"]) for name in (left, right)),
            )
        )
    lines.append((cells.name("memory of the fullest device"), cells.held_bytes(memory_of(dp)), cells.held_bytes(memory_of(ddp))))
    note = remarks_of([dp, ddp, *lab.given(DP4, DDP4)])
    ratio = lab.ratio(DP2, DDP2)
    bars = tuple(_bar(lab, name) for _, *names in pairs for name in names)
    return [
        Table("DataParallel against DDP", ("", "DataParallel", "DDP"), tuple(lines), note),
        Bars("Speed-up against one device", bars, "times", 1.0, "Error bars: 95 % interval over the rounds."),
        Answer(
            "Is DDP faster than DataParallel?",
            f"DDP is {times_as_fast(ratio)}: {seconds(ddp['step_seconds']['median'])} against {seconds(dp['step_seconds']['median'])} per step."
            if ratio.verdict != "no measurable difference"
            else f"{times_as_fast(ratio).capitalize()}: {seconds(ddp['step_seconds']['median'])} against {seconds(dp['step_seconds']['median'])} per step.",
            {
                "speed_up": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "dp_seconds": dp["step_seconds"]["median"],
                "ddp_seconds": ddp["step_seconds"]["median"],
            },
            faster(ratio),
        ),
        which_scales(lab, pairs[-1]),
        reasons(lab, ratio),
        proportional(ddp, lab.ratio(SINGLE, DDP2), ddp["devices"]),
    ]


def _usage(row: Row) -> Cell:
    if row["metrics"]["balance"] is None and row["strategy"] == "dp":
        return cells.missing("the replicas run inside one call")
    shares = [entry["share"] for entry in row["metrics"]["busy"]]
    mean = sum(shares) / len(shares)
    return Cell(" and ".join(share(value) for value in shares), mean, min(shares), max(shares))


def _communication(row: Row) -> Cell:
    return (
        cells.duration(row["metrics"]["communication_seconds"])
        if row["metrics"]["communication_seconds"]
        else cells.missing("inside nn.DataParallel's calls")
    )


def _bar(lab: Lab, name: str) -> Bar:
    ratio = lab.ratio(SINGLE, name)
    return Bar(name, ratio.value, ratio.low, ratio.high, times_as_fast(ratio))


def which_scales(lab: Lab, pair: tuple[int, str, str]) -> Answer:
    number, left, right = pair
    ratio = speed_up(lab[left]["round_seconds"], lab[right]["round_seconds"])
    told = [f"{name} {factor(lab.ratio(SINGLE, name).value)} times {interval(lab.ratio(SINGLE, name))}" for name in (left, right)]
    winner = {"faster": "DDP scales better", "slower": "DataParallel scales better"}.get(
        ratio.verdict, "neither scales measurably better"
    )
    only = "" if number > 2 else f"; with {plural(lab.comparison['machine']['cores'], 'core')} only 2 devices were tried"
    shared = sharing(lab[right])
    return Answer(
        "Which one scales better?",
        f"Against one device, {listed(told)}: {winner} up to {number} devices{only}." + (f" But {shared}." if shared else ""),
        {"devices": number, "dp_efficiency": lab[left]["efficiency"], "ddp_efficiency": lab[right]["efficiency"]},
    )


def reasons(lab: Lab, ratio: Ratio) -> Answer:
    """What each of them pays that one device does not."""
    dp, ddp = lab[DP2], lab[DDP2]
    copied = sum(part["seconds"] for part in dp["observed"]["copying"].values())
    exposed, waiting = ddp["metrics"]["exposed_communication_seconds"], ddp["metrics"]["exposed_waiting_seconds"]
    compute = [row["metrics"]["compute_seconds"] for row in (lab[SINGLE], dp, ddp)]
    left = f"DataParallel adds {seconds(copied)} of copying per step" if copied else "DataParallel's copying cannot be told apart"
    text = f"{left}, DDP {seconds(exposed)} of communication that nothing hides and {seconds(waiting)} of waiting for each other. "
    text += f"Forward and backward take {seconds(compute[0])} on one device, {seconds(compute[1])} with DataParallel and {seconds(compute[2])} with DDP"
    if copied and ratio.verdict in ("faster", "slower"):
        cheaper = copied < exposed + waiting
        agrees = cheaper == (ratio.verdict == "slower")
        if agrees:
            text += f": the {'copying' if cheaper else 'communication'} is the cheaper of the two here"
    evidence = {
        "dp_copying_seconds": copied or None,
        "ddp_exposed_seconds": exposed,
        "ddp_waiting_seconds": waiting,
        "compute_seconds": compute,
    }
    return Answer("Why?", text + ".", evidence)


PARTS = (
    LabPart(
        "ranks and processes",
        "Train with DDP, one process per device (`torchrun --nproc_per_node=2 practical6_ddp.py`).",
        (DDP2,),
        ranks,
    ),
    LabPart(
        "the manual split",
        "Each rank takes its part of the batch: once a number that can be divided, once one sample more.",
        (DDP2, ODD),
        manual_split,
    ),
    LabPart("communication inside backward()", "Time every all-reduce of DDP with a communication hook.", (DDP2,), communication),
    LabPart(
        "bucket sizes",
        "Change `bucket_cap_mb`: small buckets, the default, all gradients in one.",
        (SMALL, DDP2, LARGE),
        bucket_sizes,
    ),
    LabPart(
        "load and memory of each device", "Compare the load and memory of each device with DataParallel's.", (DP2, DDP2), balance
    ),
    LabPart(
        "DataParallel against DDP", "Measure both and one device in turns.", (SINGLE, DP2, DDP2), dp_against_ddp, likes=(DP4, DDP4)
    ),
)
