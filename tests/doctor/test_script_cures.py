"""The fixes that come with findings of script rules: applied to the broken script, the finding is
gone and nothing new is wrong."""

import shutil
from pathlib import Path

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.patch import edited
from paralab.doctor.script.reading import read_script
from tests.doctor.cases import broken

# Entries whose broken.py comes with a fix: the least that must hold.
CURED = {
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
    return apply("script", read_script(path))


def with_cures(case):
    return [finding for finding in read(case.script) if finding.edits]


CURABLE = [case for case in broken("script") if with_cures(case)]


@pytest.mark.parametrize("case", CURABLE, ids=str)
def test_a_cure_cures(case, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(case.script.parent, folder)
    script = folder / case.script.name
    before = read(script)
    cured = next(finding for finding in before if finding.edits)
    file = Path(cured.file)
    file.write_text(edited(file.read_text(), cured.edits))
    after = read(script)
    assert (cured.id, cured.line) not in {(finding.id, finding.line) for finding in after}
    assert {finding.id for finding in after} <= {finding.id for finding in before}


def test_these_come_with_a_cure():
    assert {case.entry for case in CURABLE if case.name == "broken"} >= CURED
