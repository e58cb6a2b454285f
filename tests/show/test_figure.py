"""Figures for other people's reports: complete SVG files in the colors of the page."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from paralab.analyse.blocks import Bar, Bars, Document, Section
from paralab.cli.main import main
from paralab.errors import ParalabError, UsageError
from paralab.show import figure
from paralab.show.figure import as_png, as_svg, find_figure, name_figures
from paralab.show.open_folder import document_of
from paralab.show.page import render
from paralab.show.svg_style import SVG
from tests.show.sample_document import NASTY, sample

RUNS = Path(__file__).parent.parent / "runs"
# The look of each shape, without the outlines that only the file draws as separate texts.
LOOKS = """(shapes) => shapes.map((shape) => {
    const look = getComputedStyle(shape), is_text = shape.tagName === "text";
    const color = (words, opacity) => {  // rgb(…), rgba(…), or color(srgb …) as four numbers
        if (!/^(rgb|color)/.test(words)) return words;
        const numbers = words.match(/[\\d.]+/g).map(Number);
        const [red, green, blue] = numbers.slice(0, 3).map((one) => Math.round(words.startsWith("color") ? 255 * one : one));
        return [red, green, blue, (numbers[3] ?? 1) * opacity];
    };
    return [shape.tagName, is_text ? shape.textContent : "", color(look.fill, look.fillOpacity),
            is_text ? "" : color(look.stroke, look.strokeOpacity), look.fontWeight, look.fontSize,
            look.opacity, look.strokeDasharray];
})"""
SHAPES = "g :is(rect, path, line, text:not([stroke]))"


def test_names_tell_charts_apart():
    assert list(name_figures(document_of(RUNS / "ddp"))) == [
        *("step-times", "shares", "timeline", "split", "loss")
    ]
    assert "schedule" in name_figures(document_of(RUNS / "pipeline"))
    names = list(name_figures(sample()))
    assert len(names) == len(set(names)) == 10


@pytest.mark.parametrize("run", ["ddp", "pipeline", "hybrid", "dp", "killed"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_file_needs_no_style_sheet_and_nothing_from_elsewhere(run, theme):
    for block in name_figures(document_of(RUNS / run)).values():
        text = as_svg(block, theme)
        root = ElementTree.fromstring(text)
        assert root.find(f"{SVG}title").text == block.title
        assert not re.search(r"var\(|light-dark|color-mix|class=|style=|<style|href", text)
        ids = {element.get("id") for element in root.iter()}
        assert set(re.findall(r"url\(#([\w-]+)\)", text)) <= ids
        ground = root.find(f"{SVG}rect").get("fill")
        assert ground == {"light": "#ffffff", "dark": "#14171c"}[theme]
        for element in root.iter(f"{SVG}text"):
            assert element.get("fill"), element.text


def test_a_hostile_title_stays_text():
    text = as_svg(Bars(NASTY + "\x1b\u202e", (Bar(NASTY, 1.0),), "×"))
    root = ElementTree.fromstring(text)
    assert NASTY in (root.find(f"{SVG}title").text or "")
    assert "<b>" not in text
    assert not re.search("[\x1b\u202e]", text)


def test_the_title_of_a_figure_names_the_configuration():
    """Its page does, but a figure leaves its page."""
    document = document_of(RUNS / "ddp")
    title = find_figure(document, "timeline").title
    assert title.startswith("ddp ×2")
    assert title.startswith(f"{document.configuration}: ")
    assert find_figure(document_of(RUNS / "low_precision"), "loss").title == "Loss"


def test_an_unknown_or_ambiguous_name_lists_the_figures():
    document = document_of(RUNS / "ddp")
    with pytest.raises(UsageError) as error:
        find_figure(document, "schedule")
    assert all(name in str(error.value) for name in name_figures(document))
    [block] = document.sections[2].blocks
    pair = tuple(replace(block, title=f"ddp ×2: {word} steps") for word in ("first", "last"))
    twice = Document("t", "", (), (Section("s", pair),))
    with pytest.raises(UsageError):
        find_figure(document, "time")
    first, second = name_figures(twice)
    assert (first, second) == ("timeline-ddp-x2", f"{first}-2")
    with pytest.raises(UsageError) as error:
        find_figure(twice, "timeline")
    assert second in str(error.value)


def show(*arguments):
    return CliRunner().invoke(main, ["show", str(RUNS / "ddp"), *map(str, arguments)])


def test_the_command_writes_and_replaces_the_file(tmp_path):
    path = tmp_path / "out.svg"
    path.write_text("an older figure")
    done = show("--figure", "timeline", "--svg", path, "--json")
    assert done.exit_code == 0
    assert path.read_text() == as_svg(find_figure(document_of(RUNS / "ddp"), "timeline"))
    assert show("--figure", "timeline", "--svg", path, "--theme", "dark").exit_code == 0
    assert "#14171c" in path.read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--figure", "timeline"),
        ("--svg", "out.svg"),
        ("--figure", "schedule", "--svg", "out.svg"),
        ("--figure", "timeline", "--svg", "no/such/folder/out.svg"),
        ("--figure", "timeline", "--svg", "out.svg", "--theme", "blue"),
    ],
)
def test_mistakes_are_usage_errors(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = show(*arguments)
    assert done.exit_code == 2, done.output
    assert not list(tmp_path.iterdir())


def test_without_chromium_a_png_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(figure, "CHROMIUM", ("no-such-browser",))
    with pytest.raises(ParalabError, match="Chromium"):
        as_png("<svg/>")


@pytest.mark.processes
def test_a_png_is_the_drawing_at_twice_its_size(browser):
    drawing = as_svg(find_figure(document_of(RUNS / "ddp"), "loss"))
    size = re.search(r'width="(\d+)" height="(\d+)"', drawing)
    png = as_png(drawing)
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert [int.from_bytes(png[16 + 4 * n : 20 + 4 * n]) for n in (0, 1)] == [
        2 * int(size[1 + n]) for n in (0, 1)
    ]


@pytest.mark.processes
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colors_are_those_of_the_page(browser, tmp_path, theme):
    """The file's attributes come from our reading of the style sheet; Chromium reads it properly."""
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        for name, block in name_figures(sample()).items():
            html = render(Document("t", "", (), (Section("s", (block,)),)))
            html = html.replace('data-theme="auto"', f'data-theme="{theme}"')
            (tmp_path / "page.html").write_text(html)
            (tmp_path / "figure.svg").write_text(as_svg(block, theme))
            page.goto((tmp_path / "page.html").as_uri())
            shapes = f"svg.wide {SHAPES}, svg.wide > :is(rect, path, line, text)"
            of_page = page.locator(shapes).evaluate_all(LOOKS)
            page.goto((tmp_path / "figure.svg").as_uri())
            of_file = page.locator(
                "svg > g:last-child :is(rect, path, line, text:not([stroke]))"
            ).evaluate_all(LOOKS)
            assert of_file == of_page, name
