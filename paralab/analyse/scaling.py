"""Report how training scales to more devices, and why the speed-up is not perfect.

perfect   n devices take 1/n of one device's step time for the same batch (or the same time for an
          n times larger batch)
lost      all time beyond that, split by measured cause
"""

from paralab.analyse.blocks import Bar, Bars, Cell, Finding, Line, Lines, Section
from paralab.analyse.compare import Comparison, Row
from paralab.analyse.phrases import capital, interval, times_as_fast
from paralab.analyse.table_cells import Cells, exact, name, number, percent, table
from paralab.plan.remarks import SHARE_CORES, find_sharing
from paralab.units import plural, rate, seconds

GOOD = 0.9  # fraction of the perfect speed-up


def perfect_seconds(row: Row, one: Row) -> float:
    return _work(row, one) * one.step_seconds.median


def _work(row: Row, one: Row) -> float:
    """Return the samples per device, relative to those of `one`."""
    # An epoch may have fewer samples than a batch.
    samples, base = (r.samples_per_step or r.batch.size for r in (row, one))
    return samples / base / (row.devices / one.devices)


def losses_of(row: Row, one: Row) -> dict[str, float]:
    """Return the seconds lost per step by cause, compared with a perfect split of `one`. They add up
    to the difference, so `other` is negative if other parts of the step became shorter."""
    mine, work = row.metrics, _work(row, one)

    def more(name: str) -> float:
        return max(0.0, (mine[name] or 0.0) - work * (one.metrics[name] or 0.0))

    computing = more("compute_seconds")
    optimizer = "the optimizer step"
    if row.strategy in ("ddp", "hybrid"):
        optimizer += ", which every replica repeats"
    idle = mine.bubble.measured if mine.bubble else 0.0
    bubble = min(computing, idle * (mine.compute_seconds or 0.0))
    known = {
        "exposed communication": more("exposed_communication_seconds"),
        "waiting for a slower rank": more("exposed_waiting_seconds"),
        "idle stages (the bubble)": bubble,
        "slower compute": computing - bubble,
        optimizer: more("optimizer_seconds"),
    }
    lost = row.step_seconds.median - perfect_seconds(row, one)
    return known | {"other": lost - sum(known.values())}


def _explain_crowding(row: Row, cores: int) -> str:
    """Explain slower compute if too few cores are the reason; otherwise return an empty string."""
    if SHARE_CORES not in find_sharing(row.remarks):
        return ""
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
            "explains (fixed cost per pass, shared cores, memory bandwidth). Other: the rest, "
            "negative if it is shorter than in a perfect split."
        )
        tables.append(table("Seconds lost per step, compared with a perfect split", lost, note))
    return Section("Scaling", (*tables, *_charts(rows, one)))


def _charts(rows: list[Row], one: Row) -> tuple[Lines, Bars]:
    ratios = [(float(row.devices), row.ratio) for row in rows]
    perfect = Line("perfect", tuple((devices, devices / one.devices) for devices, _ in ratios))
    measured = Line(
        "measured",
        tuple((devices, ratio.value) for devices, ratio in ratios),
        tuple(ratio.low or ratio.value for _, ratio in ratios),
        tuple(ratio.high or ratio.value for _, ratio in ratios),
    )
    rates = [(plural(row.devices, "device"), row.samples_per_second_per_device) for row in rows]
    bars = tuple(Bar(devices, value, text=rate(value)) for devices, value in rates)
    title = "Speed-up by number of devices"
    return (
        Lines(title, (perfect, measured), "devices", "times as fast", "number"),
        Bars("Samples per second per device", bars, "samples/s"),
    )


def _row(row: Row, one: Row, cores: int) -> Cells:
    step, perfect, causes = row.step_seconds.median, row.devices / one.devices, losses_of(row, one)
    lost = None if row is one else step - perfect_seconds(row, one)
    where = "–"
    if lost is not None and lost >= 0.02 * step:
        largest = max(causes, key=lambda cause: causes[cause])
        crowded = _explain_crowding(row, cores) if largest == "slower compute" else ""
        where = f"{largest}: {seconds(causes[largest])}" + (f" ({crowded})" if crowded else "")
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
    rows, cores = comparison.rows, comparison.machine.cores
    return tuple(_finding(row, rows[0], cores) for row in rows[1:])


def _finding(row: Row, one: Row, cores: int) -> Finding:
    perfect, lost = row.devices / one.devices, losses_of(row, one)
    evidence = {"speed_up": row.ratio.to_dict(), "perfect": perfect}
    evidence |= {"efficiency": row.efficiency, "lost_seconds": lost}
    devices = plural(row.devices, "device")
    other = one.name if one.devices > 1 else None
    text = f"{devices}: {times_as_fast(row.ratio, other)}; {perfect:g} would be perfect."
    close = row.ratio.reaches(GOOD * perfect)
    if (row.efficiency or 0.0) >= GOOD and close is not False:
        how = " That is close to perfect scaling."
        if not close:
            too = "noisy" if interval(row.ratio) else "few rounds"
            how = f" Too {too} to tell whether that is close to perfect scaling."
        return Finding("fastest" if close else "limit", f"{text}{how}", evidence)

    causes = sorted(lost.items(), key=lambda item: -item[1])[:2]
    known = {"other": "unexplained"}
    named = [f"{seconds(time)} ({known.get(cause, cause)})" for cause, time in causes if time > 0]
    if named:
        text += f" Each step loses {' and '.join(named)}"
        text += f", and gains {seconds(-lost['other'])} elsewhere." if lost["other"] < 0 else "."
    if why := _explain_crowding(row, cores):
        text += f" {capital(why)}: devices that compete for cores cannot run faster."
    return Finding("limit", text, evidence)
