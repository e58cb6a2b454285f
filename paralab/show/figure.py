"""Export one chart of a page as a standalone SVG or PNG file, for a report or a thesis."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from paralab.analyse import blocks
from paralab.analyse.blocks import Document
from paralab.errors import ParalabError, UsageError, refusing, unknown
from paralab.show import svg
from paralab.show.chart_timeline import draw_timeline, timeline_legend
from paralab.show.page import DRAW
from paralab.show.palette import LEGEND, STRIPES
from paralab.show.svg_style import SVG, color, set_attributes
from paralab.show.visible import visible

Chart = (
    blocks.Bars
    | blocks.Distribution
    | blocks.Lines
    | blocks.Schedule
    | blocks.Shares
    | blocks.Split
    | blocks.Timeline
)
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
MARGIN, TITLE, LEGEND_ROW = 16, 28, 22  # px
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60  # that Chromium may take

ElementTree.register_namespace("", SVG.strip("{}"))


def find_figure(document: Document, name: str) -> Chart:
    """Return the chart with this name. The error lists the names in this document."""
    named = name_figures(document)
    if name in named:
        return named[name]
    if not named:
        raise UsageError(f"There is no figure {name!r}: {document.title} has no charts.")
    several = [each for each in named if each.startswith(f"{name}-")]
    if several:
        raise UsageError(f"There are several figures {name!r}.", fix=", ".join(several))
    raise unknown("figure", name, named)


def name_figures(document: Document) -> dict[str, Chart]:
    """Return all charts by name: `speed-up`, `timeline`. If several configurations have the same
    chart, its name ends with the configuration: `timeline-ddp-x2`."""
    found = [
        (*_name_parts(block), block)
        for section in document.sections
        for block in section.blocks
        if isinstance(block, Chart)
    ]
    kinds = [kind for kind, _, _ in found]
    named: dict[str, Chart] = {}
    for kind, configuration, block in found:
        name = kind if kinds.count(kind) == 1 else f"{kind}-{_slug(configuration)}".rstrip("-")
        alike = sum(1 for each in named if re.fullmatch(rf"{re.escape(name)}(-\d+)?", each))
        named[f"{name}-{alike + 1}" if name in named else name] = block
    return named


def _name_parts(block: Chart) -> tuple[str, str]:
    """Return the kind of chart, and the configuration that its title starts with."""
    first, _, rest = block.title.partition(": ")
    if isinstance(block, blocks.Bars):
        return _slug(first.partition(" over ")[0]), ""
    if isinstance(block, blocks.Lines):
        return (_slug(rest), first) if rest else (_slug(first), "")
    if isinstance(block, blocks.Distribution):
        return _slug(block.title), ""
    return type(block).__name__.lower(), first if rest else ""


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", words.lower().replace("×", "x")).strip("-")


def as_svg(block: Chart, theme: str = "light") -> str:
    """Return a complete SVG file: background, title, legend, and chart. It does not need a style
    sheet."""
    drawn, legend = _draw(block)
    if "<svg" not in drawn:
        raise UsageError(f"The figure {block.title!r} has nothing to draw: it was not measured.")
    chart = ElementTree.fromstring(visible(drawn))
    width, height = map(float, chart.get("viewBox", "").split()[2:])
    for element in chart.iter():  # a percentage would refer to the whole file
        if element.get("width") == "100%":
            element.set("width", svg.number(width))
    entries = list(_legend_entries(visible(legend), width))
    top = MARGIN + TITLE + (LEGEND_ROW * (1 + entries[-1][2]) + 8 if entries else 0)

    size = {"width": width + 2 * MARGIN, "height": top + height + MARGIN}
    root = Element(f"{SVG}svg", {name: svg.number(each) for name, each in size.items()})
    root.set("viewBox", f"0 0 {svg.number(size['width'])} {svg.number(size['height'])}")
    root.set("role", "img")
    root.set("font-family", FONT)
    for name in ("title", "desc"):  # the text alternative
        [found] = chart.findall(f"{SVG}{name}")
        chart.remove(found)
        root.append(found)
    kinds = re.findall(r"url\(#paint-([\w-]+)\)", drawn + legend)
    root.append(_textures(set(kinds)))
    root.append(_element("rect", width="100%", height="100%", fill=color("paper", theme)))
    heading = _element("text", x=MARGIN, y=MARGIN + 12, fill=color("ink", theme))
    heading.attrib |= {"font-size": "16", "font-weight": "600"}
    heading.text = visible(block.title)
    root.append(heading)
    for place, entry, row in entries:
        y = MARGIN + TITLE + LEGEND_ROW * row
        entry.set("transform", f"translate({svg.number(MARGIN + place)} {y})")
        root.append(entry)
    group = _element("g", transform=f"translate({MARGIN} {svg.number(top)})")
    group.extend(list(chart))
    root.append(group)

    set_attributes(root, theme)
    for element in root.iter():
        for name in [name for name in element.attrib if name.startswith(("data-", "aria-"))]:
            del element.attrib[name]
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def _draw(block: Chart) -> tuple[str, str]:
    if isinstance(block, blocks.Timeline):
        return draw_timeline(block, "figure"), timeline_legend(block)
    draw, legend = DRAW[type(block)]
    return draw(block, "figure", svg.WIDE), legend(block)


def _legend_entries(legend: str, width: float) -> Iterator[tuple[float, Element, int]]:
    """Yield each legend entry with its x position and row. The page's legend is a list."""
    x, row = 0.0, 0
    for item in ElementTree.fromstring(legend) if legend else ():
        words = "".join(item.itertext())
        needed = 34 + svg.width_of(words) + 18
        if x and x + needed > width:
            x, row = 0.0, row + 1
        group = _element("g")
        group.extend([_in_namespace(each) for swatch in item for each in swatch])
        label = _element("text", x=34, y=11)
        label.set("class", "legend-label")
        label.text = words
        group.append(label)
        yield x, group, row
        x += needed


def _in_namespace(element: Element) -> Element:
    for each in element.iter():
        each.tag = f"{SVG}{each.tag}"
    return element


def _element(name: str, **attributes: str | float) -> Element:
    written = {
        key: each if isinstance(each, str) else svg.number(each) for key, each in attributes.items()
    }
    return Element(f"{SVG}{name}", written)


def _textures(kinds: set[str]) -> Element:
    defs = _element("defs")
    for kind in (kind for kind in LEGEND if kind in kinds):
        period, degrees, stripe = STRIPES[LEGEND[kind][1]]
        pattern = _element("pattern", id=f"paint-{kind}", width=period, height=period)
        pattern.set("patternUnits", "userSpaceOnUse")
        pattern.set("patternTransform", f"rotate({degrees})")
        ground = _element("rect", width=period, height=period)
        ground.set("class", f"tone-{kind}")
        pattern.append(ground)
        if stripe:
            path = _element("path", d=stripe)
            path.set("class", f"stripe stripe-{kind}")
            pattern.append(path)
        defs.append(pattern)
    return defs


def write_figure(path: Path, text: str | bytes) -> None:
    """Write a figure. Unlike a report, it replaces an older one: it can always be drawn again."""
    with refusing(f"{path} cannot be written", fix="a file in a folder that exists"):
        path.write_bytes(text.encode() if isinstance(text, str) else text)


def as_png(drawing: str) -> bytes:
    """Render an SVG file with Chromium, at twice its size."""
    program = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if program is None:
        raise ParalabError(
            "A PNG needs Chromium or Chrome, and neither is on the PATH.",
            fix="--svg FILE, or install chromium",
        )
    root = ElementTree.fromstring(drawing)
    width, height = (round(float(root.get(name, "0"))) for name in ("width", "height"))
    with tempfile.TemporaryDirectory(prefix="paralab-") as folder:
        page, image = Path(folder, "figure.html"), Path(folder, "figure.png")
        style = "<style>body { margin: 0 } svg { display: block }</style>"
        page.write_text(f"<!DOCTYPE html><meta charset=utf-8>{style}{drawing}", encoding="utf-8")
        command = [program, "--headless", "--disable-gpu", "--hide-scrollbars"]
        command += ["--force-device-scale-factor=2", f"--window-size={width},{height}"]
        command += [f"--screenshot={image}", f"--user-data-dir={folder}/profile"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.append("--no-sandbox")  # Chromium's sandbox does not run as root
        try:
            subprocess.run(
                [*command, page.as_uri()], capture_output=True, timeout=SECONDS, check=True
            )
            return image.read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            raise ParalabError(
                f"{program} could not draw the PNG: {error}.", fix="--svg FILE"
            ) from error
