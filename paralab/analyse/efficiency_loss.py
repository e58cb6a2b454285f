"""Where the time went that a perfect split would have saved.

perfect   a step of n devices takes 1/n of one device's, for the same batch (or as long, for n times the batch)
lost      what it takes more than that, and the measured times it is made of, each beyond its own share
"""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def perfect_seconds(row: Row, one: Row) -> float:
    return float(_work(row, one) * one["step_seconds"]["median"])


def _work(row: Row, one: Row) -> float:
    """Samples per device, against `one`: what a perfect step shrinks or grows with."""
    return float(row["batch"]["size"] / one["batch"]["size"] / (row["devices"] / one["devices"]))


def losses_of(row: Row, one: Row) -> dict[str, float]:
    """Seconds per step lost against a perfect split, by cause. `one`: the set-up it is compared
    with."""
    mine: dict[str, Any] = row["metrics"]
    theirs: dict[str, Any] = one["metrics"]
    work = _work(row, one)

    def more(name: str) -> float:
        return max(0.0, float(mine[name] or 0.0) - work * float(theirs[name] or 0.0))

    computing = more("compute_seconds")
    bubble = min(
        computing,
        (mine["bubble"] or {"measured": 0.0})["measured"] * (mine["compute_seconds"] or 0.0),
    )
    known = {
        "exposed communication": more("exposed_communication_seconds"),
        "waiting for a slower rank": more("exposed_waiting_seconds"),
        "idle stages (the bubble)": bubble,
        "computing slower": computing - bubble,
        "the optimizer, which every device repeats": more("optimizer_seconds"),
    }
    known["other"] = max(
        0.0, row["step_seconds"]["median"] - perfect_seconds(row, one) - sum(known.values())
    )
    return known
