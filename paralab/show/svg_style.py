"""Turn the page's style sheet into SVG attributes, for a drawing that is used outside the page.

Word, Inkscape, and LaTeX's converters read neither CSS variables nor light-dark(). So each element
gets its final colors as plain attributes. The style sheet remains the only place that defines them.
"""

import re
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from xml.etree.ElementTree import Element

THEMES = ("light", "dark")
PROPERTIES = {
    *("fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray"),
    *("stroke-linecap", "stroke-linejoin", "opacity", "font-size", "font-weight", "font-style"),
    "paint-order",
}
SVG = "{http://www.w3.org/2000/svg}"
# The selectors that charts need: `.bar`, `.span.is-exposed`, `svg .tick`, `svg text`.
SELECTOR = re.compile(r"(svg )?(text|(?:\.[\w-]+)+)")
TRANSLUCENT = re.compile(r"rgb\((\d+) (\d+) (\d+) / ([\d.]+)\)")
MIX = re.compile(r"color-mix\(in srgb, (#\w{6}) (\d+)%, (#\w{6})\)")


@dataclass(frozen=True)
class Rule:
    tag: str  # empty for any element
    classes: frozenset[str]
    declarations: dict[str, str]
    weight: tuple[int, int]  # CSS specificity: classes, then tags

    def matches(self, tag: str, classes: frozenset[str]) -> bool:
        return self.classes <= classes and self.tag in ("", tag)


@cache
def _sheet() -> tuple[dict[str, str], list[Rule]]:
    """Return the variables of the page, and the rules for charts, in order of precedence."""
    text = (files("paralab.show") / "page.css").read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    variables: dict[str, str] = {}
    rules = []
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", text):
        pairs = (line.split(":", 1) for line in body.split(";") if ":" in line)
        declarations = {name.strip(): value.strip() for name, value in pairs}
        for selector in map(str.strip, selectors.split(",")):
            if selector == ":root":
                variables |= {k: v for k, v in declarations.items() if k not in variables}
            elif found := SELECTOR.fullmatch(selector):
                classes = frozenset(re.findall(r"\.([\w-]+)", found[2]))
                tag = "" if classes else found[2]
                weight = (len(classes), bool(found[1]) + bool(tag))
                rules.append(Rule(tag, classes, declarations, weight))
    return variables, sorted(rules, key=lambda rule: rule.weight)


def color(name: str, theme: str) -> str:
    """Return a color of the page: `color("paper", "dark")`."""
    return _resolve(f"var(--{name})", _sheet()[0], theme)


def set_attributes(root: Element, theme: str) -> None:
    """Replace the classes in a drawing with attributes, in place."""
    _style(root, theme)
    for parent in list(root.iter()):
        for place, child in reversed(list(enumerate(parent))):
            if child.tag == f"{SVG}text" and child.attrib.pop("paint-order", ""):
                _split_halo(parent, place, child)


def _style(element: Element, theme: str) -> None:
    variables, rules = _sheet()
    classes = frozenset((element.attrib.pop("class", None) or "").split())
    tag = element.tag.removeprefix(SVG)
    declared: dict[str, str] = {}
    for rule in rules:
        if rule.matches(tag, classes):
            declared |= rule.declarations
    own = variables | {k: v for k, v in declared.items() if k.startswith("--")}
    for name, value in declared.items():
        if name in PROPERTIES and (name not in ("fill", "stroke") or name not in element.attrib):
            _set(element, name, _resolve(value, own, theme))
    for child in element:
        _style(child, theme)


def _resolve(value: str, variables: dict[str, str], theme: str) -> str:
    while found := re.search(r"var\((--[\w-]+)\)", value):
        value = value.replace(found[0], variables[found[1]])
    while found := re.search(
        r"light-dark\(((?:[^(),]|\([^()]*\))+), ((?:[^()]|\([^()]*\))+)\)", value
    ):
        value = value.replace(found[0], found[1 + THEMES.index(theme)])
    if found := MIX.search(value):
        value = _mix(found[1], found[3], int(found[2]) / 100)
    return value


def _mix(one: str, other: str, share: float) -> str:
    parts = ((int(one[n : n + 2], 16), int(other[n : n + 2], 16)) for n in (1, 3, 5))
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in parts)


def _set(element: Element, name: str, value: str) -> None:
    if found := TRANSLUCENT.fullmatch(value):
        element.set(name, "#" + "".join(f"{int(part):02x}" for part in found.groups()[:3]))
        element.set(f"{name}-opacity", found[4])
    else:
        element.set(name, value.removesuffix("px"))


def _split_halo(parent: Element, place: int, text: Element) -> None:
    """Draw a text's outline as a second text below it, as many programs ignore `paint-order`."""
    halo = deepcopy(text)
    halo.set("fill", text.get("stroke", "none"))
    for name in [name for name in text.attrib if name.startswith("stroke")]:
        del text.attrib[name]
    parent.insert(place, halo)
