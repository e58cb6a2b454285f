"""Tables that show where step time goes: its parts, communication, buckets, and load."""

from collections.abc import Iterator, Sequence

from paralab.analyse.blocks import Cell, Section, ShareRow, Shares
from paralab.analyse.compare import Row
from paralab.analyse.metrics import RULE
from paralab.analyse.phrases import collectives_per_step
from paralab.analyse.table_cells import Cells, exact, name, number, percent, table
from paralab.units import count, seconds, size

MOST_BUCKETS = 12  # collectives per configuration in a table
# Fields of StepShares -> kinds of work in charts.
KINDS = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "exposed_communication": "exposed",
    "waiting": "wait",
    "other": "other",
    "skew": "skew",
}


def where_time_goes(rows: Sequence[Row]) -> Section:
    shares = Shares(
        "Shares of a step (mean over steps and ranks)",
        tuple(KINDS.values()),
        tuple(
            ShareRow(row.name, tuple(row.metrics.shares[field] for field in KINDS))
            for row in rows
            if row.metrics.shares
        ),
        "A step lasts from its first rank's start to its last rank's end. Each row adds up to 100%. "
        "These are means; the tables show medians, which outliers do not change.",
    )
    time = table(
        "Seconds per optimizer step (median over steps, mean over ranks)",
        map(_time, rows),
        "Exposed: the device waits instead of computing. Pipeline stages work at the same time, so "
        "the forward and backward times include all time in which any stage works. Skew: the rank "
        "has not started the step yet, or has finished it before the others.",
    )
    communication = table("Communication per rank and optimizer step", map(_communication, rows))
    unknown = dict.fromkeys(reason for row in rows if (reason := row.metrics.flops.not_measured))
    machine = table("Load and FLOP/s", map(_machine, rows), "; ".join(unknown))
    each = " of each round" if len(rows[0].runs) > 1 else ""
    most = f" Only the {MOST_BUCKETS} longest transfers of a configuration."
    buckets = table(
        "When the collectives happen",
        (cells for row in rows for cells in _buckets(row, several=len(rows) > 1)),
        f"On rank 0, in the last step{each}: when the bucket was ready, measured from the start of "
        "the step, and how long its transfer took."
        + (most if any(len(row.metrics.buckets) > MOST_BUCKETS for row in rows) else ""),
    )
    tables = (time, communication, *((buckets,) if buckets.rows else ()), machine)
    return Section("Where the time goes", (*((shares,) if shares.rows else ()), *tables))


def _time(row: Row) -> Cells:
    times, metrics = row.step_seconds, row.metrics
    parts = {
        "step p10": times.p10,
        "step p90": times.p90,
        "forward": metrics.forward_seconds,
        "backward": metrics.backward_seconds,
        "optimizer": metrics.optimizer_seconds,
        "exposed comm.": metrics.exposed_communication_seconds,
        "waiting for ranks": metrics.exposed_waiting_seconds,
        "other": metrics.other_seconds,
        "skew": metrics.skew_seconds,
        "data wait": metrics.data_wait_seconds,
    }
    cells = {column: number(value, seconds) for column, value in parts.items()}
    return {"configuration": name(row.name)} | cells


def _communication(row: Row) -> Cells:
    metrics, bubble = row.metrics, row.metrics.bubble
    keeps_rule, share = metrics.keeps_rule, metrics.communication_share
    idle = f"{bubble.measured:.0%} ({bubble.ideal:.0%})" if bubble else "–"
    collectives = row.all_reduces_per_step or row.all_gathers_per_step
    return {
        "configuration": name(row.name),
        "communication": number(
            metrics.communication_seconds, lambda value: "none" if value == 0 else seconds(value)
        ),
        "overlap": percent(metrics.overlap),
        "share of step": Cell(f"{share:.0%}" if share else "–", share),
        f"below {RULE:.0%}": Cell({None: "–", True: "yes", False: "no"}[keeps_rule], keeps_rule),
        "collectives": Cell(collectives_per_step(row) or "0", collectives),
        "bytes": number(row.bytes_per_step, size),
        "bubble (ideal)": Cell(idle, bubble.measured if bubble else None),
    }


def _buckets(row: Row, several: bool) -> Iterator[Cells]:
    """Yield when each bucket was reduced within the step. Shards exchange dozens of tensors."""
    longest = sorted(row.metrics.buckets, key=lambda bucket: -bucket.transfer_seconds)
    shown = longest[:MOST_BUCKETS]
    for bucket in (bucket for bucket in row.metrics.buckets if bucket in shown):
        kind = bucket.kind.replace("_", "-") + " " if bucket.kind != "all_reduce" else ""
        stage = f"stage {bucket.stage}, " if row.strategy == "hybrid" else ""
        what = f"{bucket.unit} " if bucket.unit else ""
        words = f"{stage}{kind}{what}{bucket.bucket}"
        yield {
            **({"configuration": name(row.name)} if several else {}),
            "bucket": exact(bucket.bucket) if words.isdecimal() else name(words),
            "size": number(bucket.bytes, size),
            "ready after": number(bucket.ready_seconds, seconds),
            "of the step": percent(bucket.ready_share),
            "transfer": number(bucket.transfer_seconds, seconds),
        }


def _machine(row: Row) -> Cells:
    flops, load, balance = row.metrics.flops, row.metrics.load, row.metrics.balance
    cores = ", ".join(f"{share:.2f}" for share in load.cores_per_rank if share is not None)
    busy = ", ".join(f"{gpu.device} {gpu.utilization:.0%}" for gpu in load.gpu)
    used = "1 core" if cores == "1.00" else f"{cores} cores"
    busy = busy or (used if cores else "not measured: the run was too short")
    return {
        "configuration": name(row.name),
        "device 0 vs. others": number(balance, "{:.2f}× as busy".format, "–"),
        "load": name(busy),
        "model FLOP/s": number(flops.per_second, count),
        "share of peak": percent(flops.share_of_peak, "unknown"),
    }
