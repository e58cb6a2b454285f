"""--fix: the diff, the written files, and the findings that it does not fix, with the reason."""

import os
import stat
import subprocess

import pytest

from paralab.doctor.patch import DoesNotFit, apply_edits, diff, fix, overlap
from paralab.doctor.registry import Edit, Finding
from paralab.doctor.sources import Sources

TEXT = "one\ntwo\nthree\nfour\n"


def edit(first, last, *lines, file="f.py"):
    return Edit(file, first, last, lines)


@pytest.mark.parametrize(
    ("edits", "after"),
    [
        ([edit(2, 2, "TWO")], "one|TWO|three|four|"),
        ([edit(2, 3, "both")], "one|both|four|"),
        ([edit(2, 1, "before two")], "one|before two|two|three|four|"),
        ([edit(5, 4, "at the end")], "one|two|three|four|at the end|"),
        ([edit(1, 0, "first")], "first|one|two|three|four|"),
        ([edit(3, 3)], "one|two|four|"),
        ([edit(4, 4, "FOUR"), edit(1, 1, "ONE", "1")], "ONE|1|two|three|FOUR|"),
        ([edit(2, 1, "before two"), edit(2, 2, "TWO")], "one|before two|TWO|three|four|"),
        (
            [edit(2, 2, "TWO"), edit(2, 2, "TWO")],
            "one|TWO|three|four|",
        ),  # two findings with the same fix
    ],
)
def test_lines_are_replaced_inserted_and_removed(edits, after):
    assert apply_edits(TEXT, edits).replace("\n", "|") == after


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("a\r\nb\r\n", "a\r\nB\r\n"),
        ("a\nb", "a\nB"),
        ("a\x0c\nb\n", "a\x0c\nB\n"),  # a form feed does not end a line
    ],
)
def test_line_ends_stay_as_the_file_has_them(text, after):
    assert apply_edits(text, [edit(2, 2, "B")]) == after


def test_a_line_after_a_last_line_without_an_end():
    assert apply_edits("a\nb", [edit(3, 2, "c")]) == "a\nb\nc\n"


@pytest.mark.parametrize(
    "wrong",
    [[edit(2, 3, "x"), edit(3, 3, "y")], [edit(2, 1, "x"), edit(2, 1, "y")], [edit(9, 9, "z")]],
)
def test_edits_that_do_not_fit_are_refused(wrong):
    with pytest.raises(DoesNotFit):
        apply_edits(TEXT, wrong)


def test_an_insertion_inside_a_replaced_block_overlaps_and_at_its_edges_not():
    assert overlap(edit(3, 2, "x"), edit(2, 4, "y"))
    assert not overlap(edit(2, 1, "x"), edit(2, 4, "y"))
    assert not overlap(edit(5, 4, "x"), edit(2, 4, "y"))
    assert not overlap(edit(3, 3, "x"), edit(3, 3, "y", file="g.py"))


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("loss = f(x)\nloss.backward()\nstep()\n")
    path.chmod(0o750)
    return path


def finding(*edits, severity="error", id="G01", line=1):
    return Finding(id, severity, "why", "fix", "train.py", line, edits=edits)


def reasons(done):
    return {each.finding.id: each.reason for each in done.left}


DIVIDE = edit(1, 1, "loss = f(x) / 4", file="train.py")


@pytest.mark.processes
def test_the_diff_is_one_that_patch_can_apply(script):
    text = diff([DIVIDE], Sources())
    assert text.startswith(
        "--- a/train.py\n+++ b/train.py\n@@ -1,3 +1,3 @@\n-loss = f(x)\n+loss = f(x) / 4\n"
    )
    done = subprocess.run(
        ["git", "apply", "-"], input=text, text=True, cwd=script.parent, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert script.read_text() == "loss = f(x) / 4\nloss.backward()\nstep()\n"


@pytest.mark.processes
def test_also_for_a_last_line_without_an_end(script):
    script.write_text("loss = f(x)\nstep()")
    text = diff([edit(2, 2, "leap()", file="train.py")], Sources())
    done = subprocess.run(
        ["git", "apply", "-"], input=text, text=True, cwd=script.parent, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert script.read_text() == "loss = f(x)\nleap()"


def test_a_fix_changes_the_file_and_nothing_else_about_it(script):
    done = fix([finding(DIVIDE)], Sources())
    assert script.read_text() == "loss = f(x) / 4\nloss.backward()\nstep()\n"
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert done.ids == ("G01",)
    assert "+loss = f(x) / 4" in done.changed["train.py"]
    assert os.listdir(script.parent) == ["train.py"]


def test_a_link_stays_a_link(script):
    script.rename(script.parent / "real.py")
    script.symlink_to("real.py")
    fix([finding(DIVIDE)], Sources())
    assert script.is_symlink()
    assert "/ 4" in (script.parent / "real.py").read_text()


def test_a_coding_line_is_heeded(script):
    script.write_bytes("# coding: latin-1\nname = 'Zo\xeb'\n".encode("latin-1"))
    fix([finding(edit(2, 2, "name = 'No\xeb'", file="train.py"))], Sources())
    assert script.read_bytes() == "# coding: latin-1\nname = 'No\xeb'\n".encode("latin-1")


def test_a_file_that_has_changed_is_left(script):
    sources = Sources()
    sources.text("train.py")
    script.write_text("# edited meanwhile\n")
    done = fix([finding(DIVIDE)], sources)
    assert script.read_text() == "# edited meanwhile\n"
    assert reasons(done) == {"G01": "train.py has changed since it was checked"}


def test_a_file_that_cannot_be_fixed_does_not_stop_the_others(script):
    other = script.parent / "model.py"
    other.write_text("a = 1\n")
    sources = Sources()
    sources.text("model.py")
    other.write_text("a = 3\n")
    change = finding(edit(1, 1, "a = 2", file="model.py"), id="A01")
    done = fix([change, finding(DIVIDE)], sources)
    assert "/ 4" in script.read_text()
    assert other.read_text() == "a = 3\n"
    assert reasons(done) == {"A01": "model.py has changed since it was checked"}


def test_a_fix_that_would_break_the_script_is_left(script):
    before = script.read_text()
    done = fix([finding(edit(1, 1, "loss = (", file="train.py"))], Sources())
    assert script.read_text() == before
    assert reasons(done)["G01"].startswith("its patch cannot be applied")


def test_a_fix_of_two_files_changes_both_or_neither(script):
    other = script.parent / "model.py"
    other.write_text("a = 1\n")
    done = fix([finding(DIVIDE, edit(1, 1, "a = (", file="model.py"))], Sources())
    assert "/ 4" not in script.read_text()
    assert done.changed == {}


def test_every_finding_that_is_left_has_a_reason(script):
    other = edit(1, 1, "loss = g(x)", file="train.py")
    last = edit(3, 3, "leap()", file="train.py")
    findings = [
        finding(DIVIDE),
        finding(other, id="A01"),
        finding(id="H03", line=3),
        finding(last, id="G09", severity="suspect"),
    ]
    done = fix(findings, Sources())
    assert done.ids == ("G01",)
    assert reasons(done) == {
        "A01": "another fix changes the same lines; run --fix again",
        "H03": "must be fixed by hand",
        "G09": "only a suspect",
    }
    assert script.read_text() == "loss = f(x) / 4\nloss.backward()\nstep()\n"
