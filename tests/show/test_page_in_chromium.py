"""The page in a real browser: view, hover, zoom, type, print, and read it without scripts.

Needs Playwright and a Chromium (conftest.py).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paralab.analyse.blocks import Lines, Table, Timeline
from paralab.show.open_folder import document_of
from paralab.show.page import cell_words, plain, render
from paralab.show.svg import WIDE
from paralab.units import measure, seconds
from tests.analyse.recordings import plan as recorded_plan
from tests.analyse.recordings import write
from tests.analyse.test_metrics import pipelined
from tests.show.sample_document import sample, without_numbers

DESK, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
BLOCKS = [block for section in sample().sections for block in section.blocks]
TIMELINE = next(block for block in BLOCKS if isinstance(block, Timeline))
BEGIN = min(span.start for span in TIMELINE.spans)

# The WCAG contrast between an element's text and the first opaque background below it.
CONTRAST = """(element) => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, n) => sum + weight * linear(parts(colour)[n] / 255), 0);
  let under = element;
  while (parts(getComputedStyle(under).backgroundColor)[3] === 0) under = under.parentElement;
  const style = getComputedStyle(element), text = element.closest("svg") ? style.fill : style.color;
  const [a, b] = [light(text), light(getComputedStyle(under).backgroundColor)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(sample()), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """Open the sample on a desktop. A script error fails the test."""
    with browser.new_context(viewport=DESK) as context:
        opened = context.new_page()
        wrong: list[str] = []
        opened.on("pageerror", lambda error: wrong.append(str(error)))
        opened.on("console", lambda message: wrong.append(message.text))
        opened.goto(address)
        yield opened
        assert not wrong, wrong


def settle(page: Any) -> None:
    """Wait two frames until scrolling, toggling, and layout are done."""
    page.evaluate(
        "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )


def until(page: Any, expression: str, deadline_seconds: float = 5) -> None:
    """Wait without Playwright's functions: they evaluate strings inside the page, which the page's
    security policy forbids."""
    end = time.monotonic() + deadline_seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        settle(page)


def view(page: Any) -> list[float]:
    """Return the time range that the timeline shows, once it is laid out."""
    settle(page)
    return json.loads(page.locator("svg[data-view]").get_attribute("data-view"))


def tip_rows(page: Any) -> dict[str, str]:
    tip = page.locator("#tip")
    assert tip.is_visible()
    return dict(
        zip(tip.locator("dt").all_inner_texts(), tip.locator("dd").all_inner_texts(), strict=True)
    )


def told_of(index: int) -> dict[str, str]:
    """Return the tooltip for a span."""
    span = TIMELINE.spans[index]
    return {
        "start": seconds(span.start - BEGIN),
        "duration": seconds(span.end - span.start),
        "lane": TIMELINE.lanes[span.lane],
    }


def test_nothing_fails_and_nothing_is_fetched(browser, address, tmp_path):
    empty = tmp_path / "empty.html"
    empty.write_text(render(without_numbers()), encoding="utf-8")
    with browser.new_context(viewport=DESK) as context:
        page = context.new_page()
        wrong, asked = [], []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("request", lambda request: asked.append(request.url))
        for url in (address, empty.as_uri()):
            page.goto(url)
        assert not wrong
        assert [url for url in asked if not url.startswith("data:")] == [address, empty.as_uri()]


def test_tables_show_the_data_in_the_page(page):
    data = json.loads(page.locator("#paralab-data").text_content())
    blocks = [
        block
        for section in data["sections"]
        for block in section["blocks"]
        if block["block"] == "table"
    ]
    cells = "(cell) => [cell.textContent, JSON.parse(cell.dataset.value)]"
    rows = f"(tables) => tables.map((table) => [...table.tBodies[0].rows].map((row) => [...row.cells].map({cells})))"
    shown = page.locator(".table-block table").evaluate_all(rows)
    tables = [block for block in BLOCKS if isinstance(block, Table)]
    assert shown == [
        [[[cell_words(cell), plain(cell.value)] for cell in row] for row in table.rows]
        for table in tables
    ]
    assert [[[value for _, value in row] for row in table] for table in shown] == [
        [[cell["value"] for cell in row] for row in block["rows"]] for block in blocks
    ]


def test_pages_for_recorded_folders(browser, tmp_path):
    """Check a recorded run, and one with stages: tables match the data, a phone needs no horizontal
    scrolling, and no script fails."""
    staged = write(
        tmp_path / "run",
        recorded_plan("pipeline", ranks=1, stages=2, micro_batches=2, workload="mlp"),
        pipelined,
    )
    for folder in (Path(__file__).parent.parent / "runs" / "ddp", staged):
        document = document_of(folder)
        kinds = {type(block).__name__ for section in document.sections for block in section.blocks}
        assert {"Table", "Distribution", "Timeline", "Split", "Lines"} <= kinds
        path = tmp_path / "page.html"
        path.write_text(render(document), encoding="utf-8")
        with browser.new_context(viewport=PHONE) as context:
            page = context.new_page()
            wrong: list[str] = []
            page.on("pageerror", lambda error, wrong=wrong: wrong.append(str(error)))
            page.on("console", lambda message, wrong=wrong: wrong.append(message.text))
            page.goto(path.as_uri())
            texts = "(row) => [...row.cells].map((cell) => cell.textContent)"
            cells = f"(tables) => tables.map((table) => [...table.tBodies[0].rows].map({texts}))"
            shown = page.locator(".table-block table").evaluate_all(cells)
            tables = [
                block
                for section in document.sections
                for block in section.blocks
                if isinstance(block, Table)
            ]
            told = [
                [[cell_words(cell) for cell in row] for row in table.rows] or [["nothing measured"]]
                for table in tables
            ]
            assert shown == told
            page.locator("details.json").evaluate_all(
                "(panels) => panels.forEach((panel) => { panel.open = true; })"
            )
            settle(page)  # long JSON lines once made the page several screens wide
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
            assert not wrong


def test_hovering_a_span_shows_its_numbers(page):
    index = next(
        n for n, span in enumerate(TIMELINE.spans) if span.kind == "all_reduce" and span.exposed
    )
    span = page.locator(f"svg[data-view] [data-index='{index}']")
    span.scroll_into_view_if_needed()
    settle(page)  # scrolling hides the tip
    span.hover()
    rows = tip_rows(page)
    assert page.locator("#tip strong").inner_text() == "all-reduce 3"
    assert {name: rows[name] for name in told_of(index)} == told_of(index)
    assert rows["kind"] == "all-reduce, exposed"
    assert rows["bucket bytes"] == "25.0 MiB"
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()


def test_the_wheel_zooms_at_the_pointer_and_reset_shows_all(page):
    svg = page.locator("svg[data-view]")
    svg.scroll_into_view_if_needed()
    whole, box = view(page), svg.bounding_box()
    ticks, labels = (
        svg.locator(".axis .tick").all_text_contents(),
        svg.locator(".labels text").count(),
    )
    x = box["x"] + 0.75 * box["width"]
    page.mouse.move(x, box["y"] + 60)
    page.mouse.wheel(0, -400)
    page.mouse.wheel(0, -400)
    zoomed = view(page)
    length = zoomed[1] - zoomed[0]
    assert length < 0.5 * (whole[1] - whole[0])
    under = (0.75 * box["width"] - 8) / (box["width"] - 16)  # the time at the pointer stays there
    assert zoomed[0] + under * length == pytest.approx(
        whole[0] + under * (whole[1] - whole[0]), abs=0.01 * length
    )
    assert svg.locator(".axis .tick").all_text_contents() != ticks
    assert "all-reduce 3" in svg.locator(".labels text").all_text_contents()  # now it fits
    page.locator("[data-zoom=reset]").click()
    assert view(page) == whole
    assert svg.locator(".axis .tick").all_text_contents() == ticks
    assert svg.locator(".labels text").count() == labels


def test_the_wheel_scrolls_the_page_over_an_unzoomed_timeline(page):
    page.locator("svg[data-view]").hover()
    before = page.evaluate("scrollY")
    page.mouse.wheel(0, 300)
    until(page, f"scrollY > {before}")


def test_buttons_zoom_and_dragging_moves(page):
    whole = view(page)
    page.locator("[data-zoom=in]").click()
    page.locator("[data-zoom=in]").click()
    zoomed = view(page)
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[1] - whole[0]) / 2.25)
    box = page.locator("svg[data-view]").bounding_box()
    page.mouse.move(box["x"] + 500, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 60, steps=3)
    page.mouse.up()
    moved = view(page)
    shift = 100 / (box["width"] - 16) * (zoomed[1] - zoomed[0])
    assert moved == pytest.approx([zoomed[0] + shift, zoomed[1] + shift])
    page.locator("[data-zoom=out]").click()
    assert view(page)[1] - view(page)[0] > moved[1] - moved[0]


def test_the_keyboard_zooms_moves_and_selects_spans(page):
    whole = view(page)
    page.locator(".timeline").focus()
    settle(page)
    page.keyboard.press("+")
    page.keyboard.press("+")
    zoomed = view(page)
    page.keyboard.press("ArrowRight")
    assert view(page)[0] > zoomed[0]
    page.keyboard.press("-")
    page.keyboard.press("0")
    assert view(page) == whole

    lane = sorted(
        (n for n, span in enumerate(TIMELINE.spans) if span.lane == 0),
        key=lambda n: TIMELINE.spans[n].start,
    )
    for index in lane[:3]:  # the first span, then its neighbors
        page.keyboard.press("Shift+ArrowRight")
        rows = tip_rows(page)
        assert {name: rows[name] for name in told_of(index)} == told_of(index)
    page.keyboard.press("Shift+ArrowDown")
    assert tip_rows(page)["lane"] == TIMELINE.lanes[1]
    page.keyboard.press("Shift+ArrowUp")
    assert tip_rows(page)["lane"] == TIMELINE.lanes[0]
    assert page.locator(".span.here").count() == 1


def test_the_span_table_formats_numbers_like_python(page):
    page.locator(".span-table summary").click()
    settle(page)
    cells = "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
    rows = page.locator(".span-table tbody tr").evaluate_all(cells)
    assert [row[:6] for row in rows] == [
        [
            span.label,
            span.kind,
            TIMELINE.lanes[span.lane],
            seconds(span.start - BEGIN),
            seconds(span.end - span.start),
            "yes" if span.exposed else "no",
        ]
        for span in TIMELINE.spans
    ]


def test_json_shows_the_block(page):
    details = page.locator("details.json")
    assert details.count() == len(BLOCKS)
    data = json.loads(page.locator("#paralab-data").text_content())
    blocks = [block for section in data["sections"] for block in section["blocks"]]
    for number in range(len(BLOCKS)):
        details.nth(number).locator("summary").click()
        settle(page)
        assert json.loads(details.nth(number).locator("pre").text_content()) == blocks[number]
    details.first.locator(".copy").click()
    until(page, "document.querySelector('.copy').textContent === 'Copied'")


@pytest.mark.parametrize("title", [block.title for block in BLOCKS if isinstance(block, Lines)])
def test_curves_show_the_nearest_values_formatted_like_python(page, title):
    block = next(block for block in BLOCKS if isinstance(block, Lines) and block.title == title)
    svg = page.locator(f"svg.wide:has(title:text-is('{title}'))")
    low, high, start, end = json.loads(svg.get_attribute("data-plot"))["x"]
    svg.scroll_into_view_if_needed()
    settle(page)
    box, (at, _) = svg.bounding_box(), block.lines[0].points[3]
    share = math.log(at / low) / math.log(high / low) if block.log_x else (at - low) / (high - low)
    page.mouse.move(
        box["x"] + (start + share * (end - start) + 1) * box["width"] / WIDE, box["y"] + 150
    )
    assert page.locator("#tip strong").inner_text() == f"{block.x} {measure(at, 'number')}"
    assert tip_rows(page) == {
        line.label: measure(line.points[3][1], block.y_unit) for line in block.lines
    }
    page.mouse.move(5, 5)
    svg.locator("xpath=..").focus()
    page.keyboard.press("ArrowRight")  # continues from the pointer
    assert tip_rows(page) == {
        line.label: measure(line.points[4][1], block.y_unit) for line in block.lines
    }


def test_both_themes_have_enough_contrast(page):
    grounds = {}
    for theme in ("light", "dark"):
        page.locator(f"[data-set-theme={theme}]").click()
        grounds[theme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        for selector in (
            "body",
            ".subtitle",
            "nav a",
            ".note",
            "thead th",
            ".badge",
            "svg .tick",
            "svg .value",
            "svg .unknown",
            "dt",
        ):
            for element in page.locator(selector).all()[:12]:
                assert element.evaluate(CONTRAST) >= 4.5, (theme, selector)
    assert grounds["light"] != grounds["dark"]
    page.locator("[data-set-theme=auto]").click()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == grounds[scheme]


def test_span_labels_have_enough_contrast(page):
    """Check dark text on each kind's color, the same in both themes, using the tooltip's element."""
    for kind in (
        "forward",
        "backward",
        "optimizer",
        "data",
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "scatter",
        "replicate",
        "gather",
        "reduce",
        "wait",
        "other",
    ):
        page.locator("#tip").evaluate(
            f"(tip) => {{ tip.style.cssText = 'color: var(--on-tone); background: var(--{kind})' }}"
        )
        contrast = page.locator("#tip").evaluate(CONTRAST)
        assert contrast >= 4.5, kind


def test_a_phone_needs_no_horizontal_scrolling(browser, address):
    with browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True) as context:
        page = context.new_page()
        page.goto(address)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert not page.locator("nav ol").is_visible()
        page.locator("nav summary").click()
        assert page.locator("nav ol").is_visible()
        sizes = page.evaluate("""() => [...document.querySelectorAll("svg[role=img]")].filter((svg) => svg.clientWidth).map((svg) =>
            12.5 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)""")
        assert len(sizes) == 10
        assert min(sizes) >= 11  # px, the smallest text in any chart
        left = page.evaluate("""() => { const holder = document.querySelector(".table-block .scroll"); holder.scrollLeft = 200;
            return holder.querySelector("tbody th").getBoundingClientRect().left - holder.getBoundingClientRect().left; }""")
        assert left == 0  # the first column stays


def test_without_scripts_everything_is_there(browser, address):
    with browser.new_context(viewport=DESK, java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(address)
        assert all(table.is_visible() for table in page.locator("table").all())
        assert sum(picture.is_visible() for picture in page.locator("svg[role=img]").all()) == 10
        assert all(answer.is_visible() for answer in page.locator(".answer").all())
        assert not any(
            script.is_visible()
            for script in page.locator(".span-table, .json, .tools, .themes").all()
        )


def test_print_is_light_and_has_no_buttons(page):
    page.locator("[data-set-theme=dark]").click()
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not any(button.is_visible() for button in page.locator("button").all())
    assert page.locator("svg[role=img]").first.is_visible()


def test_the_contents_link_to_the_sections(page):
    page.locator("nav a", has_text="The training").click()
    until(page, "document.querySelector('nav [aria-current]')?.textContent === 'The training'")
