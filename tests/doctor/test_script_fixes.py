"""The patches of script checks: after a patch, its finding is gone and there is no new one."""

import shutil
from pathlib import Path

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.patch import apply_edits
from paralab.doctor.static.script import Script
from tests.doctor.cases import broken

# The minimum: these entries must have a fix for their broken.py.
FIXED = {
    "A01",
    "A03",
    "A04",
    "A11",
    "C01",
    "C04",
    "D01",
    "D05",
    "G01",
    "H07",
    "S02",
    "S06",
    "S08",
    "T02",
    "T03",
}


def read(path):
    return apply("script", Script(path))


def with_fixes(case):
    return [finding for finding in read(case.script) if finding.edits]


FIXABLE = [case for case in broken("script") if with_fixes(case)]


@pytest.mark.parametrize("case", FIXABLE, ids=str)
def test_a_fix_removes_its_finding_and_adds_none(case, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(case.script.parent, folder)
    script = folder / case.script.name
    before = read(script)
    fixed = next(finding for finding in before if finding.edits)
    file = Path(fixed.file)
    file.write_text(apply_edits(file.read_text(), fixed.edits))
    after = read(script)
    assert (fixed.id, fixed.line) not in {(finding.id, finding.line) for finding in after}
    assert {finding.id for finding in after} <= {finding.id for finding in before}


def test_these_come_with_a_fix():
    assert {case.entry for case in FIXABLE if case.name == "broken"} >= FIXED
