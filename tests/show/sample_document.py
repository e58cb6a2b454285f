"""A document with every kind of block, as an analysis creates it, with invented numbers and nasty
labels."""

from __future__ import annotations

import math

from msgspec.structs import replace

from paralab.analyse.blocks import (
    Answer,
    Bar,
    Bars,
    Block,
    Cell,
    Distribution,
    Document,
    Finding,
    Group,
    Line,
    Lines,
    Part,
    Schedule,
    Section,
    ShareRow,
    Shares,
    Slot,
    Span,
    Split,
    Table,
    Timeline,
)
from paralab.units import rate, seconds, size

NASTY = "</script><b>&\"'<!--"

# strategy, devices, step seconds, p10, p90, peak bytes
STRATEGIES = (
    ("single", 1, 0.0921, 0.0897, 0.0978, 412_000_000),
    ("data_parallel", 2, 0.0874, 0.0848, 0.0990, 430_000_000),
    ("ddp", 2, 0.0512, 0.0498, 0.0561, 418_000_000),
    ("ddp + accumulation", 2, 0.0489, 0.0478, 0.0519, 301_000_000),
    ("ddp + bf16", 2, 0.0437, 0.0421, 0.0482, 262_000_000),
    ("stages", 2, 0.0713, 0.0689, 0.0802, 240_000_000),
    ("hybrid", 4, 0.0401, 0.0384, 0.0466, 244_000_000),
    ("fsdp", 2, None, None, None, None),
)


def _random(count: int, seed: int) -> list[float]:
    """Return numbers from 0 to 1 that are the same on every machine (a linear congruential
    generator)."""
    numbers, state = [], seed
    for _ in range(count):
        state = (1103515245 * state + 12345) % 2**31
        numbers.append(state / 2**31)
    return numbers


def comparison() -> Table:
    base = STRATEGIES[0][2]
    rows = tuple(
        (
            Cell(name, name),
            Cell(str(devices), devices),
            Cell(seconds(median), median),
            Cell(
                "not measured" if median is None else f"{base / median:.2f} ×",
                None if median is None else base / median,
            ),
            Cell(
                rate(None if median is None else 64 / median),
                None if median is None else 64 / median,
            ),
            Cell(size(peak), peak),
            Cell(
                "needs a GPU: none here" if median is None else "same training", median is not None
            ),
        )
        for name, devices, median, _, _, peak in STRATEGIES
    )
    columns = (
        "strategy",
        "devices",
        "step time (median)",
        "speed-up",
        "samples/s",
        "peak memory per device",
        "remark",
    )
    return Table(
        "Eight strategies, the same training",
        columns,
        rows,
        "Strategies took turns; 5 warm-up steps are left out.",
    )


def speed() -> Bars:
    base = STRATEGIES[0][2]
    bars = tuple(
        Bar(name, None)
        if median is None
        else Bar(name, base / median, base / high, base / low, f"{base / median:.2f} ×")
        for name, _, median, low, high, _ in STRATEGIES
    )
    return Bars(
        "Speed-up over one device",
        bars,
        "×",
        reference=1.0,
        note="Error bars: p10 to p90 of the steps.",
    )


def step_times() -> Distribution:
    groups = tuple(
        Group(
            name,
            tuple(
                median * (0.96 + 0.05 * a + 0.25 * b**9)
                for a, b in zip(_random(45, n), _random(45, n + 50), strict=True)
            ),
        )
        for n, (name, _, median, *_) in enumerate(STRATEGIES)
        if median is not None
    )
    return Distribution("Every step's time", (*groups, Group("fsdp", ())), "seconds")


def timeline() -> Timeline:
    """Create three DDP steps on two ranks. The second rank is slower, so the first one waits. The
    last bucket is always exposed."""
    spans, steps, begin = [], [], 812.4036
    for step in range(5, 8):
        start = begin
        for rank in (0, 1):
            slow = 1.0 if rank == 0 else 1.12
            work, wire = 2 * rank, 2 * rank + 1
            data_end = start + 0.0011
            forward_end = data_end + 0.0142 * slow
            backward_end = forward_end + 0.0251 * slow
            spans.append(Span(work, "data", "data", start, data_end, details={"samples": 32}))
            spans.append(
                Span(work, "forward", "forward", data_end, forward_end, details={"samples": 32})
            )
            spans.append(Span(work, "backward", "backward", forward_end, backward_end))
            joint = start + 0.0011 + 0.0142 * 1.12
            for bucket, share in enumerate((0.3, 0.55, 0.8, 1.0)):
                ready = joint + 0.0251 * 1.12 * share
                end = ready + (0.0052 if bucket < 3 else 0.0064)
                details = {
                    "bucket": bucket,
                    "bucket_bytes": 26_214_400 if bucket else 8_388_608,
                    "op": "avg",
                }
                spans.append(
                    Span(
                        wire,
                        "all_reduce",
                        f"all-reduce {bucket}",
                        ready,
                        end,
                        exposed=bucket == 3,
                        details=details,
                    )
                )
            done = joint + 0.0251 * 1.12 + 0.0064
            spans.append(
                Span(
                    work,
                    "wait",
                    "wait",
                    backward_end,
                    done,
                    exposed=True,
                    details={"for": f"rank {1 - rank} {NASTY}"},
                )
            )
            spans.append(
                Span(
                    work,
                    "optimizer",
                    "optimizer",
                    done,
                    done + 0.0031,
                    details={"parameters": 25_600_000},
                )
            )
        begin = done + 0.0031 + 0.0004
        steps.append((step, start, begin))
    lanes = (
        "rank 0 · cpu:0",
        "rank 0 · communication",
        "rank 1 · cpu:1 (virtual)",
        "rank 1 · communication",
    )
    return Timeline(
        "Steps 5 to 7 of ddp",
        lanes,
        tuple(spans),
        tuple(steps),
        "`wait` is the main thread inside `backward()`.",
    )


def losses() -> Lines:
    noise = _random(120, 9)
    curve = tuple(
        (float(n), 2.3 * math.exp(-n / 40) + 0.32 + 0.05 * (noise[n] - 0.5)) for n in range(120)
    )
    bf16 = tuple((x, y * (1 + 0.012 * math.sin(x / 5))) for x, y in curve)
    lines = (
        Line("single", curve),
        Line("ddp", curve),
        Line("stages", curve),
        Line("ddp + bf16", bf16),
    )
    return Lines(
        "Loss",
        lines,
        "step",
        "loss",
        "number",
        note="Three curves lie on each other: it is the same training.",
    )


def buckets() -> Lines:
    sizes = (0.25, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 400.0)
    times = (0.081, 0.064, 0.058, 0.0534, 0.0519, 0.0512, 0.0526, 0.0561, 0.0634)
    whole = Line(
        "ddp",
        tuple(zip(sizes, times, strict=True)),
        tuple(t * 0.97 for t in times),
        tuple(t * 1.06 for t in times),
    )
    return Lines(
        "Step time over bucket size",
        (whole,),
        "bucket size in MiB",
        "step time",
        "seconds",
        log_x=True,
    )


def differences() -> Lines:
    points = tuple((float(n), 2.2e-16 * (1 + n % 4)) for n in range(20))
    return Lines(
        "Largest difference from one device", (Line("ddp", points),), "step", "difference", "number"
    )


def memory() -> Lines:
    wave = tuple((n * 0.1, 2.4e8 + 1.7e8 * (n % 10) / 10) for n in range(60))
    return Lines("Memory over time", (Line("cuda:0", wave),), "seconds", "allocated", "bytes")


def schedule() -> Schedule:
    """Create a GPipe schedule: 2 stages × 4 micro-batches, and a backward pass takes two slots. The
    last measured backward pass is late."""
    ideal = [Slot(stage, m, False, stage + m, stage + m + 1) for stage in (0, 1) for m in range(4)]
    ideal += [Slot(1, m, True, 5 + 2 * m, 7 + 2 * m) for m in range(4)] + [
        Slot(0, m, True, 7 + 2 * m, 9 + 2 * m) for m in range(4)
    ]
    measured = tuple(
        Slot(
            s.stage,
            s.micro,
            s.backward,
            3.2 + s.start * 0.0042,
            3.2 + s.end * 0.0042 - 0.0004 - 0.0003 * s.stage,
        )
        for s in ideal
    )
    return Schedule(
        "GPipe, 2 stages × 4 micro-batches",
        ("stage 0 · cpu:0", "stage 1 · cpu:1"),
        measured,
        tuple(ideal),
        0.342,
        0.2,
    )


def shares() -> Shares:
    kinds = ("forward", "backward", "optimizer", "exposed", "wait", "other", "skew")
    rows = (
        ShareRow("single", (0.3, 0.6, 0.1, 0.0, 0.0, 0.0, 0.0)),
        ShareRow("ddp", (0.2, 0.3, 0.1, 0.2, 0.1, 0.06, 0.04)),
    )
    return Shares("Shares of a step", kinds, rows)


def answers() -> tuple[Block, ...]:
    return (
        Answer(
            "Is one all-reduce per parameter faster than one per bucket?",
            "161 small all-reduces take 81 ms per step, 4 buckets take 51.2 ms. Each small one pays the latency anew.",
            {
                "per_parameter_seconds": 0.081,
                "bucketed_seconds": 0.0512,
                "all_reduces": [161, 4],
                "exposed_share": 0.125,
            },
            verdict=False,
        ),
        Answer(
            "Does `ddp` train like a single device?",
            "Its parameters differ by at most 3e-16 after 100 steps.",
            {"max_difference": 3.1e-16},
            verdict=True,
        ),
        Answer(
            f"What does a hostile {NASTY} label do?",
            f"It is shown as it is: {NASTY}",
            {NASTY: {"nested": [NASTY], "unknown": None}},
        ),
    )


FINDINGS = (
    Finding(
        "fastest",
        "`hybrid` is the fastest: 40.1 ms per step, 2.3 times as fast as one device, on 4 devices.",
        {
            "step_seconds": 0.0401,
            "single_step_seconds": 0.0921,
            "speed_up": 2.297,
            "num_devices": 4,
        },
    ),
    Finding(
        "cost",
        "In `ddp`, a rank waits 6.4 ms of every 51.2 ms step for gradients that nothing hides.",
        {"exposed_seconds": 0.0064, "step_seconds": 0.0512, "exposed_share": 0.125},
    ),
    Finding(
        "limit",
        "Rank 1 is 12% slower than rank 0: they share cores with other work.",
        {"slower_share": 0.12},
    ),
    Finding(
        "next",
        "Try `--bucket-mib 25 --precision bf16`: the two best settings were never run together.",
        {"bucket_mib": 25},
    ),
    Finding(
        "same",
        "All 7 measured strategies train the same model: largest difference 3e-16.",
        {"max_difference": 3.1e-16, "cases": 7},
    ),
    Finding("warning", "`fsdp` was not measured: it needs a GPU, and torch sees none.", {}),
)


def sample() -> Document:
    sections = (
        Section(
            "Comparison",
            (comparison(), speed(), step_times()),
            "Same weights, same samples, same global batches of 64.",
        ),
        Section("Where the time goes", (shares(), timeline(), buckets(), *answers())),
        Section("The training", (losses(), differences(), memory())),
        Section(
            "How the batch is cut",
            (
                Split(
                    "64 samples over 3 devices",
                    64,
                    (
                        Part("rank 0 · cpu:0", (8, 8, 6)),
                        Part("rank 1 · cpu:1", (8, 8, 5)),
                        Part("rank 2 · cpu:2", (8, 8, 5)),
                    ),
                    "64 = 22 + 21 + 21: the first ranks take what is left over.",
                ),
                schedule(),
                Table(
                    NASTY,
                    ("name", NASTY),
                    ((Cell(NASTY, NASTY), Cell("", None)), (Cell("nan", math.nan), Cell("", 3))),
                ),
            ),
        ),
    )
    facts = (
        ("machine", "AMD EPYC 7B13, 2 usable cores, 7.8 GiB memory, no GPU"),
        ("versions", "Python 3.11.9, torch 2.13.0, paralab 0.1.0"),
        ("command", f"paralab compare gpt:small --batch-size 64 --note '{NASTY}'"),
        ("run folder", "runs/2026-11-15-compare-gpt"),
    )
    return Document(
        "gpt:small under eight strategies",
        "2 CPU ranks (virtual devices), batch 64, float32.",
        FINDINGS,
        sections,
        facts,
    )


def without_numbers() -> Document:
    """Create blocks that are as empty as possible, as after a run that was killed immediately."""
    blocks: tuple[Block, ...] = (
        Table("table", (), ()),
        Table("rows missing", ("a", "b"), ()),
        Answer("?", "", {}),
        Bars("bars", (), "seconds"),
        Bars(
            "unknown bars",
            (Bar("a", None), Bar("zero", 0.0), Bar("nan", math.nan, math.nan, math.nan)),
            "seconds",
        ),
        Shares("shares", ("forward",), ()),
        Distribution("distribution", (), "seconds"),
        Distribution(
            "empty groups",
            (Group("a", ()), Group("one", (0.1,)), Group("nan", (math.nan,))),
            "bytes",
        ),
        Timeline("timeline", (), (), ()),
        Timeline("no spans", ("rank 0",), (), ((0, 1.0, 1.0),)),
        Timeline("an instant", ("rank 0",), (Span(0, "unheard of", "x", 1.0, 1.0),), ()),
        Split("split", 0, ()),
        Split("no pieces", 4, (Part("a", ()),)),
        Lines("lines", (), "x", "y", "number"),
        Lines("empty line", (Line("a", ()),), "x", "y", "bytes"),
        Lines("one point", (Line("a", ((0.0, 0.0),)),), "x", "y", "share"),
        Lines(
            "log of zero",
            (Line("a", ((0.0, 1.0), (1.0, math.nan), (2.0, math.inf), (3.0, 2.0))),),
            "x",
            "y",
            "number",
            log_x=True,
        ),
        Schedule("schedule", (), (), (), 0.0, 0.0),
        Schedule("not measured", ("stage 0",), (), (Slot(0, 0, False, 0, 1),), math.nan, 0.0),
    )
    return replace(
        sample(), findings=(), sections=(Section("nothing", ()), Section("empty", blocks)), facts=()
    )
