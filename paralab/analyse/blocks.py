"""Plain data types for everything that a page or a terminal shows. A document has sections, and a
section has blocks: tables, answers, and charts.

An analysis creates a `Document`, which paralab renders in the terminal, as Markdown, or as an HTML
page. Times are in seconds, sizes in bytes. An unknown number is None, and the text next to it says
why.
"""

from typing import Any, TypeVar

import msgspec

from paralab.record.types import Record

B = TypeVar("B")
# The numbers behind a sentence, keyed by name. Each sentence defines its own names, and a value can
# have any JSON type.
Evidence = dict[str, Any]


class _Block(Record, frozen=True, tag_field="block", tag=str.lower):
    """In JSON, the `block` field names the kind of block: `table`, `bars`, …"""


class Cell(Record, frozen=True):
    """A table cell: its text and the number behind it. A measured number comes with a spread,
    either p10 to p90 or a confidence interval. A number without a spread is exact, such as a count
    or a split."""

    text: str
    value: Any = None
    low: float | None = None
    high: float | None = None


class Table(_Block, frozen=True):
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


class Answer(_Block, frozen=True):
    """A question, its answer, and their numbers. Only yes-or-no questions have a `verdict`."""

    question: str
    text: str
    evidence: Evidence
    verdict: bool | None = None
    # A correct answer contains a word from each entry, such as "backward|gradient".
    terms: tuple[str, ...] = ()
    choice: str | None = None  # for a which-one question: the alternative that the answer chooses
    options: tuple[str, ...] = ()  # the alternatives, with aliases: "DDP|DistributedDataParallel"
    undecided: bool = False  # True if the timings are too noisy for an answer
    prediction: str = ""  # the student's prediction before measuring


class Bar(Record, frozen=True):
    label: str
    value: float | None
    low: float | None = None  # error bar limits
    high: float | None = None
    text: str = ""  # text next to the bar


class Bars(_Block, frozen=True):
    """Bars with error bars, and a line at `reference` (1.0 means as fast as one device)."""

    title: str
    bars: tuple[Bar, ...]
    unit: str
    reference: float | None = None
    note: str = ""


class ShareRow(Record, frozen=True):
    label: str
    shares: tuple[float, ...]  # one share for each kind of work


class Shares(_Block, frozen=True):
    """One stacked bar for each row. Its parts add up to 1."""

    title: str
    kinds: tuple[str, ...]  # forward, backward, …
    rows: tuple[ShareRow, ...]
    note: str = ""


class Group(Record, frozen=True):
    label: str
    values: tuple[float, ...]


class Distribution(_Block, frozen=True):
    """A dot for each value, with the median and quartiles. Each group has its own row."""

    title: str
    groups: tuple[Group, ...]
    unit: str
    note: str = ""


class Span(Record, frozen=True):
    """A span on a timeline lane. `exposed` means that the device is waiting for communication."""

    lane: int
    kind: str  # forward, backward, all_reduce, optimizer, wait, data, scatter, replicate, …
    label: str
    start: float
    end: float
    exposed: bool = False
    details: Evidence = msgspec.field(default_factory=dict)


class Timeline(_Block, frozen=True):
    """Lanes (rank 0 · cpu:0, rank 0 · communication, …) on one zoomable time axis."""

    title: str
    lanes: tuple[str, ...]
    spans: tuple[Span, ...]
    steps: tuple[tuple[int, float, float], ...]  # (step, start, end)
    note: str = ""


class Part(Record, frozen=True):
    label: str
    pieces: tuple[int, ...]  # samples per pass or micro-batch; they add up to this device's samples


class Split(_Block, frozen=True):
    """A batch split over the devices, drawn to scale."""

    title: str
    total: int
    parts: tuple[Part, ...]
    note: str = ""


class Line(Record, frozen=True):
    label: str
    points: tuple[tuple[float, float], ...]
    low: tuple[float, ...] = ()  # the lower edge of the band around the line, if it has one
    high: tuple[float, ...] = ()


class Lines(_Block, frozen=True):
    """Curves that share an x axis: losses, load, memory, or step time by bucket size."""

    title: str
    lines: tuple[Line, ...]
    x: str
    y: str
    y_unit: str  # "seconds", "bytes", "share", "number"
    log_x: bool = False
    note: str = ""


class Slot(Record, frozen=True):
    """One cell of a pipeline schedule: a forward or backward pass of a micro-batch on a stage."""

    stage: int
    micro: int
    backward: bool
    start: float
    end: float
    part: int = 0  # the index of the model part, if the stage has multiple parts
    weights: bool = False  # the half of a backward pass that computes weight gradients

    @property
    def kind(self) -> str:
        return "weights" if self.weights else "backward" if self.backward else "forward"


class Schedule(_Block, frozen=True):
    """The measured and the ideal pipeline schedule, one row per stage. Gaps are the bubble."""

    title: str
    stages: tuple[str, ...]
    measured: tuple[Slot, ...]
    ideal: tuple[Slot, ...]
    measured_bubble: float
    ideal_bubble: float
    note: str = ""
    step: int | None = None  # the step that `measured` shows


class Control(Record, frozen=True):
    """A slider from `low` to `high`, or a choice. `value` is its initial value."""

    name: str
    label: str
    value: int | str
    low: int = 0
    high: int = 0
    choices: tuple[str, ...] = ()


class Explorable(_Block, frozen=True):
    """A figure with sliders that start at this run's values. `figure` names the function in
    paralab/show/explore.py that computes it from the sliders and the measured `constants`."""

    title: str
    figure: str
    controls: tuple[Control, ...]
    constants: Evidence
    formula: str
    note: str = ""


Chart = Bars | Shares | Distribution | Timeline | Split | Lines | Schedule
Block = Table | Answer | Chart | Explorable


class Section(Record, frozen=True):
    title: str
    blocks: tuple[Block, ...]
    text: str = ""

    def of(self, kind: type[B]) -> list[B]:
        """Return the blocks of one type."""
        return [block for block in self.blocks if isinstance(block, kind)]


class Finding(Record, frozen=True):
    """A verdict in one sentence. `kind` is fastest, cost, limit, next, warning, or same."""

    kind: str
    text: str
    evidence: Evidence


class Document(Record, frozen=True):
    title: str
    subtitle: str
    findings: tuple[Finding, ...]
    sections: tuple[Section, ...]
    # everything that the numbers depend on: the machine, the versions, and the command
    facts: tuple[tuple[str, str], ...] = ()
    run_folder: str | None = None
    explore: tuple[Section, ...] = ()  # figures with sliders, which only the page can show
    configuration: str = ""  # if there is only one

    @property
    def page_sections(self) -> tuple[Section, ...]:
        return (*self.sections, *self.explore)
