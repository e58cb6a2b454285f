"""The page as text: complete, small, escaped, deterministic, and honest about unknown numbers."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from paralab.analyse.blocks import (
    Bar,
    Bars,
    Cell,
    Document,
    Line,
    Lines,
    Part,
    Section,
    Span,
    Split,
    Table,
    Timeline,
)
from paralab.analyse.recording import quantiles
from paralab.show.chart_lines import MOST_POINTS, connect, thin
from paralab.show.chart_timeline import rows_of
from paralab.show.open_folder import document_of
from paralab.show.page import plain, prose, render
from paralab.show.svg import WIDE, axis, element, log_axis, round_step
from tests.show.sample_document import NASTY, sample, without_numbers

RUNS = Path(__file__).parent.parent / "runs"

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Tree(HTMLParser):
    """Parses a page; fails if tags are not balanced. Has the attributes and text of each
    element."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []  # (innermost element, text)
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def data_of(page: str) -> object:
    found = re.search(
        r'<script type="application/json" id="paralab-data">(.*?)</script>', page, re.DOTALL
    )
    assert found
    return json.loads(found[1])


def page_of(*blocks: object) -> str:
    return render(Document("t", "", (), (Section("s", blocks),)))  # type: ignore[arg-type]


def test_a_full_page_is_small_balanced_and_deterministic():
    page = render(sample())
    assert page == render(sample())
    assert len(page.encode()) < 300_000
    tree = Tree(page)
    ids = [attributes["id"] for _, attributes in tree.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_nothing_is_fetched():
    page = render(sample()).replace("http://www.w3.org/2000/svg", "")  # a namespace, not an address
    assert "http://" not in page
    assert "https://" not in page
    for _, attributes in Tree(page).elements:
        assert not attributes.get("src")
        assert (attributes.get("href") or "#").startswith(("#", "data:"))
    assert "default-src 'none'" in page


def test_the_data_is_in_the_page_once_and_unchanged():
    page = render(sample())
    assert data_of(page) == plain(sample().to_dict())
    assert page.count('id="paralab-data"') == 1


def test_a_nasty_label_stays_a_label():
    page = render(sample())
    tree = Tree(page)
    assert not tree.all("b")
    assert len(tree.all("script")) == 3
    assert len(re.findall("</script>", page)) == 3
    assert ("th", NASTY) in tree.texts  # unchanged
    everywhere = page_of(
        Bars(NASTY, (Bar(NASTY, 1.0, text=NASTY),), NASTY, note=NASTY),
        Split(NASTY, 4, (Part(NASTY, (4,)),)),
        Lines(NASTY, (Line(NASTY, ((0.0, 1.0),)),), NASTY, NASTY, "number"),
        Timeline(
            NASTY,
            (NASTY,),
            (Span(0, NASTY, NASTY, 0.0, 1.0, details={NASTY: NASTY}),),
            ((0, 0.0, 1.0),),
        ),
    )
    assert not Tree(everywhere).all("b")


def test_headings_do_not_skip_a_level():
    levels = [
        int(tag[1]) for tag, _ in Tree(render(sample())).elements if re.fullmatch("h[1-6]", tag)
    ]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_every_chart_has_a_text_alternative():
    page = render(sample())
    tree = Tree(page)
    pictures = [attributes for attributes in tree.all("svg") if attributes.get("role") == "img"]
    ids = {attributes["id"] for _, attributes in tree.elements if "id" in attributes}
    assert len(pictures) == 9 * 2 + 1  # for desktop and phone, and one timeline
    assert all(
        name in ids for picture in pictures for name in (picture["aria-labelledby"] or "").split()
    )
    assert re.search(r"ddp: 1.80 ?× \(from 1.64× to 1.85×\)", page)
    assert "stage 0 · cpu:0 does F0 F1 F2 F3 B0 B1 B2 B3" in page
    assert "rank 0 · cpu:0 8 + 8 + 6 = 22" in page


def test_unknown_numbers_are_not_measured():
    tree = Tree(render(sample()))
    assert ("text", "not measured") in tree.texts  # the fsdp bar
    assert ("td", "not measured") in tree.texts
    assert any(attributes.get("data-value") == "null" for attributes in tree.all("td"))
    assert "NaN" not in json.dumps(data_of(render(sample())))


def test_words_in_a_column_of_numbers_are_not_unknown():
    """`65% less` was once gray and italic, like `not measured`."""
    cells = (Cell("65% less"), Cell("", 1.5), Cell("–"), Cell("not measured: too short"))
    rows = tuple((Cell("row", "row"), cell) for cell in cells)
    tree = Tree(render(Document("t", "", (), (Section("s", (Table("", ("", "x"), rows),)),))))
    found = [attributes["class"] for attributes in tree.all("td") if attributes.get("class")]
    assert found == ["number", "number", "number unknown", "number unknown"]


def test_a_section_and_its_table_are_two_regions():
    """The page of `scale` once had two regions called Scaling, which axe reported."""
    table = Table("Scaling", ("x",), ((Cell("", 1),),))
    tree = Tree(render(Document("t", "", (), (Section("Scaling", (table,)),))))
    labels = [found["aria-label"] for found in tree.all("div") if found.get("role") == "region"]
    assert labels == ["Scaling: table"]


def test_lines_do_not_break_after_a_hyphen():
    """`equal, loss ±8e-04` and `--micro-batches` once took two lines."""
    assert prose("use `tune --any-batch`, 8e-04") == (
        'use <code>tune <span class="unbroken">--any-batch</span></code>, '
        '<span class="unbroken">8e-04</span>'
    )
    path = "/home/someone/a-very-long-path/that-does-not-fit-on-a-phone"
    assert prose(path) == path


def test_a_single_run_does_not_repeat_its_name():
    """The name of its configuration was once in each title, in each row, and after each note."""
    document = document_of(RUNS / "hybrid")
    name = document.subtitle.partition(" with ")[0]
    blocks = [block for section in document.sections for block in section.blocks]
    titled = [block.title for block in blocks if block.title]
    assert not [title for title in titled if name in title]
    memory = next(block for block in blocks if block.title.startswith("Peak memory"))
    assert memory.columns[0] == "rank"


def test_blocks_without_numbers():
    page = render(without_numbers())
    Tree(page)
    pictures = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(
        r'="[^"]*\b(nan|inf)\b[^"]*"', re.sub(r'(aria-label|data-value)="[^"]*"', "", pictures)
    )
    Tree(render(Document("", "", (), ())))


def test_numbers_are_right_aligned():
    tree = Tree(render(sample()))
    heads = [
        attributes.get("class") for attributes in tree.all("th") if attributes.get("scope") == "col"
    ]
    assert heads[:7] == [None, "number", "number", "number", "number", "number", None]


def test_evidence_has_units_and_the_exact_number():
    page = render(sample())
    assert '<dt>exposed_seconds</dt><dd data-value="0.0064">6.4 ms</dd>' in page
    assert '<dt>exposed_share</dt><dd data-value="0.125">12.5%</dd>' in page
    assert '<dt>all_reduces</dt><dd data-value="[161, 4]">161, 4</dd>' in page


def test_only_backticks_become_markup():
    page = render(replace(sample(), subtitle="run `a<b>` and <i>"))
    assert '<p class="subtitle">run <code>a&lt;b&gt;</code> and &lt;i&gt;</p>' in page


@pytest.mark.parametrize(
    ("values", "unit", "shown"),
    [
        ([0.012, 0.047], "seconds", "0 10 20 30 40 50 ms"),
        ([3.0], "×", "0 1 2 3 ×"),
        ([5 * 1024**2], "bytes", "0 1 2 3 4 5 MiB"),
        ([0.42], "share", "0 10 20 30 40 50%"),
        ([120_000.0], "samples/s", "0 25,000 50,000 75,000 100,000 125,000 samples/s"),
        ([], "number", "0 0.2 0.4 0.6 0.8 1 "),
        ([6.6e-16], "number", "0 2e-16 4e-16 6e-16 8e-16 "),
        ([-1.0, 1.0], "number", "-1 -0.5 0 0.5 1 "),
    ],
)
def test_ticks_are_round(values, unit, shown):
    made = axis(values, unit, (0, 100), from_zero=True)
    assert (
        " ".join(words for _, words in made.ticks) + ("%" if made.unit == "%" else f" {made.unit}")
        == shown
    )
    assert (made(made.ticks[0][0]), made(made.ticks[-1][0])) == (0, pytest.approx(100))


def test_a_logarithmic_axis_gives_equal_factors_equal_space():
    made = log_axis([1, 100], 0, 400)
    assert [made(value) for value in (1, 10, 100)] == pytest.approx([0, 200, 400])
    assert [words for _, words in made.ticks] == ["1", "2", "5", "10", "20", "50", "100"]


def test_round_steps():
    assert [round_step(rough) for rough in (0.13, 0.2, 0.3, 3, 30, 99)] == pytest.approx(
        [0.2, 0.2, 0.5, 5, 50, 100]
    )


def test_elements_escape_attributes():
    assert (
        element("g", class_='"<&', x=1.04, y=-0.01, fill=None)
        == '<g class="&quot;&lt;&amp;" x="1" y="0"/>'
    )


def test_quartiles():
    assert quantiles([5, 3, 4, 1, 2], 4) == [2, 3, 4]
    assert quantiles([7], 4) == [7, 7, 7]


def test_a_diverged_loss_interrupts_its_curve():
    assert connect([(0, 0), (1, math.nan), (2, 2), (3, 3)]) == "M0.0 0.0M2.0 2.0L3.0 3.0"


def test_a_long_curve_is_thinned_but_keeps_its_peaks():
    places = [(float(n), 100.0 if n == 4321 else n % 7) for n in range(10_000)]
    kept = thin(places)
    assert len(kept) <= MOST_POINTS
    assert (4321.0, 100.0) in kept
    assert kept == sorted(kept)


def test_overlapping_spans_get_separate_rows():
    #  lane 0   |forward |backward  |      row 0
    #                        |all-reduce|  row 1
    #  lane 1   |forward |
    spans = [(0, 0, 4), (0, 4, 9), (0, 6, 11), (1, 0, 4)]
    timeline = Timeline(
        "",
        ("a", "b"),
        tuple(Span(lane, "forward", "", start, end) for lane, start, end in spans),
        (),
    )
    assert rows_of(timeline, 0.01) == ([0, 0, 1, 0], [2, 1])


def test_a_split_is_drawn_to_scale():
    page = page_of(Split("s", 64, (Part("rank 0", (8, 8, 6)), Part("rank 1", (42,)))))
    wide = re.search(rf'<svg[^>]*viewBox="0 0 {WIDE} .*?</svg>', page)
    assert wide
    boxes = [
        tuple(map(float, box))
        for box in re.findall(
            r'class="piece[^"]*" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', wide[0]
        )
    ]
    (_, whole), *pieces = boxes
    shares = [(width + 2) / (whole + 2) for _, width in pieces]  # 2 px between pieces
    assert shares == pytest.approx([8 / 64, 8 / 64, 6 / 64, 42 / 64], abs=2e-3)
    assert all(x + width < after for (x, width), (after, _) in pairwise(pieces))
