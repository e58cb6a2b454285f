"""What charts draw, in numbers: lengths, places, and words."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

import pytest

from paralab.analyse import figures
from paralab.analyse.blocks import (
    Bar,
    Bars,
    Distribution,
    Document,
    Finding,
    Group,
    Line,
    Lines,
    Section,
    ShareRow,
    Shares,
)
from paralab.analyse.metrics import pass_bubbles, pipelines_of
from paralab.analyse.recording import Recording
from paralab.record.events import Load
from paralab.show.chart_bars import draw_bars, draw_distribution
from paralab.show.chart_lines import draw_lines
from paralab.show.chart_shares import as_table, draw_shares
from paralab.show.document import print_document
from paralab.show.markdown import as_markdown
from paralab.show.open_folder import document_of
from paralab.show.page import finding_color
from paralab.show.palette import LEGEND
from paralab.show.svg import NARROW, WIDE, width_of
from paralab.units import measure, plural, whole_percents
from tests.show.test_page import Tree, page_of

RUNS = Path(__file__).parent.parent / "runs"
LONG = "ddp ×2 · accumulate 4 · bf16"
SPEED = Bars(
    "Speed-up",
    (Bar("single", 1.0, text="1.00×, baseline"), Bar(LONG, 1.8, 1.7, 1.9, "1.80×, faster")),
    "×",
    reference=1.0,
)


def rects(drawn: str, class_: str) -> list[dict[str, float]]:
    found = ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}rect")
    return [
        {name: float(each.get(name, 0)) for name in ("x", "y", "width", "height")}
        for each in found
        if class_ in (each.get("class") or "").split()
    ]


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_bars_use_the_width_of_a_phone(width):
    """The longest bar was once 50 px wide on a phone, because its text was beside it."""
    single, long = rects(draw_bars(SPEED, "c", width), "bar")
    assert long["width"] == pytest.approx(1.8 * single["width"], rel=0.01)
    assert long["width"] > (0.8 if width == NARROW else 0.35) * width


def test_a_bar_s_text_stays_inside_the_picture_and_above_the_bar_on_a_phone():
    root = ElementTree.fromstring(draw_bars(SPEED, "c", NARROW))
    values = [each for each in root.iter() if each.get("class") == "value"]
    assert [each.text for each in values] == ["1.00×, baseline", "1.80×, faster"]
    for value, bar in zip(values, rects(draw_bars(SPEED, "c", NARROW), "bar"), strict=True):
        assert (value.get("text-anchor"), float(value.get("x") or 0)) == ("end", NARROW - 2)
        assert float(value.get("y") or 0) < bar["y"]


def test_labels_that_differ_at_the_end_differ_on_a_phone():
    """Two configurations were once both `ddp ×2 · accumulat…`, because `0.74×, too few rounds`
    took the room."""
    names = ("ddp ×2 · accumulate 4", LONG)
    bars = (Bar(name, 0.74, text="0.74×, too few rounds") for name in names)
    root = ElementTree.fromstring(draw_bars(Bars("Speed-up", tuple(bars), "×"), "c", NARROW))
    assert [each.text for each in root.iter() if each.get("class") == "label"] == [*names]
    assert [each.text for each in root.iter() if each.get("class") == "value"] == ["0.74×"] * 2


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_tick_labels_stay_inside_the_picture(width):
    """On a phone, the first label was once cut off: .25 instead of 1.25."""
    times = Distribution("t", (Group("a", (0.00125, 0.0015, 0.00225)),), "seconds")
    for drawn in (draw_distribution(times, "c", width), draw_bars(SPEED, "c", width)):
        ticks = [e for e in ElementTree.fromstring(drawn).iter() if e.get("class") == "tick"]
        for tick in (tick for tick in ticks if tick.get("text-anchor") == "middle"):
            half = width_of(tick.text or "") / 2
            assert half - 0.1 <= float(tick.get("x") or 0) <= width - half + 0.1, tick.text


def test_stacked_shares_fill_their_row_without_gaps():
    shares = Shares("s", ("forward", "exposed", "skew"), (ShareRow("a", (0.5, 0.2, 0.3)),))
    first, second, third = rects(draw_shares(shares, "c", WIDE), "span")
    assert second["x"] == pytest.approx(first["x"] + first["width"], abs=0.11)
    assert third["x"] == pytest.approx(second["x"] + second["width"], abs=0.11)
    widths = [each["width"] for each in (first, second, third)]
    assert [width / sum(widths) for width in widths] == pytest.approx([0.5, 0.2, 0.3], abs=0.01)
    assert [cell.text for cell in as_table(shares).rows[0]] == ["a", "50%", "20%", "30%"]


@pytest.mark.parametrize("shares", [(1 / 3,) * 3, (0.304, 0.584, 0.004, 0.024, 0.064, 0.02), (1,)])
def test_the_percentages_of_a_step_add_up_to_100(shares):
    """The note says so, but 30 + 58 + 0 + 2 + 6 + 2 is 98."""
    percents = whole_percents(shares)
    assert sum(percents) == 100
    assert (
        max(abs(percent - 100 * share) for percent, share in zip(percents, shares, strict=True)) < 1
    )


@pytest.mark.parametrize(
    ("kind", "evidence", "color"),
    [
        ("same", {"equal": 8, "of": 8}, "same"),
        ("same", {"equal": 7, "of": 8}, "warning"),
        ("same", {"equal": 6, "as_simulated": 2, "of": 8}, "other"),  # lossy on purpose
        ("same", {"equal": 6, "as_simulated": 1, "of": 8}, "warning"),
        ("same", {}, "other"),  # not verified
        ("limit", {}, "limit"),
    ],
)
def test_only_verified_training_is_green(kind, evidence, color):
    """`No configuration was verified` was once green."""
    assert finding_color(Finding(kind, "", evidence)) == color


@pytest.mark.parametrize(
    ("values", "lowest"), [((0.3, 1.0, 0.5), 0), ((5.5, 3.6), 3.5), ((-1.0, 3.0), -1)]
)
def test_an_axis_starts_at_zero_if_zero_is_near(values, lowest):
    """A load of 0.3 cores was once at the bottom of its chart."""
    line = Line("a", tuple(enumerate(map(float, values))))
    drawn = ElementTree.fromstring(
        draw_lines(Lines("l", (line,), "seconds", "cores in use", "number"), "c", WIDE)
    )
    assert json.loads(drawn.get("data-plot") or "")["y"][0] == lowest


@pytest.mark.parametrize(
    ("steps", "ticks"),
    [((0,), ["0"]), ((0, 1), ["0", "1"]), ((1, 2, 4), ["1", "2", "3", "4"])],
)
def test_counts_have_whole_ticks(steps, ticks):
    """The axis of two steps once went from 0 to 1 by 0.2, and that of one step from -1 to 1."""
    line = Line("a", tuple((float(step), 2.0) for step in steps))
    drawn = draw_lines(Lines("l", (line,), "optimizer step", "loss", "number"), "c", WIDE)
    texts = [e for e in ElementTree.fromstring(drawn).iter() if e.get("class") == "tick"]
    assert [e.text for e in texts if e.get("text-anchor") == "middle"] == ticks


def test_a_load_starts_at_zero():
    """The chart of 0.78 to 0.89 cores once looked like one of 0 to 1."""
    line = Line("a", ((0.0, 0.78), (1.0, 0.89)))
    drawn = draw_lines(Lines("l", (line,), "seconds", "in use", "cores"), "c", WIDE)
    assert json.loads(ElementTree.fromstring(drawn).get("data-plot") or "")["y"][0] == 0


def test_a_single_sample_of_the_load_is_not_a_chart():
    """The chart once had a dot in the middle, and a time axis that began at -1 s."""
    whole = Recording.read(RUNS / "hybrid")
    samples = {rank: whole.of(Load, rank)[:1] for rank in range(whole.world_size)}
    assert all(samples.values())
    recording = replace(whole, events=samples)
    assert figures.load_lines([recording]) is None
    assert figures.load_lines([recording, recording])


def test_the_reference_line_is_beside_the_bars_of_a_phone_and_not_in_their_text():
    drawn = ElementTree.fromstring(draw_bars(SPEED, "c", NARROW))
    lines = [each for each in drawn.iter() if each.get("class") == "reference"]
    texts = [float(e.get("y") or 0) for e in drawn.iter() if e.get("class") in ("label", "value")]
    assert len(lines) == len(SPEED.bars)
    for line in lines:
        top, bottom = (float(line.get(name) or 0) for name in ("y1", "y2"))
        assert not any(top < y - 3 < bottom for y in texts)


def test_every_kind_of_share_has_a_color():
    document = document_of(RUNS / "ddp")
    [shares] = [b for s in document.sections for b in s.blocks if isinstance(b, Shares)]
    assert set(shares.kinds) <= set(LEGEND)
    for row in shares.rows:
        assert sum(row.shares) == pytest.approx(1)
    percents = [cell.text for cell in as_table(shares).rows[0][1:]]
    assert sum(int(text.rstrip("%")) for text in percents) == pytest.approx(100, abs=3)
    assert percents[0] in as_markdown(document)


def test_terminal_bars_start_at_a_line_and_show_the_reference(capsys):
    print_document(Document("t", "", (), (Section("s", (SPEED,)),)))
    single, long = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert single.index("│") == long.index("│")
    assert long.count("█") == round(1.8 * single.count("█"))
    half = Bars("b", (Bar("half", 0.5, text="0.5"),), "×", reference=1.0)
    print_document(Document("t", "", (), (Section("s", (half,)),)))
    [line] = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert line.index("┊") - line.index("│") == 2 * line.count("█")


def test_answers_are_neutral():
    """A red No and a green Yes once looked like wrong and right."""
    from tests.show.sample_document import answers

    tree = Tree(page_of(*answers()))
    classes = [e["class"] for e in tree.all("span") if (e.get("class") or "").startswith("badge")]
    assert classes == ["badge answer-word"] * 2  # the same for Yes and No


def test_a_schedule_says_which_step_it_shows_and_that_step_is_typical():
    """The chart once showed the last step's bubble (37.5%), and the table the median (34%)."""
    recording = Recording.read(RUNS / "pipeline")
    document = document_of(RUNS / "pipeline")
    section = next(each for each in document.sections if each.title == "Pipeline schedules")
    [chart] = section.blocks
    bubbles = {
        step: pass_bubbles(pipelines_of(recording, step)[0], 2)[0] for step in recording.detailed
    }
    middle = median(bubbles.values())
    assert chart.measured_bubble == bubbles[chart.step]
    assert abs(chart.measured_bubble - middle) == min(abs(b - middle) for b in bubbles.values())
    assert f"in step {chart.step}" in page_of(chart)
    assert measure(middle, "share") in chart.note


@pytest.mark.parametrize("name", ["single", "ddp", "dp", "pipeline", "hybrid"])
def test_a_run_page_does_not_talk_about_comparisons(name):
    tree = Tree(page_of(*(b for s in document_of(RUNS / name).sections for b in s.blocks)))
    words = " ".join(text for tag, text in tree.texts if tag not in ("script", "style"))
    assert not re.search(r"\b(rounds?|baseline|configurations)\b", words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (plural(1, "core"), "1 core"),
        (plural(2, "core"), "2 cores"),
        (plural(1.0, "slot"), "1 slot"),
        (plural(0.5, "slot"), "0.5 slots"),
        (plural(0, "entry"), "0 entries"),
        (plural(3, "micro-batch"), "3 micro-batches"),
        (measure(1, "cores"), "1 core"),
        (measure(1.8, "cores"), "1.8 cores"),
    ],
)
def test_one_is_singular(words, expected):
    assert words == expected
