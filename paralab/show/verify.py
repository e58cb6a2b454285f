"""The proof in the terminal: one line per case, and the verdict."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(highlight=False)


def print_proof(proof: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("strategy", "workload", "batch", "last batch", "largest difference", "verdict"):
        table.add_column(column, justify="right" if column == "largest difference" else "left", overflow="fold")
    for case in proof["cases"]:
        options = case["options"]
        difference = case["max_difference"]
        table.add_row(
            case["strategy"],
            options["workload"],
            case["arithmetic"],
            "partial" if options["partial_last_batch"] else "whole",
            "not finite" if difference is None else f"{difference:.1e}",
            verdict(case),
        )
    console.print(table)
    for case in proof["skipped"]:
        console.print(f"[yellow]left out[/] {case['strategy']} {case['options']}: {case['reason']}", soft_wrap=True)
    equal = sum(case["equal"] for case in proof["cases"])
    expected = sum(case["legitimate"] for case in proof["cases"])
    wrong = len(proof["cases"]) - equal - expected
    first = proof["cases"][0]
    console.print(
        f"{equal} of {len(proof['cases'])} cases train like one device ({proof['precision']}, {first['measure']} within "
        f"{first['tolerance']:g})"
        + (f"; {expected} differ for a known reason" if expected else "")
        + (f"; [red]{wrong} are wrong[/]" if wrong else ""),
        soft_wrap=True,
    )
    for cause in dict.fromkeys(case["cause"] for case in proof["cases"] if case["cause"]):
        console.print(f"  cause: {cause}", soft_wrap=True)
    console.print(f"{proof['seconds']:.1f} s, run folder {proof['run_folder']}", style="dim")


def verdict(case: dict[str, Any]) -> str:
    if case["equal"]:
        return "[green]equal[/]"
    return "[yellow]differs, as expected[/]" if case["legitimate"] else "[red]WRONG[/]"
