"""The preflight in the terminal: what was looked at, what was seen, and the verdict on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.markup import escape

from paralab.doctor.finding import Finding
from paralab.doctor.preflight import Facts, table
from paralab.show.console import plain_table, show_table

COLOURS = {"error": "red", "warning": "yellow", "suspect": "yellow", "good": "green"}


def print_preflight(facts: Facts, findings: Sequence[Finding]) -> None:
    shown = plain_table("looked at", "seen", "verdict")
    for row in table(facts, findings):
        colour = COLOURS.get(row["verdict"].split()[0], "dim")
        shown.add_row(row["name"], escape(row["value"] or ""), f"[{colour}]{escape(row['verdict'])}[/]")
    show_table(shown)


def preflight_json(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """`looked_at`: the table; `machine`: the facts behind it; `findings` as everywhere."""
    return {
        "looked_at": table(facts, findings),
        "machine": asdict(facts),
        "findings": [finding.to_json() for finding in findings],
    }
