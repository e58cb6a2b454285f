"""Grading: every item is right, wrong, missing, or not judged, no matter how it is written."""

import csv
import io
import json
from xml.etree import ElementTree

import pytest

from paralab.analyse.blocks import Answer, Cell, Document, Section, Table
from paralab.course.check import grade
from paralab.course.class_report import (
    FORMATS,
    Submission,
    grade_class,
    grade_one,
    same_timings,
    speed_up_spread,
)
from paralab.course.configurations import PRACTICALS
from paralab.course.judge_cell import judge_cell
from paralab.course.numbers import quantities
from paralab.course.sheet_text import parse
from paralab.errors import UsageError
from paralab.show.markdown import as_markdown
from tests.course.made_up import fill_sheet, made_up


def document(name):
    sheet = fill_sheet(name, made_up(name))
    return Document(sheet.title, "", (), tuple(sheet.sections))


def statuses(text, name="5"):
    """Return {(part, place): status} for items that are not right."""
    graded = grade(text, document(name), 0.25)
    return {(i.part, i.place): i.status for i in graded.items if i.status != "right"}


@pytest.mark.parametrize("name", PRACTICALS)
def test_the_filled_sheet_of_a_run_is_right(name):
    found = grade(as_markdown(document(name)), document(name), 0.25)
    assert [item for item in found.items if item.status in ("wrong", "missing")] == []
    assert found.passed
    answers = [
        b.question for s in document(name).sections for b in s.blocks if isinstance(b, Answer)
    ]
    assert [i for i in found.items if i.place in answers and i.status != "right"] == []
    earned, possible = found.points()
    assert earned == possible > 15


def test_wrong_cells_and_answers_are_found():
    text = as_markdown(document("5"))
    changes = {
        "| single | 30 ms |": "| single | 3 s |",  # a hundred times
        "22/22/20": "22/21/21",
        "No. The script calls": "Yes. The script calls",
    }
    for right, wrong in changes.items():
        assert right in text
        text = text.replace(right, wrong, 1)
    assert statuses(text) == {
        (1, "step time of single"): "wrong",
        (4, "split of DataParallel, 3 devices"): "wrong",
        (4, "a) Does your code split the batch by hand?"): "wrong",
    }


def test_other_units_and_decimal_commas_are_right():
    text = as_markdown(document("5"))
    for number, other in (
        ("30 ms", "0,030 s"),
        ("40.0 MiB", "41943040 bytes"),
        ("22/22/20", "22, 22 and 20"),
    ):
        assert number in text
        text = text.replace(number, other)
    assert statuses(text) == {}


def test_shuffled_parts_and_shortened_headings_match():
    head, *parts = as_markdown(document("5")).split("\n## ")
    text = "\n## ".join([head, *reversed(parts)])
    for title in ("Part 3: Compare", "Part 4: Splitting the batch"):
        assert title in text
        text = text.replace(title, title.split(":")[0])
    text = text.replace("**a) Is DataParallel faster?**", "**a)**")
    assert statuses(text) == {}


def test_answers_may_be_plain_lines_with_their_letters():
    head, *parts = as_markdown(document("5")).split("\n## ")
    lines = "Part 3\n\na) No, it is slower.\nb) No\nc) 40 MiB and 80 MiB\n"
    tables = parts[2].partition("**a)")[0].partition("\n")[2]
    text = "\n## ".join([head, *parts[:2], lines + tables, *parts[3:]])
    assert statuses(text) == {}


@pytest.mark.parametrize("other", ["6", "7", "10", "handbook"])
def test_the_sheet_of_another_practical_is_refused(other):
    with pytest.raises(UsageError, match="This sheet is for"):
        grade(as_markdown(document(other)), document("5"), 0.25)


def test_a_copied_sheet_has_identical_timings():
    graded = grade(as_markdown(document("5")), document("5"), 0.25)
    found = [Submission("ann", graded, timings=(0.1,)), Submission("bob", graded, timings=(0.2,))]
    assert same_timings(found) == [["ann", "bob"]]


def test_missing_answers_are_missing():
    text = as_markdown(document("5"))
    section = document("5").sections[2]
    answer = next(block for block in section.blocks if isinstance(block, Answer))
    assert statuses(text.replace(f"No. {answer.text}", "")) == {(3, answer.question): "missing"}


@pytest.mark.parametrize("text", ["", "I did everything.", "# Practical 9\n\n## Part 42\n"])
def test_nonsense_and_other_sheets_are_refused(text):
    with pytest.raises(UsageError):
        grade(text, document("5"), 0.25)


def test_the_blank_sheet_is_refused_as_empty():
    from paralab.course.practical import blank

    with pytest.raises(UsageError):
        grade(as_markdown(blank("5")), document("5"), 0.25)


def one_question(**rubric):
    answer = Answer("Q1 How many processes are there?", "2 processes.", **rubric)
    return Document("Practical 10", "", (), (Section("Part 1: Run", (answer,)),))


@pytest.mark.parametrize(
    ("written", "status"),
    [
        ("2 processes", "right"),
        ("There are several of them.", "not judged"),
        ("8 processes, all on GPU 5", "wrong"),
    ],
)
def test_free_text_is_judged_by_its_numbers(written, status):
    text = f"## Part 1\n\n**Q1**\n\n{written}\n\n"
    known = one_question(evidence={"processes": 2})
    if status == "not judged":  # nothing here can be checked, but the sheet is not empty
        text += "| configuration | processes |\n|---|---|\n| x | 1 |\n"
        table = Table("", ("configuration", "processes"), ((Cell("x", "x"), Cell("1", 1)),))
        [section] = known.sections
        known = Document(
            "Practical 10", "", (), (Section("Part 1: Run", (*section.blocks, table)),)
        )
    found = grade(text, known, 0.25)
    assert next(item.status for item in found.items if item.place.startswith("Q1")) == status


@pytest.mark.parametrize(
    ("written", "status"),
    [
        ("No, DDP does.", "right"),
        ("Yes, of course.", "wrong"),
        ("It depends.", "wrong"),
    ],
)
def test_yes_or_no_is_required(written, status):
    known = one_question(evidence={}, verdict=False)
    assert grade(f"## Part 1\n\n**Q1** {written}\n", known, 0.25).items[0].status == status


def test_key_terms_and_choices():
    terms = one_question(evidence={}, terms=("backward|gradient",))
    text = "## Part 1\n\n### Q1 How many?\n\nIn the backward pass.\n"
    assert grade(text, terms, 0.25).items[0].status == "right"
    choice = one_question(evidence={}, choice="DDP")
    assert grade("## Part 1\n\n**Q1** DDP is.\n", choice, 0.25).items[0].status == "right"
    assert grade("## Part 1\n\n**Q1** Neither.\n", choice, 0.25).items[0].status == "wrong"


TIME = Cell("34.6 ms", 0.0346, 0.0340, 0.0350)


@pytest.mark.parametrize(
    ("written", "cell", "right"),
    [
        ("35 ms", TIME, True),
        ("39,7 ms", TIME, True),
        ("0.0397 s", TIME, True),
        ("45 ms", TIME, False),
        ("34.6", TIME, False),  # no unit
        ("0 min", TIME, False),  # so coarsely rounded that anything matches
        ("3.46 %", TIME, False),
        ("3", Cell("2", 2), False),
        ("24 MiB", Cell("24.0 MiB", 25190400), True),
        ("25.19 MB", Cell("24.0 MiB", 25190400), True),
        ("24.5 MiB", Cell("24.0 MiB", 25190400), False),
        ("32 and 32", Cell("32/32", "32/32"), True),
        ("22/22/21", Cell("22/22/20", "22/22/20"), False),
        ("9" * 5000, Cell("22/22/20", "22/22/20"), False),
        ("cpu:1", Cell("cpu:0", "cpu:0"), False),
        ("No", Cell("yes", True), False),
        ("60 % and 61 %", Cell("58 % and 60 %", 0.59, 0.58, 0.60), True),
    ],
)
def test_what_contradicts_a_cell(written, cell, right):
    assert judge_cell(written, cell, 0.25)[0] == ("right" if right else "wrong")


def test_numbers_with_units():
    [found] = quantities("34.6 ms")
    assert (found.value, found.step, found.kind) == (
        pytest.approx(0.0346),
        pytest.approx(1e-4),
        "time",
    )
    assert quantities("1.234,5")[0].value == 1234.5
    assert [each.value for each in quantities("1,768")] == [1768, 1.768]
    assert quantities("58 %")[0].value == pytest.approx(0.58)
    assert quantities("1.39× (95 % CI 1.06–1.83)")[0].value == 1.39
    for nonsense in ("1e400 s", "0e999 s", "fast", "9" * 5000):
        assert quantities(nonsense) == []


def test_a_bold_line_is_a_question_unless_a_table_follows():
    text = "## Part 1: x\n\n**A table**\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n**Is it?**\n\nYes. It\nis.\n"
    part = parse(text)[1]
    assert part.answers == {"Is it?": "Yes. It is."}
    assert part.tables == [[["a", "b"], ["1", "2"]]]


@pytest.fixture
def submissions():
    right = grade(as_markdown(document("5")), document("5"), 0.25)
    wrong = grade(as_markdown(document("5")).replace("22/22/20", "1/1/1"), document("5"), 0.25)
    return [
        Submission("ann", right, "", {"single": 1.0, "dp2": 1.5}, (0.1, 0.2)),
        Submission("bob", wrong, "", {"single": 1.0, "dp2": 0.5}, (0.1, 0.2)),
        Submission("=cmd", problem="bob has no sheet"),
    ]


def test_identical_timings_and_the_spread_of_the_class(submissions):
    assert same_timings(submissions) == [["ann", "bob"]]
    spread = speed_up_spread(submissions)["dp2"]
    assert (spread.low, spread.median, spread.high) == (0.5, 1.0, 1.5)


def test_every_format_of_a_grader(submissions):
    text = {name: make(submissions) for name, make in FORMATS.items()}
    report = json.loads(text["json"])
    assert [s["points"] == s["possible"] for s in report["students"]] == [True, False, True]

    rows = list(csv.DictReader(io.StringIO(text["csv"])))
    assert [row["student"] for row in rows] == ["ann", "bob", "'=cmd"]  # no formula
    assert int(rows[1]["wrong"]) >= 1

    suites = ElementTree.fromstring(text["junit"])
    assert [len(suite.findall("testcase/failure")) > 0 for suite in suites] == [False, True, True]

    scope = json.loads(text["gradescope"])
    assert scope["ann"]["score"] == sum(test["max_score"] for test in scope["ann"]["tests"])
    room = json.loads(text["classroom50"])
    assert room["bob"]["schema"] == "classroom50/result/v1"
    assert room["bob"]["score"] < room["bob"]["max-score"]
    assert set(room["bob"]["tests"][0]) == {"test-name", "passed", "score", "max-score"}

    alone = json.loads(FORMATS["gradescope"](submissions[:1]))
    assert alone["score"] == scope["ann"]["score"]  # for one sheet, the object itself


@pytest.mark.parametrize(
    ("written", "status"),
    [("Rank 0 uses GPU 0, rank 1 GPU 1", "right"), ("all on GPU 5", "wrong")],
)
def test_a_list_of_numbers_must_be_complete(written, status):
    known = one_question(evidence={"devices": [0, 1]})
    assert grade(f"## Part 1\n\n**Q1** {written}\n", known, 0.25).items[0].status == status


def test_half_of_a_list_is_for_a_human():
    answers = tuple(
        Answer(f"Q{n} Where?", "", {"devices": [0, 1]} if n == 1 else {}, None if n == 1 else True)
        for n in (1, 2)
    )
    known = Document("Practical 10", "", (), (Section("Part 1: Run", answers),))
    found = grade("## Part 1\n\n**Q1** all on GPU 0\n\n**Q2** Yes\n", known, 0.25)
    assert [item.status for item in found.items] == ["not judged", "right"]


@pytest.mark.parametrize(
    ("right", "other", "status"),
    [
        ("| single | 30 ms | 600 ms |", "| single | 600 ms | 30 ms |", "wrong"),  # swapped
        ("| single | 30 ms | 600 ms |", "| single |  | - |", "missing"),
        ("| single | 30 ms |", "| single | 30 ms ± 1 |", "right"),
        ("| single | 30 ms |", "| single | about 30 milliseconds |", "right"),
        ("| single | 30 ms |", "| single | 0,030 s |", "right"),
        ("| DataParallel, 2 devices | 1 |", "| dataparallel 2 devices | one process |", "right"),
        ("| configuration | step time |", "| configuration | step time [s] |", "right"),
        ("| 2 | 64 | 32 | 32/32 | yes |", "| 2 | 64 | 32 | 32 and 32 samples | Yes. |", "right"),
        ("| 2 | 64 | 32 | 32/32 | yes |", "| 2 GPUs | 64 | 32 | 32/32 | yes |", "not judged"),
        ("| 2 | 64 | 32 | 32/32 | yes |", "| two | 64 | 32 | 32/32 | maybe |", "wrong"),
    ],
)
def test_what_students_do_to_cells(right, other, status):
    text = as_markdown(document("5"))
    assert right in text
    found = set(statuses(text.replace(right, other, 1)).values())
    assert found == ({status} if status != "right" else set())


def test_a_number_without_its_unit_takes_the_unit_of_its_column():
    text = as_markdown(document("5"))
    text = text.replace("| step time |", "| step time (ms) |").replace("| 30 ms |", "| 30 |")
    assert statuses(text) == {}


def test_the_title_of_the_checkpoint_does_not_hide_other_parts():
    # A sheet with `checkpoint` in its first line was once graded only on the parts it had.
    first = as_markdown(document("5")).split("## Part 2")[0].replace(":", " checkpoint:", 1)
    assert "missing" in statuses(first).values()


def test_a_name_above_the_title_does_not_hide_the_practical():
    with pytest.raises(UsageError, match="This sheet is for"):
        grade("Ann\n\n" + as_markdown(document("6")), document("5"), 0.25)


def test_a_sheet_of_5_mb_is_refused(tmp_path):
    sheet = tmp_path / "sheet.md"
    sheet.write_text("a" * 5_000_000)
    with pytest.raises(UsageError, match="too large"):
        grade_one(sheet, tmp_path, 0.25)


def test_a_class_folder_may_contain_other_files(tmp_path):
    (tmp_path / ".DS_Store").write_text("")
    (tmp_path / "grades.csv").write_text("")
    with pytest.raises(UsageError, match="no sheets"):
        grade_class(tmp_path, "5", 0.25)
    (tmp_path / "ann").mkdir()
    [found] = grade_class(tmp_path, "5", 0.25)
    assert (found.student, found.passed, found.grade.items) == ("ann", False, ())
