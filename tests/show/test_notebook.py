"""Results in a notebook: short as text; a table and a chart as HTML."""

from __future__ import annotations

import base64
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

import paralab.api  # noqa: F401 (it gives results their look)
from paralab.analyse.blocks import Bar, Bars, Cell, Document, Section, Table
from paralab.analyse.compare import comparison_of_runs
from paralab.analyse.result import result_of
from paralab.analyse.verify import VerifyResult
from paralab.show.page import cell_words
from tests.show.sample_document import NASTY, sample
from tests.show.test_page import Tree

RUNS = Path(__file__).parent.parent / "runs"
MOST_BYTES = 200_000


def images(html: str) -> dict[str, ElementTree.Element]:
    """Return the drawings by theme."""
    found = re.findall(r'<img class="(\w+)"[^>]* src="data:image/svg\+xml;base64,([^"]+)">', html)
    return {theme: ElementTree.fromstring(base64.b64decode(data)) for theme, data in found}


def tags(html: str) -> list[str]:
    return [tag for tag, _ in Tree(html).elements]


@pytest.mark.parametrize("name", ["ddp", "pipeline", "hybrid", "killed"])
def test_a_result_is_short_text_and_a_table_with_a_chart(name):
    result = result_of(RUNS / name)
    assert len(repr(result)) < 300
    assert result.workload in repr(result)
    html = result._repr_html_()
    assert len(html.encode()) < MOST_BYTES
    assert tags(html).count("table") == 1
    assert set(images(html)) == {"light", "dark"}


def test_the_table_shows_the_numbers():
    document = sample()
    words = {text for tag, text in Tree(document._repr_html_()).texts if tag in ("th", "td")}
    tables = [b for s in document.sections for b in s.blocks if isinstance(b, Table)]
    largest = max(tables, key=lambda table: len(table.rows))
    cells = {cell_words(cell) for row in largest.rows for cell in row}
    assert {*largest.columns, *cells} == words


def test_everything_from_a_folder_is_escaped():
    table = Table(NASTY, (NASTY, "b"), ((Cell(NASTY, NASTY), Cell("\x1b[2J", None)),))
    html = Document(NASTY, NASTY, (), (Section(NASTY, (table,)),), run_folder=NASTY)._repr_html_()
    assert not {"b", "script"} & set(tags(html))
    shown = [text for tag, text in Tree(html).texts if tag in ("th", "td")]
    assert shown.count(NASTY) == 2  # as a column and as a cell
    assert "\x1b" not in html


def test_a_long_table_and_a_large_chart_are_left_out():
    rows = tuple((Cell(str(n), n),) for n in range(500))
    chart = Bars("speed-up", tuple(Bar(str(n), 1.0) for n in range(2000)), "×")
    html = Document("t", "", (), (Section("s", (Table("", ("n",), rows), chart)),))._repr_html_()
    assert len(html.encode()) < 20_000
    assert (tags(html).count("tr"), images(html)) == (31, {})


def test_a_moved_folder_is_named(tmp_path):
    shutil.copytree(RUNS / "ddp", tmp_path / "run")
    result = result_of(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    html = result._repr_html_()
    assert tags(html) == ["pre"]
    assert str(tmp_path / "run") in html


def test_comparisons_and_checks_have_a_short_repr():
    comparison = replace(comparison_of_runs([RUNS / "ddp"]), run_folder="runs/x")
    assert repr(comparison) == "<Comparison: 1 configuration of mlp:tiny; run_folder='runs/x'>"
    check = VerifyResult(
        strategy="ddp",
        workloads=["mlp"],
        precision="fp64",
        passed=True,
        steps=3,
        configurations=[],
        skipped=[],
        dropout="none",
        state={},
        seconds=1.0,
        run_folder="runs/v",
    )
    assert len(repr(check)) < 200


@pytest.mark.processes
def test_the_chart_follows_the_notebook_s_theme(browser, tmp_path):
    path = tmp_path / "output.html"
    path.write_text(f"<!DOCTYPE html><body>{result_of(RUNS / 'ddp')._repr_html_()}</body>")
    shown = "(all) => all.filter((one) => one.offsetWidth > 300).map((one) => one.className)"
    themes = {
        "'light', () => {}": "light",
        "'dark', () => {}": "dark",
        "'dark', () => { document.body.dataset.jpThemeLight = 'true' }": "light",
        "'light', () => { document.body.dataset.jpThemeLight = 'false' }": "dark",
        "'light', () => { document.body.className = 'vscode-dark' }": "dark",
        "'light', () => { document.documentElement.setAttribute('theme', 'dark') }": "dark",
    }
    for setting, expected in themes.items():
        scheme, _, change = setting.partition(", ")
        with browser.new_context(color_scheme=scheme.strip("'")) as context:
            page = context.new_page()
            page.goto(path.as_uri())
            page.evaluate(f"({change})()")
            assert page.locator("img").evaluate_all(shown) == [expected], setting
