"""Where the time of a step is wasted: judgements on plain numbers, each a Finding or None.

A run folder of paralab and the observed ranks of a foreign script have the same numbers; they are
judged here, once. Every `gain` is the share of the step that the fix could save at best: a bound,
not a promise.
"""

from __future__ import annotations

from collections.abc import Sequence

from paralab.analyse.confidence import Ratio
from paralab.analyse.metrics import RULE
from paralab.doctor.finding import Finding, Severity
from paralab.plan.schedules import ideal_bubble
from paralab.units import plural, seconds, size

WORTH = 0.05  # of the step: what a change of the code should gain
SMALL = 0.02  # of the step: what cannot gain more is not worth a word
BY_CHANCE = 0.20  # of the step: a busy machine can make others wait so long
JITTER_SECONDS = 0.002  # of an operating system
SLICE_SECONDS = (
    0.005  # so long another program may have a core: who comes last by less is nobody's fault
)
ENOUGH_STEPS = 6  # to say that a rank is always last
ALWAYS = 0.90
ONE_LARGE = 0.80  # of the bytes in one bucket: the others have little to hide
SPLITTABLE_BYTES = 2**20  # below this a transfer is all latency, and two are slower than one
PARTS = 4  # so many buckets are tried: enough to hide three quarters
DATA_SHARE = 0.10
IMBALANCE = 1.3
IDLE = 0.15  # of the stages' time: less is the price of a pipeline
UNEVEN = 0.10  # of the stages' time, beyond what the schedule costs
ENOUGH_MICRO_BATCHES = 4  # per stage
FALLS = 3  # scales in a row: fewer are GradScaler looking for its scale


def over_a_tenth(communication: float, exposed: float, step: float, how: str) -> Finding | None:
    """`how`: what is sent, e.g. `2 all-reduces of together 24.0 MiB`. What is hidden behind
    computing costs nothing."""
    if not step or communication < RULE * step or exposed < SMALL * step:
        return None
    why = (
        f"Communication takes {seconds(communication)}, {communication / step:.0%} of a step of {seconds(step)} (the rule of thumb "
        f"is below {RULE:.0%}): {how}. {seconds(exposed)} of it ({exposed / step:.0%} of the step) is not hidden behind computing."
    )
    fix = (
        "More computing per synchronization: a larger batch per rank, or gradient accumulation with no_sync() (paralab: "
        "--accumulate). Or fewer bytes: DDP's bf16_compress_hook. Or hide more of it: smaller buckets (bucket_cap_mb, paralab: "
        "--bucket-mb)."
    )
    evidence = (
        f"communication {seconds(communication)}",
        f"exposed {seconds(exposed)}",
        f"step {seconds(step)}",
    )
    return Finding("W01", "warning", why, fix, evidence=evidence, gain=exposed / step)


def exposed_with(buckets: int, transfer: float, backward: float) -> float:
    """What equal buckets leave exposed at best. They become ready evenly over the backward pass,
    and travel one after the other:

    backward 8, transfer 4, 4 buckets     |-- 2 --|-- 2 --|-- 2 --|-- 2 --|
                                                  |1|     |1|     |1|     |1|     exposed: the last one, 4 / 4 = 1
    backward 4, transfer 8, 4 buckets     |1|1|1|1|
                                            |- 2 -|- 2 -|- 2 -|- 2 -|             exposed: 8 - 4 · 3 / 4 = 5
    """
    return max(transfer / buckets, transfer - backward * (buckets - 1) / buckets)


def one_bucket(
    sizes: Sequence[int], backward: float, transfer: float, exposed: float, step: float
) -> Finding | None:
    """`sizes`: the bytes of the buckets of one synchronization. One that holds nearly all is as bad
    as a single one."""
    together, largest = sum(sizes), max(sizes, default=0)
    if (
        not step
        or not together
        or largest < max(SPLITTABLE_BYTES, ONE_LARGE * together)
        or not backward
    ):
        return None
    gain = (exposed - exposed_with(PARTS, transfer, backward)) / step
    if gain < WORTH:
        return None
    megabytes = max(1, round(together / PARTS / 2**20))
    share = f"one of {len(sizes)} buckets holds {largest / together:.0%} of the gradients"
    held = "all gradients are in one bucket" if len(sizes) == 1 else share
    why = (
        f"Nothing to overlap: {held} ({size(largest)}), which is ready only when the backward pass ({seconds(backward)}) is over. "
        f"The all-reduce ({seconds(transfer)}) then holds everything up: {seconds(exposed)}, {exposed / step:.0%} of the step."
    )
    fix = (
        f"DistributedDataParallel(model, bucket_cap_mb={megabytes}) (paralab: --bucket-mb {megabytes}): about {PARTS} buckets, of "
        f"which all but the last can travel while the backward pass computes. At best {gain:.0%} of the step is saved."
    )
    evidence = (
        f"buckets: {', '.join(size(each) for each in sizes)}",
        f"backward {seconds(backward)}",
        f"all-reduce {seconds(transfer)}",
        f"exposed {seconds(exposed)}",
    )
    return Finding("W02", "warning", why, fix, evidence=evidence, gain=gain)


def straggler(rank: int, waited: float, step: float, last_in: int, of: int) -> Finding | None:
    """A rank for which the others wait, step after step."""
    if not step or waited < max(RULE * step, SLICE_SECONDS):
        return None
    share = waited / step
    sure = (
        share >= BY_CHANCE
        and of >= ENOUGH_STEPS
        and last_in >= ALWAYS * of
        and waited >= 2 * SLICE_SECONDS
    )
    doubt = (
        ""
        if sure
        else " A busy machine can do that: certain if it is the same rank in a second, longer run."
    )
    waits = f"another rank waits {seconds(waited)} of every step ({share:.0%}) for it"
    why = f"Rank {rank} comes last in {last_in} of {of} steps; {waits}.{doubt}"
    fix = (
        f"Find out what rank {rank} does more than the others: longer samples, logging or saving inside the step, another program "
        "on its cores, a slower or hotter device. If it is the data: batches of equal length."
    )
    return Finding(
        "W03",
        "warning" if sure else "suspect",
        why,
        fix,
        rank=rank,
        evidence=(f"last in {last_in} of {of} steps",),
        gain=share,
    )


def data_wait(waited: float, step: float, rank: int | None = None) -> Finding | None:
    """`waited`: between two steps, for the next batch. `step`: the step without it."""
    whole = waited + step
    if not step or waited < max(DATA_SHARE * whole, JITTER_SECONDS):
        return None
    who = "every rank" if rank is None else f"rank {rank}"
    long = f"{seconds(waited)} for its next batch, {waited / whole:.0%} of the time (a step takes {seconds(step)})"
    why = f"Between two steps {who} waits {long}."
    fix = (
        "Load while the device computes: DataLoader(num_workers=…, persistent_workers=True), workers × ranks no more than the "
        "cores; then a cheaper transform, or data that is prepared once."
    )
    return Finding(
        "T06",
        "warning",
        why,
        fix,
        rank=rank,
        evidence=(f"waits {seconds(waited)} per step",),
        gain=waited / whole,
    )


def unequal_replicas(
    busy: Sequence[float], held_bytes: Sequence[int], step: float
) -> Finding | None:
    """DataParallel: what its devices computed in a step, and hold. Device 0 first."""

    def against_others(values: Sequence[float]) -> float:
        others = values[1:]
        return values[0] * len(others) / sum(others) if others and sum(others) else 1.0

    time, memory = against_others(busy), against_others(held_bytes)
    if max(time, memory) < IMBALANCE:
        return None
    parts = []
    if time >= IMBALANCE:
        parts.append(f"is busy {seconds(busy[0])} per step, {time:.2f} times as long as the others")
    if memory >= IMBALANCE:
        parts.append(f"holds {size(held_bytes[0])}, {memory:.2f} times as much as the others")
    why = f"DataParallel: device 0 {' and '.join(parts)}: outputs, gradients and the optimizer are all there."
    fix = "DistributedDataParallel: every rank has its own (paralab: ddp). If it must be DataParallel: the loss inside forward."
    longer = (
        (busy[0] - sum(busy[1:]) / len(busy[1:])) / step if time >= IMBALANCE and step else None
    )
    return Finding(
        "D02",
        "warning",
        why,
        fix,
        evidence=(f"busy {time:.2f} ×, memory {memory:.2f} ×",),
        gain=longer,
    )


def crowded(threads: int, processes: int, cores: int, each_is: str = "process") -> Finding | None:
    """Compute threads of all processes against the cores. Waiting processes take none, so a few
    more than cores is no harm."""
    if threads * processes <= cores:
        return None
    each = max(1, cores // processes)
    why = (
        f"{plural(processes, each_is)} × {plural(threads, 'compute thread')} = {threads * processes} on {plural(cores, 'core')}: "
        "the threads take turns, and a rank that is waiting for its turn makes all others wait."
    )
    if processes > cores:
        fix = f"No more than {plural(cores, each_is)} on this machine, with OMP_NUM_THREADS=1."
    else:
        fix = f"OMP_NUM_THREADS={each} (cores / ranks) before Python starts, or torch.set_num_threads({each}) in every rank."
    return Finding(
        "L09", "warning", why, fix, evidence=(f"{threads} threads × {processes} > {cores} cores",)
    )


def needless_search(parameters: int | None = None, passes: int | None = None) -> Finding:
    """find_unused_parameters=True, and every parameter was used, in so many passes (None: in all of
    them)."""
    all_ = "every parameter" if parameters is None else f"each of {plural(parameters, 'parameter')}"
    seen = "" if passes is None else f" in each of {plural(passes, 'pass')} that DDP has looked at"
    why = f"find_unused_parameters=True walks the graph after every forward pass, and {all_} was used{seen}."
    doubt = "" if passes is None else " Certain if no later batch leaves a layer out."
    fix = "Leave find_unused_parameters out; DDP then also puts its buckets in the order of the gradients."
    return Finding("S04", "suspect" if doubt else "warning", why + doubt, fix)


def idle_stages(
    measured: float | None, stages: int, micro_batches: int, schedule: str, samples: int | None
) -> Finding | None:
    """Too few micro-batches. `measured`: None where the bubble was not: then only one micro-batch
    is too few for certain. `samples`: of one pass; None: unknown. With no more samples to cut there
    is nothing to say."""
    ideal = ideal_bubble(stages, micro_batches, schedule)
    enough = min(ENOUGH_MICRO_BATCHES * stages, samples or ENOUGH_MICRO_BATCHES * stages)
    better = ideal_bubble(stages, enough, schedule)
    idle = ideal if measured is None else measured
    if (
        enough <= micro_batches
        or min(ideal, idle) < IDLE
        or (measured is None and micro_batches > 1)
    ):
        return None
    passes = (
        "the whole batch in one piece: the stages work one after the other"
        if micro_batches == 1
        else plural(micro_batches, "micro-batch")
    )
    why = (
        f"{plural(stages, 'stage')} and {passes}. The stages idle {idle:.0%} of the time; {ideal:.0%} is the best that "
        f"{schedule} can do with so few."
    )
    fix = f"{enough} micro-batches (n_microbatches={enough}, paralab: --micro-batches {enough}): {better:.0%} idle at best."
    evidence = (
        f"idle {idle:.0%}",
        f"ideal {ideal:.0%}",
        f"with {enough} micro-batches {better:.0%}",
    )
    return Finding("P05", "warning", why, fix, evidence=evidence, gain=max(0.0, idle - better))


def uneven_stages(measured: float, ideal: float, busy: Sequence[float]) -> Finding | None:
    """The stages idle more than their schedule makes them."""
    if measured - ideal < UNEVEN:
        return None
    longest = max(range(len(busy)), key=lambda stage: busy[stage], default=None)
    who = (
        ""
        if longest is None
        else f" Stage {longest} computes longest, {seconds(busy[longest])}; the shortest {seconds(min(busy))}."
    )
    why = f"The stages idle {measured:.0%} of the time, though {ideal:.0%} would do for these micro-batches.{who}"
    fix = "Move layers from the longest stage to the shortest (`paralab plan` shows what each takes), or send less between them."
    evidence = (
        f"idle {measured:.0%}, ideal {ideal:.0%}",
        f"seconds per stage: {', '.join(seconds(each) for each in busy)}",
    )
    return Finding("W05", "warning", why, fix, evidence=evidence, gain=measured - ideal)


def synced_every_pass(
    all_reduces: float,
    buckets: int,
    passes: int,
    exposed: float | None,
    step: float,
    stages: int = 1,
) -> Finding | None:
    """More all-reduces per optimizer step than buckets: gradients that were not complete were sent,
    and are sent again. `exposed`: None where it was not measured what that costs."""
    if passes < 2 or not buckets or all_reduces < 2 * buckets or (exposed is not None and not step):
        return None
    times = all_reduces / buckets
    gain = None if exposed is None else exposed * (1 - 1 / times) / step
    cost = (
        ""
        if exposed is None
        else f" {seconds(exposed)} per step ({exposed / step:.0%}) is exposed."
    )
    why = (
        f"{all_reduces:g} all-reduces per optimizer step for {plural(buckets, 'bucket')}: the gradients are synchronized {times:g} "
        f"times, in {passes} backward passes, where once is enough.{cost}"
    )
    fix = "`with model.no_sync():` around forward and backward of all passes but the last (paralab: without --sync-every-pass)."
    evidence = (
        f"{all_reduces:g} all-reduces per step, {plural(buckets, 'bucket')}, {passes} passes",
    )
    return Finding(
        "P06" if stages > 1 else "G02", "warning", why, fix, evidence=evidence, gain=gain
    )


def slower_precision(precision: str, ratio: Ratio, device: str) -> Finding | None:
    """`ratio`: how many times as fast as fp32, otherwise the same."""
    surely = ratio.verdict == "slower"
    if not surely and (ratio.low is not None or ratio.value > 1 - RULE):
        return None
    interval = "" if ratio.low is None else f" ({ratio.low:.2f}–{ratio.high:.2f})"
    doubt = (
        "" if surely else " Measured once: certain after three rounds (paralab compare --rounds 3)."
    )
    speed = f"{precision} is {ratio.value:.2f} times as fast as fp32{interval} on {device}"
    why = f"{speed}, so slower: the casts cost more than they save.{doubt}"
    fix = f"fp32 on this device, unless {precision} is needed for its memory. On a GPU: larger matrices, in multiples of 8."
    sure: Severity = "warning" if surely else "suspect"
    return Finding(
        "W04", sure, why, fix, gain=1 - ratio.value, evidence=(f"speed-up {ratio.value:.2f}",)
    )


def lost_loss(
    losses: Sequence[float | None], scales: Sequence[float], first: int = 0
) -> Finding | None:
    """`losses`: None where not finite. `scales`: of GradScaler, step by step; empty without one.
    `first`: number of the first."""
    bad = next((step for step, loss in enumerate(losses) if loss is None), None)
    falls = falling(scales)
    if (bad is None and falls < FALLS) or (
        bad is not None and losses[-1] is not None
    ):  # it came back: one bad batch
        return None
    lost = sum(loss is None for loss in losses)
    since = (
        None
        if bad is None
        else f"The loss is not finite from step {first + bad} on ({lost} of {len(losses)} steps)"
    )
    fell = (
        f"GradScaler's scale fell in each of the last {falls} steps"
        if falls
        else "GradScaler skips these steps"
    )
    halves = f"{fell}, from {scales[-falls - 1]:g} to {scales[-1]:g}" if falls else fell
    fix = (
        "Find the first module whose output is not finite: torch.autograd.set_detect_anomaly(True) for the backward pass, a "
        "forward hook with torch.isfinite for the forward pass. Then a lower learning rate, clipping, or fp32 for that module."
    )
    if scales:
        why = f"{since or 'The gradients are not finite'}; {halves}: nothing is learnt any more."
        return Finding(
            "A08", "error", why, fix, evidence=tuple(part for part in (since, halves) if part)
        )
    why = f"{since}: every weight is spoilt by then, and each further step is wasted."
    return Finding("W06", "error", why, fix, evidence=(since or "",))


def falling(scales: Sequence[float]) -> int:
    """How many of the last scales are each smaller than the one before: 4, 8, 4, 2, 1 -> 3."""
    number = 0
    while number + 1 < len(scales) and scales[-number - 1] < scales[-number - 2]:
        number += 1
    return number
