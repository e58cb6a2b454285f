"""The fault matrix: inject each fault into real runs and measure whether training survives it.

    python3 -m bench.faults.matrix [--only kill] [--repeat 1] [--out DIR] [--markdown FILE]

Each trial trains the same workload on two ranks with checkpoints and restarts. The run itself, or
the same command with --resume, must finish with weights that are byte-for-byte equal to the
undisturbed run's. The exit code is 0 only if training survives every fault and paralab names each
cause.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.faults.outside import FROM_OUTSIDE, IN_RANKS, inject
from bench.faults.trial import EVERY, LAST, STEPS, FaultCase, FaultOutcome, Workspace
from paralab.errors import ParalabError, unknown
from paralab.launch.processes import can_fork
from paralab.record.folder import RunFolder, write_new

TRIALS = 5  # trials per fault, over all ranks and phases
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
    "template": "SIGKILL of the template process",
    "disk": "disk full while saving",
    "bit flip": "bit flip in a checkpoint",
    "cut log": "truncated log",
    "sigterm": "SIGTERM to the launcher",
    "sigusr1": "SIGUSR1 to the launcher",
    "ctrl-c": "Ctrl-C",
    "ctrl-c twice": "Ctrl-C twice",
    "launcher": "launcher killed",
}
HEADS = (
    *("fault", "where", "trials", "outcome", "noticed", "next step", "steps lost"),
    *("weights equal", "cause named", "orphans"),
)


def list_cases(only: Sequence[str] = ()) -> list[FaultCase]:
    for name in only:
        if name not in TITLES:
            raise unknown("fault", name, TITLES)
    cases = [
        FaultCase(fault, rank, phase)
        for fault in IN_RANKS
        for rank in (0, LAST)
        for phase in (("step",) if fault in ("nan", "slow") else ("start", "step", "save"))
    ]
    cases += [FaultCase(fault) for fault in FROM_OUTSIDE]
    return [case for case in cases if not only or case.fault in only]


def run_matrix(
    only: Sequence[str] = (),
    repeat: int | None = None,
    workload: str = "mlp",
    out: Path | None = None,
) -> dict[str, Any]:
    """Run the cases, print a line for each, and write all results to `result.json`."""
    cases = list_cases(only)
    run_folder = RunFolder.create(out, "faults")
    workspace = Workspace(run_folder.path, workload)
    print(f"{workload}, ddp on 2 ranks, {STEPS} steps, a checkpoint every {EVERY}", flush=True)
    workspace.run_undisturbed()

    rows = []
    for case in cases:
        trials = RANDOM_KILLS if case.fault == "random" else TRIALS
        trials = repeat or -(-trials // sum(other.fault == case.fault for other in cases))
        cause = FROM_OUTSIDE.get(case.fault, inject)
        if reason := _reason_not_to_run(case):
            rows.append(make_row(case, TITLES[case.fault], []) | {"not_run": reason})
        else:
            outcomes = [workspace.try_fault(case, cause) for _ in range(trials)]
            rows.append(make_row(case, TITLES[case.fault], outcomes))
        print(format_line(rows[-1]), flush=True)

    survived = all(row["survived"] for row in rows)
    result = {"workload": workload, "steps": STEPS, "rows": rows, "survived": survived}
    run_folder.write("result.json", result | {"folder": str(run_folder.path)})
    return result


def make_row(case: FaultCase, title: str, outcomes: list[FaultOutcome]) -> dict[str, Any]:
    def known(name: str) -> list[float]:
        return [value for each in outcomes if (value := getattr(each, name)) is not None]

    def median(name: str) -> float | None:
        return round(statistics.median(known(name)), 2) if known(name) else None

    equal = [each.equal for each in outcomes if each.equal is not None]
    return {
        **asdict(case),
        "title": title,
        "where": case.where,
        "survived": all(each.survived for each in outcomes),
        "outcomes": sorted({each.outcome for each in outcomes}),
        "named": sum(each.named for each in outcomes),
        "equal": sum(equal) if equal else None,
        "orphans": sum(each.orphans for each in outcomes),
        "noticed_seconds": median("noticed_seconds"),
        "next_step_seconds": median("next_step_seconds"),
        "longest_seconds": round(max(known("next_step_seconds"), default=0), 2) or None,
        "steps_lost": max(known("steps_lost"), default=None),
        "trials": [asdict(each) for each in outcomes],
    }


def format_line(row: dict[str, Any]) -> str:
    if "not_run" in row:
        return f"{row['title']:<32} {row['where']:<18} not run: {row['not_run']}"
    title, where, _, outcome, noticed, following, lost, equal, named, orphans = _cells(row)
    return (
        f"{title:<32} {where:<18} {outcome:<10} noticed {noticed:>7}  next step {following:>7}  "
        f"lost {lost:>2} steps  equal {equal:<8} cause named {named:<8} orphans {orphans}"
    )


def format_markdown(rows: list[dict[str, Any]]) -> str:
    """Format the table in docs/reliability.md."""
    lines = [HEADS, ["---"] * len(HEADS), *(_cells(row) for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cells(row: dict[str, Any]) -> list[str]:
    if "not_run" in row:
        return [row["title"], row["where"], "0", f"not run: {row['not_run']}", *["–"] * 6]

    def with_unit(value: float | None, unit: str = "") -> str:
        return "–" if value is None else f"{value:g}{unit}"

    trials = len(row["trials"])
    return [
        row["title"],
        row["where"],
        str(trials),
        ", ".join(row["outcomes"]),
        with_unit(row["noticed_seconds"], " s"),
        with_unit(row["next_step_seconds"], " s"),
        with_unit(row["steps_lost"]),
        "–" if row["equal"] is None else f"{row['equal']} of {trials}",
        f"{row['named']} of {trials}",
        str(row["orphans"]),
    ]


def _reason_not_to_run(case: FaultCase) -> str | None:
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    if case.fault == "disk" and not (is_root and shutil.which("mount")):
        return "only root can mount a small disk"
    if case.fault == "template" and not can_fork():
        return "paralab does not fork ranks here; each rank starts its own Python"
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python3 -m bench.faults.matrix")
    parser.add_argument("--only", metavar="FAULT", action="append", default=[])
    parser.add_argument("--repeat", metavar="N", type=int, help="trials per case")
    parser.add_argument("--workload", default="mlp")
    parser.add_argument("--out", metavar="DIR", type=Path)
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="also write the table here")
    options = parser.parse_args(arguments)

    try:
        result = run_matrix(options.only, options.repeat, options.workload, options.out)
        if options.markdown:
            write_new(options.markdown, format_markdown(result["rows"]))
    except ParalabError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0 if result["survived"] else 1)


if __name__ == "__main__":
    main()
