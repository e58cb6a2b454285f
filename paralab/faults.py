"""The fault matrix: every fault is really had by a real run, and what came of it is measured, not
assumed.

Each trial trains the same workload on two ranks with checkpoints and restarts, has one fault, and
lets the run, or the same command with --resume, come to its end. The weights are compared byte for
byte with those of the undisturbed run.
"""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paralab.disturbances import EVERY, IN_RANKS, LAST, STEPS, Cell, Room, Trial
from paralab.errors import unknown
from paralab.launch.processes import can_fork
from paralab.record.folder import RunFolder

AT_LEAST = 5  # trials of every fault
RANDOM_KILLS = 20
TITLES = {
    "kill": "SIGKILL",
    "segv": "SIGSEGV",
    "exception": "exception",
    "exit0": "os._exit(0)",
    "stop": "SIGSTOP",
    "gil": "endless loop holding the GIL",
    "memory": "out of memory",
    "nan": "NaN loss",
    "slow": "straggler",
    "random": "SIGKILL at a random moment",
    "template": "SIGKILL of what the ranks were forked from",
    "disk": "disk full while saving",
    "bit flip": "bit flip in a checkpoint",
    "cut log": "truncated log",
    "sigterm": "SIGTERM to the launcher",
    "sigusr1": "SIGUSR1 to the launcher",
    "ctrl-c": "Ctrl-C",
    "ctrl-c twice": "Ctrl-C twice",
    "launcher": "launcher killed",
}


def matrix(only: tuple[str, ...] = ()) -> list[Cell]:
    for name in only:
        if name not in TITLES:
            raise unknown("fault", name, TITLES)
    cells = [
        Cell(fault, rank, phase)
        for fault in IN_RANKS
        for rank in (0, LAST)
        for phase in (("step",) if fault in ("nan", "slow") else ("start", "step", "save"))
    ]
    cells += [Cell(fault) for fault in TITLES if fault not in IN_RANKS]
    return [cell for cell in cells if not only or cell.fault in only]


def faults(
    only: tuple[str, ...] = (),
    repeat: int | None = None,
    workload: str = "mlp",
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run the matrix; return its rows. `repeat`: trials of every cell; by default so many that
    every fault is had five times."""
    cells = matrix(only)
    run_folder = RunFolder.create(out, "faults")
    folder = run_folder.path
    room = Room(folder, workload)
    say(
        f"{workload}, ddp on 2 ranks, {STEPS} steps, a checkpoint every {EVERY}; the undisturbed run first"
    )
    room.undisturbed()
    rows = []
    for cell in cells:
        least = RANDOM_KILLS if cell.fault == "random" else AT_LEAST
        trials = repeat or -(-least // sum(other.fault == cell.fault for other in cells))
        if reason := _cannot(cell):
            rows.append(
                {
                    **asdict(cell),
                    "title": TITLES[cell.fault],
                    "where": cell.where,
                    "trials": [],
                    "not_run": reason,
                }
            )
            say(line_of(rows[-1]))
            continue
        found = [room.trial(cell) for _ in range(trials)]
        rows.append(row_of(cell, TITLES[cell.fault], found))
        say(line_of(rows[-1]))
    survived = all(row["survived"] for row in rows if row["trials"])
    result = {
        "workload": workload,
        "steps": STEPS,
        "rows": rows,
        "survived": survived,
        "folder": str(folder),
    }
    run_folder.write_result(result)
    return result


def row_of(cell: Cell, title: str, trials: list[Trial]) -> dict[str, Any]:
    def middle(name: str) -> float | None:
        values = [value for trial in trials if (value := getattr(trial, name)) is not None]
        return round(statistics.median(values), 2) if values else None

    def most(name: str) -> float | None:
        values = [value for trial in trials if (value := getattr(trial, name)) is not None]
        return round(max(values), 2) if values else None

    return {
        **asdict(cell),
        "title": title,
        "where": cell.where,
        "survived": all(trial.survived for trial in trials),
        "outcomes": sorted({trial.outcome for trial in trials}),
        "named": sum(trial.named for trial in trials),
        "equal": None
        if all(trial.equal is None for trial in trials)
        else sum(trial.equal is True for trial in trials),
        "orphans": sum(trial.orphans for trial in trials),
        "noticed_seconds": middle("noticed_seconds"),
        "next_step_seconds": middle("next_step_seconds"),
        "longest_seconds": most("next_step_seconds"),
        "steps_lost": most("steps_lost"),
        "trials": [asdict(trial) for trial in trials],
    }


def line_of(row: dict[str, Any]) -> str:
    if "not_run" in row:
        return f"{row['title']:<32} {row['where']:<18} not run: {row['not_run']}"
    title, where, _, outcome, noticed, following, lost, equal, named, orphans = _cells(row)
    return (
        f"{title:<32} {where:<18} {outcome:<10} noticed {noticed:>7}  next step {following:>7}  lost {lost:>2} steps  "
        f"equal {equal:<8} cause named {named:<8} orphans {orphans}"
    )


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/reliability.md."""
    head = "| fault | where | trials | outcome | noticed | next step | steps lost | weights equal | cause named | orphans |"
    lines = [head, "|---" * 10 + "|"]
    for row in rows:
        cells = (
            [row["title"], row["where"], "0", f"not run: {row['not_run']}", *["–"] * 6]
            if "not_run" in row
            else _cells(row)
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    def shown(value: Any, unit: str = "") -> str:
        return "–" if value is None else f"{value:g}{unit}"

    number = len(row["trials"])
    return [
        row["title"],
        row["where"],
        str(number),
        ", ".join(row["outcomes"]),
        shown(row["noticed_seconds"], " s"),
        shown(row["next_step_seconds"], " s"),
        shown(row["steps_lost"]),
        "–" if row["equal"] is None else f"{row['equal']} of {number}",
        f"{row['named']} of {number}",
        str(row["orphans"]),
    ]


def _cannot(cell: Cell) -> str | None:
    if not Path("/proc").exists():
        return "processes are counted through /proc, which this system does not have"
    if cell.fault == "disk" and not (
        hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("mount")
    ):
        return "a small disk can be made only as root"
    if cell.fault == "template" and not can_fork():
        return "here every rank is started by itself"
    return None
