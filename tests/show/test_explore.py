"""Figures with sliders: the browser shows the numbers that the Python functions compute."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paralab.analyse.blocks import Control, Document, Explorable, Section
from paralab.analyse.compare import comparison_of_runs
from paralab.analyse.explore import section
from paralab.plan.batches import chunk_sizes
from paralab.plan.memory import DeviceMemory, device_memory
from paralab.plan.overlap import Link, Transfer, fit_link, reduce_buckets
from paralab.plan.scaling import predict_step, sent
from paralab.plan.schedules import SCHEDULES, ideal_bubble, misfit
from paralab.show.chart_explore import HEIGHTS, KINDS, draw_lanes
from paralab.show.explore import control_words, start_of, state_of
from paralab.show.page import render
from paralab.show.palette import LEGEND
from paralab.show.svg import WIDE
from paralab.units import measure

RUNS = Path(__file__).parent.parent / "runs"
PASSES = [
    *(
        [stage, n, "forward", 0.001 * (n + stage), 0.001 * (n + stage + 0.8)]
        for stage in (0, 1)
        for n in range(4)
    ),
    *(
        [stage, n, "backward", 0.01 + 0.002 * n - 0.001 * stage, 0.0115 + 0.002 * n - 0.001 * stage]
        for stage in (0, 1)
        for n in range(4)
    ),
]
BLOCKS = {
    "schedule": Explorable(
        "Pipeline schedule",
        "schedule",
        (
            Control("stages", "Stages", 2, 2, 8),
            Control("micro_batches", "Micro-batches", 4, 1, 16),
            Control("schedule", "Schedule", "gpipe", choices=SCHEDULES),
        ),
        {"forward_seconds": 0.0064, "backward_seconds": 0.012, "measured": PASSES},
        "f",
    ),
    "overlap": Explorable(
        "Buckets",
        "overlap",
        (Control("bucket", "Bucket size", 16, 1, 64), Control("latency", "Latency", 20, 0, 95), Control("speed", "Speed", 0, -4, 4)),
        {"backward_seconds": 0.0251, "gradient_bytes": 25_600_123, "transfer_bytes": 6_400_031, "transfer_seconds": 0.0071, "parts": 64, "exposed_seconds": 0.0043},
        "f",
    ),
    "memory": Explorable(
        "Memory",
        "memory",
        (Control("devices", "Devices", 2, 1, 16), Control("batch", "Batch size", 64, 1, 256), Control("precision", "Precision", "fp32", choices=("fp32", "bf16"))),
        {"parameters": 1_000_003, "gradients": 1_000_003, "optimizer": 2_000_006, "activations_per_sample": 70_001.5, "measured_batch": 64, "measured": [("single", 1, "fp32", 8_500_000), ("ddp", 2, "fp32", 6_300_000), ("ddp", 2, "bf16", 5_200_000)]},
        "f",
    ),
    "split": Explorable(
        "Split",
        "split",
        (Control("batch", "Batch size", 64, 1, 128), Control("devices", "Devices", 3, 1, 8), Control("accumulate", "Accumulation steps", 2, 1, 8)),
        {},
        "f",
    ),
    "what_if": Explorable(
        "What if",
        "what_if",
        (Control("devices", "Devices", 8, 1, 64),),
        {"compute_seconds": 0.0853, "optimizer_seconds": 0.0041, "other_seconds": 0.0007, "communication_seconds": 0.0122, "measured_devices": 2, "overlap": 0.31, "strategy": "ddp", "measured_seconds": {"1": 0.0911, "2": 0.0523}},
        "f",
    ),
}  # fmt: skip


def start(figure: str) -> dict[str, Any]:
    return {control.name: control.value for control in BLOCKS[figure].controls}


def numbers(figure: str, **values: Any) -> dict[str, Any]:
    outputs = state_of(BLOCKS[figure], start(figure) | values).outputs
    return {output.name: output.value for output in outputs}


def test_buckets_start_when_they_are_ready_and_the_link_is_free():
    """backward  0 ······ 8
    bucket 0         4 ····· 7     4 bytes at 2 bytes per second, after 1 second of latency
    bucket 1                 8 ····· 11"""
    found = reduce_buckets(8, 8, 4, Link(1, 2))
    assert found == [Transfer(4, 4, 4, 7), Transfer(4, 8, 8, 11)]
    assert [each.end for each in reduce_buckets(8, 8, 8, Link(1, 2))] == [13]
    assert [each.bytes for each in reduce_buckets(8, 8, 3, Link(1, 2))] == [3, 3, 2]


def test_two_sizes_determine_latency_and_bandwidth_and_one_does_not():
    assert fit_link([1, 2, 3], [3, 4, 5]) == Link(2.0, 1.0)
    assert fit_link([4, 4], [1, 3])[:2] == (0.0, 2.0)
    assert fit_link([4, 4], [1, 3]).assumed
    assert fit_link([1, 2], [4, 1]).assumed  # a larger bucket was faster: noise


def test_memory_by_strategy():
    whole = DeviceMemory(100, 100, 200, 10)
    totals = {
        s: sum(device_memory(s, 2, 7, whole)) for s in ("single", "dp", "ddp", "fsdp", "pipeline")
    }
    assert totals == {"single": 470, "dp": 440, "ddp": 440, "fsdp": 240, "pipeline": 235}
    assert sum(device_memory("ddp", 2, 7, whole, "bf16")) == 420


def test_a_prediction_follows_its_formula():
    assert sent("ddp", 8) / sent("ddp", 2) == 1.75
    assert sent("dp", 8) / sent("dp", 2) == 7
    assert predict_step(8, 8.0, 1.0, 0.5, 2.0, 2, 0.0, "dp") == (1.0, 1.0, 0.5, 14.0)
    assert predict_step(8, 8.0, 1.0, 0.5, 2.0, 2, 0.5) == (1.0, 1.0, 0.5, 1.75)
    assert predict_step(1, 8.0, 1.0, 0.5, 2.0, 2, 0.5) == (8.0, 1.0, 0.5, 0.0)


def test_states_use_the_plan_s_functions():
    for name, stages, micro in itertools.product(SCHEDULES, (2, 3, 8), (1, 4, 16)):
        found = numbers("schedule", stages=stages, micro_batches=micro, schedule=name)
        unfit = misfit(name, stages, micro)
        assert found["bubble"] == ("" if unfit else ideal_bubble(stages, micro, name))
    assert numbers("split", batch=64, devices=3)["split"] == "22/22/20"
    assert numbers("split", batch=4, devices=3)["idle"] == chunk_sizes(4, 3).count(0) == 1
    lanes = state_of(BLOCKS["schedule"], start("schedule")).lanes
    assert [lane.label for lane in lanes] == ["ideal 0", "ideal 1", "measured 0", "measured 1"]
    shaded = {lane.label: lane.boxes[-1] for lane in lanes if lane.boxes[-1].kind == "difference"}
    assert set(shaded) == {"ideal 0", "ideal 1"}
    found = numbers("schedule")
    assert shaded["ideal 0"].end - shaded["ideal 0"].start == pytest.approx(found["difference"])


def test_every_box_has_a_color_and_a_legend():
    for figure, block in BLOCKS.items():
        kinds = {box.kind for lane in start_of(block).lanes for box in lane.boxes}
        assert kinds <= set(KINDS[figure]) <= set(LEGEND)


def test_figures_start_at_what_was_measured_and_others_are_left_out():
    folders = [RUNS / name for name in ("single", "ddp", "pipeline")]
    comparison = comparison_of_runs(folders)
    found = section(comparison)
    figures = {block.figure: block for block in found.blocks}
    single, ddp, pipeline = comparison.rows
    assert "schedule" in figures
    values = {c.name: c.value for c in figures["schedule"].controls}
    assert values["micro_batches"] == pipeline.batch.micro_batches
    memory = figures["memory"].constants
    assert memory["parameters"] == single.peak_bytes[0].parameters
    whole = DeviceMemory(
        memory["parameters"],
        memory["gradients"],
        memory["optimizer"],
        memory["activations_per_sample"],
    )
    assert sum(device_memory("single", 1, single.batch.size, whole)) == pytest.approx(
        single.peak_bytes[0].bytes
    )
    assert memory["measured"] == [
        (row.strategy, row.devices, "fp32", max(each.bytes for each in row.peak_bytes))
        for row in (single, pipeline)  # ddp accumulates
    ]
    shown = [o for o in start_of(figures["memory"]).outputs if "measured" in o.text]
    assert [output.name for output in shown] == ["single", "pipeline"]
    overlap = figures["overlap"].constants
    assert overlap["exposed_seconds"] == ddp.metrics.exposed_communication_seconds
    assert overlap["gradient_bytes"] == sum(bucket.bytes for bucket in ddp.metrics.buckets)
    assert overlap["backward_seconds"] == ddp.metrics.backward_seconds

    without = section(comparison_of_runs([RUNS / "dp"]))
    left_out = {"schedule", "what_if"} - {block.figure for block in without.blocks}
    assert left_out == {"schedule", "what_if"}
    assert "no pipeline ran" in without.text


def test_figures_of_a_practical_without_single_or_without_ddp():
    """Practical 5 trains dp, practical 7 no single device, and practical 10 only pipelines."""

    def figures_of(*names: str) -> dict[str, Explorable]:
        found = section(comparison_of_runs([RUNS / name for name in names]))
        return {block.figure: block for block in found.blocks}

    single, dp = (comparison_of_runs([RUNS / name]).rows[0] for name in ("single", "dp"))
    five = figures_of("single", "dp")["what_if"].constants
    assert five["strategy"] == "dp"
    assert five["communication_seconds"] == dp.metrics.communication_seconds
    assert set(five["measured_seconds"]) == {"1", str(dp.devices)}

    ddp = comparison_of_runs([RUNS / "straggler"]).rows[0]
    seven = figures_of("straggler")["what_if"].constants
    assert seven["compute_seconds"] == ddp.devices * ddp.metrics.compute_seconds
    assert set(seven["measured_seconds"]) == {str(ddp.devices)}

    pipeline = comparison_of_runs([RUNS / "pipeline"]).rows[0]
    ten = figures_of("pipeline")["memory"].constants
    assert ten["parameters"] == sum(memory.parameters for memory in pipeline.peak_bytes)
    assert ten["parameters"] == single.peak_bytes[0].parameters


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(render(Document("t", "", (), (Section("s", tuple(BLOCKS.values())),))))
    return path.as_uri()


def grid(figure: str, count: int = 25) -> list[dict[str, Any]]:
    """Return the corners of all sliders, and random values between them."""
    controls = BLOCKS[figure].controls
    ends = [control.choices or (control.low, control.high) for control in controls]
    chosen = random.Random(figure)
    between = [
        [chosen.choice(c.choices or range(c.low, c.high + 1)) for c in controls]
        for _ in range(count)
    ]
    names = [control.name for control in controls]
    return [dict(zip(names, each, strict=True)) for each in [*itertools.product(*ends), *between]]


SET = """(holder, values) => { for (const [name, value] of Object.entries(values)) {
    const input = holder.querySelector(`[data-name=${name}]`);
    input.value = value;
    input.dispatchEvent(new Event("input", { bubbles: true }));
} }"""
READ = """(holder) => [...holder.querySelectorAll("[data-output]")].map((one) =>
    [one.dataset.output, JSON.parse(one.dataset.value), one.value])"""
DRAWN = """(svg) => [...svg.querySelectorAll(".lanes :is(rect, text, line)")].map((one) => [one.tagName,
    one.textContent, one.getAttribute("class"), ...["x", "y", "x1", "width", "height"].map((name) => Number(one.getAttribute(name)))])"""


BOXES = """(svg) => [...svg.querySelectorAll(".lanes rect")].map((rect) =>
    ["x", "y", "width"].map((name) => Number(rect.getAttribute(name))))"""


@pytest.fixture(scope="module")
def page(browser: Any, address: str) -> Any:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.goto(address)
    yield opened
    context.close()


@pytest.mark.parametrize("figure", BLOCKS)
def test_the_browser_computes_what_python_computes(page, figure):
    holder = page.locator(f"[data-figure={figure}]")
    for values in grid(figure):
        holder.evaluate(SET, values)
        state = state_of(BLOCKS[figure], values)
        expected = {output.name: output for output in state.outputs}
        for name, value, text in holder.evaluate(READ):
            known = expected[name].value
            assert value == (known if isinstance(known, str) else pytest.approx(known)), (
                name,
                values,
            )
            assert text == expected[name].text, (name, values)
        assert holder.locator(".problem").inner_text() == state.problem
        # The order of the passes is only in the picture.
        drawn = ElementTree.fromstring(draw_lanes(state, WIDE, HEIGHTS[figure]))
        places = [
            [float(rect.get(name, 0)) for name in ("x", "y", "width")]
            for rect in drawn.iter("rect")
        ]
        boxes = holder.locator("svg.wide[role=img]").evaluate(BOXES)
        assert len(boxes) == len(places)
        for box, place in zip(boxes, places, strict=True):
            assert box == pytest.approx(place, abs=0.06), values


@pytest.mark.parametrize("figure", BLOCKS)
def test_the_browser_draws_what_python_draws(page, figure):
    """The picture without scripts is the picture after going back to this run."""
    page.reload()
    holder = page.locator(f"[data-figure={figure}]")
    for width in ("wide", "narrow"):
        svg = holder.locator(f"svg.{width}[role=img]")
        before = svg.evaluate(DRAWN)
        holder.evaluate(SET, grid(figure)[-1])
        assert svg.evaluate(DRAWN) != before
        holder.locator("[data-reset]").click()
        after = svg.evaluate(DRAWN)
        assert [each[:3] for each in after] == [each[:3] for each in before]
        for mine, theirs in zip(after, before, strict=True):
            assert mine[3:] == pytest.approx(theirs[3:], abs=0.06), mine


def test_the_keyboard_moves_every_slider(page):
    page.reload()
    for figure, block in BLOCKS.items():
        values = start(figure)
        for control in block.controls:
            slider = page.get_by_label(control.label).and_(
                page.locator(f"[data-figure={figure}] [data-name={control.name}]")
            )
            slider.focus()
            page.keyboard.press("ArrowDown" if control.choices else "ArrowRight")
            if control.choices:
                values[control.name] = control.choices[control.choices.index(control.value) + 1]
            else:
                values[control.name] += 1
                shown = page.locator(f"[data-figure={figure}] [data-control={control.name}]")
                words = control_words(block, control.name, values[control.name])
                assert shown.inner_text() == words
                assert slider.get_attribute("aria-valuetext") == words
        texts = [text for *_, text in page.locator(f"[data-figure={figure}]").evaluate(READ)]
        assert texts == [output.text for output in state_of(block, values).outputs]


@pytest.mark.parametrize("width", [1280, 390])
def test_sliders_do_not_move_the_page_and_fit_a_phone(browser, address, width):
    with browser.new_context(viewport={"width": width, "height": 900}) as context:
        page = context.new_page()
        page.goto(address)
        for figure in BLOCKS:
            holder = page.locator(f"[data-figure={figure}]")
            heights = set()
            for values in grid(figure, 4):
                holder.evaluate(SET, values)
                heights.add(round(holder.bounding_box()["height"]))
            assert len(heights) == 1, (figure, heights)
            assert all(
                one.bounding_box()["height"] >= 24 for one in holder.locator("input, select").all()
            )
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_without_scripts_the_measured_state_is_shown(browser, address):
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(address)
        assert not any(
            one.is_visible() for one in page.locator("input, select, [data-reset]").all()
        )
        for figure, block in BLOCKS.items():
            holder = page.locator(f"[data-figure={figure}]")
            assert holder.locator("svg.wide[role=img]").is_visible()
            shown = holder.locator("[data-output]").all_inner_texts()
            assert shown == [output.text for output in start_of(block).outputs]
            words = holder.locator(".controls label").all_inner_texts()
            assert all(
                (c.value if c.choices else control_words(block, c.name, c.value)) in text
                for c, text in zip(block.controls, words, strict=True)
            )


@pytest.mark.parametrize("unit", ["seconds", "bytes", "share", "number", "×", "cores"])
def test_numbers_are_formatted_like_python_even_ties(page, unit):
    """31.25% was once 31.3% in the browser and 31.2% in Python."""
    values = [
        0,
        1,
        1.25e-4,
        0.3125,
        0.3125e-3,
        0.0996,
        0.9995,
        1.5,
        2.5,
        100.5,
        99.95,
        1280,
        1792.0,
    ]
    values += [12345.5, 1e6 + 0.5, 26214400, 123456789.0, 1e12]
    chosen = random.Random(unit)
    values += [chosen.choice((1, 1e-3, 1e6)) * chosen.randrange(1, 4000) / 32 for _ in range(300)]
    shown = page.evaluate(
        "([values, unit]) => values.map((value) => window.paralab.measure(value, unit))",
        [values, unit],
    )
    wrong = [
        (value, text, measure(value, unit))
        for value, text in zip(values, shown, strict=True)
        if text != measure(value, unit)
    ]
    assert not wrong


def test_the_page_stays_small():
    blocks = tuple(BLOCKS.values())
    assert len(render(Document("t", "", (), (Section("s", blocks),))).encode()) < 250_000
    assert "explore.py" not in render(Document("t", "", (), ()))  # the script only where it is used
    json.dumps(Document("t", "", (), (Section("s", blocks),)).to_dict())
