"""Score `paralab doctor SCRIPT.py` on public code: how many findings are true, how many bugs it finds.

    python bench/precision/score.py CHECKOUTS [--half score] [--write]

CHECKOUTS holds the Python files of the repositories in healthy.csv and bugs.csv:

    CHECKOUTS/healthy/OWNER+NAME/…            the repository at `commit`
    CHECKOUTS/bugs/CASE/before/…, after/…     the repository at `parent_commit` and `fix_commit`

The path `.` is the whole repository. The doctor chooses the files, as in `paralab doctor .`.
Each checkout needs a `.git` folder, which may be empty: it marks the root for imports.
To search for bugs, the script selects every id, including H17, which is off by default.

A person has read each file with an error or a warning and written a verdict in verdicts.csv. A
finding without a verdict counts as unjudged, never as true. `--write` replaces the set's rows in
docs/doctor-precision.md.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from paralab.doctor.catalog import ENTRIES  # noqa: E402
from paralab.doctor.diagnosis import check_paths  # noqa: E402
from paralab.doctor.project_files import find_files  # noqa: E402
from paralab.doctor.settings import Settings  # noqa: E402
from paralab.errors import ParalabError  # noqa: E402

PAGE = HERE.parent.parent / "docs" / "doctor-precision.md"
NEAR = 15  # lines between a finding and the line that the fix changed
# The doctor reports these where the group, seed, or loop begins, not where a line is missing.
ELSEWHERE = frozenset(["H09", "H17", "S10", "T01", "T02"])
HALVES = (
    "tune",
    "score",
    "named",
    "fresh",
    "clean3",
    "clean4",
    "tune5",
    "clean5",
    "tune6",
    "clean6",
    "tune7",
    "clean7",
    "tune8",
    "clean8",
    "clean9",
    "clean10",
    "clean11",
    "clean12",
)
ALL_IDS = Settings(select=frozenset(ENTRIES), hidden=frozenset())


@dataclass(frozen=True)
class Found:
    repo: str
    path: str
    id: str
    line: int
    severity: str

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.repo, self.path, self.id, self.line


def rows(name: str) -> list[dict[str, str]]:
    with (HERE / name).open() as stream:
        return list(csv.DictReader(stream))


def find(job: tuple[str, Path, Path], settings: Settings | None = None) -> list[Found] | None:
    """Return the doctor's findings in a file or repository, or None if it cannot be analyzed."""
    repo, root, path = job
    try:
        findings = check_paths([root / path], settings).findings
    except ParalabError:
        return None
    found = []
    for finding in findings:
        file = Path(finding.file).resolve() if finding.file else root / path
        inside = file.relative_to(root.resolve()) if root.resolve() in file.parents else path
        found.append(Found(repo, str(inside), finding.id, finding.line or 0, finding.severity))
    return found


def find_any_id(job: tuple[str, Path, Path]) -> list[Found] | None:
    return find(job, ALL_IDS)


def is_whole(job: tuple[str, Path, Path]) -> bool:
    return job[2] == Path(".")


def score_healthy(checkouts: Path, half: str) -> str:
    """Return a row with the numbers of findings, and of true errors and warnings."""
    chosen = [row for row in rows("healthy.csv") if row["half"] == half]
    folders = [checkouts / "healthy" / row["repo"].replace("/", "+") for row in chosen]
    jobs = [
        (row["repo"], folder, Path(row["path"]))
        for row, folder in zip(chosen, folders, strict=True)
        if (folder / row["path"]).exists()
    ]
    with multiprocessing.Pool() as pool:
        results = pool.map(find, [job for job in jobs if not is_whole(job)], chunksize=2)
    results += [find(job) for job in jobs if is_whole(job)]  # these start processes, too
    files = sum(len(find_files(job[1]).parallel) if is_whole(job) else 1 for job in jobs)
    verdicts = {
        (row["repo"], row["path"], row["id"], int(row["line"])): row["verdict"]
        for row in rows("verdicts.csv")
    }
    found = {one for result in results if result for one in result}
    for one in sorted(found, key=lambda one: one.key):
        verdict = verdicts.get(one.key, "unjudged")
        if one.severity != "suspect" and verdict != "true":
            print(verdict, one, file=sys.stderr)
    lost = sum(result is None for result in results)
    print(f"{lost} not analyzed", file=sys.stderr)
    cells: list[object] = [f"`{half}`", len({job[0] for job in jobs}), files]
    for severity in ("error", "warning"):
        mine = [verdicts.get(one.key) for one in found if one.severity == severity]
        cells.append(f"{mine.count('true')} of {len(mine)}")
    return _row([*cells, sum(one.severity == "suspect" for one in found)])


def score_bugs(checkouts: Path, half: str) -> Iterator[str]:
    """Yield rows that count the known bugs found before their fix, and those still reported after
    it. Yield one row for each id, then the sum."""
    chosen = [row for row in rows("bugs.csv") if row["half"] == half]
    results = {}
    for side in ("before", "after"):
        jobs = [
            (row["repo"], checkouts / "bugs" / row["id_of_case"] / side, Path(row["path"]))
            for row in chosen
        ]
        with multiprocessing.Pool() as pool:
            results[side] = pool.map(find_any_id, jobs, chunksize=1)
    counts: dict[str, Counter[str]] = {}
    for row, before, after in zip(chosen, results["before"], results["after"], strict=True):
        count = counts.setdefault(row["failure_id"], Counter())
        count["cases"] += 1
        severity = _severity_of(row, before or [])
        count[severity or "missed"] += 1
        count["after"] += bool(_severity_of(row, after or []) in ("error", "warning"))
        print(row["id_of_case"], severity or "missed", file=sys.stderr)
    total: Counter[str] = sum(counts.values(), Counter())
    names = ("cases", "error", "warning", "suspect", "missed", "after")
    for id, count in [*sorted(counts.items()), (f"`{half}`", total)]:
        yield _row([id, *(count[name] for name in names)])


def _row(cells: list[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _severity_of(row: dict[str, str], found: list[Found]) -> str | None:
    """Return the severity of the finding with the right id near the right line, if any."""
    line = int(row["line_before"] or 0)
    same = [one for one in found if one.id == row["failure_id"]]
    near = [
        one
        for one in same
        if one.id in ELSEWHERE or one.path != row["path"] or abs(one.line - line) <= NEAR
    ]
    order = ("error", "warning", "suspect")
    return min((one.severity for one in near), key=order.index, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--half", default="score", choices=HALVES)
    parser.add_argument("--write", action="store_true", help="update docs/doctor-precision.md")
    options = parser.parse_args()
    healthy = score_healthy(options.checkouts, options.half)
    print(healthy)
    *ids, bugs = score_bugs(options.checkouts, options.half)
    print(*ids, bugs, sep="\n")
    if options.write:
        replace_row("### Healthy files", healthy)
        replace_row("### Bugs", bugs)


def replace_row(heading: str, row: str) -> None:
    """Replace the row of the same set under a heading of the page, if it is there."""
    before, _, after = PAGE.read_text().partition(heading)
    table, end, rest = after.partition("\n## ")
    start = row.partition(" | ")[0]
    lines = [row if line.startswith(f"{start} |") else line for line in table.split("\n")]
    PAGE.write_text(before + heading + "\n".join(lines) + end + rest)


if __name__ == "__main__":
    main()
