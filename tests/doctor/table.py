"""Check every case in the corpus with every source, and write a table of which source finds which
entry to docs/doctor.md.

    python -m tests.doctor.table          (about five minutes on two cores)

A cell says yes if the source reports the entry for its broken script and not for its healthy one.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paralab.doctor.catalog import ENTRIES, apply, checked_ids
from paralab.doctor.logs.reading import read_logs
from paralab.doctor.static.script import Script
from tests.doctor.cases import Case, broken, healthy
from tests.doctor.ranks import STARTS, observed
from tests.doctor.test_logs import EXPECTED, LOGS
from tests.forked import server

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
BEGIN, END = "<!-- table -->", "<!-- /table -->"
STEPS = 3  # steps of a dry run
AT_A_TIME = 2


def in_scripts() -> set[str]:
    """Return the entries that the check of scripts finds."""
    found = {
        case.entry
        for case in broken("script")
        if case.entry in _ids(apply("script", Script(case.script)))
    }
    return found - {
        case.entry for case in healthy() if case.entry in _ids(apply("script", Script(case.script)))
    }


def in_logs() -> set[str]:
    return {
        id_ for name in EXPECTED for id_ in _ids(apply("log", read_logs([LOGS / f"{name}.log"])))
    }


def in_ranks(steps: int | None) -> set[str]:
    """Return the entries that the check of watched ranks finds in a whole run, or in its first
    steps."""
    wrong = [case for case in broken("ranks") if case.start in STARTS and case.name == "broken"]
    entries = {case.entry for case in wrong}
    twins = [case for case in healthy() if case.name == "healthy" and case.entry in entries]

    def ids(case: Case) -> set[str]:
        with tempfile.TemporaryDirectory() as folder:
            seen = observed(
                case.script,
                folder=Path(folder, "seen"),
                steps=steps,
                count=STARTS[case.start],
            )
        return _ids(seen.findings)

    with server(), ThreadPoolExecutor(AT_A_TIME) as pool:
        found = {
            case.entry
            for case, told in zip(wrong, pool.map(ids, wrong), strict=True)
            if case.entry in told
        }
        accused = {
            case.entry
            for case, told in zip(twins, pool.map(ids, twins), strict=True)
            if case.entry in told
        }
    return found - accused


def _ids(findings) -> set[str]:
    return {finding.id for finding in findings}


def table(script: set[str], dry: set[str], live: set[str], log: set[str]) -> str:
    columns = [script, dry, live, log, checked_ids("run"), checked_ids("machine")]
    head = [
        "entry",
        "",
        "script",
        "dry run",
        "live",
        "log",
        "run folder",
        "machine",
        "limits",
    ]
    lines = [" | ".join(["", *head, ""]).strip(), "|---" * len(head) + "|"]
    for entry in ENTRIES.values():
        cells = ["yes" if entry.id in column else "" for column in columns]
        name = f"[{entry.id}](doctor/{entry.id}.md)"
        lines.append("| " + " | ".join([name, entry.title, *cells, entry.limits or ""]) + " |")
    ours = [entry for entry in ENTRIES.values() if entry.id[0] not in "WM"]
    told = [entry for entry in ours if any(entry.id in column for column in columns)]
    trained = [entry for entry in ours if any(entry.id in column for column in (script, dry, live))]
    silent = [entry for entry in trained if entry.silent]
    silent_in_all = sum(entry.silent for entry in ours)
    summary = (
        f"At least one source finds {len(told)} of the {len(ours)} failures. Scripts and CPU ranks "
        f"alone find {len(trained)}, including {len(silent)} of the {silent_in_all} that no other "
        "tool reports. W (waste) and M (machine) are paralab's own entries. "
        "`python -m tests.doctor.table` measures the columns script, dry run, live, and log on the "
        "corpus. Run folder and machine say that a check exists; tests run it on recorded folders "
        "and prepared facts."
    )
    return "\n".join([summary, "", *lines])


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    made = table(in_scripts(), in_ranks(STEPS), in_ranks(None), in_logs())
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")
    print(made.splitlines()[0])


if __name__ == "__main__":
    main()
