"""The document of a comparison or of a single run: its tables and pictures, from the folder
alone."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paralab.analyse import figures
from paralab.analyse.blocks import (
    Bar,
    Bars,
    Block,
    Cell,
    Distribution,
    Document,
    Group,
    Section,
    Table,
)
from paralab.analyse.metrics import RULE
from paralab.analyse.phrases import collectives, machine_words
from paralab.analyse.recording import Recording
from paralab.analyse.verdict import is_same_training, largest_memory, verdict
from paralab.analyse.verify import aside
from paralab.units import count, plural, rate, seconds, size

Row = dict[str, Any]
CLOCK = "Every rank and device on one clock. Hatched: exposed communication; dotted: waiting for a slower rank. Zoom in, hover."
COMPARED = ("speed-up", "efficiency", "same training")  # columns that say nothing of a run alone


def report(comparison: dict[str, Any], folder: Path, more: Sequence[Section] = ()) -> Document:
    """Everything there is to see of an experiment. `more`: sections of its own, after the first
    table."""
    rows = [row for row in comparison["rows"] if not row["error"]]
    recordings = {
        row["name"]: [Recording.read(folder / run) for run in row["runs"]] for row in rows
    }
    name = comparison["workload"]["name"]
    batch = rows[0]["batch"]["size"] if rows else None
    sizes = {row["batch"]["size"] for row in rows}
    return Document(
        title=f"{comparison['kind'].capitalize()}: {name}",
        subtitle=(plural(len(rows), "set-up") if len(rows) != 1 else rows[0]["name"])
        + (f" at a global batch of {batch}" if len(sizes) == 1 else "")
        + (
            f", {plural(comparison['rounds'], 'round')} in turns"
            if comparison["rounds"] > 1
            else ""
        )
        + f", on {machine_words(comparison)}",
        findings=verdict(comparison),
        sections=(
            _side_by_side(rows, recordings, comparison["baseline"]),
            *more,
            _where_time_goes(rows),
            *_sections(rows, recordings),
        ),
        facts=facts(comparison),
    )


def facts(comparison: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    machine, packages, workload = (
        comparison["machine"],
        comparison["packages"],
        comparison["workload"],
    )
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    return (
        ("machine", machine_words(comparison)),
        ("memory", size(machine["memory_bytes"])),
        ("versions", f"Python {machine['python']}, {versions}, CUDA {machine['cuda'] or 'none'}"),
        ("workload", f"{workload['name']}: {workload['parameters']:,} parameters"),
        ("data", str(workload["data_path"])),
        ("command", shlex.join(["paralab", *comparison["command"][1:]])),
    )


def number(value: float | None, text: str) -> Cell:
    return Cell("not measured" if value is None else text, value)


def _side_by_side(
    rows: Sequence[Row], recordings: dict[str, list[Recording]], baseline: str | None
) -> Section:
    columns = "set-up, devices, step time, samples/s, per device, speed-up, efficiency, memory, communication, same training"
    names = tuple(columns.split(", "))
    kept = [place for place, name in enumerate(names) if len(rows) > 1 or name not in COMPARED]
    cells = tuple(tuple(row[place] for place in kept) for row in map(_row, rows))
    table = Table("", tuple(names[place] for place in kept), cells, _remarks(rows))
    speed = [
        Bar(
            row["name"],
            row["speed_up"]["value"],
            row["speed_up"]["low"],
            row["speed_up"]["high"],
            f"{row['speed_up']['value']:.2f}×  {row['speed_up']['verdict']}",
        )
        for row in rows
    ]
    efficient = [
        Bar(row["name"], row["efficiency"], text=f"{row['efficiency']:.0%}") for row in rows
    ]
    times = {
        name: [s for recording in list_ for s in recording.step_seconds]
        for name, list_ in recordings.items()
    }
    bars = (
        Bars(
            f"Speed-up against {baseline}",
            tuple(speed),
            "times",
            1.0,
            "Error bars: 95 % interval over the rounds.",
        ),
        Bars("Scaling efficiency: speed-up per device", tuple(efficient), "share", 1.0),
    )
    steps = Distribution(
        "Step times", tuple(Group(name, tuple(values)) for name, values in times.items()), "seconds"
    )
    return Section(
        "Side by side" if len(rows) > 1 else "The run",
        (table, *(bars if len(rows) > 1 else ()), steps),
    )


def _remarks(rows: Sequence[Row]) -> str:
    """What is virtual or shared is said with every table of timings, once."""
    named: dict[str, list[str]] = {}
    for row in rows:
        for remark in row["remarks"]:
            named.setdefault(
                "devices are shares of one CPU (virtual)" if "virtual" in remark else remark, []
            ).append(row["name"])
    told = [
        remark + ("" if "virtual" in remark or len(names) > 3 else f" ({', '.join(names)})")
        for remark, names in named.items()
    ]
    how = (
        "step time: median of all steps; speed-up: mean over the rounds, of seconds per sample"
        if len(rows) > 1
        else ""
    )
    return "; ".join(filter(None, [how, "communication: share of the step (of it exposed)", *told]))


def _row(row: Row) -> tuple[Cell, ...]:
    times, ratio, metrics = row["step_seconds"], row["speed_up"], row["metrics"]
    interval = "" if ratio["low"] is None else f" ({ratio['low']:.2f}–{ratio['high']:.2f})"
    share = metrics["communication_share"]
    return (
        Cell(row["name"], row["name"]),
        Cell(str(row["devices"]), row["devices"]),
        number(times["median"], seconds(times["median"])),
        number(row["samples_per_second"], rate(row["samples_per_second"])),
        number(row["samples_per_second_per_device"], rate(row["samples_per_second_per_device"])),
        Cell(
            "1" if ratio["verdict"] == "baseline" else f"{ratio['value']:.2f}{interval}",
            ratio["value"],
        ),
        Cell(f"{row['efficiency']:.0%}", row["efficiency"]),
        number(largest_memory(row), size(largest_memory(row))),
        Cell("none" if not share else f"{share:.0%} ({metrics['exposed_share']:.0%})", share),
        Cell(same_training(row), is_same_training(row)),
    )


def same_training(row: Row) -> str:
    """`equal`; `equal, loss ±2e-05` (equal in fp64; so far did bf16 move the loss); `equal apart
    from BatchNorm`; `NO`."""
    parity = row["parity"]
    if parity is None:
        return "not checked"
    if not parity["equal"]:
        return "NO"
    if reason := aside(parity):
        return f"equal apart from {reason}"
    moved = row["loss_difference"]
    if row["not_finite_losses"]:
        return f"equal, but {row['not_finite_losses']} losses not finite"
    if row["precision"] in ("bf16", "fp16", "tf32") and moved is not None:
        return f"equal, loss ±{moved:.0e}"
    return "equal"


def _where_time_goes(rows: Sequence[Row]) -> Section:
    parts = {
        "forward": "forward_seconds",
        "backward": "backward_seconds",
        "optimizer": "optimizer_seconds",
        "exposed comm.": "exposed_communication_seconds",
        "waiting for ranks": "exposed_waiting_seconds",
        "other": "other_seconds",
        "data wait": "data_wait_seconds",
    }
    time = Table(
        "Seconds of an optimizer step (median over steps, mean over ranks)",
        ("set-up", "step p10", "step p90", *parts),
        tuple(_time_row(row, parts) for row in rows),
        "Exposed: the device has nothing to do but wait. In pipelines the stages work at the same time, so forward and backward "
        "are the time in which any stage does.",
    )
    columns = (
        "set-up",
        "communication",
        "overlap",
        "share of step",
        f"below {RULE:.0%}",
        "collectives",
        "bytes",
        "bubble (ideal)",
    )
    communication = Table(
        "Communication per optimizer step and rank",
        columns,
        tuple(_communication_row(row) for row in rows),
    )
    loads = ("set-up", "device 0 against others", "load", "model FLOP/s", "share of peak")
    unknown = dict.fromkeys(
        reason for row in rows if (reason := row["metrics"]["flops"]["not_measured"])
    )
    machine = Table(
        "Load and arithmetic", loads, tuple(_machine_row(row) for row in rows), "; ".join(unknown)
    )
    return Section("Where the time goes", (time, communication, *_buckets(rows), machine))


def _buckets(rows: Sequence[Row]) -> tuple[Table, ...]:
    """When in the step each bucket was reduced."""
    cells = []
    for row in rows:
        for bucket in row["metrics"]["buckets"]:
            ready, share = (
                bucket["ready_seconds"],
                bucket["ready_seconds"] / row["step_seconds"]["median"],
            )
            kind = (
                ""
                if bucket.get("kind", "all_reduce") == "all_reduce"
                else bucket["kind"].replace("_", "-") + " "
            )
            stage = f"stage {bucket['stage']:.0f}, " if row["strategy"] == "hybrid" else ""
            cells.append(
                (
                    Cell(row["name"], row["name"]),
                    Cell(f"{kind}{stage}{bucket['bucket']:.0f}", bucket["bucket"]),
                    Cell(size(bucket["bytes"]), bucket["bytes"]),
                    Cell(seconds(ready), ready),
                    Cell(f"{share:.0%}", share),
                    Cell(seconds(bucket["transfer_seconds"]), bucket["transfer_seconds"]),
                )
            )
    columns = ("set-up", "bucket", "size", "ready after", "of the step", "transfer")
    note = "Of the last step of each round, on rank 0: how long after the step's beginning the bucket was ready; its transfer."
    return (Table("When the collectives happen", columns, tuple(cells), note),) if cells else ()


def _time_row(row: Row, parts: dict[str, str]) -> tuple[Cell, ...]:
    times = [
        row["step_seconds"]["p10"],
        row["step_seconds"]["p90"],
        *(row["metrics"][key] for key in parts.values()),
    ]
    return (Cell(row["name"], row["name"]), *(number(value, seconds(value)) for value in times))


def _communication_row(row: Row) -> tuple[Cell, ...]:
    metrics, bubble = row["metrics"], row["metrics"]["bubble"]
    has = bool(metrics["communication_seconds"])
    return (
        Cell(row["name"], row["name"]),
        number(
            metrics["communication_seconds"],
            seconds(metrics["communication_seconds"]) if has else "none",
        ),
        Cell(
            f"{metrics['overlap']:.0%}" if metrics["overlap"] is not None else "–",
            metrics["overlap"],
        ),
        Cell(
            f"{metrics['communication_share']:.0%}" if has else "–", metrics["communication_share"]
        ),
        Cell(
            "–" if metrics["keeps_rule"] is None else "yes" if metrics["keeps_rule"] else "no",
            metrics["keeps_rule"],
        ),
        Cell(
            collectives(row) or "0", row["all_reduces_per_step"] or row.get("all_gathers_per_step")
        ),
        Cell(size(row["bytes_per_step"] or 0), row["bytes_per_step"]),
        Cell(
            f"{bubble['measured']:.0%} ({bubble['ideal']:.0%})" if bubble else "–",
            bubble["measured"] if bubble else None,
        ),
    )


def _machine_row(row: Row) -> tuple[Cell, ...]:
    metrics = row["metrics"]
    flops, load, balance = metrics["flops"], metrics["load"], metrics["balance"]
    shown = ", ".join(f"{gpu['device']} {gpu['utilization']:.0%}" for gpu in load["gpu"])
    if not shown:
        cores = [share for share in load["cores_per_rank"] if share is not None]
        shown = (
            ", ".join(f"{share:.2f}" for share in cores) + " cores"
            if cores
            else "not measured: too short a run"
        )
    peak = f"{flops['share_of_peak']:.0%}" if flops["share_of_peak"] is not None else "not known"
    return (
        Cell(row["name"], row["name"]),
        Cell("–" if balance is None else f"{balance:.2f} times as busy", balance),
        Cell(shown, shown),
        number(flops["per_second"], count(flops["per_second"] or 0)),
        Cell(peak, flops["share_of_peak"]),
    )


def _sections(rows: Sequence[Row], recordings: dict[str, list[Recording]]) -> list[Section]:
    """The pictures, each kind of all set-ups together."""
    last = {name: list_[-1] for name, list_ in recordings.items()}

    def all_of(draw: Callable[[Row], Any]) -> tuple[Block, ...]:
        return tuple(
            replace(block, title=f"{row['name']}: {block.title}")
            for row in rows
            if (block := draw(row))
        )

    timelines = all_of(lambda row: figures.timeline(last[row["name"]]))
    schedules = all_of(lambda row: figures.schedule(last[row["name"]]))
    splits = all_of(figures.split)
    load = all_of(lambda row: figures.load_lines(recordings[row["name"]]))
    memory = all_of(lambda row: figures.memory_lines(recordings[row["name"]]))
    losses = figures.loss_lines([row for row in rows if row["losses"]])
    sections = [
        Section("Timelines", timelines, CLOCK),
        Section(
            "Pipeline schedules",
            schedules,
            "One row per stage, numbered by micro-batch; what is empty is the bubble.",
        ),
        Section(
            "How the batch is split", splits, "To scale: every piece is one pass or micro-batch."
        ),
        Section("Memory", (_memory(rows),)),
        Section("Load and memory over time", (*load, *memory), "All rounds one after the other."),
        Section(
            "Losses", (losses,) if losses else (), "Set-ups that train the same lie on one another."
        ),
        Section("The same training?", (_parity(rows),)),
    ]
    return [section for section in sections if section.blocks]


def _held(memory: dict[str, Any], kind: str) -> Cell:
    return number(memory[kind], size(memory[kind])) if kind in memory else Cell("–", None)


def _memory(rows: Sequence[Row]) -> Table:
    kinds = {kind: kind for kind in ("parameters", "gradients", "optimizer", "activations")} | {
        "optimizer": "optimizer"
    }
    if any(
        "gathered" in memory for row in rows for memory in row["peak_bytes"]
    ):  # fsdp alone holds such things
        kinds |= {"gathered": "gathered for a while", "unreduced": "gradients not yet reduced"}
    columns = ("set-up", "rank", "device", "peak", *kinds.values(), "how")
    cells = []
    for row in rows:
        for memory in row["peak_bytes"]:
            cells.append(
                (
                    Cell(row["name"], row["name"]),
                    Cell(str(memory["rank"]), memory["rank"]),
                    Cell(memory["device"], memory["device"]),
                    Cell(size(memory["bytes"]), memory["bytes"]),
                    *(_held(memory, kind) for kind in kinds),
                    Cell(memory["how"], memory["how"]),
                )
            )
    note = "counted: from tensors; allocator: the peak that CUDA's allocator saw, in which activations cannot be told apart."
    return Table("Peak memory per device, and what it is made of", columns, tuple(cells), note)


def _parity(rows: Sequence[Row]) -> Table:
    columns = ("set-up", "verdict", "largest difference", "tolerance", "loss differs by", "cause")
    cells = []
    for row in rows:
        parity = row["parity"] or {
            "max_difference": None,
            "tolerance": None,
            "cause": "not checked",
        }
        moved = row["loss_difference"]
        cells.append(
            (
                Cell(row["name"], row["name"]),
                Cell(same_training(row), is_same_training(row)),
                number(parity["max_difference"], f"{parity['max_difference'] or 0.0:.1e}"),
                number(parity["tolerance"], f"{parity['tolerance'] or 0.0:g}"),
                Cell("–" if moved is None else f"{moved:.1e} of itself", moved),
                Cell(parity["cause"] or "–", parity["cause"]),
            )
        )
    note = "Each set-up's training in fp64 beside the single device's, every parameter; and the losses of the timed runs."
    return Table("", columns, tuple(cells), note)
