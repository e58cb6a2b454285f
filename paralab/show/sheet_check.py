"""Print grades in the terminal: one sheet in detail, or a table for the class."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from paralab.course.check import Grade, Item
from paralab.course.class_report import Submission, same_timings, speed_up_spread
from paralab.show.console import console, plain_table, show_table
from paralab.units import plural

COLORS = {"wrong": "red", "missing": "yellow", "not judged": "dim"}


def print_grade(grade: Grade | None) -> None:
    """Print each item that is not right, then the points for each part."""
    assert grade is not None
    for item in grade.items:
        if item.status != "right" and (item.status != "not judged" or item.written):
            _print_item(item)
    table = plain_table("part", "points", "wrong", "missing", "not judged", right=("points",))
    for part in grade.parts:
        earned, possible = grade.points(part)
        counts = [str(grade.count(status, part)) for status in ("wrong", "missing", "not judged")]
        table.add_row(str(part), f"{earned} of {possible}", *counts)
    show_table(table)
    earned, possible = grade.points()
    human = plural(grade.count("not judged"), "entry").replace("entrys", "entries")
    console.print(
        f"{earned} of {possible} points; {human} left for a human to grade.", soft_wrap=True
    )


def _print_item(item: Item) -> None:
    color = COLORS[item.status]
    console.print(
        f"[{color}]{item.status}[/] Part {item.part}: {escape(item.place)}", soft_wrap=True
    )
    if item.status == "wrong":
        text = f"  you wrote {_short(item.written)}, the run has {_short(item.expected)}"
        reason = f": {item.reason}" if item.reason else ""
        console.print(escape(text + reason), soft_wrap=True)
    elif item.status == "not judged":
        console.print(f"  {escape(_short(item.written))}", soft_wrap=True)


def print_class(submissions: Sequence[Submission]) -> None:
    """Print a line per student, the speed-ups in the class, and runs that look copied."""
    columns = ("student", "points", "wrong", "missing", "not judged", "problem")
    table = plain_table(*columns, right=("points",))
    for s in submissions:
        earned, possible = s.points
        states = ("wrong", "missing", "not judged")
        counts = [str(s.grade.count(state)) if s.grade else "" for state in states]
        points = f"{earned} of {possible}" if s.grade else ""
        table.add_row(escape(s.student), points, *counts, escape(s.problem))
    show_table(table)

    spread = speed_up_spread(submissions)
    if spread:
        shown = plain_table("configuration", "speed-up: lowest", "median", "highest")
        for name, values in spread.items():
            shown.add_row(escape(name), *(f"{value:.2f}×" for value in values))
        show_table(shown)
    for students in same_timings(submissions):
        names = escape(", ".join(students))
        console.print(f"[red]identical timings[/] {names}: two runs never have the same timings")


def _short(words: str) -> str:
    return words if len(words) <= 80 else words[:79] + "…"
