"""Export one chart of a page as a standalone SVG or PNG file, for a report or a thesis."""

import os
import re
import shutil
import subprocess
import tempfile
from html import escape
from pathlib import Path
from xml.etree import ElementTree

from msgspec.structs import replace

from paralab.analyse import blocks
from paralab.analyse.blocks import Chart, Document
from paralab.analyse.phrases import uncapital
from paralab.errors import ParalabError, UsageError, refusing, unknown
from paralab.show import svg
from paralab.show.chart_timeline import draw_timeline, timeline_legend
from paralab.show.page import DRAW, page_environment
from paralab.show.palette import Legend
from paralab.show.svg_style import SVG, color, set_attributes
from paralab.show.visible import visible

FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
MARGIN, TITLE, LEGEND_ROW = 16, 28, 22  # px
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60  # how long Chromium may take

ElementTree.register_namespace("", SVG.strip("{}"))


def find_figure(document: Document, name: str) -> Chart:
    """Return the chart with this name, whose title names the configuration. The error lists the
    names in this document."""
    named = name_figures(document)
    if name in named:
        block, own = named[name], document.configuration
        return replace(block, title=f"{own}: {uncapital(block.title)}") if own else block
    if not named:
        raise UsageError(f"There is no figure {name!r}: {document.title} has no charts.")
    several = [each for each in named if each.startswith(f"{name}-")]
    if several:
        raise UsageError(f"There are multiple figures {name!r}.", fix=", ".join(several))
    raise unknown("figure", name, named)


def name_figures(document: Document) -> dict[str, Chart]:
    """Return all charts by name: `speed-up`, `timeline`. If multiple configurations have the same
    chart, its name ends with the configuration: `timeline-ddp-x2`."""
    blocks = [block for section in document.sections for block in section.blocks]
    charts = [(*_name_parts(block), block) for block in blocks if isinstance(block, Chart)]
    kinds = [kind for kind, _, _ in charts]
    named: dict[str, Chart] = {}
    for kind, configuration, block in charts:
        name = kind if kinds.count(kind) == 1 else f"{kind}-{_slug(configuration)}".rstrip("-")
        alike = sum(bool(re.fullmatch(rf"{re.escape(name)}(-\d+)?", each)) for each in named)
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
    """Return a complete SVG file: background, title, legend, and chart, without a style sheet."""
    drawn, legend = _draw(block)
    if "<svg" not in drawn:
        raise UsageError(f"The figure {block.title!r} has nothing to draw: it was not measured.")
    chart = ElementTree.fromstring(visible(drawn))
    width, height = map(float, chart.get("viewBox", "").split()[2:])
    for element in chart.iter():  # a percentage would refer to the whole file
        if element.get("width") == "100%":
            element.set("width", svg.number(width))
    top, entries = _draw_legend(legend, width)

    size = [svg.number(each) for each in (width + 2 * MARGIN, top + height + MARGIN)]
    ink: dict[str, svg.Attribute] = {"x": MARGIN, "y": MARGIN + 12, "fill": color("ink", theme)}
    frame = svg.element(
        "svg",
        _textures({*re.findall(r"url\(#paint-([\w-]+)\)", f"{drawn}{legend}")}),
        svg.element("rect", width="100%", height="100%", fill=color("paper", theme)),
        svg.element("text", escape(block.title), **ink, font_size=16, font_weight=600),
        *entries,
        xmlns=SVG.strip("{}"),
        width=size[0],
        height=size[1],
        viewBox=f"0 0 {' '.join(size)}",
        role="img",
        font_family=FONT,
    )
    root = ElementTree.fromstring(visible(frame))
    for place, name in enumerate(("title", "desc")):  # the text alternative
        [found] = chart.findall(f"{SVG}{name}")
        chart.remove(found)
        root.insert(place, found)
    shift = f"translate({MARGIN} {svg.number(top)})"
    ElementTree.SubElement(root, f"{SVG}g", transform=shift).extend(list(chart))

    set_attributes(root, theme)
    for element in root.iter():
        for name in [name for name in element.attrib if name.startswith(("data-", "aria-"))]:
            del element.attrib[name]
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=False) + "\n"


def _draw(block: Chart) -> tuple[str, Legend]:
    if isinstance(block, blocks.Timeline):
        return draw_timeline(block, "figure"), timeline_legend(block)
    draw, legend = DRAW[type(block)]
    return draw(block, "figure", svg.WIDE), legend(block)


def _draw_legend(legend: Legend, width: float) -> tuple[float, list[str]]:
    """Draw the entries in rows. Return where the chart begins, and the entries."""
    x, y, drawn = 0.0, float(MARGIN + TITLE), []
    for swatch, words in legend:
        needed = 34 + svg.width_of(words) + 18
        if x and x + needed > width:
            x, y = 0.0, y + LEGEND_ROW
        label = svg.element("text", escape(words), class_="legend-label", x=34, y=11)
        place = f"translate({svg.number(MARGIN + x)} {svg.number(y)})"
        drawn.append(svg.element("g", swatch, label, transform=place))
        x += needed
    return y + (LEGEND_ROW + 8 if drawn else 0), drawn


def _textures(kinds: set[str]) -> str:
    paints = page_environment("show").get_template("paints.html.j2").render()
    patterns = re.findall(r'(<pattern id="paint-([\w-]+)".*?</pattern>)', paints)
    return svg.element("defs", *(pattern for pattern, kind in patterns if kind in kinds))


def write_figure(path: Path, text: str | bytes) -> None:
    """Write a figure. Unlike a report, a figure may overwrite an older file, because paralab can
    always draw it again."""
    with refusing(f"{path} cannot be written", fix="a file in an existing folder"):
        path.write_bytes(text.encode() if isinstance(text, str) else text)


def as_png(drawing: str) -> bytes:
    """Render an SVG file with Chromium, at twice its size."""
    program = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if program is None:
        problem = "A PNG needs Chromium or Chrome, and neither is on the PATH."
        raise ParalabError(problem, fix="--svg FILE, or install chromium")
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
        command.append(page.as_uri())
        try:
            subprocess.run(command, capture_output=True, timeout=SECONDS, check=True)
            return image.read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            problem = f"{program} could not draw the PNG: {error}."
            raise ParalabError(problem, fix="--svg FILE") from error
