"""Report how training scales to more devices, and why the speed-up is not perfect."""

from paralab.analyse.blocks import Bar, Bars, Cell, Finding, Line, Lines, Section
from paralab.analyse.compare import Comparison, Row
from paralab.analyse.efficiency_loss import losses_of, perfect_seconds
from paralab.analyse.phrases import capital
from paralab.analyse.table_cells import Cells, exact, name, number, percent, table
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
    tables = [table("Scaling", (_row(row, one, cores) for row in rows))]
    lost: list[Cells] = [
        {"devices": exact(row.devices)}
        | {cause: number(value, seconds) for cause, value in losses_of(row, one).items()}
        for row in rows[1:]
    ]
    if lost:
        note = (
            "Slower compute: forward and backward took longer than their share of the batch "
            "explains (fixed cost per pass, shared cores, memory bandwidth)."
        )
        tables.append(table("Seconds lost per step, compared with a perfect split", lost, note))
    return Section("Scaling", (*tables, *_charts(rows, one)))


def _charts(rows: list[Row], one: Row) -> tuple[Lines, Bars]:
    perfect = Line("perfect", tuple((float(r.devices), r.devices / one.devices) for r in rows))
    measured = Line(
        "measured",
        tuple((float(row.devices), row.ratio.value) for row in rows),
        tuple(row.ratio.low or row.ratio.value for row in rows),
        tuple(row.ratio.high or row.ratio.value for row in rows),
    )
    rates = [(plural(row.devices, "device"), row.samples_per_second_per_device) for row in rows]
    per_device = tuple(Bar(devices, value, text=rate(value)) for devices, value in rates)
    title = "Speed-up by number of devices"
    return (
        Lines(title, (perfect, measured), "devices", "times as fast", "number"),
        Bars("Samples per second per device", per_device, "samples/s"),
    )


def _row(row: Row, one: Row, cores: int) -> Cells:
    perfect, causes = row.devices / one.devices, losses_of(row, one)
    lost = None if row is one else max(0.0, row.step_seconds.median - perfect_seconds(row, one))
    largest = max(causes, key=lambda name: causes[name])
    where = "–"
    if lost is not None and lost >= 0.02 * row.step_seconds.median:
        where = f"{largest}: {seconds(causes[largest])}"
        if largest == "slower compute" and (why := explain_crowding(row, cores)):
            where += f" ({why})"
    return {
        "devices": exact(row.devices),
        "samples/s": number(row.samples_per_second, rate),
        "per device": number(row.samples_per_second_per_device, rate),
        "speed-up": Cell(f"{row.ratio.value:.2f}", row.ratio.value),
        "perfect": Cell(f"{perfect:g}", perfect),
        "efficiency": percent(row.efficiency),
        "lost per step": number(lost, seconds, "–"),
        "where it went": name(where),
    }


def findings(comparison: Comparison) -> tuple[Finding, ...]:
    """Compare each speed-up with the number of devices, and name the causes of the gap."""
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
        known = {"other": "unexplained time"}
        named = [f"{known.get(c, c)} ({seconds(time)} per step)" for c, time in causes if time > 0]
        if named:
            text += f" The lost time is {' and '.join(named)}."
        if why := explain_crowding(row, cores):
            text += f" {capital(why)}: devices that compete for cores cannot run faster."
        found.append(Finding("limit", text, evidence))
    return tuple(found)
