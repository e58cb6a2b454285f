"""Grade a folder of sheets, and export the grades for a grading system."""

import csv
import io
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from paralab.analyse.compare import comparison_of
from paralab.analyse.manifest import about_of
from paralab.course.check import Grade, Item, grade
from paralab.course.measurements import Measurements
from paralab.course.practical import document_of, require_run
from paralab.course.sheet_text import read_sheet
from paralab.errors import DAMAGED, ParalabError, UsageError
from paralab.record.types import JsonObject, Record

NO_GRADE = Grade(())


@dataclass(frozen=True)
class Submission:
    """One student's submission. Without a grade, `problem` says why it cannot be graded."""

    student: str
    grade: Grade = NO_GRADE
    problem: str = ""
    speed_ups: Mapping[str, float] = field(default_factory=dict)  # relative to the first row
    timings: tuple[float, ...] = ()

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """Return the number, the earned points, and the possible points of each part."""
        return [(part, *self.grade.points(part)) for part in self.grade.parts]

    @property
    def passed(self) -> bool:
        return not self.problem and self.grade.passed


def grade_one(sheet: Path, run: Path, tolerance: float) -> Submission:
    """Grade one sheet against one run, and the handbook's checkpoint.md if it is next to it."""
    text, checkpoint = read_sheet(sheet), sheet.parent / "checkpoint.md"
    if checkpoint.exists() and sheet.name != checkpoint.name:
        text += "\n\n" + read_sheet(checkpoint)
    lab = Measurements(comparison_of(run))
    if any(each.damaged for key in lab.rows for each in lab.recordings(key)):
        raise UsageError(f"The events in {run} are damaged.", fix="run the practical again")
    return Submission(sheet.stem, grade(text, document_of(run), tolerance))


def grade_class(folder: Path, name: str, tolerance: float) -> list[Submission]:
    return [grade_student(folder, student, name, tolerance) for student in find_students(folder)]


def find_students(folder: Path) -> list[str]:
    """List the students: each has a folder with a sheet and a run, or NAME.md next to NAME/."""
    paths = [path for path in folder.iterdir() if path.is_dir() or path.suffix == ".md"]
    students = sorted({path.name.removesuffix(".md") for path in paths if path.name[0] != "."})
    if not students:
        fix = "add a folder for each student, with sheet.md and a run"
        raise UsageError(f"{folder} has no sheets.", fix=fix)
    return students


def grade_student(folder: Path, student: str, name: str, tolerance: float) -> Submission:
    """Grade one student in a folder. Record any problem in the submission."""
    try:
        run = _run_of(folder / student, name)
        require_run(run, name, student if about_of(run).variant else None)
        graded = grade_one(_sheet_of(folder, student), run, tolerance).grade
        lab = Measurements(comparison_of(run))
    except ParalabError as error:
        return Submission(student, problem=str(error).splitlines()[0])
    except DAMAGED as error:  # the other students still get their grades
        problem = f"The run of {student} is damaged: {type(error).__name__}: {error}."
        return Submission(student, problem=problem)
    base = next(iter(lab.rows), "")
    speed_ups = {row.name: lab.speed_up(base, key).value for key, row in lab.rows.items()}
    timings = tuple(row.step_seconds.median for row in lab.rows.values())
    return Submission(student, graded, "", speed_ups, timings)


def _sheet_of(folder: Path, student: str) -> Path:
    own = folder / student
    for path in (folder / f"{student}.md", own / "sheet.md", *sorted(own.glob("*.md"))):
        if path.exists() and path.name != "checkpoint.md":
            return path
    raise UsageError(f"{student} has no sheet.")


def _run_of(folder: Path, name: str) -> Path:
    """Find the run for this practical in or under a folder."""
    for manifest in (folder / "manifest.json", *sorted(folder.glob("*/manifest.json"))):
        if manifest.exists() and about_of(manifest.parent).practical == name:
            return manifest.parent
    raise UsageError(f"{folder.name} has no run for practical {name}.")


def same_timings(submissions: Sequence[Submission]) -> list[list[str]]:
    """Group students whose runs or sheets have identical timings, which cannot happen by chance."""
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for s in submissions:
        written = tuple(item.written for item in s.grade.items if "time of " in item.place)
        for timings in filter(any, (s.timings, written)):
            groups[timings].append(s.student)
    return [list(names) for names in dict.fromkeys(map(tuple, groups.values())) if len(names) > 1]


class StudentGrade(Record, frozen=True, kw_only=True):
    student: str
    problem: str | None  # why there is no grade
    points: int
    possible: int
    items: list[Item]


class SpeedUps(Record, frozen=True, kw_only=True):
    """The speed-ups of one configuration on the students' machines."""

    low: float
    median: float
    high: float


class ClassReport(Record, frozen=True, kw_only=True):
    """The output of `practical check --json`, for one sheet or for a class."""

    students: list[StudentGrade]
    speed_ups: dict[str, SpeedUps]
    same_timings: list[list[str]]


def speed_up_spread(submissions: Sequence[Submission]) -> dict[str, SpeedUps]:
    values: dict[str, list[float]] = defaultdict(list)
    for submission in submissions:
        for name, value in submission.speed_ups.items():
            values[name].append(value)
    return {
        name: SpeedUps(low=min(own), median=statistics.median(own), high=max(own))
        for name, own in values.items()
    }


def as_json(submissions: Sequence[Submission]) -> str:
    students = []
    for s in submissions:
        points, possible = s.grade.points()
        more = {"problem": s.problem or None, "points": points, "possible": possible}
        students.append(StudentGrade.like(s, items=list(s.grade.items), **more))
    spread, alike = speed_up_spread(submissions), same_timings(submissions)
    report = ClassReport(students=students, speed_ups=spread, same_timings=alike)
    return json.dumps(report.to_dict())


def as_csv(submissions: Sequence[Submission]) -> str:
    states = ("wrong", "missing", "not judged")
    parts = sorted({part for s in submissions for part in s.grade.parts})
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    names = (*(f"part {part}" for part in parts), *states)
    table.writerow(["student", "points", "possible", *names, "problem"])
    for s in submissions:
        numbers = [s.grade.points(part)[0] for part in parts] + [s.grade.count(n) for n in states]
        own = [""] * len(numbers) if s.problem else numbers
        table.writerow([_inert(s.student), *s.grade.points(), *own, _inert(s.problem)])
    return text.getvalue()


def _inert(text: str) -> str:
    """Escape a cell so that a spreadsheet does not interpret it as a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def as_junit(submissions: Sequence[Submission]) -> str:
    root = ElementTree.Element("testsuites")
    for s in submissions:
        items = s.grade.items or (Item(0, "sheet", "wrong", reason=s.problem),)
        suite = ElementTree.SubElement(root, "testsuite", name=s.student, tests=str(len(items)))
        for item in items:
            place = f"part {item.part}" if item.part else s.student
            case = ElementTree.SubElement(suite, "testcase", classname=place, name=item.place)
            if item.status in ("wrong", "missing"):
                message = item.reason or item.status
                ElementTree.SubElement(case, "failure", message=message, type=item.status)
            elif item.status == "not judged":
                ElementTree.SubElement(case, "skipped", message="left for a human to read")
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def for_gradescope(s: Submission) -> JsonObject:
    """Return results.json for Gradescope's autograder."""
    tests = [
        {"name": f"Part {n}", "score": own, "max_score": most, "output": _output(s.grade, n)}
        for n, own, most in s.parts
    ]
    text = s.problem or "{} of {} points".format(*s.grade.points())
    return {"score": s.grade.points()[0], "output": text, "tests": tests}


ENVIRONMENT = {  # Classroom 50 sets these variables
    "classroom": "CLASSROOM",
    "assignment": "ASSIGNMENT",
    "submission": "SUBMISSION_TAG",
    "commit": "COMMIT_URL",
    "release": "RELEASE_URL",
    "review": "REVIEW_URL",
}


def for_classroom50(s: Submission) -> JsonObject:
    """Return result.json for Classroom 50."""
    points, possible = s.grade.points()
    return {
        "schema": "classroom50/result/v1",
        **{key: os.environ.get(name, "") for key, name in ENVIRONMENT.items()},
        "datetime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "score": points,
        "max-score": possible,
        "tests": [
            {"test-name": f"Part {n}", "passed": own == most, "score": own, "max-score": most}
            for n, own, most in s.parts
        ],
    }


def _one_or_all(make: Callable[[Submission], JsonObject], submissions: Sequence[Submission]) -> str:
    """Return one object or, for a class, one per student."""
    results = {submission.student: make(submission) for submission in submissions}
    return json.dumps(next(iter(results.values())) if len(results) == 1 else results)


def _output(grade: Grade, part: int) -> str:
    """List the items in a part that are not right, one item per line."""
    lines = [
        f"{item.place}: {item.status}" + (f" ({item.reason})" if item.reason else "")
        for item in grade.items
        if item.part == part and item.status != "right"
    ]
    return "\n".join(lines) or "all right"


FORMATS: Mapping[str, Callable[[Sequence[Submission]], str]] = {
    "json": as_json,
    "csv": as_csv,
    "junit": as_junit,
    "gradescope": partial(_one_or_all, for_gradescope),
    "classroom50": partial(_one_or_all, for_classroom50),
}
