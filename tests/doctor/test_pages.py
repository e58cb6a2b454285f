"""docs/doctor/ matches the catalog."""

from paralab.doctor.catalog import ENTRIES
from paralab.doctor.show.entry import pages
from tests.conftest import ROOT

FOLDER = ROOT / "docs" / "doctor"


def test_a_page_per_entry_is_up_to_date():
    wanted = pages()
    assert {path.name for path in FOLDER.glob("*.md")} == wanted.keys()
    old = [
        name for name, text in wanted.items() if (FOLDER / name).read_text(encoding="utf-8") != text
    ]
    assert not old, f"{old} differ from the catalogue; run `python3 tasks.py docs`"


def test_the_index_lists_all_of_them():
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert index.count(".md)") == len(ENTRIES) + 1
    assert index.count(" †\n") == sum(entry.silent for entry in ENTRIES.values())
