"""Tables and paragraphs in a terminal: lines break between words, and columns without room are
named."""

import re

import pytest

from paralab.analyse.blocks import Cell, Document, Section, Table
from paralab.show import console, document
from paralab.show.console import fit, fits, plain_table, set_widths

COLUMNS = ("configuration", "devices", "step time", "samples/s", "per device", "speed-up")
COLUMNS += ("efficiency", "memory", "communication", "same training")
CELLS = ("ddp ×2 · accumulate 4 · bf16", "2", "111 ms", "286", "143", "2.43 (2.39–2.47)")
CELLS += ("121%", "21.5 MiB", "4% (1%)", "equal, loss ±8e-04")


@pytest.mark.parametrize(
    ("natural", "least", "room", "widths"),
    [
        ([28, 9, 18], [10, 6, 11], 60, [28, 9, 18]),
        ([28, 9, 18], [10, 6, 11], 40, [15, 9, 16]),  # the widest shrinks first
        ([28, 9, 18], [10, 6, 18], 40, [13, 9, 18]),
        ([28, 9, 18], [10, 6, 11], 20, [10, 6, 11]),  # never narrower than a word
    ],
)
def test_the_widths_of_columns(natural, least, room, widths):
    assert fit(natural, least, room) == widths


@pytest.fixture
def terminal(monkeypatch, capsys):
    """Return a function that prints a document in a terminal of this width."""

    def show(width):
        made = console.VisibleConsole(width=width, force_terminal=True, color_system=None)
        monkeypatch.setattr(console, "console", made)
        monkeypatch.setattr(document, "console", made)
        table = Table("", COLUMNS, (tuple(Cell(text) for text in CELLS),), "a note " * 30)
        document.print_document(Document("compare", "", (), (Section("", (table,)),)))
        return capsys.readouterr().out

    return show


@pytest.mark.parametrize(
    ("width", "missing"),
    [
        (140, set()),
        (110, {"per device", "efficiency"}),
        (80, {"per device", "efficiency", "samples/s"}),
        (60, {"per device", "efficiency", "samples/s", "devices", "memory"}),
    ],
)
def test_a_narrow_terminal_breaks_no_word(terminal, width, missing):
    """At 80 columns, the default table once printed `configur`, `ation`, and `(0.49–2.`."""
    shown = terminal(width)
    assert max(map(len, shown.splitlines())) <= width
    printed = set(shown.split())
    for column, cell in zip(COLUMNS, CELLS, strict=True):
        if column not in missing:
            assert {*column.split(), *cell.split()} <= printed
    named = re.search(r"no room for: ([^;]*);", " ".join(shown.split()))
    assert set(named[1].split(", ") if named else ()) == missing - {"per device", "efficiency"}


def test_a_number_and_its_unit_stay_together():
    table = plain_table("name", "memory", right=("memory",))
    table.add_row("a long name in words", "146.6 MiB")
    set_widths(table, 16)
    assert [column.width for column in table.columns] == [5, 9]
    assert fits(table, 16)
    assert not fits(table, 15)
