"""The proof in the terminal: one line per case, and the verdict."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from paralab.show.console import console, plain_table, show_table


def print_proof(proof: dict[str, Any]) -> None:
    for workload in proof["workloads"]:
        table = plain_table("strategy", "batch", "last batch", "difference", "verdict", right=("difference",))
        for case in proof["cases"]:
            if case["options"]["workload"] != workload:
                continue
            difference = case["max_difference"]
            table.add_row(
                " · ".join([case["strategy"], *filter(None, [case["options"].get("schedule")])]),
                case["arithmetic"],
                "partial" if case["options"]["partial_last_batch"] else "whole",
                "unknown" if difference is None else f"{difference:.1e}",
                verdict(case),
            )
        console.print(f"[bold]{escape(workload)}[/]")
        show_table(table)
    for case in proof["skipped"]:
        console.print(f"[yellow]left out:[/] {case['strategy']} " + escape(f"{case['options']}: {case['reason']}"), soft_wrap=True)
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
    if proof["dropout"] != "none":
        console.print(f"  dropout was {proof['dropout']}: what it draws differs when the work is split")
    for cause in dict.fromkeys(case["cause"] for case in proof["cases"] if case["cause"]):
        console.print(f"  cause: {escape(cause)}", soft_wrap=True)
    console.print(f"{proof['seconds']:.1f} s, run folder {escape(proof['run_folder'])}", style="dim")


def verdict(case: dict[str, Any]) -> str:
    if case["equal"]:
        return "[green]equal[/]"
    return "[yellow]differs, as expected[/]" if case["legitimate"] else "[red]WRONG[/]"
