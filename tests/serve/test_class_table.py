"""The class table finds the students' folders, grades new sheets, and keeps the other grades."""

import json
import shutil

import pytest

from paralab.course import class_report
from paralab.serve.class_table import ClassFolder, ClassTable, find_classes
from paralab.serve.runs import Listing
from tests.serve.conftest import RUNS


def make_practical(folder, practical="5"):
    """A comparison that claims to be a run of a practical."""
    shutil.copytree(RUNS / "low_precision", folder)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | {"kind": "practical"}
    path.write_text(json.dumps(manifest | {"about": {"practical": practical}}))


def classes_in(root):
    return find_classes(root, Listing(root).read())


def test_classes_are_found_in_the_layouts_of_practical_check(tmp_path):
    make_practical(tmp_path / "a" / "ada" / "2026-01-02_10-00-00_practical_mlp")
    (tmp_path / "a" / "ada" / "sheet.md").write_text("")
    make_practical(tmp_path / "a" / "bob")
    (tmp_path / "a" / "bob.md").write_text("")
    make_practical(tmp_path / "b" / "cyd", "7")
    (tmp_path / "b" / "cyd" / "sheet.md").write_text("")
    assert classes_in(tmp_path) == [
        ClassFolder(name="a", practical="5", students=2),
        ClassFolder(name="b", practical="7", students=1),
    ]
    assert [each.name for each in classes_in(tmp_path / "a")] == ["."]


def test_the_users_own_runs_are_not_a_class(tmp_path):
    """A practical writes sheet.md into its own run folder."""
    make_practical(tmp_path / "2026-01-02_10-00-00_practical_mlp-base")
    (tmp_path / "2026-01-02_10-00-00_practical_mlp-base" / "sheet.md").write_text("")
    make_practical(tmp_path / "no_sheet" / "ada")
    make_practical(tmp_path / "practical5")  # `--out runs/practical5` was a class of one student
    (tmp_path / "practical5" / "sheet.md").write_text("")
    assert classes_in(tmp_path) == []


def test_each_student_is_graded_once_until_something_changes(tmp_path, monkeypatch):
    for student in ("ada", "bob"):
        make_practical(tmp_path / student)
        (tmp_path / student / "sheet.md").write_text("nothing")
    table = ClassTable(tmp_path, ".", "5")
    assert table.submissions == []
    assert [table.grade_next() for _ in range(3)] == [True, True, False]
    expected = class_report.grade_class(tmp_path, "5", 0.25)
    assert table.submissions == expected
    assert all(each.problem for each in expected)

    (tmp_path / "bob" / "sheet.md").write_text("something else")
    (tmp_path / "cyd").mkdir()
    assert [table.grade_next() for _ in range(3)] == [True, True, False]
    assert [each.student for each in table.submissions] == ["ada", "bob", "cyd"]
    shutil.rmtree(tmp_path / "ada")
    table.grade_next()
    assert [each.student for each in table.submissions] == ["bob", "cyd"]


@pytest.mark.parametrize("practical", ["5", "99"])
def test_a_class_page_for_any_practical_has_a_row_per_student(tmp_path, practical):
    pytest.importorskip("starlette")
    from paralab.serve.pages import class_parts

    make_practical(tmp_path / "ada")
    table = ClassTable(tmp_path, ".", practical)
    table.grade_next()
    [part] = class_parts(table).values()
    assert ">ada</th>" in part
