"""Print grades in the terminal: one sheet in detail, or a table for the class."""

from collections.abc import Sequence

from rich.markup import escape

from paralab.course.check import Grade, Item
from paralab.course.class_report import Submission, same_timings, speed_up_spread
from paralab.show.console import console, print_table, say
from paralab.units import plural

COLORS = {"wrong": "red", "missing": "yellow", "not judged": "dim"}


def print_grade(grade: Grade) -> None:
    """Print each item that is not right, then the points for each part."""
    for item in grade.items:
        if item.status != "right" and (item.status != "not judged" or item.written):
            _print_item(item)
    rows = []
    for part in grade.parts:
        earned, possible = grade.points(part)
        counts = [str(grade.count(status, part)) for status in COLORS]
        rows.append((str(part), f"{earned} of {possible}", *counts))
    print_table(("part", "points", *COLORS), rows, right=("points",))
    earned, possible = grade.points()
    human = plural(grade.count("not judged"), "entry")
    say(f"{earned} of {possible} points; {human} left for a human to grade.")


def _print_item(item: Item) -> None:
    say(f"[{COLORS[item.status]}]{item.status}[/] Part {item.part}: {escape(item.place)}")
    if item.status == "wrong":
        text = f"  you wrote {_short(item.written)}, the run has {_short(item.expected)}"
        say(escape(text + (f": {item.reason}" if item.reason else "")))
    elif item.status == "not judged":
        reason = f" ({item.reason})" if item.reason else ""
        say(escape(f"{_short(item.written)}{reason}"), indent=2)


def print_class(submissions: Sequence[Submission]) -> None:
    """Print a line for each student, the range of speed-ups, and runs that look copied."""
    rows = []
    for each in submissions:
        counts = [str(each.grade.count(status)) for status in COLORS]
        numbers = ["{} of {}".format(*each.grade.points()), *counts]
        numbers = [""] * len(numbers) if each.problem else numbers
        rows.append((escape(each.student), *numbers, escape(each.problem)))
    print_table(("student", "points", *COLORS, "problem"), rows, right=("points",))

    spread = [
        (escape(name), *(f"{value:.2f}×" for value in (own.low, own.median, own.high)))
        for name, own in speed_up_spread(submissions).items()
    ]
    if spread:
        print_table(("configuration", "speed-up: lowest", "median", "highest"), spread)
    for students in same_timings(submissions):
        names = escape(", ".join(students))
        console.print(f"[red]identical timings[/] {names}: two runs never have the same timings")


def _short(words: str) -> str:
    return words if len(words) <= 80 else words[:79] + "…"
