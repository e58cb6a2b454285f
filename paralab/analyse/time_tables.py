"""Tables that show where step time goes: its parts, communication, buckets, load."""

from __future__ import annotations

from collections.abc import Sequence

from paralab.analyse.blocks import Cell, Section, Table
from paralab.analyse.compare import Row
from paralab.analyse.metrics import RULE
from paralab.analyse.phrases import collectives_per_step
from paralab.units import count, seconds, size


def number(value: float | None, text: str) -> Cell:
    return Cell("not measured" if value is None else text, value)


def where_time_goes(rows: Sequence[Row]) -> Section:
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
        "Seconds per optimizer step (median over steps, mean over ranks)",
        ("configuration", "step p10", "step p90", *parts),
        tuple(_time_row(row, parts) for row in rows),
        "Exposed: the device waits instead of computing. Pipeline stages work at the same time, so "
        "forward and backward are the time in which any stage works.",
    )
    columns = (
        "configuration",
        "communication",
        "overlap",
        "share of step",
        f"below {RULE:.0%}",
        "collectives",
        "bytes",
        "bubble (ideal)",
    )
    communication = Table(
        "Communication per rank and optimizer step",
        columns,
        tuple(_communication_row(row) for row in rows),
    )
    loads = ("configuration", "device 0 vs. others", "load", "model FLOP/s", "share of peak")
    unknown = dict.fromkeys(reason for row in rows if (reason := row.metrics.flops.not_measured))
    machine = Table(
        "Load and arithmetic", loads, tuple(_machine_row(row) for row in rows), "; ".join(unknown)
    )
    return Section("Where the time goes", (time, communication, *_buckets(rows), machine))


def _buckets(rows: Sequence[Row]) -> tuple[Table, ...]:
    """Create the table that shows when each bucket was reduced within the step."""
    cells = []
    for row in rows:
        for bucket in row.metrics.buckets:
            ready = bucket.ready_seconds
            share = ready / row.step_seconds.median
            kind = bucket.kind.replace("_", "-") + " " if bucket.kind != "all_reduce" else ""
            stage = f"stage {bucket.stage}, " if row.strategy == "hybrid" else ""
            cells.append(
                (
                    Cell(row.name, row.name),
                    Cell(f"{kind}{stage}{bucket.bucket}", bucket.bucket),
                    Cell(size(bucket.bytes), bucket.bytes),
                    Cell(seconds(ready), ready),
                    Cell(f"{share:.0%}", share),
                    Cell(seconds(bucket.transfer_seconds), bucket.transfer_seconds),
                )
            )
    columns = ("configuration", "bucket", "size", "ready after", "of the step", "transfer")
    note = (
        "On rank 0, in the last step of each round: when the bucket was ready, measured from the "
        "start of the step, and how long its transfer took."
    )
    return (Table("When the collectives happen", columns, tuple(cells), note),) if cells else ()


def _time_row(row: Row, parts: dict[str, str]) -> tuple[Cell, ...]:
    times = [
        row.step_seconds.p10,
        row.step_seconds.p90,
        *(row.metrics[key] for key in parts.values()),
    ]
    return (Cell(row.name, row.name), *(number(value, seconds(value)) for value in times))


def _communication_row(row: Row) -> tuple[Cell, ...]:
    metrics, bubble = row.metrics, row.metrics.bubble
    has = bool(metrics.communication_seconds)
    return (
        Cell(row.name, row.name),
        number(
            metrics.communication_seconds,
            seconds(metrics.communication_seconds) if has else "none",
        ),
        Cell(
            f"{metrics.overlap:.0%}" if metrics.overlap is not None else "–",
            metrics.overlap,
        ),
        Cell(f"{metrics.communication_share:.0%}" if has else "–", metrics.communication_share),
        Cell(
            "–" if metrics.keeps_rule is None else "yes" if metrics.keeps_rule else "no",
            metrics.keeps_rule,
        ),
        Cell(
            collectives_per_step(row) or "0", row.all_reduces_per_step or row.all_gathers_per_step
        ),
        Cell(size(row.bytes_per_step), row.bytes_per_step),
        Cell(
            f"{bubble.measured:.0%} ({bubble.ideal:.0%})" if bubble else "–",
            bubble.measured if bubble else None,
        ),
    )


def _machine_row(row: Row) -> tuple[Cell, ...]:
    metrics = row.metrics
    flops, load, balance = metrics.flops, metrics.load, metrics.balance
    shown = ", ".join(f"{gpu.device} {gpu.utilization:.0%}" for gpu in load.gpu)
    if not shown:
        cores = [share for share in load.cores_per_rank if share is not None]
        shown = (
            ", ".join(f"{share:.2f}" for share in cores) + " cores"
            if cores
            else "not measured: the run was too short"
        )
    peak = f"{flops.share_of_peak:.0%}" if flops.share_of_peak is not None else "unknown"
    return (
        Cell(row.name, row.name),
        Cell("–" if balance is None else f"{balance:.2f}× as busy", balance),
        Cell(shown, shown),
        number(flops.per_second, count(flops.per_second or 0)),
        Cell(peak, flops.share_of_peak),
    )
