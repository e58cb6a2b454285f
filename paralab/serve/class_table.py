"""The table of a class: find the folders with sheets, and grade one student at a time.

`paralab practical check N FOLDER` prints the same table. Here, paralab keeps a grade until the
student's sheet or run changes, so the table can stay open while students hand in.
"""

import re
import threading
from collections import defaultdict
from pathlib import Path

from paralab.course.class_report import (
    SpeedUps,
    Submission,
    find_students,
    grade_student,
    same_timings,
    speed_up_spread,
)
from paralab.record.types import Record
from paralab.serve.runs import Row, Stamp, stamp_of
from paralab.serve.safe_path import NotServed, find_folder, require_file_inside, require_inside

TOLERANCE = 0.25  # the default of `practical check`
OWN_NAME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_")  # paralab's own name for a run folder


class ClassFolder(Record, frozen=True, kw_only=True):
    """A folder with students' runs of one practical."""

    name: str
    practical: str
    students: int


def find_classes(root: Path, rows: list[Row]) -> list[ClassFolder]:
    """Find the class folders among the runs of practicals: CLASS/STUDENT or CLASS/STUDENT/RUN, with
    a sheet in CLASS or in STUDENT. A run in `runs/DATE_TIME_…` is the user's own. A single run
    directly under the root is, too, because a practical writes a sheet into its run folder."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        path = Path(row.name)
        if row.kind != "practical" or not path.parts:
            continue
        student = path.parent if OWN_NAME.match(path.name) and len(path.parts) > 1 else path
        sheets = (*(root / student).glob("*.md"), root / f"{student}.md")
        if not OWN_NAME.match(student.name) and any(sheet.exists() for sheet in sheets):
            practical = row.configuration.removeprefix("practical ").partition(",")[0]
            found[student.parent.as_posix(), practical].add(student.name)
    return [
        ClassFolder(name=name, practical=practical, students=len(students))
        for (name, practical), students in sorted(found.items())
        if name != "." or len(students) > 1 or not (root / min(students) / "manifest.json").exists()
    ]


class ClassTable:
    """The grades of one class. `grade_next` may be called from multiple threads."""

    def __init__(self, root: Path, name: str, practical: str) -> None:
        self.root, self.folder, self.practical = root, find_folder(root, name), practical
        self.students: list[str] = []
        self._graded: dict[str, tuple[Stamp, Submission]] = {}
        self._lock = threading.Lock()

    def grade_next(self) -> bool:
        """Grade one student whose sheet or run is new. Return False if there is none."""
        with self._lock:
            self.students = find_students(self.folder)
            for student in self.students:
                stamp = self._stamp(student)
                known = self._graded.get(student)
                if known is None or known[0] != stamp:
                    self._graded[student] = stamp, self._grade(student)
                    return True
            return False

    def _grade(self, student: str) -> Submission:
        """Grade a student. A link that points outside the class affects only this student."""
        try:
            require_inside(self.root, self.folder / student)
            require_file_inside(self.root, self.folder / f"{student}.md")
        except NotServed as error:
            return Submission(student, problem=error.problem)
        return grade_student(self.folder, student, self.practical, TOLERANCE)

    def _stamp(self, student: str) -> Stamp:
        """Return a value that changes when the student hands in a new sheet or run."""
        own = self.folder / student
        files = [own.with_name(f"{student}.md"), *own.glob("*"), *own.glob("*/outcome.json")]
        return stamp_of(sorted(files))

    @property
    def submissions(self) -> list[Submission]:
        """The grades so far, in the order of the students' names."""
        return [self._graded[name][1] for name in self.students if name in self._graded]

    @property
    def speed_ups(self) -> dict[str, SpeedUps]:
        return speed_up_spread(self.submissions)

    @property
    def same_timings(self) -> list[list[str]]:
        return same_timings(self.submissions)
