"""The proof in the terminal: one line per case, and the verdict."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from paralab.analyse.verify_summary import (
    differing_buffers,
    headline,
    left_out,
    size_of,
    verdict_of,
)
from paralab.show.console import console, plain_table, show_table
from paralab.units import plural


def print_proof(proof: dict[str, Any]) -> None:
    excuses = any(case["excused"] for case in proof["cases"])
    columns = [
        "strategy",
        "batch",
        "last batch",
        "difference",
        "verdict",
        *(["as asked"] if excuses else []),
    ]
    for workload in proof["workloads"]:
        table = plain_table(*columns, right=("difference", "as asked"))
        for case in proof["cases"]:
            if case["options"]["workload"] == workload:
                table.add_row(*_row(case), *([_as_asked(case)] if excuses else []))
        console.print(f"[bold]{escape(workload)}[/]")
        show_table(table)
    for name, number, reason in left_out(proof):
        console.print(
            f"[yellow]not run:[/] {name}, {plural(number, 'case')}: " + escape(reason),
            soft_wrap=True,
        )
    console.print(escape(headline(proof)), soft_wrap=True)
    for line in _reasons(proof):
        console.print(f"  {escape(line)}", soft_wrap=True)
    console.print(
        f"{proof['seconds']:.1f} s, run folder {escape(proof['run_folder'])}", style="dim"
    )


def _row(case: dict[str, Any]) -> tuple[str, ...]:
    verdict, color = verdict_of(case), "green" if case["equal"] else "red"
    return (
        " · ".join([case["strategy"], *filter(None, [case["options"].get("schedule")])]),
        case["arithmetic"],
        "partial" if case["options"]["partial_last_batch"] else "whole",
        size_of(case["max_difference"]),
        f"[{color}]{verdict}[/]",
    )


def _as_asked(case: dict[str, Any]) -> str:
    return (
        size_of(case["excused"]["max_difference"])
        if case["excused"]
        else size_of(case["max_difference"])
    )


def _reasons(proof: dict[str, Any]) -> list[str]:
    """Every reason once: why cases are wrong, and what the proof held fixed."""
    found = [f"wrong: {case['cause']}" for case in proof["cases"] if case["cause"]]
    if proof["dropout"] != "none":
        found.append(
            f"dropout was {proof['dropout']}: what it draws differs when the work is split"
        )
    for case in proof["cases"]:
        found += [
            f"held fixed for the proof: {reason}"
            for reason in (case["excused"] or {}).get("reasons", [])
        ]
    largest: dict[str, float] = {}
    for case in proof["cases"]:
        for name, size in differing_buffers(case).items():
            largest[name] = max(largest.get(name, 0.0), float("inf") if size is None else size)
    found += [
        f"buffer {name} differs by up to {size:.2g} from one device's"
        for name, size in largest.items()
    ]
    for workload, names in proof["state"].items():
        found.append(
            f"stateful forward: {workload} changes {', '.join(names)} in every call, and may behave differently after the "
            f"{plural(proof['steps'], 'step')} checked here (--steps N checks more)"
        )
    return list(dict.fromkeys(found))
