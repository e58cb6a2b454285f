"""Report scaling to more devices: throughput per device, and why the speed-up is not perfect."""

from __future__ import annotations

from paralab.analyse.blocks import Bar, Bars, Cell, Finding, Line, Lines, Section, Table
from paralab.analyse.compare import Comparison, Row
from paralab.analyse.efficiency_loss import losses_of
from paralab.analyse.phrases import capital
from paralab.analyse.verdict import times_as_fast
from paralab.plan.remarks import SHARE_CORES, find_sharing
from paralab.units import plural, rate, seconds

GOOD = 0.9  # fraction of the perfect speed-up


def explain_crowding(row: Row, cores: int) -> str | None:
    """Explain slower compute, if too few cores are the reason."""
    if SHARE_CORES not in find_sharing(row.remarks):
        return None
    used = [share for share in row.metrics.load.cores_per_rank if share is not None]
    total = f" and used {sum(used):.1f} in total" if used else ""
    return f"{plural(row.devices, 'device')} share {plural(cores, 'core')}{total}"


def section(comparison: Comparison) -> Section:
    rows = comparison.rows
    if not rows:
        return Section("Scaling", (), "Nothing was measured.")
    one, cores = rows[0], comparison.machine.cores
    columns = (
        "devices",
        "samples/s",
        "per device",
        "speed-up",
        "perfect",
        "efficiency",
        "lost per step",
        "where it went",
    )
    table = Table("Scaling", columns, tuple(_row(row, one, cores) for row in rows))
    lost = Table(
        "Seconds lost per step against a perfect split",
        ("devices", *losses_of(one, one)),
        tuple(
            (
                Cell(str(row.devices), row.devices),
                *(Cell(seconds(value), value) for value in losses_of(row, one).values()),
            )
            for row in rows[1:]
        ),
        "Slower compute: forward and backward took longer than their share of the batch explains "
        "(fixed cost per pass, shared cores, memory bandwidth).",
    )
    return Section("Scaling", (table, lost, *_charts(rows, one)))


def _charts(rows: list[Row], one: Row) -> tuple[Lines, Bars]:
    perfect = Line("perfect", tuple((float(r.devices), r.devices / one.devices) for r in rows))
    measured = Line(
        "measured",
        tuple((float(row.devices), row.ratio.value) for row in rows),
        tuple(row.ratio.low or row.ratio.value for row in rows),
        tuple(row.ratio.high or row.ratio.value for row in rows),
    )
    per_device = tuple(
        Bar(
            plural(row.devices, "device"),
            row.samples_per_second_per_device,
            text=rate(row.samples_per_second_per_device),
        )
        for row in rows
    )
    return (
        Lines("Speed-up over devices", (perfect, measured), "devices", "times as fast", "number"),
        Bars("Samples per second per device", per_device, "samples/s"),
    )


def _row(row: Row, one: Row, cores: int) -> tuple[Cell, ...]:
    perfect, causes = row.devices / one.devices, losses_of(row, one)
    lost = sum(causes.values())
    largest = max(causes, key=lambda name: causes[name])
    where = "–"
    if row is not one and lost >= 0.02 * row.step_seconds.median:
        where = f"{largest}: {seconds(causes[largest])}"
    why = explain_crowding(row, cores)
    if why and largest == "slower compute":
        where += f" ({why})"
    return (
        Cell(str(row.devices), row.devices),
        Cell(rate(row.samples_per_second), row.samples_per_second),
        Cell(rate(row.samples_per_second_per_device), row.samples_per_second_per_device),
        Cell(f"{row.ratio.value:.2f}", row.ratio.value),
        Cell(f"{perfect:g}", perfect),
        Cell(f"{row.efficiency:.0%}", row.efficiency),
        Cell(seconds(lost) if row is not one else "–", lost if row is not one else None),
        Cell(where, where),
    )


def findings(comparison: Comparison) -> tuple[Finding, ...]:
    """Compare each speed-up with the number of devices. The evidence names the causes of the
    gap."""
    found: list[Finding] = []
    for row in comparison.rows[1:]:
        one, cores = comparison.rows[0], comparison.machine.cores
        perfect, lost = row.devices / one.devices, losses_of(row, one)
        evidence = {
            "speed_up": row.ratio.to_dict(),
            "perfect": perfect,
            "efficiency": row.efficiency,
            "lost_seconds": lost,
        }
        devices = plural(row.devices, "device")
        text = f"{devices}: {times_as_fast(row.ratio)}; {perfect:g} would be perfect."
        if (row.efficiency or 0.0) >= GOOD:
            found.append(Finding("fastest", f"{text} That is close to perfect scaling.", evidence))
            continue
        causes = sorted(lost.items(), key=lambda item: -item[1])[:2]
        named = " and ".join(
            f"{name} ({seconds(value)} per step)" for name, value in causes if value > 0
        )
        text += f" The rest went into {named}."
        if why := explain_crowding(row, cores):
            text += f" {capital(why)}: devices that compete for cores cannot run faster."
        found.append(Finding("limit", text, evidence))
    return tuple(found)
