"""Comments that silence findings: which statement they cover, and notes about the comments
themselves."""

import pytest

from paralab.doctor.registry import Finding
from paralab.doctor.sources import Sources
from paralab.doctor.suppressions import Comments, find_comments

SCRIPT = """\
loss.backward()  # paralab: ignore[G01] divided by the loss function
# paralab: ignore[H03, h07] rank 1 takes part in another branch
if rank == 0:
    dist.barrier()
loader = DataLoader(
    data,
    batch_size=4,
)  # paralab: ignore[T01] every rank has its own files
text = "# paralab: ignore[A01] a string is no comment"
"""


def at(line, id):
    return Finding(id, "error", "why", "fix", "train.py", line)


@pytest.fixture
def comments_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def of(text):
        (tmp_path / "train.py").write_text(text)
        return Comments(Sources())

    return of


@pytest.mark.parametrize(
    ("line", "id", "reported"),
    [
        (1, "G01", False),
        (1, "G02", True),  # another entry
        (2, "H03", True),  # a finding cannot be about a comment line
        (3, "H03", False),  # the line after it
        (3, "H07", False),
        (4, "H03", True),  # one line further
        (
            5,
            "T01",
            False,
        ),  # the comment is at the end of the statement, the finding at its start
        (7, "T01", False),
        (9, "A01", True),
    ],
)
def test_a_comment_covers_its_statement(comments_in, line, id, reported):
    assert (comments_in(SCRIPT).silencing(at(line, id)) is None) is reported


@pytest.mark.parametrize(
    "comment",
    [
        "# Paralab: Ignore[G01] divided elsewhere",
        "#paralab:ignore[G01]divided elsewhere",
        "#  PARALAB :  IGNORE [ g01 ] : divided elsewhere",
        "# paralab ignore[G01] divided elsewhere",
        "# noqa: E501  # paralab: ignore[G01,G02] – divided elsewhere",
    ],
)
def test_capitals_and_spaces_do_not_matter(comments_in, comment):
    comments = comments_in(f"loss.backward()  {comment}\n")
    assert comments.silencing(at(1, "G01")).reason == "divided elsewhere"
    assert comments.notes(["train.py"], {"G01"}) == []


def test_other_words_about_paralab_are_no_such_comment(comments_in):
    comments = comments_in(
        "a()  # paralab ignores this\nb()  # paralab: see the docs\nc()  # paralab: Ignore G01, it is fine\n"
    )
    (note,) = comments.notes(["train.py"], {"G01"})
    assert note.startswith("train.py:3: the comment does not name an id")


def test_a_finding_without_a_place_is_always_reported(comments_in):
    assert comments_in(SCRIPT).silencing(Finding("G01", "error", "why", "fix")) is None


def test_what_is_wrong_with_the_comments(comments_in):
    comments = comments_in(
        "a()  # paralab: ignore[G01]\nb()  # paralab: ignore\nc()  # paralab: ignore[X99] why not\n"
        "d()  # paralab: ignore[T02] old\ne()  # paralab: ignore[H12] seen in a run\n"
    )
    assert comments.silencing(at(1, "G01")), "a comment without a reason silences, with a note"
    notes = comments.notes(["train.py"], {"G01", "T02"})
    assert [note.split(": ", 1)[0] for note in notes] == [
        "train.py:1",
        "train.py:2",
        "train.py:3",
        "train.py:4",
    ]
    for note, words in zip(
        notes,
        ("has no reason", "does not name an id", "no failure 'X99'", "silences nothing"),
        strict=True,
    ):
        assert words in note


def test_a_file_that_is_no_python_is_no_reason_to_fail():
    (half,) = find_comments("x.py", "x = (\n# paralab: ignore[G01] reason\n")
    assert not half.silences(at(1, "G01"))
