"""Practical 6, DistributedDataParallel and collective communication: its tables and answers,
computed from what was measured."""

from __future__ import annotations

from msgspec.structs import replace

from paralab.analyse import table_cells as cells
from paralab.analyse.blocks import Answer, Bar, Bars, Block, Cell, Table, Timeline
from paralab.analyse.confidence import Ratio
from paralab.analyse.figures import timeline
from paralab.analyse.metrics import RULE
from paralab.analyse.phrases import (
    alike,
    capital,
    factor,
    faster,
    interval,
    listed,
    machine_words,
    share,
    speed,
    split_words,
)
from paralab.analyse.recording import Recording
from paralab.course.batch_splits import arrived
from paralab.course.configurations import DDP2, DDP4, DP2, DP4, LARGE, ODD, SINGLE, SMALL
from paralab.course.measurements import (
    LabPart,
    Measurements,
    Row,
    drawn,
    drawn_split,
    is_equal,
    max_difference,
    memory_of,
    memory_words,
    remarks_of,
    same_training,
    sharing,
)
from paralab.course.practical5 import MORE_LOADED, proportional
from paralab.units import plural, seconds, size

HIDES_MORE = 0.02  # of the communication, to be called more


def ranks(lab: Measurements) -> list[Block]:
    row = lab[DDP2]
    world = len(row.ranks)
    lines = [
        (
            cells.exact(rank.rank),
            cells.exact(rank.local_rank),
            cells.exact(world),
            cells.name(listed(rank.devices)),
            cells.words(rank.pid),
            cells.name(f"Rank: {rank.rank} | Local Rank: {rank.local_rank}"),
        )
        for rank in row.ranks
    ]
    pids = [rank.pid for rank in row.ranks]
    pairs = [f"rank {rank.rank} → {listed(rank.devices)}" for rank in row.ranks]
    own = len({device for rank in row.ranks for device in rank.devices}) == world
    same = all(rank.rank == rank.local_rank for rank in row.ranks)
    numbers = {
        "ranks": [rank.rank for rank in row.ranks],
        "local_ranks": [rank.local_rank for rank in row.ranks],
    }
    return [
        Table(
            "Every process",
            ("rank", "local rank", "world size", "device", "process", "line"),
            tuple(lines),
            remarks_of([row]),
        ),
        Answer(
            "How many processes are there?",
            f"{plural(world, 'process')}, one per rank, with the process numbers {listed(pids)}.",
            {"processes": world, "process_numbers": pids},
        ),
        Answer(
            "Which device does each rank use?",
            f"{capital(listed(pairs))}: "
            + (
                "each has one of its own."
                if own
                else "they share one, because there are not enough."
            ),
            {"world_size": world, "map": pairs, "own_device_each": own},
        ),
        Answer(
            "Is the local rank the same as the rank?",
            f"Ranks {listed(numbers['ranks'])} have the local ranks {listed(numbers['local_ranks'])}. A local rank counts "
            "the processes of "
            "one machine, so the two differ from the second machine on.",
            numbers,
            same,
        ),
    ]


def manual_split(lab: Measurements) -> list[Block]:
    even, odd = lab[DDP2], lab[ODD]
    lines = [
        (
            cells.exact(row.batch.size),
            cells.exact(len(row.ranks)),
            cells.exact(row.batch.size // len(row.ranks)),
            cells.split(arrived(row)),
            cells.exact(row.batch.size % len(row.ranks)),
        )
        for row in (even, odd)
    ]
    columns = (
        "BATCH_SIZE",
        "world size",
        "BATCH_SIZE // world_size",
        "samples of each rank",
        "samples that // would drop",
    )
    batch, world, larger = even.batch.size, len(even.ranks), odd.batch.size
    distributed = f"Each rank takes its own part: {batch} // {world} = {batch // world}, and {split_words(arrived(even))} arrived inside "
    distributed += "the models. No process splits for the others."
    uneven = f"`{larger} // {world}` is {larger // world}, which drops {plural(larger % world, 'sample')}. Here "
    uneven += f"{split_words(arrived(odd))} "
    if sum(arrived(odd)) == larger:
        uneven += f"arrived, so nothing was dropped; each loss is weighted by its share, and the training is {same_training(odd)}."
    else:
        uneven += f"arrived: {larger - sum(arrived(odd))} are missing."
    evidence = {
        "batch": larger,
        "dropped_by_floor_division": larger % world,
        "arrived": arrived(odd),
    }
    return [
        Table(
            "BATCH_SIZE // world_size",
            columns,
            tuple(lines),
            "The samples are counted inside the model.",
        ),
        *drawn_split(even),
        *drawn_split(odd),
        Answer(
            "How is the batch distributed?",
            distributed,
            {"batch": batch, "world_size": world, "arrived": arrived(even)},
        ),
        Answer(
            "What happens with one sample more?",
            uneven,
            evidence | {"max_difference": max_difference(odd)},
        ),
    ]


def communication(lab: Measurements) -> list[Block]:
    row = lab[DDP2]
    metrics, seen = row.metrics, row.observed.buckets
    lines = [
        (
            cells.exact(number),
            cells.held_bytes(found.bytes),
            cells.measured_share(found.share_of_backward),
            cells.duration(timed.transfer_seconds),
        )
        for number, (found, timed) in enumerate(zip(seen, metrics.buckets, strict=False))
    ]
    first, last = seen[0].share_of_backward, seen[-1].share_of_backward
    when = f"Inside `loss.backward()`: the first all-reduce begins after {share(first)} of it, the last after {share(last)}, "
    when += "each as soon "
    when += f"as the gradients of its bucket are there. {share(metrics.overlap)} of the communication is hidden behind computation."
    gradients = lab.comparison.workload.parameter_bytes
    amount = f"{plural(len(seen), 'bucket')} of {listed([size(found.bytes) for found in seen])}: "
    amount += f"{size(row.bytes_per_step)} per step "
    amount += (
        "and rank, every gradient once."
        if row.bytes_per_step == gradients
        else f"and rank, for {size(gradients)} of gradients."
    )
    columns = ("all-reduce", "data", "begins after this share of backward()", "transfer")
    return [
        Table("The all-reduces of one step", columns, tuple(lines), "Rank 0, the last step."),
        *drawn(lab, DDP2, lambda rounds: steps_of(rounds[-1])),
        Answer(
            "When does the communication happen?",
            when,
            {"first_share": first, "last_share": last, "hidden_share": metrics.overlap},
        ),
        Answer(
            "Which buckets, and how much data?",
            amount,
            {
                "buckets_bytes": [found.bytes for found in seen],
                "step_bytes": row.bytes_per_step,
                "gradients_bytes": gradients,
            },
        ),
        why_needed(row),
        ten_percent(row),
    ]


def steps_of(recording: Recording) -> Timeline | None:
    picture = timeline(recording)
    return replace(picture, title="The last steps of DDP") if picture else None


def why_needed(row: Row) -> Answer:
    parts, batch = row.observed.loss_parts, row.batch.size
    own = [
        part * batch / rank.samples_per_step for part, rank in zip(parts, row.ranks, strict=True)
    ]
    differ = len({f"{value:.6f}" for value in own}) > 1
    text = f"The ranks train on different samples: in the first step their losses are {listed([f'{value:.4f}' for value in own])}"
    text += ", and so their gradients differ. " if differ else ". "
    if is_equal(row):
        text += f"The all-reduce adds them up, and all ranks hold the same parameters, {same_training(row)}."
    else:
        text += f"With the all-reduce the training is {same_training(row)}."
    return Answer(
        "Why is it needed?",
        text,
        {"losses": own, "max_difference": max_difference(row), "equal": is_equal(row)},
    )


def ten_percent(row: Row) -> Answer:
    metrics = row.metrics
    text = f"The communication takes {seconds(metrics.communication_seconds)}, {share(metrics.communication_share)} of "
    text += "the step; "
    text += f"{share(metrics.exposed_share)} of the step is communication that nothing hides. The handbook's bar is {share(RULE)}."
    evidence = {
        name: metrics[name]
        for name in ("communication_seconds", "communication_share", "exposed_share")
    }
    return Answer(
        "Does the communication stay below a tenth of the step?",
        text,
        evidence,
        metrics.keeps_rule,
    )


def bucket_sizes(lab: Measurements) -> list[Block]:
    names = (SMALL, DDP2, LARGE)
    lines = [
        (
            cells.name(row.name),
            cells.exact(row.all_reduces_per_step),
            cells.step_time(row),
            cells.duration(row.metrics.communication_seconds),
            cells.duration(row.metrics.exposed_communication_seconds),
            cells.measured_share(row.metrics.overlap),
        )
        for row in lab.given(*names)
    ]
    small, large = lab[SMALL], lab[LARGE]
    counts = [plural(int(row.all_reduces_per_step), "bucket") for row in (small, large)]
    hidden = [row.metrics.overlap or 0.0 for row in (small, large)]
    more = hidden[0] > hidden[1] + HIDES_MORE
    hides = f"With {counts[0]}, {share(hidden[0])} of the communication is hidden, with {counts[1]} {share(hidden[1])}"
    hides += (
        ": a small bucket is full sooner, so its all-reduce begins while others are still computed."
        if more
        else "."
    )
    ratio, default = lab.ratio(LARGE, SMALL), lab.ratio(DDP2, SMALL)
    best = min(names, key=lambda name: float(lab[name].step_seconds.median))
    quick = f"{speed('Against one bucket, small buckets', ratio).replace('buckets is', 'buckets are').replace('makes', 'make')}; "
    quick += f"against the default {factor(default.value)} times {interval(default)}. The shortest median step has {best}, "
    quick += f"{seconds(lab[best].step_seconds.median)}."
    columns = ("set-up", "buckets", "step time", "communication", "exposed", "hidden share")
    return [
        Table(
            "Bucket sizes",
            columns,
            tuple(lines),
            "PyTorch's default is 25 MB, and 1 MB for the first bucket.",
        ),
        Answer(
            "Do small buckets hide more of the communication?",
            hides,
            {
                "buckets": [small.all_reduces_per_step, large.all_reduces_per_step],
                "hidden_share": hidden,
            },
            more,
        ),
        Answer(
            "Are small buckets faster than one bucket?",
            quick,
            {
                "speed_up": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "against_default": default.value,
                "shortest": best,
            },
            faster(ratio),
        ),
    ]


def balance(lab: Measurements) -> list[Block]:
    dp, ddp = lab[DP2], lab[DDP2]
    lines: list[tuple[Cell, ...]] = []
    nvml = any(row.metrics.load.gpu for row in (dp, ddp))
    for row in (dp, ddp):
        load = {entry.device: entry.utilization for entry in row.metrics.load.gpu}
        unseen = row.metrics.balance is None and row.strategy == "dp"
        busy = {(int(entry.rank), entry.device): entry.share for entry in row.metrics.busy}
        for entry in row.peak_bytes:
            value = None if unseen else busy[entry.rank, entry.device]
            name = cells.name(f"{row.name}: rank {entry.rank}, {entry.device}")
            line = (
                name,
                cells.measured_share(value, "the replicas run inside one call"),
                cells.held_bytes(entry.bytes),
            )
            lines.append(
                (*line, cells.measured_share(load.get(entry.device), "the run was too short"))
                if nvml
                else line
            )
    columns = ("device", "busy share of a step", "memory", *(["load (NVML)"] if nvml else []))
    memory, other = ([entry.bytes for entry in row.peak_bytes] for row in (ddp, dp))
    even, dp_even = ddp.metrics.balance, dp.metrics.balance
    loads = (
        f"Rank 0's device works {factor(even)} times as long as the others"
        if even is not None
        else "The load of 2 devices is not known"
    )
    loads += f"; with DataParallel it is {factor(dp_even)} times." if dp_even else "."
    held = f"Each rank holds {alike([size(value) for value in memory])}; with DataParallel the devices hold "
    return [
        Table("Load and memory", columns, tuple(lines), memory_words(ddp)),
        Answer(
            "Is the load balanced?",
            loads,
            {"devices": ddp.devices, "ddp_balance": even, "dp_balance": dp_even},
            None if even is None else 1 / MORE_LOADED < even < MORE_LOADED,
        ),
        Answer(
            "Is the memory balanced?",
            f"{held}{alike([size(value) for value in other])}.",
            {"ddp_bytes": memory, "dp_bytes": other},
            max(memory) < 1.02 * min(memory),
        ),
        still_bottleneck(dp, ddp),
    ]


def still_bottleneck(dp: Row, ddp: Row) -> Answer:
    even, late = ddp.metrics.balance, ddp.metrics.straggler
    first = (even is not None and even >= MORE_LOADED) or bool(late and int(late.rank) == 0)
    copied = sum(part.seconds for part in dp.observed.copying.values())
    if late:
        text = f"With DDP the others wait for rank {int(late.rank)}, for {share(late.share_of_step)} of a step. "
    else:
        text = "With DDP the ranks do not wait for one of them step after step. "
    text += f"DataParallel's device 0 copies for {seconds(copied)} in every step; with DDP each rank updates its own "
    text += "parameters, and the "
    text += f"ranks exchange {size(ddp.bytes_per_step)} as equals."
    evidence = {
        "balance": even,
        "straggler": late,
        "dp_copying_seconds": copied,
        "step_bytes": ddp.bytes_per_step,
    }
    return Answer("Is device 0 still a bottleneck?", text, evidence, first)


def dp_against_ddp(lab: Measurements) -> list[Block]:
    dp, ddp = lab[DP2], lab[DDP2]
    pairs = [(2, DP2, DDP2)] + ([(4, DP4, DDP4)] if DP4 in lab and DDP4 in lab else [])
    split = (
        f"by DataParallel: {split_words(arrived(dp))}",
        f"by each rank: {split_words(arrived(ddp))}",
    )
    lines: list[tuple[Cell, ...]] = [
        (cells.name("processes"), cells.exact(dp.processes), cells.exact(ddp.processes)),
        (cells.name("data split"), *map(cells.name, split)),
        (cells.name("device usage (busy share)"), _usage(dp), _usage(ddp)),
        (
            cells.name("communication per step"),
            *(cells.duration(row.metrics.communication_seconds) for row in (dp, ddp)),
        ),
        (
            cells.name("memory of the fullest device"),
            *(cells.held_bytes(memory_of(row)) for row in (dp, ddp)),
        ),
        (cells.name("step time"), cells.step_time(dp), cells.step_time(ddp)),
    ]
    for number, *names in pairs:
        efficiency = [
            None if sharing(lab[name]) else lab.ratio(SINGLE, name).value / number for name in names
        ]
        lines.append(
            (
                cells.name(f"speed-up with {number} devices"),
                *(cells.ratio(lab.ratio(SINGLE, name)) for name in names),
            )
        )
        told = [
            cells.measured_share(value, sharing(lab[name]))
            for value, name in zip(efficiency, names, strict=True)
        ]
        lines.append((cells.name(f"efficiency with {number} devices"), *told))
    ratio = lab.ratio(DP2, DDP2)
    times = [row.step_seconds.median for row in (dp, ddp)]
    return [
        Table(
            "DataParallel against DDP",
            ("", "DataParallel", "DDP"),
            tuple(lines),
            remarks_of([dp, ddp, *lab.given(DP4, DDP4)]),
        ),
        Bars(
            "Speed-up against one device",
            tuple(_bar(lab, name) for _, *names in pairs for name in names),
            "times",
            1.0,
            "Error bars: 95 % interval over the rounds.",
        ),
        Answer(
            "Is DDP faster than DataParallel?",
            f"{speed('DDP', ratio)}: {seconds(times[1])} against {seconds(times[0])} per step.",
            {
                "speed_up": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "dp_seconds": times[0],
                "ddp_seconds": times[1],
            },
            faster(ratio),
        ),
        which_scales(lab, pairs[-1]),
        reasons(lab, ratio),
        proportional(ddp, lab.ratio(SINGLE, DDP2)),
    ]


def _usage(row: Row) -> Cell:
    if row.metrics.balance is None and row.strategy == "dp":
        return cells.missing("the replicas run inside one call")
    shares = [entry.share or 0.0 for entry in row.metrics.busy]
    return Cell(
        " and ".join(map(share, shares)), sum(shares) / len(shares), min(shares), max(shares)
    )


def _bar(lab: Measurements, name: str) -> Bar:
    ratio = lab.ratio(SINGLE, name)
    return Bar(name, ratio.value, ratio.low, ratio.high, f"{factor(ratio.value)} {interval(ratio)}")


def which_scales(lab: Measurements, pair: tuple[int, str, str]) -> Answer:
    number, left, right = pair
    ratio = lab.ratio(left, right)
    ratios = [lab.ratio(SINGLE, name) for name in (left, right)]
    told = [
        f"{factor(found.value)} {interval(found)} with {name}"
        for found, name in zip(ratios, ("DataParallel", "DDP"), strict=True)
    ]
    winners = {"faster": "DDP scales better", "slower": "DataParallel scales better"}
    text = f"The speed-up on {number} devices is {listed(told)}: {winners.get(ratio.verdict, 'neither scales measurably better')}"
    text += "" if number > 2 else f" (more were not tried on {machine_words(lab.comparison)})"
    text += f"; {sharing(lab[right])}" if sharing(lab[right]) else ""
    efficiency = {
        name: found.value / number for found, name in zip(ratios, (left, right), strict=True)
    }
    return Answer(
        "Which one scales better?", text + ".", {"devices": number, "efficiency": efficiency}
    )


def reasons(lab: Measurements, ratio: Ratio) -> Answer:
    """What each of them pays that one device does not."""
    dp, ddp = lab[DP2], lab[DDP2]
    copied = sum(part.seconds for part in dp.observed.copying.values())
    exposed, waiting = (
        ddp.metrics.exposed_communication_seconds or 0.0,
        ddp.metrics.exposed_waiting_seconds or 0.0,
    )
    compute = [row.metrics.compute_seconds for row in (lab[SINGLE], dp, ddp)]
    text = f"Forward and backward take {seconds(compute[0])} on one device, {seconds(compute[1])} with DataParallel, "
    text += f"{seconds(compute[2])} "
    text += f"with DDP. DataParallel adds {seconds(copied)} of copying, DDP {seconds(exposed)} of communication that nothing hides"
    text += f" and {seconds(waiting)} of waiting for a slower rank"
    gap = {"copying": copied, "communication": exposed + waiting}
    cheaper = min(gap, key=lambda name: gap[name])
    if ratio.verdict == ("slower" if cheaper == "copying" else "faster"):
        text += f": here the {cheaper} costs less"
        text += (
            " (the emulated copies stay in one memory)"
            if cheaper == "copying" and dp.ranks[0].virtual
            else ""
        )
    evidence = {
        "compute_seconds": compute,
        "dp_copying_seconds": copied,
        "ddp_exposed_seconds": exposed,
        "ddp_waiting_seconds": waiting,
    }
    return Answer("Why?", text + ".", evidence)


PARTS = (
    LabPart(
        "ranks and processes",
        "One process per device (`torchrun --nproc_per_node=2 practical6_ddp.py`).",
        (DDP2,),
        ranks,
    ),
    LabPart(
        "the manual split",
        "Each rank takes its part of the batch; then with one sample more.",
        (DDP2, ODD),
        manual_split,
    ),
    LabPart(
        "communication inside backward()",
        "Time every all-reduce of DDP with a communication hook.",
        (DDP2,),
        communication,
    ),
    LabPart(
        "bucket sizes",
        "`bucket_cap_mb` small, as PyTorch sets it, and so large that one is enough.",
        (SMALL, DDP2, LARGE),
        bucket_sizes,
    ),
    LabPart(
        "load and memory of each device",
        "Look at each device, and compare with DataParallel.",
        (DP2, DDP2),
        balance,
    ),
    LabPart(
        "DataParallel against DDP",
        "Measure both and one device in turns.",
        (SINGLE, DP2, DDP2),
        dp_against_ddp,
        likes=(DP4, DDP4),
    ),
)
