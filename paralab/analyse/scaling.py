"""More devices: throughput per device, and where the missing part of the speed-up went."""

from __future__ import annotations

from typing import Any

from paralab.analyse.blocks import Bar, Bars, Cell, Finding, Line, Lines, Section, Table
from paralab.analyse.efficiency_loss import losses_of
from paralab.analyse.verdict import times_as_fast
from paralab.units import plural, rate, seconds

Row = dict[str, Any]
GOOD = 0.9  # of the perfect speed-up


def crowded(row: Row, cores: int) -> str | None:
    """Why computing got slower, where too few cores are the reason."""
    used = [share for share in row["metrics"]["load"]["cores_per_rank"] if share is not None]
    if any("share cores" in remark for remark in row["remarks"]):
        together = f", which used {sum(used):.1f} together" if used else ""
        return f"{plural(row['devices'], 'device')} share {plural(cores, 'core')}{together}"
    return None


def section(comparison: dict[str, Any]) -> Section:
    rows = [row for row in comparison["rows"] if not row["error"]]
    if not rows:
        return Section("Scaling", (), "Nothing was measured.")
    one, cores = rows[0], comparison["machine"]["cores"]
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
    names = list(losses_of(one, one))
    lost = Table(
        "Seconds lost per step against a perfect split",
        ("devices", *names),
        tuple(
            (
                Cell(str(row["devices"]), row["devices"]),
                *(Cell(seconds(value), value) for value in losses_of(row, one).values()),
            )
            for row in rows[1:]
        ),
        "Computing slower: forward and backward took longer than the share of the batch explains (fixed costs of a pass, shared "
        "cores, memory bandwidth).",
    )
    perfect = [(float(row["devices"]), row["devices"] / one["devices"]) for row in rows]
    measured = [(float(row["devices"]), row["speed_up"]["value"]) for row in rows]
    low, high = (
        [float(row["speed_up"][end] or row["speed_up"]["value"]) for row in rows]
        for end in ("low", "high")
    )
    lines = (
        Line("perfect", tuple(perfect)),
        Line("measured", tuple(measured), tuple(low), tuple(high)),
    )
    per_device = tuple(
        Bar(
            f"{row['devices']} device(s)",
            row["samples_per_second_per_device"],
            text=rate(row["samples_per_second_per_device"]),
        )
        for row in rows
    )
    return Section(
        "Scaling",
        (
            table,
            lost,
            Lines("Speed-up over devices", lines, "devices", "times as fast", "number"),
            Bars("Samples per second and device", per_device, "samples/s"),
        ),
    )


def _row(row: Row, one: Row, cores: int) -> tuple[Cell, ...]:
    perfect = row["devices"] / one["devices"]
    lost = losses_of(row, one)
    together = sum(lost.values())
    largest = max(lost, key=lambda name: lost[name])
    where = (
        "–"
        if row is one or together < 0.02 * row["step_seconds"]["median"]
        else f"{largest}: {seconds(lost[largest])}"
    )
    why = crowded(row, cores)
    if why and largest == "computing slower":
        where += f" ({why})"
    return (
        Cell(str(row["devices"]), row["devices"]),
        Cell(rate(row["samples_per_second"]), row["samples_per_second"]),
        Cell(rate(row["samples_per_second_per_device"]), row["samples_per_second_per_device"]),
        Cell(f"{row['speed_up']['value']:.2f}", row["speed_up"]["value"]),
        Cell(f"{perfect:g}", perfect),
        Cell(f"{row['efficiency']:.0%}", row["efficiency"]),
        Cell(seconds(together) if row is not one else "–", together if row is not one else None),
        Cell(where, where),
    )


def findings(comparison: dict[str, Any]) -> tuple[Finding, ...]:
    """The ratio should approach the number of devices; clearly less has a cause, and the evidence
    names it."""
    rows = [row for row in comparison["rows"] if not row["error"]]
    found: list[Finding] = []
    if not rows:
        return ()
    one, cores = rows[0], comparison["machine"]["cores"]
    for row in rows[1:]:
        perfect, lost = row["devices"] / one["devices"], losses_of(row, one)
        ratio = row["speed_up"]
        evidence = {
            "speed_up": ratio,
            "perfect": perfect,
            "efficiency": row["efficiency"],
            "lost_seconds": lost,
        }
        text = (
            f"{plural(row['devices'], 'device')}: {times_as_fast(ratio)}, of a perfect {perfect:g}."
        )
        if row["efficiency"] >= GOOD:
            found.append(Finding("fastest", text + " That is close to perfect scaling.", evidence))
            continue
        causes = sorted(lost.items(), key=lambda item: -item[1])[:2]
        named = " and ".join(
            f"{name} ({seconds(value)} per step)" for name, value in causes if value > 0
        )
        why = crowded(row, cores)
        shared = (
            f" {why[0].upper()}{why[1:]}: no speed-up can come from devices that take each other's cores."
            if why
            else ""
        )
        found.append(
            Finding("limit", f"{text} The missing part went into {named}.{shared}", evidence)
        )
    return tuple(found)
