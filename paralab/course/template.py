"""Fill a practical's sheet from a run, or leave it blank for students.

A sheet is a Markdown template (templates/*.md.j2) that a teacher can edit or translate. It uses
these calls:

    {% call part(3, "Compare", needs=["single", "dp2"]) %}      a part and its configurations
    {{ table("Title", ["single", "dp2"], ["step time"]) }}      a row per configuration
    {% call answer("a) Is it faster?", verdict=…) %}            a question and its answer

judge.py grades an answer by the first of these that the template gives: `verdict` (yes or no),
`choice` with its `options`, `terms`, or `numbers`.

Configurations are variables (`dp2.step_seconds.median`), tables.py lists the columns, and the
filters below format numbers. On a blank sheet, each value is `BLANK`, which prints as an empty
string.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from msgspec.structs import replace

from paralab.analyse import figures
from paralab.analyse.blocks import Answer, Block, Section, Table
from paralab.analyse.confidence import FEWEST
from paralab.analyse.phrases import capital
from paralab.course import measurements, tables
from paralab.course.configurations import LABELS
from paralab.course.measurements import Measurements
from paralab.errors import UsageError

DRAW: Mapping[str, Callable[[Measurements, str], Block | None]] = {
    "split": lambda lab, key: figures.split(lab.rows[key].batch, lab.rows[key].ranks),
    "load": lambda lab, key: figures.load_lines(lab.recordings(key), "Load over time"),
    "timeline": lambda lab, key: figures.timeline(lab.recordings(key)[-1]),
    "schedule": lambda lab, key: figures.schedule(lab.recordings(key)[-1]),
}


class Blank(jinja2.ChainableUndefined):
    """An unknown value. It is falsy and prints nothing. An expression that uses it is unknown."""

    def _blank(self, *arguments: Any, **options: Any) -> Any:
        return self

    __call__ = _blank
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _blank
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = _blank

    def _no(self, *other: Any) -> bool:
        return False

    __lt__ = __gt__ = __le__ = __ge__ = _no  # type: ignore[assignment]


BLANK = Blank()
Keys = Sequence[str]


@dataclass
class Sheet:
    """The parts, tables, and answers that a template adds while it renders."""

    lab: Measurements | None  # None for a blank sheet
    parts: Sequence[int] | None = None  # None for all parts
    title: str = ""
    sections: list[Section] = field(default_factory=list)
    needs: dict[int, tuple[str, ...]] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)

    def set_title(self, text: str) -> str:
        self.title = text
        return ""

    def part(
        self, number: int, title: str, needs: Keys, likes: Keys = (), *, caller: Callable[[], str]
    ) -> str:
        """Add one part. If a configuration that the part needs is missing, say why instead."""
        self.needs[number] = (*needs, *likes)
        if self.parts is not None and number not in self.parts:
            return ""

        self.blocks = []
        missing = [key for key in needs if self.lab and key not in self.lab.rows]
        if self.lab and missing:
            reasons = "; ".join(f"{LABELS[key]}: {self.lab.why_not(key)}" for key in missing)
            text = f"Not measured. {reasons}"
        else:
            text = _one_space(caller())
        self.sections.append(Section(f"Part {number}: {title}", tuple(self.blocks), text))
        return ""

    def answer(
        self,
        question: str,
        verdict: Any = BLANK,
        numbers: Mapping[str, Any] | None = None,
        terms: Sequence[str] = (),
        choice: Any = BLANK,
        options: Sequence[str] = (),
        *,
        caller: Callable[[], str],
    ) -> str:
        """Add a question. A verdict of None or an empty choice means that the timings cannot
        tell. On a blank sheet, the answer is not evaluated at all."""
        if self.lab is None:
            self.blocks.append(Answer(question, "", {}, prediction=" "))
            return ""
        known = {name: value for name, value in (numbers or {}).items() if value is not BLANK}
        undecided, choice = verdict is None or choice == "", choice or None
        verdict = None if verdict is BLANK else verdict
        noise = "few rounds" if self.lab.comparison.rounds < FEWEST else "noisy"
        first = f"Too {noise} to tell" if undecided else choice
        text = _one_space(f"{capital(first)}. {caller()}" if first else caller())
        key = (verdict, tuple(terms), choice, tuple(options), undecided)
        self.blocks.append(Answer(question, text, known, *key))
        return ""

    def table(self, make: Callable[..., Table]) -> Callable[..., str]:
        def add(*arguments: Any, **options: Any) -> str:
            table = make(self.lab, *arguments, **options)
            for block in self.blocks:  # do not repeat a note within a part
                if isinstance(block, Table) and block.note:
                    table = replace(table, note=table.note.replace(block.note, "").strip())
            if table.rows:
                self.blocks.append(table)
            return ""

        return add

    def figures(self, kind: str, keys: Keys) -> str:
        if self.lab:
            pictures = [DRAW[kind](self.lab, key) for key in keys if self.lab.recordings(key)]
            self.blocks += [picture for picture in pictures if picture]
        return ""


def fill(name: str, lab: Measurements | None, parts: Sequence[int] | None) -> Sheet:
    """Render templates/NAME.md.j2 with measurements, or blank."""
    sheet = Sheet(lab, parts)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("paralab.course", "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # the output is Markdown; show/markdown.py and show/page.py escape it
    )
    environment.filters |= {key: _or_blank(made) for key, made in measurements.FILTERS.items()}
    names: dict[str, Any] = {
        "title": sheet.set_title,
        **{name: getattr(sheet, name) for name in ("part", "answer", "figures")},
        **{key: sheet.table(make) for key, make in tables.TABLES.items()},
        **{key: _or_blank(made, lab) for key, made in measurements.FUNCTIONS.items()},
    }
    try:
        template = environment.get_template(f"{name}.md.j2")
        rows = {key: lab.rows.get(key, BLANK) if lab else BLANK for key in LABELS}
        template.render(**names, **rows)
    except jinja2.TemplateError as error:
        raise UsageError(f"The template {name}.md.j2 is broken: {error}.") from error
    return sheet


def _or_blank(make: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """Wrap a filter or function. It returns BLANK if a value is unknown or its configuration did
    not run here."""

    def call(*arguments: Any) -> Any:
        if any(argument is BLANK or argument is None for argument in (*first, *arguments)):
            return BLANK
        try:
            made = make(*first, *arguments)
        except KeyError:  # this configuration did not run here
            return BLANK
        return BLANK if made is None else made

    return call


def _one_space(text: str) -> str:
    return " ".join(text.split())
