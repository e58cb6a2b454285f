"""The page of a real default comparison: it fits a desktop and a phone, and is accessible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paralab.analyse.blocks import Explorable
from paralab.show.open_folder import document_of
from tests.conftest import run_paralab

pytestmark = pytest.mark.processes
# How many lines the name of each configuration takes.
LINES = """(cells) => cells.map((cell) => { const range = document.createRange();
    range.selectNodeContents(cell);
    return new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size; })"""
# The tiny workload's numbers are short. With gpt:small, a name took three lines.
WIDEST = """(cells) => { const words = ["2", "504 ms", "94.8", "75.3", "0.63 (0.32–1.22)", "100%",
    "146.6 MiB", "12% (12%)", "equal, loss ±8e-04"];
    cells.forEach((cell, n) => { cell.textContent = words[n % words.length]; }); }"""
OVERFLOW = "(boxes) => boxes.map((box) => box.scrollWidth - box.clientWidth)"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    options = ("--rounds", "2", "--steps", "6", "--out", "comparison")
    done = run_paralab("compare", "--workload", "mlp:tiny", *options, cwd=folder)
    assert done.code == 0, done.err
    return folder / "comparison"


def opened(browser: Any, folder: Path, **options: Any) -> Any:
    context = browser.new_context(bypass_csp=True, **options)  # axe is a script of its own
    page = context.new_page()
    page.goto((folder / "report.html").as_uri())
    return page


@pytest.mark.parametrize(("width", "most_lines"), [(1280, 2), (390, 2)])
def test_names_take_few_lines_and_the_first_table_fits_a_desktop(
    browser, compared, width, most_lines
):
    """At 1280 px, the table was once cut off, and names took three lines."""
    page = opened(browser, compared, viewport={"width": width, "height": 900})
    table = page.locator(".table-block").first
    table.locator("tbody td").evaluate_all(WIDEST)
    lines = table.locator("tbody th").evaluate_all(LINES)
    assert len(lines) == 8
    assert max(lines) <= most_lines
    if width == 1280:
        assert page.locator(".table-block .scroll").evaluate_all(OVERFLOW)[0] == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.context.close()


def test_bars_are_long_on_a_phone(browser, compared):
    page = opened(browser, compared, viewport={"width": 390, "height": 900})
    longest = "(bars) => Math.max(...bars.map((bar) => bar.getBoundingClientRect().width))"
    assert page.locator(".bars-block svg.narrow .bar").evaluate_all(longest) > 250
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing(browser, compared, scheme, width):
    size = {"width": width, "height": 900}
    page = opened(browser, compared, viewport=size, color_scheme=scheme)
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(page).response
    wrong = [(each["id"], each["impact"], len(each["nodes"])) for each in found["violations"]]
    page.context.close()
    assert len(found["passes"]) > 30  # it checked something
    assert wrong == []


def test_all_figures_with_sliders_are_there_and_the_page_is_small(compared):
    blocks = [block for section in document_of(compared).explore for block in section.blocks]
    figures = [block.figure for block in blocks if isinstance(block, Explorable)]
    assert figures == ["schedule", "overlap", "memory", "split", "what_if"]
    assert (compared / "report.html").stat().st_size < 1_500_000
